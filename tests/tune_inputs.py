"""Small captures for the tests of `tune`: seconds, not minutes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from blockattn import TokenGrid
from workbench.capture import Capture, CaptureSpec, CaptureWriter, open_capture
from workbench.synthetic import synthetic_qkv

GRID = (6, 10, 10)  # 600 tokens: nine whole blocks of 64 and a ragged one
ENTRIES = ((0, 3), (0, 9), (2, 9))
BLOCKS = 10
HEADS = 2


def time_of(step: int) -> float:
    return 1 - step / 12


def write_capture(
    path: Path, *, entries: Sequence[tuple[int, int]] = ENTRIES, tile_gap: float = 0.0
) -> Capture:
    """Synthetic fields; with ``tile_gap`` later tiles of 128 keys score lower and can be skipped.

    Without it a threshold below 1 drops hardly a tile of such data.
    """
    grid = TokenGrid(GRID)
    spec = CaptureSpec(
        grid=grid,
        entries=tuple(entries),
        heads=HEADS,
        head_dim=16,
        source="synthetic",
        title="test",
    )
    with CaptureWriter(path, spec) as writer:
        for seed, (layer, step) in enumerate(entries):
            made = synthetic_qkv(grid, heads=HEADS, head_dim=16, seed=seed)
            q, k = (made.q, made.k) if not tile_gap else _falling(made.q, made.k, tile_gap)
            writer.write(layer, step, time=time_of(step), q=q, k=k, v=made.v)
    return open_capture(path)


def _falling(q: Tensor, k: Tensor, gap: float) -> tuple[Tensor, Tensor]:
    """All queries along one channel, in which key tile j has the level -gap * j."""
    level = -gap * (torch.arange(k.shape[1]) // 128)
    q, k = torch.zeros_like(q), 0.01 * k
    q[..., 0], k[..., 0] = 4.0, level[None, :, None].to(k.dtype)
    return q, k
