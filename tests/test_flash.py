"""The adapter to flash-attn-4: what it refuses, what it hands over, what it computes on a GPU."""

from __future__ import annotations

import sys
import types
from dataclasses import replace

import pytest
import torch

from blockattn import BlockRoute, BlockSummary, attend
from blockattn.impl import flash, reference, registry
from blockattn.problem import make_problem
from tests.adapter_inputs import (
    DEVICE,
    assert_a_replay_equals_a_launch,
    assert_error_rule,
    assert_nothing_waits,
    draw,
    random_route,
)

LATEST, FIRST = "4.0.0b36", "4.0.0b19"


@pytest.fixture
def version(monkeypatch):
    """Chooses the version that seems to be installed."""

    def choose(text):
        monkeypatch.setattr("blockattn.impl.library._version", lambda _: text)
        monkeypatch.setattr(flash.Library, "unloadable", lambda _: [])
        monkeypatch.setattr(flash, "_compiler_obstacles", lambda: [])

    return choose


@pytest.fixture
def on_hopper(monkeypatch, version):
    """Tensors on the CPU pass for those of a Hopper GPU."""
    version(LATEST)
    monkeypatch.setattr(flash, "gpu_obstacles", lambda *_: [])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))


# -- what it serves -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "major", "served"),
    [
        (LATEST, 9, {(128, 128), (128, 64), (64, 128), (64, 64)}),
        ("4.0.0b40", 9, {(128, 128), (128, 64), (64, 128), (64, 64)}),
        ("4.1.0", 9, {(128, 128), (128, 64), (64, 128), (64, 64)}),
        (FIRST, 9, {(128, 128), (128, 64)}),
        ("4.0.0b35", 9, {(128, 128), (128, 64)}),
        (LATEST, 10, {(256, 128)}),
        (FIRST, 10, {(256, 128)}),
    ],
)
def test_each_version_serves_the_blocks_that_were_tried_with_it(version, major, served):
    assert set(flash.blocks_served(version, major)) == served


def test_an_older_version_is_told_the_tile_that_it_would_not_find():
    assert flash.tile(FIRST, (128, 64)) == (128, 64)
    assert flash.tile(FIRST, (128, 128)) is None
    assert flash.tile(LATEST, (128, 64)) is None


REFUSED = {
    "dtype torch.float32": lambda q, k, v: make_problem(q.float(), k.float(), v.float()),
    "head dim 32": lambda q, k, v: make_problem(q[..., :32], k[..., :32], v[..., :32]),
    "a skip threshold": lambda q, k, v: make_problem(q, k, v, skip_threshold=0.1),
    "scale_output": lambda q, k, v: make_problem(q, k, v, scale_output=2.0),
    "a scale on the device": lambda q, k, v: make_problem(q, k, v, scale=torch.ones(1)),
    "an empty sequence": lambda q, k, v: make_problem(q[:, :0], k, v),
    "(Tq, Tk) = (128, 256)": lambda q, k, v: make_problem(q[:, :128], k, v, causal=True),
    "causal=True with a route": lambda q, k, v: make_problem(
        q, k, v, route=random_route(q, k), causal=True
    ),
    "padded blocks": lambda q, k, v: make_problem(
        q, k, v, block_lengths=torch.full((4,), 60, dtype=torch.int32)
    ),
    "block summaries": lambda q, k, v: make_problem(
        q, k, v, route=random_route(q, k), tail=BlockSummary.of(k, v)
    ),
}


@pytest.mark.skipif(DEVICE == "cuda", reason="needs a machine without a GPU, which is planted")
@pytest.mark.parametrize("text", REFUSED)
def test_what_it_does_not_serve_is_named(text, on_hopper):
    (found,) = flash.obstacles(REFUSED[text](*draw(256)))
    assert text in found


@pytest.mark.skipif(DEVICE == "cuda", reason="needs a machine without a GPU, which is planted")
def test_every_reason_is_listed_at_once(on_hopper):
    q, k, v = draw(256, dim=32, dtype=torch.float32)
    problem = make_problem(q, k, v, skip_threshold=0.1, scale_output=2.0)
    assert len(flash.obstacles(problem)) == 4


@pytest.mark.skipif(DEVICE == "cuda", reason="needs a machine without a GPU, which is planted")
def test_small_blocks_are_refused_with_the_coarsening_that_fits(on_hopper, version):
    q, k, v = draw(256)
    problem = make_problem(q, k, v, route=random_route(q, k))
    assert flash.obstacles(problem) == []
    version(FIRST)
    (found,) = flash.obstacles(problem)
    assert "route blocks (64, 64), 4.0.0b19 serves (128, 128), (128, 64)" in found
    assert "route.coarsen((128, 64)) fits, with more pairs" in found
    coarse = problem.route.coarsen((128, 64))
    assert flash.obstacles(make_problem(q, k, v, route=coarse)) == []


def test_the_cuda_12_libraries_stop_the_first_lane_alone(monkeypatch):
    library = types.ModuleType("cutlass")
    library.CUDA_VERSION = types.SimpleNamespace(major=12, minor=9)
    monkeypatch.setitem(sys.modules, "cutlass", library)
    for text, obstacles in ((FIRST, 1), (LATEST, 0)):
        monkeypatch.setattr("blockattn.impl.library._version", lambda _, text=text: text)
        found = flash._compiler_obstacles()
        assert len(found) == obstacles
        assert all("needs its extra cu13 and a driver for CUDA 13" in x for x in found)
    library.CUDA_VERSION = types.SimpleNamespace(major=13, minor=1)
    monkeypatch.setattr("blockattn.impl.library._version", lambda _: FIRST)
    assert flash._compiler_obstacles() == []


# -- what it hands over, to a planted library -----------------------------------------------------


class Planted:
    """Stands in for the library: computes what its arguments ask for, by the reference."""

    def __init__(self, monkeypatch):
        self.given = {}
        interface = types.ModuleType("flash_attn.cute.interface")
        interface._flash_attn_fwd = self.forward
        sparsity = types.ModuleType("flash_attn.cute.block_sparsity")
        sparsity.BlockSparseTensorsTorch = types.SimpleNamespace
        modules = {"flash_attn": types.ModuleType("flash_attn")}
        modules["flash_attn.cute"] = types.ModuleType("flash_attn.cute")
        modules |= {interface.__name__: interface, sparsity.__name__: sparsity}
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)

    def forward(self, q, k, v, *, softmax_scale, causal, return_lse, **settings):
        self.given = {"return_lse": return_lse, **settings}
        route = None
        if settings:
            route = self.route(settings["block_sparse_tensors"], q, k)
        made = reference.run(make_problem(q, k, v, route=route, scale=softmax_scale, causal=causal))
        return made.out, made.lse if return_lse else None, None, None, None

    def route(self, tensors, q, k):
        assert not tensors.mask_block_cnt.any()
        index, count = tensors.full_block_idx, tensors.full_block_cnt
        assert index.dtype == count.dtype == torch.int32
        listed = torch.arange(index.shape[3]) < count[..., None]
        assert (index.diff() > 0)[listed[..., 1:]].all(), "the last block listed may be ragged"
        mask = torch.zeros(index.shape, dtype=torch.bool)
        mask.scatter_(3, index.long(), listed)
        return BlockRoute.from_dense(
            mask, block=tensors.block_size, seqlens=(q.shape[1], k.shape[1])
        )


@pytest.mark.skipif(DEVICE == "cuda", reason="needs a machine without a GPU, which is planted")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("traced", [False, True])
def test_a_dense_call_hands_over_scale_and_mask(causal, traced, on_hopper, monkeypatch):
    library = Planted(monkeypatch)
    q, k, v = draw(200, heads=4, key_heads=2)
    settings = {"scale": 0.07, "causal": causal, "return_trace": traced}
    made = attend(q, k, v, impl="flash", **settings)
    want = attend(q, k, v, impl="reference", **settings)
    assert library.given == {"return_lse": traced}
    if traced:
        (made, trace), (want, truth) = made, want
        assert (trace.impl, trace.density) == ("flash", truth.density)
        assert torch.equal(trace.lse, truth.lse)
    assert torch.equal(made, want)


@pytest.mark.skipif(DEVICE == "cuda", reason="needs a machine without a GPU, which is planted")
@pytest.mark.parametrize(("text", "tile"), [(LATEST, None), (FIRST, (128, 64))])
def test_a_route_is_handed_over_as_ascending_lists(text, tile, on_hopper, version, monkeypatch):
    version(text)
    library = Planted(monkeypatch)
    q, k, v = draw(330, keys=450)
    route = random_route(q, k, (128, 64))
    made, trace = attend(q, k, v, route, impl="flash", return_trace=True)
    assert library.given["tile_mn"] == tile
    assert torch.equal(made, attend(q, k, v, route, impl="reference"))
    assert trace.density == route.density() < 1


@pytest.mark.skipif(DEVICE == "cuda", reason="needs a machine without a GPU, which is planted")
def test_coarsening_is_asked_for_and_the_density_delivered_is_that_of_the_coarse_route(
    on_hopper, version, monkeypatch
):
    version(FIRST)
    Planted(monkeypatch)
    q, k, v = draw(512)
    fine = random_route(q, k, density=0.1)
    coarse = fine.coarsen((128, 128))
    made, trace = attend(q, k, v, coarse, impl="flash", return_trace=True)
    assert trace.route is coarse
    assert fine.density() < trace.density == coarse.density() < 1
    assert torch.equal(made, attend(q, k, v, coarse, impl="reference"))
    assert not torch.equal(made, attend(q, k, v, fine, impl="reference"))


@pytest.mark.skipif(DEVICE == "cuda", reason="needs a machine without a GPU, which is planted")
def test_auto_takes_it_for_large_dense_calls_and_for_larger_blocks(on_hopper, monkeypatch):
    Planted(monkeypatch)
    monkeypatch.setattr(registry, "FLASH_FROM", 4 * 256 * 256 * 2 * 128)
    q, k, v = draw(256)
    for route in (None, random_route(q, k, (128, 128))):
        _, trace = attend(q, k, v, route, return_trace=True)
        assert trace.impl == "flash"
        assert trace.reasons == ()
    _, trace = attend(q[:, :255], k, v, return_trace=True)
    assert trace.impl == "eager"
    assert trace.reasons == ()


# -- on a GPU -------------------------------------------------------------------------------------

ABSENT = "; ".join(flash.obstacles(None))
needs_library = pytest.mark.skipif(bool(ABSENT), reason=f"needs flash-attn-4: {ABSENT}")


def blocks_here():
    if ABSENT:
        return flash.blocks_served(LATEST, 9)
    major = torch.cuda.get_device_capability()[0]
    return flash.blocks_served(flash.LIBRARY.version(), major)


def run(problem):
    assert flash.obstacles(problem) == []
    return flash.run(problem)


@pytest.mark.gpu
@needs_library
@pytest.mark.parametrize("tokens", [1, 64, 200, 1025])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", flash.HEAD_DIMS)
def test_dense_attention_keeps_the_error_rule(tokens, causal, dim):
    q, k, v = draw(tokens, dim=dim)
    problem = make_problem(q, k, v, causal=causal, scale=0.11, want_trace=True)
    assert_error_rule(run(problem), problem)


@pytest.mark.gpu
@needs_library
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("key_heads", [1, 2])
def test_grouped_queries_and_float16_keep_the_error_rule(causal, key_heads):
    q, k, v = draw(777, heads=6, key_heads=key_heads, dtype=torch.float16)
    problem = make_problem(q, k, v, causal=causal, want_trace=True)
    assert_error_rule(run(problem), problem)


@pytest.mark.gpu
@needs_library
@pytest.mark.parametrize("shape", [(65, 700), (700, 65), (130, 1)])
def test_cross_attention_keeps_the_error_rule(shape):
    q, k, v = draw(shape[0], keys=shape[1])
    problem = make_problem(q, k, v, want_trace=True)
    assert_error_rule(run(problem), problem)


@pytest.mark.gpu
@needs_library
@pytest.mark.parametrize("dim", flash.MASK_HEAD_DIMS)
@pytest.mark.parametrize("tokens", [(1024, 1024), (1000, 777)])
@pytest.mark.parametrize("block", blocks_here(), ids=str)
def test_a_block_mask_keeps_the_error_rule(dim, tokens, block):
    q, k, v = draw(tokens[0], keys=tokens[1], heads=4, key_heads=2, dim=dim)
    route = random_route(q, k, block)
    problem = make_problem(q, k, v, route=route, want_trace=True)
    result = run(problem)
    truth = assert_error_rule(result, problem)
    assert not torch.isfinite(truth.lse).all(), "some query blocks have no key"
    _, trace = attend(q, k, v, route, impl="flash", return_trace=True)
    assert trace.density == route.density() < 1
    dense = attend(q, k, v, impl="flash")
    assert not torch.equal(result.out, dense)


@pytest.mark.gpu
@needs_library
def test_lists_with_unwritten_ends_are_read_as_far_as_they_count():
    q, k, v = draw(2048)
    block = blocks_here()[0]
    route = random_route(q, k, block)
    index, count = route.lists()
    written = torch.arange(index.shape[3], device=index.device) < count[..., None]
    problem = make_problem(q, k, v, route=route, want_trace=True)
    planted = replace(problem, lists=(index.masked_fill(~written, 10**6), count))
    assert torch.equal(run(planted).out, run(problem).out)


@pytest.mark.gpu
@needs_library
def test_a_coarsened_route_runs_and_says_its_density():
    q, k, v = draw(2048)
    fine = random_route(q, k, density=0.05)
    coarse = fine.coarsen(blocks_here()[0])
    out, trace = attend(q, k, v, coarse, impl="flash", return_trace=True)
    problem = make_problem(q, k, v, route=coarse, want_trace=True)
    assert torch.equal(out, run(problem).out)
    assert_error_rule(run(problem), problem)
    assert fine.density() < trace.density == coarse.density() < 1


@pytest.mark.gpu
@needs_library
def test_views_of_one_projection_are_read_in_place():
    packed = torch.randn(1, 500, 3, 2, 128, device="cuda").bfloat16()
    q, k, v = packed.unbind(2)
    problem = make_problem(q, k, v, want_trace=True)
    assert_error_rule(run(problem), problem)
    assert torch.equal(
        run(problem).out, run(make_problem(*(x.contiguous() for x in (q, k, v)))).out
    )


def gpu_calls():
    tensors = draw(1000, heads=4, key_heads=2)
    q, k, v = tensors
    route = random_route(q, k, blocks_here()[0])
    return tensors, {
        "dense": lambda: attend(q, k, v, impl="flash"),
        "causal": lambda: attend(q, k, v, causal=True, impl="flash"),
        "route": lambda: attend(q, k, v, route, impl="flash"),
    }


@pytest.mark.gpu
@needs_library
@pytest.mark.parametrize("name", ["dense", "causal", "route"])
def test_no_call_waits_for_the_gpu(name):
    assert_nothing_waits(gpu_calls()[1][name])


@pytest.mark.gpu
@needs_library
@pytest.mark.parametrize("name", ["dense", "causal", "route"])
def test_a_replayed_graph_equals_a_launch_bit_for_bit(name):
    tensors, calls = gpu_calls()
    assert_a_replay_equals_a_launch(calls[name], tensors)


@pytest.mark.gpu
@needs_library
def test_auto_takes_it_for_a_large_dense_call_on_this_gpu():
    _, trace = attend(*draw(8192, heads=24), return_trace=True)
    assert trace.impl == "flash"
    assert trace.reasons == ()
