"""The Triton kernels at full size, in CUDA graphs, and over and over: what only a GPU can show.

The independent reference runs at small sizes in the interpreter as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from blockattn import (
    BlockRoute,
    BlockSummary,
    attend,
    skip_softmax_attention,
    sol_attention,
    video_sparse_attention,
)
from blockattn.impl import triton as kernels
from blockattn.problem import make_problem
from blockattn.quant import quantised_attention
from tests import independent_large as independent
from tests.gpu_checks import (
    DEVICE,
    DTYPE,
    assert_rounded_means,
    assert_within_the_error_rule,
    captured,
    chosen_blocks,
    draw,
    syncs_are_errors,
)

triton = pytest.importorskip("triton", reason="needs triton (Linux)")
from blockattn.impl.triton import launch  # noqa: E402

FULL = [pytest.param(size, marks=pytest.mark.gpu) for size in (4096, 4097, 32768, 75600)]
OURS: dict[str, Any] = {"impl": "triton"}  # others may be measured to be faster
GRID = (8, 12, 16) if DEVICE == "cuda" else (4, 8, 8)  # of the public calls: 24 or 4 blocks
SKIP_TILES = [(64, 64), (128, 128)]


@pytest.fixture(autouse=True)
def interpreter_may_run_on_the_cpu(monkeypatch):
    monkeypatch.setattr(kernels, "DEVICES", ("cuda", "cpu"))


# -- an independent reference at full length ------------------------------------------------------


@pytest.mark.parametrize("tokens", [200, *FULL])
@pytest.mark.parametrize(("thresh_type", "tau"), [("diag", 1.0), ("exact", 0.5)])
@pytest.mark.parametrize("drift", [0.0, 4.0])
def test_sol_attention_agrees_with_an_independent_reference(tokens, thresh_type, tau, drift):
    heads, dim = (4, 128) if tokens <= 32768 and DEVICE == "cuda" else (2, 64)
    q, k, v = draw(tokens, heads=heads, key_heads=heads // 2, dim=dim, drift=drift)
    sink = max(1, tokens // 50)
    out, trace = sol_attention(
        q, k, v, tau=tau, thresh_type=thresh_type, sink_tokens=sink, return_trace=True, **OURS
    )
    assert trace.impl == "triton"
    tail = BlockSummary.of(k, v)
    assert_rounded_means(tail, k, v)
    blocks = tail.k_mean.shape[1]
    scale = dim**-0.5
    sunk = ((tokens - sink) // 64, blocks)
    want = independent.sol_plan(q, tail.k_mean, tau, thresh_type, scale=scale, sink=sunk)
    route = trace.route.dense()
    assert not ((route != want.exact) & ~want.doubtful).any()
    assert blocks < 10 or trace.density < 0.9
    for head, row in chosen_blocks(heads, blocks):
        group = head // 2
        rows = slice(row * 64, min(tokens, row * 64 + 64))
        found = independent.attention_rows(
            q[0, rows, head], k[0, :, group], v[0, :, group], scale=scale,
            exact=route[0, head, row], tail=(tail.k_mean[0, :, group], tail.v_sum[0, :, group]),
        )  # fmt: skip
        assert_within_the_error_rule(out[0, rows, head], trace.lse[0, head, rows], found)


@pytest.mark.parametrize("tokens", [300, *FULL])
@pytest.mark.parametrize("density", [0.1, 1.0])
def test_a_block_mask_agrees_with_an_independent_reference(tokens, density):
    q, k, v = draw(tokens, dim=128 if DEVICE == "cuda" else 64)
    blocks = -(-tokens // 64)
    generator = torch.Generator(DEVICE).manual_seed(1)
    mask = torch.rand(1, 2, blocks, blocks, generator=generator, device=DEVICE) < density
    mask[..., 0] = True
    route = BlockRoute.from_dense(mask, seqlens=(tokens, tokens))
    out, trace = attend(q, k, v, route, impl="triton", return_trace=True)
    for head, row in chosen_blocks(2, blocks):
        rows = slice(row * 64, min(tokens, row * 64 + 64))
        found = independent.attention_rows(
            q[0, rows, head], k[0, :, head], v[0, :, head],
            scale=q.shape[3] ** -0.5, exact=mask[0, head, row],
        )  # fmt: skip
        assert_within_the_error_rule(out[0, rows, head], trace.lse[0, head, rows], found)


@pytest.mark.parametrize("tokens", [600, *FULL])
@pytest.mark.parametrize("tile", SKIP_TILES)
@pytest.mark.parametrize("threshold", [0.0, 0.02])
def test_a_skip_map_agrees_with_an_independent_reference(tokens, tile, threshold):
    q, k, v = draw(tokens, dim=128 if DEVICE == "cuda" else 64)
    # Keys on a new level every 128 tokens, the highest first: some tiles lie far below the maximum.
    level = torch.rand(-(-tokens // 128), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    level[0] = 1
    along = 4 * level.repeat_interleave(128)[:tokens, None, None].expand(-1, 2, 1)
    q[..., :4], k[0, :, :, :4] = 8, along.to(DTYPE)
    settings: dict[str, Any] = {"skip_threshold": threshold, "skip_tile": tile}
    major = torch.cuda.get_device_capability()[0] if DEVICE == "cuda" else 9
    if tile == (128, 128) and major not in (9, 10):
        pytest.skip("needs the shared memory of compute capability 9 or 10 for tiles of 128 x 128")
    out, trace = attend(q, k, v, impl="triton", return_trace=True, **settings)
    dropped, scale = trace.skipped.dense(), q.shape[3] ** -0.5
    assert bool(dropped.any()) == (threshold > 0)
    for head, row in chosen_blocks(2, dropped.shape[2]):
        rows = slice(row * tile[0], min(tokens, (row + 1) * tile[0]))
        want, near = independent.dropped_tiles(
            q[0, rows, head], k[0, :, head], scale=scale, threshold=threshold, tile=tile
        )
        assert not ((dropped[0, head, row] != want) & ~near).any()
        found = independent.attention_rows(
            q[0, rows, head], k[0, :, head], v[0, :, head],
            scale=scale, exact=~dropped[0, head, row], block=tile,
        )  # fmt: skip
        assert_within_the_error_rule(out[0, rows, head], trace.lse[0, head, rows], found)


# -- every public call ----------------------------------------------------------------------------


def public_calls() -> dict[str, Callable[[], Tensor]]:
    """The public operations with what each needs, at a size that every test here affords."""
    q, k, v = draw(math.prod(GRID), dim=64, drift=4.0)
    blocks = q.shape[1] // 64
    generator = torch.Generator(DEVICE).manual_seed(1)
    mask = torch.rand(1, 2, blocks, blocks, generator=generator, device=DEVICE) < 0.3
    route, tail = BlockRoute.from_dense(mask), BlockSummary.of(k, v)
    tile = kernels.BLOCK
    scale = torch.tensor([0.1], device=DEVICE)
    return {
        "dense": partial(attend, q, k, v),
        "dense by triton": partial(attend, q, k, v, **OURS),
        "causal": partial(attend, q, k, v, causal=True, **OURS),
        "route": partial(attend, q, k, v, route, **OURS),
        "route and tail": partial(attend, q, k, v, route, tail=tail, scale=scale, **OURS),
        "skip": partial(skip_softmax_attention, q, k, v, threshold=0.05, tile=tile, **OURS),
        "skip as by default": partial(skip_softmax_attention, q, k, v, threshold=0.05),
        "sol diag": partial(sol_attention, q, k, v, tau=1.0, **OURS),
        "sol exact": partial(
            sol_attention, q, k, v, tau=0.5, thresh_type="exact", sink_tokens=70, **OURS
        ),
        "vsa": partial(
            video_sparse_attention, q, k, v, grid=GRID, sparsity=0.8, gate_compress=0.5 * q, **OURS
        ),
        "quantised": partial(quantised_attention, q, k, v, qk_dtype="mxfp8", v_dtype="fp8", **OURS),
    }


CALLS = (
    "dense", "dense by triton", "causal", "route", "route and tail", "skip",
    "skip as by default", "sol diag", "sol exact", "vsa", "quantised",
)  # fmt: skip


def test_the_list_of_calls_is_complete():
    assert tuple(public_calls()) == CALLS


@pytest.mark.gpu
def test_a_wait_would_be_noticed():
    x = torch.ones(2, device="cuda")
    with syncs_are_errors(), pytest.raises(RuntimeError, match="synchroniz"):
        x[0].item()


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
def test_no_public_call_waits_for_the_gpu(name):
    call = public_calls()[name]
    call()
    with syncs_are_errors():
        call()
        call(return_trace=True)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
def test_a_hundred_repeats_are_bitwise_equal(name):
    call = public_calls()[name]
    first = call()
    same = torch.stack([(call() == first).all() for _ in range(100)])
    assert same.all()


@pytest.mark.parametrize("name", ["dense by triton", "route and tail", "skip", "sol exact"])
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
    assert poisoned.route == trace.route
    assert poisoned.skipped == trace.skipped


@pytest.mark.parametrize("name", ["dense by triton", "route and tail", "skip", "sol diag"])
def test_inputs_stay_what_they_were(name):
    call: Any = public_calls()[name]
    before = [x.clone() for x in call.args[:3]]
    call()
    assert all(torch.equal(a, b) for a, b in zip(before, call.args))


# -- CUDA graphs ----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
def test_a_replayed_graph_equals_a_launch_bit_for_bit(name):
    call: Any = public_calls()[name]
    graph, out = captured(call)
    for seed in (3, 4):
        for target, x in zip(call.args[:3], draw(math.prod(GRID), drift=4.0, seed=seed)):
            target.copy_(x)
        graph.replay()
        assert torch.equal(out, call())


@pytest.mark.gpu
def test_a_scale_on_the_device_may_change_between_replays_and_tau_belongs_to_its_graph():
    q, k, v = draw(2048)
    scale = torch.tensor([0.125], device="cuda")
    graph, out = captured(lambda: attend(q, k, v, scale=scale, impl="triton"))
    for value in (0.125, 0.02):
        scale.fill_(value)
        graph.replay()
        assert torch.equal(out, attend(q, k, v, scale=value, impl="triton"))
    graphs = {tau: captured(partial(sol_attention, q, k, v, tau=tau)) for tau in (0.5, 2.0)}
    for tau in (2.0, 0.5, 2.0):
        graph, out = graphs[tau]
        graph.replay()
        assert torch.equal(out, sol_attention(q, k, v, tau=tau))
    assert not torch.equal(graphs[0.5][1], graphs[2.0][1])


@pytest.mark.gpu
def test_dense_and_sparse_graphs_take_turns_across_the_denoising_phase():
    """One graph for each phase over the same inputs, as a sampler with a dense phase needs."""
    q, k, v = draw(2048, drift=4.0)
    calls = {
        "dense": partial(attend, q, k, v, impl="triton"),
        "sparse": partial(sol_attention, q, k, v, tau=1.5),
    }
    graphs = {phase: captured(call) for phase, call in calls.items()}
    for step, time in enumerate((1.0, 0.95, 0.85, 0.3, 1.0, 0.1)):
        phase = "dense" if time >= 0.9 else "sparse"
        for target, x in zip((q, k, v), draw(2048, drift=4.0, seed=step)):
            target.copy_(x)
        graph, out = graphs[phase]
        graph.replay()
        other = calls["sparse" if phase == "dense" else "dense"]()
        assert torch.equal(out, calls[phase]())
        assert not torch.equal(out, other)


@pytest.mark.gpu
def test_another_tau_compiles_nothing():
    q, k, v = draw(2048)
    sol_attention(q, k, v, tau=1.0)
    from blockattn.impl.triton import select

    before = sum(len(entry[0]) for entry in select._select.device_caches.values())
    for tau in (0.0, 1.0, 2, -1000.0, 0.3):
        sol_attention(q, k, v, tau=tau)
    assert sum(len(entry[0]) for entry in select._select.device_caches.values()) == before


@pytest.mark.gpu
def test_few_query_tiles_are_split_over_the_keys_and_agree():
    q, k, v = draw(8192, heads=1, dim=128)
    few = q[:, :128].contiguous()
    assert launch.split_count(make_problem(few, k, v), 1) > 1
    split = attend(few, k, v, impl="triton")
    whole = attend(q, k, v, impl="triton")[:, :128]
    error = (split.float() - whole.float()).abs().max()
    assert error <= 2 * torch.finfo(DTYPE).eps * whole.abs().max()
