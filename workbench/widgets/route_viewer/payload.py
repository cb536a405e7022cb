"""What the browser gets: bytes and a few facts. No widget in here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from matplotlib import colormaps

from blockattn import BlockScores
from workbench import decisions, masks, views
from workbench.decisions import Decision
from workbench.mask_codes import coded
from workbench.masks import Mask, MaskSet
from workbench.views.frames import checked_video, grey_frames
from workbench.views.style import ACCENT, QUERY, Look

PART = 900_000  # bytes of one update, below the limit of 1 MB
GROUND = 250_000  # bytes of all grey frames together
CURVES = 4_000_000  # bytes of all curves together; beyond, the index shows masks as made
STAMP = 4  # bytes in front of a part


def part_count(size: int) -> int:
    """Parts that ``size`` bytes take; at least one."""
    return max(1, -(-size // PART))


def parts(serial: int, data: bytes) -> list[bytes]:
    """Data in parts below 1 MB, each behind the number of the picture that it belongs to.

    The browser puts parts of one number together, so it never mixes two heads.
    """
    stamp = serial.to_bytes(STAMP, "little")
    return [stamp + data[n * PART : (n + 1) * PART] for n in range(part_count(len(data)))]


def heads_sent(mask: Mask, head: int) -> tuple[int, int]:
    """First head and number of heads that travel together: all of them if their codes fit."""
    pairs = mask.grid[0] * mask.grid[1]
    return (0, mask.heads) if pairs * mask.heads <= PART else (head, 1)


def scores_at_once(mask: Mask) -> bool:
    """Whether scores are small enough to come without being asked for."""
    return mask.grid[0] * mask.grid[1] <= PART


def bits(mask: Mask, first: int, count: int) -> bytes:
    """Bits of the heads, each row in whole words, lowest bit first."""
    return mask.passing.words[0, first : first + count].contiguous().numpy().tobytes()


def codes(scores: BlockScores, stops: tuple[float, ...]) -> bytes:
    """Coded scores of the heads, a byte per pair."""
    return coded(scores.z[0], stops).cpu().numpy().tobytes()


def row_statistics(scores: BlockScores) -> bytes:
    """Mean and standard deviation of every row of the heads, float32 ``[heads, 2, Nq]``."""
    rows = torch.stack([scores.mean[0], scores.std[0]], dim=1)
    return rows.float().cpu().numpy().tobytes()


def doubles(values: Sequence[float]) -> bytes:
    """float64, so that the browser compares with the very numbers that Python has."""
    return np.asarray(values, np.float64).tobytes()


def facts(book: MaskSet, mask: Mask) -> dict[str, Any]:
    """Geometry, names and colours: small and constant."""
    return {
        "title": book.title,
        "grid": list(book.grid.shape),
        "tokens": book.grid.tokens,
        "blocks": list(mask.grid),
        "block": list(mask.passing.block),
        "heads": mask.heads,
        "layers": book.layers,
        "steps": book.steps,
        "size": masks.PIXELS,
        "frames": decisions.frame_edges(book.grid, mask.passing.block[0]),
        "looks": [_look(look) for look in views.looks(mask.rest).values()],
        "rest": mask.rest,
        "scored": book.scores is not None,
        "curved": sends_curves(book, mask),
        "colors": {"query": QUERY, "accent": ACCENT},
    }


def recorded(book: MaskSet) -> bytes:
    """Which (layer, step) there is, a bit each in the order of the index, lowest bit first."""
    there = np.zeros((len(book.layers), len(book.steps)), bool)
    for entry in book.entries:
        there[book.place(entry)] = True
    return np.packbits(there, bitorder="little").tobytes()


def cells(book: MaskSet, mask: Mask) -> int:
    """Figures of a whole index: layers x steps x heads."""
    return len(book.layers) * len(book.steps) * mask.heads


def sends_curves(book: MaskSet, mask: Mask) -> bool:
    """Whether the browser gets the curves, with which the whole index follows tau."""
    return bool(book.curves) and 2 * cells(book, mask) * len(book.stops) <= CURVES


def curves(book: MaskSet, mask: Mask) -> bytes:
    """Density at every stop, uint16 ``[layers, steps, heads, stops]`` in steps of 1 / 65,535."""
    shape = (len(book.layers), len(book.steps), mask.heads, len(book.stops))
    table = np.zeros(shape, np.uint16)
    for entry, curve in book.curves.items():
        table[book.place(entry)] = (curve.numpy() * 65_535).round()
    return table.tobytes()


def geometry(book: MaskSet, mask: Mask) -> dict[str, bytes]:
    """Constant arrays: which calls there are, boxes of the blocks, the colour map."""
    query, key = mask.passing.block
    cividis = (colormaps["cividis"](np.arange(256))[:, :3] * 255).round().astype(np.uint8)
    return {
        "query_boxes": masks.block_boxes(book.grid, query).tobytes(),
        "key_boxes": masks.block_boxes(book.grid, key).tobytes(),
        "cividis": cividis.tobytes(),
        "recorded": recorded(book),
        "curve_stops": doubles(book.stops),
    }


def ground(book: MaskSet) -> np.ndarray:
    """Grey video behind the frames, uint8 ``[T, height, width]``, reduced to what is worth sending.

    Without a video it is one plain pixel a frame.
    """
    shape = book.grid.shape
    if book.video is None:
        return np.full((shape[0], 1, 1), 128, np.uint8)
    video = checked_video(book.video)
    step = 1
    while -(-video.shape[1] // step) * -(-video.shape[2] // step) * shape[0] > GROUND:
        step += 1
    grey = grey_frames(video[:, ::step, ::step], list(range(shape[0])), shape)
    return (grey * 255).round().astype(np.uint8)


def _look(look: Look) -> dict[str, str]:
    return {"name": look.name, "face": look.face, "edge": look.edge, "hatch": look.hatch or ""}


def describe(mask: Mask, head: int) -> str:
    """The line under a map, of the mask as it was made."""
    text = decisions.describe(mask.classes(head))
    name = Decision.APPROXIMATE.name.lower()
    return text if mask.rest == name else text.replace(name, mask.rest)


def doubt(mask: Mask, entry: masks.Entry) -> str:
    """What is wrong with the numbers of a call; empty when every pair has a score."""
    if not mask.unscored:
        return ""
    pairs = mask.grid[0] * mask.grid[1] * mask.heads
    heads = ", ".join(str(head) for head, count in enumerate(mask.unscored) if count)
    return (
        f"layer {entry[0]}, step {entry[1]}: {sum(mask.unscored):,} of {pairs:,} scores are NaN "
        f"(heads {heads}), because q or k holds NaN or infinity; such a pair passes no threshold."
    )
