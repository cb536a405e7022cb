"""Attention over quantised operands as the encoders write them (Triton).

Plan. Lists, tail, masks and vote are those of :mod:`blockattn.impl.triton.attention`: ROWS queries
to a program, key tiles of COLUMNS keys, STAGES tiles of codes in flight. 64 x 64 under a route or a
vote, 128 x 128 or 128 x 64 else; 32 x 64 where registers also hold the operands of a product. What
differs is how the operands of the two products come about.
  q, k   plain 16-bit numbers; or codes (MXFP8: a byte each, NVFP4: two to the byte) whose scale
         bytes are read from the 128 x 4 tiles they lie in, one word of four blocks at a time.
         NATIVE: codes and scales go to the matrix unit as they are. Otherwise a tile is decoded in
         registers, the queries once and the keys once a step, to WIDE, which holds element * scale
         exactly: bfloat16 for MXFP8 (4 significant bits and any power of two), float16 for NVFP4
         (6 significant bits, multiples of 2**-10 up to 2688). All scaling is float32.
  p, v   V stays e4m3 in shared memory. FP8: P is rounded to e4m3 and meets it in the matrix unit.
         Otherwise V is decoded to float16, which holds every e4m3 number, as does P after its
         rounding: the same products, exactly, summed in float32. That is the choice up to Hopper:
         its FP8 product keeps about 14 bits of a sum, which would have to be moved to a second
         float32 accumulator every 32 keys (255 registers instead of 187 for 64 x 64), and takes V
         only with keys contiguous, so each tile would be transposed byte by byte on the way.
         ``partial`` sums one key tile in the unit and the tiles in float32 registers, where it
         is not known how many bits a unit keeps.
P is relative to a reference that trails the running maximum by at most 2**8, so it stays below 448
and the reference moves rarely; the row sum takes P before it is rounded. Per row: reference, sum,
and the running maximum where there is a vote, which needs it. The scales of q, k and V (whole
tensor) are folded into ``scale`` and ``scale_output``; one per channel of V multiplies the output
at the end. ``summaries`` writes the block summaries of decoded keys and values for a tail.
"""

from __future__ import annotations

import triton
import triton.language as tl

from blockattn.impl.triton.quantise import _e4m3
from blockattn.impl.triton.vote import _higher_or_nan, _vote
from blockattn.impl.triton.walk import LEAST, _rows, _tail

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
LAG: tl.constexpr = tl.constexpr(8.0)  # base-2 units by which the reference may trail
NAN: tl.constexpr = tl.constexpr(0x7FC00000)


@triton.jit
def _scale_bytes(words, matrix, row, tiles, BLOCKS: tl.constexpr):
    """Scale bytes, int32 ``[rows, BLOCKS]``, of the given rows of a matrix of ``tiles`` tiles."""
    block = tl.arange(0, BLOCKS)
    side: tl.constexpr = (BLOCKS + 3) // 4
    tile = (matrix * tiles + row // 128)[:, None] * side + (block // 4)[None, :]
    word = tl.load(words + tile * 128 + (row % 32 * 4 + row % 128 // 32)[:, None])
    return (word >> (block % 4 * 8)[None, :]) & 255


@triton.jit
def _decode(codes, scale, FORMAT: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr):
    """element * block scale ``[rows, D]`` in WIDE from codes and scale bytes ``[rows, blocks]``."""
    rows: tl.constexpr = codes.shape[0]
    if FORMAT == "mxfp8":
        # 2**-127 is a denormal float32.
        bits = tl.where(scale == 0, 0x400000, scale << 23)
        factor = tl.where(scale == 255, NAN, bits).to(tl.float32, bitcast=True)
        element = codes.to(tl.float32)
    else:
        # The bits of e4m3 and e2m1 inside those of float32 are the number times a power of two.
        factor = (scale << 20).to(tl.float32, bitcast=True) * 2.0**120
        factor = tl.where(scale == 127, float("nan"), factor)
        code = tl.interleave(codes & 15, codes >> 4).to(tl.int32)
        bits = ((code & 7) << 22) | ((code & 8) << 28)
        element = bits.to(tl.float32, bitcast=True) * 2.0**126
    blocks: tl.constexpr = scale.shape[1]
    element = tl.reshape(element, [rows, blocks, D // blocks]) * factor[:, :, None]
    return tl.reshape(element, [rows, D]).to(WIDE)


@triton.jit
def _operand(
    src, words, stride_b, stride_t, stride_h, batch, head, heads, start, tokens, tiles,
    COUNT: tl.constexpr, D: tl.constexpr, FORMAT: tl.constexpr, TMA: tl.constexpr,
    BOUNDED: tl.constexpr,
):  # fmt: skip
    """Rows of q or k as they are stored, and their scale bytes (plain: the rows twice)."""
    size: tl.constexpr = D // 2 if FORMAT == "nvfp4" else D
    codes = _rows(
        src, stride_b, stride_t, stride_h, batch, head, start, tokens, COUNT, size, TMA, BOUNDED
    )
    if FORMAT == "plain":
        return codes, codes
    else:
        matrix = batch.to(tl.int64) * heads + head
        row = start + tl.arange(0, COUNT)
        blocks: tl.constexpr = D // 16 if FORMAT == "nvfp4" else D // 32
        return codes, _scale_bytes(words, matrix, row, tiles, blocks)


@triton.jit
def _scores(
    q, q_scale, k, k_scale, zero,
    FORMAT: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Raw scores ``[ROWS, COLUMNS]`` of queries (decoded unless NATIVE) and stored keys."""
    if NATIVE:
        if FORMAT == "mxfp8":
            return tl.dot_scaled(
                q, q_scale.to(tl.uint8), "e4m3", tl.trans(k), k_scale.to(tl.uint8), "e4m3", zero
            )
        else:
            return tl.dot_scaled(
                q, q_scale.to(tl.uint8).to(tl.float8e4nv, bitcast=True), "e2m1",
                tl.trans(k), k_scale.to(tl.uint8).to(tl.float8e4nv, bitcast=True), "e2m1",
                zero,
            )  # fmt: skip
    elif FORMAT == "plain":
        return tl.dot(q, tl.trans(k))
    else:
        return tl.dot(q, tl.trans(_decode(k, k_scale, FORMAT, D, WIDE)))


@triton.jit
def _fold(
    s, top, v, acc, reference, l, unit,
    ROUND: tl.constexpr, FP8: tl.constexpr, CONVERT: tl.constexpr,
):  # fmt: skip
    """Online softmax update by raw scores s ``[ROWS, N]`` and e4m3 values ``[N, D]``.

    ``top`` is the largest of each row. A NaN that it passes over still reaches acc and l.
    """
    top = tl.maximum(reference, top)
    kept = tl.where((top - reference) * unit <= LAG, reference, top)
    p = tl.exp2(s * unit - (kept * unit)[:, None])
    shrink = tl.exp2((reference - kept) * unit)
    l = l * shrink + tl.sum(p, axis=1)
    acc = acc * shrink[:, None]
    if FP8 == "partial":
        # With a limit on inexact sums the compiler leaves the addition to float32 instructions.
        acc += tl.dot(p.to(tl.float8e4nv), v, max_num_imprecise_acc=32)
    elif FP8 == "whole":
        acc = tl.dot(p.to(tl.float8e4nv), v, acc)
    else:
        if ROUND:
            p = _e4m3(p, CONVERT).to(tl.float8e4nv, bitcast=True)
        acc = tl.dot(p.to(tl.float16), v.to(tl.float16), acc)
    return acc, kept, l


@triton.jit
def _walk(
    acc, reference, m, l, q, q_scale, k_src, k_words, v_src, list_ptr, lo, hi, drop_ptr,
    k_stride_b, k_stride_t, k_stride_h, v_stride_b, v_stride_t, v_stride_h,
    batch, key_head, key_heads, row, queries, keys, k_tiles, unit, limit,
    COLUMNS: tl.constexpr, D: tl.constexpr, FORMAT: tl.constexpr, WIDE: tl.constexpr,
    NATIVE: tl.constexpr, ROUND: tl.constexpr, FP8: tl.constexpr, CONVERT: tl.constexpr,
    TMA: tl.constexpr, ROUTED: tl.constexpr, MASKED: tl.constexpr,
    CAUSAL: tl.constexpr, SKIP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Folds key tiles ``lo .. hi`` (of the list, or of the range) into the softmax state."""
    following = tl.load(list_ptr + lo, mask=lo < hi, other=0) if ROUTED else lo
    for n in tl.range(lo, hi, num_stages=STAGES):  # pyright: ignore[reportGeneralTypeIssues]
        tile = following
        following = tl.load(list_ptr + tl.minimum(n + 1, hi - 1)) if ROUTED else n + 1
        start = tile * COLUMNS
        k, k_scale = _operand(  # pyright: ignore[reportGeneralTypeIssues]
            k_src, k_words, k_stride_b, k_stride_t, k_stride_h, batch, key_head, key_heads,
            start, keys, k_tiles, COLUMNS, D, FORMAT, TMA, MASKED,
        )  # fmt: skip
        if not SKIP:
            v = _rows(
                v_src, v_stride_b, v_stride_t, v_stride_h, batch, key_head, start, keys,
                COLUMNS, D, TMA, MASKED,
            )  # fmt: skip
        zero = tl.full([q.shape[0], COLUMNS], unit * 0.0, tl.float32)
        # Triton 3.6 and 3.7 cannot start a scaled product from a zero that they can see.
        s = _scores(q, q_scale, k, k_scale, zero, FORMAT, D, WIDE, NATIVE)
        if MASKED:
            column = tl.arange(0, COLUMNS)
            valid = start + column < keys
            s = tl.where(valid[None, :], s, -float("inf"))
            if CAUSAL:
                s = tl.where((start + column)[None, :] <= row[:, None], s, -float("inf"))
        if SKIP:
            top, objects = _vote(  # pyright: ignore[reportGeneralTypeIssues]
                s, m, unit, limit, MASKED
            )
            objections = tl.sum(((row < queries) & objects).to(tl.int32))
            if objections > 0:
                m = _higher_or_nan(m, top)
                v = _rows(
                    v_src, v_stride_b, v_stride_t, v_stride_h, batch, key_head, start, keys,
                    COLUMNS, D, TMA, MASKED,
                )  # fmt: skip
                acc, reference, l = _fold(s, top, v, acc, reference, l, unit, ROUND, FP8, CONVERT)
            else:
                tl.store(drop_ptr + tile, 1)
        else:
            top = tl.max(s, axis=1)
            acc, reference, l = _fold(s, top, v, acc, reference, l, unit, ROUND, FP8, CONVERT)
    return acc, reference, m, l


@triton.jit
def scaled_attention(
    q_src, k_src, v_src, q_words_ptr, k_words_ptr, out_ptr, lse_ptr,
    index_ptr, count_ptr, words_ptr, k_mean_src, v_sum_src, tail_length_ptr, drop_ptr,
    scale_ptr, scale, scale_output_ptr, scale_output, factor_ptr, limit,
    q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_h,
    v_stride_b, v_stride_t, v_stride_h, out_stride_b, out_stride_t, out_stride_h,
    queries, keys, heads, key_heads, query_blocks, key_tiles, words, q_tiles, k_tiles,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, D: tl.constexpr, FORMAT: tl.constexpr,
    WIDE: tl.constexpr, NATIVE: tl.constexpr, ROUND: tl.constexpr, FP8: tl.constexpr,
    CONVERT: tl.constexpr, TMA: tl.constexpr, QUERY_TMA: tl.constexpr,
    QUERY_FORMAT: tl.constexpr, ROUTED: tl.constexpr, TAIL: tl.constexpr,
    CAUSAL: tl.constexpr, SKIP: tl.constexpr, LSE: tl.constexpr,
    RAGGED: tl.constexpr, SCALE_PTR: tl.constexpr, SCALE_OUTPUT_PTR: tl.constexpr,
    CHANNELS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The kernel of the plan above; :mod:`blockattn.impl.triton.scaled` calls it."""
    tile, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    key_head = head // (heads // key_heads)
    row = tile * ROWS + tl.arange(0, ROWS)
    if SCALE_PTR:
        scale = tl.load(scale_ptr)
    if SCALE_OUTPUT_PTR:
        scale_output = tl.load(scale_output_ptr)
    unit = scale * LOG2_E
    q, q_scale = _operand(  # pyright: ignore[reportGeneralTypeIssues]
        q_src, q_words_ptr, q_stride_b, q_stride_t, q_stride_h, batch, head, heads,
        tile * ROWS, queries, q_tiles, ROWS, D, QUERY_FORMAT, QUERY_TMA, True,
    )  # fmt: skip
    decoded = q
    if QUERY_FORMAT != "plain" and (TAIL or not NATIVE):
        decoded = _decode(q, q_scale, QUERY_FORMAT, D, WIDE)
    if not NATIVE:
        q, q_scale = decoded, decoded
    m = tl.full([ROWS], LEAST, tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    # Routes and votes are by 64 queries, of which a program has half, all, or twice as many.
    line = (batch.to(tl.int64) * heads + head) * query_blocks + tile * ROWS // 64
    if TAIL:
        acc, m, l = _tail(
            acc, m, l, decoded, k_mean_src, v_sum_src, tail_length_ptr, words_ptr + line * words,
            0, tl.cdiv(key_tiles, 64), batch, key_head, key_heads, key_tiles, unit,
            64, D, TMA, False, SKIP, STAGES,
        )  # fmt: skip
    reference = m

    list_ptr = index_ptr + line * key_tiles
    hi = key_tiles
    if ROUTED:
        hi = tl.load(count_ptr + line)
    elif CAUSAL:
        hi = tl.minimum(key_tiles, tl.cdiv((tile + 1) * ROWS, COLUMNS))
    # Tiles 0 .. whole need no mask; the list is ascending, so a ragged tile can only be the last.
    whole = hi
    if ROUTED and CAUSAL:
        whole = 0
    elif CAUSAL:
        whole = tl.minimum(hi, (tile * ROWS + 1) // COLUMNS)
        if RAGGED:
            whole = tl.minimum(whole, keys // COLUMNS)
    elif RAGGED:
        last = tl.load(list_ptr + hi - 1, mask=hi > 0, other=0) if ROUTED else hi - 1
        whole = tl.where((hi > 0) & (last == key_tiles - 1), hi - 1, hi)
    drop = drop_ptr + line * key_tiles
    if not (ROUTED and CAUSAL):
        acc, reference, m, l = _walk(
            acc, reference, m, l, q, q_scale, k_src, k_words_ptr, v_src, list_ptr, 0, whole,
            drop, k_stride_b, k_stride_t, k_stride_h, v_stride_b, v_stride_t,
            v_stride_h, batch, key_head, key_heads, row, queries, keys, k_tiles, unit, limit,
            COLUMNS, D, FORMAT, WIDE, NATIVE, ROUND, FP8, CONVERT, TMA, ROUTED, False,
            False, SKIP, STAGES,
        )  # fmt: skip
    if CAUSAL or RAGGED:
        acc, reference, m, l = _walk(
            acc, reference, m, l, q, q_scale, k_src, k_words_ptr, v_src, list_ptr, whole, hi,
            drop, k_stride_b, k_stride_t, k_stride_h, v_stride_b, v_stride_t,
            v_stride_h, batch, key_head, key_heads, row, queries, keys, k_tiles, unit, limit,
            COLUMNS, D, FORMAT, WIDE, NATIVE, ROUND, FP8, CONVERT, TMA, ROUTED, True,
            CAUSAL, SKIP, STAGES,
        )  # fmt: skip

    empty = l == 0.0
    alive = row < queries
    channel = tl.arange(0, D)
    acc = acc * (scale_output / tl.where(empty, 1.0, l))[:, None]
    if CHANNELS:
        acc = acc * tl.load(factor_ptr + key_head * D + channel)[None, :]
    base = out_ptr + batch.to(tl.int64) * out_stride_b + head.to(tl.int64) * out_stride_h
    target = base + row.to(tl.int64)[:, None] * out_stride_t + channel[None, :]
    tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=alive[:, None])
    if LSE:
        lse_row = (batch.to(tl.int64) * heads + head) * queries + row
        lse = tl.where(empty, -float("inf"), (reference * unit + tl.log2(l)) * LN_2)
        tl.store(lse_ptr + lse_row, lse, mask=alive)


@triton.jit
def decode(
    x_src, words_ptr, out_ptr, x_stride_b, x_stride_t, x_stride_h, tokens, heads, tiles,
    ROWS: tl.constexpr, D: tl.constexpr, FORMAT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Codes ``[B, T, H, ...]`` as contiguous numbers ``[B, T, H, D]`` in WIDE."""
    start, head, batch = tl.program_id(0) * ROWS, tl.program_id(1), tl.program_id(2)
    codes, scale = _operand(  # pyright: ignore[reportGeneralTypeIssues]
        x_src, words_ptr, x_stride_b, x_stride_t, x_stride_h, batch, head, heads,
        start, tokens, tiles, ROWS, D, FORMAT, False, True,
    )  # fmt: skip
    row = start + tl.arange(0, ROWS)
    line = (batch.to(tl.int64) * tokens + row) * heads + head
    target = out_ptr + line[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(target, _decode(codes, scale, FORMAT, D, WIDE), mask=(row < tokens)[:, None])


@triton.jit
def summaries(
    k_src, v_src, k_words_ptr, k_mean, v_sum,
    k_stride_b, k_stride_t, k_stride_h, v_stride_b, v_stride_t, v_stride_h,
    keys, key_heads, blocks, k_tiles,
    L: tl.constexpr, D: tl.constexpr, FORMAT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Mean of the decoded keys and sum of the values (without scale) of each block, in WIDE."""
    head, block, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    k, k_scale = _operand(  # pyright: ignore[reportGeneralTypeIssues]
        k_src, k_words_ptr, k_stride_b, k_stride_t, k_stride_h, batch, head, key_heads,
        block * L, keys, k_tiles, L, D, FORMAT, False, True,
    )  # fmt: skip
    if FORMAT != "plain":
        k = _decode(k, k_scale, FORMAT, D, tl.float32)
    v = _rows(
        v_src, v_stride_b, v_stride_t, v_stride_h, batch, head, block * L, keys, L, D, False, True
    )
    total = tl.sum(k.to(tl.float32), axis=0)
    length = tl.minimum(keys - block * L, L)
    line = (batch.to(tl.int64) * blocks + block) * key_heads + head
    channel = tl.arange(0, D)
    mean = tl.div_rn(total, tl.zeros_like(total) + length)
    tl.store(k_mean + line * D + channel, mean.to(WIDE))
    tl.store(v_sum + line * D + channel, tl.sum(v.to(tl.float32), axis=0).to(WIDE))
