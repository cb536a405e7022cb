"""Denoising time and phase in the policy, and what a compiled or captured graph depends on."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.policy_inputs import (
    CALL,
    CUTOFF,
    MXFP8,
    SKIP,
    SKIP_MXFP8,
    SOL,
    VSA,
    changed,
    checkpoint,
    key_of,
    qkv,
    quiet,
    video,
)
from workbench.attention import SparseAttention
from workbench.attention import phase as phase_module
from workbench.attention.log import CallCounts
from workbench.config import SkipSoftmaxConfig, SolAttnConfig
from workbench.models.dit import AttentionCall, dense_attention

# --- time


@pytest.mark.parametrize("how", ["published", "published tensor", "call"])
@pytest.mark.parametrize(("time", "sparse"), [(0.95, 0), (CUTOFF, 0), (0.85, 1)])
def test_the_time_comes_from_begin_step_or_from_the_call(how: str, time: float, sparse: int):
    attention = SparseAttention(SOL)
    call = replace(CALL, time=time if how == "call" else None)
    if how != "call":
        attention.begin_step(torch.tensor(time) if how == "published tensor" else time)
    attention(*qkv(), call)
    assert attention.counts().sparse == sparse


def test_skip_weakness_2_and_sol_weakness_39_a_missing_time_warns_once_and_is_recorded():
    attention = SparseAttention(SOL, record=True)
    unknown = replace(CALL, time=None)
    with pytest.warns(UserWarning, match=r"disabled_until_timestep=0\.9: no denoising time"):
        attention(*qkv(), unknown)
    with quiet():
        attention(*qkv(), replace(unknown, layer=2))
    assert attention.counts() == CallCounts(sparse=2, missing_time=2)
    assert "2 of the sparse ones without a denoising time" in str(attention.counts())
    assert {r.note for r in attention.records} == {"no denoising time: ran as if past the cutoff"}


def test_a_missing_time_raises_in_strict_mode():
    attention = SparseAttention(SKIP, strict=True)
    with pytest.raises(ValueError, match="strict mode does not guess the phase"):
        attention(*qkv(), replace(CALL, time=None))


@pytest.mark.parametrize("call", [replace(CALL, layer=0, time=None), replace(CALL, time=None)])
def test_a_time_that_decides_nothing_is_not_missed(call: AttentionCall):
    config = SOL if call.layer == 0 else SolAttnConfig()
    with quiet():
        SparseAttention(config, strict=True)(*qkv(), call)


@pytest.mark.parametrize("time", [math.nan, math.inf, 2.0])
def test_a_time_that_is_none_raises_from_both_ways_in(time: float):
    attention = SparseAttention(SOL)
    with pytest.raises(ValueError, match=r"call\.time="):
        attention(*qkv(), replace(CALL, time=time))
    with pytest.raises(ValueError, match="time="):
        attention.begin_step(time)


def test_sol_weakness_28_two_coordinates_in_one_step_are_an_error():
    attention = SparseAttention(SOL)
    attention.begin_step(0.95)
    with pytest.raises(ValueError, match=r"call\.time=0\.5: begin_step published 0\.95"):
        attention(*qkv(), CALL)
    attention.begin_step(torch.tensor(0.95))  # float32 of the same time
    attention(*qkv(), replace(CALL, time=0.95))
    attention.begin_step(None)
    attention(*qkv(), CALL)


class CountedTime(torch.Tensor):
    """A tensor that counts how often its value is fetched."""

    reads = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.reads += getattr(func, "__name__", "") == "item"
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("published", [True, False])
def test_skip_weakness_36_a_step_reads_its_time_once_for_all_layers(published: bool):
    CountedTime.reads = 0
    time: Any = torch.tensor([0.95, 0.2]).as_subclass(CountedTime)
    attention = SparseAttention(SOL)
    if published:
        attention.begin_step(time)
    for layer in range(1, 5):
        attention(*qkv(64), replace(CALL, layer=layer, time=None if published else time))
    assert CountedTime.reads == 1
    assert attention.counts().dense == {"dense phase": 4}


def test_a_time_tensor_that_is_written_to_is_read_again():
    time: Any = torch.tensor([0.95])
    attention = SparseAttention(SOL)
    attention(*qkv(64), replace(CALL, time=time))
    time.fill_(0.1)
    attention(*qkv(64), replace(CALL, time=time))
    assert attention.counts() == CallCounts(sparse=1, dense={"dense phase": 1})


def test_without_a_dense_phase_no_time_is_read():
    CountedTime.reads = 0
    time: Any = torch.tensor([0.95]).as_subclass(CountedTime)
    attention = SparseAttention(SolAttnConfig())
    attention.begin_step(time)
    attention(*qkv(64), replace(CALL, time=time))
    assert CountedTime.reads == 0


def test_sol_weakness_27_a_time_on_the_device_is_refused_inside_a_capture(
    monkeypatch: pytest.MonkeyPatch,
):
    attention = SparseAttention(SOL)
    attention.begin_step(torch.tensor(0.95))
    monkeypatch.setattr(phase_module, "capturing", lambda tensor: True)
    attention(*qkv(64), replace(CALL, time=None))  # resolved before: nothing is read
    for read in (attention.begin_step, attention.graph_key):
        with pytest.raises(
            RuntimeError, match=r"while a CUDA graph is captured; resolve it before"
        ):
            read(torch.tensor(0.5))


@pytest.mark.gpu
def test_sol_weakness_27_a_capture_on_a_gpu_refuses_the_read_and_takes_a_published_time():
    attention = SparseAttention(SOL)
    time = torch.tensor(0.95, device="cuda")
    attention.begin_step(time)
    q, k, v = (x.cuda() for x in qkv(64))
    dense_attention(q, k, v, CALL)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        attention(q, k, v, replace(CALL, time=None))
        with pytest.raises(RuntimeError, match="while a CUDA graph is captured"):
            attention.begin_step(time)
    assert attention.counts().dense == {"dense phase": 1}


@pytest.mark.gpu
@pytest.mark.parametrize("config", [SOL, SKIP])
def test_sol_weakness_25_graphs_kept_by_key_replay_what_a_launch_gives(config: Any):
    """Dense and sparse graphs over the same inputs take turns as the time crosses the cutoff."""
    attention = SparseAttention(config)
    given = [x.to("cuda", torch.bfloat16) for x in qkv(1024, dim=64)]
    inputs = [x.clone() for x in given]
    call = replace(CALL, time=None, grid=(4, 16, 16))
    graphs: dict[Any, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
    for step, time in enumerate((1.0, 0.95, 0.85, 0.3, 1.0, 0.2)):
        attention.begin_step(time)
        for target, x in zip(inputs, given):
            target.copy_(x.roll(step, dims=1))
        launched = attention(*inputs, call)
        key = attention.graph_key()
        if key not in graphs:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = attention(*inputs, call)
            graphs[key] = graph, out
        graph, out = graphs[key]
        graph.replay()
        assert torch.equal(out, launched)
        assert torch.equal(launched, dense_attention(*inputs, call)) == (time >= CUTOFF)
    assert len(graphs) == 2


def test_sol_weakness_35_a_second_video_starts_dense_again_without_a_reset():
    attention = SparseAttention(SKIP)
    video(attention)
    first = attention.counts()
    video(attention)
    assert attention.counts().dense == {k: 2 * n for k, n in first.dense.items()}
    assert attention.counts().sparse == 2 * first.sparse


@pytest.mark.parametrize(
    ("config", "options", "graphs"),
    [(SOL, {}, 2), (SKIP, {}, 2), (VSA, {"gate": "zero"}, 1), (SKIP_MXFP8, {}, 2), (None, {}, 1)],
)
def test_sol_weakness_25_and_26_a_compiled_model_has_one_graph_for_each_phase(
    config: Any, options: dict[str, Any], graphs: int
):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    attention = SparseAttention(config, strict=True, **options)
    q, k, v = qkv()

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(2 * q, k, v, replace(CALL, time=None)) + 1

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    times = (1.0, 0.95, CUTOFF, 0.85, 0.3, 1.0)
    for time in times:
        attention.begin_step(time)
        assert torch.equal(compiled(q, k, v), layer(q, k, v))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    # Compiled and plain calls count alike.
    assert attention.counts().total == 2 * len(times)
    assert attention.counts().sparse == {2: 4, 1: 12 if config == VSA else 0}[graphs]


# --- graph key


@pytest.mark.parametrize(
    ("config", "from_checkpoint"),
    [
        (SOL, None),
        (SKIP, None),
        (SKIP, checkpoint(disabled_until_timestep=0.3)),
        (
            SkipSoftmaxConfig(threshold_scale_factor=9.0),
            checkpoint(disabled_until_timestep=CUTOFF),
        ),
    ],
)
def test_skip_weakness_4_the_key_flips_exactly_where_the_calls_do(
    config: Any, from_checkpoint: Any
):
    attention = SparseAttention(config, checkpoint_config=from_checkpoint)
    assert attention.cutoff == CUTOFF
    keys = []
    for time in (1.0, CUTOFF, math.nextafter(CUTOFF, 0), 0.0):
        attention.begin_step(time)
        before = attention.counts().sparse
        attention(*qkv(), replace(CALL, time=time))
        keys.append((key_of(attention)["sparse_attn_phase"], attention.counts().sparse - before))
        assert attention.graph_key() == attention.graph_key(time)
    assert keys == [(0, 0), (0, 0), (1, 1), (1, 1)]


@pytest.mark.parametrize("config", [SolAttnConfig(), SkipSoftmaxConfig(threshold_scale_factor=9.0)])
def test_without_a_cutoff_the_key_has_no_phase(config: Any):
    attention = SparseAttention(config)
    attention.begin_step(0.5)
    assert "sparse_attn_phase" not in key_of(attention)


def test_without_a_time_the_key_has_no_phase():
    assert "sparse_attn_phase" not in key_of(SparseAttention(SOL))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (SparseAttention(SOL), SparseAttention(changed(SOL, tau=1.5))),
        (SparseAttention(SOL), SparseAttention(changed(SOL, thresh_type="exact"))),
        (SparseAttention(SOL), SparseAttention(changed(SOL, dense_layers=[1]))),
        (SparseAttention(SOL), SparseAttention(changed(SOL, disabled_until_timestep=0.8))),
        (SparseAttention(SOL), SparseAttention(SOL, sink_tokens=64)),
        (
            SparseAttention(SOL, sink_tokens=64),
            SparseAttention(SOL, sink_tokens=64, sink_start=0),
        ),
        (SparseAttention(SOL), SparseAttention(SOL, impl="reference")),
        (SparseAttention(SOL), SparseAttention(SOL, record=True)),
        (SparseAttention(SOL), SparseAttention(None)),
        (SparseAttention(SKIP), SparseAttention(changed(SKIP, threshold_scale_factor=9.0))),
        (SparseAttention(SKIP), SparseAttention(SKIP, key_tokens=4096)),
        (SparseAttention(SKIP), SparseAttention(SKIP_MXFP8)),
        (SparseAttention(SKIP_MXFP8), SparseAttention(SKIP_MXFP8, quantise_dense=False)),
        (SparseAttention(MXFP8), SparseAttention(changed(MXFP8, v_block_size=1))),
        (SparseAttention(VSA), SparseAttention(changed(VSA, vsa_sparsity=0.5))),
        (SparseAttention(VSA), SparseAttention(VSA, gate="zero")),
    ],
)
def test_every_setting_that_changes_a_launch_changes_the_key(
    one: SparseAttention, other: SparseAttention
):
    assert one.graph_key() != other.graph_key()
    assert hash(one.graph_key()) != hash(other.graph_key())


def test_equal_configurations_have_equal_keys():
    assert SparseAttention(SOL).graph_key() == SparseAttention(changed(SOL)).graph_key()
