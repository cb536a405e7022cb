"""Fused encoders for MXFP8, NVFP4 and FP8 V (Triton), bit for bit those of PyTorch.

Plan. One program takes ROWS tokens of a (head, batch), loads them once, and writes the elements and
the scale bytes, already swizzled. Its rows are those whose scales lie next to one another: word w
of a 128 x 4 tile belongs to row 32 (w mod 4) + w div 4, so that scale bytes leave as whole words of
consecutive addresses; rows past the sequence write the padding. Where the tensor (NVFP4, FP8 V) or
a channel (FP8 V) shares a scale, a first pass takes the largest magnitude with an atomic maximum on
the bits of float32 numbers, which order like integers once the sign is gone: the order of programs
cannot change it, and NaN, above infinity, wins. Bytes bound: MXFP8 reads every element once, the
others twice.

Exactness. Scales and FP8 V are divided with correct rounding; MXFP8 multiplies by the inverse power
of two, which rounds alike. NVFP4 elements are never divided: x g / s rounded to float32 lies above
a limit of e2m1 exactly when x g lies above limit * s, since both products are float32 numbers and
the gap between such numbers is wider than what the quotient's rounding can bridge.
All offsets are 64 bits wide; inputs may have any strides. bfloat16 is widened by its bits, which
the interpreter, too, does exactly (its own cast loses denormal numbers).
"""

from __future__ import annotations

import struct
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockattn import quant_formats as formats
from blockattn.layout import num_blocks
from blockattn.scale_layout import SCALE_COLUMNS, SCALE_ROWS

ROWS = 32
STEPS = 8  # row groups per program of the amax pass: fewer atomics
# A fused multiply-add would round once where PyTorch rounds twice.
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
NVFP4_OPTIONS = OPTIONS | {"num_warps": 8}  # with 4 it takes 120 registers

E4M3_MAX = tl.constexpr(formats.E4M3_MAX)
E2M1_MAX = tl.constexpr(formats.E2M1_MAX)
NVFP4_MAX = tl.constexpr(formats.NVFP4_MAX)
NVFP4_ENCODE_MAX = tl.constexpr(formats.NVFP4_MAX / formats.NVFP4_AMAX_FLOOR)
NVFP4_AMAX_SAFE = tl.constexpr(formats.NVFP4_AMAX_FLOOR / 8)  # below it the scale is at its maximum
FP8_TENSOR_FLOOR = tl.constexpr(formats.FP8_TENSOR_FLOOR)
FP8_CHANNEL_FLOOR = tl.constexpr(formats.FP8_CHANNEL_FLOOR)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)  # all bits of a float32 but its sign
EXPONENT = tl.constexpr(0x7F800000)  # its exponent's bits: infinity; more is NaN
NAN = tl.constexpr(0x7FC00000)
E4M3_MAX_BITS = tl.constexpr(0x43E00000)  # 448.0


@triton.jit
def _load(
    x, batch, head, rows, stride_b, stride_t, stride_h, stride_d, tokens,
    DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Bits of float32 ``[ROWS, WIDTH / BLOCK, BLOCK]``, zeros outside the tensor."""
    channel = (tl.arange(0, WIDTH // BLOCK) * BLOCK)[:, None] + tl.arange(0, BLOCK)[None, :]
    base = x + batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h
    offsets = rows.to(tl.int64)[:, None, None] * stride_t
    offsets += channel.to(tl.int64)[None, :, :] * stride_d
    inside = (rows < tokens)[:, None, None] & (channel < DIM)[None, :, :]
    values = tl.load(base + offsets, mask=inside, other=0.0)
    if x.dtype.element_ty == tl.bfloat16:
        return values.to(tl.int16, bitcast=True).to(tl.int32) << 16
    return values.to(tl.float32).to(tl.int32, bitcast=True)


@triton.jit
def _store(codes, batch, head, rows, tokens, heads, values, SIZE: tl.constexpr):
    """Bytes ``[ROWS, blocks, bytes]`` into their rows of contiguous ``[B, S, H, SIZE]``."""
    line = (batch.to(tl.int64) * tokens + rows) * heads + head
    block = tl.arange(0, values.shape[1]) * values.shape[2]
    byte = block[:, None] + tl.arange(0, values.shape[2])[None, :]
    inside = (rows < tokens)[:, None, None] & (byte < SIZE)[None, :, :]
    tl.store(codes + line[:, None, None] * SIZE + byte[None, :, :], values, mask=inside)


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
def _e2m1(bits, encode, scale):
    """Codes, int32, of x * encode / scale by comparison: ties to even, saturating at 6.

    Of the limits 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5 every second one belongs to the code above it,
    and those decide the two upper bits. NaN compares false; under a scale of 0 nothing reaches a
    limit and the sign is dropped.
    """
    size = tl.abs(bits.to(tl.float32, bitcast=True)) * encode
    sign = tl.where(scale == 0, 0, 8)
    scale = tl.where(scale == 0, float("inf"), scale)
    upper = size >= 1.75 * scale
    middle = size >= tl.where(upper, 3.5 * scale, 0.75 * scale)
    above = tl.where(upper, 5.0 * scale, 1.25 * scale)
    below = tl.where(upper, 2.5 * scale, 0.25 * scale)
    lower = size > tl.where(middle, above, below)
    code = tl.where(upper, 4, 0) | tl.where(middle, 2, 0) | tl.where(lower, 1, 0)
    return code | ((bits >> 28) & sign)


@triton.jit
def _row_of(word):
    """The row whose scales lie in a word of a column of scale tiles."""
    return word // 128 * 128 + word % 4 * 32 + word % 128 // 4


@triton.jit
def _store_scales(
    scales, matrix, tiles, word, values,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Scale bytes ``[ROWS, BLOCKS]`` int32 as words of 4 blocks; COLUMNS tiles lie side by side."""
    parts = tl.reshape(values, [ROWS, BLOCKS // 4, 4]) << (tl.arange(0, 4) * 8)[None, None, :]
    column = tl.arange(0, BLOCKS // 4)[None, :]
    tile = (matrix * tiles + word // 128)[:, None] * COLUMNS + column
    target = scales + tile * 128 + (word % 128)[:, None]
    tl.store(target, tl.sum(parts, axis=2), mask=column < COLUMNS)


@triton.jit
def _amax(
    x_ptr, amax_ptr, stride_b, stride_t, stride_h, stride_d, tokens,
    CHANNELS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    head, batch = tl.program_id(1), tl.program_id(2)
    largest = tl.zeros([ROWS, 1, WIDTH], tl.int32)
    for step in range(STEPS):
        rows = (tl.program_id(0) * STEPS + step) * ROWS + tl.arange(0, ROWS)
        bits = _load(
            x_ptr, batch, head, rows, stride_b, stride_t, stride_h, stride_d, tokens,
            DIM, WIDTH, WIDTH,
        )  # fmt: skip
        largest = tl.maximum(largest, bits & MAGNITUDE)
    by_channel = tl.reshape(tl.max(largest, axis=0), [WIDTH])
    if CHANNELS:
        channel = tl.arange(0, WIDTH)
        target = amax_ptr + head * DIM + channel
        tl.atomic_max(target, by_channel, mask=channel < DIM, sem="relaxed")
    else:
        tl.atomic_max(amax_ptr, tl.max(by_channel, axis=0), sem="relaxed")


@triton.jit
def _mxfp8(
    x_ptr, codes_ptr, scales_ptr, stride_b, stride_t, stride_h, stride_d, tokens, tiles, heads,
    CONVERT: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    head, batch = tl.program_id(1), tl.program_id(2)
    word = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    rows = _row_of(word)
    bits = _load(
        x_ptr, batch, head, rows, stride_b, stride_t, stride_h, stride_d, tokens, DIM, WIDTH, 32
    )
    amax = tl.max(bits & MAGNITUDE, axis=2)
    # 448 = 1.75 * 2**8: the sum carries into the exponent when the mantissa is above 1.75.
    byte = tl.maximum(((amax + 0x1FFFFF) >> 23) - 8, 0)
    byte = tl.where(amax == EXPONENT, 254, byte)
    byte = tl.where(amax > EXPONENT, 255, byte)
    inverse = tl.where(byte == 254, 0x400000, (254 - byte) << 23)  # 2**-127 is denormal
    inverse = tl.where(byte == 255, NAN, inverse).to(tl.float32, bitcast=True)
    codes = _e4m3(bits.to(tl.float32, bitcast=True) * inverse[:, :, None], CONVERT)
    _store(codes_ptr, batch, head, rows, tokens, heads, codes, DIM)
    matrix = batch.to(tl.int64) * heads + head
    _store_scales(scales_ptr, matrix, tiles, word, byte, ROWS, WIDTH // 32, COLUMNS)


@triton.jit
def _nvfp4(
    x_ptr, codes_ptr, scales_ptr, amax_ptr, factor_ptr,
    stride_b, stride_t, stride_h, stride_d, tokens, tiles, heads,
    CONVERT: tl.constexpr, LARGEST: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    head, batch = tl.program_id(1), tl.program_id(2)
    whole = _finite(tl.load(amax_ptr), LARGEST)
    whole = tl.where(whole < NVFP4_AMAX_SAFE, NVFP4_AMAX_SAFE, whole)
    encode = tl.div_rn(tl.full([], NVFP4_MAX, tl.float32), whole)
    encode = tl.where(encode > NVFP4_ENCODE_MAX, NVFP4_ENCODE_MAX, encode)
    if (tl.program_id(0) == 0) & (head == 0) & (batch == 0):
        tl.store(factor_ptr, tl.div_rn(tl.full([], 1.0, tl.float32), encode))
    word = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    rows = _row_of(word)
    bits = _load(
        x_ptr, batch, head, rows, stride_b, stride_t, stride_h, stride_d, tokens, DIM, WIDTH, 16
    )
    amax = _finite(tl.max(bits & MAGNITUDE, axis=2), LARGEST)
    six = tl.full([ROWS, WIDTH // 16], E2M1_MAX, tl.float32)
    stored = _e4m3(tl.div_rn(encode * amax, six), CONVERT).to(tl.int32)
    # A code read as the upper bits of a float32 is the number times 2**-120.
    scale = (stored << 20).to(tl.float32, bitcast=True) * 2.0**120
    codes = _e2m1(bits, encode, scale[:, :, None])
    low, high = tl.split(tl.reshape(codes, [ROWS, WIDTH // 16, 8, 2]))
    packed = (low | (high << 4)).to(tl.uint8)
    block = tl.arange(0, WIDTH // 16)
    valid = (rows < tokens)[:, None] & (block < DIM // 16)[None, :]
    _store(codes_ptr, batch, head, rows, tokens, heads, packed, DIM // 2)
    matrix = batch.to(tl.int64) * heads + head
    stored = tl.where(valid, stored, 0)  # NaN reaches the padding through the global scale
    _store_scales(scales_ptr, matrix, tiles, word, stored, ROWS, WIDTH // 16, COLUMNS)


@triton.jit
def _fp8_values(
    x_ptr, codes_ptr, amax_ptr, factor_ptr,
    stride_b, stride_t, stride_h, stride_d, tokens, heads,
    CONVERT: tl.constexpr, LARGEST: tl.constexpr, CHANNELS: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    head, batch = tl.program_id(1), tl.program_id(2)
    first = (tl.program_id(0) == 0) & (batch == 0)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    bits = _load(
        x_ptr, batch, head, rows, stride_b, stride_t, stride_h, stride_d, tokens, DIM, WIDTH, WIDTH
    )
    values = bits.to(tl.float32, bitcast=True)
    if CHANNELS:
        channel = tl.arange(0, WIDTH)
        amax = tl.load(amax_ptr + head * DIM + channel, mask=channel < DIM, other=0)
        amax = _finite(amax, LARGEST)
        amax = tl.where(amax < FP8_CHANNEL_FLOOR, FP8_CHANNEL_FLOOR, amax)
        factor = tl.div_rn(amax, tl.full([WIDTH], E4M3_MAX, tl.float32))
        tl.store(factor_ptr + head * DIM + channel, factor, mask=(channel < DIM) & first)
        values = tl.div_rn(values, tl.broadcast_to(factor[None, None, :], [ROWS, 1, WIDTH]))
    else:
        amax = _finite(tl.load(amax_ptr), LARGEST)
        factor = tl.div_rn(amax, tl.full([], E4M3_MAX, tl.float32))
        factor = tl.where(factor < FP8_TENSOR_FLOOR, FP8_TENSOR_FLOOR, factor)
        if first & (head == 0):
            tl.store(factor_ptr, factor)
        values = values * tl.div_rn(tl.full([], 1.0, tl.float32), factor)
    codes = _e4m3(values, CONVERT)
    _store(codes_ptr, batch, head, rows, tokens, heads, codes, DIM)


def mxfp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Elements float8_e4m3fn ``[B, S, H, D]`` and swizzled scale bytes.

    Args:
        x: ``[B, S, H, D]``, bfloat16 or float16, not empty, any strides, D a multiple of 32.
    """
    batch, tokens, heads, dim = x.shape
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scales, tiles, columns = _scale_words(x, 32)
    kernel: Any = _mxfp8
    with torch.cuda.device_of(x):
        kernel[(tiles * SCALE_ROWS // ROWS, heads, batch)](
            x, codes, scales, *x.stride(), tokens, tiles, heads,
            CONVERT=converts(x.device), DIM=dim, WIDTH=width(dim, 32), COLUMNS=columns,
            ROWS=ROWS, **OPTIONS,
        )  # fmt: skip
    return codes.view(torch.float8_e4m3fn), scales.view(torch.uint8)


def nvfp4(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Packed elements uint8 ``[B, S, H, D / 2]``, swizzled scale bytes and 0-d float32 1 / g.

    Args:
        x: ``[B, S, H, D]``, bfloat16 or float16, not empty, any strides, D a multiple of 16.
    """
    batch, tokens, heads, dim = x.shape
    codes = torch.empty(batch, tokens, heads, dim // 2, dtype=torch.uint8, device=x.device)
    scales, tiles, columns = _scale_words(x, 16)
    factor = torch.empty((), dtype=torch.float32, device=x.device)
    kernel: Any = _nvfp4
    with torch.cuda.device_of(x):
        kernel[(tiles * SCALE_ROWS // ROWS, heads, batch)](
            x, codes, scales, _largest(x, channels=False), factor, *x.stride(),
            tokens, tiles, heads,
            CONVERT=converts(x.device), LARGEST=largest_number(x.dtype), DIM=dim,
            WIDTH=width(dim, 16), COLUMNS=columns, ROWS=ROWS, **NVFP4_OPTIONS,
        )  # fmt: skip
    return codes, scales.view(torch.uint8), factor


def fp8_values(v: Tensor, *, channels: bool) -> tuple[Tensor, Tensor]:
    """Elements float8_e4m3fn ``[B, S, H, D]`` and their float32 scale, 0-d or ``[H, D]``.

    Args:
        v: ``[B, S, H, D]``, bfloat16 or float16, not empty, any strides.
        channels: one scale per (head, channel) instead of one for the tensor.
    """
    batch, tokens, heads, dim = v.shape
    codes = torch.empty(v.shape, dtype=torch.uint8, device=v.device)
    factor = torch.empty((heads, dim) if channels else (), dtype=torch.float32, device=v.device)
    kernel: Any = _fp8_values
    with torch.cuda.device_of(v):
        kernel[(num_blocks(tokens, ROWS), heads, batch)](
            v, codes, _largest(v, channels=channels), factor, *v.stride(), tokens, heads,
            CONVERT=converts(v.device), LARGEST=largest_number(v.dtype), CHANNELS=channels,
            DIM=dim, WIDTH=width(dim, 1), ROWS=ROWS, **OPTIONS,
        )  # fmt: skip
    return codes.view(torch.float8_e4m3fn), factor


def converts(device: torch.device) -> bool:
    """The GPU has an instruction for float32 to e4m3; elsewhere the bits are computed."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def _largest(x: Tensor, *, channels: bool) -> Tensor:
    """Bits of the largest magnitude, int32 ``[1]`` or ``[H * D]``; to be called on x's device."""
    batch, tokens, heads, dim = x.shape
    found = torch.zeros(heads * dim if channels else 1, dtype=torch.int32, device=x.device)
    kernel: Any = _amax
    kernel[(num_blocks(tokens, ROWS * STEPS), heads, batch)](
        x, found, *x.stride(), tokens,
        CHANNELS=channels, DIM=dim, WIDTH=width(dim, 1), ROWS=ROWS, STEPS=STEPS, **OPTIONS,
    )  # fmt: skip
    return found


def _scale_words(x: Tensor, block: int) -> tuple[Tensor, int, int]:
    """Room for the scale bytes as int32 words, and tiles down and across each matrix."""
    batch, tokens, heads, dim = x.shape
    tiles, columns = num_blocks(tokens, SCALE_ROWS), num_blocks(dim // block, SCALE_COLUMNS)
    words = batch * heads * tiles * columns * SCALE_ROWS
    return torch.empty(words, dtype=torch.int32, device=x.device), tiles, columns


def width(head_dim: int, block: int) -> int:
    """Channels that a program holds: a power of two, and at least one whole tile of scales."""
    smallest = 1 if block == 1 else block * SCALE_COLUMNS
    return max(smallest, 1 << (head_dim - 1).bit_length())


def largest_number(dtype: torch.dtype) -> int:
    """float32 bits of the largest finite number of a 16-bit dtype."""
    return struct.unpack("<i", struct.pack("<f", torch.finfo(dtype).max))[0]
