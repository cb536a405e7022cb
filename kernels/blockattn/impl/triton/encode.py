"""Parts of the encoders: rows of 16-bit numbers read, codes and scale bytes written (Triton)."""

from __future__ import annotations

import triton
import triton.language as tl

MAGNITUDE = tl.constexpr(0x7FFFFFFF)  # all bits of a float32 but its sign
EXPONENT = tl.constexpr(0x7F800000)  # its exponent's bits: infinity; more is NaN
E4M3_MAX_BITS = tl.constexpr(0x43E00000)  # 448.0


@triton.jit
def _last_first():
    """Part of the tokens, head and batch of this program, counted from the end."""
    part = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.num_programs(1) - 1 - tl.program_id(1)
    return part, head, tl.num_programs(2) - 1 - tl.program_id(2)


@triton.jit
def _load(
    x, batch, head, first, rows, stride_b, stride_t, stride_h, stride_d, tokens,
    DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Bits of float32 ``[ROWS, WIDTH / BLOCK, BLOCK]``, zeros outside the tensor.

    Rows count from ``first``, so that in a loop over it their offsets are computed once.
    """
    channel = (tl.arange(0, WIDTH // BLOCK) * BLOCK)[:, None] + tl.arange(0, BLOCK)[None, :]
    base = x + batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h
    base += first.to(tl.int64) * stride_t
    offsets = rows.to(tl.int64)[:, None, None] * stride_t
    offsets += channel.to(tl.int64)[None, :, :] * stride_d
    inside = (rows < tokens - first)[:, None, None] & (channel < DIM)[None, :, :]
    values = tl.load(base + offsets, mask=inside, other=0.0)
    if x.dtype.element_ty == tl.bfloat16:
        return values.to(tl.int16, bitcast=True).to(tl.int32) << 16
    return values.to(tl.float32).to(tl.int32, bitcast=True)


@triton.jit
def _store(codes, batch, head, first, rows, tokens, heads, values, SIZE: tl.constexpr):
    """``[ROWS, blocks, elements]`` into rows first + rows of contiguous ``[B, S, H, SIZE]``."""
    line = (batch.to(tl.int64) * tokens + first) * heads + head
    block = tl.arange(0, values.shape[1]) * values.shape[2]
    element = block[:, None] + tl.arange(0, values.shape[2])[None, :]
    inside = (rows < tokens - first)[:, None, None] & (element < SIZE)[None, :, :]
    offsets = (rows.to(tl.int64) * heads)[:, None, None] * SIZE + element[None, :, :]
    tl.store(codes + line * SIZE + offsets, values, mask=inside)


@triton.jit
def _finite(bits, LARGEST: tl.constexpr):
    """Magnitude of float32 bits, an infinity as the largest number of the input's dtype."""
    return tl.where(bits == EXPONENT, LARGEST, bits).to(tl.float32, bitcast=True)


@triton.jit
def _e4m3(x, CONVERT: tl.constexpr):
    """Codes, uint8: nearest with ties to even, saturating; NaN stays NaN.

    Adding 2**(e + 20) to a number of exponent e leaves its 4 leading bits as the last bits of the
    sum, rounded as float32 addition rounds; below 2**-6 all steps are those of e = -6.
    """
    if CONVERT:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    bits = x.to(tl.int32, bitcast=True)
    size = tl.minimum(bits & MAGNITUDE, E4M3_MAX_BITS)
    shift = tl.maximum(size & EXPONENT, 121 << 23) + (20 << 23)
    total = size.to(tl.float32, bitcast=True) + shift.to(tl.float32, bitcast=True)
    code = total.to(tl.int32, bitcast=True) - shift + (shift >> 20) - (141 << 3)
    code = tl.where((bits & MAGNITUDE) > EXPONENT, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _rows_of(word, lane):
    """Rows (first, and from there on) whose scales lie in words word + lane; 4 divides word."""
    return word // 128 * 128 + word % 128 // 4, lane % 4 * 32 + lane // 4


@triton.jit
def _store_scales(
    scales, matrix, tiles, word, lane, values,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Scale bytes ``[ROWS, BLOCKS]`` int32 as words of 4 blocks; COLUMNS tiles lie side by side."""
    parts = tl.reshape(values, [ROWS, BLOCKS // 4, 4]) << (tl.arange(0, 4) * 8)[None, None, :]
    column = tl.arange(0, BLOCKS // 4)[None, :]
    target = scales + (matrix * tiles + word // 128) * (COLUMNS * 128) + word % 128
    tl.store(target + column * 128 + lane[:, None], tl.sum(parts, axis=2), mask=column < COLUMNS)
