"""The skip vote that costs little whether few tiles are dropped or many (Triton).

Plan. A branch around a tile's softmax keeps the product of one tile from overlapping the softmax of
the next, which a call that drops nothing pays for in full. So a program begins without branches:
V comes with K, and a dropped tile is folded in with probabilities of 0, which leaves acc, m and l
as they were. It counts what a chunk of tiles dropped. Each chunk ends the software pipeline, so
they grow as long as nothing is dropped, and are short from then on. Once a chunk has dropped more
than a fifth, the other walk takes over for the rest: it branches, and fetches V of kept tiles
alone. There is no way back, as the running maximum only rises. Which tiles are dropped does not
depend on the walk.
"""

from __future__ import annotations

import triton
import triton.language as tl

from blockattn.impl.triton.vote import _higher_or_nan, _rows_dropped, _vote
from blockattn.impl.triton.walk import _rows, _walk

FIRST: tl.constexpr = tl.constexpr(8)  # tiles of the first chunk
GROWTH: tl.constexpr = tl.constexpr(4)  # of the next, after one that dropped nothing
AGAIN: tl.constexpr = tl.constexpr(16)  # tiles of the next, after one that did
SHARE: tl.constexpr = tl.constexpr(5)  # the walk changes when more than one in so many is dropped


@triton.jit
def _walk_masked(
    acc, m, l, q, k_src, v_src, list_ptr, lo, hi, drop_ptr,
    k_stride_b, k_stride_t, k_stride_h, v_stride_b, v_stride_t, v_stride_h,
    batch, key_head, row, queries, keys, unit, limit,
    COLUMNS: tl.constexpr, D: tl.constexpr, TMA: tl.constexpr, ROUTED: tl.constexpr,
    VOTERS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Votes on whole tiles ``lo .. hi`` without a branch; also how many were dropped."""
    count = tl.zeros(row.shape, tl.int32) if VOTERS else 0
    following = tl.load(list_ptr + lo, mask=lo < hi, other=0) if ROUTED else lo
    for n in tl.range(lo, hi, num_stages=STAGES):  # pyright: ignore[reportGeneralTypeIssues]
        tile = following
        following = tl.load(list_ptr + tl.minimum(n + 1, hi - 1)) if ROUTED else n + 1
        start = tile * COLUMNS
        k = _rows(
            k_src, k_stride_b, k_stride_t, k_stride_h, batch, key_head, start, keys,
            COLUMNS, D, TMA, False,
        )  # fmt: skip
        v = _rows(
            v_src, v_stride_b, v_stride_t, v_stride_h, batch, key_head, start, keys,
            COLUMNS, D, TMA, False,
        )  # fmt: skip
        s = tl.dot(q, tl.trans(k))
        top, objects = _vote(  # pyright: ignore[reportGeneralTypeIssues]
            s, m, unit, limit, False
        )
        objects = ((row < queries) & objects).to(tl.int32)
        dropped = _rows_dropped(objects, drop_ptr, tile, n, VOTERS)
        count += dropped
        kept = dropped == 0
        top = tl.where(kept, _higher_or_nan(m, top), m)
        p = tl.exp2(s * unit - tl.where(kept, top * unit, float("inf"))[:, None])
        shrink = tl.where(kept, tl.exp2((m - top) * unit), 1.0)
        l = l * shrink + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
        m = top
    if VOTERS:
        return acc, m, l, tl.max(count, axis=0)
    else:
        return acc, m, l, count


@triton.jit
def _walk_adaptive(
    acc, m, l, q, k_src, v_src, list_ptr, lo, hi, drop_ptr,
    k_stride_b, k_stride_t, k_stride_h, v_stride_b, v_stride_t, v_stride_h,
    batch, key_head, row, queries, keys, unit, limit,
    COLUMNS: tl.constexpr, D: tl.constexpr, TMA: tl.constexpr, ROUTED: tl.constexpr,
    VOTERS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Folds whole key tiles ``lo .. hi`` that the vote keeps into the softmax state."""
    size = FIRST
    few = True
    while few & (lo < hi):
        end = tl.minimum(lo + size, hi)
        acc, m, l, count = _walk_masked(  # pyright: ignore[reportGeneralTypeIssues]
            acc, m, l, q, k_src, v_src, list_ptr, lo, end, drop_ptr,
            k_stride_b, k_stride_t, k_stride_h, v_stride_b, v_stride_t, v_stride_h,
            batch, key_head, row, queries, keys, unit, limit,
            COLUMNS, D, TMA, ROUTED, VOTERS, STAGES,
        )  # fmt: skip
        few = count * SHARE <= end - lo
        lo = end
        size = tl.where(count == 0, size * GROWTH, AGAIN)
    return _walk(
        acc, m, l, q, k_src, v_src, list_ptr, lo, hi, drop_ptr, drop_ptr,
        k_stride_b, k_stride_t, k_stride_h, v_stride_b, v_stride_t, v_stride_h,
        batch, key_head, row, queries, keys, unit, limit,
        COLUMNS, D, TMA, ROUTED, False, False, False, True, VOTERS, STAGES,
    )  # fmt: skip
