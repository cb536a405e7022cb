"""Where the policy sends each call, what it counts, warns of and raises.

Tests named after a weakness guard against it; test_weaknesses.py says which lists are meant.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from blockattn import (
    UnsupportedError,
    quantised_attention,
    skip_softmax_attention,
    sol_attention,
    video_sparse_attention,
)
from tests.policy_inputs import (
    CALL,
    CUTOFF,
    DENSE_TIME,
    GRID,
    SKIP,
    SKIP_MXFP8,
    SOL,
    TOKENS,
    VSA,
    Dense,
    qkv,
    quiet,
    tokens,
    video,
)
from workbench.attention import SparseAttention, masked_attention
from workbench.attention import calls as sparse_calls
from workbench.attention.log import CallCounts, density_by_step
from workbench.config import AttentionConfig, SkipSoftmaxConfig, SolAttnConfig
from workbench.models.dit import AttentionCall, dense_attention
from workbench.models.sampler import denoising_times

# --- the order of decisions


@dataclass(frozen=True)
class Case:
    """One call and the reason under which it must be counted."""

    reason: str
    call: AttentionCall = CALL
    keys: int = TOKENS
    mask: bool = False
    cross: bool = False
    rank: int = 4


CASES = [
    Case("sparse"),
    Case("dense phase", DENSE_TIME),
    Case("dense layer", replace(CALL, layer=0)),
    Case("mask", mask=True),
    Case("cross-attention", cross=True),
    Case("cross-attention", keys=128),
    # Each reason wins over all that come after it.
    Case("dense layer", replace(DENSE_TIME, layer=0)),
    Case("mask", replace(DENSE_TIME, layer=0), mask=True),
    Case("cross-attention", replace(DENSE_TIME, layer=0), mask=True, cross=True),
    Case("dense phase", DENSE_TIME, rank=3),
    Case("rank", rank=3),
]


def run_case(attention: SparseAttention, case: Case) -> Tensor:
    q, k, v = qkv()
    k, v = k[:, : case.keys], v[:, : case.keys]
    if case.rank == 3:
        q, k, v = (x.squeeze(0) for x in (q, k, v))
    mask = torch.ones(1, 1, TOKENS, case.keys, dtype=torch.bool) if case.mask else None
    return attention(q, k, v, case.call, mask=mask, cross=case.cross)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:.*cannot serve this call")
def test_the_first_reason_in_the_order_decides(case: Case):
    attention = SparseAttention(SOL, dense=lambda q, k, v, call: q.clone())
    run_case(attention, case)
    counts = attention.counts()
    assert counts.total == 1
    named = {"sparse": counts.sparse} if counts.sparse else {**counts.dense, **counts.ineligible}
    assert named == {case.reason: 1}


def test_a_sparse_call_equals_the_mechanism_itself():
    q, k, v = qkv()
    dense = dense_attention(q, k, v, CALL)
    gate = tokens(seed=9)
    threshold = {"threshold_scale_factor": 0.5 * TOKENS}
    pairs = [
        (SOL, sol_attention(q, k, v, tau=1.0)),
        (SKIP, skip_softmax_attention(q, k, v, **threshold)),
        (VSA, video_sparse_attention(q, k, v, grid=GRID, gate_compress=gate, sparsity=0.75)),
        (SKIP_MXFP8, quantised_attention(q, k, v, qk_dtype="mxfp8", skip_threshold=0.5)),
    ]
    for config, expected in pairs:
        attention = SparseAttention(config)
        out = attention(q, k, v, replace(CALL, gate=gate))
        assert torch.equal(out, expected)
        assert not torch.equal(out, dense)
        assert attention.counts() == CallCounts(sparse=1)


@pytest.mark.parametrize("time", [CUTOFF, math.nextafter(CUTOFF, 1), 1.0])
@pytest.mark.parametrize("config", [SOL, SKIP])
def test_sol_weakness_24_dense_steps_run_the_baselines_own_kernel(time: float, config: Any):
    q, k, v = qkv()
    baseline = Dense()
    out = SparseAttention(config, dense=baseline)(q, k, v, replace(CALL, time=time))
    assert baseline.calls == 1
    assert torch.equal(out, dense_attention(q, k, v, CALL))


@pytest.mark.parametrize("config", [SOL, SKIP])
def test_just_below_the_cutoff_is_sparse(config: Any):
    q, k, v = qkv()
    baseline = Dense()
    attention = SparseAttention(config, dense=baseline)
    attention(q, k, v, replace(CALL, time=math.nextafter(CUTOFF, 0)))
    assert (baseline.calls, attention.counts().sparse) == (0, 1)


# --- a whole video


def off_switches() -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for_ever = SkipSoftmaxConfig(threshold_scale_factor=99.0, disabled_until_timestep=0.0)
    return {
        "no configuration": None,
        "empty configuration": AttentionConfig(),
        "factor 0": SkipSoftmaxConfig(threshold_scale_factor=0.0),
        "no factor": SkipSoftmaxConfig(),
        "target 0": SkipSoftmaxConfig(target_sparsity=0.0),
        "dense for ever": for_ever,
        "never below the cutoff": SolAttnConfig(disabled_until_timestep=0.0001),
        "all layers dense": SolAttnConfig(dense_layers=(0, 1)),
    }


@pytest.mark.parametrize("name", off_switches())
def test_skip_weakness_27_sparse_off_is_byte_identical_to_dense_over_a_whole_video(name: str):
    attention = SparseAttention(off_switches()[name], num_layers=2, strict=True)
    assert torch.equal(video(attention), video(dense_attention))
    counts = attention.counts()
    assert (counts.sparse, counts.ineligible, counts.total) == (0, {}, 6)


@pytest.mark.parametrize(
    ("config", "options", "sparse_calls_expected"),
    [
        (SOL, {}, 2),
        (SKIP, {}, 4),
        (VSA, {"gate": "zero"}, 6),
        (SKIP_MXFP8, {}, 4),
    ],
)
def test_a_video_with_sparsity_differs_and_every_call_is_accounted_for(
    config: Any, options: dict[str, Any], sparse_calls_expected: int
):
    attention = SparseAttention(config, num_layers=2, strict=True, record=True, **options)
    out = video(attention)
    assert torch.isfinite(out).all()
    assert not torch.equal(out, video(dense_attention))
    assert attention.counts().sparse == sparse_calls_expected
    assert attention.counts().total == len(attention.records) == 6


def test_skip_weakness_2_times_reach_every_call_and_density_is_recorded_per_step():
    attention = SparseAttention(SolAttnConfig(tau=9.0, disabled_until_timestep=CUTOFF), record=True)
    video(attention)
    times = denoising_times(3)[:-1]
    assert [r.time for r in attention.records] == [t for t in times for _ in range(2)]
    density = density_by_step(attention.records)
    assert density[0] == 1
    # Only the band of the diagonal is left of 4 x 4 blocks.
    assert density[1] == density[2] == 10 / 16
    assert {r.algorithm for r in attention.records if r.step} == {"sol_attn"}
    assert {r.impl for r in attention.records if r.step == 0} == {"baseline"}


def test_skip_weakness_1_a_record_shows_that_tiles_were_skipped_and_what_ran():
    q, k, v = qkv()
    attention = SparseAttention(SKIP_MXFP8, record=True, impl="reference")
    attention(q, k, v, CALL)
    attention(q, k, v, DENSE_TIME)
    sparse, dense = attention.records
    assert (sparse.kind, sparse.reason, sparse.algorithm) == ("sparse", "sparse", "skip_softmax")
    assert (dense.kind, dense.reason, dense.algorithm) == ("dense", "dense phase", "dense")
    assert sparse.impl == dense.impl == "reference"
    assert 0 < sparse.density < 1 == dense.density
    assert "mxfp8 QK" in sparse.emulated
    assert (sparse.layer, sparse.step, sparse.time) == (1, 3, 0.5)


# --- counters, warnings, strictness


def test_sol_weakness_22_an_ineligible_call_is_dense_counted_and_named():
    q, k, v = (x.requires_grad_() for x in qkv())
    baseline = Dense()
    attention = SparseAttention(SOL, dense=baseline)
    with pytest.warns(UserWarning, match=r"layer 1: .*dense attention runs instead \(gradient: q"):
        out = attention(q, k, v, CALL)
    assert baseline.calls == 1
    assert torch.equal(out, dense_attention(q, k, v, CALL))
    assert attention.counts() == CallCounts(ineligible={"gradient": 1})
    assert str(attention.counts()) == "0 sparse, 1 ineligible (gradient)"


def test_skip_weakness_23_each_reason_warns_once():
    attention = SparseAttention(SOL, dense=lambda q, k, v, call: q)
    q, k, v = qkv()
    bad = {"dtype": [x.int() for x in (q, k, v)], "rank": [x[0] for x in (q, k, v)]}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            for layer, tensors in enumerate(bad.values(), start=1):
                attention(*tensors, replace(CALL, layer=layer))
    assert len(caught) == 2
    assert attention.counts().ineligible == {"dtype": 3, "rank": 3}


@pytest.mark.parametrize("layer", ["1", True, 1.0, None])
def test_a_layer_of_another_type_is_refused_because_no_list_would_hold_it(layer: Any):
    with pytest.raises(TypeError, match=r"call\.layer="):
        SparseAttention(SOL)(*qkv(), replace(CALL, layer=layer))


@pytest.mark.parametrize(
    ("options", "layer"), [({"num_layers": 3}, 3), ({"module_names": ["a", "b"]}, 2), ({}, -1)]
)
def test_a_layer_that_the_model_does_not_have_is_refused(options: dict[str, Any], layer: int):
    attention = SparseAttention(SkipSoftmaxConfig(threshold_scale_factor=9), **options)
    with pytest.raises(ValueError, match=f"call.layer={layer}: .* num_layers"):
        attention(*qkv(), replace(CALL, layer=layer))
    assert attention.counts().total == 0


def test_a_reset_forgets_calls_and_arms_the_warnings_again():
    attention = SparseAttention(SOL, dense=lambda q, k, v, call: q, record=True)
    tensors = [x.int() for x in qkv()]
    for _ in range(2):
        with pytest.warns(UserWarning, match="dtype"):
            attention(*tensors, CALL)
        assert attention.counts().total == len(attention.records) == 1
        attention.reset()
        assert attention.counts() == CallCounts()
        assert attention.records == []


def test_counts_are_a_snapshot():
    attention = SparseAttention(None)
    before = attention.counts()
    attention(*qkv(), CALL)
    assert (before.total, attention.counts().total) == (0, 1)


@pytest.mark.parametrize("how", ["argument", "environment"])
def test_strict_raises_where_a_call_would_go_dense_unasked(
    how: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("WORKBENCH_STRICT", "1" if how == "environment" else "0")
    attention = SparseAttention(SOL, strict=True if how == "argument" else None)
    q, k, v = qkv()
    with pytest.raises(UnsupportedError, match=r"strict mode.*dtype: q: torch\.int32"):
        attention(q.int(), k.int(), v.int(), CALL)
    assert attention.counts().total == 0
    # What is meant to be dense stays allowed.
    attention(q, k, v, DENSE_TIME)
    attention(q, k[:, :64], v[:, :64], CALL)
    assert attention.counts().dense == {"dense phase": 1, "cross-attention": 1}


def test_the_argument_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORKBENCH_STRICT", "1")
    assert not SparseAttention(SOL, strict=False).strict


def test_an_unclear_environment_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORKBENCH_STRICT", "yes")
    with pytest.raises(ValueError, match="WORKBENCH_STRICT='yes': must be 0 or 1"):
        SparseAttention(SOL)


Tensors = tuple[Tensor, Tensor, Tensor]
INELIGIBLE: list[tuple[str, Callable[[Tensors], tuple[Any, Any, Any]]]] = [
    ("rank", lambda x: (x[0][0], x[1][0], x[2][0])),
    ("rank", lambda x: (x[0], x[1], x[2][0])),
    ("dtype", lambda x: (x[0].int(), x[1].int(), x[2].int())),
    ("head dim", lambda x: tuple(y.repeat(1, 1, 1, 5) for y in x)),
    ("empty", lambda x: tuple(y[:, :0] for y in x)),
    ("device", lambda x: (x[0], x[1].to("meta"), x[2])),
    ("mixed dtypes", lambda x: (x[0], x[1].double(), x[2])),
    ("shapes", lambda x: (x[0], x[1], x[2][:, :64])),
    ("shapes", lambda x: (x[0], x[1][..., :32], x[2][..., :32])),
    ("shapes", lambda x: (x[0].repeat(1, 1, 2, 1)[:, :, :3], x[1], x[2])),
    ("gradient", lambda x: (x[0], x[1], x[2].clone().requires_grad_())),
    ("head dim of the format", lambda x: tuple(y[..., :48] for y in x)),
]


@pytest.mark.parametrize(("reason", "change"), INELIGIBLE)
def test_sol_weakness_44_every_reason_is_reached_by_a_call_of_its_own(reason: str, change: Any):
    attention = SparseAttention(SKIP_MXFP8, strict=True)
    with pytest.raises(UnsupportedError, match=rf"\({reason}: "):
        attention(*change(qkv()), CALL)


@pytest.mark.parametrize(
    ("heads", "keys", "dtype"), [(2, 1, torch.float32), (4, 2, torch.bfloat16)]
)
def test_what_the_kernels_serve_is_eligible(heads: int, keys: int, dtype: torch.dtype):
    q = tokens(130, heads=heads).to(dtype)
    k, v = (tokens(130, heads=keys, seed=n).to(dtype) for n in (1, 2))
    attention = SparseAttention(SOL, strict=True)
    assert attention(q, k, v, CALL).shape == q.shape
    assert attention.counts().sparse == 1


@pytest.mark.parametrize("error", [RuntimeError("launch failed"), TypeError("no such argument")])
def test_sol_weakness_23_an_exception_of_a_kernel_propagates(
    error: Exception, monkeypatch: pytest.MonkeyPatch
):
    def broken(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(sparse_calls, "sol_attention", broken)
    baseline = Dense()
    attention = SparseAttention(SOL, dense=baseline)
    with pytest.raises(type(error), match=str(error)):
        attention(*qkv(), CALL)
    assert (baseline.calls, attention.counts().total) == (0, 0)


def test_an_implementation_that_does_not_exist_is_refused_at_once():
    with pytest.raises(ValueError, match="impl='fast': must be one of"):
        SparseAttention(SOL, impl="fast")


# --- cross-attention and masks


def test_sol_weakness_30_cross_attention_of_equal_length_needs_the_flag_and_has_it():
    q, k, v = qkv()
    attention = SparseAttention(SOL)
    out = attention(q, k, v, CALL, cross=True)
    assert torch.equal(out, dense_attention(q, k, v, CALL))
    assert attention.counts().dense == {"cross-attention": 1}


def test_sol_weakness_29_separate_projections_do_not_make_self_attention_cross():
    q, k, v = (x.clone() for x in qkv())  # three tensors of their own, one sequence
    attention = SparseAttention(SOL)
    attention(q, k, v, CALL)
    assert attention.counts().sparse == 1


def test_skip_weakness_35_short_text_keys_never_meet_a_threshold_of_1_or_more():
    q, k, v = qkv()
    attention = SparseAttention(SkipSoftmaxConfig(threshold_scale_factor=5000.0), strict=True)
    with quiet():
        out = attention(q, k[:, :16], v[:, :16], CALL)
    assert torch.equal(out, dense_attention(q, k[:, :16], v[:, :16], CALL))


@pytest.mark.parametrize("config", [SKIP, SKIP_MXFP8])
def test_skip_weakness_35_lambda_of_1_or_more_warns_and_still_runs(config: Any):
    factor = 300.0 + 7 * (config is SKIP)  # the kernels warn once per factor and length
    skip = SKIP.model_copy(update={"threshold_scale_factor": factor})
    if config is not SKIP:
        skip = config.model_copy(update={"sparse_attention_config": skip})
    attention = SparseAttention(skip)
    with pytest.warns(UserWarning, match="is at least 1: tiles are dropped"):
        attention(*qkv(), CALL)
    assert attention.counts().sparse == 1


def test_sol_weakness_31_a_masked_call_honours_its_mask():
    q, k, v = qkv()
    padding = torch.arange(TOKENS) < 200
    attention = SparseAttention(SOL)
    out = attention(q, k, v, CALL, mask=padding[None, None, None])
    expected = dense_attention(q, k[:, :200], v[:, :200], CALL)
    torch.testing.assert_close(out, expected)
    assert not torch.allclose(out, dense_attention(q, k, v, CALL))
    assert attention.counts().dense == {"mask": 1}


def test_a_mask_reaches_cross_attention_and_grouped_heads_too():
    q = tokens(64, heads=4)
    k, v = tokens(96, heads=2, seed=1), tokens(96, heads=2, seed=2)
    mask = torch.arange(96) < 50
    out = SparseAttention(SOL)(q, k, v, CALL, mask=mask[None, None, None])
    k, v = (x[:, :50].repeat_interleave(2, dim=2) for x in (k, v))
    torch.testing.assert_close(out, dense_attention(q, k, v, CALL))


@pytest.mark.parametrize(("call", "sink"), [(DENSE_TIME, 0), (CALL, 64)])
def test_dense_steps_and_the_rows_of_a_sink_take_grouped_heads(call: AttentionCall, sink: int):
    q, k, v = tokens(TOKENS, heads=4), tokens(TOKENS, heads=2, seed=1), tokens(TOKENS, heads=2)
    out = SparseAttention(SOL, sink_tokens=sink)(q, k, v, call)
    dense = dense_attention(q, *(x.repeat_interleave(2, dim=2) for x in (k, v)), call)
    torch.testing.assert_close(out[:, -sink:], dense[:, -sink:])
    assert torch.allclose(out, dense, atol=1e-5) is (sink == 0)  # a sink leaves the rest sparse


def test_a_row_that_may_attend_to_nothing_is_0():
    q, k, v = qkv(64)
    mask = torch.ones(64, 64, dtype=torch.bool)
    mask[5] = False
    out = masked_attention(q, k, v, mask)
    assert torch.equal(out[:, 5], torch.zeros_like(out[:, 5]))
    assert torch.isfinite(out).all()


def test_a_masked_call_goes_to_the_masked_attention_of_the_baseline():
    seen: list[Tensor] = []

    def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        seen.append(mask)
        return q

    mask = torch.ones(1, 1, 1, TOKENS, dtype=torch.bool)
    SparseAttention(None, masked=masked)(*qkv(), CALL, mask=mask)
    assert seen[0] is mask


def test_the_flag_is_a_flag():
    with pytest.raises(TypeError, match="cross=1: expected True or False"):
        SparseAttention(SOL)(*qkv(), CALL, cross=1)  # pyright: ignore[reportArgumentType]


# -- a tau for every layer ----------------------------------------------------------------------


def test_each_layer_runs_with_its_own_tau():
    q, k, v = qkv()
    each = SparseAttention(SolAttnConfig(), num_layers=2, taus=(2.0, -1e6), record=True)
    for layer, tau in enumerate((2.0, -1e6)):
        one = SparseAttention(SolAttnConfig(tau=tau), num_layers=2, record=True)
        call = AttentionCall(layer=layer, step=0, time=0.5, grid=GRID)
        assert torch.equal(each(q, k, v, call), one(q, k, v, call))
        assert each.records[-1].density == one.records[-1].density
    assert each.records[0].density < 1 == each.records[1].density
    assert dict(each.graph_key())["tau"] == (2.0, -1e6)


@pytest.mark.parametrize(
    "config, taus, message",
    [
        (SolAttnConfig(), (1.0,), r"taus has 1 values: must be one for each of the model's 2"),
        (SolAttnConfig(), (1.0, float("nan")), r"taus\[1\]=nan"),
        (SKIP, (1.0, 1.0), "taus are for sol_attn"),
    ],
)
def test_taus_that_fit_no_model_or_algorithm_are_refused(
    config: Any, taus: tuple[float, ...], message: str
):
    with pytest.raises(ValueError, match=message):
        SparseAttention(config, num_layers=2, taus=taus)


def test_a_dense_layer_beyond_the_named_modules_is_refused():
    with pytest.raises(ValueError, match="dense_layers has 7: the model's 2 layers"):
        SparseAttention(SolAttnConfig(dense_layers=(7,)), module_names=["a", "b"])
