"""The Triton kernel over codes against the reference over what the codes mean.

In the interpreter without a GPU, compiled with one. The interpreter has no bfloat16 and no scaled
product, so there decoded operands are float16; numbers that MXFP8 would lose there do not occur.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from blockattn import BlockRoute, BlockSummary, UnsupportedError, quantised_attention
from blockattn.impl import reference
from blockattn.impl import triton as kernels
from blockattn.problem import Problem, make_problem
from blockattn.quant import RECIPES, QuantRecipe, _decoded, _folded, quantise_operands
from tests.gpu_checks import NAN_KINDS, assert_as_infinite, plant_nan

triton = pytest.importorskip("triton", reason="needs triton (Linux)")
from blockattn.impl.triton import scaled  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16
SMALL = scaled.Config(64, 64, warps=4, stages=2)
LARGE = scaled.Config(128, 128, warps=8, stages=2)
NAMES = ["-".join(recipe) for recipe in RECIPES]
every_recipe = pytest.mark.parametrize("recipe", [QuantRecipe(*r) for r in RECIPES], ids=NAMES)
FORMS = {"plain": "bf16", "mxfp8": "mxfp8", "nvfp4": "nvfp4"}
every_form = pytest.mark.parametrize("qk", FORMS.values(), ids=FORMS)


@pytest.fixture(autouse=True)
def interpreter_may_run_on_the_cpu(monkeypatch):
    monkeypatch.setattr(kernels, "DEVICES", ("cuda", "cpu"))


def make_inputs(tokens=200, heads=2, dim=64, key_heads=None, keys=None, seed=0):
    noise = torch.Generator().manual_seed(seed)

    def draw(count, width):
        return torch.randn(1, count, width, dim, generator=noise).to(DTYPE).to(DEVICE)

    return draw(tokens, heads), *(draw(keys or tokens, key_heads or heads) for _ in range(2))


def random_route(q, k, share=0.4, seed=1, empty_row=False):
    blocks = [-(-x.shape[1] // 64) for x in (q, k)]
    noise = torch.Generator().manual_seed(seed)
    mask = torch.rand(1, q.shape[2], *blocks, generator=noise) < share
    mask[..., -1] = True
    mask[:, :, 0] &= not empty_row
    return BlockRoute.from_dense(mask.to(DEVICE), seqlens=(q.shape[1], k.shape[1]))


def folded(
    q, k, v, recipe, *, with_tail=False, round_p=True, config=SMALL, **options: Any
) -> Problem:
    """The call over codes; without a route the reference rounds P by tiles like the kernel's."""
    tile = (config.rows, config.columns)
    asked = make_problem(q, k, v, skip_tile=tile, want_trace=True, **options)
    return _folded(asked, quantise_operands(q, k, v, recipe), with_tail, round_p)


def meaning(problem: Any, dtype) -> Problem:
    """The same call over decoded operands in ``dtype``; the tail is the kernel's, of 16 bits."""
    decoded = _decoded(replace(problem, tail_to_come=False), problem.operands)
    tail = scaled.summary(problem.operands).to(dtype) if problem.tail_to_come else None
    wide = {name: getattr(decoded, name).to(dtype) for name in "qkv"}
    return replace(decoded, tail=tail, **wide)


def assert_follows_reference(problem: Any, config=SMALL) -> tuple[Any, Any]:
    """Error at most twice that of the same mathematics in 16 bits, plus one rounding."""
    assert kernels.obstacles(problem) == []
    result: Any = scaled.run(problem, config)
    truth: Any = reference.run(meaning(problem, torch.float64))
    plain = reference.run(meaning(problem, torch.float32))
    values, factor = problem.operands.v, problem.scale_output
    expected, single = (x.out.double() for x in (truth, plain))
    if values.per_channel:
        factor = values.scale.repeat_interleave(problem.group, dim=0) * factor
        expected, single = (
            x * values.scale.repeat_interleave(problem.group, dim=0) for x in (expected, single)
        )
    assert torch.isfinite(expected).all()
    eps = torch.finfo(DTYPE).eps
    p_error = (eps * values.data.float().abs().max() * factor).max()
    allowed = 2 * ((single - expected).abs().max() + p_error) + eps * expected.abs().max()
    assert (result.out.double() - expected).abs().max() <= allowed
    finite = torch.isfinite(truth.lse)
    assert torch.equal(torch.isfinite(result.lse), finite)
    assert (result.lse - truth.lse)[finite].abs().max() < 1e-4
    assert result.skipped == truth.skipped
    return result, truth


@every_recipe
@pytest.mark.parametrize("round_p", [False, True])
def test_every_recipe_agrees_with_the_reference(recipe, round_p):
    q, k, v = make_inputs(100, heads=1)
    assert_follows_reference(folded(q, k, v, recipe, round_p=round_p))


@every_form
def test_large_tiles_agree_with_the_reference(qk):
    q, k, v = make_inputs(130, heads=1, dim=128)
    assert_follows_reference(folded(q, k, v, QuantRecipe(qk), config=LARGE), LARGE)


@every_form
@pytest.mark.parametrize("with_tail", [False, True])
def test_a_route_and_its_tail_agree_with_the_reference(qk, with_tail):
    q, k, v = make_inputs(130, heads=1, keys=200)
    route = random_route(q, k, empty_row=True)
    problem = folded(q, k, v, QuantRecipe(qk), route=route, with_tail=with_tail)
    result, truth = assert_follows_reference(problem)
    assert 0 < route.density() < 1
    dense = scaled.run(folded(q, k, v, QuantRecipe(qk)), SMALL)
    assert (result.out - dense.out).abs().max() > 1e-3
    without_keys = torch.isinf(truth.lse)
    assert without_keys.any() != with_tail
    assert not result.out.transpose(1, 2)[without_keys].any()


@every_form
def test_half_a_block_of_queries_to_a_program_agrees_with_the_reference(qk):
    q, k, v = make_inputs(70, heads=1)
    problem = folded(q, k, v, QuantRecipe(qk), route=random_route(q, k), with_tail=True)
    half = scaled.Config(32, 64, warps=4, stages=2)
    assert_follows_reference(problem, half)


CASES = {
    "causal": {"causal": True},
    "scaled": {"scale": 0.05, "scale_output": 2.0},
    "skip": {"skip_threshold": 0.6},
    "skip causal": {"skip_threshold": 0.6, "causal": True},
}


@every_form
@pytest.mark.parametrize("name", CASES)
def test_the_full_range_agrees_with_the_reference(qk, name):
    q, k, v = make_inputs(130, key_heads=1)
    k[:, 64:128] *= 0.1
    problem = folded(q, k, v, QuantRecipe(qk), **CASES[name])
    result, _ = assert_follows_reference(problem)
    if "skip" in name:
        assert int(result.skipped.counts().sum()) > 0


@every_form
@pytest.mark.parametrize(("tokens", "keys"), [(1, 1), (63, 65)])
def test_ragged_lengths_agree_with_the_reference(qk, tokens, keys):
    q, k, v = make_inputs(tokens, heads=1, keys=keys)
    assert_follows_reference(folded(q, k, v, QuantRecipe(qk)))


@every_form
def test_a_causal_route_agrees_with_the_reference(qk):
    q, k, v = make_inputs(100, heads=1)
    route = random_route(q, k, share=0.7)
    assert_follows_reference(folded(q, k, v, QuantRecipe(qk), route=route, causal=True))


@every_form
def test_scales_on_the_device_equal_scales_on_the_host(qk):
    q, k, v = make_inputs(70, heads=1)
    numbers: dict[str, Any] = {"scale": 0.0625, "scale_output": 0.5}
    tensors: dict[str, Any] = {
        name: torch.tensor([value], device=DEVICE) for name, value in numbers.items()
    }
    by_host, by_device = (
        scaled.run(folded(q, k, v, QuantRecipe(qk), **options), SMALL).out
        for options in (numbers, tensors)
    )
    assert torch.equal(by_host, by_device)


@pytest.mark.parametrize("kind", ["mxfp8", "nvfp4"])
def test_decoding_in_one_pass_gives_the_exact_operand(kind):
    q, k, v = make_inputs(150, dim=128)
    operands: Any = quantise_operands(q, k, v, QuantRecipe(kind))
    dtype = scaled.wide(operands)
    assert torch.equal(scaled.decoded(operands.q, dtype), operands.q.operand(dtype))
    wide = operands.q.operand(torch.float64)
    assert torch.equal(operands.q.operand(dtype).double(), wide)


@every_form
def test_summaries_are_those_of_the_decoded_operands(qk):
    q, k, v = make_inputs(150, heads=2, dim=128)
    operands: Any = quantise_operands(q, k, v, QuantRecipe(qk))
    key = operands.k.float() if qk == "bf16" else operands.k.operand(torch.float32)
    expected = BlockSummary.of(key, operands.v.operand(torch.float32))
    found = scaled.summary(operands)
    dtype = scaled.wide(operands)
    assert found.k_mean.dtype == found.v_sum.dtype == dtype
    assert torch.equal(found.lengths, expected.lengths)
    ulp: Any = {"rtol": torch.finfo(dtype).eps, "atol": 1e-6}
    torch.testing.assert_close(found.k_mean.float(), expected.k_mean, **ulp)
    torch.testing.assert_close(found.v_sum.float(), expected.v_sum.to(dtype).float(), **ulp)


def test_the_rounding_of_p_is_seen_in_the_output():
    q, k, v = make_inputs(128, heads=1)
    rounded, plain = (
        scaled.run(folded(q, k, v, QuantRecipe(), round_p=flag), SMALL).out
        for flag in (True, False)
    )
    assert (rounded - plain).abs().max() > 1e-3


@every_form
def test_nan_reaches_the_rows_that_read_it(qk):
    q, k, v = make_inputs(64, heads=2)
    q[0, 3, 1, 5] = torch.nan
    operands = quantise_operands(q, k, v, QuantRecipe(qk), smooth=False)
    asked = make_problem(q, k, v, want_trace=True)
    out = scaled.run(_folded(asked, operands, False, True), SMALL).out
    assert out[0, 3, 1].isnan().all()
    if qk != "nvfp4":  # whose scale for the tensor is NaN as well
        assert torch.isfinite(out[0, :3]).all()


INFINITE = {
    "dense": {},
    "lambda 0": {"skip_threshold": 0.0},
    "lambda 1e-9": {"skip_threshold": 1e-9},
    "causal": {"causal": True},
    "route": {},
    "causal route": {"causal": True},
    "tail": {"with_tail": True},
}


@pytest.mark.parametrize("name", INFINITE)
@pytest.mark.parametrize("first", [1, 64, 100, 200])
@pytest.mark.filterwarnings("ignore:All-NaN slice")
def test_keys_at_minus_infinity_take_no_mass(first, name):
    # Plain numbers: codes saturate. Leading keys, so that rows meet -inf before any score.
    q, k, v = make_inputs(200)
    q[..., 0], k[:, :first, :, 0] = 1, -torch.inf
    q[:, ::3, 1, 0] = -1  # these are at +inf, and so NaN
    settings: dict[str, Any] = INFINITE[name]
    if name.endswith(("route", "tail")):
        settings = settings | {"route": random_route(q, k, share=0.6)}
    problem: Any = folded(q, k, v, QuantRecipe("bf16"), **settings)
    result: Any = scaled.run(problem, SMALL)
    truth: Any = reference.run(meaning(problem, torch.float64))
    assert_as_infinite(result, truth, v)


@pytest.mark.parametrize("tokens", [40, 150])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.filterwarnings("ignore:All-NaN slice")
def test_a_row_with_nan_keeps_its_tiles_a_masked_one_as_well(tokens, causal):
    q, k, v = make_inputs(tokens, heads=1)
    k[:, 64:] *= 0.01
    q[0, -1, 0, 5] = torch.nan
    operands = quantise_operands(q, k, v, QuantRecipe("mxfp8"), smooth=False)
    settings: dict[str, Any] = {"skip_threshold": 0.5, "skip_tile": (64, 64), "causal": causal}
    asked = make_problem(q, k, v, want_trace=True, **settings)
    skipped = scaled.run(_folded(asked, operands, False, True), SMALL).skipped
    assert skipped is not None
    dropped = skipped.dense()[0, 0]
    assert not dropped[-1].any()
    assert dropped[:-1, 1:].any() == (tokens > 64)


# Codes saturate, and in NVFP4 one NaN spoils the scale of the tensor: every row is NaN.
SPOILT = [("bf16", NAN_KINDS[0]), ("bf16", NAN_KINDS[1]), ("mxfp8", NAN_KINDS[0])]


@pytest.mark.parametrize(("qk", "kind"), SPOILT)
@pytest.mark.parametrize("name", ["full range", "causal", "route", "route and tail"])
@pytest.mark.parametrize("place", [0, 3])
def test_from_a_nan_on_a_row_keeps_every_tile(place, name, qk, kind):
    q, k, v = make_inputs(360)
    q = q if name == "causal" else q[:, :150].contiguous()
    weak = torch.arange(360, device=DEVICE) // 64 % 2 == 1
    k *= torch.where(weak, 0.01, 6.0)[:, None, None].to(DTYPE)
    plant_nan(q, k, place * 64 + 7, kind)
    settings: dict[str, Any] = {"skip_threshold": 0.05, "causal": name == "causal"}
    if name.startswith("route"):
        mask = (torch.arange(3)[:, None] + torch.arange(6)) % 4 != 3
        mask = mask.to(DEVICE).expand(1, 2, -1, -1)
        settings["route"] = BlockRoute.from_dense(mask, seqlens=(150, 360))
    operands = quantise_operands(q, k, v, QuantRecipe(qk), smooth=False)
    asked = make_problem(q, k, v, skip_tile=(64, 64), scale=0.1, want_trace=True, **settings)
    problem: Any = _folded(asked, operands, name.endswith("tail"), True)
    result: Any = scaled.run(problem, SMALL)
    truth: Any = reference.run(meaning(problem, torch.float64))
    assert 0 < truth.skipped.density() < 0.5
    assert_as_infinite(result, truth, v)


@every_recipe
def test_the_public_call_runs_on_the_kernel_and_says_what_it_emulated(recipe):
    q, k, v = make_inputs(100, heads=2, key_heads=1)
    options = {"qk_dtype": recipe.qk_dtype, "v_scale": recipe.v_scale, "round_p": True}
    options |= {"route": random_route(q, k), "with_tail": True, "return_trace": True}
    out, trace = quantised_attention(q, k, v, **options, impl="triton")
    truth, expected = quantised_attention(q, k, v, **options, impl="reference")
    assert (trace.impl, trace.algorithm) == ("triton", "sol_attn")
    assert out.dtype == q.dtype
    torch.testing.assert_close(out, truth, atol=3e-2, rtol=3e-2)
    torch.testing.assert_close(trace.lse, expected.lse, atol=2e-3, rtol=0)
    if DEVICE == "cpu":
        assert trace.emulated == (*recipe.parts, "fp8 P")


def test_auto_takes_the_kernel_for_rounded_p_and_names_what_it_does_not_serve():
    q, k, v = make_inputs(64)
    _, trace = quantised_attention(q, k, v, round_p=True, return_trace=True)
    assert trace.impl == "triton"
    narrow = [x[..., :32].contiguous() for x in (q, k, v)]
    with pytest.raises(UnsupportedError, match="head dim 32"):
        quantised_attention(*narrow, impl="triton")
    with pytest.raises(UnsupportedError, match="lagging"):
        quantised_attention(
            q, k, v, skip_threshold=0.1, skip_tile=(64, 64), skip_reference="lagging", impl="triton"
        )


@pytest.mark.parametrize("major", [8, 9, 10, 12])
@pytest.mark.parametrize("plain", [False, True])
def test_what_is_emulated_follows_from_the_architecture(major, plain):
    q, k, v = make_inputs(64, heads=1)
    config = scaled.configuration(
        (major, 9 if major == 8 else 0), plain=plain, skip=False, coded=True, round_p=True
    )
    names = scaled.emulated(folded(q, k, v, QuantRecipe("mxfp8")), config)
    scores = () if major == 12 or (major == 10 and plain) else ("mxfp8 QK",)
    assert names == (scores if major >= 10 else (*scores, "fp8 V", "fp8 P"))


def test_wide_inputs_get_an_output_that_was_not_rounded_to_sixteen_bits():
    q, k, v = (x.float() for x in make_inputs(64, heads=1))
    out = quantised_attention(q, k, v, qk_dtype="nvfp4", round_p=True, impl="triton")
    assert out.dtype == torch.float32
    assert not torch.equal(out, out.to(torch.float16).float())


@pytest.mark.gpu
@every_recipe
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("routed", [False, True])
def test_the_own_configuration_agrees_with_the_reference_on_the_gpu(recipe, dim, routed):
    q, k, v = make_inputs(1000, heads=4, key_heads=2, dim=dim)
    route = random_route(q, k) if routed else None
    probe = folded(q, k, v, recipe, route=route, with_tail=routed)
    config = scaled.configure(probe)
    problem = folded(q, k, v, recipe, route=route, with_tail=routed, config=config)
    assert_follows_reference(problem, config)
    first = scaled.run(problem, config).out
    for _ in range(20):
        assert torch.equal(scaled.run(problem, config).out, first)
