"""Density against a threshold from one pass, and the threshold for a wanted density."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from blockattn import checks, skip_gaps, sol_scores

REFINE_POINTS = 65
REFINE_ROUNDS = 5
SMALLEST = sys.float_info.min  # where a search for a skip threshold from 0 upwards starts

Evaluate = Callable[[list[float]], Tensor]
"""values -> density float64 [B, H, len(values)], without another pass over q and k."""


@dataclass(frozen=True)
class Curve:
    """Density of every head at a ladder of thresholds. It never rises with the threshold.

    Attributes:
        values: strictly rising taus (standard deviations) or skip thresholds (lambda, a ratio).
        per_head: float64 `[B, H, n]` exact pairs / valid pairs at each value.
        name: what a value is, `tau` or `threshold`.
        evaluate: density at any other values from the same pass, None when it was not kept.
    """

    values: list[float]
    per_head: Tensor
    name: str = "tau"
    evaluate: Evaluate | None = field(default=None, repr=False, compare=False)

    @cached_property
    def mean(self) -> Tensor:
        """float64 `[n]`: mean density of all heads and samples."""
        return self.per_head.flatten(0, -2).mean(dim=0)

    @property
    def reach(self) -> tuple[float, float]:
        """Smallest and largest mean density between the first and the last value."""
        return float(self.mean[-1]), float(self.mean[0])

    def solve(self, target_density: float) -> float:
        """The largest value whose mean density is still at least `target_density`.

        The curve is a staircase. Where the pass was kept (`evaluate`), the step is found to within
        1e-9 of the distance between two neighbours of the ladder (of their logarithms for skip
        thresholds), so the density delivered is the target's to within one step. Otherwise the
        value is interpolated linearly between the two neighbours.

        Raises:
            ValueError: the target lies outside what the ladder reaches, which the message gives.
        """
        target = checks.finite_number("target_density", target_density)
        low, high = self.reach
        if not low <= target <= high:
            raise ValueError(
                f"target_density={target_density!r}: {self.name} from {self.values[0]:g} to "
                f"{self.values[-1]:g} reaches densities {low:.4f} to {high:.4f}; choose one of "
                f"them, or a wider range of {self.name}"
            )
        last = int((self.mean >= target).nonzero()[-1])
        if last == len(self.values) - 1:
            return self.values[-1]
        if self.evaluate is None:
            return self._interpolated(last, target)
        return self._refined(self.evaluate, self.values[last], self.values[last + 1], target)

    def _interpolated(self, last: int, target: float) -> float:
        above, below = float(self.mean[last]), float(self.mean[last + 1])
        share = (above - target) / (above - below)
        return self.values[last] + share * (self.values[last + 1] - self.values[last])

    def _refined(self, evaluate: Evaluate, low: float, high: float, target: float) -> float:
        """Narrows the step down: the density reaches the target at `low` and not at `high`."""
        for _ in range(REFINE_ROUNDS):
            ladder = self._between(low, high)
            mean = evaluate(ladder).flatten(0, -2).mean(dim=0)
            last = int((mean >= target).nonzero()[-1])
            low, high = ladder[last], ladder[min(last + 1, REFINE_POINTS - 1)]
        return low

    def _between(self, low: float, high: float) -> list[float]:
        """Values from low to high: even for taus, by a constant factor for skip thresholds."""
        if self.name == "tau":
            return torch.linspace(low, high, REFINE_POINTS, dtype=torch.float64).tolist()
        exponents = torch.linspace(
            math.log2(max(low, SMALLEST)), math.log2(high), REFINE_POINTS, dtype=torch.float64
        )
        return [low, *exponents.exp2().tolist()[1:-1], high]

    @staticmethod
    def join(curves: Sequence[Curve]) -> Curve:
        """One curve over all the heads of several, along the batch axis: for a mean over layers.

        Raises:
            ValueError: no curve, or ladders that differ.
        """
        if not curves:
            raise ValueError("curves is empty: join at least one")
        first = curves[0]
        for other in curves[1:]:
            if (other.name, other.values) != (first.name, first.values):
                raise ValueError("curves: all must have the same name and values; compute them so")
        passes = [curve.evaluate for curve in curves]
        kept = [one for one in passes if one is not None]

        def evaluate(values: list[float]) -> Tensor:
            return torch.cat([one(values) for one in kept])

        per_head = torch.cat([curve.per_head for curve in curves])
        return Curve(
            first.values, per_head, first.name, evaluate if len(kept) == len(passes) else None
        )


def sol_curve(q: Tensor, k: Tensor, taus: Sequence[float], **routing: Any) -> Curve:
    """Density of Sol-Attn's route at every tau, from one scoring of the blocks.

    Args:
        q: `[B, T, Hq, D]`; k: `[B, T, Hk, D]`.
        taus: strictly rising, finite.
        routing: as for :func:`blockattn.sol_scores` (thresh_type, sink_tokens, scale, ...).

    Raises:
        TypeError, ValueError: an argument is not allowed.
    """
    values = rising("taus", taus)
    scores = sol_scores(q, k, **routing)

    def evaluate(ladder: list[float]) -> Tensor:
        return scores.density(ladder).cpu()

    return Curve(values, evaluate(values), "tau", evaluate)


def skip_curve(
    q: Tensor,
    k: Tensor,
    thresholds: Sequence[float],
    *,
    tile: tuple[int, int] = (128, 128),
    causal: bool = False,
    scale: float | Tensor | None = None,
) -> Curve:
    """Density that SkipSoftmax delivers at every threshold, from one pass over the scores.

    Args:
        q: `[B, Tq, Hq, D]`; k: `[B, Tk, Hk, D]`.
        thresholds: lambda, strictly rising, each in [0, 1].
        tile, causal, scale: as for :func:`blockattn.skip_gaps`.

    Raises:
        TypeError, ValueError: an argument is not allowed.
    """
    values = rising("thresholds", thresholds)
    if values[0] < 0 or values[-1] > 1:
        raise ValueError(
            f"thresholds={list(thresholds)!r}: one pass serves lambda in [0, 1]; "
            "divide a threshold_scale_factor by the number of keys"
        )
    gaps = skip_gaps(q, k, scale=scale, causal=causal, tile=tile)

    def evaluate(ladder: list[float]) -> Tensor:
        return 1 - gaps.sparsity(ladder).cpu()

    return Curve(values, evaluate(values), "threshold", evaluate)


def rising(name: str, values: Sequence[float]) -> list[float]:
    """A non-empty list of finite, strictly rising numbers."""
    numbers = [checks.finite_number(f"{name}[{n}]", value) for n, value in enumerate(values)]
    if not numbers:
        raise ValueError(f"{name} is empty: give at least one value")
    if any(later <= earlier for earlier, later in pairwise(numbers)):
        raise ValueError(f"{name}={numbers}: must rise strictly; sort it and drop repeats")
    return numbers
