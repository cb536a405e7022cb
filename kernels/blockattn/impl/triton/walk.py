"""Walks over key tiles and over block summaries: loads, scores, online softmax (Triton).

The parts of the plan in :mod:`blockattn.impl.triton.attention`, which calls them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from blockattn.impl.triton.vote import _higher_or_nan, _tile_dropped, _vote

# Where the running maximum of a row begins: below its scores, yet finite. A row may first meet
# nothing but -inf, from a mask or an infinite key: that gives probabilities of 0, where a maximum
# of -inf would give -inf less -inf, NaN. Finite in base-2 units too, for scales up to 2**26. A row
# whose scores q . k all lie below it counts as one without keys.
LEAST: tl.constexpr = tl.constexpr(-(2.0**100))


@triton.jit
def _rows(
    x, stride_b, stride_t, stride_h, batch, head, start, tokens,
    COUNT: tl.constexpr, D: tl.constexpr, TMA: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """Rows ``[COUNT, D]`` of x ``[B, T, H, D]`` from ``start`` on, zeros past the sequence."""
    if TMA:
        return tl.reshape(x.load([batch, start, head, 0]), [COUNT, D])
    else:
        row = start + tl.arange(0, COUNT)
        base = x + batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h
        pointers = base + row.to(tl.int64)[:, None] * stride_t + tl.arange(0, D)[None, :]
        if BOUNDED:
            return tl.load(pointers, mask=(row < tokens)[:, None], other=0.0)
        else:
            return tl.load(pointers)


@triton.jit
def _fold(s, top, v, weight, acc, m, l, unit, WEIGHTED: tl.constexpr):
    """Online softmax update of (acc, m, l) by raw scores s ``[ROWS, N]`` and values ``[N, D]``.

    ``top`` is the new maximum. A NaN that it passes over still reaches acc and l.
    """
    p = tl.exp2(s * unit - (top * unit)[:, None])
    shrink = tl.exp2((m - top) * unit)
    if WEIGHTED:
        l = l * shrink + tl.sum(p * weight[None, :], axis=1)
    else:
        l = l * shrink + tl.sum(p, axis=1)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
    return acc, top, l


@triton.jit
def _walk(
    acc, m, l, q, k_src, v_src, list_ptr, lo, hi, lengths_ptr, drop_ptr,
    k_stride_b, k_stride_t, k_stride_h, v_stride_b, v_stride_t, v_stride_h,
    batch, key_head, row, queries, keys, unit, limit,
    COLUMNS: tl.constexpr, D: tl.constexpr, TMA: tl.constexpr, ROUTED: tl.constexpr,
    MASKED: tl.constexpr, LENGTHS: tl.constexpr, CAUSAL: tl.constexpr, SKIP: tl.constexpr,
    VOTERS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Folds key tiles ``lo .. hi`` (of the list, or of the range) into the softmax state."""
    following = tl.load(list_ptr + lo, mask=lo < hi, other=0) if ROUTED else lo
    for n in tl.range(lo, hi, num_stages=STAGES):  # pyright: ignore[reportGeneralTypeIssues]
        # The list is read one step ahead, so that the loads it steers can be pipelined.
        tile = following
        following = tl.load(list_ptr + tl.minimum(n + 1, hi - 1)) if ROUTED else n + 1
        start = tile * COLUMNS
        k = _rows(
            k_src, k_stride_b, k_stride_t, k_stride_h, batch, key_head, start, keys,
            COLUMNS, D, TMA, MASKED,
        )  # fmt: skip
        if not SKIP:
            v = _rows(
                v_src, v_stride_b, v_stride_t, v_stride_h, batch, key_head, start, keys,
                COLUMNS, D, TMA, MASKED,
            )  # fmt: skip
        s = tl.dot(q, tl.trans(k))
        column = tl.arange(0, COLUMNS)
        valid = start + column < keys
        if LENGTHS:
            valid = valid & (column < tl.load(lengths_ptr + tile))
        if MASKED:
            s = tl.where(valid[None, :], s, -float("inf"))
            if CAUSAL:
                s = tl.where((start + column)[None, :] <= row[:, None], s, -float("inf"))
        if SKIP:
            top, objects = _vote(  # pyright: ignore[reportGeneralTypeIssues]
                s, m, unit, limit, MASKED
            )
            objects = ((row < queries) & objects).to(tl.int32)
            if _tile_dropped(objects, drop_ptr, tile, n, VOTERS) == 0:
                v = _rows(
                    v_src, v_stride_b, v_stride_t, v_stride_h, batch, key_head, start, keys,
                    COLUMNS, D, TMA, MASKED,
                )  # fmt: skip
                if LENGTHS:
                    v = tl.where(valid[:, None], v, 0.0)
                top = _higher_or_nan(m, top)
                acc, m, l = _fold(s, top, v, None, acc, m, l, unit, False)
        else:
            if LENGTHS:  # padding may hold anything, and 0 * NaN is NaN
                v = tl.where(valid[:, None], v, 0.0)
            top = tl.maximum(m, tl.max(s, axis=1))
            acc, m, l = _fold(s, top, v, None, acc, m, l, unit, False)
    return acc, m, l


@triton.jit
def _tail(
    acc, m, l, q, k_mean, v_sum, length_ptr, words_ptr, lo, hi,
    batch, key_head, key_heads, blocks, unit,
    COLUMNS: tl.constexpr, D: tl.constexpr, TMA: tl.constexpr, LENGTHS: tl.constexpr,
    SKIP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Folds in the summaries of the blocks that the row's route words leave out."""
    stride_t = key_heads * D
    stride_b = blocks.to(tl.int64) * stride_t
    for n in tl.range(lo, hi, num_stages=STAGES):  # pyright: ignore[reportGeneralTypeIssues]
        start = n * COLUMNS
        k = _rows(
            k_mean, stride_b, stride_t, D, batch, key_head, start, blocks, COLUMNS, D, TMA, True
        )
        v = _rows(
            v_sum, stride_b, stride_t, D, batch, key_head, start, blocks, COLUMNS, D, TMA, True
        )
        column = start + tl.arange(0, COLUMNS)
        inside = column < blocks
        word = tl.load(words_ptr + column // 32, mask=inside, other=-1)
        length = tl.load(length_ptr + column, mask=inside, other=0)
        absent = (((word >> (column % 32)) & 1) == 0) & (length > 0) & inside
        if LENGTHS:
            v = tl.where(absent[:, None], v, 0.0)  # summaries of padding may hold anything
        s = tl.where(absent[None, :], tl.dot(q, tl.trans(k)), -float("inf"))
        top = tl.maximum(m, tl.max(s, axis=1))
        acc, m, l = _fold(s, top, v, length.to(tl.float32), acc, m, l, unit, True)
    if SKIP:  # The votes that follow want to know of a NaN; a row at +inf has one in l alone.
        m = tl.where((l != l) & (m < float("inf")), float("nan"), m)
    return acc, m, l
