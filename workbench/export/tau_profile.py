"""The ``tau_profile`` text of the Sol-Attn nodes for ComfyUI: a tau for every block.

    0-30=2.0; 39-42=0.9

Follows the node of kijai/ComfyUI-SolAttn_triton (``parse_tau_profile``): entries ``blocks=tau``
between ``;`` or new lines, ``#`` starts a comment, blocks are numbers and ranges between commas, a
negative number counts from the end, a range may descend, of two entries for a block the later wins.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from workbench.export.documents import layers_text

_BLOCKS = re.compile(r"(-?\d{1,9})(?:-(-?\d{1,9}))?")
EVERY_BLOCK = "0--1"  # from the first to the last, whatever their number


def write_profile(taus: Mapping[int, float]) -> str:
    """The profile of a tau for each block, blocks of the same tau in one entry.

    Args:
        taus: block -> finite tau; blocks that it does not name keep the node's own tau.

    Raises:
        ValueError: a negative block, or a tau that is not finite.
    """
    for block, tau in taus.items():
        if block < 0 or not math.isfinite(tau):
            raise ValueError(f"taus[{block}]={tau!r}: a block is at least 0 and its tau is finite")
    levels: dict[float, list[int]] = {}
    for block in sorted(taus):
        levels.setdefault(taus[block], []).append(block)
    return "; ".join(f"{layers_text(blocks)}={tau!r}" for tau, blocks in levels.items())


def read_profile(text: str, layers: int) -> dict[int, float]:
    """The tau of each block that a profile names.

    Args:
        text: the profile.
        layers: blocks of the model, which negative numbers count from.

    Raises:
        ValueError: an entry that is no ``blocks=tau``, by its number, or a block that the model
            does not have (the node would drop it in silence).
    """
    taus: dict[int, float] = {}
    for number, entry in enumerate(re.split(r"[;\n]", text), start=1):
        entry = entry.partition("#")[0].strip()
        if not entry:
            continue
        blocks, equals, level = entry.partition("=")
        where = f"tau_profile entry {number} ({entry!r})"
        if not equals:
            raise ValueError(f"{where}: needs '=', such as 39-42=0.9")
        taus |= dict.fromkeys(read_blocks(blocks, layers, where), _level(level, where))
    return dict(sorted(taus.items()))


def read_blocks(text: str, layers: int, where: str) -> list[int]:
    """The blocks of ``0-3,47,-1``, sorted, of a model with that many.

    Raises:
        ValueError: an item that is no number or range, or a block that there is not.
    """
    found: set[int] = set()
    for item in "".join(text.split()).split(","):
        if not item:
            continue
        match = _BLOCKS.fullmatch(item)
        if match is None:
            raise ValueError(f"{where}: {item!r} is no block or range such as 0-3 or -1")
        ends = [int(end) for end in (match[1], match[2] or match[1])]
        first, last = sorted(end + layers if end < 0 else end for end in ends)
        if first < 0 or last >= layers:
            raise ValueError(f"{where}: {item!r} leaves the {layers} blocks of the model")
        found.update(range(first, last + 1))
    return sorted(found)


def _level(text: str, where: str) -> float:
    try:
        tau = float(text)
    except ValueError as error:
        raise ValueError(f"{where}: tau {text.strip()!r} is no number") from error
    if not math.isfinite(tau):
        raise ValueError(f"{where}: tau {tau} is not finite")
    return tau
