"""What ran is visible: who ran, why no faster one did, and what density was delivered."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest
import torch

import blockattn
from blockattn import BlockRoute, BlockSummary, Reason, UnsupportedError, attend, sol_attention
from blockattn.impl import reference, registry
from blockattn.impl.registry import Implementation
from blockattn.problem import make_problem
from tests.inputs import gaussian, uneven

ROUTE = BlockRoute.causal((1, 2), seqlens=(300, 300))


def implementation(name: str, obstacles=(), run=reference.run) -> Implementation:
    return Implementation(name, f"a planted {name}", lambda problem: list(obstacles), run)


@pytest.fixture
def plant(monkeypatch):
    """Puts implementations in front of the reference, fastest first."""

    def put(*items: Implementation) -> None:
        last = implementation("reference")
        monkeypatch.setattr(registry, "_FASTEST_FIRST", (*items, last))

    return put


# -- algorithm and density ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "algorithm"),
    [
        ({}, "dense"),
        ({"route": ROUTE}, "block_mask"),
        ({"route": ROUTE, "tail": True}, "sol_attn"),
        ({"skip_threshold": 0.5}, "skip_softmax"),
        ({"route": ROUTE, "skip_threshold": 0.5}, "block_mask+skip_softmax"),
        ({"route": ROUTE, "tail": True, "skip_threshold": 0.5}, "sol_attn+skip_softmax"),
    ],
)
def test_the_algorithm_is_what_the_arguments_add_up_to(settings, algorithm):
    q, k, v = gaussian(300)
    if "tail" in settings:
        settings = {**settings, "tail": BlockSummary.of(k, v)}
    _, trace = attend(q, k, v, **settings, impl="reference", return_trace=True)
    assert trace.algorithm == algorithm
    assert trace.impl == "reference"
    assert trace.route is settings.get("route")
    assert (trace.skipped is None) == ("skip_threshold" not in settings)
    assert trace.lse.shape == (1, 2, 300)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tokens", [1, 64, 65, 300])
def test_dense_has_density_1(tokens, causal):
    q, k, v = gaussian(tokens)
    _, trace = attend(q, k, v, causal=causal, impl="reference", return_trace=True)
    assert trace.density == 1


def test_a_route_delivers_its_density():
    q, k, v = gaussian(300)
    _, trace = attend(q, k, v, ROUTE, impl="reference", return_trace=True)
    assert trace.density == ROUTE.density() == 15 / 25


def test_under_a_causal_mask_only_reachable_pairs_count():
    q, k, v = gaussian(300)
    full = BlockRoute.full((1, 2), seqlens=(300, 300))
    _, trace = attend(q, k, v, full, causal=True, impl="reference", return_trace=True)
    assert trace.density == 1
    diagonal = BlockRoute.from_dense(torch.eye(5).bool().expand(1, 2, 5, 5), seqlens=(300, 300))
    _, trace = attend(q, k, v, diagonal, causal=True, impl="reference", return_trace=True)
    assert trace.density == 5 / 15
    assert trace.computed == diagonal


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("with_route", [False, True])
def test_skipped_tiles_are_taken_off_the_density(with_route, causal):
    q, k, v = uneven(300)
    route = ROUTE if with_route else None
    _, trace = attend(
        q, k, v, route, causal=causal, skip_threshold=0.5, skip_tile=(128, 64), impl="reference",
        return_trace=True,
    )  # fmt: skip
    block = (64, 64) if with_route else (128, 64)
    make = BlockRoute.causal if causal else BlockRoute.full
    reachable = make((1, 2), seqlens=(300, 300), block=block).dense()
    asked = reachable & ROUTE.dense() if with_route else reachable
    rows = trace.skipped.dense()
    if with_route:
        rows = rows.repeat_interleave(2, dim=2)[:, :, :5]
    delivered = asked & ~rows
    assert trace.skipped.density() > 0
    assert trace.density == int(delivered.sum()) / int(reachable.sum()) < 1
    assert torch.equal(trace.computed.dense(), delivered)


def test_the_printed_trace_says_it_in_words(plant):
    plant(implementation("fast", ["needs a GPU", "needs bfloat16"]))
    _, trace = attend(*uneven(300), skip_threshold=0.5, return_trace=True)
    dropped = int(trace.skipped.counts().sum())
    assert str(trace).splitlines() == [
        f"skip_softmax ran on reference, density {trace.density:.4f}, {dropped} tiles skipped",
        "not fast: needs a GPU",
        "not fast: needs bfloat16",
    ]


def test_the_printed_trace_of_fewer_tokens_than_heads_names_the_layout():
    q = torch.randn(1, 2, 300, 16)  # [B, H, T, D]
    hint = "torch's SDPA layout, as x.transpose(1, 2)"
    _, trace = sol_attention(q, q, q, return_trace=True)
    assert str(trace).splitlines()[1].startswith("q has 2 tokens, 300 heads; tensors are [B, T, H")
    assert hint in str(trace)
    right = torch.randn(1, 300, 8, 16)
    for queries, keys in ((300, 300), (1, 300), (2, 300), (1, 1)):
        _, trace = attend(right[:, :queries], right[:, :keys], right[:, :keys], return_trace=True)
        assert hint not in str(trace)


def test_a_trace_cannot_be_changed():
    _, trace = attend(*gaussian(65), impl="reference", return_trace=True)
    with pytest.raises(FrozenInstanceError):
        trace.impl = "something faster"


# -- choosing an implementation -------------------------------------------------------------------


def test_auto_takes_the_fastest_that_serves_and_records_why_faster_ones_do_not(plant):
    plant(
        implementation("fastest", ["no such GPU", "head dim 32"]),
        implementation("fast", ["dtype float32"]),
        implementation("good"),
        implementation("slow", ["never asked"]),
    )
    _, trace = attend(*gaussian(65), return_trace=True)
    assert trace.impl == "good"
    assert trace.reasons == (
        Reason("fastest", "no such GPU"),
        Reason("fastest", "head dim 32"),
        Reason("fast", "dtype float32"),
    )


def test_the_fastest_one_has_nothing_against_it(plant):
    plant(implementation("good"))
    _, trace = attend(*gaussian(65), return_trace=True)
    assert (trace.impl, trace.reasons) == ("good", ())


def test_a_named_implementation_runs_or_raises_with_all_its_reasons(plant):
    plant(implementation("good"), implementation("fast", ["no such GPU", "head dim 32"]))
    _, trace = attend(*gaussian(65), impl="reference", return_trace=True)
    assert trace.impl == "reference"
    with pytest.raises(UnsupportedError) as caught:
        attend(*gaussian(65), impl="fast")
    assert caught.value.reasons == (Reason("fast", "no such GPU"), Reason("fast", "head dim 32"))
    assert str(caught.value).splitlines() == [
        "impl='fast' cannot serve this dense call",
        "  - fast: no such GPU",
        "  - fast: head dim 32",
    ]


def test_sol_weakness_17_auto_raises_when_nothing_serves(plant, monkeypatch):
    plant()
    monkeypatch.setattr(registry, "_FASTEST_FIRST", (implementation("fast", ["no such GPU"]),))
    with pytest.raises(UnsupportedError, match="impl='auto' cannot serve this dense call"):
        attend(*gaussian(65))


def test_tensors_without_data_are_served_by_nothing():
    empty = [x.to("meta") for x in gaussian(65)]
    with pytest.raises(UnsupportedError, match="meta device, which holds no data"):
        attend(*empty, impl="reference")


@pytest.mark.parametrize("impl", ["auto", "broken"])
@pytest.mark.parametrize("call", [attend, sol_attention])
def test_skip_weakness_22_an_exception_from_a_kernel_propagates_and_nothing_else_runs(
    plant, impl, call
):
    def fail(problem):
        raise RuntimeError("illegal memory access")

    plant(implementation("broken", run=fail))
    with pytest.raises(RuntimeError, match="illegal memory access") as caught:
        call(*gaussian(65), impl=impl)
    assert not isinstance(caught.value, UnsupportedError)


def test_an_implementation_that_gives_no_lse_is_found_out(plant):
    def careless(problem):
        result = reference.run(problem)
        return type(result)(result.out)

    plant(implementation("careless", run=careless))
    attend(*gaussian(65))
    with pytest.raises(RuntimeError, match="careless returned no LSE for a traced call"):
        attend(*gaussian(65), return_trace=True)


def test_the_reference_serves_everywhere():
    for item in registry.implementations():
        assert item.summary
        if item.name == "reference":
            assert item.why_not() is None
    assert registry.names()[-1] == "reference"


def test_every_exported_name_is_there():
    assert all(getattr(blockattn, name) is not None for name in blockattn.__all__)


def test_what_a_call_goes_to_first_follows_its_size_and_kind():
    """As measured on an H200 with 24 heads of 128; nothing is computed here."""

    def first(tokens, block=None, **settings):
        q = torch.empty(1, 1, 1, 1, dtype=torch.bfloat16).expand(1, tokens, 24, 128)
        route = None
        if block is not None:
            seqlens = (tokens, tokens)
            route = BlockRoute.full((1, 24), seqlens=seqlens, block=block)
        if settings.pop("padded", False):
            settings["block_lengths"] = torch.full((tokens // 64,), 60, dtype=torch.int32)
        problem = make_problem(q, q, q, route=route, **settings)
        return registry._order(problem)[0].name

    assert [first(2**n) for n in (11, 12, 15)] == ["eager", "flash", "flash"]
    assert [first(2**n, causal=True) for n in (11, 12)] == ["eager", "flash"]
    assert [first(2**n, (64, 64)) for n in (12, 14, 15)] == ["triton", "cute", "cute"]
    assert [first(2**n, (64, 64), padded=True) for n in (14, 15)] == ["triton", "cudnn"]
    assert [first(2**n, (128, 128)) for n in (8, 15)] == ["flash", "flash"]
    assert [first(2**n, (64, 64), skip_threshold=0.1) for n in (12, 15)] == ["triton", "cute"]
    assert [first(2**n, skip_threshold=0.1) for n in (12, 15)] == ["triton", "cute"]
    assert first(2**15, (64, 64), skip_threshold=0.1, padded=True) == "triton"
