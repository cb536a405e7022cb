"""The exponential fit: coefficients, domain, minimum of points, and how far it carries."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.calibrate_inputs import made_calibration, small_calibration
from workbench.calibrate.fit import (
    TRIALS,
    fit_calibration,
    fit_exponential,
    fit_points,
    transfer,
)
from workbench.calibrate.samples import Samples
from workbench.config.formula import Formula

SPARSITY = np.linspace(0.1, 0.9, 17)
SHORT = Samples(("ring",), (1, 2), grid=(8, 16, 16), steps=1)  # 2,048 keys: 256 tiles
LONG = Samples(("ring",), (3,), grid=(16, 16, 32), steps=1)  # 8,192 keys: 4,096 tiles


@pytest.mark.parametrize("space", ["log", "linear"])
@pytest.mark.parametrize(
    ("a", "b"), [(1443.4853294366435, 4.303654042880227), (7.93, 8.61), (0.12, 9.85)]
)
def test_points_on_a_curve_give_its_coefficients(space: str, a: float, b: float):
    fit = fit_exponential(SPARSITY, a * np.exp(b * SPARSITY), space=space)
    assert fit.a == pytest.approx(a, rel=1e-6)
    assert fit.b == pytest.approx(b, rel=1e-6)
    assert fit.r2_log == pytest.approx(1.0, abs=1e-9)
    assert np.abs(fit.residuals).max() < 1e-6


def test_a_published_set_of_coefficients_at_half_sparsity():
    a, b = 1443.4853294366435, 4.303654042880227
    fit = fit_exponential(SPARSITY, a * np.exp(b * SPARSITY))
    assert fit.predict(0.5) == pytest.approx(12414.78, rel=1e-6)


@given(seed=st.integers(0, 500), noise=st.floats(0.01, 0.3))
def test_least_squares_leaves_residuals_orthogonal_to_what_the_coefficients_move(
    seed: int, noise: float
):
    generator = np.random.default_rng(seed)
    y = 20 * np.exp(6 * SPARSITY + noise * generator.standard_normal(len(SPARSITY)))
    log, linear = (fit_exponential(SPARSITY, y, space=space) for space in ("log", "linear"))
    design = np.stack([np.ones_like(SPARSITY), SPARSITY], axis=1)
    theirs = np.linalg.solve(design.T @ design, design.T @ np.log(y))
    assert (math.log(log.a), log.b) == pytest.approx(tuple(theirs), rel=1e-9)
    gap = y - linear.curve(SPARSITY)
    curve = np.exp(linear.b * SPARSITY)
    for direction in (curve, linear.a * SPARSITY * curve):
        cosine = gap @ direction / (np.linalg.norm(gap) * np.linalg.norm(direction))
        assert abs(cosine) < 1e-5
    assert linear.r2_linear >= log.r2_linear - 1e-12
    assert log.r2_log >= linear.r2_log - 1e-12


def test_only_sparsities_from_a_tenth_to_nine_tenths_are_fitted():
    x = np.array([0.0, 0.05, 0.0999, 0.1, 0.3, 0.5, 0.7, 0.9, 0.9001, 0.95, 1.0])
    y = np.where((x >= 0.1) & (x <= 0.9), 3 * np.exp(5 * x), 1e9)
    fit = fit_exponential(x, y)
    assert (fit.b, fit.dropped, fit.domain) == (pytest.approx(5.0), 6, (0.1, 0.9))


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.linspace(0.2, 0.8, 9), "9 points, 9 of them"),
        (np.array([0.0] * 8 + [0.5, 0.6]), "10 points, 2 of them"),
        (np.full(12, 0.4), "all points lie at sparsity 0.4"),
    ],
)
def test_too_few_points_are_an_error(x: np.ndarray, message: str):
    with pytest.raises(ValueError, match=message):
        fit_exponential(x, np.linspace(1, 2, len(x)))


def test_numbers_that_are_no_factors_are_refused():
    for y in (np.zeros(17), np.full(17, np.nan), np.ones(16)):
        with pytest.raises(ValueError, match="equally many finite numbers, factors above 0"):
            fit_exponential(SPARSITY, y)
    with pytest.raises(ValueError, match="space='cubic'"):
        fit_exponential(SPARSITY, np.exp(SPARSITY), space="cubic")


def test_extrapolation_is_refused_unless_asked_for():
    x = np.linspace(0.3, 0.6, 12)
    fit = fit_exponential(x, 3 * np.exp(5 * x))
    for outside in (0.29, 0.61):
        with pytest.raises(ValueError, match=r"has seen 0\.300 to 0\.600 only"):
            fit.predict(outside)
        assert fit.predict(outside, extrapolate=True) == pytest.approx(3 * math.exp(5 * outside))
    assert fit.predict(0.3) == pytest.approx(3 * math.exp(1.5))


@pytest.mark.parametrize("space", ["log", "linear"])
def test_the_formula_evaluates_to_the_fit(space: str):
    fit = fit_exponential(SPARSITY, 5 * np.exp(3 * SPARSITY), space=space)
    written = fit.formula()
    values = {**written["coefficients"], "target_sparsity": 0.4}  # pyright: ignore[reportGeneralTypeIssues]
    assert Formula(str(written["formula"]))(values) == pytest.approx(fit.predict(0.4))


def gaps(samples: Samples, log_a: float, b: float) -> torch.Tensor:
    """Gaps in log2(lambda) of which a share s lies below ln(factor) = log_a + b * s."""
    tiles = (samples.tokens // 128) ** 2
    share = (torch.arange(tiles, dtype=torch.float64) + 0.5) / tiles
    log2 = (log_a + b * share - math.log(samples.tokens)) / math.log(2)
    return log2.float().expand(len(samples.videos), 1, 1, 1, 1, tiles)


def test_a_calibration_gives_a_point_for_each_video_and_trial():
    calibration = made_calibration(gaps(SHORT, 0.0, 6.0), SHORT)
    sparsity, factor = fit_points(calibration)
    assert len(sparsity) == len(factor) == 2 * len(TRIALS)
    inside = (sparsity > 0.02) & (sparsity < 0.98)
    assert sparsity[inside] == pytest.approx(np.log(factor[inside]) / 6.0, abs=0.5 / 256 + 1e-6)


def test_a_fit_carries_over_where_the_law_is_the_same_and_not_where_it_differs():
    fit = fit_calibration(made_calibration(gaps(SHORT, 0.0, 6.0), SHORT))
    same = transfer(fit, made_calibration(gaps(LONG, 0.0, 6.0), LONG))
    other = transfer(fit, made_calibration(gaps(LONG, 1.2, 6.0), LONG))
    assert same.worst < 0.02
    assert other.mean == pytest.approx(0.2, abs=0.02)  # 1.2 / 6: a shift of the factor, by hand
    assert (same.source, same.target) != (None, fit.source)
    assert (str(same.source), str(same.target)) == (
        "2,048 keys (grid 8 x 16 x 16)",
        "8,192 keys (grid 16 x 16 x 32)",
    )


def test_factors_beyond_the_number_of_keys_are_counted_not_hidden():
    fit = fit_calibration(made_calibration(gaps(LONG, 0.0, 10.0), LONG))
    tried = transfer(fit, made_calibration(gaps(SHORT, 0.0, 6.0), SHORT), points=9)
    assert tried.beyond == sum(fit.curve(x) > 2048 for x in np.linspace(*fit.domain, 9)) > 0
    assert len(tried.requested) == 9 - tried.beyond


def test_sol_attn_has_no_such_formula():
    with pytest.raises(ValueError, match="of sol_attn, but the formula"):
        fit_points(small_calibration("sol_attn"))
