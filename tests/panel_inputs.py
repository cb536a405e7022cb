"""Shared by the tests of panels: a small synthetic capture, knobs turned as in a notebook."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import torch

from blockattn import TokenGrid
from workbench.capture import QKV
from workbench.synthetic import synthetic_qkv
from workbench.views.style import Look

GRID = TokenGrid((4, 8, 10))
PNG = b"\x89PNG\r\n\x1a\n"


def load(layer: int, step: int) -> QKV:
    call = synthetic_qkv(GRID, heads=2, head_dim=32, seed=10 * layer + step, dtype=torch.float32)
    return QKV(call.q, call.k, call.v, layer, step, 0.5)


def capture_of(entries=((1, 3), (1, 9), (4, 9)), load=load) -> SimpleNamespace:
    video = torch.arange(8 * 16 * 20 * 3).remainder(256).to(torch.uint8).reshape(8, 16, 20, 3)
    facts = {"grid": GRID, "entries": list(entries), "heads": 2, "head_dim": 32}
    return SimpleNamespace(**facts, title="synthetic <test>", video=video, load=load)


def press(panel: Any, *, cancel_at: str = "") -> None:
    """Presses the panel's button in a notebook and waits for its work, or cancels it at a text."""

    async def wait():
        panel._button.click()
        assert panel.job.running  # in the background
        while cancel_at not in panel.job.text:
            await asyncio.sleep(0.005)
        if cancel_at:
            panel.job.cancel()
        while panel.job.running:
            await asyncio.sleep(0.005)
        panel.flush()

    asyncio.run(wait())


def assert_told_apart(looks: Iterable[Look]) -> None:
    """Any two fills differ in grey or by their hatch."""
    for one, other in combinations(looks, 2):
        assert one.hatch != other.hatch or abs(grey(one.face) - grey(other.face)) > 0.15


def grey(color: str) -> float:
    """Lightness of #rrggbb, in [0, 1]."""
    red, green, blue = (int(color[n : n + 2], 16) for n in (1, 3, 5))
    return (0.299 * red + 0.587 * green + 0.114 * blue) / 255


def turn(panel: Any, **knobs: Any) -> None:
    """Sets several knobs as in a notebook, where an event loop runs, and waits for the result."""

    async def set_all():
        for knob, value in knobs.items():
            getattr(panel.controls, knob).value = value
        panel.flush()

    asyncio.run(set_all())
