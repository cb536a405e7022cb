"""Routing on the GPU: scores, thresholds and the route's bit words (Triton).

Plan. One program owns ROWS query blocks of a head and a span of its key blocks, COLUMNS at a time.
The product of query means with centred key means gives the scores, minus their mean, directly; two
identical key means give exact zeros and so exact ties. Both sides are two float16 numbers, scaled
by powers of two to moderate size, and three of the four products are summed in float32: 22 bits, so
that decisions are about as stable as float32 makes them, at half the cost of three tf32 passes.
The diag threshold needs the channel deviations alone, which a program folds into its own rows; the
exact one needs the deviation of the scores, and so a pass before (``_statistics``). Spans share
nothing, so that a few hundred blocks fill the GPU; index lists are made from the words
(:mod:`blockattn.impl.triton.lists`). tau is an ordinary argument: no recompilation. Squares are
taken of scaled numbers, so that none overflows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockattn.impl.triton.overlap import arrived, awaited, follows
from blockattn.impl.triton.prepare import CenteredKeys, halves, inverse_power
from blockattn.layout import num_blocks

ROWS = 64
COLUMNS = 64
SPAN = 4  # steps of COLUMNS key blocks per program
WARPS = 4
MORE_WARPS = 8  # where scores are written or summed: with 4 and whole COLUMNS some GPUs spill
STAGES = {9: 1, 10: 1}  # key tiles in flight by architecture; 2 elsewhere, where 1 spills
LARGE: tl.constexpr = tl.constexpr(1e9)  # deviation (base-2 logits) beside which no floor counts
SMALL: tl.constexpr = tl.constexpr(2.0**-44)
MOST: tl.constexpr = tl.constexpr(2.0**18)  # keeps what lies below SMALL's reach within float16


@triton.jit
def _bits_below(end):
    """Words whose bits below ``end`` are set, whatever it is."""
    count = tl.maximum(tl.minimum(end, 32), 0)
    return tl.where(count == 32, -1, (1 << tl.minimum(count, 31)) - 1)


@triton.jit
def _queries(q_mean_ptr, deviation_ptr, line, group, alive, D: tl.constexpr):
    """Query means in the keys' units, as float16 halves ``[ROWS, D]``.

    Returns:
        Both halves; of every row the root of the sum over channels of (query x deviation)^2, and
        the power of two it was multiplied by.
    """
    channel = tl.arange(0, D)
    rows = q_mean_ptr + line[:, None] * D + channel[None, :]
    queries = tl.load(rows, mask=alive[:, None], other=0.0)
    deviation = tl.load(deviation_ptr + group * D + channel)
    # Spreads from 1e-6 to 1e32 have squares that fit; smaller ones drown in the variance floor.
    parts = queries * (deviation * SMALL)[None, :]
    spread = tl.sqrt(tl.sum(parts * parts, axis=1)) * (1.0 / SMALL)
    near = tl.minimum(inverse_power(spread), MOST)
    queries = queries * (1.0 / inverse_power(deviation))[None, :] * near[:, None]
    upper, lower = halves(queries)
    return upper, lower, spread, near


@triton.jit
def _scores(
    q_upper, q_lower, upper_ptr, lower_ptr, first, start, blocks,
    D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Centred scores ``[ROWS, COLUMNS]`` in the rows' units of key blocks from ``start`` on."""
    column = start + tl.arange(0, COLUMNS)
    offsets = (first + column)[:, None] * D + tl.arange(0, D)[None, :]
    inside = (column < blocks)[:, None]
    upper = tl.load(upper_ptr + offsets, mask=inside, other=0.0)
    lower = tl.load(lower_ptr + offsets, mask=inside, other=0.0)
    scores = tl.dot(q_upper, tl.trans(lower))
    scores = tl.dot(q_lower, tl.trans(upper), scores)
    return tl.dot(q_upper, tl.trans(upper), scores)


@triton.jit
def _with_floor(spread, unit, floor):
    """Standard deviation in base-2 logits of raw scores that spread so much, floor included."""
    std = spread * unit
    return tl.where(std > LARGE, std, tl.sqrt(std * std + floor))


@triton.jit
def _statistics(
    q_mean_ptr, upper_ptr, lower_ptr, deviation_ptr, center_ptr, mean_ptr, std_ptr,
    unit, floor, blocks, heads, key_heads,
    D: tl.constexpr, EXACT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Mean and standard deviation of every row's scores over all key blocks, base-2 logits."""
    head, batch = tl.program_id(1), tl.program_id(2)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    alive = row < blocks
    line = (batch.to(tl.int64) * heads + head) * blocks + row
    group = batch.to(tl.int64) * key_heads + head // (heads // key_heads)
    channel = tl.arange(0, D)
    rows = q_mean_ptr + line[:, None] * D + channel[None, :]
    queries = tl.load(rows, mask=alive[:, None], other=0.0)
    mean = tl.sum(queries * tl.load(center_ptr + group * D + channel)[None, :], axis=1)
    tl.store(mean_ptr + line, unit * mean, mask=alive)
    q_upper, q_lower, spread, near = _queries(q_mean_ptr, deviation_ptr, line, group, alive, D)
    if EXACT:
        squares = tl.zeros([ROWS], tl.float32)
        for start in tl.range(0, blocks, COLUMNS, num_stages=STAGES):  # pyright: ignore
            scores = _scores(
                q_upper, q_lower, upper_ptr, lower_ptr, group * blocks, start, blocks,
                D, ROWS, COLUMNS,
            )  # fmt: skip
            squares += tl.sum(scores * scores, axis=1)
        spread = tl.sqrt(squares / blocks) / near
    tl.store(std_ptr + line, _with_floor(spread, unit, floor), mask=alive)


@triton.jit
def _select(
    q_mean_ptr, upper_ptr, lower_ptr, deviation_ptr, words_ptr, z_ptr, std_ptr,
    tau, unit, floor, sink_start, sink_stop,
    blocks, words, heads, key_heads, spans,
    D: tl.constexpr, GIVEN: tl.constexpr, SCORES: tl.constexpr, BAND: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SPAN: tl.constexpr, STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    arrived(EARLY)
    awaited(EARLY)
    tile, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tile // spans * ROWS + tl.arange(0, ROWS)
    alive = row < blocks
    line = (batch.to(tl.int64) * heads + head) * blocks + row
    group = batch.to(tl.int64) * key_heads + head // (heads // key_heads)
    q_upper, q_lower, spread, near = _queries(q_mean_ptr, deviation_ptr, line, group, alive, D)  # pyright: ignore
    if GIVEN:
        std = tl.load(std_ptr + line, mask=alive, other=1.0)
    else:
        std = _with_floor(spread, unit, floor)
    factor = unit / (near * std)
    begin = tile % spans * (SPAN * COLUMNS)
    end = tl.minimum(blocks, begin + SPAN * COLUMNS)
    for start in tl.range(begin, end, COLUMNS, num_stages=STAGES):  # pyright: ignore
        scores = _scores(
            q_upper, q_lower, upper_ptr, lower_ptr, group * blocks, start, blocks, D, ROWS, COLUMNS
        )
        z = scores * factor[:, None]
        above = tl.reshape((z > tau).to(tl.int32), [ROWS, COLUMNS // 32, 32])
        packed = tl.sum(above << tl.arange(0, 32)[None, None, :], axis=2)
        # Band, sink and the end of the sequence are ranges of bits: a step per word, not per pair.
        word = start // 32 + tl.arange(0, COLUMNS // 32)
        at = row[:, None] - word[None, :] * 32
        packed = packed | (_bits_below(at + (BAND + 1)) & ~_bits_below(at - BAND))
        sink = _bits_below(sink_stop - word * 32) & ~_bits_below(sink_start - word * 32)
        packed = (packed | sink[None, :]) & _bits_below(blocks - word * 32)[None, :]
        target = words_ptr + line[:, None] * words + word[None, :]
        tl.store(target, packed, mask=alive[:, None] & (word < words)[None, :])
        if SCORES:
            # Within a head 32 bits are enough (up to 2.9 million tokens) and save a register each.
            base = z_ptr + (batch.to(tl.int64) * heads + head) * blocks * blocks
            column = start + tl.arange(0, COLUMNS)
            valid = alive[:, None] & (column < blocks)[None, :]
            tl.store(base + row[:, None] * blocks + column[None, :], z, mask=valid)


@dataclass(frozen=True)
class Selection:
    """What one routing pass produces.

    Attributes:
        words: int32 ``[B, H, N, ceil(N / 32)]``, as in :class:`blockattn.BlockRoute`.
        z: float32 ``[B, H, N, N]`` as in :class:`blockattn.BlockScores`, on request.
        mean, std: float32 ``[B, H, N]``, with z and for threshold type exact.
    """

    words: Tensor
    z: Tensor | None
    mean: Tensor | None
    std: Tensor | None


def stages(device: torch.device) -> int:
    """Key tiles in flight on a device; the interpreter does not care."""
    major = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 9
    return STAGES.get(major, 2)


def select(
    q_mean: Tensor,
    keys: CenteredKeys,
    *,
    tau: float,
    unit: float,
    floor: float,
    sink: tuple[int, int],
    band: int,
    exact: bool,
    scores: bool = False,
) -> Selection:
    """Route of every query block, from what :mod:`blockattn.impl.triton.prepare` computes.

    Args:
        q_mean: float32 ``[B, Hq, N, D]``; keys: of the same sequence.
        tau, unit, floor, sink, band, exact: as for :func:`blockattn.impl.triton.plan.plan`.
        scores: also return z, and so mean and std.
    """
    batch, heads, blocks, dim = q_mean.shape
    key_heads, words = keys.upper.shape[1], num_blocks(blocks, 32)

    def buffer(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(batch, heads, *shape, dtype=dtype, device=q_mean.device)

    bits = buffer(blocks, words, dtype=torch.int32)
    z = buffer(blocks, blocks) if scores else None
    mean, std = (buffer(blocks), buffer(blocks)) if exact or scores else (None, None)
    sources = (q_mean, keys.upper, keys.lower, keys.deviation)
    columns = COLUMNS // 2 if scores else COLUMNS
    shape = {"D": dim, "ROWS": ROWS, "COLUMNS": columns, "STAGES": stages(q_mean.device)}
    tiles, spans = num_blocks(blocks, ROWS), num_blocks(blocks, columns * SPAN)
    if std is not None:
        statistics: Any = _statistics
        statistics[(tiles, heads, batch)](
            *sources, keys.center, mean, std, unit, floor, blocks, heads, key_heads,
            EXACT=exact, **shape, num_warps=MORE_WARPS,
        )  # fmt: skip
    kernel: Any = _select
    kernel[(tiles * spans, heads, batch)](
        *sources, bits, bits if z is None else z, bits if std is None else std,
        tau, unit, floor, *sink, blocks, words, heads, key_heads, spans,
        GIVEN=std is not None, SCORES=scores, BAND=band, SPAN=SPAN, **shape,
        num_warps=MORE_WARPS if scores else WARPS, **follows(q_mean.device),
    )  # fmt: skip
    return Selection(bits, z, mean, std)
