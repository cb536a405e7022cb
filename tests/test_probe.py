"""The error of a real sparse call against dense, and its time."""

from __future__ import annotations

import math
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blockattn import TokenGrid, UnsupportedError, attend, skip_softmax_attention, sol_attention
from workbench.probe import (
    attention_error,
    density_per_head,
    probe_skip,
    probe_sol,
    time_ratio,
)
from workbench.synthetic import synthetic_qkv

QKV = synthetic_qkv(TokenGrid((4, 16, 16)), heads=2, head_dim=32).to(dtype=torch.float32)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -- the error -------------------------------------------------------------------------------------


def test_equal_outputs_have_no_error():
    x = normal(2, 9, 3, 8)
    error = attention_error(x, x)
    assert torch.equal(error.relative_l2, torch.zeros(2, 3, dtype=torch.float64))
    assert torch.equal(error.max_abs, torch.zeros(2, 3, dtype=torch.float64))
    assert torch.allclose(error.cosine, torch.ones(2, 3, dtype=torch.float64))
    assert error.total.relative_l2 == 0
    assert error.total.cosine == pytest.approx(1)


def test_every_figure_follows_its_definition():
    out, dense = normal(2, 9, 3, 8), normal(2, 9, 3, 8, seed=1)
    error = attention_error(out, dense)
    a, b = out[1, :, 2].double().flatten(), dense[1, :, 2].double().flatten()
    assert float(error.relative_l2[1, 2]) == pytest.approx(float((a - b).norm() / b.norm()))
    assert float(error.cosine[1, 2]) == pytest.approx(float(a @ b / (a.norm() * b.norm())))
    assert float(error.max_abs[1, 2]) == float((a - b).abs().max())
    a, b = out.double().flatten(), dense.double().flatten()
    assert error.total.relative_l2 == pytest.approx(float((a - b).norm() / b.norm()))
    assert error.total.cosine == pytest.approx(float(a @ b / (a.norm() * b.norm())))
    assert error.total.max_abs == float((a - b).abs().max())


@given(factor=st.floats(-4, 4).filter(lambda x: abs(x) > 1e-3))
def test_a_scaled_output_keeps_its_direction(factor: float):
    dense = normal(1, 5, 2, 4).double()
    error = attention_error(factor * dense, dense)
    assert error.total.relative_l2 == pytest.approx(abs(factor - 1))
    assert error.total.cosine == pytest.approx(math.copysign(1, factor))


@pytest.mark.parametrize(
    ("out", "dense", "relative", "cosine"),
    [(0.0, 0.0, 0.0, 1.0), (1.0, 0.0, math.inf, 0.0), (0.0, 1.0, 1.0, 0.0)],
)
def test_zero_outputs_have_defined_figures(out, dense, relative: float, cosine: float):
    error = attention_error(torch.full((1, 3, 1, 2), out), torch.full((1, 3, 1, 2), dense))
    assert error.total[:2] == (relative, cosine)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_output_that_is_not_finite_is_infinitely_wrong_in_its_head_alone(bad: float):
    dense = normal(1, 5, 2, 4)
    out = dense.clone()
    out[0, 3, 1, 2] = bad
    error = attention_error(out, dense)
    assert error.relative_l2.tolist() == [[0.0, math.inf]]
    assert error.max_abs.tolist() == [[0.0, math.inf]]
    assert error.total.relative_l2 == math.inf
    assert math.isnan(error.total.cosine)


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_a_reference_that_is_not_finite_is_refused_with_its_place(bad: float):
    dense = normal(2, 5, 3, 4)
    dense[1, 4, 2, 0] = bad
    with pytest.raises(ValueError, match="at layer 3, step 4, first in batch 1, head 2, token 4"):
        attention_error(normal(2, 5, 3, 4), dense, where="layer 3, step 4")


@pytest.mark.parametrize(
    ("out", "dense", "error"),
    [
        (torch.zeros(1, 5, 2, 4), torch.zeros(1, 5, 2, 5), ValueError),
        (torch.zeros(5, 2, 4), torch.zeros(1, 5, 2, 4), ValueError),
        (torch.zeros(1, 5, 2, 4), None, TypeError),
        (torch.zeros(1, 5, 2, 4, dtype=torch.int64), torch.zeros(1, 5, 2, 4), TypeError),
    ],
)
def test_outputs_that_cannot_be_compared_are_refused(out, dense, error: type[Exception]):
    with pytest.raises(error, match=r"out|dense"):
        attention_error(out, dense)


# -- probes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_a_sol_probe_is_a_real_sparse_call_against_dense(impl: str):
    probe = probe_sol(QKV.q, QKV.k, QKV.v, 1.0, impl=impl)
    out, trace = sol_attention(QKV.q, QKV.k, QKV.v, tau=1.0, impl=impl, return_trace=True)
    expected = attention_error(out, attend(QKV.q, QKV.k, QKV.v, impl=trace.impl))
    assert probe.error.total == expected.total
    assert probe.trace.impl == probe.dense_impl == trace.impl
    assert probe.density == trace.density < 1
    assert probe.error.total.relative_l2 > 0


def test_a_skip_probe_is_a_real_sparse_call_against_dense():
    q, k = 4 * QKV.q, 4 * QKV.k
    probe = probe_skip(q, k, QKV.v, 0.5, tile=(64, 64), causal=True)
    out, trace = skip_softmax_attention(
        q, k, QKV.v, threshold=0.5, tile=(64, 64), causal=True, return_trace=True
    )
    expected = attention_error(out, attend(q, k, QKV.v, causal=True, impl=trace.impl))
    assert probe.error.total == expected.total
    assert probe.density == trace.density < 1
    assert int(probe.trace.skipped.counts().sum()) > 0
    assert probe.error.total.relative_l2 > 0


def test_a_probe_that_leaves_nothing_out_has_the_rounding_of_dense():
    dense_route = probe_sol(QKV.q, QKV.k, QKV.v, -1000.0)
    nothing_skipped = probe_skip(QKV.q, QKV.k, QKV.v, 0.0)
    for probe in (dense_route, nothing_skipped):
        assert probe.density == 1
        assert probe.error.total.relative_l2 < 1e-5


def test_a_given_dense_output_is_what_the_probe_compares_with():
    probe = probe_sol(QKV.q, QKV.k, QKV.v, 1.0, dense=torch.ones_like(QKV.q))
    assert probe.dense_impl == "given"
    assert probe.error.total.relative_l2 > 0.5


@pytest.mark.parametrize("causal", [False, True])
def test_the_density_of_heads_counts_valid_pairs_alone(causal: bool):
    q, k = 4 * QKV.q, 4 * QKV.k
    probe = probe_skip(q, k, QKV.v, 0.5, tile=(64, 64), causal=causal)
    assert float(probe.density_per_head.mean()) == pytest.approx(probe.density)
    assert torch.equal(probe.density_per_head, density_per_head(probe.trace))
    assert bool(((probe.density_per_head > 0) & (probe.density_per_head <= 1)).all())


def test_larger_taus_leave_out_more_and_err_more():
    probes = [probe_sol(QKV.q, QKV.k, QKV.v, tau) for tau in (-1.0, 0.0, 1.0, 3.0)]
    density = [probe.density for probe in probes]
    error = [probe.error.total.relative_l2 for probe in probes]
    assert density == sorted(density, reverse=True)
    assert error[0] < error[-1]


def test_an_implementation_that_does_not_exist_is_refused():
    with pytest.raises((ValueError, UnsupportedError), match="impl='none'"):
        probe_sol(QKV.q, QKV.k, QKV.v, 1.0, impl="none")


# -- time ------------------------------------------------------------------------------------------


def test_a_time_ratio_warms_up_interleaves_the_two_calls_and_takes_medians(monkeypatch):
    times = (0.0, 1.0, 1.0, 5.0, 5.0, 10.0, 10.0, 20.0, 20.0, 22.0, 22.0, 26.0)
    order, clock = [], iter(times)  # sparse takes 1, 5, 2 seconds and dense 4, 10, 4
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    found = time_ratio(lambda: order.append("s"), lambda: order.append("d"), repeats=3, warmup=2)
    assert order == ["s", "d"] * 5
    assert found == (0.5, 2.0, 4.0)


@pytest.mark.parametrize(
    ("repeats", "warmup", "error"), [(0, 1, ValueError), (3, -1, ValueError), (True, 1, TypeError)]
)
def test_counts_that_make_no_sense_are_refused(repeats, warmup, error: type[Exception]):
    with pytest.raises(error, match=r"repeats=|warmup="):
        time_ratio(lambda: None, lambda: None, repeats=repeats, warmup=warmup)


@pytest.mark.gpu
def test_a_gpu_call_is_timed_by_the_gpu():
    x = torch.randn(4096, 4096, device="cuda")
    found = time_ratio(lambda: x @ x, lambda: x @ x)
    assert min(found.sparse, found.dense) > 1e-5
