"""The CuTe kernel on a Hopper GPU: every feature against the reference.

The rule of agreement is that of every implementation: at most twice the error of the same
mathematics in plain PyTorch at the inputs' dtype, plus one rounding of the output.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from blockattn import BlockRoute, BlockSummary, UnsupportedError, attend
from blockattn.impl import cute, reference
from blockattn.impl.cute import cache
from blockattn.problem import Problem, Result, make_problem
from tests.gpu_checks import NEEDS_CUTE, random_route

pytest.importorskip("triton", reason="needs triton (Linux)")
from blockattn.impl.cute import launch

pytestmark = [pytest.mark.sm90, NEEDS_CUTE]

DEVICE = "cuda"
DTYPES = [torch.bfloat16, torch.float16]
TILES = [64, 128]
Settings = dict[str, Any]


def gaussian(tokens=200, heads=2, dim=128, key_heads=None, keys=None, dtype=torch.bfloat16, seed=0):
    """q ``[1, tokens, heads, dim]`` and k, v on the GPU, the same on every machine."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(tokens, heads), *2 * [(keys or tokens, key_heads or heads)]]
    q, k, v = (torch.randn(1, *shape, dim, generator=generator) for shape in shapes)
    return q.to(DEVICE, dtype), k.to(DEVICE, dtype), v.to(DEVICE, dtype)


def assert_follows_reference(problem: Problem) -> tuple[Result, Result]:
    assert cute.obstacles(problem) == []
    result = launch.run(problem)
    wide: Any = {name: getattr(problem, name).double() for name in "qkv"}
    truth = reference.run(
        replace(problem, tail=problem.tail and problem.tail.to(torch.float64), **wide)
    )
    assert torch.isfinite(truth.out).all()
    eps = torch.finfo(problem.q.dtype).eps
    plain = (reference.run(problem).out.double() - truth.out).abs().max()
    allowed = 2 * (plain + eps * problem.v.abs().max()) + eps * truth.out.abs().max()
    assert (result.out.double() - truth.out).abs().max() <= allowed
    if result.lse is not None and truth.lse is not None:
        finite = torch.isfinite(truth.lse)
        assert torch.equal(torch.isfinite(result.lse), finite)
        rounding = 4 * torch.finfo(torch.float32).eps * truth.lse[finite].abs()
        assert ((result.lse - truth.lse)[finite].abs() <= 1e-4 + rounding).all()
    return result, truth


CASES: dict[str, Settings] = {
    "dense": {},
    "causal": {"causal": True},
    "scaled": {"scale": 0.05, "scale_output": 2.0},
    "skip": {"skip_threshold": 0.6, "skip_tile": (64, 64)},
    "skip causal": {"skip_threshold": 0.6, "skip_tile": (64, 64), "causal": True},
    "skip 128": {"skip_threshold": 0.6, "skip_tile": (128, 128)},
    "skip 128 causal": {"skip_threshold": 0.6, "skip_tile": (128, 128), "causal": True},
    "skip nothing": {"skip_threshold": 0.0, "skip_tile": (64, 64)},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("tokens", [64, 200, 512])
def test_the_full_range_agrees_with_the_reference(name, tokens):
    problem = make_problem(*gaussian(tokens), want_trace=True, **CASES[name])
    result, truth = assert_follows_reference(problem)
    assert result.skipped == truth.skipped


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", ["dense", "causal", "skip", "route", "tail"])
def test_every_head_dim_and_dtype_agrees_with_the_reference(name, dim, dtype):
    q, k, v = gaussian(650, dim=dim, dtype=dtype)
    settings = dict(CASES.get(name, {}))
    if name in ("route", "tail"):
        settings["route"] = random_route(q, k)
    if name == "tail":
        settings["tail"] = BlockSummary.of(k, v)
    assert_follows_reference(make_problem(q, k, v, want_trace=True, **settings))


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 127, 128, 129, 191, 193, 257])
@pytest.mark.parametrize("routed", [False, True])
def test_ragged_lengths_agree_with_the_reference(tokens, routed):
    q, k, v = gaussian(tokens, heads=1)
    route = random_route(q, k, density=1.0) if routed else None
    assert_follows_reference(make_problem(q, k, v, route=route, want_trace=True))


@pytest.mark.parametrize("density", [0.05, 0.4, 0.95])
@pytest.mark.parametrize("tokens", [300, 640, 1087])
@pytest.mark.parametrize("with_tail", [False, True])
def test_a_route_with_and_without_tail_agrees_with_the_reference(with_tail, tokens, density):
    q, k, v = gaussian(tokens)
    tail = BlockSummary.of(k, v) if with_tail else None
    route = random_route(q, k, density)
    assert_follows_reference(make_problem(q, k, v, route=route, tail=tail, want_trace=True))


@pytest.mark.parametrize("with_tail", [False, True])
def test_neighbouring_query_blocks_that_share_nothing_or_all_agree(with_tail):
    q, k, v = gaussian(640)
    one, other = torch.zeros(2, 1, 2, 10, 10, dtype=torch.bool, device=DEVICE)
    one[..., ::2, ::2], one[..., 1::2, 1::2] = True, True
    other[..., 2:6, 3:7] = True  # pairs of equal rows, and rows without any block
    for mask in (one, other):
        route = BlockRoute.from_dense(mask, seqlens=(640, 640))
        tail = BlockSummary.of(k, v) if with_tail else None
        assert_follows_reference(make_problem(q, k, v, route=route, tail=tail, want_trace=True))


@pytest.mark.parametrize("short", [{}, {0: 9}, {70: 1, 71: 63}, {63: 33, 130: 0}, {150: 40}])
def test_a_summary_counts_for_the_keys_of_its_block(short):
    """Summaries go by tiles of 64; only those with a short block are weighed one by one."""
    q, k, v = gaussian(130, keys=151 * 64)
    tail = BlockSummary.of(k, v)
    for block, length in short.items():
        tail.lengths[block] = length
    route = random_route(q, k, density=0.1)
    assert_follows_reference(make_problem(q, k, v, route=route, tail=tail, want_trace=True))


@pytest.mark.parametrize("with_tail", [False, True])
def test_a_group_far_ahead_of_its_neighbour_waits_without_a_stage(with_tail):
    """Of each pair one query block wants every key block and the other one or none, in turn."""
    q, k, v = gaussian(64 * 24, heads=40)
    mask = torch.zeros(1, 40, 24, 24, dtype=torch.bool, device=DEVICE)
    mask[:, :, ::4], mask[:, :, 3::4] = True, True
    mask[:, ::2, 1::4, 5] = True
    tail = BlockSummary.of(k, v) if with_tail else None
    route = BlockRoute.from_dense(mask, seqlens=(64 * 24,) * 2)
    assert_follows_reference(make_problem(q, k, v, route=route, tail=tail, want_trace=True))


def test_more_key_blocks_than_a_warp_reads_at_once_agree():
    q, k, v = gaussian(130, keys=9000)
    route = random_route(q, k, density=0.9)
    for tail in (None, BlockSummary.of(k, v)):
        assert_follows_reference(make_problem(q, k, v, route=route, tail=tail, want_trace=True))


def test_more_work_than_processors_agrees():
    q, k, v = gaussian(1087, heads=40)
    problem = make_problem(q, k, v, route=random_route(q, k, 0.3), want_trace=True)
    for item in (problem, replace(problem, route=None)):
        assert_follows_reference(item)


def test_a_slice_of_the_heads_of_a_batch_runs_with_its_own_words():
    q, k, v = (torch.cat([x, x.flip(1)]) for x in gaussian(heads=3))
    route = random_route(q, k, 0.5, seed=3).heads(slice(1, 3))
    assert not route.words.is_contiguous()
    q, k, v = (x[:, :, 1:] for x in (q, k, v))
    tail = BlockSummary.of(k, v)
    assert_follows_reference(make_problem(q, k, v, route=route, tail=tail, want_trace=True))


@pytest.mark.parametrize("group", [2, 4])
def test_grouped_queries_share_their_key_head(group):
    q, k, v = gaussian(200, heads=4, key_heads=4 // group)
    route, tail = random_route(q, k), BlockSummary.of(k, v)
    for settings in ({}, {"causal": True}, {"route": route, "tail": tail}):
        assert_follows_reference(make_problem(q, k, v, want_trace=True, **settings))


@pytest.mark.parametrize(("tokens", "keys"), [(70, 300), (300, 70)])
def test_queries_and_keys_may_differ_in_number(tokens, keys):
    q, k, v = gaussian(tokens, keys=keys)
    route = random_route(q, k)
    causal: Settings = {"causal": True}
    for settings in ({}, causal, {"route": route}, causal | {"route": route}):
        assert_follows_reference(make_problem(q, k, v, want_trace=True, **settings))


@pytest.mark.parametrize("routed", [False, True])
@pytest.mark.parametrize("with_tail", [False, True])
def test_padded_blocks_agree_with_the_reference(routed, with_tail):
    if with_tail and not routed:
        pytest.skip("a tail needs a route")
    q, k, v = gaussian(330)
    lengths = torch.tensor([64, 10, 0, 33, 64, 9], dtype=torch.int32, device=DEVICE)
    settings: Settings = {"block_lengths": lengths}
    if routed:
        settings["route"] = random_route(q, k, 0.6)
    if with_tail:
        settings["tail"] = replace(BlockSummary.of(k, v), lengths=lengths)
    assert_follows_reference(make_problem(q, k, v, want_trace=True, **settings))


@pytest.mark.parametrize("with_tail", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_a_skip_vote_within_a_route_agrees_with_the_reference(with_tail, causal):
    if with_tail and causal:
        pytest.skip("a causal call has no tail")
    q, k, v = gaussian(1000)
    k = k * torch.linspace(3, 0.3, 1000, device=DEVICE)[:, None, None].to(k.dtype)
    settings: Settings = {"skip_threshold": 0.2, "skip_tile": (64, 64), "causal": causal}
    tail = BlockSummary.of(k, v) if with_tail else None
    problem = make_problem(
        q, k, v, route=random_route(q, k, 0.7), tail=tail, want_trace=True, **settings
    )
    result, truth = assert_follows_reference(problem)
    assert truth.skipped is not None
    assert truth.skipped.density() > 0
    assert result.skipped == truth.skipped


@pytest.mark.parametrize("routed", [False, True])
def test_a_padded_block_without_a_key_counts_as_no_dropped_tile(routed):
    q, k, v = gaussian(330)
    k = k * torch.linspace(3, 0.3, 330, device=DEVICE)[:, None, None].to(k.dtype)
    lengths = torch.tensor([64, 10, 0, 33, 64, 0], dtype=torch.int32, device=DEVICE)
    problem = make_problem(
        q, k, v, route=random_route(q, k, 0.8) if routed else None, block_lengths=lengths,
        skip_threshold=0.2, skip_tile=(64, 64), want_trace=True,
    )  # fmt: skip
    result, truth = assert_follows_reference(problem)
    assert truth.skipped is not None
    assert truth.skipped.density() > 0
    assert result.skipped == truth.skipped


PLACES: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda n: n < 0,
    "in turn": lambda n: n % 2 == 1,
    "few": lambda n: n % 4 == 3,
    "many": lambda n: n % 4 > 0,
    "few, then many": lambda n: (n > 18) & (n != 20),
    "many, then few": lambda n: (n > 0) & (n < 14),
}


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("tile", TILES)
def test_the_planted_tiles_are_dropped_and_no_other(tile, places):
    q, k, v = gaussian(22 * tile - 5, heads=1)
    q = q[:, : 3 * tile - 5]
    weak = PLACES[places](torch.arange(22, device=DEVICE))
    factor = torch.where(weak, 0.01, 6.0).repeat_interleave(tile)[: k.shape[1]]
    k = (k.float() * factor[:, None, None]).to(k.dtype)
    problem = make_problem(
        q, k, v, skip_threshold=0.05, skip_tile=(tile, tile), scale=0.1, want_trace=True
    )
    result, truth = assert_follows_reference(problem)
    assert result.skipped is not None
    assert torch.equal(result.skipped.dense(), weak.expand(*result.skipped.shape))
    assert result.skipped == truth.skipped


def test_a_row_that_objects_alone_keeps_the_tile_of_its_block():
    """One query row sees a tile that its 63 neighbours would drop, at either end of a warp."""
    q, k, v = gaussian(256, heads=1)
    q[..., 0], k[..., 0] = 0, 0
    k[:, 128:192] *= 0.01
    for row in (0, 15, 16, 63, 64, 127):
        alone = q.clone()
        alone[:, row, :, 0], k[:, 128:192, :, 0] = 100, 100
        problem = make_problem(alone, k, v, skip_threshold=0.5, skip_tile=(64, 64), want_trace=True)
        result, truth = assert_follows_reference(problem)
        assert truth.skipped is not None
        assert result.skipped == truth.skipped
        assert not truth.skipped.dense()[0, 0, row // 64, 2]


LEVELS = {  # of the scores of key blocks in base-2 units, beside noise
    "rise by less than a reference may trail": [0, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40],
    "rise beyond float32": [0, 170, 20, 340, 0, 0, 340, 300, 10, 20, 350],
    "fall": [350, 180, 100, 90, 80, 0, -50, -100, -200, -300, -350],
    "one stands out": [0, 0, 0, 0, 0, 0, 0, 0, 0, 300, 0],
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize("name", ["dense", "route", "tail", "padded", "skip", "skip 128"])
def test_a_reference_follows_scores_of_any_height(name, levels, dtype):
    q, k, v = gaussian(650, dtype=dtype)
    height = torch.tensor(LEVELS[levels], device=DEVICE).repeat_interleave(64)[:650]
    q[..., 0], k[..., 0] = 8, height[:, None] * math.log(2) * 128**0.5 / 8
    settings = dict(CASES.get(name, {}))
    if name in ("route", "tail"):
        settings["route"] = random_route(q, k, 0.6)
    if name == "tail":
        settings["tail"] = BlockSummary.of(k, v)
    if name == "padded":
        lengths = torch.tensor([64, 64, 0, 9, 64, 64, 64, 30, 64, 64, 10], device=DEVICE)
        settings["block_lengths"] = lengths.int()
    result, truth = assert_follows_reference(make_problem(q, k, v, want_trace=True, **settings))
    assert result.skipped == truth.skipped


def test_rows_without_keys_are_zero_and_minus_infinity():
    q, k, v = gaussian(130)
    result = launch.run(make_problem(q, k, v, route=random_route(q, k, 0.0), want_trace=True))
    assert not result.out.any()
    assert result.lse is not None
    assert (result.lse == -torch.inf).all()


@pytest.mark.parametrize(("tokens", "keys"), [(0, 70), (70, 0)])
def test_empty_sequences_are_answered_without_a_launch(tokens, keys):
    q, k, v = gaussian(100, dim=64)
    before = cache.loads()
    result = launch.run(make_problem(q[:, :tokens], k[:, :keys], v[:, :keys], want_trace=True))
    assert result.out.shape == (1, tokens, 2, 64)
    assert not result.out.any()
    assert result.lse is not None
    assert (result.lse == -torch.inf).all()
    assert cache.loads() == before


def test_scales_on_the_device_equal_scales_on_the_host():
    q, k, v = gaussian(100, heads=1)
    values = {"scale": 0.0625, "scale_output": 0.5}
    host = launch.run(make_problem(q, k, v, **values)).out
    # Each an element of a larger tensor, so that it lies at any multiple of 4 bytes.
    table = torch.tensor([1.0, *values.values()], device=DEVICE)
    tensors = dict(zip(values, table[1:].split(1)))
    assert torch.equal(launch.run(make_problem(q, k, v, **tensors)).out, host)
    mixed: Settings = {"scale": 0.0625, "scale_output": tensors["scale_output"]}
    assert torch.equal(launch.run(make_problem(q, k, v, **mixed)).out, host)


def test_nan_in_padded_and_unrouted_keys_does_not_leak():
    q, k, v = gaussian(192, heads=1)
    lengths = torch.tensor([64, 10, 0], dtype=torch.int32, device=DEVICE)
    clean = launch.run(make_problem(q, k, v, block_lengths=lengths)).out
    for x in (k, v):
        x[:, 74:] = torch.nan
    assert torch.equal(launch.run(make_problem(q, k, v, block_lengths=lengths)).out, clean)
    only_first = torch.zeros(1, 1, 3, 3, dtype=torch.bool, device=DEVICE)
    only_first[..., 0] = True
    only_first[..., 1, 2] = True  # a neighbour may see NaN, the block beside it must not
    route = BlockRoute.from_dense(only_first, seqlens=(192, 192))
    out = launch.run(make_problem(q, k, v, route=route)).out
    assert torch.isfinite(out[:, :64]).all()
    assert torch.isfinite(out[:, 128:]).all()
    assert out[:, 64:128].isnan().all()


def test_what_lies_behind_the_sequence_is_never_read():
    room = [torch.full((1, 256, 2, 128), torch.nan, device=DEVICE).bfloat16() for _ in range(3)]
    whole = gaussian(100)
    for target, x in zip(room, whole):
        target[:, :100] = x
    views = [x[:, :100] for x in room]
    for causal in (False, True):
        found, want = (launch.run(make_problem(*x, causal=causal)).out for x in (views, whole))
        assert torch.equal(found, want)


def test_strided_inputs_equal_contiguous_ones_and_stay_unchanged():
    packed = gaussian(130, heads=6)[0].reshape(1, 130, 3, 2, 128)
    views, before = list(packed.unbind(2)), packed.clone()
    strided = launch.run(make_problem(*views)).out
    assert torch.equal(strided, launch.run(make_problem(*(x.contiguous() for x in views))).out)
    by_head = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in views]
    assert torch.equal(launch.run(make_problem(*by_head)).out, strided)
    assert torch.equal(packed, before)


def test_a_misaligned_tensor_is_an_obstacle_and_goes_to_another_implementation():
    q, k, v = gaussian(64, heads=1)
    shifted = torch.empty(q.numel() + 1, dtype=q.dtype, device=DEVICE)[1:].view(q.shape).copy_(q)
    assert any("16 bytes" in text for text in cute.obstacles(make_problem(shifted, k, v)))
    with pytest.raises(UnsupportedError, match="16 bytes"):
        attend(shifted, k, v, impl="cute")


def test_a_batch_of_one_with_odd_strides_is_served():
    q, k, v = (x.as_strided(x.shape, (3, *x.stride()[1:])) for x in gaussian(70, heads=1))
    assert_follows_reference(make_problem(q, k, v, want_trace=True))


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tokens", [1087, 1100, 1200])
def test_votes_of_more_items_than_processors_agree(tokens, causal, tile):
    """A program votes on item after item; the last item has groups without a row, or none."""
    q, k, v = gaussian(tokens, heads=40, key_heads=10)
    k = k * torch.linspace(2, 0.3, tokens, device=DEVICE)[:, None, None].to(k.dtype)
    q, k, v = (torch.cat([x, x.flip(1)]) for x in (q, k, v))
    problem = make_problem(
        q, k, v, skip_threshold=0.3, skip_tile=(tile, tile), causal=causal, want_trace=True
    )
    result, truth = assert_follows_reference(problem)
    assert truth.skipped is not None
    assert 0.02 < truth.skipped.density() < 0.98
    assert result.skipped == truth.skipped


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("tokens", "keys"), [(1, 1), (1, 700), (70, 300), (65, 129), (128, 65), (300, 70), (700, 1)]
)
def test_votes_on_keys_of_another_number_agree(tokens, keys, causal, tile):
    q, k, v = gaussian(tokens, keys=keys, dim=64)
    problem = make_problem(
        q, k, v, skip_threshold=0.6, skip_tile=(tile, tile), causal=causal, want_trace=True
    )
    result, truth = assert_follows_reference(problem)
    assert result.skipped == truth.skipped


@pytest.mark.parametrize("row", [0, 15, 16, 63, 64, 127])
def test_a_row_that_objects_alone_keeps_the_tile_for_both_groups(row):
    q, k, v = gaussian(256, heads=1)
    q[..., 0], k[..., 0] = 0, 0
    k[:, 128:] *= 0.01
    q[:, row, :, 0], k[:, 200, :, 0] = 10, 10
    problem = make_problem(q, k, v, skip_threshold=0.5, skip_tile=(128, 128), want_trace=True)
    result, truth = assert_follows_reference(problem)
    assert truth.skipped is not None
    assert truth.skipped.dense()[0, 0].tolist() == [[False, False], [False, True]]
    assert result.skipped == truth.skipped


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tile_kept_after_a_dropped_one_may_exceed_the_maximum_by_the_threshold_twice(dtype):
    """A reference that trails as far as it may, then a rise that no row objects to, twice."""
    limit = math.log2(cute.MOST_THRESHOLD[dtype])
    trails = 7.8 if limit < 7 else 0.0
    q, k, v = gaussian(384, heads=1, dtype=dtype)
    height = [0, 0, trails, trails, trails + limit - 0.3, trails + 2 * limit - 0.6]
    height = torch.tensor(height, device=DEVICE).repeat_interleave(64)
    q, k = 0.02 * q, 0.02 * k
    q[..., 0], k[..., 0] = 8, height[:, None] * math.log(2) * 128**0.5 / 8
    problem = make_problem(q, k, v, skip_threshold=2.0**limit, skip_tile=(64, 64), want_trace=True)
    result, truth = assert_follows_reference(problem)
    assert truth.skipped is not None
    assert truth.skipped.dense()[0, 0, :, 4:].tolist() == 6 * [[True, False]]
    assert result.skipped == truth.skipped


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("tile", TILES)
def test_a_key_that_is_no_number_keeps_its_tile(tile, sign):
    """Maxima are compared as integers, of which what a product makes of it must be the largest."""
    q, k, v = gaussian(4 * tile, heads=1)
    k[:, 2 * tile : 3 * tile] *= 0.01
    settings: Settings = {"skip_threshold": 0.5, "skip_tile": (tile, tile), "want_trace": True}
    clean, _ = assert_follows_reference(make_problem(q, k, v, **settings))
    assert clean.skipped is not None
    assert clean.skipped.dense()[..., 2].all()
    k[:, 2 * tile + 5, :, 7] = math.copysign(math.nan, sign)
    result = launch.run(make_problem(q, k, v, **settings))
    assert result.skipped is not None
    assert not result.skipped.dense()[..., 2].any()
    assert result.out.isnan().all()
