"""One pass gives the density at every threshold, and inverting it gives the threshold wanted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blockattn import TokenGrid, skip_softmax_attention, sol_route
from workbench.curves import Curve, skip_curve, sol_curve
from workbench.synthetic import synthetic_qkv

TAUS = [-1.0, 0.0, 0.5, 1.0, 2.0, 4.0]
QKV = synthetic_qkv(TokenGrid((4, 16, 15)), heads=3, head_dim=32, batch=2)


def staircase(values: list[float], density: list[float]) -> Curve:
    return Curve(values, torch.tensor(density, dtype=torch.float64).reshape(1, 1, -1))


@pytest.mark.parametrize(
    "routing", [{}, {"thresh_type": "exact"}, {"sink_tokens": 70}, {"block": 32}]
)
def test_the_curve_is_the_density_of_the_route_at_every_tau(routing: dict):
    curve = sol_curve(QKV.q, QKV.k, TAUS, **routing)
    assert curve.values == TAUS
    assert curve.name == "tau"
    for n, tau in enumerate(TAUS):
        route = sol_route(QKV.q, QKV.k, tau=tau, **routing)
        assert torch.equal(curve.per_head[..., n], route.density_per_head())
        assert float(curve.mean[n]) == pytest.approx(route.density(), abs=1e-12)


@pytest.mark.parametrize("causal", [False, True])
def test_the_curve_is_the_density_that_a_real_run_delivers(causal: bool):
    q, k, v = (4 * x for x in (QKV.q, QKV.k, QKV.v))
    thresholds = [0.0, 1e-4, 0.01, 0.3, 0.9]
    curve = skip_curve(q, k, thresholds, tile=(64, 64), causal=causal)
    assert curve.name == "threshold"
    for n, threshold in enumerate(thresholds):
        _, trace = skip_softmax_attention(
            q, k, v, threshold=threshold, tile=(64, 64), causal=causal, return_trace=True
        )
        assert float(curve.mean[n]) == pytest.approx(trace.density, abs=1e-12)
    assert float(curve.mean[0]) == 1.0
    assert float(curve.mean[-1]) < 1.0


def test_density_never_rises_with_the_threshold():
    curves = (sol_curve(QKV.q, QKV.k, TAUS), skip_curve(QKV.q, QKV.k, [0.0, 0.001, 0.1, 1.0]))
    for curve in curves:
        assert bool((curve.per_head.diff(dim=-1) <= 0).all())
        assert bool(((curve.per_head >= 0) & (curve.per_head <= 1)).all())


# -- inverting it ----------------------------------------------------------------------------------


@given(share=st.floats(0, 1))
def test_the_solved_tau_delivers_the_density_to_within_one_block_pair(share: float):
    curve = sol_curve(QKV.q, QKV.k, TAUS)
    low, high = curve.reach
    target = min(high, low + share * (high - low))
    tau = curve.solve(target)
    delivered = sol_route(QKV.q, QKV.k, tau=tau).density()
    pairs = 15 * 15 * 3 * 2
    assert delivered >= target - 1e-12
    assert delivered - target <= 1 / pairs + 1e-12


def test_the_solved_threshold_delivers_the_density():
    q, k = 4 * QKV.q, 4 * QKV.k
    curve = skip_curve(q, k, [0.0, 1.0], tile=(64, 64))
    threshold = curve.solve(0.8)
    delivered = float(skip_curve(q, k, [threshold], tile=(64, 64)).mean)
    assert -1e-12 <= delivered - 0.8 < 2 / (15 * 15 * 3 * 2)


def test_tiny_thresholds_are_found_too():
    q, k = 8 * QKV.q, 8 * QKV.k  # strong logits: most tiles fall far below the running maximum
    low = float(skip_curve(q, k, [1e-12], tile=(64, 64)).mean)
    target = (1 + low) / 2
    threshold = skip_curve(q, k, [0.0, 1.0], tile=(64, 64)).solve(target)
    assert 0 < threshold < 1e-12
    delivered = float(skip_curve(q, k, [threshold], tile=(64, 64)).mean)
    assert delivered == pytest.approx(target, abs=2 / (15 * 15 * 3 * 2))


@pytest.mark.parametrize(
    ("target", "expected"),
    [(0.8, 0.0), (0.6, 0.5), (0.4, 2.0), (0.3, 2.5), (0.2, 3.0)],
)
def test_without_the_pass_the_value_is_interpolated_linearly(target: float, expected: float):
    # A flat stretch has one route: its far end is taken.
    curve = staircase([0.0, 1.0, 2.0, 3.0], [0.8, 0.4, 0.4, 0.2])
    assert curve.solve(target) == pytest.approx(expected, abs=1e-12)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=6), st.floats(0, 1))
def test_the_interpolated_value_lies_on_the_ladder(density: list[float], share: float):
    curve = staircase([float(n) for n in range(len(density))], sorted(density, reverse=True))
    low, high = curve.reach
    value = curve.solve(min(high, low + share * (high - low)))
    assert 0 <= value <= len(density) - 1


@pytest.mark.parametrize("target", [0.1, 0.9, -1, 1.5])
def test_a_density_out_of_reach_is_refused_with_the_range(target: float):
    curve = staircase([0.0, 1.0], [0.8, 0.2])
    with pytest.raises(ValueError, match=r"tau from 0 to 1 reaches densities 0\.2000 to 0\.8000"):
        curve.solve(target)


@pytest.mark.parametrize(("target", "error"), [(True, TypeError), (float("nan"), ValueError)])
def test_a_target_that_is_no_finite_number_is_refused(target, error: type[Exception]):
    with pytest.raises(error, match="target_density="):
        staircase([0.0, 1.0], [0.8, 0.2]).solve(target)


# -- several at once -------------------------------------------------------------------------------


def test_joined_curves_have_the_mean_of_all_heads_and_can_be_solved():
    other = synthetic_qkv(TokenGrid((4, 16, 15)), heads=3, head_dim=32, seed=9)
    curves = [sol_curve(x.q, x.k, TAUS) for x in (QKV, other)]
    joined = Curve.join(curves)
    assert joined.per_head.shape == (3, 3, len(TAUS))
    expected = (2 * curves[0].mean + curves[1].mean) / 3
    assert torch.allclose(joined.mean, expected, atol=1e-12)
    tau = joined.solve(0.3)
    assert joined.evaluate is not None
    assert float(joined.evaluate([tau]).mean()) == pytest.approx(0.3, abs=0.002)


def test_a_joined_curve_without_all_passes_interpolates():
    curve = sol_curve(QKV.q, QKV.k, TAUS)
    assert Curve.join([curve, replace(curve, evaluate=None)]).evaluate is None


def test_curves_that_differ_in_their_ladder_cannot_be_joined():
    one, two = staircase([0.0, 1.0], [0.8, 0.2]), staircase([0.0, 2.0], [0.8, 0.2])
    for curves in ([], [one, two], [one, replace(one, name="threshold")]):
        with pytest.raises(ValueError, match="curves"):
            Curve.join(curves)


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ([], ValueError, "taus is empty"),
        ([1.0, 0.5], ValueError, "must rise strictly"),
        ([1.0, 1.0], ValueError, "must rise strictly"),
        ([0.0, float("inf")], ValueError, r"taus\[1\]=inf"),
        ([False], TypeError, r"taus\[0\]=False"),
    ],
)
def test_a_ladder_that_makes_no_sense_is_refused(values, error, message: str):
    with pytest.raises(error, match=message):
        sol_curve(QKV.q, QKV.k, values)


@pytest.mark.parametrize("values", [[-0.1, 0.5], [0.5, 1.01]])
def test_one_pass_serves_lambda_between_zero_and_one(values: list[float]):
    with pytest.raises(ValueError, match=r"thresholds=.*lambda in \[0, 1\]"):
        skip_curve(QKV.q, QKV.k, values)
