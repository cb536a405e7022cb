"""Quality gates and the Pareto front: which settings are worth a choice, and which of them passes.

A setting is a point: how much cheaper than dense attention it is, and how far its videos are from
dense ones. It is dominated when another one is at least as good in both and better in one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Metrics of a video against its dense twin: unit, and whether a larger value is better.
QUALITY: dict[str, tuple[str, bool]] = {
    "psnr": ("dB", True),
    "ssim": ("", True),
    "lpips": ("", False),
    "relative_l2": ("", False),
}


@dataclass(frozen=True)
class Gate:
    """A limit that the worst video of a setting has to keep; the limit itself passes.

    Attributes:
        metric: ``psnr`` (dB), ``ssim``, ``lpips`` or ``relative_l2``.
        limit: the least PSNR or SSIM, the largest LPIPS or relative L2.

    Raises:
        ValueError: another metric, or a limit that is not finite.
    """

    metric: str
    limit: float

    def __post_init__(self) -> None:
        check_metric(self.metric)
        if not math.isfinite(self.limit):
            raise ValueError(f"gate {self.metric}: limit={self.limit!r} must be finite")

    @classmethod
    def read(cls, text: str) -> Gate:
        """``psnr=30`` as a gate.

        Raises:
            ValueError: no such text, metric or limit.
        """
        metric, equals, limit = text.partition("=")
        try:
            if not equals:
                raise ValueError("there is no '='")
            return cls(metric.strip(), float(limit))
        except ValueError as error:
            hint = f"gate {text!r}: expected METRIC=LIMIT such as psnr=30"
            raise ValueError(f"{hint} ({error})") from error

    def passes(self, value: float) -> bool:
        """Whether one video keeps it; a NaN does not."""
        return value >= self.limit if QUALITY[self.metric][1] else value <= self.limit

    def __str__(self) -> str:
        unit, high = QUALITY[self.metric]
        return f"{self.metric} {'>=' if high else '<='} {self.limit:g} {unit}".rstrip()


@dataclass(frozen=True)
class Point:
    """One setting over all its videos.

    Attributes:
        name: of the setting.
        gain: cost of dense attention / its cost, larger is better.
        quality: median of the metric over its videos.
        worst, best: of the same.
        missed: gates that it fails and other reasons against it; empty when it may be chosen.
        control: dense against dense; no candidate, but the floor under every verdict.
    """

    name: str
    gain: float
    quality: float
    worst: float
    best: float
    missed: tuple[str, ...] = ()
    control: bool = False


def check_metric(metric: str) -> None:
    """Refuses what is no metric of quality.

    Raises:
        ValueError: with those that there are.
    """
    if metric not in QUALITY:
        raise ValueError(f"metric={metric!r}: must be one of {', '.join(QUALITY)}")


def worst(values: Sequence[float], metric: str) -> float:
    """The worst of some values; a NaN is worse than anything."""
    if any(math.isnan(value) for value in values):
        return math.nan
    return min(values) if QUALITY[metric][1] else max(values)


def missed(videos: Sequence[Mapping[str, float]], gates: Sequence[Gate]) -> tuple[str, ...]:
    """Each gate that some video does not keep, with the worst value.

    Args:
        videos: metrics of every video of a setting, by name.
        gates: what every one of them has to keep. One without the metric fails, by that reason.
    """
    found = []
    for gate in gates:
        values = [video[gate.metric] for video in videos if gate.metric in video]
        if len(values) < len(videos) or not values:
            found.append(f"{gate}: not measured")
        elif not gate.passes(value := worst(values, gate.metric)):
            found.append(f"{gate}: worst {value:.4g}")
    return tuple(found)


def dominates(one: Point, other: Point, metric: str) -> bool:
    """Whether the first is at least as good in gain and quality, and better in one of them."""
    sign = 1 if QUALITY[metric][1] else -1
    pairs = ((one.gain, other.gain), (sign * one.quality, sign * other.quality))
    return all(a >= b for a, b in pairs) and any(a > b for a, b in pairs)


def front(points: Sequence[Point], metric: str) -> list[Point]:
    """The candidates that no other one dominates, cheapest last.

    Gates do not count here: the front is what the settings can do, and a gate is where one stops.
    The control and what has no finite gain or a NaN as quality are no candidates.
    """
    check_metric(metric)
    able = [p for p in points if is_candidate(p)]
    kept = [p for p in able if not any(dominates(other, p, metric) for other in able)]
    return sorted(kept, key=lambda p: p.gain)


def is_candidate(point: Point) -> bool:
    """Whether a point can be compared and chosen at all."""
    return not point.control and math.isfinite(point.gain) and not math.isnan(point.quality)


def choose(points: Sequence[Point], metric: str) -> Point:
    """The cheapest setting of the front that misses no gate.

    Raises:
        ValueError: something speaks against each; the nearest is named with it.
    """
    ordered = front(points, metric)
    passing = [point for point in ordered if not point.missed]
    if passing:
        return passing[-1]
    if not ordered:
        raise ValueError("no setting has results to choose from; wait for the sweep, or see why")
    nearest = min(ordered, key=lambda p: (len(p.missed), p.gain))
    raise ValueError(
        f"no setting may be chosen; against {nearest.name}: {'; '.join(nearest.missed)}. "
        "Loosen a gate, add denser settings, or, where nothing is faster than dense here, "
        "let density be the cost"
    )
