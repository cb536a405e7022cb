"""Quantised attention: folds, smoothing, combinations, and the weaknesses known from elsewhere."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from blockattn import BlockRoute, BlockSummary, UnsupportedError, attend, sol_route
from blockattn.quant import (
    RECIPES,
    QuantRecipe,
    quantise_operands,
    quantised_attention,
)
from blockattn.quant_formats import BlockScaled
from blockattn.smoothing import smooth_qk, smoothing_lse_shift

NAMES = [f"{qk}-{v}-{scale}" for qk, v, scale in RECIPES]
every_recipe = pytest.mark.parametrize("recipe", [QuantRecipe(*r) for r in RECIPES], ids=NAMES)
BLOCK_SCALED = ("mxfp8", "nvfp4")


def qkv(tokens=96, keys=None, heads=4, kv_heads=2, dim=32, seed=0, dtype=torch.float32, size=0.5):
    """N(0, size) numbers that bfloat16 holds, in ``dtype``: no cast rounds them."""
    noise = torch.Generator().manual_seed(seed)
    shapes = [(2, tokens, heads, dim), *2 * [(2, keys or tokens, kv_heads, dim)]]
    return [(torch.randn(s, generator=noise) * size).bfloat16().to(dtype) for s in shapes]


def settings(recipe: QuantRecipe) -> dict[str, str]:
    return {"qk_dtype": recipe.qk_dtype, "v_dtype": recipe.v_dtype, "v_scale": recipe.v_scale}


def decoded(q, k, v, recipe, **options):
    """float64 q, k, v as the recipe encodes them, every scale applied."""
    operands = quantise_operands(q, k, v, recipe, **options)
    sides = (
        x.dequantise(torch.float64) if isinstance(x, BlockScaled) else x.double()
        for x in (operands.q, operands.k)
    )
    return *sides, operands.v.dequantise(torch.float64)


def plain_attention(q, k, v, *, causal=False, scale=None):
    """float64 attention with the whole score matrix; (output, natural-log LSE)."""
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * (scale or q.shape[3] ** -0.5)
    if causal:
        above = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(above, -torch.inf)
    out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(dim=-1), v)
    return out, scores.logsumexp(dim=-1)


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return torch.cosine_similarity(a.double().flatten(), b.double().flatten(), dim=0).item()


def random_route(q, k, share=0.4, seed=1) -> BlockRoute:
    blocks = [-(-x.shape[1] // 64) for x in (q, k)]
    noise = torch.Generator().manual_seed(seed)
    mask = torch.rand(q.shape[0], q.shape[2], *blocks, generator=noise) < share
    mask[..., 0] = True
    return BlockRoute.from_dense(mask, seqlens=(q.shape[1], k.shape[1]))


# -- scales are folded, nothing else changes -------------------------------------------------


@every_recipe
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("impl", ["reference", "eager"])
def test_the_call_equals_float64_attention_over_the_decoded_operands(recipe, causal, impl):
    q, k, v = qkv(tokens=150)
    out, trace = quantised_attention(
        q, k, v, **settings(recipe), causal=causal, impl=impl, smooth=False, return_trace=True
    )
    expected, lse = plain_attention(*decoded(q, k, v, recipe, smooth=False), causal=causal)
    torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=1e-4)
    torch.testing.assert_close(trace.lse.double(), lse, atol=2e-5, rtol=1e-5)
    assert trace.impl == impl


@every_recipe
def test_own_scales_multiply_the_folded_ones(recipe):
    q, k, v = qkv()
    out = quantised_attention(q, k, v, **settings(recipe), scale=0.3, scale_output=2.5)
    expected, _ = plain_attention(*decoded(q, k, v, recipe), scale=0.3)
    torch.testing.assert_close(out.double(), 2.5 * expected, atol=1e-5, rtol=1e-4)


@every_recipe
@pytest.mark.parametrize("with_tail", [False, True])
def test_a_route_and_its_tail_see_the_decoded_keys_and_values(recipe, with_tail):
    q, k, v = qkv(tokens=300)
    route = random_route(q, k)
    out, trace = quantised_attention(
        q, k, v, **settings(recipe), route=route, with_tail=with_tail, return_trace=True
    )
    dq, dk, dv = decoded(q, k, v, recipe)
    tail = BlockSummary.of(dk, dv) if with_tail else None
    expected = attend(dq, dk, dv, route, tail=tail, impl="reference")
    dense, _ = plain_attention(dq, dk, dv)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-3)
    assert 0 < trace.density < 1
    assert (out.double() - dense).abs().max() > 1e-3
    assert trace.algorithm == ("sol_attn" if with_tail else "block_mask")


@every_recipe
def test_a_full_route_with_a_tail_is_the_dense_call(recipe):
    q, k, v = qkv(tokens=130)
    full = BlockRoute.full((2, 4), seqlens=(130, 130))
    dense = quantised_attention(q, k, v, **settings(recipe))
    routed = quantised_attention(q, k, v, **settings(recipe), route=full, with_tail=True)
    torch.testing.assert_close(routed, dense, atol=1e-6, rtol=1e-4)


def test_a_sol_route_of_the_original_q_and_k_runs_quantised():
    q, k, v = qkv(tokens=512, heads=2, kv_heads=2)
    route = sol_route(q, k, tau=1.0)
    exact = attend(q, k, v, route, tail=BlockSummary.of(k, v))
    for kind in BLOCK_SCALED:
        out = quantised_attention(q, k, v, qk_dtype=kind, route=route, with_tail=True)
        assert cosine(out, exact) > 0.99


# -- error against the unquantised call (tolerances of the kernels' own tests) ---------------


@pytest.mark.parametrize("tokens", [256, 512])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("recipe", "tolerance", "least"),
    [
        (("bf16", "fp8", "tensor"), 5e-2, 0.999),
        (("mxfp8", "fp8", "tensor"), 8e-2, 0.998),
        (("mxfp8", "fp8", "channel"), 8e-2, 0.998),
        (("nvfp4", "fp8", "tensor"), 2e-1, 0.99),
        (("nvfp4", "fp8", "channel"), 2e-1, 0.99),
    ],
)
def test_error_of_every_recipe_stays_within_its_tolerance(tokens, causal, recipe, tolerance, least):
    q, k, v = qkv(tokens=tokens, dim=128, dtype=torch.bfloat16)
    out = quantised_attention(q, k, v, **settings(QuantRecipe(*recipe)), causal=causal)
    expected, _ = plain_attention(q.double(), k.double(), v.double(), causal=causal)
    assert out.dtype == torch.bfloat16
    assert out.isfinite().all()
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
    assert cosine(out, expected) > least
    assert cosine(out, expected) < 1 - 1e-5  # something was quantised


def test_fewer_bits_give_more_error():
    q, k, v = qkv(tokens=256, dim=128, size=1.0)
    expected, _ = plain_attention(q.double(), k.double(), v.double())
    errors = [
        (quantised_attention(q, k, v, qk_dtype=kind).double() - expected).norm().item()
        for kind in ("bf16", *BLOCK_SCALED)
    ]
    assert errors[0] < errors[1] < errors[2]


# -- smoothing -------------------------------------------------------------------------------


def test_smoothing_follows_its_formula():
    q, k, _ = qkv(tokens=40, keys=24, dtype=torch.bfloat16)
    smooth = smooth_qk(q, k)
    for head in range(2):
        group = q[:, :, 2 * head : 2 * head + 2].float()
        q_max, k_max = group.abs().amax((0, 1, 2)), k[:, :, head].float().abs().amax((0, 1))
        factor = q_max**0.7 / k_max**0.3
        torch.testing.assert_close(smooth.factor[head], factor)
        by = factor.bfloat16().float(), (1 / factor).bfloat16().float()
        mean = k[:, :, head].float().mean((0, 1))
        torch.testing.assert_close(smooth.k_mean[head], mean)
        shifted = ((k[:, :, head].float() - mean) * by[0]).bfloat16()
        torch.testing.assert_close(smooth.k[:, :, head], shifted)
        torch.testing.assert_close(
            smooth.q[:, :, 2 * head : 2 * head + 2], (group * by[1]).bfloat16()
        )


@pytest.mark.parametrize(("q_size", "k_size"), [(0.0, 1.0), (1e6, 1e-6), (1e-6, 1e9)])
def test_smoothing_factors_stay_within_their_bounds(q_size, k_size):
    q, k, _ = qkv()
    smooth = smooth_qk(q * q_size, k * k_size)
    assert smooth.factor.min() >= 1e-4 * (1 - 1e-6)
    assert smooth.factor.max() <= 1e4 * (1 + 1e-6)
    assert smooth.q.isfinite().all()
    assert smooth.k.isfinite().all()


@given(st.integers(0, 2**31 - 1), st.floats(-3, 3))
def test_smoothing_leaves_the_output_and_after_its_shift_the_lse(seed, offset):
    q, k, v = qkv(tokens=33, seed=seed)
    k = k + offset
    smooth = smooth_qk(q, k)
    expected, expected_lse = plain_attention(q.double(), k.double(), v.double())
    out, lse = plain_attention(smooth.q.double(), smooth.k.double(), v.double())
    lse = lse + smoothing_lse_shift(q, smooth.k_mean, 32**-0.5)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(lse, expected_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", BLOCK_SCALED)
def test_the_lse_of_a_smoothed_call_is_that_of_the_unsmoothed_scores(kind):
    q, k, v = qkv(tokens=200, dim=64)
    k = k + 1.5
    _, expected = plain_attention(q.double(), k.double(), v.double())
    _, trace = quantised_attention(q, k, v, qk_dtype=kind, return_trace=True)
    assert trace.lse.dtype == torch.float32
    assert (trace.lse.double() - expected).abs().max() < 0.1
    smooth = smooth_qk(q, k)
    assert smoothing_lse_shift(q, smooth.k_mean, 64**-0.5).abs().max() > 1


def test_smoothing_helps_keys_with_a_common_offset():
    q, k, v = qkv(tokens=256, dim=64)
    k = k + 4 * torch.randn(64, generator=torch.Generator().manual_seed(3))
    expected, _ = plain_attention(q.double(), k.double(), v.double())
    with_it = quantised_attention(q, k, v, qk_dtype="nvfp4")
    without = quantised_attention(q, k, v, qk_dtype="nvfp4", smooth=False)
    assert (with_it - expected).norm() < 0.5 * (without - expected).norm()


@pytest.mark.parametrize(("kind", "smoothed"), [("bf16", False), ("mxfp8", True), ("nvfp4", True)])
def test_smoothing_is_on_exactly_where_q_and_k_are_quantised(kind, smoothed):
    operands = quantise_operands(*qkv(), QuantRecipe(kind))
    assert (operands.k_mean is not None) == smoothed


# -- SkipSoftmax -----------------------------------------------------------------------------


def planted(levels, dim=32, queries=128):
    """All queries along one channel; key tile j has score levels[j] (base-2 logits) there."""
    q = torch.zeros(1, queries, 1, dim)
    q[..., 0] = 4.0
    k = torch.zeros(1, 128 * len(levels), 1, dim)
    unit = 4.0 * dim**-0.5 * math.log2(math.e)
    k[0, :, 0, 0] = torch.tensor(levels).repeat_interleave(128) / unit
    v = torch.randn(k.shape, generator=torch.Generator().manual_seed(0))
    return q, k, v


@pytest.mark.parametrize("kind", ["bf16", *BLOCK_SCALED])
@pytest.mark.parametrize("impl", ["reference", "eager"])
def test_skip_weakness_6_skip_threshold_works_on_quantised_scores(kind, impl):
    q, k, v = planted([0.0, 24.0, -8.0, 22.0, 2.0, 40.0, 20.0])
    out, trace = quantised_attention(
        q, k, v, qk_dtype=kind, skip_threshold=2.0**-9, impl=impl, return_trace=True
    )
    dense = quantised_attention(q, k, v, qk_dtype=kind, impl=impl)
    skipped = trace.skipped.dense()[0, 0, 0]
    assert skipped.tolist() == [False, False, True, False, True, False, True]
    assert trace.density == pytest.approx(4 / 7)
    assert cosine(out, dense) > 0.95


@pytest.mark.parametrize("kind", BLOCK_SCALED)
def test_a_dropped_tile_changes_the_output(kind):
    q, k, v = planted([0.0, 2.0, 1.0])
    out, trace = quantised_attention(q, k, v, qk_dtype=kind, skip_threshold=0.75, return_trace=True)
    dense = quantised_attention(q, k, v, qk_dtype=kind)
    assert trace.skipped.dense()[0, 0, 0].tolist() == [False, False, True]
    assert (out - dense).abs().max() > 1e-3


@pytest.mark.parametrize("kind", BLOCK_SCALED)
def test_route_tail_and_threshold_combine(kind):
    q, k, v = qkv(tokens=512)
    route = random_route(q, k)
    recipe = QuantRecipe(kind)
    out, trace = quantised_attention(
        q, k, v, qk_dtype=kind, route=route, with_tail=True, skip_threshold=0.9, return_trace=True
    )
    dq, dk, dv = decoded(q, k, v, recipe)
    expected, exact = attend(
        dq, dk, dv, route, tail=BlockSummary.of(dk, dv), skip_threshold=0.9,
        impl="reference", return_trace=True,
    )  # fmt: skip
    assert trace.skipped.differing(exact.skipped) == 0
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-3)
    assert trace.algorithm == "sol_attn+skip_softmax"


# -- probabilities in FP8 --------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [100, 200])
def test_rounded_probabilities_are_e4m3_relative_to_a_lagging_maximum(tokens):
    q, k, v = qkv(tokens=tokens, size=0.8)
    out = quantised_attention(q, k, v, qk_dtype="bf16", round_p=True)
    dq, dk, dv = decoded(q, k, v, QuantRecipe("bf16"))
    dk, dv = (x.repeat_interleave(2, dim=2) for x in (dk, dv))
    scores = torch.einsum("bqhd,bkhd->bhqk", dq, dk) * 32**-0.5

    def rounded_relative_to(maximum):
        p = (scores - maximum).exp()
        codes = p.float().to(torch.float8_e4m3fn).double()
        return torch.einsum("bhqk,bkhd->bqhd", codes / p.sum(dim=-1, keepdim=True), dv)

    # The second tile of 128 keys never exceeds the first by 2 ** 8, so the maximum stays.
    expected = rounded_relative_to(scores[..., :128].amax(dim=-1, keepdim=True))
    # A float32 probability next to a tie may round the other way than the float64 one.
    assert (out - expected).norm() < 1e-3 * expected.norm()
    unrounded = quantised_attention(q, k, v, qk_dtype="bf16")
    assert (out - unrounded).norm() > 1e-2 * expected.norm()
    if tokens > 128:
        exact_maximum = rounded_relative_to(scores.amax(dim=-1, keepdim=True))
        assert (out - exact_maximum).norm() > 3e-3 * expected.norm()


def test_a_maximum_that_grows_by_more_than_256_moves_the_reference_of_rounded_probabilities():
    q, k, v = planted([0.0, 20.0])
    exact = quantised_attention(q, k, v, qk_dtype="bf16")
    out = quantised_attention(q, k, v, qk_dtype="bf16", round_p=True)
    # Without moving, 2 ** 20 would saturate at 448 below a denominator of 2 ** 20.
    torch.testing.assert_close(out, exact, atol=1e-4, rtol=1e-2)


def test_the_trace_says_whether_probabilities_were_rounded():
    q, k, v = qkv()
    for flag, word in ((False, "P not rounded to fp8"), (True, "fp8 P")):
        _, trace = quantised_attention(q, k, v, round_p=flag, return_trace=True)
        assert trace.emulated == ("mxfp8 QK", "fp8 V", word)
        assert f"emulated: mxfp8 QK, fp8 V, {word}" in str(trace)
    assert trace.impl == "reference"
    assert any("e4m3" in reason.text for reason in trace.reasons if reason.impl == "eager")


def test_an_implementation_that_cannot_round_probabilities_says_so():
    with pytest.raises(UnsupportedError, match="does not round probabilities"):
        quantised_attention(*qkv(), round_p=True, impl="eager")


def test_an_unquantised_call_is_not_called_emulated():
    q, k, v = qkv()
    _, trace = attend(q, k, v, return_trace=True)
    assert trace.emulated == ()
    assert "emulated" not in str(trace)


# -- edges -----------------------------------------------------------------------------------


@every_recipe
@pytest.mark.parametrize(("tokens", "keys"), [(14, 14), (1, 1), (14, 200), (200, 14), (129, 257)])
def test_lengths_need_not_fill_a_tile(recipe, tokens, keys):
    q, k, v = qkv(tokens=tokens, keys=keys)
    out = quantised_attention(q, k, v, **settings(recipe))
    expected, _ = plain_attention(*decoded(q, k, v, recipe))
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-3)


@every_recipe
def test_no_queries_give_no_rows_and_no_keys_give_zero_and_minus_infinity(recipe):
    q, k, v = qkv(tokens=5)
    assert quantised_attention(q[:, :0], k, v, **settings(recipe)).shape == (2, 0, 4, 32)
    out, trace = quantised_attention(q, k[:, :0], v[:, :0], **settings(recipe), return_trace=True)
    assert out.shape == q.shape
    assert not out.any()
    assert (trace.lse == -torch.inf).all()


@every_recipe
def test_all_zero_values_give_a_zero_output(recipe):
    q, k, v = qkv()
    assert not quantised_attention(q, k, torch.zeros_like(v), **settings(recipe)).any()


@every_recipe
def test_all_zero_queries_and_keys_average_uniformly(recipe):
    q, k, v = qkv()
    out = quantised_attention(torch.zeros_like(q), torch.zeros_like(k), v, **settings(recipe))
    _, _, dv = decoded(q, k, v, recipe)
    expected = dv.mean(dim=1, keepdim=True).repeat_interleave(2, dim=2).expand(q.shape)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("kind", BLOCK_SCALED)
@pytest.mark.parametrize("impl", ["reference", "eager"])
def test_nan_in_a_key_gives_nan_and_never_hides(kind, impl):
    q, k, v = qkv()
    k[0, 3, 1, 5] = torch.nan
    out = quantised_attention(q, k, v, qk_dtype=kind, impl=impl)
    assert out[:, :, 2:].isnan().all()


@every_recipe
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
def test_the_output_has_the_dtype_of_q_and_wide_inputs_are_cast_to_bfloat16(recipe, dtype):
    q, k, v = (x + 1e-4 for x in qkv(dtype=torch.float64))
    out = quantised_attention(q.to(dtype), k.to(dtype), v.to(dtype), **settings(recipe))
    assert out.dtype == dtype
    if dtype in (torch.float32, torch.float64):
        short = quantised_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), **settings(recipe))
        assert torch.equal(out.bfloat16(), short)


@every_recipe
def test_strides_do_not_matter_and_inputs_are_not_changed(recipe):
    straight = qkv(dtype=torch.bfloat16)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in straight]
    assert not strided[0].is_contiguous()
    kept = [x.clone() for x in strided]
    expected = quantised_attention(*straight, **settings(recipe))
    assert torch.equal(quantised_attention(*strided, **settings(recipe)), expected)
    assert all(torch.equal(a, b) for a, b in zip(strided, kept))


# -- device scales and quantisation: weaknesses of earlier implementations ---------------------


class NoHostReads(TorchDispatchMode):
    """Fails where a value of a tensor is read on the host (which synchronises on a GPU)."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert "local_scalar_dense" not in str(func), "a tensor was read on the host"
        return func(*args, **(kwargs or {}))


@every_recipe
def test_skip_weakness_11_scales_stay_on_the_device(recipe):
    q, k, v = qkv()
    with NoHostReads():
        operands = quantise_operands(q, k, v, recipe)
        scale = operands.softmax_scale(torch.tensor(0.25))
    assert isinstance(scale, torch.Tensor)
    assert scale.shape == ()
    with pytest.raises(AssertionError, match="read on the host"), NoHostReads():
        operands.v.scale.max().item()


@pytest.mark.gpu
@every_recipe
def test_skip_weakness_11_quantising_on_a_gpu_never_synchronises(recipe):
    q, k, v = (x.cuda() for x in qkv())
    scale = torch.tensor(0.25, device="cuda")
    quantise_operands(q, k, v, recipe)
    torch.cuda.set_sync_debug_mode("error")
    try:
        quantise_operands(q, k, v, recipe).softmax_scale(scale)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@every_recipe
def test_a_gpu_encodes_the_same_bits(recipe):
    q, k, v = qkv(tokens=200, dim=128, dtype=torch.bfloat16)
    here = quantise_operands(q, k, v, recipe, smooth=False)
    there = quantise_operands(q.cuda(), k.cuda(), v.cuda(), recipe, smooth=False)
    assert torch.equal(here.v.data.view(torch.uint8), there.v.data.view(torch.uint8).cpu())
    assert torch.equal(here.v.scale, there.v.scale.cpu())
    for a, b in ((here.q, there.q), (here.k, there.k)):
        if isinstance(a, BlockScaled) and isinstance(b, BlockScaled):
            assert torch.equal(a.data.view(torch.uint8), b.data.view(torch.uint8).cpu())
            assert torch.equal(a.scales, b.scales.cpu())
            assert float(a.global_scale) == float(b.global_scale)


@pytest.mark.gpu
@every_recipe
def test_a_gpu_call_agrees_with_the_cpu(recipe):
    q, k, v = qkv(tokens=512, dim=128, dtype=torch.bfloat16)
    here = quantised_attention(q, k, v, **settings(recipe))
    there = quantised_attention(q.cuda(), k.cuda(), v.cuda(), **settings(recipe))
    assert cosine(here, there.cpu()) > 0.9999


@every_recipe
def test_skip_weakness_12_quantisers_compile_to_one_graph(recipe):
    """Reductions are slow under torch.compile; fused ones are for kernels, but no graph breaks."""
    q, k, v = qkv(tokens=20)

    def folded(q, k, v):
        operands = quantise_operands(q, k, v, recipe)
        return operands.v.data, operands.v.scale, operands.softmax_scale(torch.ones(()))

    compiled = torch.compile(folded, fullgraph=True, backend="aot_eager")
    for a, b in zip(compiled(q, k, v), folded(q, k, v)):
        assert torch.equal(a.float(), b.float())


@pytest.mark.parametrize("name", ["scale", "scale_output"])
@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.ones(2), "2 elements"),
        (torch.ones(0), "0 elements"),
        (torch.ones((), dtype=torch.float16), "float32"),
        (torch.ones((), dtype=torch.bfloat16), "float32"),
        (torch.ones((), device="meta"), "meta"),
        (torch.ones((), requires_grad=True), "grad"),
        (0.0, "greater than 0"),
        (-1.0, "greater than 0"),
        (math.nan, "finite"),
        (math.inf, "finite"),
        (True, "number"),
        ("1", "number"),
    ],
)
def test_skip_weakness_13_a_scale_that_is_not_one_float32_element_is_refused(name, value, text):
    q, k, v = qkv(tokens=8)
    with pytest.raises((TypeError, ValueError), match=rf"{name}.*{text}"):
        quantised_attention(q, k, v, **{name: value})


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("impl", ["reference", "eager"])
def test_skip_weakness_14_scale_tensors_equal_floats_in_the_dense_call(shape, impl):
    q, k, v = qkv()
    scale, scale_output = torch.full(shape, 0.125), torch.full(shape, 1.5)
    by_tensor = attend(q, k, v, scale=scale, scale_output=scale_output, impl=impl)
    assert torch.equal(by_tensor, attend(q, k, v, scale=0.125, scale_output=1.5, impl=impl))


@every_recipe
@pytest.mark.parametrize("impl", ["reference", "eager"])
def test_skip_weakness_14_scale_tensors_equal_floats_in_the_quantised_call(recipe, impl):
    q, k, v = qkv()
    scale, scale_output = torch.full((1,), 0.125), torch.tensor(1.5)
    by_tensor = quantised_attention(
        q, k, v, **settings(recipe), scale=scale, scale_output=scale_output, impl=impl
    )
    by_float = quantised_attention(
        q, k, v, **settings(recipe), scale=0.125, scale_output=1.5, impl=impl
    )
    assert torch.equal(by_tensor, by_float)


def test_skip_weakness_15_q_and_k_scales_fold_into_one_number():
    q, k, v = qkv()
    operands = quantise_operands(q, 3 * k, v, QuantRecipe("nvfp4"), smooth=False)
    q_amax, k_amax = q.abs().max().item(), (3 * k).bfloat16().abs().max().item()
    expected = 0.25 * q_amax / 2688 * k_amax / 2688
    assert float(operands.softmax_scale(0.25)) == pytest.approx(expected, rel=1e-6)
    assert quantise_operands(q, k, v, QuantRecipe("mxfp8")).softmax_scale(0.25) == 0.25
    assert quantise_operands(q, k, v, QuantRecipe("bf16")).softmax_scale(0.25) == 0.25


@pytest.mark.parametrize("v_scale", ["tensor", "channel"])
def test_skip_weakness_15_scaling_v_by_a_power_of_two_scales_the_output_alone(v_scale):
    q, k, v = qkv()
    out, trace = quantised_attention(q, k, v, v_scale=v_scale, return_trace=True)
    scaled, other = quantised_attention(q, k, 8 * v, v_scale=v_scale, return_trace=True)
    torch.testing.assert_close(scaled, 8 * out, atol=0, rtol=1e-6)
    assert torch.equal(trace.lse, other.lse)


def test_skip_weakness_31_the_lse_is_a_natural_logarithm():
    q, k, v = qkv()
    _, trace = quantised_attention(torch.zeros_like(q), k, v, scale_output=3.0, return_trace=True)
    torch.testing.assert_close(trace.lse, torch.full_like(trace.lse, math.log(96)))


@pytest.mark.parametrize("kind", BLOCK_SCALED)
def test_skip_weakness_32_smoothed_shards_merge_to_the_unsharded_result(kind):
    q, k, v = qkv(tokens=256, dim=64)
    k[:, :128] += 2.0  # the shards' mean keys differ widely
    parts = [
        quantised_attention(q, k[:, half], v[:, half], qk_dtype=kind, return_trace=True)
        for half in (slice(0, 128), slice(128, 256))
    ]
    outs, lses = [out for out, _ in parts], [trace.lse for _, trace in parts]
    weight = torch.softmax(torch.stack(lses), dim=0).transpose(2, 3)[..., None]
    merged = (weight * torch.stack(outs)).sum(dim=0)
    expected, _ = plain_attention(q.double(), k.double(), v.double())
    assert cosine(merged, expected) > 0.99


# -- bad input -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "recipe",
    [
        ("bf16", "fp8", "channel"),
        ("int8", "fp8", "tensor"),
        ("fp8", "fp8", "tensor"),
        ("mxfp8", "bf16", "tensor"),
        ("nvfp4", "fp8", "row"),
    ],
)
def test_a_recipe_outside_the_table_lists_the_supported_ones(recipe):
    with pytest.raises(ValueError, match="not a supported recipe") as caught:
        QuantRecipe(*recipe)
    assert all(str(item) in str(caught.value) for item in RECIPES)


@pytest.mark.parametrize("value", [None, 8, True])
def test_a_recipe_takes_strings_only(value):
    with pytest.raises(TypeError, match="qk_dtype"):
        QuantRecipe(value)


def test_a_bare_recipe_is_bf16_with_fp8_values():
    assert QuantRecipe() == QuantRecipe("bf16", "fp8", "tensor")
    assert QuantRecipe().parts == ("fp8 V",)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"qk_dtype": "int8"}, ValueError, "not a supported recipe"),
        ({"with_tail": True}, ValueError, "with_tail=True.*route"),
        ({"with_tail": 1}, TypeError, "with_tail=1"),
        ({"smooth": "yes"}, TypeError, "smooth='yes'"),
        ({"round_p": 1}, TypeError, "round_p=1"),
        ({"causal": 1}, TypeError, "causal=1"),
        ({"impl": "fast"}, ValueError, "impl='fast'"),
        ({"skip_threshold": -0.1}, ValueError, "skip_threshold"),
        ({"route": "all"}, TypeError, "route"),
    ],
)
def test_bad_arguments_are_refused_and_named(change, error, text):
    with pytest.raises(error, match=text):
        quantised_attention(*qkv(tokens=8), **change)


@pytest.mark.parametrize(("kind", "dim"), [("mxfp8", 48), ("nvfp4", 24)])
def test_a_head_dim_that_is_not_whole_blocks_is_refused(kind, dim):
    with pytest.raises(ValueError, match=f"head dim {dim}.*multiple"):
        quantised_attention(*qkv(tokens=8, dim=dim), qk_dtype=kind)


def test_a_causal_call_has_no_tail():
    q, k, v = qkv(tokens=64)
    route = BlockRoute.full((2, 4), seqlens=(64, 64))
    with pytest.raises(ValueError, match="causal=True has no tail"):
        quantised_attention(q, k, v, route=route, with_tail=True, causal=True)


def test_inputs_that_want_gradients_are_refused():
    q, k, v = qkv(tokens=8)
    with pytest.raises(ValueError, match="forward only"):
        quantised_attention(q.requires_grad_(), k, v)
    with torch.no_grad():
        assert quantised_attention(q, k, v).isfinite().all()
