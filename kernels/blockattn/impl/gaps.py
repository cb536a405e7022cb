"""Tile maxima against the running maximum: what the skip vote looks at, for a whole row of tiles.

The one pass behind :func:`blockattn.skip_gaps` and the decision inside a run are this same code, so
their maps agree bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from blockattn.impl import products
from blockattn.impl.masks import valid_keys
from blockattn.impl.workers import share
from blockattn.layout import num_blocks
from blockattn.problem import LOG2_E, Problem

SCORES_AT_ONCE = 1 << 25  # elements of the largest score buffer where heads are batched


def row_gaps(tops: Tensor, tile: int, unit: float | Tensor, before: Tensor | None = None) -> Tensor:
    """Largest base-2 gap of each tile.

    Args:
        tops: maximum of every row in every key tile, raw ``[..., Tq, tiles]``; ``-inf``: masked.
        tile: queries of a tile.
        unit: softmax scale * log2(e).
        before: maximum that each row starts with, ``[..., Tq, 1]``; none by default.

    Returns:
        ``[..., ceil(Tq / tile), tiles]``: max over rows of (tile max - maximum of the tiles before)
        * unit; ``+inf`` where a row sees its first key, ``-inf`` where no row sees one.
    """
    start = torch.full_like(tops[..., :1], -torch.inf) if before is None else before
    running = torch.cat([start, tops[..., :-1]], dim=-1).cummax(dim=-1).values
    gap = torch.where(tops == -torch.inf, tops, (tops - running) * unit)
    missing = -gap.shape[-2] % tile
    if missing:
        gap = torch.nn.functional.pad(gap, (0, 0, 0, missing), value=-torch.inf)
    return gap.unflatten(-2, (-1, tile)).amax(dim=-2)


def tile_gaps(problem: Problem) -> Tensor:
    """Gaps of every tile of a call, float32 ``[B, H, tiles, tiles]``.

    A route, block lengths and causality mask scores out; a tail comes before the first tile.
    """
    wide = torch.promote_types(problem.q.dtype, torch.float32)
    q, k = (x.transpose(1, 2).to(wide) for x in (problem.q, problem.k))
    q, k = q.flatten(0, 1), k.repeat_interleave(problem.group, dim=1).flatten(0, 1)
    heads, queries, keys = q.shape[0], q.shape[1], k.shape[1]
    rows, columns = problem.skip_tile
    tiles = num_blocks(queries, rows), num_blocks(keys, columns)
    out = q.new_empty(heads, *tiles, dtype=torch.float32)
    if out.numel():
        for index in _head_slices(q, rows * keys):
            tops = _tops(problem, q[index].contiguous(), k[index].contiguous(), index)
            gaps = row_gaps(tops, rows, problem.scale * LOG2_E, _before(problem, q, index))
            out[index] = gaps.to(torch.float32)
    return out.unflatten(0, problem.heads_shape)


def _head_slices(q: Tensor, elements: int) -> list[int] | list[slice]:
    """Single heads on a CPU, where tiles run in parallel; else as many as the buffer holds."""
    if q.device.type == "cpu":
        return list(range(q.shape[0]))
    step = max(1, SCORES_AT_ONCE // max(1, elements))
    return [slice(start, start + step) for start in range(0, q.shape[0], step)]


def _tops(problem: Problem, q: Tensor, k: Tensor, index: int | slice) -> Tensor:
    """Maximum of every row in every key tile, raw ``[..., Tq, tiles]``."""
    rows, columns = problem.skip_tile
    keys = k.shape[-2]
    tops = q.new_empty(*q.shape[:-1], num_blocks(keys, columns))
    whole = keys // columns * columns

    def fill(starts: Iterable[int]) -> None:
        for start in starts:
            part = slice(start, start + rows)
            scores = _masked(problem, products.scores(q[..., part, :], k), index, start)
            target = tops[..., part, :]
            if whole:
                tile = scores[..., :whole].unflatten(-1, (-1, columns))
                target[..., : whole // columns] = tile.amax(dim=-1)
            if whole < keys:
                target[..., -1] = scores[..., whole:].amax(dim=-1)

    starts = range(0, q.shape[-2], rows)
    if q.device.type == "cpu":
        share(starts, fill)
    else:
        fill(starts)
    return tops


def _masked(problem: Problem, scores: Tensor, index: int | slice, start: int) -> Tensor:
    """``-inf`` where a pair is not attended key by key."""
    device = scores.device
    key = torch.arange(scores.shape[-1], device=device)
    row = torch.arange(start, start + scores.shape[-2], device=device)
    if problem.causal:
        scores = scores.masked_fill_(key[None, :] > row[:, None], -torch.inf)
    if problem.block_lengths is not None:
        scores = scores.masked_fill_(~valid_keys(problem), -torch.inf)
    if problem.route is not None:
        pairs = problem.route.dense().flatten(0, 1)[index]
        pairs = pairs[..., row // problem.block[0], :][..., key // problem.block[1]]
        scores = scores.masked_fill_(~pairs, -torch.inf)
    return scores


def _before(problem: Problem, q: Tensor, index: int | slice) -> Tensor | None:
    """Largest score of each row against the summaries of the blocks outside the route."""
    tail, route = problem.tail, problem.route
    if tail is None or route is None:
        return None
    k_mean = tail.k_mean.transpose(1, 2).to(q.dtype).repeat_interleave(problem.group, dim=1)
    absent = route.dense().flatten(0, 1)[index] | (tail.lengths == 0)
    row = torch.arange(q.shape[1], device=q.device) // problem.block[0]
    scores = products.scores(q[index].contiguous(), k_mean.flatten(0, 1)[index].contiguous())
    return scores.masked_fill_(absent[..., row, :], -torch.inf).amax(dim=-1, keepdim=True)
