"""Where VSA's cubes lie in the video, and what its coarse stage sees: numbers behind the pictures.

Cubes are 4x4x4 tokens, numbered along t, h, w (arXiv:2505.13389); those on a ragged edge hold fewer
tokens. Plain functions of a token grid and of q and k; nothing here draws.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blockattn import TokenGrid, checks, cube_layout
from blockattn.layout import TILE_EDGE
from blockattn.vsa import CUBE, checked_layout, coarse_shares


def cube_index(grid: TokenGrid) -> Tensor:
    """Number of the cube that each video position belongs to, int64 ``[T, H, W]``.

    Raises:
        ValueError: the grid has text tokens.
    """
    cubes = cube_layout(grid, torch.device("cpu")).slots // CUBE
    return grid.restore(cubes, dim=0).reshape(grid.shape)


def cube_tokens(row: Tensor, grid: TokenGrid) -> Tensor:
    """Video positions of the chosen cubes, bool ``[T, H, W]``.

    Args:
        row: bool ``[N]``, one entry per cube, e.g. ``route.dense()[batch, head, i]``.
        grid: the grid that VSA was called with.

    Raises:
        ValueError: a row of another length or dtype.
    """
    count = cube_layout(grid, torch.device("cpu")).count
    if row.dtype != torch.bool or tuple(row.shape) != (count,):
        raise ValueError(
            f"row: {row.dtype} {tuple(row.shape)}, expected bool ({count},): one entry for each "
            f"cube of grid {grid.shape}"
        )
    return row.cpu()[cube_index(grid)]


def one_cube(index: int, grid: TokenGrid) -> Tensor:
    """Video positions of one cube, bool ``[T, H, W]``.

    Raises:
        TypeError, ValueError: there is no such cube.
    """
    count = cube_layout(grid, torch.device("cpu")).count
    return cube_index(grid) == checks.integer("index", index, maximum=count - 1)


def filled_slots(grid: TokenGrid) -> tuple[Tensor, Tensor]:
    """Which of the 64 slots of each cube hold a token, bool ``[N, 64]``, in two layouts.

    Returns:
        As the tokens lie in the cube (t, h, w nested loops), where a ragged edge leaves holes, and
        as VSA stores them: valid tokens first, so that "slot < size" is the exact mask.
    """
    layout = cube_layout(grid, torch.device("cpu"))
    t, h, w = (grid.coordinates % TILE_EDGE).unbind(dim=1)
    inside = (t * TILE_EDGE + h) * TILE_EDGE + w
    natural = torch.zeros(layout.count, CUBE, dtype=torch.bool)
    natural[layout.slots // CUBE, inside] = True
    stored = torch.zeros_like(natural)
    stored.view(-1)[layout.slots] = True
    return natural, stored


def coarse_attention(
    q: Tensor, k: Tensor, *, grid: TokenGrid | tuple[int, int, int], scale: float | None = None
) -> Tensor:
    """Attention between the means of cubes, float32 ``[B, H, N, N]``; every row sums to 1.

    VSA keeps the largest entries of each row, and with a gate it adds this attention's output.

    Args:
        q, k: ``[B, T * H * W, heads, D]`` in the grid's order, equal head counts.
        grid: a grid without text, or (T, H, W) in raster order.
        scale: softmax scale, default D ** -0.5.

    Raises:
        TypeError, ValueError: q, k and grid do not fit together.
    """
    layout = checked_layout(*checks.query_key(q, k), grid)
    factor = checks.default_scale(q.shape[3]) if scale is None else scale
    return coarse_shares(layout, layout.tile(q), layout.tile(k), factor).float()


def describe_cubes(grid: TokenGrid) -> str:
    """The line under a picture of the cubes: how many, how full, and the padding they cost."""
    layout = cube_layout(grid, torch.device("cpu"))
    full = int((layout.sizes == CUBE).sum())
    padding = layout.padded_tokens - grid.tokens
    return (
        f"Grid {grid.shape}: {grid.tokens:,} tokens in {layout.count} cubes "
        f"({' x '.join(map(str, layout.cubes))}), {full} of them full, the smallest with "
        f"{int(layout.sizes.min())} tokens; {padding:,} of {layout.padded_tokens:,} slots are "
        "padding."
    )
