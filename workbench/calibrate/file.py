"""A calibration as one safetensors file: the kept scores, and how they were made."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from workbench.calibrate.collect import Calibration
from workbench.calibrate.samples import Samples
from workbench.calibrate.scores import Geometry, ScoreTable

FORMAT = "workbench.calibration/1"


def save_calibration(calibration: Calibration, path: str | Path) -> Path:
    """Writes a file that appears whole or not at all.

    Raises:
        FileExistsError: it exists; nothing is overwritten.
    """
    target = Path(path)
    if target.exists():
        raise FileExistsError(f"path={str(target)!r}: exists already; give another name")
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    tensors = {"points": calibration.table.points, "ranks": calibration.table.ranks}
    metadata = {
        "format": FORMAT,
        "algorithm": calibration.algorithm,
        "thresh_type": calibration.thresh_type,
        "density_bound": str(calibration.table.bound),
        "samples": json.dumps(asdict(calibration.samples)),
        "record": json.dumps(calibration.record),
    }
    save_file(tensors, part, metadata=metadata)
    part.chmod(0o644)  # save_file makes it private
    part.replace(target)
    return target


def open_calibration(path: str | Path) -> Calibration:
    """Reads what :func:`save_calibration` wrote.

    Raises:
        FileNotFoundError: no such file. ValueError: damaged, or no calibration.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(
            f"path={str(path)!r}: no such file; make one with workbench calibrate"
        )
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(
            f"path={str(path)!r}: no readable safetensors file ({error}); calibrate again"
        ) from error
    if metadata.get("format") != FORMAT:
        raise ValueError(
            f"path={str(path)!r}: metadata format is {metadata.get('format')!r}, must be "
            f"{FORMAT!r}; only files of workbench calibrate open here"
        )
    samples = _samples(metadata["samples"])
    geometry = Geometry(metadata["algorithm"], samples.tokens)
    table = ScoreTable(tensors["points"], tensors["ranks"], geometry)
    _check(path, table, samples)
    return Calibration(table, samples, metadata["thresh_type"], json.loads(metadata["record"]))


def _samples(text: str) -> Samples:
    fields: dict[str, Any] = {
        name: tuple(item) if isinstance(item, list) else item
        for name, item in json.loads(text).items()
    }
    return Samples(**fields)


def _check(path: str | Path, table: ScoreTable, samples: Samples) -> None:
    shape, videos = tuple(table.points.shape), len(samples.videos)
    wanted = (videos, samples.steps, samples.batch, len(table.ranks))
    if len(shape) != 6 or (shape[0], shape[2], shape[3], shape[5]) != wanted:
        raise ValueError(
            f"path={str(path)!r}: scores of shape {shape} do not fit its own description of "
            f"{videos} videos, {samples.steps} steps, batch {samples.batch} and "
            f"{len(table.ranks)} ranks; calibrate again"
        )
