"""A profile: what an exported file means for one model.

A file of a serving stack counts in steps, keys or blocks; a profile is read for a model and a
schedule that are known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workbench.config import (
    AttentionConfig,
    SkipSoftmaxConfig,
    VideoSparseAttentionConfig,
    VisualGenConfig,
)
from workbench.export import Deployment, comfyui, model_optimizer, read_profile, tensorrt_llm
from workbench.export import import_config as import_target
from workbench.export.documents import configuration, read_json
from workbench.export.files import errors_of
from workbench.export.targets import TARGETS

TAU_PROFILE = "tau_profile"
FORMATS = (*TARGETS, TAU_PROFILE)


@dataclass(frozen=True)
class Profile:
    """What a file asks of a model.

    Attributes:
        name: how it is called in tables, the stem of the file.
        format: a name of :data:`FORMATS`.
        config: for all layers.
        taus: Sol-Attn's tau of every layer, where the file gives one for each; else ``None``.
        calibration: config.json with SkipSoftmax's formula and its list of ignored modules;
            ``None`` without one.
        notes: what became of the numbers of the file.
    """

    name: str
    format: str
    config: AttentionConfig
    taus: tuple[float, ...] | None = None
    calibration: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)
    notes: tuple[str, ...] = ()

    @property
    def sparse(self) -> bool:
        """Whether it asks for sparsity."""
        return self.config.sparse_attention_config is not None

    @property
    def vsa(self) -> bool:
        """Whether it asks for VSA, the only mechanism that looks at a gate."""
        return isinstance(self.config.sparse_attention_config, VideoSparseAttentionConfig)

    def options(self, gate: str = "model") -> dict[str, Any]:
        """What :class:`workbench.attention.SparseAttention` takes besides the configuration.

        Args:
            gate: of VSA; another mechanism gets none.
        """
        found: dict[str, Any] = {"taus": self.taus, "checkpoint_config": self.calibration}
        if self.vsa:
            found["gate"] = gate
        return {name: value for name, value in found.items() if value is not None}


def read_file(
    path: Path,
    place: Deployment,
    *,
    format: str | None = None,
    calibration: Mapping[str, Any] | None = None,
) -> Profile:
    """Reads what ``workbench export`` wrote, for one model and schedule.

    Args:
        path: the file.
        place: times of the steps, keys of a call and layers of the model; all are needed.
        format: a name of :data:`FORMATS`; ``None`` recognises it.
        calibration: config.json of a checkpoint component, for a SkipSoftmax target and the modules
            that it ignores. A Model-Optimizer file is such a config.json itself and takes its
            place.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no known format, or something in it that cannot be applied, with the path.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; give a file that workbench export wrote")
    with errors_of(path):
        text = path.read_text(encoding="utf-8")
        return read_text(text, place, name=path.stem, format=format, calibration=calibration)


def read_text(
    text: str,
    place: Deployment,
    *,
    name: str = "profile",
    format: str | None = None,
    calibration: Mapping[str, Any] | None = None,
) -> Profile:
    """The same for a text; arguments and errors as of :func:`read_file`."""
    if format is not None and format not in FORMATS:
        raise ValueError(f"format={format!r}: must be one of {', '.join(FORMATS)}")
    chosen = format or recognise(text)
    if chosen == model_optimizer.NAME:
        calibration = read_json(text, chosen)
    config, taus, notes = READERS.get(chosen, _one_for_all)(chosen, text, place)
    _check_attention_alone(config, chosen)
    attention = config.attention_config
    if not isinstance(attention.sparse_attention_config, SkipSoftmaxConfig):
        calibration = None  # it would do nothing
    notes = (*notes, *_kernel_notes(attention))
    return Profile(name, chosen, attention, taus, calibration, notes)


def recognise(text: str) -> str:
    """The format of a text, by what only that format has.

    Raises:
        ValueError: none of them.
    """
    if not text.lstrip().startswith("{"):
        return tensorrt_llm.NAME if "attention_config" in text else _tau_profile_or_refuse(text)
    data = read_json(text, "the file", "give one that workbench export wrote")
    for name, keys in MARKS.items():
        if any(key in data for key in keys):
            return name
    found = ", ".join(map(str, data)) or "nothing"
    raise ValueError(f"holds {found}: no format of workbench export; name it with --from")


MARKS = {
    comfyui.NAME: ("class_type",),
    "vllm_omni": ("default", "per_role"),
    "sglang": ("attention_backend", "attention_backend_config", "skip_softmax_params"),
    model_optimizer.NAME: ("sparse_attention_config",),
    tensorrt_llm.NAME: ("attention_config",),
}
Read = tuple[VisualGenConfig, tuple[float, ...] | None, tuple[str, ...]]


def _tau_profile_or_refuse(text: str) -> str:
    if "=" not in text:
        raise ValueError(
            "neither attention_config (YAML), nor a JSON object, nor a tau profile such as "
            "0-30=2.0; name the format with --from"
        )
    return TAU_PROFILE


def _one_for_all(target: str, text: str, place: Deployment) -> Read:
    made = import_target(text, target, place)
    return made.config, None, made.notes


def _node(target: str, text: str, place: Deployment) -> Read:
    del target
    config, taus = comfyui.read_taus(text, place)
    return config, taus, ()


def _taus(target: str, text: str, place: Deployment) -> Read:
    """A bare profile: every block must be named, as the text does not hold the node's own tau."""
    if place.layers is None:
        raise ValueError(f"{target}: layers=None: give the number of blocks of the model")
    taus = read_profile(text, place.layers)
    missing = [layer for layer in range(place.layers) if layer not in taus]
    if missing:
        raise ValueError(
            f"{target}: blocks {', '.join(map(str, missing))} are not named and keep the tau of "
            "the node, which this text does not hold; name them, or give the node's own JSON"
        )
    config = configuration(target, {"algorithm": "sol_attn"})
    note = f"{target}: thresh_type diag and no dense phase, as the node computes it"
    return config, tuple(taus.values()), (note,)


READERS: dict[str, Callable[[str, str, Deployment], Read]] = {
    comfyui.NAME: _node,
    TAU_PROFILE: _taus,
}


def _check_attention_alone(config: VisualGenConfig, format: str) -> None:
    """Other parts of a server's file change the video too, and nothing here would run them."""
    extra = sorted(config.model_extra or {})
    if extra:
        raise ValueError(
            f"{format}: {', '.join(extra)}: only attention_config is applied here; remove the rest "
            "from a copy of the file"
        )


def _kernel_notes(attention: AttentionConfig) -> list[str]:
    if attention.backend is None:
        return []
    return [f"backend={attention.backend} names kernels of TensorRT-LLM; this machine runs its own"]
