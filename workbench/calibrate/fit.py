"""The exponential that servers evaluate: factor = a * exp(b * sparsity), and how far it carries.

Only points with a sparsity in [0.1, 0.9] are fitted, as Model-Optimizer does. Linear space
minimises the error of the factor, which its largest values dominate; log space minimises the error
of its logarithm, which suits factors that span decades. Outside the sparsities that were seen a fit
is an extrapolation and says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from blockattn import checks
from workbench.calibrate.collect import Calibration

KEPT = (0.10, 0.90)
MIN_POINTS, MIN_KEPT = 10, 3
TRIALS = np.geomspace(1e-6, 0.99, 20)  # lambda
MAX_B = 20.0
SPACES = ("linear", "log")


@dataclass(frozen=True)
class Size:
    """Sequence length of a calibration: keys of a call, and the grid of tokens (t, h, w)."""

    keys: int
    grid: tuple[int, int, int]

    def __str__(self) -> str:
        return f"{self.keys:,} keys (grid {' x '.join(map(str, self.grid))})"


@dataclass(frozen=True)
class ExponentialFit:
    """factor = a * exp(b * sparsity).

    Attributes:
        a, b: coefficients. space: ``linear`` or ``log``, in which it was fitted.
        sparsity, factor: the points that were fitted.
        r2: coefficient of determination in its own space; r2_log, r2_linear: in each.
        dropped: points outside [0.1, 0.9].
        source: sequence length and grid of the points, ``None`` when they are not of one.
    """

    a: float
    b: float
    space: str
    sparsity: NDArray[np.float64]
    factor: NDArray[np.float64]
    dropped: int
    source: Size | None = None

    @property
    def domain(self) -> tuple[float, float]:
        """Smallest and largest sparsity that was fitted."""
        return float(self.sparsity.min()), float(self.sparsity.max())

    @property
    def residuals(self) -> NDArray[np.float64]:
        """ln(factor) - ln(fit) of every point: 0.1 is about 10 % of the factor."""
        return np.log(self.factor) - np.log(self.curve(self.sparsity))

    @property
    def r2(self) -> float:
        return self.r2_log if self.space == "log" else self.r2_linear

    @property
    def r2_log(self) -> float:
        return r_squared(np.log(self.factor), np.log(self.curve(self.sparsity)))

    @property
    def r2_linear(self) -> float:
        return r_squared(self.factor, self.curve(self.sparsity))

    def curve(self, sparsity: ArrayLike) -> NDArray[np.float64]:
        """The factor at any sparsity, without a check: for drawing."""
        return self.a * np.exp(self.b * np.asarray(sparsity, dtype=float))

    def predict(self, sparsity: float, *, extrapolate: bool = False) -> float:
        """threshold_scale_factor for a target sparsity.

        Raises:
            ValueError: outside the fitted sparsities, unless `extrapolate`.
        """
        target = checks.finite_number("sparsity", sparsity)
        low, high = self.domain
        if not extrapolate and not low <= target <= high:
            raise ValueError(
                f"sparsity={target:g}: the fit has seen {low:.3f} to {high:.3f} only; choose one "
                "of these, calibrate further, or pass extrapolate=True"
            )
        return float(self.curve(target))

    def formula(self) -> dict[str, object]:
        """As checkpoints hold it: text of the formula, and its coefficients."""
        if self.space == "log":
            coefficients = {"log_a": float(np.log(self.a)), "b": self.b}
            return {"formula": "exp(log_a + b * target_sparsity)", "coefficients": coefficients}
        coefficients = {"a": self.a, "b": self.b}
        return {"formula": "a * exp(b * target_sparsity)", "coefficients": coefficients}

    def checkpoint_config(self) -> dict[str, object]:
        """The part of a component's config.json that servers read the formula from."""
        group = {"algorithm": "skip_softmax", "threshold_scale_factor": self.formula()}
        return {"sparse_attention_config": {"config_groups": {"group_0": group}}}


@dataclass(frozen=True)
class Transfer:
    """What a fit delivers at another sequence length or resolution.

    Attributes:
        source, target: where the fit and the trial come from.
        requested, delivered: sparsities.
        beyond: requested sparsities left out, because their lambda is above 1 there.
    """

    source: Size | None
    target: Size
    requested: NDArray[np.float64]
    delivered: NDArray[np.float64]
    beyond: int = 0

    @property
    def worst(self) -> float:
        """Largest absolute difference of sparsity."""
        return float(np.abs(self.delivered - self.requested).max())

    @property
    def mean(self) -> float:
        """Mean absolute difference of sparsity."""
        return float(np.abs(self.delivered - self.requested).mean())


def fit_exponential(
    sparsity: ArrayLike, factor: ArrayLike, *, space: str = "log", source: Size | None = None
) -> ExponentialFit:
    """Fits a * exp(b * sparsity) by least squares.

    Args:
        sparsity, factor: ``[n]`` points; factors above 0.
        space: ``linear`` (a >= 0, b in [0, 20]) or ``log``.
        source: where the points come from.

    Raises:
        ValueError: fewer than 10 points, fewer than 3 within sparsity 0.1 to 0.9, or all of them
            at one sparsity.
    """
    checks.one_of("space", space, SPACES)
    x, y = (np.asarray(values, dtype=float).ravel() for values in (sparsity, factor))
    if x.shape != y.shape or not (np.isfinite(x).all() and np.isfinite(y).all() and (y > 0).all()):
        raise ValueError(
            "sparsity and factor: must be equally many finite numbers, factors above 0"
        )
    kept = (x >= KEPT[0]) & (x <= KEPT[1])
    _check_counts(len(x), int(kept.sum()), x[kept])
    fit = _fit_log if space == "log" else _fit_linear
    a, b = fit(x[kept], y[kept])
    return ExponentialFit(a, b, space, x[kept], y[kept], int((~kept).sum()), source)


def fit_points(
    calibration: Calibration, trials: Sequence[float] | NDArray[np.float64] = TRIALS
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Points of a SkipSoftmax calibration: one for each video and trial lambda.

    Returns:
        Sparsity, averaged over layers, steps and heads, and threshold_scale_factor: ``[n]`` each.

    Raises:
        ValueError: a calibration of another algorithm, which has no such formula.
    """
    _check_algorithm(calibration)
    rows = [_sparsity(calibration, float(trial)) for trial in trials]
    factors = np.asarray(trials, dtype=float) * calibration.samples.tokens
    sparsity = np.stack(rows)  # [trials, videos]
    return sparsity.ravel(), np.repeat(factors, sparsity.shape[1])


def fit_calibration(calibration: Calibration, *, space: str = "log") -> ExponentialFit:
    """The fit of a SkipSoftmax calibration over all its videos."""
    return fit_exponential(*fit_points(calibration), space=space, source=size_of(calibration))


def transfer(fit: ExponentialFit, other: Calibration, *, points: int = 9) -> Transfer:
    """Sparsity that the fit's factors deliver on a calibration of another length or resolution.

    Args:
        fit: its own domain is tried, evenly.
        other: a SkipSoftmax calibration. Where lambda = factor / keys would exceed 1, one pass
            cannot tell; such points are counted in `beyond`.

    Raises:
        ValueError: another algorithm, or no factor of the fit is below the number of keys.
    """
    _check_algorithm(other)
    requested = np.linspace(*fit.domain, points)
    trials = fit.curve(requested) / other.samples.tokens
    usable = trials <= 1
    if not usable.any():
        raise ValueError(
            f"other: {other.samples.tokens:,} keys, but the fit's factors start at "
            f"{fit.curve(requested[0]):.4g}: lambda is above 1; use a longer sequence"
        )
    delivered = np.array([_sparsity(other, float(trial)).mean() for trial in trials[usable]])
    beyond = int((~usable).sum())
    return Transfer(fit.source, size_of(other), requested[usable], delivered, beyond)


def size_of(calibration: Calibration) -> Size:
    """Keys and grid of a calibration."""
    return Size(calibration.samples.tokens, calibration.samples.grid)


def r_squared(values: NDArray[np.float64], fitted: NDArray[np.float64]) -> float:
    """1 - residual / total sum of squares."""
    total = float(np.square(values - values.mean()).sum())
    return 1 - float(np.square(values - fitted).sum()) / total if total else float("nan")


def _check_algorithm(calibration: Calibration) -> None:
    if calibration.algorithm != "skip_softmax":
        raise ValueError(
            f"calibration: of {calibration.algorithm}, but the formula a * exp(b * sparsity) is "
            "skip_softmax's; solve a level of the other directly"
        )


def _sparsity(calibration: Calibration, trial: float) -> NDArray[np.float64]:
    """Sparsity of every video at lambda, ``[videos]``."""
    level = torch.tensor(trial, dtype=torch.float64).log2()
    return (1 - calibration.density(level).flatten(1).mean(dim=1)).numpy()


def _check_counts(points: int, kept: int, sparsity: NDArray[np.float64]) -> None:
    if points < MIN_POINTS or kept < MIN_KEPT:
        raise ValueError(
            f"{points} points, {kept} of them with a sparsity in [{KEPT[0]}, {KEPT[1]}]: a fit "
            f"needs {MIN_POINTS} and {MIN_KEPT}; try more thresholds or sample more videos"
        )
    if np.ptp(sparsity) == 0:
        raise ValueError(
            f"all points lie at sparsity {sparsity[0]:g}, which fixes no curve; "
            "try other thresholds"
        )


def _fit_log(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[float, float]:
    b, log_a = np.polyfit(x, np.log(y), 1)
    return float(np.exp(log_a)), float(b)


def _fit_linear(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[float, float]:
    """For every b the best a has a closed form, so that only b is searched, over all it may be."""
    low, high = 0.0, MAX_B
    for _ in range(8):  # each round narrows the bracket 50 times
        grid = np.linspace(low, high, 101)
        losses = [_loss(x, y, b) for b in grid]
        best = int(np.argmin(losses))
        low, high = grid[max(best - 1, 0)], grid[min(best + 1, 100)]
    b = float(grid[best])
    return _best_a(x, y, b), b


def _best_a(x: NDArray[np.float64], y: NDArray[np.float64], b: float) -> float:
    curve = np.exp(b * x)
    return float(curve @ y / (curve @ curve))


def _loss(x: NDArray[np.float64], y: NDArray[np.float64], b: float) -> float:
    return float(np.square(y - _best_a(x, y, b) * np.exp(b * x)).sum())
