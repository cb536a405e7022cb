"""A pipeline of diffusers from a folder on this machine; nothing is ever downloaded.

Takes a saved pipeline (`model_index.json`), also one whose text encoder or decoder was left out,
or the folder of a Wan transformer alone, around which a pipeline is made.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from workbench.diffusers.families import FAMILIES, Family
from workbench.diffusers.package import diffusers_package, dtype_argument
from workbench.diffusers.wan import wan_pipeline

INDEX, CONFIG = "model_index.json", "config.json"


def open_pipeline(
    folder: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Any:
    """The pipeline of a folder.

    Args:
        folder: of a pipeline, or of a transformer (also one that holds a folder `transformer`).
        device, dtype: of all of its parts.

    Raises:
        FileNotFoundError: no such folder, or nothing of diffusers in it.
        ValueError: a transformer alone that is not Wan's, or a pipeline that wants an image.
        ModuleNotFoundError: diffusers, or a package that it needs, is missing; with the command.
    """
    path = Path(folder)
    if not path.is_dir():
        raise FileNotFoundError(f"model={str(folder)!r}: no such folder; give one on this machine")
    pipe = _saved(path, dtype) if (path / INDEX).is_file() else _around(path, dtype)
    _check_text_to_video(pipe, path)
    pipe.set_progress_bar_config(disable=True)
    return pipe.to(device)


@dataclass(frozen=True)
class Outline:
    """What a folder says of its model before any weights are read.

    Attributes:
        layers, heads: of the self-attention of its (first) transformer.
        one_call_a_step: whether the scheduler makes as many steps as it is asked for.
    """

    layers: int
    heads: int
    one_call_a_step: bool


def outline(folder: str | Path) -> Outline | None:
    """Layers and heads from the configuration alone; ``None`` where it does not tell.

    Raises:
        ValueError: a damaged file. ModuleNotFoundError: as of :func:`open_pipeline`.
    """
    path = Path(folder)
    family, config = family_at(path), _transformer_config(path)
    if family is None:
        return None
    kinds = diffusers_package()
    with import_module("accelerate").init_empty_weights():
        model = getattr(kinds, family.model).from_config(config)
    names = family.attention_modules(model)
    return Outline(len(names), model.get_submodule(names[0]).heads, _one_call_a_step(path))


def family_at(folder: str | Path) -> Family | None:
    """The family of a folder's transformer; `None` where no configuration tells one.

    Raises:
        ValueError: a damaged file.
    """
    kind = _transformer_config(Path(folder)).get("_class_name")
    return next((family for family in FAMILIES if family.model == kind), None)


def _transformer_config(path: Path) -> dict[str, Any]:
    place = _transformer_place(path)
    return {} if place is None else _json(place / CONFIG)


def _transformer_place(path: Path) -> Path | None:
    """Where the configuration of the (first) transformer is."""
    places = (path / "transformer", path)
    return next((place for place in places if (place / CONFIG).is_file()), None)


def _one_call_a_step(path: Path) -> bool:
    """A scheduler of a higher order calls the model more often."""
    index = _index(path) if (path / INDEX).is_file() else {}
    _, kind = index.get("scheduler", (None, None))
    return kind is None or getattr(getattr(diffusers_package(), kind, None), "order", None) == 1


def _saved(path: Path, dtype: torch.dtype) -> Any:
    index = _index(path)
    # A part that was left out when the pipeline was saved has to be left out by name.
    absent = {
        name: None for name, value in index.items() if isinstance(value, list) and value[0] is None
    }
    return diffusers_package().DiffusionPipeline.from_pretrained(
        path, local_files_only=True, **{dtype_argument(): _dtypes(index, absent, dtype)}, **absent
    )


def _index(path: Path) -> dict[str, Any]:
    """Library and class of every part of a saved pipeline.

    Raises:
        ValueError: a class that the installed diffusers does not have.
    """
    index, kinds = _json(path / INDEX), diffusers_package()
    parts = [part for part in index.values() if isinstance(part, list) and len(part) == 2]
    for kind in (kind for library, kind in parts if library == "diffusers"):
        if not isinstance(kind, str) or not hasattr(kinds, kind):
            raise ValueError(
                f"{path / INDEX}: diffusers {kinds.__version__} has no {kind}; install the version "
                f"that the folder was made with ({index.get('_diffusers_version', 'not said')})"
            )
    return index


def _dtypes(
    index: Mapping[str, Any], absent: Mapping[str, None], dtype: torch.dtype
) -> torch.dtype | dict[str, torch.dtype]:
    """Wan's decoder stays in float32, as its makers run it; its pipeline converts the latents."""
    wan = str(index.get("_class_name", "")).startswith("Wan")
    if not wan or "vae" not in index or "vae" in absent:
        return dtype
    return {"default": dtype, "vae": torch.float32}


def _around(path: Path, dtype: torch.dtype) -> Any:
    """A pipeline around one transformer: no text encoder, no decoder."""
    place = _transformer_place(path)
    if place is None:
        raise FileNotFoundError(
            f"model={str(path)!r}: neither {INDEX} nor {CONFIG} nor transformer/{CONFIG} is there; "
            "give the folder of a diffusers pipeline or transformer (Wan's own release has another "
            "form; take the repository that ends in -Diffusers)"
        )
    kind = _json(place / CONFIG).get("_class_name")
    if kind != "WanTransformer3DModel":
        raise ValueError(
            f"model={str(place)!r}: {kind} alone cannot sample here, only WanTransformer3DModel "
            "can; give the folder of its whole pipeline"
        )
    kinds = diffusers_package()
    model = kinds.WanTransformer3DModel.from_pretrained(
        place, local_files_only=True, **{dtype_argument(): dtype}
    )
    return wan_pipeline(model)


def _check_text_to_video(pipe: Any, path: Path) -> None:
    wanted = inspect.signature(pipe.__call__).parameters
    missing = {"prompt", "num_frames", "num_inference_steps", "output_type"} - set(wanted)
    image = wanted.get("image")
    if missing or (image is not None and image.default is inspect.Parameter.empty):
        what = "wants an image" if not missing else f"takes no {', '.join(sorted(missing))}"
        raise ValueError(
            f"model={str(path)!r}: {type(pipe).__name__} {what}; text-to-video pipelines are "
            "applied here. For others, call workbench.attach around your own code"
        )


def _json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error}); the folder is damaged") from error
    return data if isinstance(data, dict) else {}
