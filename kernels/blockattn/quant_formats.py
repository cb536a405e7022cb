"""MXFP8, NVFP4 and FP8 numbers: encoders and decoders, exact to the bit, on any device.

A block-scaled tensor stores small elements and one scale per block of the head dim; scale bytes lie
in the swizzled order in which block-scaled matrix units read them. Encoders stay on the device and
read nothing on the host. They are plain PyTorch, and define the bits; on a GPU fused kernels
(:mod:`blockattn.impl.triton.quantise`) write the same bits in one pass, or two where a scale is
shared by more than a block. Formats: OCP Microscaling (MX) specification v1.0 for
e4m3, e2m1 and e8m0; NVFP4 scaling and scale-factor order as in TensorRT-LLM (its pull request
18750 keeps the scales on the device).

Infinities and NaN: NaN poisons its block (NVFP4, FP8: all that shares its scale, as the scale is
NaN). An infinity saturates: in MXFP8 it takes the largest scale and element, in NVFP4 and FP8 it
counts as the largest finite value of the 16-bit dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from blockattn import checks
from blockattn.impl import triton
from blockattn.scale_layout import swizzle_scales, unswizzle_scales

E4M3_MAX = 448.0
E2M1_MAX = 6.0
NVFP4_MAX = E4M3_MAX * E2M1_MAX
NVFP4_AMAX_FLOOR = 1e-6  # keeps the encode scale of an all-zero tensor finite
FP8_TENSOR_FLOOR = 1 / (E4M3_MAX * 512)  # smallest scale of a tensor
FP8_CHANNEL_FLOOR = 1e-3  # smallest amax of a (head, channel)
BLOCK_SIZES = {"mxfp8": 32, "nvfp4": 16}


@dataclass(frozen=True)
class BlockScaled:
    """A block-scaled tensor, as a block-scaled attention kernel takes it.

    Attributes:
        data: elements; MXFP8: float8_e4m3fn ``[B, S, H, D]``; NVFP4: uint8 ``[B, S, H, D / 2]``,
            two e2m1 to the byte, the lower channel in the low nibble. Never padded.
        scales: uint8, the swizzled scale bytes of matrix b * H + h after one another, each padded
            to whole tiles of 128 rows x 4 blocks; the padding is 0.
        global_scale: factor on the whole tensor: 1.0 for MXFP8, 0-d float32 tensor 1 / g for NVFP4.
        format: ``mxfp8`` or ``nvfp4``.
        shape: logical (B, S, H, D).
    """

    data: Tensor
    scales: Tensor
    global_scale: float | Tensor
    format: str
    shape: tuple[int, int, int, int]

    @property
    def nbytes(self) -> int:
        """Bytes of elements and scales, padding included."""
        return self.data.numel() * self.data.element_size() + self.scales.numel()

    def scale_bytes(self) -> Tensor:
        """Scale bytes in plain order without padding, uint8 ``[B, S, H, D / block]``."""
        batch, tokens, heads, dim = self.shape
        plain = unswizzle_scales(
            self.scales, (batch * heads, tokens, dim // BLOCK_SIZES[self.format])
        )
        return plain.unflatten(0, (batch, heads)).transpose(1, 2)

    def block_scales(self) -> Tensor:
        """Scale of every block, float32 ``[B, S, H, D / block]``."""
        kind = torch.float8_e8m0fnu if self.format == "mxfp8" else torch.float8_e4m3fn
        return self.scale_bytes().contiguous().view(kind).float()

    def operand(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Element * block scale, what the matrix unit multiplies, ``[B, S, H, D]`` in ``dtype``.

        The global scale is left out: it goes into the softmax scale. Exact in bfloat16, since e4m3
        times a power of two has 4 significant bits and e2m1 times e4m3 has 6, as long as the
        product is within bfloat16's range (MXFP8: magnitudes from 2**-133 to below 2**128).
        """
        values = self.data.float() if self.format == "mxfp8" else _unpack_e2m1(self.data)
        blocks = values.unflatten(-1, (-1, BLOCK_SIZES[self.format]))
        return (blocks * self.block_scales()[..., None]).flatten(-2).to(dtype)

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The encoded values ``[B, S, H, D]``, global scale included."""
        return (self.operand(torch.float32) * self.global_scale).to(dtype)


@dataclass(frozen=True)
class Fp8Values:
    """V as e4m3 with one scale, or one per (head, channel).

    Attributes:
        data: float8_e4m3fn ``[B, S, H, D]``.
        scale: float32, 0-d or ``[H, D]``; value = data * scale.
    """

    data: Tensor
    scale: Tensor

    @property
    def per_channel(self) -> bool:
        return self.scale.dim() == 2

    def operand(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """The elements without their scale; exact in float16, bfloat16 and wider."""
        return self.data.to(dtype)

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The encoded values ``[B, S, H, D]``, rounded once to ``dtype``."""
        return (self.data.float() * self.scale).to(dtype)


def quantise_mxfp8(x: Tensor) -> BlockScaled:
    """e4m3 elements with one power of two per 32 channels, amax / 448 rounded up.

    Args:
        x: ``[B, S, H, D]``, D a multiple of 32; float32 and float64 are cast to bfloat16 first.

    Raises:
        TypeError, ValueError: x is not such a tensor.
    """
    source = _block_source(x, "mxfp8")
    if triton.encodes(source):
        from blockattn.impl.triton import quantise

        return BlockScaled(*quantise.mxfp8(source), 1.0, "mxfp8", _shape(x))
    blocks = _blocks(source.float(), "mxfp8")
    exponent = _e8m0_ceil(blocks.abs().amax(dim=-1))
    scale = exponent.view(torch.float8_e8m0fnu).float()
    data = _e4m3(blocks / scale[..., None]).flatten(-2)
    return BlockScaled(data, _token_scales(exponent), 1.0, "mxfp8", _shape(x))


def quantise_nvfp4(x: Tensor) -> BlockScaled:
    """e2m1 elements, one e4m3 scale per 16 channels, one float32 scale for the tensor.

    With g = 2688 / amax(tensor), at most 2688 / 1e-6: block scale s = e4m3(g * amax / 6), element
    e2m1(x * g / s), in float32 from left to right; x is about element * s / g. A block whose s is
    0 holds zeros.

    Args:
        x: ``[B, S, H, D]``, D a multiple of 16; float32 and float64 are cast to bfloat16 first.

    Raises:
        TypeError, ValueError: x is not such a tensor.
    """
    source = _block_source(x, "nvfp4")
    if triton.encodes(source):
        from blockattn.impl.triton import quantise

        return BlockScaled(*quantise.nvfp4(source), "nvfp4", _shape(x))
    blocks = _blocks(_finite(source), "nvfp4")
    amax = blocks.abs().amax(dim=-1)
    encode = _under(NVFP4_MAX, _amax(amax)).clamp(max=NVFP4_MAX / NVFP4_AMAX_FLOOR)
    stored = _e4m3(_over(encode * amax, E2M1_MAX))
    scale = stored.float()[..., None]
    elements = torch.where(scale == 0, 0.0, blocks * encode / scale)
    data = _pack_e2m1(elements.flatten(-2))
    scales = _token_scales(stored.view(torch.uint8))
    return BlockScaled(data, scales, _under(1.0, encode), "nvfp4", _shape(x))


def quantise_fp8_values(v: Tensor, *, scale: str = "tensor") -> Fp8Values:
    """V as e4m3.

    Args:
        v: ``[B, S, H, D]``; float32 and float64 are cast to bfloat16 first.
        scale: ``tensor``: d = max(amax / 448, 1 / (448 * 512)), element e4m3(v * (1 / d));
            ``channel``: d = max(amax over batch and tokens, 1e-3) / 448 for every (head, channel),
            element e4m3(v / d).

    Raises:
        TypeError, ValueError: v is not such a tensor, or another ``scale``.
    """
    checks.one_of("scale", scale, ("tensor", "channel"))
    source = _source("v", v)
    if triton.encodes(source):
        from blockattn.impl.triton import quantise

        return Fp8Values(*quantise.fp8_values(source, channels=scale == "channel"))
    values = _finite(source)
    if scale == "tensor":
        factor = _over(_amax(values.abs()), E4M3_MAX).clamp(min=FP8_TENSOR_FLOOR)
        return Fp8Values(_e4m3(values * _under(1.0, factor)), factor)
    factor = _over(_amax(values.abs(), (0, 1)).clamp(min=FP8_CHANNEL_FLOOR), E4M3_MAX)
    return Fp8Values(_e4m3(values / factor), factor)


def sixteen_bit(x: Tensor) -> Tensor:
    """Wider inputs are cast to bfloat16, the dtype that quantising kernels take."""
    return x.bfloat16() if x.dtype in (torch.float32, torch.float64) else x


def _source(name: str, x: object) -> Tensor:
    """A checked tensor in a 16-bit dtype."""
    tensor = checks.attention_tensor(name, x)
    checks.forward_only(**{name: tensor})
    return sixteen_bit(tensor)


def _block_source(x: object, kind: str) -> Tensor:
    """A checked tensor in a 16-bit dtype, whose head dim is whole blocks."""
    source, block = _source("x", x), BLOCK_SIZES[kind]
    if source.shape[3] % block:
        raise ValueError(
            f"x: head dim {source.shape[3]} must be a multiple of {block}, the block of {kind}; "
            "pad the last axis with zeros"
        )
    return source


def _blocks(values: Tensor, kind: str) -> Tensor:
    """``[B, S, H, D]`` -> ``[B, S, H, D / block, block]``."""
    return values.unflatten(-1, (-1, BLOCK_SIZES[kind]))


def _shape(x: Tensor) -> tuple[int, int, int, int]:
    batch, tokens, heads, dim = x.shape
    return batch, tokens, heads, dim


def _amax(magnitudes: Tensor, dims: tuple[int, ...] | None = None) -> Tensor:
    """Maximum over ``dims`` (all of them by default); 0 where there are no tokens."""
    if magnitudes.shape[1] == 0:
        return magnitudes.sum(dim=dims)
    return magnitudes.amax() if dims is None else magnitudes.amax(dim=dims)


def _over(x: Tensor, number: float) -> Tensor:
    """x / number rounded once; with a plain number a GPU multiplies by its reciprocal."""
    return x / torch.full_like(x, number)


def _under(number: float, x: Tensor) -> Tensor:
    """number / x rounded once; with a plain number PyTorch multiplies by the reciprocal of x."""
    return torch.full_like(x, number) / x


def _finite(x: Tensor) -> Tensor:
    """In float32, infinities as the largest finite value of the 16-bit dtype of x; NaN stays."""
    largest = torch.finfo(x.dtype).max
    return x.float().clamp(-largest, largest)


def _e4m3(x: Tensor) -> Tensor:
    """Round to nearest even, saturating: PyTorch alone turns values above 464 into NaN."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def _e8m0_ceil(amax: Tensor) -> Tensor:
    """Byte of the smallest power of two >= amax / 448, within 2**-127 .. 2**127; NaN is 255.

    With amax = m * 2**e, m in [1/2, 1), and 448 = 7/8 * 2**9 the ratio's exponent is e - 9, one
    more if m > 7/8: no rounding can get in.
    """
    mantissa, exponent = torch.frexp(amax)
    byte = (exponent - 9 + (mantissa > 0.875).int() + 127).clamp(0, 254)
    byte = torch.where(amax == 0, 0, byte)
    byte = torch.where(amax == torch.inf, 254, byte)
    return torch.where(amax.isnan(), 255, byte).to(torch.uint8)


def _pack_e2m1(x: Tensor) -> Tensor:
    """float32 ``[..., D]`` -> uint8 ``[..., D / 2]``: round to nearest even, saturating at 6.

    A tie goes to the even code, so the limits alternate between > and >=. NaN becomes 0 (e2m1 has
    none); the scale carries it.
    """
    size = x.abs()
    code = (x.signbit().to(torch.uint8)) << 3
    for strict, limit in zip((True, False) * 4, (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)):
        code = code + ((size > limit) if strict else (size >= limit)).to(torch.uint8)
    return code[..., 0::2] | (code[..., 1::2] << 4)


def _unpack_e2m1(data: Tensor) -> Tensor:
    """uint8 ``[..., D / 2]`` -> float32 ``[..., D]``."""
    codes = torch.stack([data & 15, data >> 4], dim=-1).flatten(-2).int()
    # Arithmetic, not a table: a table would have to be copied to the device, which synchronises.
    exponent, odd = (codes & 7) >> 1, codes & 1
    size = torch.where(exponent == 0, odd * 0.5, ((2 + odd) << exponent) * 0.25)
    return torch.where(codes >= 8, -size, size)


def _token_scales(plain: Tensor) -> Tensor:
    """uint8 ``[B, S, H, blocks]`` -> swizzled bytes, matrix b * H + h."""
    return swizzle_scales(plain.transpose(1, 2).flatten(0, 1).contiguous())
