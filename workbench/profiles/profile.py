"""A profile: what an exported file means for the layers of one model.

A file of a serving stack counts in steps, keys or blocks; a profile is read for a model and a
schedule that are known, and holds one configuration for each layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workbench.config import AttentionConfig, SkipSoftmaxConfig, SolAttnConfig, VisualGenConfig
from workbench.export import Deployment, comfyui, model_optimizer, read_profile, tensorrt_llm
from workbench.export import import_config as import_target
from workbench.export.documents import read_json
from workbench.export.targets import TARGETS

TAU_PROFILE = "tau_profile"
FORMATS = (*TARGETS, TAU_PROFILE)


@dataclass(frozen=True)
class Profile:
    """What a file asks of every layer.

    Attributes:
        name: how it is called in tables, the stem of the file.
        format: a name of :data:`FORMATS`.
        layers: configuration of each layer of the model, in order.
        calibration: config.json with SkipSoftmax's formula and its list of ignored modules;
            ``None`` without one.
        notes: what became of the numbers of the file.
    """

    name: str
    format: str
    layers: tuple[AttentionConfig, ...]
    calibration: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)
    notes: tuple[str, ...] = ()

    @property
    def uniform(self) -> bool:
        """Whether one configuration serves every layer."""
        return len(set(map(_key, self.layers))) == 1

    @property
    def sparse(self) -> bool:
        """Whether any layer asks for sparsity."""
        return any(layer.sparse_attention_config is not None for layer in self.layers)


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
    try:
        text = path.read_text(encoding="utf-8")
        return read_text(text, place, name=path.stem, format=format, calibration=calibration)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is no text in UTF-8 ({error.reason})") from error
    except ValueError as error:
        lines = str(error).splitlines()
        raise ValueError("\n".join(f"{path}: {line}" for line in lines)) from error


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
    configs, notes = READERS.get(chosen, _one_for_all)(chosen, text, place)
    _check_attention_alone(configs[0], chosen)
    layers = tuple(config.attention_config for config in configs)
    notes = [*notes, *_kernel_notes(layers[0])]
    if not isinstance(layers[0].sparse_attention_config, SkipSoftmaxConfig):
        calibration = None  # it would do nothing
    return Profile(name, chosen, layers, calibration, tuple(notes))


def recognise(text: str) -> str:
    """The format of a text, by what only that format has.

    Raises:
        ValueError: none of them.
    """
    if not text.lstrip().startswith("{"):
        return tensorrt_llm.NAME if "attention_config" in text else _tau_profile_or_refuse(text)
    data = read_json(text, "the file")
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
Read = tuple[tuple[VisualGenConfig, ...], list[str]]


def _tau_profile_or_refuse(text: str) -> str:
    if "=" not in text:
        raise ValueError(
            "neither attention_config (YAML), nor a JSON object, nor a tau profile such as "
            "0-30=2.0; name the format with --from"
        )
    return TAU_PROFILE


def _one_for_all(target: str, text: str, place: Deployment) -> Read:
    made = import_target(text, target, place)
    return (made.config,) * _layers(place), list(made.notes)


def _node(target: str, text: str, place: Deployment) -> Read:
    del target
    return comfyui.read_each_block(text, place), []


def _taus(target: str, text: str, place: Deployment) -> Read:
    """A bare profile: every block must be named, as the text does not hold the node's own tau."""
    count = _layers(place)
    taus = read_profile(text, count)
    missing = [layer for layer in range(count) if layer not in taus]
    if missing:
        raise ValueError(
            f"{target}: blocks {', '.join(map(str, missing))} are not named and keep the tau of "
            "the node, which this text does not hold; name them, or give the node's own JSON"
        )
    note = f"{target}: thresh_type diag and no dense phase, as the node computes it"
    return tuple(_sol(taus[layer]) for layer in range(count)), [note]


READERS: dict[str, Callable[[str, str, Deployment], Read]] = {
    comfyui.NAME: _node,
    TAU_PROFILE: _taus,
}


def _sol(tau: float) -> VisualGenConfig:
    sparse = SolAttnConfig(tau=tau)
    return VisualGenConfig(attention_config=AttentionConfig(sparse_attention_config=sparse))


def _layers(place: Deployment) -> int:
    if place.layers is None:
        raise ValueError("place.layers=None: a profile is read for a model of known layers")
    return place.layers


def _check_attention_alone(config: VisualGenConfig, format: str) -> None:
    """Other parts of a server's file change the video too, and nothing here would run them."""
    extra = sorted(config.model_extra or {})
    if extra:
        raise ValueError(
            f"{format}: {', '.join(extra)}: only attention_config is applied here; remove the rest "
            "from a copy of the file"
        )


def _kernel_notes(layer: AttentionConfig) -> list[str]:
    if layer.backend is None:
        return []
    return [f"backend={layer.backend} names kernels of TensorRT-LLM; here those below run"]


def _key(layer: AttentionConfig) -> str:
    return layer.model_dump_json()
