"""Eager computes the same operation as the reference, skip maps included, and nothing leaks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from blockattn import BlockRoute, BlockSummary, UnsupportedError, attend, skip_gaps
from blockattn.impl import eager, products
from blockattn.problem import make_problem

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LENGTHS = [1, 63, 64, 65, 127, 129, 650]


@dataclass(frozen=True)
class Shape:
    tokens: int
    heads: int = 2
    key_heads: int = 2
    dim: int = 64
    block: tuple[int, int] = (64, 64)
    batch: int = 1


SHAPES = [
    *(Shape(tokens) for tokens in LENGTHS),
    Shape(650, 4, 1, 16),
    Shape(129, 4, 2, 128, batch=2),
    Shape(200, 1, 1, 128, block=(32, 48)),
    Shape(100, 2, 1, 16, block=(128, 16)),
    Shape(77, 2, 2, 33, block=(16, 128)),
]


def inputs(shape: Shape, dtype=torch.float32, device="cpu", seed=0):
    """q, k, v with scores that spread well beyond one."""
    generator = torch.Generator().manual_seed(seed)

    def make(heads: int, gain: float):
        size = (shape.batch, shape.tokens, heads, shape.dim)
        return (gain * torch.randn(size, generator=generator)).to(device, dtype)

    return make(shape.heads, 1.5), make(shape.key_heads, 1.5), make(shape.key_heads, 1.0)


def random_route(shape: Shape, device="cpu", seed=1, density=0.4) -> BlockRoute:
    """Random pairs; the first query block is empty (with two or more) and the last one full."""
    generator = torch.Generator().manual_seed(seed)
    grid = [-(-shape.tokens // size) for size in shape.block]
    mask = torch.rand(shape.batch, shape.heads, *grid, generator=generator) < density
    mask[:, :, 0] = False
    mask[:, :, -1] = True
    seqlens = (shape.tokens, shape.tokens)
    return BlockRoute.from_dense(mask.to(device), block=shape.block, seqlens=seqlens)


def plain(q, k, v, route=None, tail=None, causal=False, lengths=None):
    """The same mathematics with whole matrices in the inputs' dtype; rows without keys give 0."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    queries, keys = (torch.arange(x.shape[2], device=q.device) for x in (q, k))
    valid = torch.ones(1, 1, len(queries), len(keys), dtype=torch.bool, device=q.device)
    if causal:
        valid = valid & (keys <= queries[:, None])
    if lengths is not None:
        block = 64 if route is None else route.block[1]
        valid = valid & (keys % block < lengths[keys // block])
    if route is not None:
        valid = valid & route.dense()[:, :, queries // route.block[0]][..., keys // route.block[1]]
    scores = (q @ k.transpose(2, 3) * q.shape[-1] ** -0.5).masked_fill(~valid, -torch.inf)
    if tail is not None and route is not None:
        k_mean, v_sum = (x.transpose(1, 2).repeat_interleave(group, dim=1) for x in tail_of(tail))
        extra = q @ k_mean.transpose(2, 3) * q.shape[-1] ** -0.5
        extra = extra + tail.lengths.to(q.dtype).log()
        extra = extra.masked_fill(route.dense()[:, :, queries // route.block[0]], -torch.inf)
        scores = torch.cat([scores, extra], dim=-1)
        v = torch.cat([v, v_sum / tail.lengths[:, None].to(v.dtype)], dim=2)
    seen = (scores > -torch.inf).any(dim=-1, keepdim=True)
    p = scores.masked_fill(~seen, 0.0).softmax(dim=-1).masked_fill(~seen, 0.0)
    return (p @ v).transpose(1, 2)


def tail_of(tail: BlockSummary):
    return tail.k_mean, tail.v_sum


def assert_error_rule(q, k, v, route=None, *, tail=None, causal=False, lengths=None, **settings):
    """Max error <= 2 x that of plain PyTorch at the same dtype + one rounding of the output."""
    call = {"route": route, "causal": causal, "block_lengths": lengths, **settings}
    out, trace = attend(q, k, v, tail=tail, impl="eager", return_trace=True, **call)
    wide = [x.double() for x in (q, k, v)]
    wide_tail = None if tail is None else tail.to(torch.float64)
    truth, exact = attend(*wide, tail=wide_tail, impl="reference", return_trace=True, **call)
    assert trace.impl == "eager"
    assert truth.isfinite().all()
    allowed = 2 * (plain(q, k, v, route, tail, causal, lengths).double() - truth).abs().max()
    allowed += torch.finfo(q.dtype).eps * truth.abs().max()
    assert (out.double() - truth).abs().max() <= allowed
    torch.testing.assert_close(trace.lse, exact.lse, atol=1e-3, rtol=1e-5)
    return out, trace, exact


# -- the error rule over shapes, dtypes and mechanisms ------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_block_mask_equals_the_reference(shape, device):
    q, k, v = inputs(shape, device=device)
    out, trace, _ = assert_error_rule(q, k, v, random_route(shape, device))
    if shape.tokens > shape.block[0]:
        assert (out[:, : shape.block[0]] == 0).all()
        assert (trace.lse[:, :, : shape.block[0]] == -torch.inf).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_route_with_tail_equals_the_reference(shape, device):
    q, k, v = inputs(shape, device=device)
    tail = BlockSummary.of(k, v, shape.block[1])
    assert_error_rule(q, k, v, random_route(shape, device), tail=tail)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_causal_route_equals_the_reference(shape, device):
    q, k, v = inputs(shape, device=device)
    assert_error_rule(q, k, v, random_route(shape, device), causal=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("with_tail", [False, True])
def test_every_dtype_keeps_the_error_rule(dtype, with_tail, device):
    shape = Shape(650, 2, 1, 128)
    q, k, v = inputs(shape, dtype, device)
    tail = BlockSummary.of(k, v) if with_tail else None
    out, _, _ = assert_error_rule(q, k, v, random_route(shape, device), tail=tail)
    assert out.dtype == dtype
    assert out.is_contiguous()


@pytest.mark.parametrize("routed", [False, True])
@pytest.mark.parametrize("with_tail", [False, True])
def test_block_lengths_leave_padding_out(routed, with_tail):
    shape = Shape(300)
    q, k, v = inputs(shape)
    lengths = torch.tensor([64, 10, 0, 1, 44], dtype=torch.int32)
    route = random_route(shape) if routed or with_tail else None
    tail = BlockSummary.of(k, v) if with_tail else None
    assert_error_rule(q, k, v, route, tail=tail, lengths=lengths)


def test_block_lengths_and_causal_leave_rows_without_keys_at_zero():
    q, k, v = inputs(Shape(200))
    lengths = torch.tensor([0, 64, 64, 8], dtype=torch.int32)
    out, trace, _ = assert_error_rule(q, k, v, causal=True, lengths=lengths)
    assert (out[:, :64] == 0).all()
    assert (trace.lse[:, :, :64] == -torch.inf).all()
    assert trace.lse[:, :, 64:].isfinite().all()


LIBRARIES = [
    pytest.param(True, marks=pytest.mark.skipif(not products.has_onednn(), reason="no oneDNN")),
    False,
]


@pytest.mark.parametrize("onednn", LIBRARIES)
def test_either_library_of_products_keeps_the_error_rule_and_the_skip_map(onednn, monkeypatch):
    monkeypatch.setattr(products, "prefers_onednn", lambda: onednn)
    shape = Shape(650, 4, 2)
    q, k, v = inputs(shape)
    assert_error_rule(q, k, v, random_route(shape), tail=BlockSummary.of(k, v))
    _, trace = attend(3 * q, k, v, skip_threshold=0.2, impl="eager", return_trace=True)
    assert torch.equal(trace.skipped.words, skip_gaps(3 * q, k).skipped(0.2).words)


@pytest.mark.parametrize("with_tail", [False, True])
def test_scales_on_the_device_act_like_floats(with_tail):
    shape = Shape(130)
    q, k, v = inputs(shape)
    route, tail = random_route(shape), BlockSummary.of(k, v) if with_tail else None
    given_ = {"scale": 0.2, "scale_output": 3.0}
    for chosen in (route, None):
        own = tail if chosen is not None else None
        as_float = attend(q, k, v, chosen, tail=own, impl="eager", **given_)
        tensors = {name: torch.tensor([value]) for name, value in given_.items()}
        as_tensor = attend(q, k, v, chosen, tail=own, impl="eager", **tensors)
        torch.testing.assert_close(as_tensor, as_float, atol=1e-5, rtol=1e-5)


@given(
    tokens=st.integers(1, 150),
    heads=st.sampled_from([(1, 1), (2, 1), (4, 2)]),
    dim=st.sampled_from([1, 8, 40]),
    block=st.sampled_from([(16, 16), (32, 8), (8, 40)]),
    density=st.sampled_from([0.0, 0.3, 1.0]),
    mechanism=st.sampled_from(["mask", "tail", "causal", "lengths", "skip", "tail+skip"]),
    seed=st.integers(0, 1000),
)
def test_eager_equals_reference_for_any_call(tokens, heads, dim, block, density, mechanism, seed):
    shape = Shape(tokens, *heads, dim, block, batch=2)
    q, k, v = (x.double() for x in inputs(shape, seed=seed))
    generator = torch.Generator().manual_seed(seed)
    grid = [-(-tokens // size) for size in block]
    mask = torch.rand(2, heads[0], *grid, generator=generator)
    route = BlockRoute.from_dense(mask < density, block=block, seqlens=(tokens, tokens))
    call = {"return_trace": True, "causal": mechanism == "causal"}
    if "tail" in mechanism:
        call["tail"] = BlockSummary.of(k, v, block[1])
    if mechanism == "lengths":
        sizes = torch.randint(0, block[1] + 1, (mask.shape[-1],), generator=generator)
        call["block_lengths"] = sizes.int()
    if "skip" in mechanism:
        call |= {"skip_threshold": 0.3, "skip_tile": (2 * block[0], block[1])}
    out, trace = attend(q, k, v, route, impl="eager", **call)
    truth, exact = attend(q, k, v, route, impl="reference", **call)
    if trace.skipped is not None:
        assert trace.skipped.differing(exact.skipped) == 0
    torch.testing.assert_close(out, truth, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(trace.lse, exact.lse, atol=1e-6, rtol=1e-6)


# -- dense --------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("causal", [False, True])
def test_dense_is_torch_attention_bit_for_bit(causal, key_heads, dtype, device):
    q, k, v = inputs(Shape(193, 4, key_heads), dtype, device)
    expected = scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal, enable_gqa=key_heads != 4
    ).transpose(1, 2)
    quiet = attend(q, k, v, causal=causal, impl="eager")
    traced, trace = attend(q, k, v, causal=causal, impl="eager", return_trace=True)
    assert torch.equal(quiet, expected)
    assert torch.equal(traced, expected)
    assert trace.density == 1.0


@pytest.mark.parametrize("dim", [12, 63, 64, 98, 128, 192])
def test_the_default_scale_is_torchs_to_the_last_bit(dim):
    """128 ** -0.5 is not 1 / sqrt(128) in float64, and one bit is not "equal bit for bit"."""
    q, k, v = (torch.randn(1, 50, 2, dim, dtype=torch.float64) for _ in range(3))
    expected = scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)))
    assert torch.equal(attend(q, k, v), expected.transpose(1, 2))


@pytest.mark.parametrize("queries,keys", [(40, 100), (100, 40), (1, 5), (5, 1)])
@pytest.mark.parametrize("causal", [False, True])
def test_cross_attention_equals_the_reference(queries, keys, causal):
    q = inputs(Shape(queries))[0]
    _, k, v = inputs(Shape(keys), seed=3)
    assert_error_rule(q, k, v, causal=causal)


@pytest.mark.parametrize("queries,keys", [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("settings", [{}, {"skip_threshold": 0.5}, {"causal": True}])
def test_empty_sequences_give_zeros(queries, keys, settings):
    q, k = torch.ones(1, queries, 2, 8), torch.ones(1, keys, 2, 8)
    out, trace = attend(q, k, k, impl="eager", return_trace=True, **settings)
    assert out.shape == q.shape
    assert (out == 0).all()
    assert (trace.lse == -torch.inf).all()


# -- skip maps ----------------------------------------------------------------------------------


def planted(levels: list[float], tile: int, heads: int = 2):
    """All queries along one axis; key tile j has one key at level j on it, the others lower."""
    tokens = tile * len(levels)
    q, k = torch.zeros(1, tokens, heads, 8), torch.zeros(1, tokens, heads, 8)
    q[..., 0] = 1.0
    k[..., 0] = torch.tensor(levels).repeat_interleave(tile)[None, :, None] - 1.0
    k[:, 3::tile, :, 0] += 1.0
    v = torch.randn(1, tokens, heads, 8, generator=torch.Generator().manual_seed(5))
    return q, k, v


def planted_map(levels: list[float], threshold: float) -> list[bool]:
    """A tile is dropped when exp(its level - highest level before it) < threshold."""
    dropped, highest = [], -math.inf
    for level in levels:
        dropped.append(level - highest < math.log(threshold))
        highest = max(highest, level)
    return dropped


@pytest.mark.parametrize("threshold", [0.02, 0.2, 0.9])
def test_planted_maxima_are_skipped_exactly(threshold):
    levels = [3.0, -1.0, 2.9, 7.0, 3.0, 6.0, 5.0]
    q, k, v = planted(levels, tile=16)
    call = {"skip_threshold": threshold, "skip_tile": (16, 16), "scale": 1.0}
    out, trace = attend(q, k, v, impl="eager", return_trace=True, **call)
    expected = torch.tensor(planted_map(levels, threshold)).expand(1, 2, 7, 7)
    assert 0 < expected.sum() < expected.numel()
    assert torch.equal(trace.skipped.dense(), expected)
    assert trace.density < 1
    assert (out - attend(q, k, v, impl="eager", scale=1.0)).abs().max() > 1e-3
    truth = attend(*(x.double() for x in (q, k, v)), impl="reference", **call)
    torch.testing.assert_close(out.double(), truth, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [Shape(650, 4, 2, 128), Shape(300, 1, 1, 16)], ids=str)
def test_the_one_pass_map_is_the_map_of_a_run_bit_for_bit(shape, dtype, causal, device):
    q, k, v = inputs(shape, dtype, device)
    gaps = skip_gaps(3 * q, k, causal=causal, tile=(64, 32))
    for threshold in (0.0, 1e-3, 0.1, 0.5, 1.0):
        call = {"skip_threshold": threshold, "skip_tile": (64, 32), "causal": causal}
        _, trace = attend(3 * q, k, v, impl="eager", return_trace=True, **call)
        assert torch.equal(trace.skipped.words, gaps.skipped(threshold).words)
        expected = gaps.sparsity([threshold])
        share = trace.skipped.counts().sum(-1) / gaps.reachable.counts().sum(-1)
        torch.testing.assert_close(share[..., None], expected, check_dtype=False)


@pytest.mark.parametrize("causal", [False, True])
def test_skip_maps_equal_the_reference_away_from_the_threshold(causal):
    q, k, v = inputs(Shape(650, 4, 2, 128))
    call = {"skip_threshold": 0.2, "skip_tile": (64, 32), "causal": causal, "return_trace": True}
    out, trace = attend(3 * q, k, v, impl="eager", **call)
    truth, exact = attend(3 * q, k, v, impl="reference", **call)
    near = (skip_gaps(3 * q, k, causal=causal, tile=(64, 32)).gaps - math.log2(0.2)).abs() < 1e-4
    differs = trace.skipped.dense() ^ exact.skipped.dense()
    assert not (differs & ~near).any()
    assert int(trace.skipped.counts().sum()) > 0
    assert not differs.any(), "no tile of this input lies that close, so the outputs compare"
    torch.testing.assert_close(out, truth, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "settings,word",
    [
        ({"skip_threshold": 0.1, "skip_reference": "lagging"}, "skip_reference"),
        ({"skip_threshold": 2.0}, "above 1"),
    ],
)
def test_what_it_does_not_serve_is_said_and_goes_to_the_reference(settings, word):
    q, k, v = inputs(Shape(100))
    with pytest.raises(UnsupportedError, match=word):
        attend(q, k, v, impl="eager", **settings)
    _, trace = attend(q, k, v, return_trace=True, **settings)
    assert trace.impl == "reference"
    assert any(reason.impl == "eager" and word in reason.text for reason in trace.reasons)


def test_it_can_run_on_every_machine():
    assert eager.obstacles(None) == []


# -- nothing leaks, nothing changes -------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("with_tail", [False, True])
def test_nan_in_blocks_and_summaries_that_nobody_uses_does_not_leak(with_tail, dtype):
    shape = Shape(300)
    q, k, v = inputs(shape, dtype)
    mask = random_route(shape).dense()
    mask[..., 2], mask[..., 3] = False, True
    route = BlockRoute.from_dense(mask, seqlens=(300, 300))
    tail = None
    if with_tail:
        tail = BlockSummary.of(k, v)
        tail.k_mean[:, 3], tail.v_sum[:, 3] = torch.nan, torch.inf
    clean = attend(q, k, v, route, tail=BlockSummary.of(k, v) if with_tail else None, impl="eager")
    k[:, 128:192], v[:, 128:192] = torch.nan, torch.inf
    poisoned = attend(q, k, v, route, tail=tail, impl="eager")
    assert poisoned.isfinite().all()
    assert torch.equal(poisoned, clean)


def test_nan_in_padding_does_not_leak():
    q, k, v = inputs(Shape(300))
    lengths = torch.tensor([64, 10, 0, 1, 40], dtype=torch.int32)
    settings = {"block_lengths": lengths, "impl": "eager"}
    clean = attend(q, k, v, **settings)
    for x in (k, v):
        for block, length in enumerate(lengths.tolist()):
            x[:, block * 64 + length : (block + 1) * 64] = torch.nan
    assert torch.equal(attend(q, k, v, **settings), clean)
    skipping = attend(q, k, v, skip_threshold=0.1, skip_tile=(64, 32), **settings)
    assert skipping.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("first", [1, 64, 100, 200])
@pytest.mark.parametrize("mechanism", ["mask", "causal mask", "tail", "skip"])
def test_keys_at_minus_infinity_take_no_mass(mechanism, first, dtype):
    shape = Shape(200)
    q, k, v = inputs(shape, dtype)
    q[..., 0], k[:, :first, :, 0] = 1, -torch.inf
    q[:, ::3, 1, 0] = -1  # these are at +inf, and so NaN
    route = random_route(shape, density=0.6) if mechanism.endswith(("mask", "tail")) else None
    settings = {
        "causal": mechanism.startswith("causal"),
        "tail": BlockSummary.of(k, v) if mechanism == "tail" else None,
        "skip_threshold": 1e-9 if mechanism == "skip" else None,
    }
    call = partial(attend, q, k, v, route, return_trace=True, **settings)
    (out, trace), (want, true) = call(impl="eager"), call(impl="reference")
    assert want.isnan().any()
    assert not want.isnan().all()
    torch.testing.assert_close(trace.lse, true.lse, rtol=1e-4, atol=1e-4, equal_nan=True)
    close = 2 * torch.finfo(dtype).eps * float(v.abs().max())
    torch.testing.assert_close(out, want, rtol=0, atol=max(close, 1e-5), equal_nan=True)


@pytest.mark.parametrize("mechanism", ["dense", "mask", "tail", "skip"])
def test_any_strides_and_offsets_are_read_and_inputs_stay_as_they_are(mechanism):
    shape = Shape(150, 2, 2, 32)
    packed = torch.randn(1, 2, 160, 3, 40, generator=torch.Generator().manual_seed(2))
    q, k, v = (packed[:, :, 5:155, n, 3:35].transpose(1, 2) for n in range(3))
    assert not q.is_contiguous()
    before = packed.clone()
    route = random_route(shape) if mechanism in ("mask", "tail") else None
    tail = BlockSummary.of(k, v) if mechanism == "tail" else None
    skip = 0.2 if mechanism == "skip" else None
    call = {"tail": tail, "skip_threshold": skip, "impl": "eager"}
    out = attend(q, k, v, route, **call)
    tight = attend(*(x.contiguous() for x in (q, k, v)), route, **call)
    torch.testing.assert_close(out, tight, atol=1e-6, rtol=1e-6)
    assert torch.equal(packed, before)


@pytest.mark.parametrize("mechanism", ["mask", "tail", "causal", "skip"])
def test_a_trace_does_not_change_a_bit_and_repeats_are_equal(mechanism):
    shape = Shape(200, 2, 1)
    q, k, v = inputs(shape)
    call = {
        "route": None if mechanism == "skip" else random_route(shape),
        "tail": BlockSummary.of(k, v) if mechanism == "tail" else None,
        "causal": mechanism == "causal",
        "skip_threshold": 0.2 if mechanism == "skip" else None,
        "impl": "eager",
    }
    first, trace = attend(q, k, v, return_trace=True, **call)
    assert trace.lse.dtype == torch.float32
    assert all(torch.equal(attend(q, k, v, **call), first) for _ in range(100))


def test_only_routed_blocks_are_gathered(monkeypatch):
    """The work follows the route: every score column belongs to a routed block."""
    shape = Shape(640, 1, 1)
    q, k, v = inputs(shape)
    route = random_route(shape, density=0.2)
    columns = []
    scores = products.scores

    def counting(q, k, bias=None):
        columns.append(k.shape[-2])
        return scores(q, k, bias)

    monkeypatch.setattr(products, "scores", counting)
    attend(q, k, v, route, impl="eager")
    assert sum(columns) == 64 * int(route.counts().sum())
    assert route.density() < 0.5


def test_problem_of_a_dense_call_has_no_obstacle():
    q, k, v = inputs(Shape(10))
    assert eager.obstacles(make_problem(q, k, v)) == []
