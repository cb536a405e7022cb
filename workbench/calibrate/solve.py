"""From a target density to the levels that deliver it on the dense trajectory, by bisection.

The density of a calibration is a falling staircase in every level, so bisection ends at the step
that crosses the target: the sparsest level whose mean density is not below it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from blockattn import checks
from workbench.calibrate.collect import Calibration
from workbench.calibrate.setting import Form, Setting

ROUNDS = 60  # halvings: the bracket ends below the rounding of a float32 level
ROUNDING = 1e-12  # of a mean of densities, whose order of summation is not fixed
MARGIN = 0.01  # largest step down from the edge of a plateau of equal densities
LOW = {"sol_attn": -1.0e4, "skip_softmax": -2.0e3}  # every pair exact: see blockattn.sol
HIGH = {"sol_attn": 1.0e4, "skip_softmax": 0.0}  # one pass serves lambda up to 1

Mean = Callable[[Tensor], Tensor]
"""levels [layers, steps] -> density of every call, float64 [layers, steps]."""


@dataclass(frozen=True)
class Solution:
    """A setting for a density.

    Attributes:
        setting: what to run.
        requested: mean density asked for in every group.
        predicted: what the calibration's own calls deliver, a number for each group.
        overall: predicted mean over all calls, intended dense ones (density 1) included.
        bound: largest error of a predicted density; 0 when all scores were kept.
    """

    setting: Setting
    requested: float
    predicted: tuple[float, ...]
    overall: float
    bound: float


def target_density(density: float | None = None, sparsity: float | None = None) -> float:
    """One of the two as a density.

    Raises:
        TypeError, ValueError: none or both, or a number outside [0, 1].
    """
    if (density is None) == (sparsity is None):
        raise ValueError(
            f"target_density={density!r}, target_sparsity={sparsity!r}: give exactly one of them"
        )
    name, value = ("density", density) if sparsity is None else ("sparsity", sparsity)
    number = checks.finite_number(f"target_{name}", value)
    if not 0 <= number <= 1:
        raise ValueError(f"target_{name}={number!r}: must be in [0, 1]")
    return number if sparsity is None else 1 - number


def solve_density(
    calibration: Calibration,
    target: float,
    form: Form | None = None,
    *,
    drift: float | Tensor = 0.0,
) -> Solution:
    """Levels whose groups each have the target as their mean density, on the calibration's calls.

    Args:
        calibration: of the model.
        target: mean density of the sparse calls of every group, in [0, 1].
        form: which levels there are; one global level by default.
        drift: density that a free run delivers more than the calibration predicts, for each group;
            the levels are solved for ``target - drift``.

    Raises:
        ValueError: out of reach, with the range; or no call is sparse.
    """
    form = form or Form()
    times, layers = calibration.samples.times, calibration.layers
    groups = form.group_map(layers, times)
    if bool((groups < 0).all()):
        raise ValueError("dense_layers and cutoff leave no call sparse; make one of them smaller")
    _check_layers(form, layers)
    count = form.groups(layers)
    wanted = torch.full((count,), target, dtype=torch.float64) - drift
    offsets = form.offsets(times)
    mean = calls_mean(calibration)
    low, high = _bracket(
        calibration.algorithm, form, mean, groups, wanted, times=times, target=target
    )

    def density(levels: Tensor) -> Tensor:
        return by_group(mean(spread(levels, groups, offsets)), groups, count)

    edge = bisect(low, high, lambda levels: density(levels) >= wanted - ROUNDING)
    reached = density(edge)
    denser = bisect(low, edge, lambda levels: density(levels) > reached + ROUNDING)
    # At the edge itself a score ties with the level, and rounding would decide.
    levels = edge - ((edge - denser) / 2).clamp(max=MARGIN)
    return solution(calibration, form, _shortest(levels, groups, offsets, mean), target)


def solution(calibration: Calibration, form: Form, levels: Tensor, requested: float) -> Solution:
    """What the calibration predicts for levels, one for each group."""
    times, layers = calibration.samples.times, calibration.layers
    groups = form.group_map(layers, times)
    used = [bool((groups == group).any()) for group in range(len(levels))]
    values = tuple(
        float(level) if sparse else math.nan for level, sparse in zip(levels, used, strict=True)
    )
    setting = Setting(calibration.algorithm, form, values, calibration.thresh_type)
    density = calls_mean(calibration)(setting.level_map(layers, times))
    predicted = tuple(by_group(density, groups, len(levels)).tolist())
    return Solution(setting, requested, predicted, float(density.mean()), calibration.table.bound)


def bisect(low: Tensor, high: Tensor, good: Callable[[Tensor], Tensor]) -> Tensor:
    """The highest levels that are still good, one for each group.

    Args:
        low, high: float64 ``[groups]``; low is good.
        good: levels -> bool ``[groups]``, true up to a point and false from there on.
    """
    if bool(good(high).all()):
        return high
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        enough = good(middle)
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    return low


def calls_mean(calibration: Calibration) -> Mean:
    """Mean density over videos, batch and heads of every call; 1 where the level is -inf."""

    def mean(levels: Tensor) -> Tensor:
        density = calibration.density(levels).mean(dim=(0, 3, 4))
        return torch.where(levels == -math.inf, torch.ones_like(density), density)

    return mean


def spread(levels: Tensor, groups: Tensor, offsets: Tensor) -> Tensor:
    """Level of every call from those of the groups; dense ones are -inf."""
    return (levels[groups.clamp(min=0)] + offsets).masked_fill(groups < 0, -math.inf)


def by_group(density: Tensor, groups: Tensor, count: int) -> Tensor:
    """Mean over the sparse calls of each group, NaN without one."""
    member = torch.stack([groups == group for group in range(count)]).double()
    return (member * density).sum(dim=(1, 2)) / member.sum(dim=(1, 2))


def _shortest(levels: Tensor, groups: Tensor, offsets: Tensor, mean: Mean) -> Tensor:
    """The levels with the fewest digits that make exactly the same densities."""
    wanted = mean(spread(levels, groups, offsets))
    for digits in range(3, 10):
        short = torch.tensor(
            [float(f"{x:.{digits}g}") for x in levels.tolist()], dtype=torch.float64
        )
        if torch.equal(mean(spread(short, groups, offsets)), wanted):
            return short
    return levels


def _check_layers(form: Form, layers: int) -> None:
    beyond = [layer for layer in form.dense_layers if layer >= layers]
    if beyond:
        raise ValueError(f"dense_layers has {beyond}: the model's {layers} layers count from 0")


def _bracket(
    algorithm: str,
    form: Form,
    mean: Mean,
    groups: Tensor,
    wanted: Tensor,
    *,
    times: list[float],
    target: float,
) -> tuple[Tensor, Tensor]:
    """Levels at which every group is denser and sparser than wanted.

    Raises:
        ValueError: a group cannot be, with what it reaches.
    """
    offsets, count = form.offsets(times), len(wanted)
    ends = [torch.full((count,), end[algorithm], dtype=torch.float64) for end in (LOW, HIGH)]
    if algorithm == "skip_softmax":
        ends[1] -= float(offsets.max())  # lambda stays at most 1 along the whole schedule
    most, least = (by_group(mean(spread(end, groups, offsets)), groups, count) for end in ends)
    for group in range(count):
        low, high = float(least[group]), float(most[group])
        if not (math.isnan(low) or low - ROUNDING <= float(wanted[group]) <= high + ROUNDING):
            why = (
                "band blocks are always exact" if algorithm == "sol_attn" else "lambda is at most 1"
            )
            need = float(wanted[group])
            drifted = (
                "" if need == target else f" takes {need:.4f} on dense calls, as free runs drift;"
            )
            raise ValueError(
                f"target_density={target:.4f} for {form.group_name(group)}:{drifted} the "
                f"calibration reaches {low:.4f} to {high:.4f} ({why}); choose a density in between"
            )
    return ends[0], ends[1]
