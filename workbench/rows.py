"""Scores, routes and attention of a sample of query blocks, as a capture of chosen rows holds them.

A row of Sol-Attn's map depends on its own queries and on every key, and on no other row; so does a
row of tiles of SkipSoftmax. A few rows of a call of 100,000 tokens therefore tell density and
error exactly for themselves, at the cost of those rows. Times of a few rows tell nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from blockattn import BLOCK, BlockRoute, BlockScores, BlockSummary, attend, checks, sol_scores
from blockattn.layout import block_mean, num_blocks
from blockattn.precision import own_precision
from blockattn.sol import BAND, THRESHOLD_TYPES, score_statistics, sink_blocks
from workbench.capture.selection import block_rows
from workbench.probe import Probe, make_probe

Blocks = tuple[int, ...]


@own_precision()
def row_scores(
    q: Tensor,
    k: Tensor,
    blocks: Blocks | None,
    *,
    thresh_type: str = "diag",
    sink_start: int | None = None,
    sink_tokens: int = 0,
) -> BlockScores:
    """Sol-Attn's scores of some query blocks against every key block.

    Args:
        q: `[B, rows, Hq, D]`, the queries of `blocks` one after the other; k: `[B, T, Hk, D]`.
        blocks: which blocks of 64 queries q holds, ascending; None = all, as `sol_scores`.
        thresh_type, sink_start, sink_tokens: as for :func:`blockattn.sol_scores`.

    Returns:
        Scores whose row n is query block `blocks[n]`, float32 `[B, H, len(blocks), Nk]`.

    Raises:
        TypeError, ValueError: an argument is not allowed, or q does not hold those blocks.
    """
    routing = {"sink_start": sink_start, "sink_tokens": sink_tokens}
    if blocks is None:
        return sol_scores(q, k, thresh_type=thresh_type, **routing)
    query, key = checks.query_key(q, k)
    _check_rows(query, key, blocks)
    kind = checks.one_of("thresh_type", thresh_type, THRESHOLD_TYPES)
    sink = sink_blocks(key.shape[1], **routing)
    scale = checks.default_scale(query.shape[3])
    k_mean = block_mean(key).to(key.dtype)
    z, mean, std = score_statistics(block_mean(query), k_mean, kind, scale)
    always = _always(query, key.shape[1], blocks, sink)
    return BlockScores(z.float(), mean.float(), std.float(), always, sink, kind)


def row_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Blocks,
    tau: float,
    *,
    impl: str = "auto",
    return_trace: bool = False,
    **routing: Any,
) -> Any:
    """Sol-Attn of some query blocks: `[B, rows, Hq, D]`, or with its trace; see `row_scores`."""
    route = row_scores(q, k, blocks, **routing).route(tau)
    tail = BlockSummary.of(k, v)
    return attend(q, k, v, route, tail=tail, impl=impl, return_trace=return_trace)


def probe_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Blocks,
    tau: float,
    *,
    impl: str = "auto",
    **routing: Any,
) -> Probe:
    """`row_attention` compared with dense attention of the same rows."""
    out, trace = row_attention(q, k, v, blocks, tau, impl=impl, return_trace=True, **routing)
    return make_probe(out, trace, None, lambda name: attend(q, k, v, impl=name))


def check_tiles(blocks: Blocks | None, tokens: int, tile: int = 128) -> None:
    """Refuses rows of which a tile of `tile` queries, that decide together, is not complete.

    Raises:
        ValueError: with the blocks that are missing.
    """
    if blocks is None:
        return
    each, last = tile // BLOCK, num_blocks(tokens) - 1
    wanted = {first * each + n for first in {b // each for b in blocks} for n in range(each)}
    missing = sorted(block for block in wanted - set(blocks) if block <= last)
    if missing:
        raise ValueError(
            f"query_blocks={list(blocks)}: SkipSoftmax decides for {tile} queries together, and "
            f"blocks {missing} of those tiles are not in the capture; record them too "
            "(workbench.capture.spread_blocks chooses whole tiles)"
        )


def query_places(blocks: Blocks, block: int = BLOCK) -> list[int]:
    """Index in the whole sequence of every row of blocks (or tiles) of `block` queries."""
    return sorted({index * BLOCK // block for index in blocks})


def _check_rows(q: Tensor, k: Tensor, blocks: Blocks) -> None:
    rows = len(block_rows(blocks, k.shape[1]))
    if rows != q.shape[1] or list(blocks) != sorted(set(blocks)):
        raise ValueError(
            f"q: {q.shape[1]} rows, but blocks {list(blocks)} of a sequence of {k.shape[1]} tokens "
            f"hold {rows}; give each block once, ascending, with all its rows"
        )


def _always(q: Tensor, tokens: int, blocks: Blocks, sink: tuple[int, int]) -> BlockRoute:
    """Band and sink of those query blocks."""
    key = torch.arange(num_blocks(tokens), device=q.device)
    query = torch.tensor(blocks, device=q.device)
    band = (query[:, None] - key[None, :]).abs() <= BAND
    exact = band | ((key >= sink[0]) & (key < sink[1]))[None, :]
    mask = exact.expand(q.shape[0], q.shape[2], *exact.shape)
    return BlockRoute.from_dense(mask, block=(BLOCK, BLOCK), seqlens=(q.shape[1], tokens))
