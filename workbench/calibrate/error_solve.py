"""From a target error to a setting: real calls at a ladder of levels, then the same bisection.

One sampling per video runs every call at each level of the ladder and returns dense, so errors do
not compound. Between the levels the error of a head is interpolated along its running maximum: a
sparse level that is lucky beyond a bad one is not taken.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blockattn import checks
from workbench.calibrate.collect import Calibration
from workbench.calibrate.probes import Probes, probe_call, probe_setting
from workbench.calibrate.samples import Samples, Tick
from workbench.calibrate.setting import Form, Setting, knob
from workbench.calibrate.solve import (
    HIGH,
    bisect,
    by_group,
    calls_mean,
    solve_density,
    spread,
)
from workbench.models import AttentionCall, VideoDiT, dense_attention

LADDER = 7  # levels at which real calls run
ROUNDS = 3  # of solving, each verified by real calls


@dataclass(frozen=True)
class ErrorLadder:
    """Relative L2 error of real calls at rising levels.

    Attributes:
        levels: rising. errors: float64 ``[levels, layers, steps]``, mean over videos and heads of
            each one's running maximum.
    """

    levels: Tensor
    errors: Tensor

    def at(self, levels: Tensor) -> Tensor:
        """Error of every call, interpolated: float64 ``[layers, steps]``; 0 at -inf (dense)."""
        dense = levels == -math.inf
        inside = levels.masked_fill(dense, 0.0).clamp(float(self.levels[0]), float(self.levels[-1]))
        right = torch.searchsorted(self.levels, inside).clamp(1, len(self.levels) - 1)
        low, high = self.levels[right - 1], self.levels[right]
        share = (inside - low) / (high - low)
        below, above = (self.errors.gather(0, n[None])[0] for n in (right - 1, right))
        return torch.where(dense, torch.zeros_like(below), below + share * (above - below))


@dataclass(frozen=True)
class ErrorSolution:
    """A setting for an error.

    Attributes:
        setting: what to run.
        requested: largest mean relative L2 error of every group.
        predicted: interpolated from the ladder, a number for each group (NaN: no sparse call).
        delivered: of real calls at the setting, likewise.
        density: predicted mean over all calls, dense ones included.
    """

    setting: Setting
    requested: float
    predicted: tuple[float, ...]
    delivered: tuple[float, ...]
    density: float


def error_ladder(
    model: VideoDiT,
    calibration: Calibration,
    *,
    points: int = LADDER,
    impl: str = "auto",
    tick: Tick = lambda label: None,
) -> ErrorLadder:
    """Runs real calls at levels whose densities lie evenly between dense and the sparsest.

    Args:
        model: that was calibrated; the calibration's own videos are sampled once more.
        points: levels, at least 2.
        impl: implementation of the sparse calls.
        tick: called when a video begins.
    """
    checks.integer("points", points, minimum=2)
    levels = _levels(calibration, points)
    setting = Setting(calibration.algorithm, Form(), (0.0,), calibration.thresh_type)
    samples = calibration.samples
    total = torch.zeros(len(levels), calibration.layers, samples.steps, dtype=torch.float64)

    def attention(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
        dense = dense_attention(q, k, v, call)
        values = [knob(setting.algorithm, level) for level in levels]
        errors = [
            probe_call(setting, value, q, k, v, dense=dense, impl=impl).error.relative_l2
            for value in values
        ]
        total[:, call.layer, call.step or 0] += (
            torch.stack(errors).cummax(dim=0).values.mean((1, 2))
        )
        return dense

    for index, (label, seed) in enumerate(samples.videos):
        tick(f"{label}, seed {seed}")
        samples.run(model, index, attention)
    return ErrorLadder(torch.tensor(levels, dtype=torch.float64), total / len(samples.videos))


def solve_error(
    model: VideoDiT,
    calibration: Calibration,
    target: float,
    form: Form | None = None,
    *,
    ladder: ErrorLadder | None = None,
    impl: str = "auto",
    tick: Tick = lambda label: None,
) -> ErrorSolution:
    """The sparsest levels whose groups each have at most the target as their mean error.

    Every solution is verified by real calls on the calibration's videos, and solved again with what
    the interpolation missed.

    Args:
        model: that was calibrated.
        target: mean relative L2 error against dense, above 0.
        form: which levels there are.
        ladder: of :func:`error_ladder`; measured when None.
        impl: implementation of the sparse calls.
        tick: called when a video begins.

    Returns:
        The last solution; ``delivered`` says whether it met the target after three rounds.

    Raises:
        ValueError: already the densest level of the ladder exceeds the target.
    """
    if checks.finite_number("target_error", target) <= 0:
        raise ValueError(f"target_error={target!r}: must be above 0")
    form = form or Form()
    ladder = ladder or error_ladder(model, calibration, impl=impl, tick=tick)
    allowed, rounds = target, 1
    while True:
        setting, predicted = _solve(calibration, ladder, form, allowed)
        found = _verify(model, calibration, setting, target, predicted, impl=impl, tick=tick)
        worst = max(error for error in found.delivered if not math.isnan(error))
        if worst <= target or rounds == ROUNDS:
            return found
        allowed, rounds = allowed * target / worst, rounds + 1


def error_by_group(probes: Probes, setting: Setting, layers: int, samples: Samples) -> Tensor:
    """Mean relative L2 error of every group of a setting, float64 ``[groups]``, NaN without one."""
    errors = torch.from_numpy(probes.table("relative_l2"))
    full = torch.full((layers, samples.steps), math.nan, dtype=torch.float64)
    full[: errors.shape[0], : errors.shape[1]] = errors
    groups = setting.form.group_map(layers, samples.times)
    return by_group(full.nan_to_num(), groups, len(setting.levels))


def _levels(calibration: Calibration, points: int) -> list[float]:
    least = _least_density(calibration)
    sparsest = least + 0.01 * (1 - least)  # at the least itself any higher level would do
    targets = torch.linspace(1.0, sparsest, points + 1, dtype=torch.float64)[1:].tolist()
    found = {solve_density(calibration, target).setting.levels[0] for target in targets}
    if len(found) < 2:
        raise ValueError(
            f"calibration: sequences of {calibration.samples.tokens} tokens have too few blocks "
            "for a ladder of errors; sample a larger grid"
        )
    return sorted(found)


def _least_density(calibration: Calibration) -> float:
    """Mean density of all calls at the sparsest level there is."""
    shape = (calibration.layers, calibration.samples.steps)
    levels = torch.full(shape, HIGH[calibration.algorithm], dtype=torch.float64)
    return float(calls_mean(calibration)(levels).mean())


def _solve(
    calibration: Calibration, ladder: ErrorLadder, form: Form, target: float
) -> tuple[Setting, Sequence[float]]:
    times, layers = calibration.samples.times, calibration.layers
    groups, offsets = form.group_map(layers, times), form.offsets(times)
    count = form.groups(layers)

    def error(levels: Tensor) -> Tensor:
        found = by_group(ladder.at(spread(levels, groups, offsets)), groups, count)
        return found.nan_to_num(nan=0.0)

    ends = float(ladder.levels[0]) - float(offsets.max()), float(ladder.levels[-1])
    low, high = (torch.full((count,), end, dtype=torch.float64) for end in ends)
    high = high - float(offsets.max())
    if bool((error(low) > target).any()):
        worst = float(error(low).max())
        raise ValueError(
            f"target_error: a mean error of {target:.4g} is out of reach, the densest level tried "
            f"has {worst:.4g}; allow more error, or keep more layers or steps dense"
        )
    levels = bisect(low, high, lambda x: error(x) <= target)
    used = [bool((groups == group).any()) for group in range(count)]
    values = [float(x) if sparse else math.nan for x, sparse in zip(levels, used, strict=True)]
    predicted = error(levels).masked_fill(~torch.tensor(used), math.nan)
    setting = Setting(calibration.algorithm, form, tuple(values), calibration.thresh_type)
    return setting, predicted.tolist()


def _verify(
    model: VideoDiT,
    calibration: Calibration,
    setting: Setting,
    target: float,
    predicted: Sequence[float],
    *,
    impl: str,
    tick: Tick,
) -> ErrorSolution:
    samples, layers = calibration.samples, calibration.layers
    probes = probe_setting(model, setting, samples, mass=False, impl=impl, tick=tick)
    delivered = error_by_group(probes, setting, layers, samples)
    density = calls_mean(calibration)(setting.level_map(layers, samples.times))
    return ErrorSolution(
        setting, target, tuple(predicted), tuple(delivered.tolist()), float(density.mean())
    )
