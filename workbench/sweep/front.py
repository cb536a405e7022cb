"""The settings of a sweep as points of cost and quality, and the chosen one as a configuration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from workbench import pareto
from workbench.config import AttentionConfig, QuantAttentionConfig, VisualGenConfig
from workbench.pareto import Gate, Point
from workbench.sweep.cases import read_setting
from workbench.sweep.table import SweepCase, SweepTable
from workbench.views.table import Table

# What a setting costs beside its dense twin, and the words for the ratio dense / sparse.
COSTS: dict[str, tuple[str, str, str]] = {
    "attention": (
        "dense_attention_seconds",
        "attention_seconds",
        "attention time, dense / sparse (routing included)",
    ),
    "video": ("dense_seconds", "seconds", "time of the whole video, dense / sparse"),
    "density": ("", "density", "block pairs, all / exact"),
}


def points(
    table: SweepTable,
    metric: str = "psnr",
    gates: Sequence[Gate] = (),
    *,
    cost: str = "attention",
) -> list[Point]:
    """A point for every setting that has a result; the gain is the median over its cases.

    Args:
        table: a sweep, finished or not.
        metric: quality of the points, a name of :data:`workbench.pareto.QUALITY`.
        gates: limits that every case has to keep.
        cost: ``attention`` and ``video`` are measured times, each beside the dense twin of the same
            process; ``density`` follows from the setting and the machine has no part in it.

    Raises:
        ValueError: an unknown metric or cost.
    """
    pareto.check_metric(metric)
    if cost not in COSTS:
        raise ValueError(f"cost={cost!r}: must be one of {', '.join(COSTS)}")
    found = []
    for setting in table.settings:
        cases = table.of(setting)
        done = [case for case in cases if case.state == "done" and metric in case.metrics]
        if done:
            found.append(_point(setting, cases, done, metric, gates, cost))
    return found


def configuration(table: SweepTable, setting: str) -> VisualGenConfig:
    """The configuration of a setting, as the other commands and servers read it.

    A sweep compares algorithms and names no kernels of a server, which a file has to: it gets the
    first backend of TensorRT-LLM that serves them.

    Raises:
        KeyError: no such setting. ValueError: it is the control.
    """
    case = table.of(setting)[0]
    if case.control:
        raise ValueError(f"setting={setting!r} is the control; dense attention needs no file")
    attention = read_setting(case.attention, {})[0]
    update = {"backend": _backend(attention)}
    return VisualGenConfig(attention_config=attention.model_copy(update=update))


def front_table(found: Sequence[Point], metric: str, cost: str = "attention") -> Table:
    """Every point, cheapest first: gain, quality, its place, and what speaks against it.

    The place is ``front``, ``dominated`` (another one is at least as cheap and as good) or
    ``control``, the floor: a gate that even the control misses says nothing about the others.
    """
    best = pareto.front(found, metric)
    rows = [
        (
            point.name,
            f"{point.gain:.3g}",
            f"{point.quality:.4g}",
            f"{point.worst:.4g} .. {point.best:.4g}",
            _place(point, best),
            "; ".join(point.missed) or "—",
        )
        for point in sorted(found, key=lambda p: -p.gain)
    ]
    quality = (f"{metric}, median", "worst .. best")
    columns = ("setting", gain_name(cost), *quality, "place", "against it")
    return Table(columns, rows, caption=COSTS[cost][2])


def gain_name(cost: str) -> str:
    """What the gain is the ratio of, in a few words."""
    return COSTS[cost][2].partition(" (")[0]


def _backend(attention: AttentionConfig) -> str | None:
    parts = [
        part.backends if isinstance(part, QuantAttentionConfig) else part.BACKENDS
        for part in (attention.sparse_attention_config, attention.quant_attention_config)
        if part is not None
    ]
    serving = [name for name in ("CUTEDSL", "TRTLLM") if all(name in part for part in parts)]
    return serving[0] if parts and serving else None


def _point(
    setting: str,
    cases: Sequence[SweepCase],
    done: Sequence[SweepCase],
    metric: str,
    gates: Sequence[Gate],
    cost: str,
) -> Point:
    values = [case.metrics[metric] for case in done]
    against = [*pareto.missed([case.metrics for case in done], gates)]
    against += dict.fromkeys(flag for case in done for flag in case.flags)
    if len(done) < len(cases):
        against.append(f"{len(cases) - len(done)} of {len(cases)} cases have no result")
    gain = median(_gain(case, cost) for case in done)
    control = cases[0].control
    if gain <= 1 and not control:
        against.append("no gain over dense")
    low, high = pareto.worst(values, metric), _best(values, metric)
    middle = math.nan if math.isnan(low) else median(values)
    return Point(setting, gain, middle, low, high, tuple(against), control)


def _gain(case: SweepCase, cost: str) -> float:
    dense, own, _ = COSTS[cost]
    whole = case.metrics[dense] if dense else 1.0
    return whole / case.metrics[own] if case.metrics[own] > 0 else math.nan


def _best(values: Sequence[float], metric: str) -> float:
    return max(values) if pareto.QUALITY[metric][1] else min(values)


def _place(point: Point, best: Sequence[Point]) -> str:
    if point.control:
        return "control"
    return "front" if point in best else "dominated"
