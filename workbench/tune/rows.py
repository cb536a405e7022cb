"""What one head gave at one value, and what all of them gave: rows of results, table lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Row:
    """One head, by the model's number, at one value. Times (ms) are of the call with all heads."""

    layer: int
    step: int
    time: float
    batch: int
    head: int
    value: float
    density: float
    density_delivered: float
    density_alone: float | None
    relative_l2: float
    cosine: float
    max_abs: float
    ratio_estimated: float
    dense_ms: float | None
    sparse_ms: float | None
    impl: str


@dataclass(frozen=True)
class Line:
    """All heads, layers and steps at one value."""

    value: float
    density: float
    density_min: float
    density_max: float
    density_alone: float | None
    error: float
    error_max: float
    ratio_estimated: float
    ratio_measured: float | None


def summarise(rows: Sequence[Row]) -> Line:
    """Mean and extremes over heads, layers and steps, each counted alike."""
    density = [row.density_delivered for row in rows]
    error = [row.relative_l2 for row in rows]
    alone = [row.density_alone for row in rows if row.density_alone is not None]
    timed = {(r.layer, r.step): (r.sparse_ms, r.dense_ms) for r in rows if r.sparse_ms is not None}
    sparse, dense = (sum(pair[n] or 0.0 for pair in timed.values()) for n in (0, 1))
    return Line(
        value=rows[0].value,
        density=float(np.mean(density)),
        density_min=min(density),
        density_max=max(density),
        density_alone=float(np.mean(alone)) if alone else None,
        error=float(np.mean(error)),
        error_max=max(error),
        ratio_estimated=float(np.mean([row.ratio_estimated for row in rows])),
        ratio_measured=sparse / dense if timed else None,
    )


def errors_of(rows: Sequence[Row], values: Sequence[float]) -> list[float]:
    """Mean relative error at each value."""
    return [summarise([row for row in rows if row.value == value]).error for value in values]
