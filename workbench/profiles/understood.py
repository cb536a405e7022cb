"""What a profile means for a model, layer by layer, as it will be launched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from workbench.attention import SparseAttention
from workbench.attention.phase import dense_steps
from workbench.config.checkpoint import SkipCalibration, read_calibration
from workbench.profiles.profile import Profile
from workbench.profiles.video import VideoModel
from workbench.views.table import Table


@dataclass(frozen=True)
class LayerPlan:
    """One layer.

    Attributes:
        part: of the model, such as ``transformer_2``.
        layer, module: its number and the name of its self-attention.
        does: what its self-attention computes once the dense phase is over, with its knobs.
        dense_steps: how many steps of the schedule come before, in the dense phase.
    """

    part: str
    layer: int
    module: str
    does: str
    dense_steps: int


def understand(profile: Profile, model: VideoModel) -> list[LayerPlan]:
    """Every layer of every part of the model under the profile; nothing runs.

    Raises:
        ValueError, UnsupportedError: the model or the kernels here cannot honour the profile.
    """
    return [
        _plan(part, policy, layer, name, model)
        for part, policy in model.policies(profile).items()
        for layer, name in enumerate(model.module_names)
    ]


def _plan(
    part: str, policy: SparseAttention, layer: int, name: str, model: VideoModel
) -> LayerPlan:
    place = model.place
    steps = dense_steps(place.times or (), policy.cutoff)
    dense = 0 if _dense(policy, layer) else steps
    return LayerPlan(part, layer, name, does(policy, layer, place.keys), dense)


def does(policy: SparseAttention, layer: int, keys: int | None) -> str:
    """In words, from what the policy launches (:meth:`SparseAttention.graph_key`)."""
    knobs = dict(policy.graph_key())
    algorithm, formats = knobs["algorithm"], _formats(knobs)
    if layer in knobs.get("dense_layers", ()):
        return f"dense (dense_layers){formats}"
    if layer in knobs.get("ignored_layers", ()):
        return f"dense (ignored by the calibration){formats}"
    if algorithm == "sol_attn":
        tau = knobs["tau"][layer] if isinstance(knobs["tau"], tuple) else knobs["tau"]
        return f"sol_attn, tau {tau:g} {knobs['thresh_type']}"
    if algorithm == "skip_softmax" and "threshold_scale_factor" in knobs:
        factor = knobs["threshold_scale_factor"]
        ratio = "" if keys is None else f", lambda {factor / keys:.3g}"
        return f"skip_softmax, factor {factor:g}{ratio}{formats}"
    if algorithm == "vsa":
        coarse = "" if knobs["gate"] == "model" else ", no coarse branch"
        return f"vsa, sparsity {knobs['vsa_sparsity']:g}{coarse}"
    switched_off = " (skip_softmax is off)" if algorithm else ""
    return f"dense{switched_off}{formats}"


def understood_table(profile: Profile, model: VideoModel) -> Table:
    """A line for each run of layers that do the same, once where all parts of a model agree."""
    plans, steps = understand(profile, model), len(model.place.times or ())
    parts = list(dict.fromkeys(plan.part for plan in plans))
    agree = len({tuple(_what(p) for p in plans if p.part == part) for part in parts}) == 1
    shown = [plan for plan in plans if plan.part == parts[0]] if agree else plans
    runs = [list(run) for _, run in groupby(shown, key=lambda p: (p.part, *_what(p)))]
    rows = [
        (
            "" if agree else run[0].part,
            _numbers(run),
            _modules(run),
            run[0].does,
            _phase(run[0].dense_steps, steps),
        )
        for run in runs
    ]
    columns = ("part", "layers", "self-attention", "computes", "dense before")
    layers = f"{len(model.module_names)} layers"
    where = layers if len(parts) == 1 else f"{layers} of {' and '.join(parts)}"
    caption = f"{profile.name} ({profile.format}) on {where}"
    if agree:  # nothing to tell apart
        columns, rows = columns[1:], [row[1:] for row in rows]
    return Table(columns, rows, caption)


def remarks(profile: Profile, model: VideoModel) -> list[str]:
    """What else to know: notes of the file, and names that it ignores and the model lacks."""
    found = read_calibration(checkpoint_config=profile.calibration)
    patterns = () if found is None else found.ignore
    idle = [
        pattern
        for pattern in patterns
        if not any(SkipCalibration(ignore=(pattern,)).ignores(name) for name in model.module_names)
    ]
    notes = [f"ignore {pattern!r} names no self-attention of this model" for pattern in idle]
    return [*profile.notes, *notes]


def _what(plan: LayerPlan) -> tuple[str, int]:
    return plan.does, plan.dense_steps


def _dense(policy: SparseAttention, layer: int) -> bool:
    knobs = dict(policy.graph_key())
    return layer in (*knobs.get("dense_layers", ()), *knobs.get("ignored_layers", ()))


def _formats(knobs: dict[str, object]) -> str:
    recipe = knobs.get("recipe")
    if not isinstance(recipe, tuple):
        return ""
    return f", qk {recipe[0]}, v {recipe[1]}"


def _modules(run: Sequence[LayerPlan]) -> str:
    first, last = run[0].module, run[-1].module
    return first if len(run) == 1 else f"{first} to {last}"


def _numbers(run: Sequence[LayerPlan]) -> str:
    first, last = run[0].layer, run[-1].layer
    return f"{first}" if first == last else f"{first}-{last}"


def _phase(dense: int, steps: int) -> str:
    return "never" if dense == 0 else f"{dense} of {steps} steps"
