"""What the sweep explorer says about settings and their runs; plain text and tables."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from workbench import pareto, show
from workbench.pareto import QUALITY, Point
from workbench.sweep.front import COSTS, gain_name
from workbench.sweep.store import Store
from workbench.sweep.table import SweepTable
from workbench.views.table import Table


def card(table: SweepTable, point: Point, metric: str, cost: str) -> str:
    """Everything about a point: gain, quality, verdict, full configuration, sampler."""
    case, value = table.of(point.name)[0], _with_unit(point.quality, metric)
    ahead = [
        point.name,
        f"{gain_name(cost)}: {point.gain:.3g}",
        f"{metric}: {value} ({point.worst:.4g} .. {point.best:.4g}, "
        f"{_videos(len(table.of(point.name)))})",
        *(f"against it: {reason}" for reason in point.missed),
        "",
    ]
    kind = {"algorithm": "dense against dense, the control"} if point.control else case.attention
    return "\n".join([*ahead, *show.lines(kind), *show.lines(case.sampling)])


def describe_sweep(table: SweepTable, points: Sequence[Point], metric: str, cost: str) -> list[str]:
    """Lines under the picture: states of the cases, front, choice, control, failures."""
    states = Counter(case.state for case in table.cases)
    told = ", ".join(f"{number} {state}" for state, number in states.items())
    lines = [
        f"{table.name}: {len(table.settings)} settings, {len(table.cases)} cases ({told}); "
        f"{len(pareto.front(points, metric))} settings on the front. Gain: {COSTS[cost][2]}."
    ]
    try:
        best = pareto.choose(points, metric)
        value = _with_unit(best.quality, metric)
        lines.append(f"Cheapest that passes: {best.name}, gain {best.gain:.3g}, {metric} {value}.")
    except ValueError as error:
        lines.append(f"Nothing to choose: {error}.")
    for point in (point for point in points if point.control):
        value = _with_unit(point.quality, metric)
        lines.append(f"Dense against dense has {metric} {value}: nothing can be told beyond that.")
    failures = Counter(case.reason for case in table.cases if case.state == "failed")
    return lines + [f"{number} failed: {reason}" for reason, number in failures.items()]


def cases_table(table: SweepTable, setting: str) -> Table:
    """A row for each case of a setting: seed, prompt, state and its metrics with units."""
    cases = table.of(setting)
    shown = [name for name in table.metrics if any(name in case.metrics for case in cases)]
    units = {"1": ""}
    heads = []
    for name in shown:
        unit = units.get(table.metrics[name].unit, table.metrics[name].unit)
        heads.append(f"{name} ({unit})" if unit else name)
    rows = [
        (
            case.seed,
            case.prompt,
            case.state if case.reason is None else f"{case.state}: {case.reason}",
            *(_number(case.metrics.get(name)) for name in shown),
        )
        for case in cases
    ]
    return Table(("seed", "prompt", "state", *heads), rows, f"Cases of {setting}")


def what_ran(table: SweepTable, setting: str) -> str:
    """Implementations, why nothing faster ran, what was emulated or suspicious."""
    cases = table.of(setting)
    parts = {
        "": [text for case in cases for text in case.ran],
        "Faster, but not here: ": [text for case in cases for text in case.fallbacks],
        "Emulated: ": [text for case in cases for text in case.emulated],
        "Flags: ": [text for case in cases for text in case.flags],
    }
    told = [f"{name}{'; '.join(dict.fromkeys(texts))}." for name, texts in parts.items() if texts]
    return " ".join(told) or "nothing yet."


def origin(database: Path, setting: str) -> str:
    """Where the cases of a setting ran, and by which command, as indented lines.

    Raises:
        KeyError: no such setting. FileNotFoundError, ValueError: no such database.
    """
    with Store.open(database) as store:
        cases = store.table().of(setting)
        environments, runs = store.environments(), store.runs()
    used = dict.fromkeys(case.provenance for case in cases if case.provenance)
    record: Mapping[str, object] = {
        "database": str(database),
        "cases": [f"{case.key}: seed {case.seed}, {case.prompt}, {case.state}" for case in cases],
        "environments": {name: environments[name] for name in used},
        "commands": list(dict.fromkeys(" ".join(run["record"]["command"]) for run in runs)),
    }
    return "\n".join(show.lines(record))


def _videos(number: int) -> str:
    return f"{number} video" if number == 1 else f"{number} videos"


def _with_unit(value: float, metric: str) -> str:
    return f"{value:.4g} {QUALITY[metric][0]}".rstrip()


def _number(value: float | None) -> str:
    if value is None:
        return "—"
    return str(value) if math.isnan(value) or math.isinf(value) else f"{value:.4g}"
