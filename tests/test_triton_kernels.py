"""The Triton kernels against the reference: in the interpreter without a GPU, compiled with one.

The interpreter computes bfloat16 on bit patterns, so without a GPU the inputs are float16; the
kernels are the same.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from blockattn import BlockRoute, BlockSummary, attend, sol_attention, sol_scores
from blockattn.impl import reference
from blockattn.impl import triton as kernels
from blockattn.problem import LOG2_E, make_problem
from blockattn.sol import VARIANCE_FLOOR, score_statistics
from tests.gpu_checks import NAN_KINDS, assert_as_infinite, plant_nan

triton = pytest.importorskip("triton", reason="needs triton (Linux)")
from blockattn.impl.triton import launch, lists, prepare, select, words  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16


@pytest.fixture(autouse=True)
def interpreter_may_run_on_the_cpu(monkeypatch):
    monkeypatch.setattr(kernels, "DEVICES", ("cuda", "cpu"))


def make_inputs(tokens=200, heads=2, dim=64, key_heads=None, seed=0, keys=None):
    generator = torch.Generator().manual_seed(seed)

    def draw(count, width):
        x = torch.randn(1, count, width, dim, generator=generator)
        return x.to(DTYPE).to(DEVICE)

    q = draw(tokens, heads)
    return q, *(draw(keys or tokens, key_heads or heads) for _ in range(2))


def random_route(q, k, density=0.4, seed=1):
    queries, keys = (-(-x.shape[1] // 64) for x in (q, k))
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(1, q.shape[2], queries, keys, generator=generator) < density
    return BlockRoute.from_dense(mask.to(DEVICE), seqlens=(q.shape[1], k.shape[1]))


def in_float64(problem):
    tail = problem.tail and problem.tail.to(torch.float64)
    wide = {name: getattr(problem, name).double() for name in "qkv"}
    return replace(problem, tail=tail, **wide)


def assert_follows_reference(problem, config=None):
    """Error at most twice that of plain PyTorch at the inputs' dtype, plus one rounding."""
    assert kernels.obstacles(problem) == []
    result = launch.run(problem, config)
    truth = reference.run(in_float64(problem))
    assert torch.isfinite(truth.out).all()
    plain = plain_error(problem, truth)
    rounding = torch.finfo(DTYPE).eps * truth.out.abs().max()
    assert (result.out.double() - truth.out).abs().max() <= 2 * plain + rounding
    finite = torch.isfinite(truth.lse)
    assert torch.equal(torch.isfinite(result.lse), finite)
    assert (result.lse - truth.lse)[finite].abs().max() < 1e-4
    return result, truth


def plain_error(problem, truth):
    """Largest error of the same mathematics with operands and P rounded to the inputs' dtype."""
    rounded = reference.run(problem).out
    p_error = torch.finfo(DTYPE).eps * problem.v.abs().max()
    return (rounded.double() - truth.out).abs().max() + p_error


CASES = {
    "dense": {},
    "causal": {"causal": True},
    "scaled": {"scale": 0.05, "scale_output": 2.0},
    "skip": {"skip_threshold": 0.6, "skip_tile": (64, 64)},
    "skip causal": {"skip_threshold": 0.6, "skip_tile": (64, 64), "causal": True},
    "skip 128": {"skip_threshold": 0.6, "skip_tile": (128, 128)},
    "skip 128 causal": {"skip_threshold": 0.6, "skip_tile": (128, 128), "causal": True},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("tokens", [64, 200])
def test_the_full_range_agrees_with_the_reference(name, tokens):
    q, k, v = make_inputs(tokens)
    result, truth = assert_follows_reference(make_problem(q, k, v, want_trace=True, **CASES[name]))
    assert result.skipped == truth.skipped


@pytest.mark.parametrize("tile", [64, 128])
def test_the_planted_tiles_are_dropped_and_no_other(tile):
    # Kept and dropped tiles take turns: what a kept tile leaves behind must not sway later votes.
    q, k, v = make_inputs(9 * tile - 5, dim=128)
    weak = torch.tensor([0, 1, 0, 0, 1, 1, 0, 1, 0], dtype=torch.bool, device=DEVICE)
    factor = torch.where(weak, 0.01, 6.0).repeat_interleave(tile)[: k.shape[1]]
    k = (k.float() * factor[:, None, None]).to(k.dtype)
    problem = make_problem(
        q, k, v, skip_threshold=0.05, skip_tile=(tile, tile), scale=0.1, want_trace=True
    )
    result, truth = assert_follows_reference(problem)
    assert torch.equal(result.skipped.dense(), weak.expand(*result.skipped.shape))
    assert result.skipped == truth.skipped


ADAPTIVE = {
    64: launch.Config(rows=64, columns=64, warps=4, stages=3, adaptive=True),
    128: launch.Config(rows=128, columns=128, warps=8, stages=1, adaptive=True),
}


def assert_equals_the_branching_walk(result, problem):
    """The same map, and the same numbers but for one rounding: what is dropped adds nothing."""
    config = ADAPTIVE[problem.skip_tile[0]]
    plain = launch.run(problem, replace(config, adaptive=False))
    assert result.skipped == plain.skipped
    rounding = torch.finfo(DTYPE).eps * plain.out.abs().max()
    assert (result.out - plain.out).abs().max() <= rounding
    assert (result.lse - plain.lse).abs().max() < 1e-5


# Dropped tiles by place, in more tiles than the first chunk has: the walk changes or does not.
PLACES = {
    "none": lambda n: n < 0,
    "few": lambda n: n % 4 == 3,
    "many": lambda n: n % 4 > 0,
    "few, then many": lambda n: (n > 18) & (n != 20),
    "many, then few": lambda n: (n > 0) & (n < 14),
}


NEEDS_SHARED_MEMORY = pytest.mark.skipif(
    DEVICE == "cuda" and launch.capability_of(torch.device(DEVICE))[0] not in (9, 10),
    reason="needs the shared memory of compute capability 9 or 10",
)


@NEEDS_SHARED_MEMORY
@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("tile", ADAPTIVE)
def test_the_adaptive_walk_drops_the_planted_tiles_and_no_other(tile, places):
    q, k, v = make_inputs(22 * tile - 5, heads=1)
    q = q[:, : 2 * tile - 5]
    weak = PLACES[places](torch.arange(22, device=DEVICE))
    factor = torch.where(weak, 0.01, 6.0).repeat_interleave(tile)[: k.shape[1]]
    k = (k.float() * factor[:, None, None]).to(k.dtype)
    problem = make_problem(
        q, k, v, skip_threshold=0.05, skip_tile=(tile, tile), scale=0.1, want_trace=True
    )
    result, truth = assert_follows_reference(problem, ADAPTIVE[tile])
    assert_equals_the_branching_walk(result, problem)
    assert torch.equal(result.skipped.dense(), weak.expand(*result.skipped.shape))
    assert result.skipped == truth.skipped


@pytest.mark.parametrize("tokens", [40, 150])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.filterwarnings("ignore:All-NaN slice")
def test_a_row_with_nan_keeps_its_tiles_a_masked_one_as_well(tokens, causal):
    q, k, v = make_inputs(tokens, heads=1)
    k[:, 64:] *= 0.01
    q[0, -1, 0, 5] = torch.nan
    settings = {"skip_threshold": 0.5, "skip_tile": (64, 64), "causal": causal}
    result = launch.run(make_problem(q, k, v, want_trace=True, **settings))
    rows = -(-tokens // 64)
    assert not result.skipped.dense()[0, 0, -1].any()
    assert result.skipped.dense()[0, 0, : rows - 1, 1:].any() == (tokens > 64)
    assert result.out[0, -1].isnan().all()
    assert not result.out[0, :-1].isnan().any()


def vote_on_weak_tiles(tile, *, plant, routed=False, with_tail=False, causal=False):
    """A vote on 12 whole tiles of keys and a ragged one, every second weak; ``plant`` spoils it.

    A route leaves out every fourth tile of a row, from tile 3 of row 0 on.
    """
    q, k, v = make_inputs(13 * tile - 5)
    q = q if causal else q[:, :150].contiguous()
    weak = torch.arange(13, device=DEVICE) % 2 == 1
    factor = torch.where(weak, 0.01, 6.0).repeat_interleave(tile)[: k.shape[1]]
    k = (k.float() * factor[:, None, None]).to(k.dtype)
    plant(q, k)
    settings = {"skip_threshold": 0.05, "skip_tile": (tile, tile), "causal": causal}
    if routed:
        rows, columns = torch.arange(-(-q.shape[1] // 64)), torch.arange(13)
        mask = ((rows[:, None] + columns) % 4 != 3).to(DEVICE).expand(1, 2, -1, -1)
        settings["route"] = BlockRoute.from_dense(mask, seqlens=(q.shape[1], k.shape[1]))
        settings["tail"] = BlockSummary.of(k, v) if with_tail else None
    return make_problem(q, k, v, scale=0.1, want_trace=True, **settings)


VOTES = {
    "full range": {"tile": 64},
    "full range, 128": {"tile": 128},
    "causal": {"tile": 64, "causal": True},
    "route": {"tile": 64, "routed": True},
    "route and tail": {"tile": 64, "routed": True, "with_tail": True},
}


@NEEDS_SHARED_MEMORY
@pytest.mark.parametrize("adaptive", [False, True], ids=["branching", "adaptive"])
@pytest.mark.parametrize("name", VOTES)
@pytest.mark.parametrize("place", [0, 3, 11])  # at 11 the adaptive walk branches
@pytest.mark.parametrize("kind", NAN_KINDS)
def test_from_a_nan_on_a_row_keeps_every_tile(kind, place, name, adaptive):
    tile = VOTES[name]["tile"]
    problem = vote_on_weak_tiles(
        plant=lambda q, k: plant_nan(q, k, place * tile + 7, kind), **VOTES[name]
    )
    result = launch.run(problem, replace(ADAPTIVE[tile], adaptive=adaptive))
    truth = reference.run(in_float64(problem))
    assert 0 < truth.skipped.density() < 0.5
    assert_as_infinite(result, truth, problem.v)


@NEEDS_SHARED_MEMORY
@pytest.mark.parametrize("adaptive", [False, True], ids=["branching", "adaptive"])
def test_after_a_nan_a_tile_at_minus_infinity_is_dropped(adaptive):
    def plant(q, k):
        q[..., 0], k[:, 2 * 64 : 3 * 64, :, 0] = 1, -torch.inf
        plant_nan(q, k, 7, NAN_KINDS[0])

    problem = vote_on_weak_tiles(64, plant=plant)
    result = launch.run(problem, replace(ADAPTIVE[64], adaptive=adaptive))
    truth = reference.run(in_float64(problem))
    assert truth.skipped.dense()[0, 1].sum(dim=-1).tolist() == [1, 1, 1]
    assert_as_infinite(result, truth, problem.v)


def test_a_causal_vote_within_a_route_marks_no_tile_of_the_future():
    q, k, v = make_inputs(600, heads=1)
    k = k * torch.linspace(3, 0.3, 600, device=DEVICE)[:, None, None].to(DTYPE)
    settings = {"skip_threshold": 0.2, "skip_tile": (64, 64), "causal": True}
    problem = make_problem(
        q, k, v, route=random_route(q, k, density=0.7), want_trace=True, **settings
    )
    result, truth = assert_follows_reference(problem)
    assert truth.skipped.density() > 0
    assert result.skipped == truth.skipped


@pytest.mark.parametrize("routed", [False, True])
def test_a_padded_block_without_a_key_counts_as_no_dropped_tile(routed):
    q, k, v = make_inputs(330)
    k = k * torch.linspace(3, 0.3, 330, device=DEVICE)[:, None, None].to(DTYPE)
    lengths = torch.tensor([64, 10, 0, 33, 64, 0], dtype=torch.int32, device=DEVICE)
    problem = make_problem(
        q, k, v, route=random_route(q, k, density=0.8) if routed else None, block_lengths=lengths,
        skip_threshold=0.2, skip_tile=(64, 64), want_trace=True,
    )  # fmt: skip
    result, truth = assert_follows_reference(problem)
    assert truth.skipped.density() > 0
    assert result.skipped == truth.skipped


@NEEDS_SHARED_MEMORY
@pytest.mark.parametrize("case", ["route", "causal", "zero", "above one", "shorter than a chunk"])
def test_the_adaptive_walk_drops_what_the_branching_one_drops(case):
    q, k, v = make_inputs(300 if case == "shorter than a chunk" else 1300, heads=1)
    q = q if case == "causal" else q[:, :150]
    threshold = {"zero": 0.0, "above one": 3.0}.get(case, 0.3)
    settings = {"skip_threshold": threshold, "skip_tile": (64, 64)}
    if case == "route":
        settings["route"] = random_route(q, k, density=0.9)
        settings["tail"] = BlockSummary.of(k, v)
    q, k = q * 2, k * torch.linspace(2, 0.5, k.shape[1], device=DEVICE)[:, None, None].to(DTYPE)
    problem = make_problem(q, k, v, causal=case == "causal", want_trace=True, **settings)
    result, _ = assert_follows_reference(problem, ADAPTIVE[64])
    assert_equals_the_branching_walk(result, problem)
    assert (result.skipped.density() > 0) == (case != "zero")


@pytest.mark.parametrize(("rows", "warps"), [(128, 4), (64, 8), (32, 2), (256, 16)])
def test_an_adaptive_vote_takes_16_rows_for_each_of_4_or_8_warps(rows, warps):
    with pytest.raises(ValueError, match="16 rows for each of 4 or 8 warps"):
        launch.Config(rows=rows, columns=64, warps=warps, stages=3, adaptive=True)


@pytest.mark.parametrize("tokens", [1, 63, 65, 129])
def test_ragged_lengths_agree_with_the_reference(tokens):
    q, k, v = make_inputs(tokens, heads=1)
    route = random_route(q, k, density=1.0)
    for settings in ({}, {"route": route}):
        assert_follows_reference(make_problem(q, k, v, want_trace=True, **settings))


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("with_tail", [False, True])
def test_a_route_with_and_without_tail_agrees_with_the_reference(dim, with_tail):
    q, k, v = make_inputs(300, dim=dim)
    tail = BlockSummary.of(k, v) if with_tail else None
    problem = make_problem(q, k, v, route=random_route(q, k), tail=tail, want_trace=True)
    assert_follows_reference(problem)


def test_a_slice_of_the_heads_of_a_batch_runs_with_its_own_words():
    q, k, v = (torch.cat([x, x.flip(1)]) for x in make_inputs(heads=3))
    generator = torch.Generator().manual_seed(3)
    mask = torch.rand(2, 3, 4, 4, generator=generator) < 0.5
    route = BlockRoute.from_dense(mask.to(DEVICE), seqlens=(200, 200)).heads(slice(1, 3))
    assert not route.words.is_contiguous()
    q, k, v = (x[:, :, 1:] for x in (q, k, v))
    tail = BlockSummary.of(k, v)
    assert_follows_reference(make_problem(q, k, v, route=route, tail=tail, want_trace=True))


def test_rows_without_keys_are_zero_and_minus_infinity():
    q, k, v = make_inputs(130)
    empty = random_route(q, k, density=0.0)
    result = launch.run(make_problem(q, k, v, route=empty, want_trace=True))
    assert not result.out.any()
    assert result.lse is not None
    assert (result.lse == -torch.inf).all()


INFINITE = {
    "dense": {},
    "lambda 0": {"skip_threshold": 0.0, "skip_tile": (64, 64)},
    "lambda 1e-9": {"skip_threshold": 1e-9, "skip_tile": (64, 64)},
    "lambda 1e-9, 128": {"skip_threshold": 1e-9, "skip_tile": (128, 128)},
    "adaptive": {"skip_threshold": 1e-9, "skip_tile": (64, 64)},
    "causal": {"causal": True},
    "causal, lambda 0": {"causal": True, "skip_threshold": 0.0, "skip_tile": (64, 64)},
    "route": {},
    "causal route": {"causal": True},
    "tail": {},
    "padded": {},
    "split": {},
    "split tail": {},
}


@pytest.mark.parametrize("name", INFINITE)
@pytest.mark.parametrize("first", [1, 64, 100, 200])
@pytest.mark.filterwarnings("ignore:All-NaN slice")
def test_keys_at_minus_infinity_take_no_mass(first, name, monkeypatch):
    # Leading keys, so that rows meet nothing but -inf before any score; 200: nothing else at all.
    q, k, v = make_inputs(200)
    q[..., 0], k[:, :first, :, 0] = 1, -torch.inf
    q[:, ::3, 1, 0] = -1  # these are at +inf, and so NaN
    settings = INFINITE[name] | {"want_trace": True}
    if name.endswith(("route", "tail")):
        settings["route"] = random_route(q, k, density=0.6)
    if name.endswith("tail"):
        settings["tail"] = BlockSummary.of(k, v)
    if name.startswith("split"):
        monkeypatch.setattr(launch, "split_count", lambda problem, tiles: 3)
    if name == "padded":
        lengths = torch.tensor([64, 10, 0, 8], dtype=torch.int32, device=DEVICE)
        settings["block_lengths"] = lengths
    problem = make_problem(q, k, v, **settings)
    result = launch.run(problem, ADAPTIVE[64] if name == "adaptive" else None)
    truth = reference.run(in_float64(problem))
    assert_as_infinite(result, truth, v)


def test_grouped_queries_share_their_key_head():
    q, k, v = make_inputs(200, heads=4, key_heads=2)
    route = random_route(q, k)
    tail = BlockSummary.of(k, v)
    assert_follows_reference(make_problem(q, k, v, route=route, tail=tail, want_trace=True))


def test_cross_attention_is_served_dense():
    q, k, v = make_inputs(70, keys=200)
    assert_follows_reference(make_problem(q, k, v, want_trace=True))


@pytest.mark.parametrize("shares", [2, 4])
@pytest.mark.parametrize("routed", [False, True])
def test_split_keys_give_the_same_result(monkeypatch, shares, routed):
    monkeypatch.setattr(launch, "split_count", lambda problem, tiles: shares)
    q, k, v = make_inputs(200)
    route = random_route(q, k, density=0.3) if routed else None
    tail = BlockSummary.of(k, v) if routed else None
    assert_follows_reference(make_problem(q, k, v, route=route, tail=tail, want_trace=True))


def test_scales_on_the_device_equal_scales_on_the_host():
    q, k, v = make_inputs(100, heads=1)
    host = launch.run(make_problem(q, k, v, scale=0.0625, scale_output=0.5)).out
    tensors = {"scale": 0.0625, "scale_output": 0.5}
    tensors = {name: torch.tensor([value], device=DEVICE) for name, value in tensors.items()}
    assert torch.equal(launch.run(make_problem(q, k, v, **tensors)).out, host)


def test_nan_in_padded_and_unrouted_keys_does_not_leak():
    q, k, v = make_inputs(192, heads=1)
    lengths = torch.tensor([64, 10, 0], dtype=torch.int32, device=DEVICE)
    clean = launch.run(make_problem(q, k, v, block_lengths=lengths)).out
    for x in (k, v):
        x[:, 74:] = torch.nan
    assert torch.equal(launch.run(make_problem(q, k, v, block_lengths=lengths)).out, clean)
    only_first = torch.zeros(1, 1, 3, 3, dtype=torch.bool, device=DEVICE)
    only_first[..., 0] = True
    route = BlockRoute.from_dense(only_first, seqlens=(192, 192))
    assert torch.isfinite(launch.run(make_problem(q, k, v, route=route)).out).all()


def test_strided_inputs_equal_contiguous_ones_and_stay_unchanged():
    tokens, heads, dim = 130, 2, 64
    packed = make_inputs(tokens, heads=3 * heads, dim=dim)[0].reshape(1, tokens, 3, heads, dim)
    views = list(packed.unbind(2))
    before = packed.clone()
    strided = launch.run(make_problem(*views)).out
    assert torch.equal(strided, launch.run(make_problem(*(x.contiguous() for x in views))).out)
    misaligned = [
        torch.empty(x.numel() + 1, dtype=x.dtype, device=DEVICE)[1:].view(x.shape) for x in views
    ]
    for target, x in zip(misaligned, views):
        target.copy_(x)
    assert torch.equal(launch.run(make_problem(*misaligned)).out, strided)
    assert torch.equal(packed, before)


def test_repeats_are_bitwise_equal():
    q, k, v = make_inputs(130, heads=1)
    problem = make_problem(q, k, v, route=random_route(q, k), tail=BlockSummary.of(k, v))
    first = launch.run(problem).out
    for _ in range(100 if DEVICE == "cuda" else 3):
        assert torch.equal(launch.run(problem).out, first)


@pytest.mark.parametrize("thresh_type", ["diag", "exact"])
@pytest.mark.parametrize("tokens", [64, 650, 4225])
def test_the_gpu_route_equals_the_defined_one(thresh_type, tokens):
    q, k, v = make_inputs(tokens, heads=2, key_heads=1)
    scores = sol_scores(q, k, thresh_type=thresh_type, sink_tokens=min(tokens, 70))
    selection, k_mean, v_sum = plan(q, k, v, scores, tau=0.8)
    assert torch.equal(k_mean, BlockSummary.of(k, v).k_mean)
    assert torch.equal(v_sum, BlockSummary.of(k, v).v_sum)
    defined = scores.route(0.8)
    near = (scores.z - 0.8).abs() * scores.std[..., None]
    doubtful = near <= 1e-4 * scores.threshold(0.8).abs().clamp(min=1)[..., None]
    route = BlockRoute(selection.words, (64, 64), (tokens, tokens))
    assert not ((route.dense() != defined.dense()) & ~doubtful).any()
    torch.testing.assert_close(selection.z, scores.z, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(selection.mean, scores.mean, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(selection.std, scores.std, atol=1e-4, rtol=1e-4)
    assert_lists_spell_the_route(route)


def plan(q, k, v, scores, tau):
    q_mean, k_mean, v_sum, _, keys = prepare.summarise(q, k, v, 64)
    selection = select.select(
        q_mean,
        keys,
        tau=tau,
        unit=q.shape[3] ** -0.5 * LOG2_E,
        floor=VARIANCE_FLOOR,
        sink=scores.sink,
        band=1,
        exact=scores.thresh_type == "exact",
        scores=True,
    )
    return selection, k_mean, v_sum


def assert_lists_spell_the_route(route):
    """Every row's list and every pair's list, with owners, against the dense mask."""
    mask = route.dense().cpu()
    index, count = (x.cpu() for x in lists.row_lists(route.words, route.grid[1]))
    pairs, pair_count = (x.cpu() for x in lists.pair_lists(route.words, route.grid[1]))
    assert torch.equal(count.long(), mask.sum(-1))
    odd = torch.zeros_like(mask[:, :, :1])[:, :, : mask.shape[2] % 2]
    first, second = torch.cat([mask, odd], dim=2).int().unflatten(2, (-1, 2)).unbind(3)
    owners = first + 2 * second
    assert torch.equal(pair_count.long(), (owners != 0).sum(-1))
    for batch, head, row in np.ndindex(*count.shape):
        listed = index[batch, head, row, : count[batch, head, row]].long()
        assert torch.equal(listed, mask[batch, head, row].nonzero().flatten())
    for batch, head, row in np.ndindex(*pair_count.shape):
        listed = pairs[batch, head, row, : pair_count[batch, head, row]].long()
        union = owners[batch, head, row].nonzero().flatten()
        assert torch.equal(listed, union * 4 + owners[batch, head, row, union])


@pytest.mark.parametrize("blocks", [1, 2, 31, 32, 33, 65, 2100])
@pytest.mark.parametrize("density", [0.0, 0.3, 1.0])
def test_lists_of_any_words_spell_the_route(blocks, density):
    generator = torch.Generator().manual_seed(blocks)
    rows = 3 if blocks > 100 else blocks
    mask = torch.rand(2, 2, rows, blocks, generator=generator) < density
    route = BlockRoute.from_dense(mask.to(DEVICE), block=(64, 64))
    assert_lists_spell_the_route(route)


@pytest.mark.parametrize("blocks", [1, 2, 31, 32, 33, 65, 2100])
def test_words_of_a_map_are_those_of_the_mask(blocks):
    generator = torch.Generator().manual_seed(blocks)
    found = torch.randint(0, 3, (2, 2, 3, blocks), generator=generator, dtype=torch.int8)
    found[..., -1] = 1  # bit 31 of a whole word is its sign
    expected = BlockRoute.from_dense(found == 1).words
    assert torch.equal(words.map_words(found.to(DEVICE)).cpu(), expected)


def test_a_map_without_tiles_has_no_words():
    assert words.map_words(torch.zeros(1, 2, 0, 3, dtype=torch.int8)).shape == (1, 2, 0, 1)


def centred(k_mean):
    """Statistics of key means ``[1, N, H, D]``: of keys in blocks of one, their own means."""
    _, found, _, _, keys = prepare.summarise(k_mean, k_mean, k_mean, 1)
    assert torch.equal(found, k_mean)
    return keys


def select_from(q_mean, k_mean, tau=0.5, exact=False):
    """z-scores and words of given means: q ``[1, N, H, D]`` float32, k ``[1, N, H, D]``."""
    return select.select(
        q_mean.transpose(1, 2).contiguous(),
        centred(k_mean),
        tau=tau,
        unit=0.18,
        floor=VARIANCE_FLOOR,
        sink=(0, 0),
        band=1,
        exact=exact,
        scores=True,
    )


def means(blocks=90, heads=2, dim=64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(1, blocks, heads, dim, generator=generator) for _ in range(2))
    return q.to(DEVICE), k.to(DEVICE)


@pytest.mark.parametrize("thresh_type", ["diag", "exact"])
@pytest.mark.parametrize("offset", [0.0, 30.0])
def test_scores_are_nearly_as_exact_as_those_of_float32(thresh_type, offset):
    q_mean, k_mean = means()
    k_mean = (k_mean + offset).to(DTYPE)
    truth = score_statistics(q_mean.double(), k_mean, thresh_type, 0.18 / LOG2_E)
    plain = score_statistics(q_mean, k_mean, thresh_type, 0.18 / LOG2_E)
    found = select_from(q_mean, k_mean, exact=thresh_type == "exact")
    for name, wide, narrow in zip(("z", "mean", "std"), truth, plain):
        error = (getattr(found, name).double() - wide).abs().max()
        assert error <= 8 * (narrow.double() - wide).abs().max() + 1e-6 * wide.abs().max(), name


@pytest.mark.parametrize("thresh_type", ["diag", "exact"])
@pytest.mark.parametrize("size", [1e-15, 1e10, 3e15])
def test_scores_far_from_one_route_as_others_do(thresh_type, size):
    """Scores of up to 1e32: their squares do not fit into float32."""
    q_mean, k_mean = means()
    q_mean, k_mean = q_mean * size, k_mean * size
    z, *_ = score_statistics(q_mean, k_mean, thresh_type, 0.18 / LOG2_E)
    found = select_from(q_mean, k_mean, exact=thresh_type == "exact")
    torch.testing.assert_close(found.z, z, atol=1e-5, rtol=1e-4)
    assert found.std.isfinite().all()
    assert found.z.abs().max() > 1 or size < 1


VIEWS = {
    "heads before tokens": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "channels first": lambda x: x.transpose(1, 3).contiguous().transpose(1, 3),
    "every second channel": lambda x: x.repeat_interleave(2, dim=3)[..., ::2],
    "every second token": lambda x: x.repeat_interleave(2, dim=1)[:, ::2],
    "misaligned": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
}


@pytest.mark.parametrize("view", VIEWS)
def test_preparation_reads_any_strides_where_they_lie(view):
    inputs = make_inputs(130, heads=4, key_heads=2)
    want = tensors(prepare.summarise(*inputs, 64))
    views = [VIEWS[view](x) for x in inputs]
    assert all(torch.equal(a, b) for a, b in zip(views, inputs))
    for found, expected in zip(tensors(prepare.summarise(*views, 64)), want):
        assert torch.equal(found, expected)


def tensors(summaries):
    """All that preparation gives, one after the other."""
    *means, keys = summaries
    return *means, *keys.tensors()


@pytest.mark.parametrize(("heads", "key_heads", "tokens"), [(2, 2, 200), (4, 1, 8300)])
def test_key_means_are_centred_beside_the_other_summaries(heads, key_heads, tokens):
    q, k, v = (torch.cat([x, 3 * x]) for x in make_inputs(tokens, heads, key_heads=key_heads))
    _, k_mean, _, _, keys = prepare.summarise(q, k, v, 64)
    wide = k_mean.double()
    center, deviation = wide.mean(dim=1), wide.std(dim=1, correction=0)
    torch.testing.assert_close(keys.center.double(), center, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(keys.deviation.double(), deviation, rtol=1e-5, atol=0)
    power = torch.exp2(-deviation.log2().floor())
    want = ((wide - center[:, None]) * power[:, None]).transpose(1, 2)
    torch.testing.assert_close(keys.upper.double() + keys.lower, want, rtol=1e-4, atol=1e-4)


def test_one_head_for_all_is_summarised_once_per_head():
    q, k, v = make_inputs(130, heads=1)
    want = prepare.summarise(q, k, v, 64)
    wide = [x.expand(-1, -1, 3, -1) for x in (q, k, v)]
    found = prepare.summarise(*wide, 64)
    assert torch.equal(found[0], want[0].expand_as(found[0]))
    assert torch.equal(found[1], want[1].expand_as(found[1]))
    assert torch.equal(found[2], want[2].expand_as(found[2]))
    assert found[3].tolist() == [64, 64, 2]


def test_equal_key_blocks_are_an_exact_tie():
    q, k, _ = make_inputs(300, heads=1)
    k = k[:, :1].expand_as(k).contiguous()
    scores = sol_scores(q, k)
    band = scores.always.counts()
    for tau, whole in ((0.0, False), (0.1, False), (-0.1, True)):
        selection, *_ = plan(q, k, k, scores, tau)
        expected = torch.full_like(band, 5) if whole else band
        assert torch.equal(BlockRoute(selection.words, (64, 64), (300, 300)).counts(), expected)


def test_nan_after_the_last_token_is_never_read():
    q, k, v = make_inputs(100, heads=1)
    room = [torch.full((1, 128, 1, 64), torch.nan, dtype=DTYPE, device=DEVICE) for _ in range(3)]
    for target, x in zip(room, (q, k, v)):
        target[:, :100] = x
    summaries = prepare.summarise(*(x[:, :100] for x in room), 64)
    assert all(torch.isfinite(x).all() for x in tensors(summaries))
    views = [x[:, :100] for x in room]
    assert torch.equal(launch.run(make_problem(*views)).out, launch.run(make_problem(q, k, v)).out)


def test_obstacles_name_what_is_not_served():
    q, k, v = make_inputs(64)
    wide = make_problem(q.float(), k.float(), v.float())
    assert any("dtype torch.float32" in text for text in kernels.obstacles(wide))
    narrow = make_problem(*(x[..., :32].contiguous() for x in (q, k, v)))
    assert any("head dim 32" in text for text in kernels.obstacles(narrow))
    lagging = make_problem(
        q, k, v, skip_threshold=0.1, skip_tile=(64, 64), skip_reference="lagging"
    )
    assert any("lagging" in text for text in kernels.obstacles(lagging))


@pytest.mark.parametrize("thresh_type", ["diag", "exact"])
def test_sol_attention_plans_and_runs_on_the_kernels(thresh_type):
    q, k, v = make_inputs(300)
    settings = {"tau": 0.5, "thresh_type": thresh_type, "sink_tokens": 20, "return_trace": True}
    out, trace = sol_attention(q, k, v, **settings, impl="triton")
    assert trace.impl == "triton"
    truth, expected = sol_attention(q, k, v, **settings, impl="reference")
    assert trace.route == expected.route
    assert trace.density < 1
    torch.testing.assert_close(out, truth, atol=4e-3, rtol=1e-2)
    torch.testing.assert_close(trace.lse, expected.lse, atol=1e-3, rtol=0)


def test_a_plain_dense_call_goes_to_flash_attn_4_or_torch_sdpa():
    q, k, v = make_inputs(64)
    _, trace = attend(q, k, v, return_trace=True)
    assert trace.impl in ("flash", "eager")
    _, trace = attend(q, k, v, impl="triton", return_trace=True)
    assert trace.impl == "triton"


def test_other_block_sizes_go_to_another_implementation_with_the_reason():
    q, k, v = make_inputs(128, heads=1)
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool, device=DEVICE)
    route = BlockRoute.from_dense(mask, block=(32, 32))
    _, trace = attend(q, k, v, route, return_trace=True)
    assert trace.impl != "triton"
    assert any("(32, 32)" in str(reason) for reason in trace.reasons)
