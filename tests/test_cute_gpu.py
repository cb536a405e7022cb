"""The CuTe kernel at full length, in CUDA graphs, and over and over."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from blockattn import BlockRoute, BlockSummary, attend, sol_attention, video_sparse_attention
from blockattn import skip_softmax_attention as skip
from blockattn.impl.cute import cache, launch
from blockattn.problem import make_problem
from tests import independent_large as independent
from tests.gpu_checks import (
    NEEDS_CUTE,
    assert_within_the_error_rule,
    captured,
    chosen_blocks,
    draw,
    random_route,
    syncs_are_errors,
)

pytestmark = [pytest.mark.sm90, NEEDS_CUTE]

DEVICE = "cuda"
TILES = [64, 128]
Settings = dict[str, Any]


# -- an independent reference at full length -------------------------------------------------------

FULL = (4096, 4097, 32768, 75600)


@pytest.mark.parametrize("tokens", FULL)
@pytest.mark.parametrize(("tau", "drift"), [(1.0, 0.0), (1.0, 4.0), (2.0, 4.0)])
def test_sol_attention_agrees_with_an_independent_reference(tokens, tau, drift):
    heads, dim = (4, 128) if tokens <= 32768 else (2, 64)
    q, k, v = draw(tokens, heads=heads, key_heads=heads // 2, dim=dim, drift=drift)
    out, trace = sol_attention(q, k, v, tau=tau, sink_tokens=70, impl="cute", return_trace=True)
    _, other = sol_attention(q, k, v, tau=tau, sink_tokens=70, impl="triton", return_trace=True)
    assert trace.impl == "cute"
    assert trace.route == other.route
    assert trace.density < 0.9
    tail, route = BlockSummary.of(k, v), trace.route.dense()
    for head, row in chosen_blocks(heads, route.shape[2]):
        rows = slice(row * 64, min(tokens, row * 64 + 64))
        found = independent.attention_rows(
            q[0, rows, head], k[0, :, head // 2], v[0, :, head // 2], scale=dim**-0.5,
            exact=route[0, head, row],
            tail=(tail.k_mean[0, :, head // 2], tail.v_sum[0, :, head // 2]),
        )  # fmt: skip
        assert_within_the_error_rule(out[0, rows, head], trace.lse[0, head, rows], found)


@pytest.mark.parametrize("tokens", FULL)
@pytest.mark.parametrize("density", [0.1, 1.0])
def test_a_block_mask_agrees_with_an_independent_reference(tokens, density):
    q, k, v = draw(tokens, dim=128)
    blocks = -(-tokens // 64)
    generator = torch.Generator(DEVICE).manual_seed(1)
    mask = torch.rand(1, 2, blocks, blocks, generator=generator, device=DEVICE) < density
    mask[..., 0] = True
    route = BlockRoute.from_dense(mask, seqlens=(tokens, tokens))
    out, trace = attend(q, k, v, route, impl="cute", return_trace=True)
    for head, row in chosen_blocks(2, blocks):
        rows = slice(row * 64, min(tokens, row * 64 + 64))
        found = independent.attention_rows(
            q[0, rows, head], k[0, :, head], v[0, :, head],
            scale=q.shape[3] ** -0.5, exact=mask[0, head, row],
        )  # fmt: skip
        assert_within_the_error_rule(out[0, rows, head], trace.lse[0, head, rows], found)


@pytest.mark.parametrize("tokens", FULL)
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("threshold", [0.0, 0.02])
def test_a_skip_map_agrees_with_an_independent_reference(tokens, tile, threshold):
    q, k, v = draw(tokens, dim=128)
    # Keys on a new level every 128 tokens, the highest first: some tiles lie far below the maximum.
    level = torch.rand(-(-tokens // 128), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    level[0] = 1
    along = 4 * level.repeat_interleave(128)[:tokens, None, None].expand(-1, 2, 1)
    q[..., :4], k[0, :, :, :4] = 8, along.to(k.dtype)
    edges = (tile, tile)
    settings: Settings = {"skip_threshold": threshold, "skip_tile": edges}
    out, trace = attend(q, k, v, impl="cute", return_trace=True, **settings)
    dropped, scale = trace.skipped.dense(), q.shape[3] ** -0.5
    assert bool(dropped.any()) == (threshold > 0)
    for head, row in chosen_blocks(2, dropped.shape[2]):
        rows = slice(row * tile, min(tokens, (row + 1) * tile))
        want, near = independent.dropped_tiles(
            q[0, rows, head], k[0, :, head], scale=scale, threshold=threshold, tile=edges
        )
        assert not ((dropped[0, head, row] != want) & ~near).any()
        found = independent.attention_rows(
            q[0, rows, head], k[0, :, head], v[0, :, head],
            scale=scale, exact=~dropped[0, head, row], block=edges,
        )  # fmt: skip
        assert_within_the_error_rule(out[0, rows, head], trace.lse[0, head, rows], found)


def test_offsets_beyond_two_billion_elements_do_not_wrap():
    tokens, heads = 2**18, 68  # 2.28e9 elements of each tensor
    if torch.cuda.get_device_properties(0).total_memory < 60e9:
        pytest.skip("needs a GPU with 60 GB of memory")
    q, k, v = draw(64, heads=1, dim=128, seed=5)
    many = torch.zeros(1, tokens, heads, 128, dtype=q.dtype, device=DEVICE)
    value = torch.zeros_like(many)
    many[:, -64:, -1:], value[:, -64:, -1:] = k, v
    mask = torch.zeros(1, heads, tokens // 64, tokens // 64, dtype=torch.bool, device=DEVICE)
    mask[..., -1, -1] = True
    route = BlockRoute.from_dense(mask, seqlens=(tokens, tokens))
    out = attend(many, many, value, route, impl="cute")
    want = attend(k, k, v, impl="cute")
    assert torch.equal(out[:, -64:, -1:], want)


# -- every public call -----------------------------------------------------------------------------

GRID = (8, 12, 16)
# name -> a call of its own; the last block of queries and of keys is ragged in half of them


def public_calls() -> dict[str, Callable[..., Any]]:
    """The public operations with what each needs, at a size that every test here affords."""
    q, k, v = draw(math.prod(GRID), dim=128, drift=4.0)
    ragged: tuple[Tensor, Tensor, Tensor] = (q[:, :1500], k[:, :1500], v[:, :1500])
    route, tail = random_route(q, k, 0.3), BlockSummary.of(k, v)
    short = random_route(ragged[0], ragged[1], 0.3)
    scale = torch.tensor([0.1], device=DEVICE)
    lengths = torch.arange(41, 65, dtype=torch.int32, device=DEVICE)
    gate = 0.5 * q
    return {
        "dense": partial(attend, q, k, v, impl="cute"),
        "ragged": partial(attend, *ragged, impl="cute"),
        "causal": partial(attend, *ragged, causal=True, impl="cute"),
        "route": partial(attend, q, k, v, route, impl="cute"),
        "ragged route": partial(attend, *ragged, short, impl="cute"),
        "route and tail": partial(attend, q, k, v, route, tail=tail, scale=scale, impl="cute"),
        "padded": partial(attend, q, k, v, route, block_lengths=lengths, impl="cute"),
        "skip": partial(skip, *ragged, threshold=0.05, tile=(64, 64), impl="cute"),
        "skip 128": partial(skip, q, k, v, threshold=0.05, impl="cute"),
        "skip route": partial(
            attend, *ragged, short, skip_threshold=0.05, skip_tile=(64, 64), impl="cute"
        ),
        "sol": partial(sol_attention, *ragged, tau=1.0, sink_tokens=70, impl="cute"),
        "vsa": partial(
            video_sparse_attention,
            q, k, v, grid=GRID, sparsity=0.8, gate_compress=gate, impl="cute",
        ),
    }  # fmt: skip


CALLS = (
    "dense", "ragged", "causal", "route", "ragged route", "route and tail", "padded", "skip",
    "skip 128", "skip route", "sol", "vsa",
)  # fmt: skip


def test_the_list_of_calls_is_complete():
    assert tuple(public_calls()) == CALLS


@pytest.mark.parametrize("name", CALLS)
def test_a_thousand_repeats_are_bitwise_equal(name):
    call = public_calls()[name]
    first = call()
    same = torch.stack([(call() == first).all() for _ in range(1000)])
    assert same.all()


@pytest.mark.parametrize("name", ["route and tail", "sol", "skip"])
def test_repeats_beside_another_stream_are_bitwise_equal(name):
    """A neighbour on the same processors changes who waits for whom."""
    call, side = public_calls()[name], torch.cuda.Stream()
    first = call()
    noise = torch.randn(2048, 2048, device=DEVICE)
    torch.cuda.synchronize()
    same = []
    for _ in range(100):
        with torch.cuda.stream(side):
            noise = (noise @ noise).clamp(-1, 1)
        same.append((call() == first).all())
    assert torch.stack(same).all()


@pytest.mark.parametrize("name", CALLS)
def test_no_public_call_waits_for_the_gpu(name):
    call = public_calls()[name]
    call()
    call(return_trace=True)
    with syncs_are_errors():
        call()
        call(return_trace=True)


@pytest.mark.parametrize("name", CALLS)
def test_asking_for_the_trace_changes_no_bit(name):
    call = public_calls()[name]
    out, trace = call(return_trace=True)
    assert trace.impl == "cute"
    assert torch.equal(out, call())


@pytest.mark.parametrize("name", CALLS)
def test_memory_that_was_not_written_is_not_read(name):
    """Every buffer of a call starts as NaN, or as the largest integer."""
    call = public_calls()[name]
    clean, trace = call(return_trace=True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(3, device=DEVICE).isnan().all()
        found, poisoned = call(return_trace=True)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(found, clean)
    assert torch.equal(poisoned.lse, trace.lse)
    assert poisoned.skipped == trace.skipped


@pytest.mark.parametrize("name", CALLS)
def test_a_replayed_graph_equals_a_launch_bit_for_bit(name):
    call: Any = public_calls()[name]
    graph, out = captured(call)
    for seed in (3, 4):
        for target, x in zip(call.args[:3], draw(math.prod(GRID), dim=128, drift=4.0, seed=seed)):
            target.copy_(x[:, : target.shape[1]])
        graph.replay()
        assert torch.equal(out, call())


def test_a_scale_on_the_device_may_change_between_replays():
    q, k, v = draw(2048)
    scale = torch.tensor([0.125], device=DEVICE)
    graph, out = captured(lambda: attend(q, k, v, scale=scale, impl="cute"))
    for value in (0.125, 0.02):
        scale.fill_(value)
        graph.replay()
        assert torch.equal(out, attend(q, k, v, scale=value, impl="cute"))


@pytest.mark.parametrize("heads", [2, 16, 24])
def test_lists_of_any_length_are_all_taken(heads):
    """Some are empty, some hold nearly every block; programs take one after the other."""
    tokens, blocks = 2560, 40
    q, k, v = draw(tokens, heads=heads, key_heads=heads, dim=128)
    generator = torch.Generator(DEVICE).manual_seed(3)
    share = torch.rand(1, heads, blocks, 1, generator=generator, device=DEVICE) ** 4
    mask = torch.rand(1, heads, blocks, blocks, generator=generator, device=DEVICE) < share
    mask[:, :, :4] = False
    route = BlockRoute.from_dense(mask, seqlens=(tokens, tokens))
    out = attend(q, k, v, route, impl="cute")
    for head in range(heads):
        part = [x[:, :, head : head + 1] for x in (q, k, v)]
        own = BlockRoute.from_dense(mask[:, head : head + 1], seqlens=(tokens, tokens))
        alone = attend(part[0], part[1], part[2], own, impl="cute")
        assert torch.equal(out[:, :, head : head + 1], alone)


@pytest.mark.parametrize("tokens", [60, 1500, 9000])
@pytest.mark.parametrize("kind", ["dense", "causal", "route", "skip"])
def test_a_launch_leaves_the_counter_of_its_stream_zero(tokens, kind):
    q, k, v = draw(tokens, heads=3, key_heads=3, dim=128)
    route = random_route(q, k, 0.2) if kind == "route" else None
    threshold = 0.01 if kind == "skip" else None
    problem = make_problem(
        q, k, v, route=route, causal=kind == "causal", skip_threshold=threshold, skip_tile=(64, 64)
    )
    lists = None if route is None else launch.route_lists(problem)
    first = launch.run(problem, lists).out
    for _ in range(3):
        assert torch.equal(launch.run(problem, lists).out, first)
    assert launch._zero(q.device) is launch._zero(q.device)
    assert launch._zero(q.device).item() == 0


def test_a_call_runs_on_the_current_stream():
    """Its input is written on a side stream, behind work that another stream would not await."""
    q, k, v = draw(1500, dim=128)
    want = attend(q, k, v, impl="cute")
    late, side = torch.zeros_like(q), torch.cuda.Stream()
    busy = torch.randn(8192, 8192, device=DEVICE)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        for _ in range(8):
            busy = (busy @ busy).clamp(-1, 1)
        late.copy_(q)
        out = attend(late, k, v, impl="cute")
    side.synchronize()
    assert torch.equal(out, want)


def test_other_lengths_heads_thresholds_and_scales_load_nothing():
    q, k, v = draw(640, heads=4)
    attend(q, k, v, impl="cute", skip_threshold=0.1, skip_tile=(64, 64))
    before = cache.loads()
    for tokens, heads, threshold in ((640, 2, 0.1), (77, 4, 0.3), (333, 1, 0.0)):
        part = [x[:, :tokens, :heads] for x in (q, k, v)]
        settings: Settings = {"skip_threshold": threshold, "skip_tile": (64, 64)}
        attend(part[0], part[1], part[2], impl="cute", scale=0.1 + threshold, **settings)
    assert cache.loads() == before


def test_the_first_call_says_how_it_got_its_kernel_and_later_ones_are_silent(monkeypatch):
    q, k, v = draw(64)
    monkeypatch.setattr(cache, "_kernels", {})
    _, first = attend(q, k, v, impl="cute", return_trace=True)
    _, second = attend(q, k, v, impl="cute", return_trace=True)
    assert first.loaded is not None
    assert first.loaded in str(first)
    assert second.loaded is None
