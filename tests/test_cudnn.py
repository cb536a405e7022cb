"""The adapter to cuDNN: what it refuses, what it evens out, what it computes on a GPU."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from blockattn import BlockRoute, BlockSummary, attend, sol_attention
from blockattn.impl import cudnn, cute, reference, registry, triton
from blockattn.problem import make_problem
from tests.adapter_inputs import (
    DEVICE,
    assert_a_replay_equals_a_launch,
    assert_error_rule,
    assert_nothing_waits,
    draw,
    random_route,
)

planted_gpu = pytest.mark.skipif(
    DEVICE == "cuda", reason="needs a machine without a GPU, which is planted"
)


@pytest.fixture
def on_hopper(monkeypatch):
    """The package seems to be here, and tensors on the CPU pass for those of a Hopper GPU."""
    monkeypatch.setattr("blockattn.impl.library._version", lambda _: "1.32.0")
    monkeypatch.setattr(cudnn.Library, "unloadable", lambda _: [])
    monkeypatch.setattr(cudnn, "gpu_obstacles", lambda *_: [])
    monkeypatch.setattr(triton, "DEVICES", ("cuda", "cpu"))


# -- what it serves -------------------------------------------------------------------------------

REFUSED = {
    "dense attention": {},
    "causal=True": {"route": (64, 64), "causal": True},
    "route blocks (128, 64), serves (64, 64) and (128, 128); route.coarsen((128, 128))": {
        "route": (128, 64)
    },
    "route blocks (256, 128), serves (64, 64) and (128, 128)": {"route": (256, 128)},
    "a skip threshold": {"route": (64, 64), "skip_threshold": 0.1},
    "scale_output": {"route": (64, 64), "scale_output": 2.0},
}


@planted_gpu
@pytest.mark.parametrize("text", REFUSED)
def test_what_it_does_not_serve_is_named(text, on_hopper):
    q, k, v = draw(512)
    settings = dict(REFUSED[text])
    if "route" in settings:
        settings["route"] = random_route(q, k, settings["route"])
    (found,) = cudnn.obstacles(make_problem(q, k, v, **settings))
    assert text in found


@planted_gpu
def test_a_tail_needs_what_the_triton_kernels_need(on_hopper):
    for dim, block, reasons in ((128, 64, []), (96, 64, ["head dim 96"]), (128, 128, ["(64, 64)"])):
        q, k, v = draw(512, dim=dim)
        route, tail = random_route(q, k, (block, block)), BlockSummary.of(k, v, block)
        found = cudnn.obstacles(make_problem(q, k, v, route=route, tail=tail))
        assert len(found) == len(reasons)
        for text, reason in zip(found, reasons):
            assert text.startswith("a tail needs the Triton kernels")
            assert reason in text


# -- what it hands over, to a planted library -----------------------------------------------------


class Planted:
    """Stands in for the library, with its rules: whole query blocks, and no NaN in any value."""

    def __init__(self, monkeypatch):
        self.given = {}
        api = types.ModuleType("cudnn.block_sparse_attention.api")
        api.block_sparse_attention_forward = self.forward
        for name in ("cudnn", "cudnn.block_sparse_attention"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        monkeypatch.setitem(sys.modules, api.__name__, api)

    def forward(self, q, k, v, index, *, q2k_block_nums, sparse_block_size, **given):
        self.given = {"shape": q.shape, **given}
        assert given["layout"] == "bshd"
        assert given["allow_empty_block_nums"], "a route may leave a query block without keys"
        assert index.dtype == q2k_block_nums.dtype == torch.int32
        assert sparse_block_size == 128 or q.shape[1] % 64 == 0
        assert torch.isfinite(v).all()
        listed = torch.arange(index.shape[3]) < q2k_block_nums[..., None]
        mask = torch.zeros(index.shape, dtype=torch.bool).scatter_(3, index.long(), listed)
        lengths = (q.shape[1], k.shape[1])
        route = BlockRoute.from_dense(mask, block=(sparse_block_size,) * 2, seqlens=lengths)
        made = reference.run(
            make_problem(
                q, k, v, route=route, scale=given["softmax_scale"],
                block_lengths=given["block_sizes"],
            )
        )  # fmt: skip
        return {"o_tensor": made.out, "lse_tensor": made.lse}


@planted_gpu
@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("tokens", [512, 300])
def test_lists_scale_and_lengths_are_handed_over(block, tokens, on_hopper, monkeypatch):
    library = Planted(monkeypatch)
    q, k, v = draw(tokens, heads=4, key_heads=2)
    route = random_route(q, k, (block, block))
    blocks = route.grid[1]
    lengths = torch.arange(blocks, dtype=torch.int32) * 31 % (block + 1)
    lengths[-1] = block  # more than a ragged sequence has
    for padded in (None, lengths):
        settings = {"scale": 0.2, "block_lengths": padded}
        made, trace = attend(q, k, v, route, impl="cudnn", return_trace=True, **settings)
        want, truth = attend(q, k, v, route, impl="reference", return_trace=True, **settings)
        assert torch.equal(made, want)
        assert torch.equal(trace.lse, truth.lse)
        assert trace.density == route.density() < 1
    whole = -(-tokens // 64) * 64 if block == 64 else tokens
    assert library.given["shape"][1] == whole
    assert library.given["block_sizes"][-1] == tokens - (blocks - 1) * block


@planted_gpu
def test_nan_in_padded_keys_does_not_leak(on_hopper, monkeypatch):
    Planted(monkeypatch)
    q, k, v = draw(256)
    route = random_route(q, k)
    lengths = torch.tensor([64, 10, 0, 33], dtype=torch.int32)
    padded = torch.arange(256) % 64 >= lengths.repeat_interleave(64)
    want = attend(q, k, v, route, block_lengths=lengths, impl="cudnn")
    v = v.masked_fill(padded[None, :, None, None], torch.nan)
    assert torch.equal(attend(q, k, v, route, block_lengths=lengths, impl="cudnn"), want)
    assert v.isnan().any(), "inputs are never modified"


@planted_gpu
def test_auto_takes_it_for_large_masks_of_64_by_64_without_a_tail(on_hopper, monkeypatch):
    Planted(monkeypatch)
    q, k, v = draw(256, dtype=torch.float16)
    work = 4 * 256 * 256 * 2 * 128
    route, lengths = random_route(q, k), torch.full((4,), 60, dtype=torch.int32)
    calls = {
        "mask": {},
        "padded": {"block_lengths": lengths},
        "tail": {"tail": BlockSummary.of(k, v)},
    }
    for mask, padded, chosen in (
        (work, work, {"mask", "padded"}),
        (work, work + 1, {"mask"}),
        (work + 1, work + 1, set()),
    ):
        monkeypatch.setattr(registry, "CUDNN_FROM", mask)
        monkeypatch.setattr(registry, "CUDNN_PADDED_FROM", padded)
        for name, settings in calls.items():
            _, trace = attend(q, k, v, route, return_trace=True, **settings)
            assert trace.impl == ("cudnn" if name in chosen else "triton")
            assert trace.reasons == ()


# -- the merge ------------------------------------------------------------------------------------


@pytest.fixture
def merge():
    """The kernel that merges, in the interpreter where there is no GPU."""
    pytest.importorskip("triton", reason="needs triton (Linux)")
    from blockattn.impl.triton.merge import merge

    return merge


@pytest.mark.parametrize("dim", [64, 96])
def test_two_halves_of_the_keys_merge_to_the_whole(dim, merge):
    parts = draw(200, heads=4, dim=dim, dtype=torch.float32)
    q, k, v = (torch.cat([x, x.flip(1)]) for x in parts)
    halves = [
        reference.run(make_problem(q, k[:, part], v[:, part]))
        for part in (slice(0, 77), slice(77, 200))
    ]
    whole = reference.run(make_problem(q, k, v))
    out, lse = merge(*((halves[0].out, halves[0].lse)), halves[1].out, halves[1].lse)
    torch.testing.assert_close(out, whole.out, rtol=0, atol=1e-6)
    torch.testing.assert_close(lse, whole.lse, rtol=0, atol=1e-5)


def test_rows_without_keys_stay_zero_and_one_sided_rows_stay_what_they_are(merge):
    out = torch.randn(1, 3, 1, 8, device=DEVICE)
    out[:, 2] = 0
    lse = torch.tensor([[[0.5, 700.0, -torch.inf]]], device=DEVICE)
    nothing, never = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
    for pair in ((out, lse, nothing, never), (nothing, never, out, lse)):
        merged, total = merge(*pair)
        torch.testing.assert_close(merged, out, rtol=1e-6, atol=0)
        assert torch.equal(total, lse)


@planted_gpu
@pytest.mark.parametrize("tokens", [256, 200])
def test_a_tail_merges_to_what_the_reference_computes(tokens, on_hopper, monkeypatch):
    """The Triton kernel with an empty list computes the tail; here in its interpreter."""
    pytest.importorskip("triton", reason="needs triton (Linux)")
    Planted(monkeypatch)
    q, k, v = draw(tokens, heads=2, key_heads=1, dim=64, dtype=torch.float16)
    route, tail = random_route(q, k), BlockSummary.of(k, v)
    problem = make_problem(q, k, v, route=route, tail=tail, want_trace=True)
    assert cudnn.obstacles(problem) == []
    assert_error_rule(cudnn.run(problem), problem)
    without = make_problem(q, k, v, route=route)
    assert not torch.equal(cudnn.run(problem).out, cudnn.run(without).out)


# -- on a GPU -------------------------------------------------------------------------------------

ABSENT = "; ".join(cudnn.obstacles(None))
needs_library = pytest.mark.skipif(bool(ABSENT), reason=f"needs the cuDNN frontend: {ABSENT}")
BLOCKS = [64, 128]


def run(problem):
    assert cudnn.obstacles(problem) == []
    return cudnn.run(problem)


@pytest.mark.sm90
@needs_library
@pytest.mark.parametrize("dim", cudnn.HEAD_DIMS)
@pytest.mark.parametrize("tokens", [(1024, 1024), (1000, 777), (64, 200)])
@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_mask_keeps_the_error_rule(dim, tokens, block):
    q, k, v = draw(tokens[0], keys=tokens[1], heads=4, key_heads=2, dim=dim)
    route = random_route(q, k, (block, block))
    problem = make_problem(q, k, v, route=route, scale=0.11, want_trace=True)
    result = run(problem)
    truth = assert_error_rule(result, problem)
    assert not torch.isfinite(truth.lse).all(), "some query blocks have no key"
    _, trace = attend(q, k, v, route, scale=0.11, impl="cudnn", return_trace=True)
    assert trace.density == route.density() < 1


@pytest.mark.sm90
@needs_library
@pytest.mark.parametrize("block", BLOCKS)
def test_float16_and_two_batches_keep_the_error_rule(block):
    q, k, v = (torch.cat([x, x.flip(1)]) for x in draw(640, dtype=torch.float16))
    route = random_route(q, k, (block, block))
    problem = make_problem(q, k, v, route=route, want_trace=True)
    assert_error_rule(run(problem), problem)


@pytest.mark.sm90
@needs_library
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("tokens", [1024, 1000])
def test_padded_blocks_keep_the_error_rule_and_hide_nan(block, tokens):
    q, k, v = draw(tokens, heads=2)
    route = random_route(q, k, (block, block))
    blocks = route.grid[1]
    lengths = (torch.arange(blocks) * 31 % (block + 1)).int()
    lengths[-1] = block
    padded = torch.arange(tokens) % block >= lengths.repeat_interleave(block)[:tokens]
    padded = padded[None, :, None, None].cuda()
    k, v = k.masked_fill(padded, torch.nan), v.masked_fill(padded, torch.nan)
    problem = make_problem(q, k, v, route=route, block_lengths=lengths.cuda(), want_trace=True)
    assert_error_rule(run(problem), problem)


@pytest.mark.sm90
@needs_library
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("tokens", [1024, 1000])
def test_a_tail_keeps_the_error_rule(dim, tokens):
    q, k, v = draw(tokens, heads=4, key_heads=2, dim=dim)
    route, tail = random_route(q, k), BlockSummary.of(k, v)
    problem = make_problem(q, k, v, route=route, tail=tail, want_trace=True)
    assert_error_rule(run(problem), problem)


@pytest.mark.sm90
@needs_library
def test_sol_attention_runs_on_it_with_the_route_of_the_gpu():
    q, k, v = draw(4096, heads=2)
    out, trace = sol_attention(q, k, v, tau=1.0, impl="cudnn", return_trace=True)
    own, other = sol_attention(q, k, v, tau=1.0, impl="triton", return_trace=True)
    assert trace.impl == "cudnn"
    assert trace.route == other.route
    assert 0 < trace.density < 1
    assert (out.float() - own.float()).abs().max() <= 4 * 2**-8 * own.abs().max()
    assert (trace.lse - other.lse).abs().max() < 1e-3


@pytest.mark.sm90
@needs_library
def test_views_of_one_projection_are_read_in_place():
    packed = torch.randn(1, 512, 3, 2, 128, device="cuda").bfloat16()
    q, k, v = packed.unbind(2)
    route = random_route(q, k)
    problem = make_problem(q, k, v, route=route, want_trace=True)
    assert_error_rule(run(problem), problem)


def gpu_calls():
    tensors = draw(1000, heads=4, key_heads=2)
    q, k, v = tensors
    route, coarse = random_route(q, k), random_route(q, k, (128, 128))
    lengths = torch.full((16,), 60, dtype=torch.int32, device="cuda")
    return tensors, {
        "64": lambda: attend(q, k, v, route, impl="cudnn"),
        "128": lambda: attend(q, k, v, coarse, impl="cudnn"),
        "lengths": lambda: attend(q, k, v, route, block_lengths=lengths, impl="cudnn"),
        "tail": lambda: attend(q, k, v, route, tail=BlockSummary.of(k, v), impl="cudnn"),
    }


@pytest.mark.sm90
@needs_library
@pytest.mark.parametrize("name", ["64", "128", "lengths", "tail"])
def test_no_call_waits_for_the_gpu(name):
    assert_nothing_waits(gpu_calls()[1][name])


@pytest.mark.sm90
@needs_library
@pytest.mark.parametrize("name", ["64", "128", "lengths", "tail"])
def test_a_replayed_graph_equals_a_launch_bit_for_bit(name):
    tensors, calls = gpu_calls()
    assert_a_replay_equals_a_launch(calls[name], tensors)


@pytest.mark.sm90
@needs_library
def test_auto_takes_it_for_a_large_mask_unless_the_cute_kernel_is_there():
    q, k, v = draw(16384, heads=24)
    _, trace = attend(q, k, v, random_route(q, k), return_trace=True)
    if cute.obstacles(None):
        assert (trace.impl, [reason.impl for reason in trace.reasons]) == ("cudnn", ["cute"])
    else:
        assert (trace.impl, trace.reasons) == ("cute", ())
