"""What a setting does on average, and whether that is more than the control does.

Every case is paired with the control of its seed, prompt and sampler: what differs between seeds
and prompts drops out of the difference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from workbench.quality import Statistics, over_seeds
from workbench.sweep.table import SweepCase, SweepTable

RESAMPLES, CONFIDENCE, SEED = 10_000, 0.95, 0
FEWEST = 3  # pairs; of two, resampling knows three values only


@dataclass(frozen=True)
class Paired:
    """A metric of one setting over seeds x prompts.

    Attributes:
        setting, metric: which.
        values: of the setting itself; ``None`` when none is finite.
        difference: setting - control, pair by pair, over the finite ones.
        interval: 95 % bootstrap interval of the mean difference; ``None`` below 3 pairs.
        left_out: pairs without a finite difference, such as the PSNR of equal videos.
    """

    setting: str
    metric: str
    values: Statistics | None
    difference: Statistics | None
    interval: tuple[float, float] | None
    left_out: int

    @property
    def differs(self) -> bool:
        """Whether the interval leaves out zero; also ``False`` when there is no interval."""
        return self.interval is not None and not self.interval[0] <= 0 <= self.interval[1]


def compare(table: SweepTable, setting: str, metric: str) -> Paired:
    """Compares a setting with its controls in one metric.

    Cases that failed, or whose control did, are in no pair; the numbers of values say so.

    Raises:
        KeyError: no such setting or metric.
    """
    if metric not in table.metrics:
        raise KeyError(f"metric={metric!r}: must be one of {', '.join(table.metrics)}")
    done = [case for case in table.of(setting) if metric in case.metrics]
    values = [case.metrics[metric] for case in done]
    pairs = _differences(table, done, metric)
    finite = [value for value in pairs if math.isfinite(value)]
    return Paired(
        setting,
        metric,
        _summary([value for value in values if math.isfinite(value)]),
        _summary(finite),
        bootstrap(finite) if len(finite) >= FEWEST else None,
        len(pairs) - len(finite),
    )


def bootstrap(values: Sequence[float]) -> tuple[float, float]:
    """Percentile interval of the mean, by resampling (Efron 1979); the same at every call.

    It takes the pairs as independent. Two prompts of one seed start from one noise, so the interval
    of a few seeds with many prompts is too narrow.

    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError("values: is empty; give one for each pair")
    data = np.asarray(values, dtype=np.float64)
    chosen = np.random.default_rng(SEED).integers(0, data.size, size=(RESAMPLES, data.size))
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(data[chosen].mean(axis=1), [tail, 100 - tail])
    return float(low), float(high)


def _differences(table: SweepTable, cases: Sequence[SweepCase], metric: str) -> list[float]:
    found = []
    for case in cases:
        control = table.control_of(case)
        if metric in control.metrics:
            found.append(case.metrics[metric] - control.metrics[metric])
    return found


def _summary(values: Sequence[float]) -> Statistics | None:
    return over_seeds(values) if values else None
