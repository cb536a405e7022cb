"""What a profile means for a model, layer by layer, as it will be launched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from workbench.attention import SparseAttention
from workbench.attention.phase import dense_steps
from workbench.profiles.profile import Profile
from workbench.profiles.video import VideoModel
from workbench.views.table import Table


@dataclass(frozen=True)
class LayerPlan:
    """One layer.

    Attributes:
        layer, module: its number and the name of its self-attention.
        does: what its self-attention computes once the dense phase is over, with its knobs.
        dense_steps: how many steps come before, in the dense phase.
    """

    layer: int
    module: str
    does: str
    dense_steps: int


def understand(profile: Profile, model: VideoModel) -> list[LayerPlan]:
    """Every layer of the model under the profile; nothing runs.

    Raises:
        ValueError, UnsupportedError: the model or the kernels here cannot honour the profile.
    """
    place, policy = model.place, model.policy(profile)
    phase = dense_steps(place.times or (), policy.cutoff)
    return [
        LayerPlan(
            layer, name, does(policy, layer, place.keys), 0 if _dense(policy, layer) else phase
        )
        for layer, name in enumerate(model.module_names)
    ]


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
    """A line for each run of layers that do the same."""
    plans, times = understand(profile, model), model.place.times or ()
    runs = [list(run) for _, run in groupby(plans, key=lambda p: (p.does, p.dense_steps))]
    rows = [
        (_numbers(run), run[0].module, run[0].does, _phase(run[0].dense_steps, len(times)))
        for run in runs
    ]
    caption = f"{profile.name} ({profile.format}) on {len(plans)} layers"
    return Table(("layers", "self-attention", "computes", "dense before"), rows, caption)


def _dense(policy: SparseAttention, layer: int) -> bool:
    knobs = dict(policy.graph_key())
    return layer in (*knobs.get("dense_layers", ()), *knobs.get("ignored_layers", ()))


def _formats(knobs: dict[str, object]) -> str:
    recipe = knobs.get("recipe")
    if not isinstance(recipe, tuple):
        return ""
    return f", qk {recipe[0]}, v {recipe[1]}"


def _numbers(run: Sequence[LayerPlan]) -> str:
    first, last = run[0].layer, run[-1].layer
    return f"{first}" if first == last else f"{first}-{last}"


def _phase(dense: int, steps: int) -> str:
    return "never" if dense == 0 else f"{dense} of {steps} steps"
