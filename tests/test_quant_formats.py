"""MXFP8, NVFP4 and FP8 encoders against an exhaustive search over their code points."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blockattn.quant_formats import quantise_fp8_values, quantise_mxfp8, quantise_nvfp4
from blockattn.scale_layout import swizzle_scales, swizzled_offset, unswizzle_scales

# Code points written down from the definition of the formats, code = index.
E4M3 = np.array(
    [
        (code & 7) * 2.0**-9 if code < 8 else (8 + (code & 7)) * 2.0 ** ((code >> 3) - 10)
        for code in range(127)
    ]
)
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
SEEDS = st.integers(0, 2**31 - 1)


def nearest(x: np.ndarray, points: np.ndarray, sign_bit: int) -> np.ndarray:
    """Codes of the nearest points by looking at all of them; ties go to the even code."""
    distance = np.abs(np.abs(x.astype(np.float64))[..., None] - points)
    best = distance.min(axis=-1, keepdims=True)
    odd_last = np.where(distance == best, np.arange(len(points)) % 2, 2)
    code = odd_last.argmin(axis=-1)
    return (code | np.signbit(x) * sign_bit).astype(np.uint8)


def bf16(*shape: int, seed: int = 0, spread: float = 1.0) -> torch.Tensor:
    """Normal numbers whose blocks of 16 differ in size by up to 2 ** (4 * spread) or so."""
    noise = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=noise)
    size = torch.randn(*shape[:-1], shape[-1] // 16, 1, generator=noise) * spread
    return (x.unflatten(-1, (-1, 16)) * torch.exp2(size)).flatten(-2).bfloat16()


def hard_cases(width: int) -> torch.Tensor:
    """[1, S, 1, width]: zero block, bf16 maximum / 2, tiny and denormal values, ties, negatives."""
    rows = [
        torch.zeros(width),
        -torch.zeros(width),
        torch.full((width,), 1.6e38),
        torch.linspace(-1e-37, 1e-37, width),
        torch.full((width,), 2.0**-133),
        torch.arange(width) / 64,
        torch.arange(width) * -0.25,
        torch.tensor([448.0, 440.0, 432.0, 17.0, 19.0, 2.0**-9, 2.0**-10, 3 * 2.0**-10]).repeat(
            width // 8
        ),
        torch.tensor([6.0, 5.0, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25]).repeat(width // 8),
        torch.tensor([450.0, *[1.0] * (width - 1)]),
    ]
    return torch.stack(rows)[None, :, None].bfloat16()


INPUTS = {
    "normal": bf16(2, 14, 3, 64),
    "wide": bf16(1, 40, 2, 64, seed=1, spread=8),
    "hard": hard_cases(64),
    "float16": bf16(1, 9, 2, 32, seed=2).half(),
    "tiny": bf16(1, 9, 2, 32, seed=3) * 2.0**-120,
    "huge": bf16(1, 9, 2, 32, seed=4) * 2.0**120,
}


def blocks_of(x: torch.Tensor, size: int) -> np.ndarray:
    return x.double().numpy().reshape(*x.shape[:3], -1, size)


def mxfp8_by_search(x: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    blocks = blocks_of(x, 32)
    amax = np.abs(blocks).max(axis=-1)
    byte = np.zeros(amax.shape, dtype=np.uint8)
    for index, value in np.ndenumerate(amax):
        if value:
            fits = (b for b in range(254) if Fraction(2) ** (b - 127) * 448 >= Fraction(value))
            byte[index] = next(fits, 254)
    elements = blocks / 2.0 ** (byte.astype(np.float64) - 127)[..., None]
    return byte, nearest(elements, E4M3, 128).reshape(x.shape)


@pytest.mark.parametrize("name", INPUTS)
def test_mxfp8_scale_is_the_power_of_two_above_amax_over_448_and_elements_are_the_nearest(name):
    x = INPUTS[name]
    coded = quantise_mxfp8(x)
    byte, elements = mxfp8_by_search(x)
    assert np.array_equal(coded.scale_bytes().numpy(), byte)
    assert np.array_equal(coded.data.view(torch.uint8).numpy(), elements)
    assert coded.global_scale == 1.0
    assert coded.shape == tuple(x.shape)


def nvfp4_by_search(x: torch.Tensor) -> tuple[np.ndarray, np.ndarray, np.float32]:
    blocks = blocks_of(x, 16).astype(np.float32)
    amax = np.abs(blocks).max(axis=-1)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        encode = np.minimum(np.float32(2688) / amax.max(), np.float32(2688 / 1e-6))
        byte = nearest(encode * amax / np.float32(6), E4M3, 0)
        scale = E4M3[byte].astype(np.float32)[..., None]
        elements = np.where(scale == 0, np.float32(0), blocks * encode / scale)
    codes = nearest(elements, E2M1, 8).reshape(x.shape)
    return byte, codes[..., 0::2] + 16 * codes[..., 1::2], np.float32(1) / encode


@pytest.mark.parametrize("name", INPUTS)
def test_nvfp4_scales_and_packed_elements_are_the_nearest_low_nibble_first(name):
    x = INPUTS[name]
    coded = quantise_nvfp4(x)
    byte, packed, global_scale = nvfp4_by_search(x)
    assert np.array_equal(coded.scale_bytes().numpy(), byte)
    assert np.array_equal(coded.data.numpy(), packed)
    assert isinstance(coded.global_scale, torch.Tensor)
    assert coded.global_scale.shape == ()
    assert coded.global_scale.item() == global_scale


@pytest.mark.parametrize("name", INPUTS)
def test_fp8_values_per_tensor_are_v_times_the_reciprocal_of_amax_over_448(name):
    x = INPUTS[name]
    coded = quantise_fp8_values(x)
    v = x.double().numpy().astype(np.float32)
    factor = np.maximum(np.abs(v).max() / np.float32(448), np.float32(1 / (448 * 512)))
    codes = nearest(v * (np.float32(1) / factor), E4M3, 128)
    assert coded.scale.item() == factor
    assert np.array_equal(coded.data.view(torch.uint8).numpy(), codes)


@pytest.mark.parametrize("name", INPUTS)
def test_fp8_values_per_channel_have_one_scale_per_head_and_channel(name):
    x = INPUTS[name]
    coded = quantise_fp8_values(x, scale="channel")
    v = x.double().numpy().astype(np.float32)
    factor = np.maximum(np.abs(v).max(axis=(0, 1)), np.float32(1e-3)) / np.float32(448)
    assert np.array_equal(coded.scale.numpy(), factor)
    codes = nearest(v / factor, E4M3, 128)
    assert np.array_equal(coded.data.view(torch.uint8).numpy(), codes)


def test_every_bf16_number_gets_its_nearest_e4m3_element():
    pattern = torch.arange(2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = pattern[pattern.float() < 448].float()
    x = torch.cat([x, -x, torch.tensor([448.0])])  # amax 448: scale 1
    x = torch.nn.functional.pad(x, (0, -len(x) % 31)).reshape(-1, 31)
    x = torch.nn.functional.pad(x, (0, 1), value=448.0)[None, :, None].bfloat16()
    coded = quantise_mxfp8(x)
    assert (coded.scale_bytes() == 127).all()
    assert np.array_equal(
        coded.data.view(torch.uint8).numpy(), nearest(x.float().numpy(), E4M3, 128)
    )


# -- special values --------------------------------------------------------------------------


@pytest.mark.parametrize("encode", [quantise_mxfp8, quantise_nvfp4])
def test_an_all_zero_tensor_has_zero_scales_zero_elements_and_a_finite_global_scale(encode):
    coded = encode(torch.zeros(1, 5, 2, 32, dtype=torch.bfloat16))
    assert not coded.scales.any()
    assert not coded.data.view(torch.uint8).any()
    assert not coded.dequantise().any()
    if coded.format == "nvfp4":
        assert coded.global_scale.item() == pytest.approx(1e-6 / 2688, rel=1e-6)


@pytest.mark.parametrize("encode", [quantise_mxfp8, quantise_nvfp4])
def test_a_zero_block_beside_others_has_scale_byte_0(encode):
    x = bf16(1, 3, 1, 64)
    x[0, 1, 0, 32:] = 0
    coded = encode(x)
    half = coded.scale_bytes().shape[-1] // 2
    assert not coded.scale_bytes()[0, 1, 0, half:].any()
    assert coded.scale_bytes()[0, 1, 0, :half].all()
    assert not coded.dequantise()[0, 1, 0, 32:].any()


def test_mxfp8_scales_stop_at_the_ends_of_the_e8m0_range():
    x = torch.full((1, 2, 1, 32), 2.0**-133).bfloat16()
    x[0, 1] = torch.inf
    coded = quantise_mxfp8(x)
    assert coded.scale_bytes().flatten().tolist() == [0, 254]
    assert (coded.data[0, 1].float() == 448).all()


def test_an_infinity_counts_as_the_largest_finite_number_in_nvfp4_and_fp8():
    x = bf16(1, 4, 2, 32)
    x[0, 0, 0, 0], x[0, 1, 1, 3] = torch.inf, -torch.inf
    largest = torch.finfo(torch.bfloat16).max
    same = x.clamp(-largest, largest)
    assert torch.equal(quantise_nvfp4(x).data, quantise_nvfp4(same).data)
    assert quantise_nvfp4(x).dequantise().isfinite().all()
    for scale in ("tensor", "channel"):
        coded = quantise_fp8_values(x, scale=scale)
        assert coded.dequantise().isfinite().all()
        assert coded.data[0, 0, 0, 0].item() == 448


def test_nan_poisons_its_block_in_mxfp8_and_the_tensor_in_nvfp4_and_fp8():
    x = bf16(1, 4, 2, 64)
    x[0, 2, 1, 40] = torch.nan
    poisoned = quantise_mxfp8(x).dequantise().isnan()
    assert poisoned[0, 2, 1, 32:].all()
    assert poisoned.sum() == 32
    assert quantise_nvfp4(x).dequantise().isnan().all()
    assert quantise_fp8_values(x).dequantise().isnan().all()
    by_channel = quantise_fp8_values(x, scale="channel").dequantise().isnan()
    assert by_channel[:, :, 1, 40].all()
    assert by_channel.sum() == 4


@pytest.mark.parametrize("encode", [quantise_mxfp8, quantise_nvfp4])
def test_an_empty_sequence_stays_empty(encode):
    coded = encode(torch.zeros(2, 0, 3, 32))
    assert coded.scales.numel() == 0
    assert coded.dequantise().shape == (2, 0, 3, 32)


@pytest.mark.parametrize("scale", ["tensor", "channel"])
def test_tiny_values_use_the_floor_of_the_scale(scale):
    coded = quantise_fp8_values(torch.full((1, 3, 1, 4), 1e-9), scale=scale)
    floor = 1 / (448 * 512) if scale == "tensor" else 1e-3 / 448
    assert coded.scale.flatten()[0].item() == pytest.approx(floor, rel=1e-6)


# -- decoding --------------------------------------------------------------------------------


@pytest.mark.parametrize("encode", [quantise_mxfp8, quantise_nvfp4])
@pytest.mark.parametrize("name", ["normal", "wide", "huge", "float16"])
def test_element_times_block_scale_is_exact_in_bfloat16(encode, name):
    coded = encode(INPUTS[name])
    assert torch.equal(coded.operand().double(), coded.operand(torch.float64))


def test_every_product_of_e2m1_and_e4m3_is_exact_in_bfloat16():
    products = torch.from_numpy(np.multiply.outer(E2M1, E4M3))
    assert torch.equal(products.bfloat16().double(), products)


@pytest.mark.parametrize("encode", [quantise_mxfp8, quantise_nvfp4])
def test_dequantise_is_element_times_block_scale_times_global_scale(encode):
    x = bf16(1, 6, 2, 64)
    coded = encode(x)
    scale = coded.block_scales().repeat_interleave(64 // coded.block_scales().shape[-1], dim=-1)
    elements = coded.operand(torch.float32) / scale
    points = E4M3 if coded.format == "mxfp8" else E2M1
    assert np.isin(elements.abs().numpy(), points).all()
    assert torch.equal(coded.dequantise(), elements * scale * coded.global_scale)


@given(SEEDS, st.floats(0, 6))
def test_mxfp8_error_is_half_a_step_of_its_element(seed, spread):
    x = bf16(1, 3, 2, 64, seed=seed, spread=spread)
    coded = quantise_mxfp8(x)
    step = coded.block_scales().double().repeat_interleave(32, dim=-1) * 2.0**-10
    bound = torch.maximum(x.double().abs() * 2.0**-4, step)
    assert ((coded.dequantise(torch.float64) - x.double()).abs() <= bound).all()


@given(SEEDS, st.floats(0, 6))
def test_nvfp4_error_is_half_its_widest_step_or_that_of_its_block_scale(seed, spread):
    x = bf16(1, 3, 2, 64, seed=seed, spread=spread)
    coded = quantise_nvfp4(x)
    assert isinstance(coded.global_scale, torch.Tensor)
    scale = coded.block_scales().double().repeat_interleave(16, dim=-1)
    # Elements are at most 1 apart from a code; a denormal block scale is off by up to 2 ** -10.
    bound = torch.maximum(scale, torch.tensor(6 * 2.0**-10)) * coded.global_scale.double()
    error = (coded.dequantise(torch.float64) - x.double()).abs()
    assert (error <= bound * (1 + 1e-5)).all()


@given(SEEDS, st.sampled_from(["tensor", "channel"]))
def test_fp8_values_error_is_half_a_step(seed, scale):
    x = bf16(2, 5, 2, 32, seed=seed, spread=3)
    coded = quantise_fp8_values(x, scale=scale)
    bound = torch.maximum(x.double().abs() * 2.0**-4, coded.scale.double() * 2.0**-10)
    error = (coded.dequantise(torch.float64) - x.double()).abs()
    assert (error <= bound * (1 + 1e-5)).all()


@given(SEEDS)
def test_encoding_mxfp8_again_changes_nothing(seed):
    once = quantise_mxfp8(bf16(1, 3, 1, 64, seed=seed, spread=4)).operand()
    assert torch.equal(quantise_mxfp8(once).operand(), once)


# -- scale bytes -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "column", "columns", "offset"),
    [
        (0, 0, 4, 0),
        (0, 3, 4, 3),
        (1, 0, 4, 16),
        (31, 0, 4, 496),
        (32, 0, 4, 4),
        (127, 3, 4, 511),
        (0, 4, 8, 512),
        (128, 0, 4, 512),
        (128, 0, 8, 1024),
        (129, 5, 8, 1024 + 512 + 16 + 1),
    ],
)
def test_offset_of_a_scale_factor(row, column, columns, offset):
    assert swizzled_offset(row, column, columns) == offset


@pytest.mark.parametrize("shape", [(2, 200, 6), (1, 14, 4), (3, 128, 8), (1, 129, 1)])
def test_every_scale_byte_lies_at_its_offset_and_the_padding_is_zero(shape):
    matrices, rows, columns = shape
    plain = torch.randint(1, 256, shape, dtype=torch.uint8)
    flat = swizzle_scales(plain)
    stride = -(-rows // 128) * 128 * -(-columns // 4) * 4
    assert flat.shape == (matrices * stride,)
    found = torch.zeros_like(flat)
    for index in np.ndindex(*shape):
        m, r, c = index
        tile = (r // 128) * -(-columns // 4) * 512 + (c // 4) * 512
        place = m * stride + tile + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4
        assert place == m * stride + swizzled_offset(r, c, columns)
        found[place] = plain[m, r, c]
    assert torch.equal(flat, found)
    assert torch.equal(unswizzle_scales(flat, shape), plain)


@pytest.mark.parametrize(("encode", "columns"), [(quantise_mxfp8, 4), (quantise_nvfp4, 8)])
def test_scales_are_those_of_matrix_b_times_heads_plus_h(encode, columns):
    x = bf16(2, 130, 3, 128, spread=4)
    coded = encode(x)
    matrices = unswizzle_scales(coded.scales, (6, 256, columns))
    assert not matrices[:, 130:].any()
    assert torch.equal(matrices[1 * 3 + 2, :130], coded.scale_bytes()[1, :, 2])
    assert coded.data.shape[1] == 130
    assert coded.nbytes == coded.data.numel() + 6 * 256 * columns


def test_swizzling_undoes_unswizzling():
    flat = torch.randint(0, 256, (2 * 256 * 8,), dtype=torch.uint8)
    assert torch.equal(swizzle_scales(unswizzle_scales(flat, (2, 256, 8))), flat)


# -- bad input -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: quantise_mxfp8(torch.zeros(1, 4, 2, 48)), ValueError, "head dim 48.*of 32"),
        (lambda: quantise_nvfp4(torch.zeros(1, 4, 2, 24)), ValueError, "head dim 24.*of 16"),
        (lambda: quantise_mxfp8(torch.zeros(4, 2, 32)), ValueError, "rank 3"),
        (lambda: quantise_mxfp8(torch.zeros(1, 4, 2, 32).int()), TypeError, "dtype"),
        (lambda: quantise_nvfp4([1.0]), TypeError, "torch.Tensor"),
        (
            lambda: quantise_fp8_values(torch.zeros(1, 4, 2, 8), scale="row"),
            ValueError,
            "'channel'",
        ),
        (lambda: swizzle_scales(torch.zeros(1, 4, 4)), TypeError, "uint8"),
        (lambda: swizzle_scales(torch.zeros(4, 4).byte()), ValueError, "matrices, rows, columns"),
        (lambda: unswizzle_scales(torch.zeros(5).byte(), (1, 1, 1)), ValueError, "takes 512"),
        (lambda: unswizzle_scales(torch.zeros(512), (1, 1, 1)), TypeError, "uint8"),
    ],
)
def test_bad_input_is_refused_and_named(call, error, text):
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wider_inputs_are_cast_to_bfloat16_first(dtype):
    x = torch.randn(1, 5, 2, 32, dtype=dtype)
    assert torch.equal(quantise_nvfp4(x).data, quantise_nvfp4(x.bfloat16()).data)
    assert torch.equal(
        quantise_mxfp8(x).data.view(torch.uint8),
        quantise_mxfp8(x.bfloat16()).data.view(torch.uint8),
    )


@pytest.mark.parametrize("encode", [quantise_mxfp8, quantise_nvfp4, quantise_fp8_values])
def test_strides_do_not_matter_and_the_input_is_not_changed(encode):
    base = bf16(2, 3, 7, 32)
    strided, before = base.transpose(1, 2), base.clone()
    assert torch.equal(encode(strided).dequantise(), encode(strided.contiguous()).dequantise())
    assert torch.equal(base, before)
