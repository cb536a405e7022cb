"""One attention kernel family: full range or route, tail, skip vote, causal, split-KV (Triton).

Plan. A program owns ROWS queries of a head (64, or 128 where that is faster for dense) and walks
key tiles of COLUMNS keys: QK^T into registers, online softmax with a float32 state, P rounded to
the inputs' dtype, PV into registers. The list of a routed row is read one entry ahead of the loads
it steers (the loop is software-pipelined, STAGES tiles of K and V in flight), so there is no serial
bit walk.
On GPUs with a tensor memory accelerator K and V come through descriptors, which also zero what lies
past the sequence. Three walks share one body, so that flags that are off cost nothing:
  tail    64 summaries at a time, columns of exact blocks at -inf, row sum weighted by block length;
  whole   tiles in which every pair is valid: no mask at all;
  masked  the ragged last tile, the diagonal of a causal call, padded blocks.
The maximum m is kept in raw units (q . k); the scale enters inside exp2 only. The skip vote looks
at (tile max - m) before the tile is folded in; V of a tile is fetched once the vote has kept it, so
that a dropped tile costs K and its QK^T and nothing else. Where little is dropped that branch is
dear; :mod:`blockattn.impl.triton.adaptive` takes it only once it pays.
Where Q lives on Hopper. Loaded through a pointer it stays in shared memory, where the matrix unit
reads it, which is faster for 128 x 128 tiles than from registers, where a descriptor's load ends.
With a vote it must not be in registers: ptxas 12.8 gave Q and P the same ones across the branch, so
that after the first kept tile the scores were those of P.
Split-KV gives each program a share of the list; partial outputs stay float32 and ``combine`` merges
them by log-sum-exp, with weight zero for a share without keys.
"""

from __future__ import annotations

import triton
import triton.language as tl

from blockattn.impl.triton.adaptive import _walk_adaptive
from blockattn.impl.triton.vote import _declare_votes
from blockattn.impl.triton.walk import LEAST, _rows, _tail, _walk

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def attention(
    q_src, k_src, v_src, out_ptr, lse_ptr, partial_ptr,
    index_ptr, count_ptr, words_ptr, k_mean_src, v_sum_src, tail_length_ptr, length_ptr, drop_ptr,
    scale_ptr, scale, scale_output_ptr, scale_output, limit,
    q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_h,
    v_stride_b, v_stride_t, v_stride_h, out_stride_b, out_stride_t, out_stride_h,
    queries, keys, heads, key_heads, query_tiles, key_tiles, words, splits, lines,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, D: tl.constexpr, TMA: tl.constexpr,
    QUERY_TMA: tl.constexpr, ROUTED: tl.constexpr, TAIL: tl.constexpr, LENGTHS: tl.constexpr,
    CAUSAL: tl.constexpr, SKIP: tl.constexpr, LSE: tl.constexpr, SPLIT: tl.constexpr,
    RAGGED: tl.constexpr,
    SCALE_PTR: tl.constexpr, SCALE_OUTPUT_PTR: tl.constexpr, ADAPTIVE: tl.constexpr,
    VOTERS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The kernel of the plan above; :mod:`blockattn.impl.triton.launch` calls it."""
    tile, head = tl.program_id(0), tl.program_id(1)
    batch = tl.program_id(2) // splits if SPLIT else tl.program_id(2)
    split = tl.program_id(2) % splits if SPLIT else 0
    key_head = head // (heads // key_heads)
    row = tile * ROWS + tl.arange(0, ROWS)
    if SCALE_PTR:
        scale = tl.load(scale_ptr)
    if SCALE_OUTPUT_PTR:
        scale_output = tl.load(scale_output_ptr)
    unit = scale * LOG2_E
    if VOTERS:
        _declare_votes()
    q = _rows(
        q_src, q_stride_b, q_stride_t, q_stride_h, batch, head, tile * ROWS, queries,
        ROWS, D, QUERY_TMA, True,
    )  # fmt: skip
    m = tl.full([ROWS], LEAST, tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    line = (batch.to(tl.int64) * heads + head) * query_tiles + tile

    if TAIL:
        steps = tl.cdiv(key_tiles, 64)
        lo = split * steps // splits if SPLIT else 0
        hi = (split + 1) * steps // splits if SPLIT else steps
        acc, m, l = _tail(
            acc, m, l, q, k_mean_src, v_sum_src, tail_length_ptr, words_ptr + line * words, lo, hi,
            batch, key_head, key_heads, key_tiles, unit, 64, D, TMA, LENGTHS, SKIP, STAGES,
        )  # fmt: skip

    list_ptr = index_ptr + line * key_tiles
    if ROUTED:
        total = tl.load(count_ptr + line)
    elif CAUSAL:
        total = tl.minimum(key_tiles, tl.cdiv((tile + 1) * ROWS, COLUMNS))
    else:
        total = key_tiles
    lo = split * total // splits if SPLIT else 0
    hi = (split + 1) * total // splits if SPLIT else total
    # Tiles lo .. whole need no mask; the list is ascending, so a ragged tile can only be the last.
    whole = hi
    if LENGTHS or (ROUTED and CAUSAL):
        whole = lo
    elif CAUSAL:
        whole = tl.maximum(lo, tl.minimum(hi, (tile * ROWS + 1) // COLUMNS))
        if RAGGED:
            whole = tl.maximum(lo, tl.minimum(whole, keys // COLUMNS))
    elif RAGGED:
        if ROUTED:
            last = tl.load(list_ptr + hi - 1, mask=hi > lo, other=0)
        else:
            last = hi - 1
        whole = tl.where((hi > lo) & (last == key_tiles - 1), hi - 1, hi)
    drop = drop_ptr + line * key_tiles
    if not LENGTHS and not (ROUTED and CAUSAL):
        if ADAPTIVE:
            acc, m, l = _walk_adaptive(
                acc, m, l, q, k_src, v_src, list_ptr, lo, whole, drop,
                k_stride_b, k_stride_t, k_stride_h, v_stride_b, v_stride_t, v_stride_h,
                batch, key_head, row, queries, keys, unit, limit,
                COLUMNS, D, TMA, ROUTED, VOTERS, STAGES,
            )  # fmt: skip
        else:
            acc, m, l = _walk(
                acc, m, l, q, k_src, v_src, list_ptr, lo, whole, length_ptr, drop,
                k_stride_b, k_stride_t, k_stride_h, v_stride_b, v_stride_t, v_stride_h,
                batch, key_head, row, queries, keys, unit, limit,
                COLUMNS, D, TMA, ROUTED, False, False, False, SKIP, VOTERS, STAGES,
            )  # fmt: skip
    if LENGTHS or CAUSAL or RAGGED:
        # Behind the adaptive walk a few tiles are left: their pipeline would cost it registers.
        all_masked: tl.constexpr = LENGTHS or (ROUTED and CAUSAL)
        rim_stages: tl.constexpr = 1 if ADAPTIVE and not all_masked else STAGES
        acc, m, l = _walk(
            acc, m, l, q, k_src, v_src, list_ptr, whole, hi, length_ptr, drop,
            k_stride_b, k_stride_t, k_stride_h, v_stride_b, v_stride_t, v_stride_h,
            batch, key_head, row, queries, keys, unit, limit,
            COLUMNS, D, TMA, ROUTED, True, LENGTHS, CAUSAL, SKIP, VOTERS, rim_stages,
        )  # fmt: skip

    empty = l == 0.0
    alive = row < queries
    lse_row = (batch.to(tl.int64) * heads + head) * queries + row
    lse = tl.where(empty, -float("inf"), (m * unit + tl.log2(l)) * LN_2)
    channel = tl.arange(0, D)
    if SPLIT:
        share = split.to(tl.int64) * lines
        normal = acc / tl.where(empty, 1.0, l)[:, None]
        tl.store(
            partial_ptr + (share + lse_row)[:, None] * D + channel[None, :],
            normal,
            mask=alive[:, None],
        )
        tl.store(lse_ptr + share + lse_row, lse, mask=alive)
    else:
        normal = acc * (scale_output / tl.where(empty, 1.0, l))[:, None]
        base = out_ptr + batch.to(tl.int64) * out_stride_b + head.to(tl.int64) * out_stride_h
        target = base + row.to(tl.int64)[:, None] * out_stride_t + channel[None, :]
        tl.store(target, normal.to(out_ptr.dtype.element_ty), mask=alive[:, None])
        if LSE:
            tl.store(lse_ptr + lse_row, lse, mask=alive)


@triton.jit
def combine(
    partial_ptr, partial_lse_ptr, out_ptr, lse_ptr, scale_output_ptr, scale_output,
    out_stride_b, out_stride_t, out_stride_h, queries, heads, lines, splits,
    ROWS: tl.constexpr, D: tl.constexpr, LSE: tl.constexpr, SCALE_OUTPUT_PTR: tl.constexpr,
):  # fmt: skip
    """Merges the shares of a split call: weights exp(lse - max), zero for a share without keys."""
    head, batch = tl.program_id(1), tl.program_id(2)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    alive = row < queries
    line = (batch.to(tl.int64) * heads + head) * queries + row
    channel = tl.arange(0, D)
    top = tl.full([ROWS], -float("inf"), tl.float32)
    for share in range(splits):
        lse = tl.load(partial_lse_ptr + share * lines + line, mask=alive, other=-float("inf"))
        top = tl.maximum(top, lse)
    base = tl.where(top == -float("inf"), 0.0, top)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    for share in range(splits):
        offset = share * lines + line
        lse = tl.load(partial_lse_ptr + offset, mask=alive, other=-float("inf"))
        weight = tl.exp2((lse - base) * LOG2_E)
        values = tl.load(
            partial_ptr + offset[:, None] * D + channel[None, :], mask=alive[:, None], other=0.0
        )
        acc += weight[:, None] * values
        total += weight
    if SCALE_OUTPUT_PTR:
        scale_output = tl.load(scale_output_ptr)
    acc = acc * (scale_output / tl.where(total == 0.0, 1.0, total))[:, None]
    target = out_ptr + batch.to(tl.int64) * out_stride_b + head.to(tl.int64) * out_stride_h
    target = target + row.to(tl.int64)[:, None] * out_stride_t + channel[None, :]
    tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=alive[:, None])
    if LSE:
        lse = tl.where(total == 0.0, -float("inf"), base + tl.log2(total) * LN_2)
        tl.store(lse_ptr + line, lse, mask=alive)
