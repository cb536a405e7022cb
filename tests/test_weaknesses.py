"""Weaknesses known from other implementations: the right behaviour has a test named after each.

``test_sol_weakness_<n>_...`` means number n of the Sol-Attn specification's list (its section 14),
``test_skip_weakness_<n>_...`` number n of the SkipSoftmax, VSA and quantisation one (section 8).
Most lie beside what they guard; others here, in test_weaknesses_triton.py and, for rules that the
code as text must keep, in test_weaknesses_source.py. The tables below hold the numbers that no test
can have, and why.
"""

from __future__ import annotations

import ast
import inspect
import math
import re
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import blockattn
from blockattn import (
    BlockRoute,
    BlockSummary,
    TokenGrid,
    UnsupportedError,
    attend,
    layout,
    skip_gaps,
    skip_softmax_attention,
    sol_attention,
    sol_route,
    sol_scores,
    vsa,
)
from blockattn.impl import registry
from blockattn.impl import triton as kernels
from blockattn.problem import make_problem
from blockattn.sol import sink_blocks
from tests import conftest
from tests.inputs import drifting, gaussian
from tests.policy_inputs import CALL, DENSE_TIME, SKIP, SKIP_MXFP8, SOL, VSA, Dense, qkv
from tests.test_attention_policy import INELIGIBLE
from workbench.attention import SparseAttention
from workbench.config import SkipSoftmaxConfig, SolAttnConfig
from workbench.models.dit import dense_attention
from workbench.models.rope import rotate, rotation_table

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
NUMBERS = {"sol": range(1, 49), "skip": range(1, 44)}
NOT_HERE: dict[str, dict[int, str]] = {
    "sol": {
        14: "no kernel here is specialised on the sequence length; the CuTe one for Hopper that "
        "would be is not built",
        40: "nothing here runs on several ranks, so no verdict has to be reduced over them",
    },
    "skip": {
        21: "about the text of a pull request, which no test can read",
        41: "there are no sliding windows: causal is one flag, and a constant of its kernel",
    },
}


# -- every number has a test or a reason ----------------------------------------------------------


def numbers_in(name: str) -> set[tuple[str, int]]:
    """(list, number) of every weakness that the name of a test speaks of."""
    parts = re.findall(r"(sol|skip)_weakness_(\d+(?:_and_\d+)*)(?=_)", name)
    return {(kind, int(n)) for kind, some in parts for n in some.split("_and_")}


@cache
def covered() -> set[tuple[str, int]]:
    trees = [ast.parse(path.read_text()) for path in TESTS.glob("test_*.py")]
    names = [x.name for tree in trees for x in tree.body if isinstance(x, ast.FunctionDef)]
    return {pair for name in names if name.startswith("test_") for pair in numbers_in(name)}


def test_names_are_read_as_they_are_meant():
    assert numbers_in("test_sol_weakness_25_and_26_x") == {("sol", 25), ("sol", 26)}
    assert numbers_in("test_skip_weakness_2_and_sol_weakness_39_x") == {("skip", 2), ("sol", 39)}
    assert numbers_in("test_weakness_2_x") == set()


@pytest.mark.parametrize("kind", NUMBERS)
def test_every_weakness_has_a_test_or_a_reason_why_not(kind: str):
    found = {n for name, n in covered() if name == kind}
    assert found | set(NOT_HERE[kind]) == set(NUMBERS[kind])
    assert not found & set(NOT_HERE[kind])
    assert all(len(reason) > 20 for reason in NOT_HERE[kind].values())


def test_no_test_leaves_open_which_list_it_means():
    lines = [line for path in TESTS.glob("test_*.py") for line in path.read_text().splitlines()]
    assert not [line for line in lines if re.match(r"def test_weakness_", line)]


# -- statistics and summaries ---------------------------------------------------------------------


def far_from_zero(tokens: int = 2048) -> tuple[Tensor, Tensor, Tensor]:
    """Keys whose mean is some hundred times their spread from block to block."""
    q, k, v = drifting(tokens, heads=1, dim=64)
    return q, k + 20.0, v


def deviation(q: Tensor, k_mean: Tensor, kind: str) -> Tensor:
    """Standard deviation of the scores in base-2 logits, float64, from the summaries themselves."""
    queries, means = layout.block_mean(q).double()[0, :, 0], k_mean.double()[0, :, 0]
    centred = means - means.mean(dim=0)
    if kind == "exact":
        variance = (queries @ centred.T).square().mean(dim=1)
    else:
        variance = queries.square() @ centred.square().mean(dim=0)
    unit = q.shape[3] ** -0.5 * math.log2(math.e)
    return (variance * unit**2 + 1e-6).sqrt()


@pytest.mark.parametrize("kind", ["diag", "exact"])
def test_skip_weakness_26_second_moments_of_bfloat16_inputs_are_taken_in_float32(kind: str):
    q, k, v = (x.bfloat16() for x in far_from_zero())
    k_mean = BlockSummary.of(k, v).k_mean
    want = deviation(q, k_mean, kind)
    assert_close(sol_scores(q, k, thresh_type=kind).std[0, 0].double(), want, rtol=1e-3, atol=0)
    # In the inputs' own precision nothing of the spread is left.
    rough = (k_mean**2).mean(dim=1) - k_mean.mean(dim=1) ** 2
    fine = k_mean.double().var(dim=1, correction=0)
    assert ((rough.double() - fine).abs() > 0.5 * fine).float().mean() > 0.5


def test_sol_weakness_11_variances_are_centred_before_they_are_squared():
    q, k, v = far_from_zero()
    k = k + 4000.0
    k_mean = BlockSummary.of(k, v).k_mean
    fine = k_mean.double().var(dim=1, correction=0)
    one_pass = (k_mean**2).mean(dim=1) - k_mean.mean(dim=1) ** 2
    assert ((one_pass.double() - fine).abs() > fine).any()
    want = deviation(q, k_mean, "diag")
    assert_close(sol_scores(q, k).std[0, 0].double(), want, rtol=1e-3, atol=0)


def test_sol_weakness_2_the_mean_query_is_not_rounded_to_bfloat16():
    q, k, v = (x.bfloat16() for x in drifting(640, heads=1, dim=64))
    mean = layout.block_mean(q)
    assert mean.dtype == torch.float32
    rounded = mean.bfloat16().float()
    want = deviation(q, BlockSummary.of(k, v).k_mean, "exact")
    found = sol_scores(q, k, thresh_type="exact").std[0, 0].double()
    assert_close(found, want, rtol=1e-5, atol=0)
    wrong = deviation(rounded.repeat_interleave(64, dim=1), BlockSummary.of(k, v).k_mean, "exact")
    assert ((wrong - want).abs() > 1e-4 * want).any()


@pytest.mark.parametrize("kind", ["Diag", "exact ", "variance", "", None, 1])
@pytest.mark.parametrize("call", [sol_scores, sol_route, sol_attention])
def test_sol_weakness_4_an_unknown_threshold_type_is_never_taken_for_diag(call: Any, kind: Any):
    tensors = gaussian(128)[: 3 if call is sol_attention else 2]
    with pytest.raises((TypeError, ValueError), match=r"thresh_type=.*'diag', 'exact'"):
        call(*tensors, thresh_type=kind)
    with pytest.raises(ValueError, match="thresh_type"):
        SolAttnConfig(thresh_type=kind)


@pytest.mark.parametrize("kind", ["diag", "exact"])
def test_sol_weakness_5_statistics_read_every_channel_of_a_wide_head(kind: str):
    q, k, v = drifting(640, heads=1, dim=192)
    q[..., :128] = 0.0  # the first 128 channels say nothing
    scores = sol_scores(q, k, thresh_type=kind)
    want = deviation(q, BlockSummary.of(k, v).k_mean, kind)
    assert_close(scores.std[0, 0].double(), want, rtol=1e-4, atol=0)
    assert scores.std.min() > 0.01
    problem = make_problem(*(x.half() for x in (q, k, v)))
    assert any("head dim 192, serves 64 and 128" in text for text in kernels.obstacles(problem))
    with pytest.raises(ValueError, match="head dim 257"):
        sol_scores(*gaussian(64, dim=257)[:2])


# -- arguments and results ---------------------------------------------------------------------


def test_sol_weakness_15_a_sink_behind_block_32768_is_not_cut_to_16_bits():
    assert sink_blocks(3_000_000, sink_tokens=100) == (46873, 46875)
    assert sink_blocks(3_000_000, sink_start=2_500_000, sink_tokens=64) == (39062, 39064)


@pytest.mark.parametrize("value", [True, False])
def test_sol_weakness_19_a_bool_is_no_sink(value: bool):
    q, k, v = gaussian(128)
    for name in ("sink_tokens", "sink_start"):
        for call in (
            lambda sink: sol_attention(q, k, v, **sink),
            lambda sink: sol_scores(q, k, **sink),
            lambda sink: sink_blocks(128, **sink),
            lambda sink: SparseAttention(SOL, **{"sink_tokens": 1, **sink}),
        ):
            with pytest.raises(TypeError, match=f"{name}={value}: expected an integer"):
                call({name: value})


class Copies(TorchDispatchMode):
    """Counts the copies of tensors that lie in a given storage."""

    def __init__(self, packed: Tensor) -> None:
        super().__init__()
        self.storage, self.found = packed.untyped_storage().data_ptr(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(name in str(func) for name in ("clone", "contiguous", "_to_copy", "copy_")):
            given = [x for x in args if isinstance(x, Tensor)]
            self.found += any(x.untyped_storage().data_ptr() == self.storage for x in given)
        return func(*args, **(kwargs or {}))


def test_sol_weakness_20_views_of_packed_qkv_are_not_copied():
    packed = torch.randn(1, 130, 3, 2, 64, generator=torch.Generator().manual_seed(0))
    q, k, v = packed.unbind(2)
    with Copies(packed) as copies:
        out = attend(q, k, v)
    assert copies.found == 0
    assert_close(out, attend(*(x.contiguous() for x in (q, k, v))))
    with Copies(packed) as copies:
        q.contiguous()
    assert copies.found == 1


@pytest.mark.parametrize("impl", ["reference", "eager"])
def test_sol_weakness_21_the_lse_can_be_had_and_includes_the_approximate_mass(impl: str):
    q, k, v = drifting(640, heads=1)
    out, trace = sol_attention(q, k, v, tau=1.0, impl=impl, return_trace=True)
    assert trace.density < 1
    summary, exact = BlockSummary.of(k, v), trace.route.dense()[0, 0].repeat_interleave(64, dim=0)
    keys = (q[0, :, 0] @ k[0, :, 0].T).masked_fill(~exact.repeat_interleave(64, dim=1), -torch.inf)
    blocks = (q[0, :, 0] @ summary.k_mean[0, :, 0].T).masked_fill(exact, -torch.inf)
    logits = torch.cat([keys * 32**-0.5, blocks * 32**-0.5 + math.log(64)], dim=1)
    assert trace.lse.dtype == torch.float32
    assert_close(trace.lse[0, 0], logits.logsumexp(dim=1), rtol=1e-4, atol=1e-4)
    assert torch.equal(out, sol_attention(q, k, v, tau=1.0, impl=impl))


# -- thresholds, routes and votes -----------------------------------------------------------------

UNIT = math.log(2)  # a softmax scale at which raw scores are base-2 logits


def planted(levels: list[float], heads: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Key tile j (128 keys) scores ``levels[j]``, in every other head ``-levels[j]``."""
    q, k, v = gaussian(128, keys=128 * len(levels), heads=heads, dim=8)
    q, k = torch.zeros_like(q), torch.zeros_like(k)
    q[..., 0] = 1.0
    sign = torch.tensor([1.0, -1.0]).repeat(heads)[:heads]
    k[0, :, :, 0] = torch.tensor(levels).repeat_interleave(128)[:, None] * sign
    return q, k, v


def test_skip_weakness_5_two_ways_to_set_the_threshold_exclude_each_other():
    q, k, v = gaussian(256)
    for threshold, factor in ((0.5, 128.0), (0.0, 0.0)):
        with pytest.raises(ValueError, match=r"threshold=.*set the same thing; give one of them"):
            skip_softmax_attention(q, k, v, threshold=threshold, threshold_scale_factor=factor)
    both = SkipSoftmaxConfig(threshold_scale_factor=9.0, target_sparsity=0.5)
    # Here the specification gives an order instead: the user's factor wins over any target.
    assert both.resolve_threshold_scale_factor() == 9.0


def test_skip_weakness_33_the_default_vote_is_against_the_exact_maximum():
    q, k, v = planted([0.0, 6.0, -1.0, 3.0, -9.0, 12.0, 4.0])
    call = partial(skip_softmax_attention, q, k, v, threshold=2**-4, scale=UNIT, return_trace=True)
    maps = {"default": call()[1].skipped}
    for kind in ("exact", "lagging"):
        maps[kind] = call(skip_reference=kind)[1].skipped
    assert maps["default"] == maps["exact"] != maps["lagging"]
    assert int(maps["default"].counts().sum()) == 3
    assert int(maps["lagging"].counts().sum()) == 2
    # Calibration counts with the same maximum as the run.
    assert skip_gaps(q, k, scale=UNIT).skipped(2**-4) == maps["default"]


@pytest.mark.parametrize("impl", ["reference", "eager"])
def test_skip_weakness_30_neighbouring_rows_may_differ_in_their_number_of_blocks(impl: str):
    tokens = 5 * 64
    q, k, v = gaussian(tokens, heads=1, dim=64)
    counts = (1, 4, 0, 5, 2)
    mask = torch.zeros(1, 1, 5, 5, dtype=torch.bool)
    for row, count in enumerate(counts):
        mask[0, 0, row, 5 - count :] = True
    tokens_seen = mask[0, 0].repeat_interleave(64, dim=0).repeat_interleave(64, dim=1)
    scores = (q[0, :, 0] @ k[0, :, 0].T / 8).masked_fill(~tokens_seen, -torch.inf)
    want = scores.softmax(dim=1).nan_to_num(0.0) @ v[0, :, 0]
    out = attend(q, k, v, BlockRoute.from_dense(mask), impl=impl)
    assert_close(out[0, :, 0], want, rtol=1e-4, atol=1e-5)


def test_skip_weakness_30_a_route_cannot_name_a_block_that_is_not_there():
    words = torch.tensor([[[[0b1111]]]], dtype=torch.int32)
    with pytest.raises(ValueError, match="a bit past key block 2 is set"):
        BlockRoute(words, (64, 64), (64, 3 * 64))


def test_skip_weakness_43_sparsity_is_counted_per_query_head_at_the_granularity_of_the_vote():
    q, k, v = planted([0.0, -9.0, -3.0], heads=2)
    q = q.repeat_interleave(2, dim=2)  # four query heads, two for each key head
    q[..., 3, 0] = 0.1  # within the second group one head spreads its scores ten times less
    for tile in ((128, 128), (64, 64)):
        gaps = skip_gaps(q, k, scale=UNIT, tile=tile)
        calibrated = gaps.sparsity([2**-2])[0, :, 0]
        _, trace = skip_softmax_attention(
            q, k, v, threshold=2**-2, scale=UNIT, tile=tile, return_trace=True
        )
        tiles = trace.skipped.dense()[0].flatten(1)
        assert_close(calibrated, tiles.double().mean(dim=1))
        assert calibrated[0] == calibrated[1] > 0
        assert calibrated[2] != calibrated[0]


# -- the policy -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("reason", "change"), INELIGIBLE)
def test_skip_weakness_24_one_list_of_guards_serves_every_mechanism(reason: str, change: Any):
    a, b, c = change(qkv())
    for config in (SOL, SKIP, VSA, SKIP_MXFP8):
        if reason == "head dim of the format" and config is not SKIP_MXFP8:
            continue
        gate = "zero" if config is VSA else "model"
        attention = SparseAttention(config, strict=True, gate=gate)
        with pytest.raises(UnsupportedError, match=rf"\({reason}: "):
            attention(a, b, c, CALL)


def test_sol_weakness_38_whatever_is_dense_runs_the_one_dense_function_of_the_baseline():
    q, k, v = qkv()
    baseline = Dense()
    attention = SparseAttention(SOL, dense=baseline)
    calls: list[tuple[Any, dict[str, Any]]] = [
        (DENSE_TIME, {}),
        (replace(CALL, layer=0), {}),
        (CALL, {"cross": True}),
    ]
    for call, options in calls:
        assert torch.equal(attention(q, k, v, call, **options), dense_attention(q, k, v, call))
    attention(q, k[:, :9], v[:, :9], CALL)
    assert baseline.calls == attention.counts().total == 4
    assert attention.counts().sparse == 0


def test_sol_weakness_41_tokens_and_their_rotation_move_by_one_permutation():
    grid = TokenGrid((3, 5, 6), order="morton")
    q, k, v = gaussian(grid.tokens, dim=32)
    table = rotation_table(grid.shape, 32)
    want = attend(rotate(q, table), rotate(k, table), v)
    moved = grid.arrange(table)  # [2, T, D / 2]: the same axis of tokens
    q, k, v = (grid.arrange(x) for x in (q, k, v))
    out = attend(rotate(q, moved), rotate(k, moved), v)
    assert_close(grid.restore(out), want, rtol=1e-4, atol=1e-5)
    halfway = attend(rotate(q, table), rotate(k, table), v)
    assert not torch.allclose(grid.restore(halfway), want, atol=1e-2)


# -- tests that could not fail elsewhere ----------------------------------------------------------


@pytest.mark.parametrize("impl", ["reference", "eager"])
@pytest.mark.parametrize("tokens", [64, 128, 1500])
def test_sol_weakness_45_the_sparse_path_itself_is_compared_with_dense(tokens: int, impl: str):
    q, k, v = drifting(tokens)
    out, trace = sol_attention(q, k, v, tau=-1000.0, impl=impl, return_trace=True)
    assert (trace.algorithm, trace.impl, trace.density) == ("sol_attn", impl, 1.0)
    want = dense_attention(q.double(), k.double(), v.double(), CALL)
    assert_close(out.double(), want, rtol=1e-4, atol=1e-5)
    if tokens > 128:
        sparse, trace = sol_attention(q, k, v, tau=1.0, impl=impl, return_trace=True)
        assert trace.density < 1
        assert not torch.allclose(sparse, out)


@pytest.mark.parametrize(
    ("marker", "capability", "skipped"),
    [
        ("gpu", (7, 5), False),
        ("sm90", (9, 0), False),
        ("sm90", (10, 0), True),
        ("sm100", (10, 3), False),
        ("sm100", (9, 0), True),
    ],
)
def test_sol_weakness_46_a_marker_asks_for_the_architecture_and_not_only_for_a_gpu(
    marker: str, capability: tuple[int, int], skipped: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    reason = conftest._why_skipped(marker)
    assert (reason is not None) == skipped
    if reason is not None:
        assert f"this GPU has {capability[0]}.{capability[1]}" in reason
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "needs a CUDA GPU" in str(conftest._why_skipped(marker))


def test_sol_weakness_47_every_name_of_an_implementation_resolves():
    assert registry.names()
    for item in registry.implementations():
        assert isinstance(item.obstacles(None), list)
        assert callable(item.run)
        problem = make_problem(*gaussian(64))
        if not item.obstacles(problem):
            assert item.run(problem).out.shape == problem.q.shape


def test_sol_weakness_48_the_block_size_is_written_once():
    functions = [getattr(blockattn, name) for name in blockattn.__all__]
    functions += [sink_blocks, layout.block_mean, layout.block_sum, layout.num_blocks]
    functions += [BlockSummary.of, BlockRoute.from_dense]
    defaults = [
        inspect.signature(x).parameters["block"].default
        for x in functions
        if callable(x) and "block" in inspect.signature(x).parameters
    ]
    defaults = [x for x in defaults if x is not inspect.Parameter.empty]
    assert len(defaults) >= 6
    assert {x[0] if isinstance(x, tuple) else x for x in defaults} == {layout.BLOCK}
    assert kernels.BLOCK == (layout.BLOCK, layout.BLOCK)
    assert vsa.CUBE == layout.BLOCK
