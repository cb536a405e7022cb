"""Tile maxima against the running maximum: what the skip vote looks at, for a whole row of tiles."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from blockattn.layout import num_blocks
from blockattn.problem import Problem

LOG2_E = math.log2(math.e)


def row_gaps(scores: Tensor, tile: int, unit: float | Tensor) -> Tensor:
    """Largest base-2 gap of each key tile of one query tile.

    Args:
        scores: raw ``[..., rows, Tk]``, ``-inf`` where masked.
        tile: keys of a tile.
        unit: softmax scale * log2(e).

    Returns:
        ``[..., tiles]``: max over rows of (tile max - maximum of the tiles before) * unit; ``+inf``
        where a row sees its first key, ``-inf`` where no row sees one.
    """
    missing = -scores.shape[-1] % tile
    if missing:
        scores = torch.nn.functional.pad(scores, (0, missing), value=-torch.inf)
    top = scores.unflatten(-1, (-1, tile)).amax(dim=-1)
    before = torch.cat([torch.full_like(top[..., :1], -torch.inf), top[..., :-1]], dim=-1)
    running = before.cummax(dim=-1).values
    gap = torch.where(top == -torch.inf, top, (top - running) * unit)
    return gap.amax(dim=-2)


def tile_gaps(problem: Problem) -> Tensor:
    """Gaps of every tile of a call without a route, float32 ``[B, H, tiles, tiles]``."""
    wide = torch.promote_types(problem.q.dtype, torch.float32)
    q, k = (x.transpose(1, 2).to(wide) for x in (problem.q, problem.k))
    k = k.repeat_interleave(problem.group, dim=1)
    rows, columns = problem.skip_tile
    out = [
        row_gaps(tile_scores(problem, q, k, start), columns, problem.scale * LOG2_E)
        for start in range(0, q.shape[2], rows)
    ]
    if not out:
        return q.new_zeros(*q.shape[:2], 0, num_blocks(k.shape[2], columns), dtype=torch.float32)
    return torch.stack(out, dim=2).float()


def tile_scores(problem: Problem, q: Tensor, k: Tensor, start: int) -> Tensor:
    """Raw scores of the query tile at token ``start`` against every key, ``-inf`` where masked."""
    scores = q[:, :, start : start + problem.skip_tile[0]] @ k.transpose(2, 3)
    if problem.causal:
        row = torch.arange(start, start + scores.shape[2], device=q.device)
        key = torch.arange(k.shape[2], device=q.device)
        scores = scores.masked_fill(key[None, :] > row[:, None], -torch.inf)
    return scores
