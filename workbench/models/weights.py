"""Save and load a `VideoDiT` as one safetensors file that knows its own configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..paths import BUNDLED_WEIGHTS, data_dir
from .dit import DiTConfig, VideoDiT

FORMAT = "workbench.video_dit/1"


def save_model(
    model: VideoDiT,
    path: str | Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    record: Mapping[str, object] | None = None,
) -> None:
    """Write weights, configuration and a record of the training.

    Args:
        model: its floating-point parameters are stored at `dtype`.
        path: a .safetensors file; replaced in one step, so a reader never sees half a file.
        record: JSON-able facts about the training (steps, loss, seed, device, ...).
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {k: v.detach().to("cpu", dtype).contiguous() for k, v in model.state_dict().items()}
    metadata = {
        "format": FORMAT,
        "config": json.dumps(asdict(model.config)),
        "training": json.dumps(dict(record or {})),
    }
    part = path.with_name(path.name + ".part")
    save_file(state, part, metadata=metadata)
    part.chmod(0o644)  # save_file makes it private
    part.replace(path)


def load_model(
    path: str | Path | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> VideoDiT:
    """Load a model in evaluation mode.

    Args:
        path: a file written by `save_model`; the bundled trained weights when None.
        device: where the model goes; the CPU when None.
        dtype: of the parameters. The file holds bfloat16.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged, no model of this kind, or keys or shapes do not fit its
            configuration.
    """
    path = _weights_path(path)
    state, metadata = _read(path)
    model = VideoDiT(_config(path, metadata))
    _check_state(path, state, model.state_dict())
    model.load_state_dict(state)
    return model.to(device or "cpu", dtype).eval().requires_grad_(False)


def training_record(path: str | Path | None = None) -> dict[str, object]:
    """What `save_model` was told about the training: steps, loss, seed, device, versions."""
    path = _weights_path(path)
    return json.loads(_read(path)[1].get("training", "{}"))


def _weights_path(path: str | Path | None) -> Path:
    chosen = data_dir() / BUNDLED_WEIGHTS if path is None else Path(path)
    if not chosen.is_file():
        raise FileNotFoundError(
            f"path={str(chosen)!r}: no such file; train a model with "
            "`python -m workbench.models.train --out FOLDER` or leave path out for the bundled one"
        )
    return chosen


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            return {key: file.get_tensor(key) for key in file.keys()}, metadata  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(
            f"path={str(path)!r}: no readable safetensors file ({error}); "
            "it may be truncated: copy or train it again"
        ) from error


def _config(path: Path, metadata: Mapping[str, str]) -> DiTConfig:
    if metadata.get("format") != FORMAT:
        raise ValueError(
            f"path={str(path)!r}: metadata format is {metadata.get('format')!r}, must be "
            f"{FORMAT!r}; only files written by workbench.models.weights.save_model load here"
        )
    fields = json.loads(metadata["config"])
    fields["patch"] = tuple(fields["patch"])
    try:
        return DiTConfig(**fields)
    except TypeError as error:
        raise ValueError(
            f"path={str(path)!r}: its configuration {fields} is not one this version knows "
            f"({error}); use the version that wrote it"
        ) from error


def _check_state(path: Path, state: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    missing, extra = sorted(wanted.keys() - state.keys()), sorted(state.keys() - wanted.keys())
    if missing or extra:
        raise ValueError(
            f"path={str(path)!r}: missing keys {missing[:5]}, unexpected keys {extra[:5]} "
            f"({len(missing)} and {len(extra)} in all); the file does not fit its configuration"
        )
    for key, tensor in wanted.items():
        if state[key].shape != tensor.shape:
            raise ValueError(
                f"path={str(path)!r}: {key} has shape {tuple(state[key].shape)}, the configuration "
                f"wants {tuple(tensor.shape)}; the file does not fit its configuration"
            )
