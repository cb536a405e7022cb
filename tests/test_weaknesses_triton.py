"""Weaknesses of other GPU implementations, in the Triton kernels: see test_weaknesses.py for names.

In the interpreter without a GPU, compiled with one.
"""

from __future__ import annotations

import inspect
import mmap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close

from blockattn import BlockRoute, BlockSummary, layout
from blockattn.impl import triton as kernels
from blockattn.problem import make_problem
from tests import conftest
from tests.inputs import drifting, gaussian

triton = pytest.importorskip("triton", reason="needs triton (Linux)")
from blockattn.impl.triton import launch, prepare, select  # noqa: E402
from blockattn.impl.triton.attention import attention, combine  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # what the interpreter computes in
FILES = sorted(Path(launch.__file__).parent.glob("*.py"))


def inputs(tokens: int, *, heads: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (x.to(DEVICE, HALF) for x in gaussian(tokens, heads=heads, dim=64))
    return q, k, v


# -- summaries and statistics ---------------------------------------------------------------------


def centred(k_mean: Tensor) -> prepare.CenteredKeys:
    """Statistics of key means ``[1, N, H, D]``: of keys in blocks of one, their own means."""
    _, found, _, _, keys = prepare.summarise(k_mean, k_mean, k_mean, 1)
    assert torch.equal(found, k_mean)
    return keys


def test_sol_weakness_2_the_mean_query_stays_float32():
    q, k, v = inputs(640)
    q_mean, k_mean, *_ = prepare.summarise(q, k, v, 64)
    assert (q_mean.dtype, k_mean.dtype) == (torch.float32, HALF)
    assert_close(q_mean[0, 0], layout.block_mean(q)[0, :, 0], rtol=1e-5, atol=1e-6)
    assert not torch.equal(q_mean, q_mean.to(HALF).float())


def test_sol_weakness_11_variances_are_centred_before_they_are_squared():
    _, k, v = drifting(2048, heads=1, dim=64)
    k_mean = (BlockSummary.of(k, v).k_mean + 20.0).to(DEVICE, HALF)
    found = centred(k_mean).deviation
    assert_close(found.double(), k_mean.double().std(dim=1, correction=0), rtol=1e-4, atol=0)


def in_a_larger_buffer(x: Tensor) -> Tensor:
    """The same summaries ``[1, N, H, D]``, followed in memory by NaN to the end of the group."""
    room = torch.full((1, 128, *x.shape[2:]), torch.nan, dtype=x.dtype, device=x.device)
    room[:, : x.shape[1]] = x
    return room[:, : x.shape[1]]


def empty_in_front_of_nan(*shape: int, **options: Any) -> Tensor:
    """``torch.empty`` where a group of summaries of NaN follows in memory."""
    x = torch.zeros(*shape, **options)
    if not x.is_floating_point():
        return x
    return torch.cat([x.flatten(), x.new_full((128 * 64,), torch.nan)])[: x.numel()].view_as(x)


def test_sol_weakness_10_a_group_of_summaries_past_the_last_one_is_not_read(
    monkeypatch: pytest.MonkeyPatch,
):
    blocks = 70  # groups hold 32, 64 or 128
    q, k_mean, _ = inputs(blocks)
    q_mean = q.float().transpose(1, 2).contiguous()
    keys = centred(k_mean)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", empty_in_front_of_nan)
        again = centred(k_mean)
    assert all(torch.equal(*both) for both in zip(keys.tensors(), again.tensors()))
    padded = replace(
        keys,
        upper=in_a_larger_buffer(keys.upper.transpose(1, 2)).transpose(1, 2),
        lower=in_a_larger_buffer(keys.lower.transpose(1, 2)).transpose(1, 2),
    )
    knobs: dict[str, Any] = {"tau": 0.5, "unit": 0.18, "floor": 1e-6, "sink": (70, 70), "band": 1}
    for exact in (False, True):
        chosen, found = (select.select(q_mean, x, **knobs, exact=exact) for x in (keys, padded))
        assert torch.equal(chosen.words, found.words)
        route = BlockRoute(chosen.words, (64, 64), (64 * blocks, 64 * blocks))
        assert 3 * blocks < int(route.counts().sum()) < blocks**2
    q, k, v = inputs(200)
    route = BlockRoute.from_dense(torch.eye(4, dtype=torch.bool, device=DEVICE)[None, None])
    route = BlockRoute(route.words, (64, 64), (200, 200))
    tail = BlockSummary.of(k, v)
    more = replace(
        tail, k_mean=in_a_larger_buffer(tail.k_mean), v_sum=in_a_larger_buffer(tail.v_sum)
    )
    out = [launch.run(make_problem(q, k, v, route=route, tail=x)).out for x in (tail, more)]
    assert out[1].isfinite().all()
    assert torch.equal(*out)


def _untouched(elements: int) -> Tensor:
    """A tensor of which only those pages take memory that are written to (on a GPU: all)."""
    if DEVICE == "cuda":
        return torch.empty(elements, dtype=HALF, device=DEVICE)
    no_reserve = 0x4000  # MAP_NORESERVE of Linux, where the Triton kernels run
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    return torch.frombuffer(mmap.mmap(-1, elements * HALF.itemsize, flags=flags), dtype=HALF)


def test_sol_weakness_12_offsets_of_two_billion_elements_do_not_wrap(
    monkeypatch: pytest.MonkeyPatch,
):
    # Three samples 2**30 elements apart: the third lies 2**31 behind the first, which 32 bits turn
    # into 2**31 before it, where there is room for a wrong result instead of a crash.
    x = _untouched(2**32 + 128 * 64).as_strided((3, 128, 1, 64), (2**30, 64, 64, 1), 2**31)
    x.copy_(torch.randn(3, 128, 1, 64, generator=torch.Generator().manual_seed(0)))
    near = x.contiguous()
    *found, keys = prepare.summarise(x, x, x, 64)
    *want, near_keys = prepare.summarise(near, near, near, 64)
    for both in zip([*found, *keys.tensors()], [*want, *near_keys.tensors()]):
        assert torch.equal(*both)
    monkeypatch.setattr(launch, "descriptors_fit", lambda *tensors: False)
    out = launch.run(make_problem(x, x, x)).out
    assert torch.equal(out, launch.run(make_problem(near, near, near)).out)


# -- constants, configurations, descriptors -------------------------------------------------------


def run_time_parameters(kernel: Any) -> set[str]:
    """Parameters of a Triton kernel that are not compile-time constants."""
    parameters = inspect.signature(kernel.fn).parameters.values()
    return {p.name for p in parameters if "constexpr" not in str(p.annotation)}


def test_sol_weakness_8_and_13_no_knob_and_no_length_is_a_constant_of_a_kernel():
    routing = {"tau", "unit", "floor", "sink_start", "sink_stop", "blocks", "heads"}
    assert routing <= run_time_parameters(select._select)
    assert {"tokens", "blocks", "heads"} <= run_time_parameters(prepare._summarise)
    lengths = {"queries", "keys", "heads", "key_heads", "query_tiles", "key_tiles", "splits"}
    assert lengths | {"scale", "scale_output", "limit"} <= run_time_parameters(attention)
    assert {"queries", "splits", "scale_output"} <= run_time_parameters(combine)


def test_sol_weakness_7_the_configuration_of_a_launch_is_fixed_and_not_tuned_per_length():
    found = set()
    for tokens in (64, 200, 1000):
        q, k, v = inputs(tokens, heads=tokens // 64)
        route = BlockRoute.causal((1, q.shape[2]), seqlens=(tokens, tokens), device=q.device)
        found.add(launch.configure(make_problem(q, k, v, route=route)))
    assert len(found) == 1
    for path in FILES:
        assert "autotune" not in path.read_text(), path.name


def test_sol_weakness_6_no_kernel_makes_a_descriptor_that_needs_an_allocator(
    monkeypatch: pytest.MonkeyPatch,
):
    for path in FILES:
        assert "make_tensor_descriptor" not in path.read_text(), path.name
    # Descriptors come from the host, and plain pointers do the same.
    q, k, v = inputs(130)
    problem = make_problem(q, k, v)
    by_descriptor = (
        launch.run(problem).out if launch.descriptors_fit(problem.q, problem.k, problem.v) else None
    )
    monkeypatch.setattr(launch, "descriptors_fit", lambda *tensors: False)
    by_pointer = launch.run(problem).out
    assert by_descriptor is None or torch.equal(by_descriptor, by_pointer)


def test_sol_weakness_20_views_of_packed_qkv_are_read_where_they_lie():
    packed = torch.randn(1, 130, 3, 2, 64, generator=torch.Generator().manual_seed(0))
    problem = make_problem(*packed.to(DEVICE, HALF).unbind(2))
    for x in (problem.q, problem.k, problem.v):
        assert not x.is_contiguous()
        for tma in (False, launch.descriptors_fit(problem.q, problem.k, problem.v)):
            source = launch._source(x, 64, tma)
            assert (
                source if isinstance(source, Tensor) else source.base
            ).data_ptr() == x.data_ptr()


# -- routes and shares ----------------------------------------------------------------------------


def test_sol_weakness_15_a_sink_behind_block_32768_is_not_cut_to_16_bits():
    q_mean = torch.zeros(1, 1, 3, 64, device=DEVICE)
    k_mean = torch.zeros(1, 3, 1, 64, dtype=HALF, device=DEVICE)
    # Cut to 16 bits, 65,538 would be block 2 of 3 and the last block a sink.
    chosen = select.select(
        q_mean, centred(k_mean),
        tau=9.0, unit=1.0, floor=1e-6, sink=(65_538, 65_539), band=0, exact=True,
    )  # fmt: skip
    assert chosen.words.flatten().tolist() == [1, 2, 4]


def test_sol_weakness_16_a_share_without_keys_has_weight_0(monkeypatch: pytest.MonkeyPatch):
    q, k, v = inputs(300)
    one_block = torch.eye(5, dtype=torch.bool, device=DEVICE)[None, None]
    route = BlockRoute.from_dense(one_block, seqlens=(300, 300))
    problem = make_problem(q, k, v, route=route, want_trace=True)
    whole = launch.run(problem)
    monkeypatch.setattr(launch, "split_count", lambda problem, tiles: 4)
    split = launch.run(problem)  # three of the four shares of every row are empty
    assert whole.lse is not None
    assert split.lse is not None
    assert_close(split.out, whole.out, rtol=2e-3, atol=1e-3)
    assert_close(split.lse, whole.lse)


def test_skip_weakness_30_neighbouring_rows_may_differ_in_their_number_of_blocks():
    q, k, v = inputs(5 * 64)
    mask = torch.zeros(1, 1, 5, 5, dtype=torch.bool, device=DEVICE)
    for row, count in enumerate((1, 4, 0, 5, 2)):
        mask[0, 0, row, 5 - count :] = True
    out = launch.run(make_problem(q, k, v, route=BlockRoute.from_dense(mask))).out[0, :, 0]
    seen = mask[0, 0].repeat_interleave(64, dim=0).repeat_interleave(64, dim=1)
    a, b, c = (x[0, :, 0].float() for x in (q, k, v))
    want = (a @ b.T / 8).masked_fill(~seen, -torch.inf).softmax(dim=1).nan_to_num(0.0) @ c
    assert_close(out.float(), want, rtol=2e-2, atol=1e-2)
    assert not out[128:192].any()


# -- architectures --------------------------------------------------------------------------------


a_second_gpu = pytest.mark.skipif(
    torch.cuda.device_count() == 1,
    reason="a tensor on cuda:1, even a fake one, needs a second GPU or a machine without any",
)


def on_gpu_1(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list]:
    """A bfloat16 call on the second GPU of a machine, and which devices were asked about."""
    asked: list[Any] = []

    def answer(device: Any = None) -> tuple[int, int]:
        asked.append(device)
        return capability

    monkeypatch.setattr(torch.cuda, "get_device_capability", answer)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "GPU")
    with FakeTensorMode():
        x = torch.empty(1, 64, 2, 128, dtype=torch.bfloat16, device="cuda:1")
        return make_problem(x, x, x), asked


@a_second_gpu
@pytest.mark.parametrize(("capability", "served"), [((7, 5), False), ((8, 0), True)])
def test_sol_weakness_18_the_gpu_of_the_tensor_is_asked_not_the_current_one(
    capability: tuple[int, int], served: bool, monkeypatch: pytest.MonkeyPatch
):
    problem, asked = on_gpu_1(capability, monkeypatch)
    assert (kernels.obstacles(problem) == []) == served
    launch.configure(problem)
    assert len(asked) >= 2
    assert {str(device) for device in asked} == {"cuda:1"}


@a_second_gpu
def test_skip_weakness_42_compute_capability_12_is_not_taken_for_10(
    monkeypatch: pytest.MonkeyPatch,
):
    # 12.x has 99 kB of shared memory, as 8.9 has: the larger tiles of 9.0 and 10.x do not fit.
    small = launch.configuration((8, 9), plain=True)
    large = launch.configuration((10, 0), plain=True)
    assert small != large
    for capability in ((12, 0), (12, 1)):
        problem, _ = on_gpu_1(capability, monkeypatch)
        assert launch.configure(problem) == small
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (12, 0))
    assert conftest._why_skipped("sm100") is not None


def test_sol_weakness_47_every_architecture_of_a_marker_resolves_to_a_configuration():
    assert conftest._CAPABILITIES
    for capabilities in conftest._CAPABILITIES.values():
        for capability in capabilities:
            routed = launch.configuration(capability, plain=False)
            assert (routed.rows, routed.columns) == kernels.BLOCK
            assert launch.configuration(capability, plain=True).rows % layout.BLOCK == 0
