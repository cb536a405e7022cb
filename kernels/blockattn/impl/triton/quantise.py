"""Fused encoders for MXFP8, NVFP4 and FP8 V (Triton), bit for bit those of PyTorch.

Plan. One program takes ROWS tokens of a (head, batch), loads them once, and writes the elements and
the scale bytes, already swizzled. Its rows are those whose scales lie next to one another: word w
of a 128 x 4 tile belongs to row 32 (w mod 4) + w div 4, so that scale bytes leave as whole words of
consecutive addresses; rows past the sequence write the padding. An NVFP4 program goes on until it
has written a tile: what it does once would otherwise cost as much as the rows. Where the tensor
(NVFP4, FP8 V) or a channel (FP8 V) shares a scale, a first pass takes the largest magnitude with an
atomic maximum on the bits of float32 numbers, which order like integers once the sign is gone: the
order of programs cannot change it, and NaN, above infinity, wins. The second pass runs backwards,
as the end of x is what the cache still holds. Bytes bound: MXFP8 reads every element once, the
others twice.

Exactness. Scales and FP8 V are divided with correct rounding; MXFP8 multiplies by the inverse power
of two, which rounds alike. A block scale of NVFP4 has 4 significant bits, and by such a number one
multiplies in two parts, 1 / s and what its rounding lost: the sum, rounded once by a fused
multiply-add, is the rounded quotient wherever that decides a code. The interpreter has no fused
multiply-add, and divides.
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
AMAX_OPTIONS = OPTIONS | {"num_warps": 2}  # fewer warps meet at the end of a program
SCALED_OPTIONS = OPTIONS | {"num_warps": 8}  # with fewer NVFP4 is faster, but see the log

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
    """Bytes ``[ROWS, blocks, bytes]`` into rows first + rows of contiguous ``[B, S, H, SIZE]``."""
    line = (batch.to(tl.int64) * tokens + first) * heads + head
    block = tl.arange(0, values.shape[1]) * values.shape[2]
    byte = block[:, None] + tl.arange(0, values.shape[2])[None, :]
    inside = (rows < tokens - first)[:, None, None] & (byte < SIZE)[None, :, :]
    offsets = (rows.to(tl.int64) * heads)[:, None, None] * SIZE + byte[None, :, :]
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
def _quotient(x, by, FUSED: tl.constexpr):
    """x / by rounded once, for ``by`` of at most 4 significant bits; anything where by is 0."""
    if FUSED:
        inverse = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=r,r", [by], dtype=tl.float32, is_pure=True, pack=1
        )
        rest = tl.fma(-inverse, by, 1.0) * inverse  # pyright: ignore[reportOperatorIssue]
        return tl.fma(x, inverse, x * rest)
    return tl.div_rn(x, tl.broadcast_to(by, x.shape))


@triton.jit
def _e2m1(size):
    """Numbers >= 0 as codes in the low byte of int32: nearest, ties to the even code, at most 6.

    The steps of the code are 1/2 below 2, 1 below 4 and 2 above, so the code is the least of three
    counts: of halves, of ones plus 2, of twos plus 4. Adding 1.5 * 2**23 rounds to a whole number
    and leaves it as the last bits of the sum. An infinity saturates, as does NaN.
    """
    halves = tl.fma(size, 2.0, 12582912.0).to(tl.int32, bitcast=True)
    ones = (size + 12582914.0).to(tl.int32, bitcast=True)
    twos = tl.fma(size, 0.5, 12582916.0).to(tl.int32, bitcast=True)
    return tl.minimum(tl.minimum(halves, ones), tl.minimum(twos, 0x4B400007))


@triton.jit
def _e2m1_pairs(size, CONVERT: tl.constexpr):
    """Codes of neighbours ``[..., 2]`` in the low byte of int32, the first in its low nibble."""
    if CONVERT:
        low, high = tl.split(size)
        return tl.inline_asm_elementwise(
            """{
            .reg .b8 a, b, c, d;
            cvt.rn.satfinite.e2m1x2.f32 a, $5, $1;
            cvt.rn.satfinite.e2m1x2.f32 b, $6, $2;
            cvt.rn.satfinite.e2m1x2.f32 c, $7, $3;
            cvt.rn.satfinite.e2m1x2.f32 d, $8, $4;
            mov.b32 $0, {a, b, c, d};
            }""",
            "=r,r,r,r,r,r,r,r,r", [low, high], dtype=tl.uint8, is_pure=True, pack=4,
        ).to(tl.int32)  # fmt: skip
    low, high = tl.split(_e2m1(size))
    return low | (high << 4)


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


@triton.jit
def _amax(
    x_ptr, amax_ptr, stride_b, stride_t, stride_h, stride_d, tokens,
    CHANNELS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    head, batch = tl.program_id(1), tl.program_id(2)
    largest = tl.zeros([ROWS, 1, WIDTH], tl.int32)
    for step in range(STEPS):
        first = (tl.program_id(0) * STEPS + step) * ROWS
        bits = _load(
            x_ptr, batch, head, first, tl.arange(0, ROWS),
            stride_b, stride_t, stride_h, stride_d, tokens, DIM, WIDTH, WIDTH,
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
    word, lane = tl.program_id(0) * ROWS, tl.arange(0, ROWS)
    first, rows = _rows_of(word, lane)  # pyright: ignore[reportGeneralTypeIssues]
    bits = _load(
        x_ptr, batch, head, first, rows, stride_b, stride_t, stride_h, stride_d, tokens,
        DIM, WIDTH, 32,
    )  # fmt: skip
    amax = tl.max(bits & MAGNITUDE, axis=2)
    # 448 = 1.75 * 2**8: the sum carries into the exponent when the mantissa is above 1.75.
    byte = tl.maximum(((amax + 0x1FFFFF) >> 23) - 8, 0)
    byte = tl.where(amax == EXPONENT, 254, byte)
    byte = tl.where(amax > EXPONENT, 255, byte)
    inverse = tl.where(byte == 254, 0x400000, (254 - byte) << 23)  # 2**-127 is denormal
    inverse = tl.where(byte == 255, NAN, inverse).to(tl.float32, bitcast=True)
    codes = _e4m3(bits.to(tl.float32, bitcast=True) * inverse[:, :, None], CONVERT)
    _store(codes_ptr, batch, head, first, rows, tokens, heads, codes, DIM)
    matrix = batch.to(tl.int64) * heads + head
    _store_scales(scales_ptr, matrix, tiles, word, lane, byte, ROWS, WIDTH // 32, COLUMNS)


@triton.jit
def _nvfp4_rows(
    bits, encode, CONVERT: tl.constexpr, CONVERT_E2M1: tl.constexpr, FUSED: tl.constexpr,
    LARGEST: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Bytes of two codes, uint8 ``[ROWS, WIDTH / 16, 8]``, and scale codes, int32, of blocks."""
    amax = _finite(tl.max(bits & MAGNITUDE, axis=2), LARGEST)
    six = tl.full([ROWS, WIDTH // 16], E2M1_MAX, tl.float32)
    stored = _e4m3(_quotient(encode * amax, six, FUSED), CONVERT).to(tl.int32)
    # A code read as the upper bits of a float32 is the number times 2**-120.
    scale = (stored << 20).to(tl.float32, bitcast=True) * 2.0**120
    size = tl.abs(bits.to(tl.float32, bitcast=True)) * encode
    size = _quotient(size, scale[:, :, None], FUSED)
    pairs: tl.constexpr = [ROWS, WIDTH // 16, 8, 2]
    packed = _e2m1_pairs(tl.reshape(size, pairs), CONVERT_E2M1)
    low, high = tl.split(tl.reshape(bits, pairs))
    packed = packed | ((low >> 28) & 8) | ((high >> 24) & 0x80)
    # Under a scale of 0 nothing is left, under NaN, which carries it, the signs.
    kept = tl.where(stored == 0, 0, tl.where(stored == 0x7F, 0x88, 0xFF))
    return (packed & kept[:, :, None]).to(tl.uint8), stored


@triton.jit
def _nvfp4(
    x_ptr, codes_ptr, scales_ptr, amax_ptr, factor_ptr,
    stride_b, stride_t, stride_h, stride_d, tokens, tiles, heads,
    CONVERT: tl.constexpr, CONVERT_E2M1: tl.constexpr, FUSED: tl.constexpr,
    LARGEST: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    part, head, batch = _last_first()  # pyright: ignore[reportGeneralTypeIssues]
    whole = _finite(tl.load(amax_ptr), LARGEST)
    whole = tl.where(whole < NVFP4_AMAX_SAFE, NVFP4_AMAX_SAFE, whole)
    encode = tl.div_rn(tl.full([], NVFP4_MAX, tl.float32), whole)
    encode = tl.where(encode > NVFP4_ENCODE_MAX, NVFP4_ENCODE_MAX, encode)
    if (part == 0) & (head == 0) & (batch == 0):
        tl.store(factor_ptr, tl.div_rn(tl.full([], 1.0, tl.float32), encode))
    matrix, lane = batch.to(tl.int64) * heads + head, tl.arange(0, ROWS)
    block = tl.arange(0, WIDTH // 16)
    for step in range(128 // ROWS):
        word = part * 128 + step * ROWS
        first, rows = _rows_of(word, lane)
        bits = _load(
            x_ptr, batch, head, first, rows, stride_b, stride_t, stride_h, stride_d, tokens,
            DIM, WIDTH, 16,
        )  # fmt: skip
        packed, stored = _nvfp4_rows(
            bits, encode, CONVERT, CONVERT_E2M1, FUSED, LARGEST, WIDTH, ROWS
        )
        _store(codes_ptr, batch, head, first, rows, tokens, heads, packed, DIM // 2)
        valid = (rows < tokens - first)[:, None] & (block < DIM // 16)[None, :]
        stored = tl.where(valid, stored, 0)  # NaN reaches the padding through the global scale
        _store_scales(scales_ptr, matrix, tiles, word, lane, stored, ROWS, WIDTH // 16, COLUMNS)


@triton.jit
def _fp8_values(
    x_ptr, codes_ptr, amax_ptr, factor_ptr,
    stride_b, stride_t, stride_h, stride_d, tokens, heads,
    CONVERT: tl.constexpr, LARGEST: tl.constexpr, CHANNELS: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    part, head, batch = _last_first()  # pyright: ignore[reportGeneralTypeIssues]
    writes_factor = (part == 0) & (batch == 0)
    first, rows = part * ROWS, tl.arange(0, ROWS)
    bits = _load(
        x_ptr, batch, head, first, rows, stride_b, stride_t, stride_h, stride_d, tokens,
        DIM, WIDTH, WIDTH,
    )  # fmt: skip
    values = bits.to(tl.float32, bitcast=True)
    if CHANNELS:
        channel = tl.arange(0, WIDTH)
        amax = tl.load(amax_ptr + head * DIM + channel, mask=channel < DIM, other=0)
        amax = _finite(amax, LARGEST)
        amax = tl.where(amax < FP8_CHANNEL_FLOOR, FP8_CHANNEL_FLOOR, amax)
        factor = tl.div_rn(amax, tl.full([WIDTH], E4M3_MAX, tl.float32))
        tl.store(factor_ptr + head * DIM + channel, factor, mask=(channel < DIM) & writes_factor)
        values = tl.div_rn(values, tl.broadcast_to(factor[None, None, :], [ROWS, 1, WIDTH]))
    else:
        amax = _finite(tl.load(amax_ptr), LARGEST)
        factor = tl.div_rn(amax, tl.full([], E4M3_MAX, tl.float32))
        factor = tl.where(factor < FP8_TENSOR_FLOOR, FP8_TENSOR_FLOOR, factor)
        if writes_factor & (head == 0):
            tl.store(factor_ptr, factor)
        values = values * tl.div_rn(tl.full([], 1.0, tl.float32), factor)
    codes = _e4m3(values, CONVERT)
    _store(codes_ptr, batch, head, first, rows, tokens, heads, codes, DIM)


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
            ROWS=ROWS, **SCALED_OPTIONS,
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
        kernel[(tiles, heads, batch)](
            x, codes, scales, _largest(x, channels=False), factor, *x.stride(),
            tokens, tiles, heads,
            CONVERT=converts(x.device), CONVERT_E2M1=converts_e2m1(x.device),
            FUSED=x.device.type == "cuda", LARGEST=largest_number(x.dtype), DIM=dim,
            WIDTH=width(dim, 16), COLUMNS=columns, ROWS=ROWS, **SCALED_OPTIONS,
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


def converts_e2m1(device: torch.device) -> bool:
    """The GPU has an instruction for float32 to e2m1 (10.x and 12.x)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (10, 0)


def _largest(x: Tensor, *, channels: bool) -> Tensor:
    """Bits of the largest magnitude, int32 ``[1]`` or ``[H * D]``; to be called on x's device."""
    batch, tokens, heads, dim = x.shape
    found = torch.zeros(heads * dim if channels else 1, dtype=torch.int32, device=x.device)
    kernel: Any = _amax
    kernel[(num_blocks(tokens, ROWS * STEPS), heads, batch)](
        x, found, *x.stride(), tokens,
        CHANNELS=channels, DIM=dim, WIDTH=width(dim, 1), ROWS=ROWS, STEPS=STEPS, **AMAX_OPTIONS,
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
