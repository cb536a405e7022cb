"""Reading a capture's header: what the file holds, checked before a tensor is touched."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from blockattn import BLOCK, TokenGrid
from workbench.attention.phase import step_time
from workbench.capture.format import (
    FORMAT,
    OWN,
    RESERVED,
    SELECTION,
    SOURCES,
    VERSION,
    VIDEO,
    CaptureSpec,
    tensor_name,
)
from workbench.capture.selection import Selection

Shape = tuple[str, tuple[int, ...]]
"""Safetensors dtype and shape of a tensor, from the header alone."""


def described(
    path: Path, metadata: Mapping[str, str], shapes: Mapping[str, Shape]
) -> tuple[CaptureSpec, dict[tuple[int, int], float]]:
    """What the header says the file holds, and the time of every entry.

    Args:
        path: for messages. metadata: of the header. shapes: of the tensors, by name.

    Raises:
        ValueError: the header is of another format or version, lacks something, or is damaged.
    """
    _check_format(path, metadata)
    lacking = [key for key in RESERVED if key not in metadata]
    if lacking:
        raise ValueError(f"{path}: the header lacks {lacking}; record it again")
    try:
        times = _times(json.loads(metadata["entries"]))
        spec = CaptureSpec(
            grid=_grid(metadata),
            entries=tuple(times),
            source=metadata["source"],
            title=metadata["title"],
            details={key: value for key, value in metadata.items() if key not in OWN},
            **{**_sizes(next(iter(times)), shapes), **_selected(metadata)},
        )
    except (ValueError, TypeError, LookupError, StopIteration) as error:
        raise ValueError(f"{path}: the header is damaged: {error}; record it again") from error
    return spec, times


def _check_format(path: Path, metadata: Mapping[str, str]) -> None:
    if metadata.get("format") != FORMAT:
        raise ValueError(
            f"{path}: its format is {metadata.get('format')!r}, a capture has {FORMAT!r}; "
            "make one with `workbench capture`"
        )
    if metadata.get("version") != VERSION:
        raise ValueError(
            f"{path}: capture format version {metadata.get('version')!r}, this workbench reads "
            f"{VERSION!r}; record it again or use the workbench that wrote it"
        )
    if metadata.get("source") not in SOURCES:
        raise ValueError(f"{path}: source is {metadata.get('source')!r}, must be one of {SOURCES}")


def _times(rows: list[tuple[int, int, float]]) -> dict[tuple[int, int], float]:
    """Denoising time by (layer, step); a time decides which entries a dense phase leaves out."""
    times: dict[tuple[int, int], float] = {}
    for layer, step, time in rows:
        if (layer, step) in times:
            raise ValueError(f"(layer, step) ({layer}, {step}) is listed twice")
        moment = step_time(time, name=f"time of (layer, step) ({layer}, {step})")
        if moment is None:
            raise ValueError(f"(layer, step) ({layer}, {step}) has no time")
        times[layer, step] = moment.value
    return times


def _grid(metadata: Mapping[str, str]) -> TokenGrid:
    shape = tuple(json.loads(metadata["grid"]))
    prefix, suffix = int(metadata["prefix"]), int(metadata["suffix"])
    return TokenGrid(shape, prefix=prefix, suffix=suffix, order=metadata["order"])


def _selected(metadata: Mapping[str, str]) -> dict:
    """What was kept, and the model's heads, where that is not everything."""
    if SELECTION not in metadata:
        return {}
    facts = json.loads(metadata[SELECTION])
    if facts["block"] != BLOCK:
        raise ValueError(f"query blocks of {facts['block']} tokens, this workbench has {BLOCK}")
    heads, kv_heads = facts["model_heads"]
    selection = Selection(facts["heads"], facts["query_blocks"])
    return {"heads": heads, "kv_heads": kv_heads, "selection": selection}


def _sizes(entry: tuple[int, int], shapes: Mapping[str, Shape]) -> dict:
    """Batch, heads and head dim from the first entry; the grid decides about the tokens."""
    names = [tensor_name(*entry, part) for part in ("q", "k")]
    for name in names:
        if name not in shapes:
            raise LookupError(f"tensor {name!r} is missing")
        if len(shapes[name][1]) != 4:
            raise ValueError(f"{name} has shape {list(shapes[name][1])}, expected [B, T, H, D]")
    (_, q), (_, k) = (shapes[name] for name in names)
    video = shapes[VIDEO][1][:3] if VIDEO in shapes else None
    sizes = {"batch": q[0], "heads": q[2], "head_dim": q[3], "kv_heads": k[2]}
    return {**sizes, "video_shape": video}
