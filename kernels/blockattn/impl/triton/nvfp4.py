"""The NVFP4 encoder: block scales in e4m3, elements in e2m1, eight to a word (Triton).

Part of the plan in :mod:`blockattn.impl.triton.quantise`, which launches it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from blockattn import quant_formats as formats
from blockattn.impl.triton.encode import (
    MAGNITUDE,
    _e4m3,
    _finite,
    _last_first,
    _load,
    _rows_of,
    _store,
    _store_scales,
)

E2M1_MAX = tl.constexpr(formats.E2M1_MAX)
NVFP4_MAX = tl.constexpr(formats.NVFP4_MAX)
NVFP4_ENCODE_MAX = tl.constexpr(formats.NVFP4_MAX / formats.NVFP4_AMAX_FLOOR)
NVFP4_AMAX_SAFE = tl.constexpr(formats.NVFP4_AMAX_FLOOR / 8)  # below it the scale is at its maximum
SIGNS = tl.constexpr(-0x77777778)  # of the 8 codes of a word: 0x88888888


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
    """Numbers >= 0 as 0x4B400000 + code: nearest, ties to the even code, at most 6.

    The steps of the code are 1/2 below 2, 1 below 4 and 2 above, so the code is the least of three
    counts: of halves, of ones plus 2, of twos plus 4. Adding 1.5 * 2**23 rounds to a whole number
    and leaves it as the last bits of the sum. An infinity saturates, as does NaN.
    """
    halves = tl.fma(size, 2.0, 12582912.0).to(tl.int32, bitcast=True)
    ones = (size + 12582914.0).to(tl.int32, bitcast=True)
    twos = tl.fma(size, 0.5, 12582916.0).to(tl.int32, bitcast=True)
    return tl.minimum(tl.minimum(halves, ones), tl.minimum(twos, 0x4B400007))


@triton.jit
def _e2m1_words(size, bits, CONVERT: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr):
    """Codes of size with the signs of bits, both ``[ROWS, BLOCKS, 16]``, as words of 8.

    ``[ROWS, BLOCKS, 2]`` int32, the first code in the lowest bits: stored as bytes, their layout
    would have to be converted first.
    """
    nibble = (tl.arange(0, 8) * 4)[None, None, None, :]
    signs = tl.reshape((bits >> 28) & 8, [ROWS, BLOCKS, 2, 8])
    if CONVERT:
        low, high = tl.split(tl.reshape(size, [ROWS, BLOCKS, 8, 2]))
        pairs = tl.inline_asm_elementwise(
            """{
            .reg .b8 code;
            .reg .b16 wide;
            cvt.rn.satfinite.e2m1x2.f32 code, $2, $1;
            mov.b16 wide, {code, 0};
            cvt.u32.u16 $0, wide;
            }""",
            "=r,r,r", [low, high], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
        pairs = (
            tl.reshape(pairs, [ROWS, BLOCKS, 2, 4]) << (tl.arange(0, 4) * 8)[None, None, None, :]
        )
        return tl.sum(pairs, axis=3) | tl.sum(signs << nibble, axis=3)
    codes = tl.reshape(_e2m1(size), [ROWS, BLOCKS, 2, 8]) | signs
    return tl.sum(codes << nibble, axis=3) - 0x3F400000  # what lies above the codes adds up to it


@triton.jit
def _nvfp4_rows(
    bits, encode, CONVERT: tl.constexpr, CONVERT_E2M1: tl.constexpr, FUSED: tl.constexpr,
    LARGEST: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Words of 8 codes ``[ROWS, WIDTH / 16, 2]`` and scale codes of blocks, both int32."""
    amax = _finite(tl.max(bits & MAGNITUDE, axis=2), LARGEST)
    six = tl.full([ROWS, WIDTH // 16], E2M1_MAX, tl.float32)
    stored = _e4m3(_quotient(encode * amax, six, FUSED), CONVERT).to(tl.int32)
    # A code read as the upper bits of a float32 is the number times 2**-120.
    scale = (stored << 20).to(tl.float32, bitcast=True) * 2.0**120
    size = tl.abs(bits.to(tl.float32, bitcast=True)) * encode
    size = _quotient(size, scale[:, :, None], FUSED)
    words = _e2m1_words(size, bits, CONVERT_E2M1, WIDTH // 16, ROWS)
    # Under a scale of 0 nothing is left, under NaN, which carries it, the signs.
    kept = tl.where(stored == 0, 0, tl.where(stored == 0x7F, SIGNS, -1))
    return words & kept[:, :, None], stored


@triton.jit
def _nvfp4(
    x_ptr, words_ptr, scales_ptr, amax_ptr, factor_ptr,
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
        words, stored = _nvfp4_rows(
            bits, encode, CONVERT, CONVERT_E2M1, FUSED, LARGEST, WIDTH, ROWS
        )
        _store(words_ptr, batch, head, first, rows, tokens, heads, words, DIM // 8)
        valid = (rows < tokens - first)[:, None] & (block < DIM // 16)[None, :]
        stored = tl.where(valid, stored, 0)  # NaN reaches the padding through the global scale
        _store_scales(scales_ptr, matrix, tiles, word, lane, stored, ROWS, WIDTH // 16, COLUMNS)
