"""The fused encoders write the bits of the PyTorch encoders: interpreted here, compiled on a GPU.

The PyTorch encoders, which run on the CPU here, are themselves tested against a search over all
code points (test_quant_formats.py).
"""

from __future__ import annotations

from fractions import Fraction
from functools import partial
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blockattn.impl import triton as kernels
from blockattn.quant import RECIPES, QuantRecipe, quantise_operands
from blockattn.quant_formats import (
    BlockScaled,
    Fp8Values,
    quantise_fp8_values,
    quantise_mxfp8,
    quantise_nvfp4,
)

triton = pytest.importorskip("triton", reason="needs triton (Linux)")
import triton.language as tl  # noqa: E402

from blockattn.impl.triton import encode, nvfp4, quantise  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ENCODERS = {
    "mxfp8": quantise_mxfp8,
    "nvfp4": quantise_nvfp4,
    "fp8 tensor": quantise_fp8_values,
    "fp8 channel": partial(quantise_fp8_values, scale="channel"),
}
EVERY_ENCODER = pytest.mark.parametrize("name", ENCODERS)
# Computed bits everywhere; on GPUs that have it, the instruction as well.
CONVERSIONS = sorted({False, quantise.converts(torch.device(DEVICE))})


def fused(name, x):
    """The encoder's result by the kernels, brought to the CPU."""
    x = x.to(DEVICE)
    with patch.object(kernels, "DEVICES", ("cuda", "cpu")):
        assert kernels.encodes(quantise.formats.sixteen_bit(x))
        return ENCODERS[name](x)


def plain(name, x):
    with patch.object(kernels, "DEVICES", ()):
        return ENCODERS[name](x.cpu())


def parts(coded):
    """Bytes of the elements, scale bytes and scales of either result, on the CPU."""
    data = coded.data.cpu().view(torch.uint8)
    if isinstance(coded, Fp8Values):
        return {"data": data, "scale": coded.scale.cpu()}
    factor = torch.as_tensor(coded.global_scale).cpu()
    return {"data": data, "scales": coded.scales.cpu(), "global_scale": factor}


def assert_same_bits(coded, expected):
    found, wanted = parts(coded), parts(expected)
    for part in wanted:
        assert found[part].dtype == wanted[part].dtype, part
        assert torch.equal(found[part], wanted[part]), part
    assert coded.data.dtype == expected.data.dtype
    assert not isinstance(coded, BlockScaled) or coded.shape == expected.shape


def assert_encodes_alike(name, x):
    before = x.clone()
    assert_same_bits(fused(name, x), plain(name, x))
    assert torch.equal(x.view(torch.int16), before.view(torch.int16))


def draw(*shape, seed=0, spread=3.0, dtype=torch.bfloat16, size=1.0):
    """Normal numbers; blocks of 16 channels differ in size by up to 2 ** (4 * spread) or so."""
    noise = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=noise)
    scale = torch.randn(*shape[:-1], -(-shape[-1] // 16), 1, generator=noise) * spread
    scale = torch.exp2(scale).expand(*scale.shape[:-1], 16).flatten(-2)[..., : shape[-1]]
    return (x * scale * size).to(dtype)


def rows(*values, width=64, dtype=torch.bfloat16):
    """[1, rows, 1, width], every row a list of numbers repeated."""
    made = [torch.tensor(row, dtype=torch.float64).repeat(width)[:width] for row in values]
    return torch.stack(made)[None, :, None].to(dtype)


INPUTS = {
    "normal": draw(2, 14, 3, 64),
    "float16": draw(1, 40, 2, 64, dtype=torch.float16),
    "wide": draw(1, 40, 2, 64, spread=8),
    "tiny": draw(1, 9, 2, 64, size=2.0**-120),
    "huge": draw(1, 9, 2, 64, spread=0.5, size=2.0**120),
    "zeros": torch.zeros(1, 5, 2, 64, dtype=torch.bfloat16),
    "zeros of both signs beside numbers": rows([0.0], [-0.0], [-0.0, 1.0], [1e-9, -1e-9]),
    "bfloat16 denormals": rows([2.0**-133, -(2.0**-133)], [2.0**-127, 3 * 2.0**-133]),
    "float16 denormals": rows([2.0**-24, -(2.0**-24)], [2.0**-15], dtype=torch.float16),
    "denormals beside numbers": rows([1.0, 2.0**-130], [2.0**-133], [2.0**100, -(2.0**-126)]),
    "ties of e4m3": rows([448.0, 440.0, 432.0, 17.0, -19.0, 2.0**-9, 2.0**-10, -3 * 2.0**-10]),
    "ties of e2m1": rows([6.0, 5.0, 3.5, -2.5, 1.75, 1.25, -0.75, 0.25], [-5.0, 2.5, 6.0]),
    "above the largest element": rows([450.0, 1.0, -464.0, 466.0, 479.0], [449.0], [447.0]),
    "largest numbers": rows([3.3e38, -1.0], [1.0], [-3.3895e38, 3.3895e38]),
    "largest float16": rows([65504.0, -1.0], [1.0], dtype=torch.float16),
    "infinities": rows([np.inf, 1.0], [-np.inf], [3.0, -2.0]),
    "infinities of float16": rows([np.inf, 1.0], [-np.inf], [3.0, 6e-8], dtype=torch.float16),
    "an infinity beside large numbers": rows([np.inf, 3.3e38, -1.7e38, 2.0**120]),
    "below every floor": rows([1e-9, -1e-12], [1e-20]),
}


@EVERY_ENCODER
@pytest.mark.parametrize("kind", INPUTS)
def test_bits_equal_those_of_pytorch(name, kind):
    assert_encodes_alike(name, INPUTS[kind])


@EVERY_ENCODER
@pytest.mark.parametrize("tokens", [1, 31, 33, 127, 128, 129, 300])
def test_any_length_is_encoded_and_its_scales_padded_to_tiles(name, tokens):
    assert_encodes_alike(name, draw(1, tokens, 2, 64, seed=tokens))


@EVERY_ENCODER
@pytest.mark.parametrize("dim", [32, 96, 128, 160, 256])
def test_any_head_dim_of_whole_blocks_is_encoded(name, dim):
    assert_encodes_alike(name, draw(2, 35, 2, dim, seed=dim))


@pytest.mark.parametrize(
    ("name", "dim"),
    [
        *(("nvfp4", dim) for dim in (16, 80, 144)),
        *(("fp8 tensor", dim) for dim in (1, 70)),
        *(("fp8 channel", dim) for dim in (5, 200)),
    ],
)
def test_head_dims_that_mxfp8_does_not_take(name, dim):
    assert_encodes_alike(name, draw(1, 130, 2, dim, seed=dim))


@EVERY_ENCODER
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wider_inputs_are_rounded_to_bfloat16_first(name, dtype):
    x = draw(1, 20, 1, 32, dtype=dtype)
    assert_same_bits(fused(name, x), plain(name, x.bfloat16()))


@EVERY_ENCODER
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_finite_16_bit_number(name, dtype):
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    x = torch.where(x.isfinite(), x, 0).reshape(1, 512, 1, 128)
    assert_encodes_alike(name, x)


@settings(max_examples=15)
@given(
    st.sampled_from(sorted(ENCODERS)),
    st.integers(0, 2**31 - 1),
    st.floats(0, 8),
    st.integers(-60, 60),
    st.sampled_from([torch.bfloat16, torch.float16]),
)
def test_random_tensors_of_any_range(name, seed, spread, exponent, dtype):
    x = draw(1, 40, 2, 64, seed=seed, spread=spread, size=2.0**exponent)
    largest = torch.finfo(dtype).max
    assert_encodes_alike(name, x.float().clamp(-largest, largest).to(dtype))


# -- rounding, at its edges ------------------------------------------------------------------


@triton.jit
def e4m3_of(x_ptr, out_ptr, COUNT: tl.constexpr, CONVERT: tl.constexpr):
    place = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    tl.store(out_ptr + place, encode._e4m3(tl.load(x_ptr + place), CONVERT))


@triton.jit
def e2m1_of(x_ptr, scale_ptr, out_ptr, COUNT: tl.constexpr, FUSED: tl.constexpr):
    place = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    size = nvfp4._quotient(tl.load(x_ptr + place), tl.load(scale_ptr + place), FUSED)
    tl.store(out_ptr + place, nvfp4._e2m1(size) & 0xFF)


def padded(x):
    return torch.nn.functional.pad(x, (0, -len(x) % 1024)).to(DEVICE)


def neighbours(x, reach):
    """Every float32 up to ``reach`` steps from positive numbers, and their negatives."""
    steps = torch.arange(-reach, reach + 1, dtype=torch.int32)
    x = (x.view(torch.int32)[:, None] + steps).flatten().view(torch.float32)
    return torch.cat([x, -x])


def e4m3_numbers():
    codes = torch.arange(127, dtype=torch.uint8)
    return codes.view(torch.float8_e4m3fn).float()


@pytest.mark.parametrize("convert", CONVERSIONS)
def test_e4m3_rounds_to_nearest_even_and_saturates(convert):
    points = e4m3_numbers()
    edges = torch.cat([points[1:], (points[1:] + points[:-1]) / 2])
    edges = torch.cat([edges, torch.tensor([464.0, 480.0, 1e5, 3e38, 2.0**-126])])
    x = torch.cat([neighbours(edges, 3), torch.tensor([0.0, -0.0, torch.inf, -torch.inf])])
    expected = x.clamp(-448, 448).to(torch.float8_e4m3fn)
    x = padded(x)
    out = torch.empty(len(x), dtype=torch.uint8, device=DEVICE)
    e4m3_of[(len(x) // 1024,)](x, out, COUNT=1024, CONVERT=convert)
    assert torch.equal(out.cpu()[: len(expected)], expected.view(torch.uint8))


@pytest.mark.parametrize("convert", CONVERSIONS)
def test_e4m3_keeps_nan(convert):
    x = padded(torch.tensor([torch.nan, -torch.nan]))
    out = torch.empty(len(x), dtype=torch.uint8, device=DEVICE)
    e4m3_of[(1,)](x, out, COUNT=1024, CONVERT=convert)
    assert ((out[:2] & 0x7F) == 0x7F).all()


LIMITS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # of the codes of e2m1


def quotients_at_every_limit():
    """Numbers around limit * scale, and the scales, for every limit and every scale of a block."""
    scale = e4m3_numbers()[1:]
    x = neighbours((torch.tensor(LIMITS)[:, None] * scale).flatten(), 4)
    x = x[: len(x) // 2]
    return x, scale.repeat(7).repeat_interleave(9)


def nearest_codes(quotient):
    """Code points by search: the nearest one, of two the even code."""
    points = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    distance = np.abs(np.asarray(quotient, dtype=np.float64)[:, None] - points)
    nearest = distance == distance.min(axis=1, keepdims=True)
    return np.where(nearest, np.arange(8) % 2, 2).argmin(axis=1)


@pytest.mark.parametrize("fused", sorted({False, DEVICE == "cuda"}))
def test_e2m1_of_a_quotient_at_every_limit_of_every_scale(fused):
    x, scale = quotients_at_every_limit()
    more = torch.tensor([0.0, 5.9, 6.1, 7.0, 9.0, 1e30, torch.inf, 2.0**-140])
    x, scale = torch.cat([x, more]), torch.cat([scale, torch.ones(len(more))])
    out = torch.empty(len(padded(x)), dtype=torch.int32, device=DEVICE)
    e2m1_of[(len(out) // 1024,)](padded(x), padded(scale), out, COUNT=1024, FUSED=fused)
    finite = np.minimum((x / scale).numpy(), 100)
    assert np.array_equal(out.cpu().numpy()[: len(x)], nearest_codes(finite))


def rounded(number):
    """A positive fraction rounded to 24 bits, ties to even."""
    exponent = number.numerator.bit_length() - number.denominator.bit_length()
    unit = Fraction(2) ** (exponent - 23 - (number < Fraction(2) ** exponent))
    return round(number / unit) * unit


def test_a_product_in_two_parts_decides_every_code_as_the_quotient_does():
    """What a GPU computes, in exact fractions, whichever neighbour its reciprocal falls on."""
    x, scale = quotients_at_every_limit()
    expected = nearest_codes(x / scale)
    for offset in (-1, 0, 1):
        inverse = ((1 / scale).view(torch.int32) + offset).view(torch.float32)
        found = []
        for number, by, over in zip(*(map(Fraction, y.tolist()) for y in (x, scale, inverse))):
            lost = 1 - over * by
            rest = rounded(abs(lost) * over) * (1 if lost > 0 else -1) if lost else Fraction(0)
            part = rounded(number * abs(rest)) * (1 if rest > 0 else -1) if rest else Fraction(0)
            found.append(float(rounded(number * over + part)))
        assert np.array_equal(nearest_codes(found), expected)


# -- special values, memory ------------------------------------------------------------------


@EVERY_ENCODER
def test_nan_poisons_what_it_poisons_in_pytorch_and_never_the_padding(name):
    x = draw(1, 40, 2, 64)
    x[0, 20, 1, 40] = torch.nan
    coded, expected = fused(name, x), plain(name, x)
    wanted = expected.dequantise().isnan()
    assert wanted.any()
    assert torch.equal(coded.dequantise().cpu().isnan(), wanted)
    if isinstance(coded, BlockScaled):
        written = coded.scales.cpu()
        assert torch.equal(written & 0x7F, expected.scales & 0x7F)
        assert not written[expected.scales == 0].any()


@EVERY_ENCODER
def test_every_byte_is_written(name):
    x = draw(1, 130, 2, 96)
    empty = torch.empty

    def rubbish(*shape, **kind):
        made = empty(*shape, **kind)
        made.view(torch.uint8).fill_(0x5A) if made.dim() else made.fill_(1e30)
        return made

    with patch.object(torch, "empty", rubbish):
        coded = fused(name, x)
    assert_same_bits(coded, plain(name, x))


def transposed(x):
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def packed(x):
    return torch.stack([x, x * 2, x * 3], dim=2)[:, :, 0]


def channels_apart(x):
    return torch.stack([x, -x], dim=-1)[..., 0]


def misaligned(x):
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def one_head_for_all(x):
    return x[:, :, :1].expand_as(x)


@EVERY_ENCODER
@pytest.mark.parametrize(
    "layout", [transposed, packed, channels_apart, misaligned, one_head_for_all]
)
def test_any_strides_give_the_bits_of_the_contiguous_tensor(name, layout):
    x = layout(draw(2, 37, 3, 64).to(DEVICE))
    assert layout is misaligned or not x.is_contiguous()
    assert_same_bits(fused(name, x), plain(name, x.contiguous()))


def spacious(count, folder):
    """Memory for ``count`` bfloat16 numbers; without a GPU a file of which little is ever held."""
    if DEVICE == "cuda":
        return torch.empty(count, dtype=torch.bfloat16, device=DEVICE)
    return torch.from_file(str(folder / "room"), shared=True, size=count, dtype=torch.bfloat16)


@EVERY_ENCODER
def test_offsets_beyond_32_bits(name, tmp_path):
    """Two batches 2**31 elements apart; the memory between them is never touched."""
    room = spacious(2**31 + 40 * 64, tmp_path)
    x = room.as_strided((2, 40, 1, 64), (2**31, 64, 64, 1))
    x.copy_(draw(2, 40, 1, 64))
    assert_same_bits(fused(name, x), plain(name, x.contiguous()))


@EVERY_ENCODER
def test_repeats_are_bitwise_equal(name):
    x = draw(2, 70, 1, 64)
    first = fused(name, x)
    for _ in range(100 if DEVICE == "cuda" else 1):
        assert_same_bits(fused(name, x), first)


@pytest.mark.gpu
@EVERY_ENCODER
def test_a_large_tensor_equals_pytorch_and_nothing_is_read_on_the_host(name):
    x = draw(1, 4097, 24, 128).to(DEVICE)
    expected = plain(name, x)
    fused(name, x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        coded = ENCODERS[name](x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_same_bits(coded, expected)


@pytest.mark.gpu
@EVERY_ENCODER
def test_a_captured_graph_encodes_what_its_input_holds_at_replay(name):
    x = draw(1, 300, 2, 64).to(DEVICE)
    fused(name, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        coded = ENCODERS[name](x)
    for seed in (1, 2):
        x.copy_(draw(1, 300, 2, 64, seed=seed, spread=seed))
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits(coded, plain(name, x))


# -- which encoder runs ----------------------------------------------------------------------


def test_the_kernels_serve_gpu_tensors_of_16_bits_that_hold_something(monkeypatch):
    x = draw(1, 4, 1, 32)
    assert not kernels.encodes(x.cpu())
    monkeypatch.setattr(kernels, "DEVICES", ("cuda", "cpu"))
    assert kernels.encodes(x)
    assert not kernels.encodes(x.float())
    assert not kernels.encodes(x[:, :0])
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)
    assert not kernels.encodes(x)


@EVERY_ENCODER
def test_an_empty_sequence_is_encoded_without_a_kernel(name, monkeypatch):
    monkeypatch.setattr(kernels, "DEVICES", ("cuda", "cpu"))
    coded = ENCODERS[name](torch.zeros(2, 0, 3, 32, device=DEVICE))
    assert coded.dequantise().shape == (2, 0, 3, 32)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_of_quantised_attention_gets_the_same_operands(recipe, monkeypatch):
    q, k, v = draw(1, 70, 4, 64), draw(1, 50, 2, 64, seed=1), draw(1, 50, 2, 64, seed=2)
    expected = quantise_operands(q, k, v, QuantRecipe(*recipe), smooth=False)
    monkeypatch.setattr(kernels, "DEVICES", ("cuda", "cpu"))
    q, k, v = (x.to(DEVICE) for x in (q, k, v))
    operands = quantise_operands(q, k, v, QuantRecipe(*recipe), smooth=False)
    for name in "qkv":
        if isinstance(getattr(expected, name), BlockScaled | Fp8Values):
            assert_same_bits(getattr(operands, name), getattr(expected, name))
