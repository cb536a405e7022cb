"""Which attention variants a sampling compares: from options and configuration files to a list.

Every list begins with the dense baseline and its control, a second exact implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from pydantic import ValidationError

from workbench.config import (
    AttentionConfig,
    QuantAttentionConfig,
    SkipSoftmaxConfig,
    SolAttnConfig,
    VideoSparseAttentionConfig,
    VisualGenConfig,
    dump_config,
    faults,
)

Role = Literal["baseline", "control", "policy"]
Weights = Literal["base", "vsa"]

BASELINE, CONTROL, VSA_BASELINE = "dense", "dense_control", "dense_vsa_weights"
TAU, FACTOR, SPARSITY, QK_DTYPE, CUTOFF = 1.0, 400.0, 0.875, "mxfp8", 0.9
# Which options each algorithm looks at. What does not compose with qk_dtype says so itself.
LOOKS_AT: dict[str, frozenset[str]] = {
    "dense": frozenset(),
    "sol_attn": frozenset({"tau", "cutoff", "dense_layers", "qk_dtype"}),
    "skip_softmax": frozenset({"threshold_scale_factor", "cutoff", "qk_dtype"}),
    "vsa": frozenset({"sparsity", "qk_dtype"}),
    "quant": frozenset({"qk_dtype"}),
}


@dataclass(frozen=True)
class Knobs:
    """Options of the command; ``None`` is the default of each mechanism.

    Attributes:
        algorithm: ``dense``, ``sol_attn``, ``skip_softmax``, ``vsa`` or ``quant``; ``None`` takes
            them all and their legal combinations.
        tau: Sol-Attn. threshold_scale_factor: SkipSoftmax, lambda * Sk. sparsity: VSA.
        qk_dtype: format of q and k: ``mxfp8``, ``nvfp4`` or ``bf16``; v is FP8 in all of them.
        cutoff: dense while the denoising time is at or above it.
        dense_layers: layers that stay dense.
    """

    algorithm: str | None = None
    tau: float | None = None
    threshold_scale_factor: float | None = None
    sparsity: float | None = None
    qk_dtype: str | None = None
    cutoff: float | None = None
    dense_layers: tuple[int, ...] | None = None

    def given(self) -> frozenset[str]:
        """Names of the options that were set, the algorithm aside."""
        names = (item.name for item in fields(self) if item.name != "algorithm")
        return frozenset(name for name in names if getattr(self, name) is not None)


@dataclass(frozen=True)
class Variant:
    """One way to run attention through a whole sampling.

    Attributes:
        name: unique; also the name of its folder.
        config: what the policy runs; ``None`` for the baselines and the control.
        role: ``baseline`` calls torch's attention without any policy, ``control`` computes the same
            block by block, ``policy`` runs ``config``.
        gate: for VSA: ``model`` takes the model's gate, ``zero`` leaves the coarse branch out.
        weights: which model: ``base``, or ``vsa`` fine-tuned with VSA.
        compared_with: name of the baseline that it is compared with.
        note: what a reader must know about it.
    """

    name: str
    config: AttentionConfig | None = None
    role: Role = "policy"
    gate: str = "model"
    weights: Weights = "base"
    compared_with: str = BASELINE
    note: str = ""

    @property
    def sparse(self) -> bool:
        """Whether the configuration asks for sparsity."""
        return self.config is not None and self.config.sparse_attention_config is not None

    @property
    def cutoff(self) -> float | None:
        """End of its dense phase."""
        sparse = None if self.config is None else self.config.sparse_attention_config
        return None if sparse is None else sparse.resolve_disabled_until_timestep()

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """Layers that its configuration keeps dense."""
        sparse = None if self.config is None else self.config.sparse_attention_config
        return (sparse.dense_layers or ()) if isinstance(sparse, SolAttnConfig) else ()

    def config_text(self) -> str:
        """Its configuration as YAML that `load_config` reads, with the note in a comment."""
        attention = self.config or AttentionConfig()
        lines = [f"{self.name} of workbench sample ({self.weights} weights)", self.note]
        if self.gate == "zero":
            lines.append('with gate="zero", which is no field of this schema')
        comments = "".join(f"# {line}\n" for line in lines if line)
        return comments + dump_config(VisualGenConfig(attention_config=attention))


def variants(
    knobs: Knobs,
    configs: Mapping[str, VisualGenConfig] | None = None,
    *,
    fine_tuned: bool = False,
) -> list[Variant]:
    """Baseline, control, and what was asked for.

    Args:
        knobs: with neither an algorithm nor configurations: all mechanisms.
        configs: configurations by name, for example of their files.
        fine_tuned: whether weights fine-tuned with VSA are there. VSA then runs on both models, and
            the fine-tuned one also gets a dense run of its own.

    Raises:
        ValueError: an option that nothing would look at, a value that its mechanism refuses, two
            variants of one name.
    """
    configs = configs or {}
    _check_used(knobs, only_files=bool(configs) and knobs.algorithm is None)
    try:
        found = [*_from_files(configs), *_from_knobs(knobs, bool(configs))]
    except ValidationError as error:
        raise ValueError("\n".join(faults(error))) from error
    found = [item for variant in found for item in _on_models(variant, fine_tuned)]
    # Runs of one model follow each other, its own baseline first.
    found.sort(key=lambda item: (item.weights == "vsa", item.role != "baseline"))
    first = [Variant(BASELINE, role="baseline"), Variant(CONTROL, role="control")]
    return _unique([*first, *found])


def _check_used(knobs: Knobs, *, only_files: bool) -> None:
    if knobs.algorithm is not None and knobs.algorithm not in LOOKS_AT:
        raise ValueError(f"algorithm={knobs.algorithm!r}: must be one of {', '.join(LOOKS_AT)}")
    known = [knobs.algorithm] if knobs.algorithm else list(LOOKS_AT)
    useful = frozenset() if only_files else frozenset().union(*(LOOKS_AT[name] for name in known))
    unused = sorted(knobs.given() - useful)
    if unused:
        where = "the configuration files" if only_files else f"algorithm={knobs.algorithm!r}"
        users = [name for name, options in LOOKS_AT.items() if unused[0] in options]
        raise ValueError(
            f"{unused[0]}={getattr(knobs, unused[0])!r}: {where} would not look at it; drop it, or "
            f"choose --algorithm {' or '.join(users)}"
        )


def _from_files(configs: Mapping[str, VisualGenConfig]) -> list[Variant]:
    return [Variant(name, config.attention_config) for name, config in configs.items()]


def _from_knobs(knobs: Knobs, files: bool) -> list[Variant]:
    if knobs.algorithm is not None:
        return MAKERS[knobs.algorithm](knobs)
    return [] if files else _everything(knobs)


def _everything(knobs: Knobs) -> list[Variant]:
    """Every mechanism, and what composes: a dense phase, quantised operands under SkipSoftmax."""
    found = [Variant("sol_attn", _attention(_sol(knobs)))]
    if knobs.cutoff is None and knobs.dense_layers is None:
        late = _sol(knobs, cutoff=CUTOFF)
        found.append(Variant("sol_attn_dense_start", _attention(late)))
    skip, quants = _skip(knobs), _formats(knobs)
    found.append(Variant("skip_softmax", _attention(skip)))
    found += [Variant(f"quant_{name}", _attention(None, name)) for name in quants]
    name = quants[0]
    found.append(Variant(f"skip_softmax_{name}", _attention(skip, name)))
    return [*found, Variant("vsa", _attention(_vsa(knobs)))]


def _one(name: str, sparse: Any, qk_dtype: str | None) -> list[Variant]:
    suffix = "" if qk_dtype is None else f"_{qk_dtype}"
    return [Variant(f"{name}{suffix}", _attention(sparse, qk_dtype))]


MAKERS: dict[str, Callable[[Knobs], list[Variant]]] = {
    "dense": lambda knobs: [],
    "sol_attn": lambda knobs: _one("sol_attn", _sol(knobs), knobs.qk_dtype),
    "skip_softmax": lambda knobs: _one("skip_softmax", _skip(knobs), knobs.qk_dtype),
    "vsa": lambda knobs: _one("vsa", _vsa(knobs), knobs.qk_dtype),
    "quant": lambda knobs: [
        Variant(f"quant_{name}", _attention(None, name)) for name in _formats(knobs)
    ],
}


def _sol(knobs: Knobs, cutoff: float | None = None) -> SolAttnConfig:
    return SolAttnConfig(
        tau=TAU if knobs.tau is None else knobs.tau,
        disabled_until_timestep=knobs.cutoff if cutoff is None else cutoff,
        dense_layers=knobs.dense_layers,
    )


def _skip(knobs: Knobs) -> SkipSoftmaxConfig:
    factor = knobs.threshold_scale_factor
    return SkipSoftmaxConfig(
        threshold_scale_factor=FACTOR if factor is None else factor,
        disabled_until_timestep=knobs.cutoff,
    )


def _vsa(knobs: Knobs) -> VideoSparseAttentionConfig:
    sparsity = SPARSITY if knobs.sparsity is None else knobs.sparsity
    return VideoSparseAttentionConfig(vsa_sparsity=sparsity)


def _formats(knobs: Knobs) -> tuple[str, ...]:
    return (QK_DTYPE, "nvfp4") if knobs.qk_dtype is None else (knobs.qk_dtype,)


def _attention(sparse: Any, qk_dtype: str | None = None) -> AttentionConfig:
    quant = (
        None if qk_dtype is None else QuantAttentionConfig.model_validate({"qk_dtype": qk_dtype})
    )
    return AttentionConfig(sparse_attention_config=sparse, quant_attention_config=quant)


def _on_models(variant: Variant, fine_tuned: bool) -> list[Variant]:
    """VSA on the model without a gate, and on the fine-tuned one where it is there."""
    attention = variant.config
    if attention is None or not isinstance(
        attention.sparse_attention_config, VideoSparseAttentionConfig
    ):
        return [variant]
    note = "training-free top-k: weights that never saw VSA, no coarse branch"
    name = f"{variant.name}_training_free" if fine_tuned else variant.name
    training_free = Variant(name, attention, gate="zero", note=note)
    if not fine_tuned:
        return [training_free]
    own = Variant(
        VSA_BASELINE, role="baseline", weights="vsa", note="its dense run has no coarse branch"
    )
    tuned = Variant(
        f"{variant.name}_fine_tuned",
        attention,
        weights="vsa",
        compared_with=VSA_BASELINE,
        note="weights and gate fine-tuned with VSA; compared with their own dense run",
    )
    return [training_free, own, tuned]


def _unique(found: Sequence[Variant]) -> list[Variant]:
    """By name; only the fine-tuned baseline may come several times, as one."""
    by_name: dict[str, Variant] = {}
    for variant in found:
        if by_name.setdefault(variant.name, variant) != variant:
            raise ValueError(f"{variant.name}: two variants have this name; rename the file")
    return list(by_name.values())
