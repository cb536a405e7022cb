"""The table of targets that a GPU can show, as data: what each row must reach and aims at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """A row of the table of targets.

    Attributes:
        quantity: what is measured; short: the same in a few words.
        unit: ``x`` (ratio of times), ``%``, ``syncs`` or ``s``.
        more_is_better: whether larger figures are better.
        levels: (must, aim) by implementation.
    """

    quantity: str
    short: str
    unit: str
    more_is_better: bool
    levels: Mapping[str, tuple[float, float]]


def _same(must: float, aim: float) -> dict[str, tuple[float, float]]:
    return {"triton": (must, aim), "cute": (must, aim)}


GPU_TARGETS: Mapping[int, Target] = {
    1: Target(
        "Sol-Attn at tau 1, whole call, over its bound",
        "Sol-Attn, tau 1 / bound",
        "x",
        False,
        {"triton": (1.65, 1.40), "cute": (1.35, 1.15)},
    ),
    2: Target(
        "Sol-Attn at tau 2, whole call, over its bound",
        "Sol-Attn, tau 2 / bound",
        "x",
        False,
        {"triton": (2.2, 1.6), "cute": (1.6, 1.3)},
    ),
    3: Target(
        "block mask 64 x 64, rate over the dense rate",
        "block mask 64 x 64 / dense",
        "x",
        True,
        {"triton": (0.58, 0.70), "cute": (0.75, 0.88)},
    ),
    4: Target(
        "preparation and routing, share of dense time",
        "preparation, routing",
        "%",
        False,
        _same(1.5, 0.9),
    ),
    5: Target("device-to-host syncs of a call", "host syncs", "syncs", False, _same(0, 0)),
    6: Target(
        "returning route, skip map and LSE, share of the call",
        "trace returned",
        "%",
        False,
        _same(1, 0),
    ),
    7: Target(
        "skip vote when nothing skips, over the same kernel",
        "skip vote, nothing skipped",
        "x",
        False,
        _same(1.03, 1.01),
    ),
    8: Target(
        "skip with 70 % of tiles dropped, speed-up",
        "skip, 70 % dropped",
        "x",
        True,
        _same(1.4, 1.6),
    ),
    9: Target(
        "quantiser over bytes / copy bandwidth", "quantiser / copy", "x", False, _same(1.6, 1.25)
    ),
    14: Target(
        "a CuTe kernel in a new process, compiled and from disk",
        "CuTe kernel ready",
        "s",
        False,
        {"cute": (6, 3), "cute from disk": (0.3, 0.05)},
    ),
}
GPU_ROWS = tuple(GPU_TARGETS)


def verdict(measured: float, must: float, aim: float, *, more_is_better: bool) -> str:
    """``aim``, ``must`` or ``missed``: the best level that a figure reaches (NaN: missed)."""
    sign = 1 if more_is_better else -1
    if sign * measured >= sign * aim:
        return "aim"
    return "must" if sign * measured >= sign * must else "missed"
