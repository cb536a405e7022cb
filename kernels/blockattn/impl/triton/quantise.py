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
from blockattn.impl.triton.encode import (
    EXPONENT,
    MAGNITUDE,
    _e4m3,
    _finite,
    _last_first,
    _load,
    _rows_of,
    _store,
    _store_scales,
)
from blockattn.impl.triton.nvfp4 import _nvfp4
from blockattn.layout import num_blocks
from blockattn.scale_layout import SCALE_COLUMNS, SCALE_ROWS

ROWS = 32
STEPS = 8  # row groups per program of the amax pass: fewer atomics
# A fused multiply-add would round once where PyTorch rounds twice.
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
AMAX_OPTIONS = OPTIONS | {"num_warps": 2}  # fewer warps meet at the end of a program
SCALED_OPTIONS = OPTIONS | {"num_warps": 8}
NVFP4_ROWS = 8  # of small programs
NVFP4_OPTIONS = OPTIONS | {"num_warps": 1}

E4M3_MAX = tl.constexpr(formats.E4M3_MAX)
FP8_TENSOR_FLOOR = tl.constexpr(formats.FP8_TENSOR_FLOOR)
FP8_CHANNEL_FLOOR = tl.constexpr(formats.FP8_CHANNEL_FLOOR)
NAN = tl.constexpr(0x7FC00000)


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
            x, codes.view(torch.int32), scales, _largest(x, channels=False), factor, *x.stride(),
            tokens, tiles, heads,
            CONVERT=converts(x.device), CONVERT_E2M1=converts_e2m1(x.device),
            FUSED=x.device.type == "cuda", LARGEST=largest_number(x.dtype), DIM=dim,
            WIDTH=width(dim, 16), COLUMNS=columns, **_nvfp4_shape(x),
        )  # fmt: skip
    return codes, scales.view(torch.uint8), factor


def _nvfp4_shape(x: Tensor) -> dict[str, Any]:
    """Rows and options of the NVFP4 encoder: small programs where no layout has to change.

    Tensors that Triton 3.6 does not read by whole vectors, and more channels, change their layout
    in shared memory. In small programs that gave wrong codes on an H200, or ptxas 12.8 did not end.
    """
    vectors = x.shape[3] <= 128 and x.stride(3) == 1 and x.data_ptr() % 16 == 0
    if vectors and all(stride % 16 == 0 for stride in x.stride()[:3]):
        return {"ROWS": NVFP4_ROWS} | NVFP4_OPTIONS
    return {"ROWS": ROWS} | SCALED_OPTIONS


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
