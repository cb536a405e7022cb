"""Shared by the tests of panels: a small synthetic capture, knobs turned as in a notebook."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import torch

from blockattn import TokenGrid
from workbench.capture import QKV
from workbench.synthetic import synthetic_qkv

GRID = TokenGrid((4, 8, 10))
PNG = b"\x89PNG\r\n\x1a\n"


def load(layer: int, step: int) -> QKV:
    call = synthetic_qkv(GRID, heads=2, head_dim=32, seed=10 * layer + step, dtype=torch.float32)
    return QKV(call.q, call.k, call.v, layer, step, 0.5)


def capture_of(entries=((1, 3), (1, 9), (4, 9)), load=load) -> SimpleNamespace:
    video = torch.arange(8 * 16 * 20 * 3).remainder(256).to(torch.uint8).reshape(8, 16, 20, 3)
    facts = {"grid": GRID, "entries": list(entries), "heads": 2, "head_dim": 32}
    return SimpleNamespace(**facts, title="synthetic <test>", video=video, load=load)


def turn(panel: Any, **knobs: Any) -> None:
    """Sets several knobs as in a notebook, where an event loop runs, and waits for the result."""

    async def set_all():
        for knob, value in knobs.items():
            getattr(panel.controls, knob).value = value
        panel.flush()

    asyncio.run(set_all())
