"""Attached models under torch.compile: one graph, none more as steps pass, one more per phase."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import config as dynamo
from torch._dynamo.utils import counters

pytest.importorskip("diffusers", reason="needs diffusers: pip install 'diffusers>=0.35.2'")

import workbench
from tests.attach_inputs import CASES, CUTOFF
from workbench.config import SolAttnConfig
from workbench.models import AttentionCall

WAN, HUNYUAN = CASES[:2]
MOCHI = CASES[-1]
CONFIG = SolAttnConfig(tau=1.0, dense_layers=(0,), disabled_until_timestep=CUTOFF)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def wrapped(model: Any, *, backend: str = "aot_eager", **settings: Any) -> Any:
    return torch.compile(model, backend=backend, **settings)


def in_place(model: Any, **settings: Any) -> Any:
    model.compile(backend="eager", **settings)
    return model


def by_block(model: Any, **settings: Any) -> Any:
    for block in model.blocks:
        block.compile(backend="eager", **settings)
    return model


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    ("how", "each"),
    [(wrapped, 1), (in_place, 1), (by_block, 2)],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_a_compiled_model_is_one_graph_for_each_phase(how: Callable[..., Any], each: int):
    """Compiled by block, one graph for each of the two blocks."""
    model = WAN.model()
    with workbench.attach(model, CONFIG):
        eager = WAN.run(model)
    run = how(model, fullgraph=True)
    with workbench.attach(run, CONFIG, strict=True) as attached:
        assert torch.equal(WAN.run(run), eager)
        assert graphs() == each
        with dynamo.patch(error_on_recompile=True):
            for time in (0.45, 0.4):
                WAN.run(run, time=time)
        WAN.run(run, time=0.95)
        assert graphs() == 2 * each
    counts = attached.counts()
    assert (counts.sparse, counts.dense["dense phase"], counts.dense["dense layer"]) == (3, 1, 4)
    assert counts.dense["cross-attention"] == 8


def test_a_joint_model_with_padded_text_is_one_graph():
    model = HUNYUAN.model()
    with workbench.attach(model, CONFIG):
        eager = HUNYUAN.run(model)
    run = wrapped(model, backend="eager", fullgraph=True)
    with workbench.attach(run, CONFIG, strict=True):
        assert torch.equal(HUNYUAN.run(run), eager)
        with dynamo.patch(error_on_recompile=True):
            HUNYUAN.run(run, time=0.4)
    assert graphs() == 1


def test_a_model_whose_own_code_breaks_the_graph_still_runs():
    """Mochi picks valid text tokens by value: Dynamo compiles its inner functions on their own."""
    model = MOCHI.model()
    with workbench.attach(model, CONFIG):
        eager = MOCHI.run(model)
    run = wrapped(model, backend="eager")
    with workbench.attach(run, CONFIG) as attached:
        assert torch.equal(MOCHI.run(run), eager)
    assert attached.counts().sparse == 2


def test_a_model_compiled_after_it_was_attached_needs_the_time_by_hand():
    model = WAN.model()
    with workbench.attach(model, CONFIG) as attached:
        run = wrapped(model, backend="eager", fullgraph=True)
        with pytest.warns(UserWarning, match="no denoising time reached .* begin_step"):
            WAN.run(run, time=0.95)
        assert attached.counts().missing_time == 1
        attached.reset()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for time in (0.95, 0.5):
                attached.begin_step(time)
                WAN.run(run, time=time)
    assert attached.counts().dense["dense phase"] == 1
    assert (attached.counts().sparse, attached.counts().missing_time) == (1, 0)


@pytest.mark.parametrize("how", [wrapped, in_place, by_block], ids=lambda x: x.__name__)
def test_who_observes_a_model_that_is_compiled_while_attached_gets_step_and_time(
    how: Callable[..., Any],
):
    seen: list[tuple[int, int | None, float | None]] = []
    model = WAN.model()
    bare = WAN.run(model, time=0.75)

    def observe(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> None:
        seen.append((call.layer, call.step, call.time))

    with workbench.attach(model, None, observe=observe):
        run = how(model)
        assert torch.equal(WAN.run(run, time=0.75), bare)
        with dynamo.patch(error_on_recompile=True):
            WAN.run(run, time=0.25)
    assert seen == [(0, 0, 0.75), (1, 0, 0.75), (0, 1, 0.25), (1, 1, 0.25)]


@pytest.mark.parametrize("how", [in_place, by_block], ids=lambda x: x.__name__)
def test_who_observes_a_compiled_model_gets_step_and_time(how: Callable[..., Any]):
    seen: list[tuple[int, int | None, float | None]] = []
    run = how(WAN.model())

    def observe(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> None:
        seen.append((call.layer, call.step, call.time))

    with workbench.attach(run, None, observe=observe):
        WAN.run(run, time=0.75)
        WAN.run(run, time=0.25)
    assert seen == [(0, 0, 0.75), (1, 0, 0.75), (0, 1, 0.25), (1, 1, 0.25)]


@pytest.mark.parametrize("how", [in_place, by_block], ids=lambda x: x.__name__)
@pytest.mark.parametrize("attached_first", [False, True])
def test_who_observes_one_graph_is_refused_with_the_way_out(
    how: Callable[..., Any], attached_first: bool
):
    model = WAN.model()
    if not attached_first:
        how(model, fullgraph=True)
    with workbench.attach(model, None, observe=lambda *_: None):
        run = how(model, fullgraph=True) if attached_first else model
        with pytest.raises(RuntimeError, match=r"observe= .* compile without fullgraph=True"):
            WAN.run(run)


def test_a_model_compiled_in_place_is_restored():
    model = in_place(WAN.model())
    compiled = model._compiled_call_impl
    with workbench.attach(model, CONFIG):
        assert model._compiled_call_impl is not compiled
    assert model._compiled_call_impl is compiled
