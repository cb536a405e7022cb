"""One case of a sweep: an attention setting, the sampler's settings, a seed and a prompt.

A setting is written flat, as in ``{algorithm: sol_attn, tau: 1.5, steps: 8}``: every field name
belongs to one part only, the sparse algorithm, the number formats or the sampler.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ValidationError, field_validator

from workbench.config import (
    AttentionConfig,
    QuantAttentionConfig,
    SkipSoftmaxConfig,
    SolAttnConfig,
    VideoSparseAttentionConfig,
    faults,
)
from workbench.config.fields import Integer, Number, Strict
from workbench.paths import BUNDLED_WEIGHTS, VSA_WEIGHTS, data_dir

if TYPE_CHECKING:
    from workbench.sample.settings import SampleSettings

SPARSE: dict[str, type[Strict]] = {
    "sol_attn": SolAttnConfig,
    "skip_softmax": SkipSoftmaxConfig,
    "vsa": VideoSparseAttentionConfig,
}
# Without a sparse algorithm: the policy with sparsity off, or quantised operands alone.
ALGORITHMS = ("dense", *SPARSE, "quant")
CONTROL = "dense_control"
BUNDLED = {"base": BUNDLED_WEIGHTS, "vsa": VSA_WEIGHTS}
# Always part of a setting's name, at its default too.
MAIN_FIELDS = {"tau", "threshold_scale_factor", "target_sparsity", "vsa_sparsity", "qk_dtype"}


class Sampling(Strict):
    """How the videos of a case are sampled; its dense twin is sampled alike.

    Attributes:
        grid: tokens along (t, h, w).
        steps: model calls per video.
        guidance: classifier-free guidance, 1 = none.
        shift: of the schedule.
        impl: implementation of sparse calls.
        device: ``cpu``, ``cuda`` or ``auto``.
        dtype: of the model.
        weights: ``base`` or ``vsa`` for the bundled ones, or the path of a .safetensors file.
    """

    grid: tuple[Integer, Integer, Integer] = (8, 16, 16)
    steps: Integer = 8
    guidance: Number = 1.0
    shift: Number = 3.0
    impl: str = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["float32", "bfloat16"] = "float32"
    weights: str = "base"

    @field_validator("grid", "steps")
    @classmethod
    def _positive(cls, value: Any) -> Any:
        if min(value if isinstance(value, tuple) else (value,)) < 1:
            raise ValueError("must be at least 1")
        return value

    @property
    def weights_file(self) -> Path:
        """Where the weights are."""
        name = BUNDLED.get(self.weights)
        return Path(self.weights) if name is None else data_dir() / name

    def settings(self, seed: int, prompt: str) -> SampleSettings:
        """As ``workbench sample`` takes them.

        Raises:
            ValueError, TypeError: a value is not allowed.
        """
        # Brings torch, which reading does not need.
        from workbench.sample.settings import SampleSettings

        names = ("grid", "steps", "guidance", "shift", "impl")
        fields = {name: getattr(self, name) for name in names}
        return SampleSettings(label=prompt, seeds=(seed,), **fields)


@dataclass(frozen=True)
class Case:
    """What one process runs.

    Attributes:
        setting: its name, equal for all seeds and prompts.
        attention: what the policy runs; ``None`` is the control, dense against dense.
    """

    setting: str
    attention: AttentionConfig | None
    sampling: Sampling
    seed: int
    prompt: str

    @property
    def control(self) -> bool:
        """Whether it is dense attention by a second exact implementation."""
        return self.attention is None

    @cached_property
    def key(self) -> str:
        """16 hex digits that follow from what runs; names and the order of fields do not count."""
        content = {**self.content(), "setting": None}
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def content(self) -> dict[str, Any]:
        """Everything, with all defaults written out, ready for JSON."""
        attention = None if self.attention is None else self.attention.model_dump(mode="json")
        return {
            "setting": self.setting,
            "attention": attention,
            "sampling": self.sampling.model_dump(mode="json"),
            "seed": self.seed,
            "prompt": self.prompt,
        }

    @classmethod
    def from_content(cls, content: Mapping[str, Any]) -> Case:
        """The case that :meth:`content` came from."""
        attention = content["attention"]
        return cls(
            content["setting"],
            None if attention is None else AttentionConfig.model_validate(attention),
            Sampling.model_validate(content["sampling"]),
            content["seed"],
            content["prompt"],
        )


def flat(attention: AttentionConfig | None) -> dict[str, Any]:
    """Fields of a configuration in one mapping, ``algorithm`` first; empty for the control."""
    if attention is None:
        return {}
    sparse, quant = attention.sparse_attention_config, attention.quant_attention_config
    fields: dict[str, Any] = {"algorithm": "dense" if quant is None else "quant"}
    for part in (sparse, quant):
        fields |= {} if part is None else part.model_dump(mode="json")
    return fields


def read_setting(
    fields: Mapping[str, Any], sampling: Mapping[str, Any]
) -> tuple[AttentionConfig, Sampling]:
    """A flat setting as its two parts.

    Args:
        fields: ``algorithm``, the fields of its configuration, and of the sampler.
        sampling: the sampler's other fields.

    Raises:
        ValueError: one line for each fault.
    """
    algorithm = fields.get("algorithm")
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm={algorithm!r}: must be one of {', '.join(ALGORITHMS)}")
    own = {name: fields[name] for name in fields if name in Sampling.model_fields}
    quant = {name: fields[name] for name in fields if name in QuantAttentionConfig.model_fields}
    rest = {name: fields[name] for name in fields if name not in {**own, **quant, "algorithm": 0}}
    if algorithm not in SPARSE and rest:
        name = next(iter(rest))
        raise ValueError(f"{name}={rest[name]!r}: algorithm={algorithm!r} would not look at it")
    if algorithm == "dense" and quant:
        raise ValueError(f"{next(iter(quant))}: dense is not quantised; use algorithm: quant")
    parts: dict[str, Any] = {}
    if algorithm in SPARSE:
        parts["sparse_attention_config"] = {"algorithm": algorithm, **rest}
    if quant or algorithm == "quant":
        parts["quant_attention_config"] = quant
    return valid(AttentionConfig, parts), valid(Sampling, {**sampling, **own})


def name_of(
    attention: AttentionConfig | None, sampling: Sampling, varied: Collection[str] = ()
) -> str:
    """Name of a setting: its algorithm, main knob, and what differs from the defaults.

    Args:
        varied: fields of the sampler that the sweep varies, and that a name has to tell.
    """
    words = [CONTROL if attention is None else str(flat(attention)["algorithm"])]
    if attention is not None:
        for part in (attention.sparse_attention_config, attention.quant_attention_config):
            words += [] if part is None else _telling(part)
    words += [f"{name}={_short(value)}" for name, value in sampling if name in varied]
    return " ".join(words)


def _telling(part: BaseModel) -> list[str]:
    """``name=value`` of the main fields, and of others that are not at their default."""
    return [
        f"{name}={_short(value)}"
        for name, value in part
        if name != "algorithm" and value is not None
        if name in MAIN_FIELDS or value != type(part).model_fields[name].default
    ]


def _short(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def valid(model: type[Any], fields: Mapping[str, Any]) -> Any:
    """A model of those fields; ValueError with a line for each fault."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise ValueError("\n".join(faults(error))) from error
