"""Routing on the GPU: scores, thresholds, bit words and index lists in one kernel (Triton).

Plan. One program owns ROWS query blocks of a head and walks the key blocks 32 at a time: a float32
product (three tf32 passes, so that decisions are as stable as float32) of query means against
centred key means gives the scores, minus their mean, directly; two identical key means give exact
zeros and so exact ties. The diag threshold needs the channel variances alone; the exact one needs
the variance of the scores and so walks the keys twice. Each step packs one word, and a running sum
along the row places the exact blocks in the row's index list, and those of either row of a
neighbouring pair in the pair's list. tau is an ordinary argument: no recompilation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockattn.layout import num_blocks

ROWS = 64
COLUMNS = 32
DEPTH = 32
WARPS = 8  # with 4 the scores of a step spill


@triton.jit
def _scores(
    q_rows, alive, base, center, start, blocks, stride,
    D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Centred raw scores ``[ROWS, COLUMNS]`` of the key blocks from ``start`` on.

    The product goes DEPTH channels at a time, rereading the query means from L1: the three tf32
    terms of a whole row would not fit into registers.
    """
    column = start + tl.arange(0, COLUMNS)
    inside = (column < blocks)[:, None]
    k_rows = base + column.to(tl.int64) * stride
    scores = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, D, DEPTH):
        channel = first + tl.arange(0, DEPTH)
        queries = tl.load(q_rows[:, None] + channel[None, :], mask=alive[:, None], other=0.0)
        keys = tl.load(k_rows[:, None] + channel[None, :], mask=inside, other=0.0).to(tl.float32)
        keys = tl.where(inside, keys - tl.load(center + channel)[None, :], 0.0)
        scores = tl.dot(queries, tl.trans(keys), scores, input_precision="tf32x3")
    return scores


@triton.jit
def _row_moment(
    q_rows, alive, weights,
    SQUARE: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Sum over channels of q * weight, or of q^2 * weight, for each row."""
    total = tl.zeros([ROWS], tl.float32)
    for first in range(0, D, DEPTH):
        channel = first + tl.arange(0, DEPTH)
        queries = tl.load(q_rows[:, None] + channel[None, :], mask=alive[:, None], other=0.0)
        if SQUARE:
            queries = queries * queries
        total += tl.sum(queries * tl.load(weights + channel)[None, :], axis=1)
    return total


@triton.jit
def _select(
    q_mean_ptr, k_mean_ptr, center_ptr, variance_ptr,
    words_ptr, index_ptr, count_ptr, pair_ptr, pair_count_ptr,
    z_ptr, mean_ptr, std_ptr,
    tau, unit, floor, sink_start, sink_stop,
    blocks, words, heads, key_heads,
    D: tl.constexpr, EXACT: tl.constexpr, PAIRS: tl.constexpr,
    SCORES: tl.constexpr, BAND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    head, batch = tl.program_id(1), tl.program_id(2)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    alive = row < blocks
    line = (batch.to(tl.int64) * heads + head) * blocks + row
    q_rows = q_mean_ptr + line * D
    key_head = head // (heads // key_heads)
    base = k_mean_ptr + (batch.to(tl.int64) * blocks * key_heads + key_head) * D
    stride = key_heads * D
    center = center_ptr + (batch.to(tl.int64) * key_heads + key_head) * D
    variance = variance_ptr + (batch.to(tl.int64) * key_heads + key_head) * D
    if EXACT:
        squares = tl.zeros([ROWS], tl.float32)
        for start in range(0, blocks, COLUMNS):
            scores = _scores(
                q_rows, alive, base, center, start, blocks, stride, D, ROWS, COLUMNS, DEPTH
            )
            squares += tl.sum(scores * scores, axis=1)
        spread = squares / blocks
    else:
        spread = _row_moment(q_rows, alive, variance, True, D, ROWS, DEPTH)
    std = tl.sqrt(spread * unit * unit + floor)
    if SCORES:
        tl.store(std_ptr + line, std, mask=alive)
        mean = _row_moment(q_rows, alive, center, False, D, ROWS, DEPTH)
        tl.store(mean_ptr + line, unit * mean, mask=alive)
    seen = tl.zeros([ROWS], tl.int32)
    seen_pair = tl.zeros([ROWS // 2], tl.int32)
    pair = tl.program_id(0) * (ROWS // 2) + tl.arange(0, ROWS // 2)
    pairs = (blocks + 1) // 2
    pair_line = (batch.to(tl.int64) * heads + head) * pairs + pair
    for start in range(0, blocks, COLUMNS):
        scores = _scores(
            q_rows, alive, base, center, start, blocks, stride, D, ROWS, COLUMNS, DEPTH
        )
        z = unit * scores / std[:, None]
        column = start + tl.arange(0, COLUMNS)
        distance = row[:, None] - column[None, :]
        exact = (z > tau) | ((distance <= BAND) & (distance >= -BAND))
        exact = exact | ((column >= sink_start) & (column < sink_stop))[None, :]
        valid = alive[:, None] & (column < blocks)[None, :]
        bits = (exact & valid).to(tl.int32)
        shifted = tl.reshape(bits, [ROWS, COLUMNS // 32, 32]) << tl.arange(0, 32)[None, None, :]
        word = start // 32 + tl.arange(0, COLUMNS // 32)
        tl.store(
            words_ptr + line[:, None] * words + word[None, :],
            tl.sum(shifted, axis=2),
            mask=alive[:, None] & (word < words)[None, :],
        )
        if SCORES:
            tl.store(z_ptr + line[:, None] * blocks + column[None, :], z, mask=valid)
        place = seen[:, None] + tl.cumsum(bits, axis=1) - bits
        target = index_ptr + line[:, None] * blocks + place
        keys = tl.broadcast_to(column[None, :], [ROWS, COLUMNS])
        tl.store(target, keys, mask=bits != 0)
        seen += tl.sum(bits, axis=1)
        if PAIRS:
            weight = 1 + tl.arange(0, 2)
            owned = tl.sum(
                tl.reshape(bits, [ROWS // 2, 2, COLUMNS]) * weight[None, :, None], axis=1
            )
            used = (owned != 0).to(tl.int32)
            place = seen_pair[:, None] + tl.cumsum(used, axis=1) - used
            target = pair_ptr + pair_line[:, None] * blocks + place
            tl.store(target, column[None, :] * 4 + owned, mask=used != 0)
            seen_pair += tl.sum(used, axis=1)
    tl.store(count_ptr + line, seen, mask=alive)
    if PAIRS:
        tl.store(pair_count_ptr + pair_line, seen_pair, mask=pair < pairs)


@dataclass(frozen=True)
class Selection:
    """Everything one routing pass can produce; what was not asked for is ``None``.

    Attributes:
        words: int32 ``[B, H, N, ceil(N / 32)]``, as in :class:`blockattn.BlockRoute`.
        index, count: int32 ``[B, H, N, N]`` and ``[B, H, N]``: exact key blocks in ascending order;
            entries past the count are unwritten.
        pairs, pair_count: int32 ``[B, H, ceil(N / 2), N]`` and ``[B, H, ceil(N / 2)]``: union of
            the lists of query blocks 2 i and 2 i + 1; an entry is 4 * key block + owners, bit 0
            for the first query block and bit 1 for the second.
        z, mean, std: float32 scores as in :class:`blockattn.BlockScores`.
    """

    words: Tensor
    index: Tensor
    count: Tensor
    pairs: Tensor | None
    pair_count: Tensor | None
    z: Tensor | None
    mean: Tensor | None
    std: Tensor | None


def select(
    q_mean: Tensor,
    k_mean: Tensor,
    center: Tensor,
    variance: Tensor,
    *,
    tau: float,
    unit: float,
    floor: float,
    sink: tuple[int, int],
    band: int,
    exact: bool,
    pairs: bool = False,
    scores: bool = False,
) -> Selection:
    """Route of every query block, from what :mod:`blockattn.impl.triton.prepare` computes."""
    batch, heads, blocks, dim = q_mean.shape
    device, key_heads = q_mean.device, k_mean.shape[2]

    def buffer(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(batch, heads, *shape, dtype=dtype, device=device)

    words, couples = num_blocks(blocks, 32), num_blocks(blocks, 2)
    result = Selection(
        words=buffer(blocks, words),
        index=buffer(blocks, blocks),
        count=buffer(blocks),
        pairs=buffer(couples, blocks) if pairs else None,
        pair_count=buffer(couples) if pairs else None,
        z=buffer(blocks, blocks, dtype=torch.float32) if scores else None,
        mean=buffer(blocks, dtype=torch.float32) if scores else None,
        std=buffer(blocks, dtype=torch.float32) if scores else None,
    )
    unused = result.words
    kernel: Any = _select
    kernel[(num_blocks(blocks, ROWS), heads, batch)](
        q_mean, k_mean, center, variance,
        result.words, result.index, result.count,
        *(
            unused if x is None else x
            for x in (result.pairs, result.pair_count, result.z, result.mean, result.std)
        ),
        tau, unit, floor, *sink, blocks, words, heads, key_heads,
        D=dim, EXACT=exact, PAIRS=pairs, SCORES=scores, BAND=band,
        ROWS=ROWS, COLUMNS=COLUMNS, DEPTH=min(DEPTH, dim), num_warps=WARPS,
    )  # fmt: skip
    return result
