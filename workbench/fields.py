"""Smooth random fields over a video, mixed into q, k and v: what synthetic data is made of.

A few smooth random fields over (t, h, w), mixed into all channels, give each token its content;
queries and keys are that content plus independent noise. Tokens that are neighbours in the video
therefore attend to each other, and so do distant ones of like content, as there are few fields.
Heads differ in how far the fields reach along each axis, and in how many there are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blockattn import TokenGrid

# Correlation length along (t, h, w) relative to `smoothness`, and the number of fields; heads take
# them in turn.
HEAD_KINDS = (
    ((1.0, 1.0, 1.0), 96),
    ((2.0, 0.5, 0.5), 24),
    ((0.5, 2.0, 2.0), 48),
    ((1.0, 0.5, 4.0), 32),
)


def fields_qkv(
    grid: TokenGrid,
    *,
    heads: int,
    head_dim: int,
    seed: int = 0,
    smoothness: float = 3.0,
    noise: float = 0.5,
    batch: int = 1,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v `[batch, grid.tokens, heads, head_dim]` on the CPU; arguments are not checked.

    :func:`workbench.synthetic.synthetic_qkv` says what they mean.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, grid.tokens, heads, head_dim)
    q, k, v = (torch.empty(shape, dtype=dtype) for _ in range(3))
    for head in range(heads):
        stretch, fields = HEAD_KINDS[head % len(HEAD_KINDS)]
        lengths = tuple(smoothness * factor for factor in stretch)
        for index in range(batch):
            shared, values = (
                _content(grid, lengths, fields, head_dim, generator) for _ in range(2)
            )
            for out, content in ((q, shared), (k, shared), (v, values)):
                out[index, :, head] = _tokens(grid, content, noise, generator)
    return q, k, v


def smooth_field(
    shape: tuple[int, int, int],
    lengths: tuple[float, ...],
    channels: int,
    generator: torch.Generator,
) -> Tensor:
    """Normal noise on a coarse lattice, interpolated linearly: float32 `[t * h * w, channels]`.

    Args:
        shape: tokens along (t, h, w).
        lengths: lattice spacing along each axis in tokens; below 1 it is 1, which is white noise.
        channels: independent fields.
        generator: CPU generator.

    Returns:
        The field in raster order; every token has variance 1 in expectation.
    """
    axes = [lattice_weights(n, max(length, 1.0)) for n, length in zip(shape, lengths)]
    coarse = torch.randn(channels, *(w.shape[1] for w in axes), generator=generator)
    for axis, weights in enumerate(axes, start=1):
        coarse = (coarse.movedim(axis, -1) @ weights.T).movedim(-1, axis)
    return coarse.flatten(1).T


def _content(
    grid: TokenGrid,
    lengths: tuple[float, ...],
    fields: int,
    channels: int,
    generator: torch.Generator,
) -> Tensor:
    """Smooth fields mixed into all channels, variance 1: float32 `[t * h * w, channels]`."""
    mixing = torch.randn(fields, channels, generator=generator) / fields**0.5
    return smooth_field(grid.shape, lengths, fields, generator) @ mixing


def lattice_weights(tokens: int, spacing: float) -> Tensor:
    """Linear interpolation from lattice points to tokens, float32 `[tokens, points]`.

    Each row has norm 1, so that interpolated noise keeps its variance everywhere.
    """
    position = torch.arange(tokens, dtype=torch.float32) / spacing
    points = torch.arange(int(position[-1]) + 2, dtype=torch.float32)
    weights = (1 - (position[:, None] - points[None, :]).abs()).clamp(min=0)
    return weights / weights.norm(dim=1, keepdim=True)


def _tokens(grid: TokenGrid, field: Tensor, noise: float, generator: torch.Generator) -> Tensor:
    """The field with its own noise and text tokens around it, in the grid's order: `[T, D]`."""
    rows = torch.randn(grid.tokens, field.shape[1], generator=generator)
    video = slice(grid.prefix, grid.prefix + grid.video_tokens)
    rows[video] = field + noise * rows[video]
    return grid.arrange(rows, dim=0)
