"""``workbench sweep front``: the table, the picture and the configuration of the chosen setting."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from workbench import views
from workbench.config import dump_config
from workbench.pareto import Gate, Point, choose
from workbench.run_folder import write_new
from workbench.sweep.front import COSTS, configuration, front_table, points
from workbench.sweep.store import Store
from workbench.sweep.table import SweepTable

ON_CPUS = (
    "all ran on CPUs, whose times say little about a GPU, so the cost is density; "
    "--cost attention or --cost video compares times"
)


def show_front(
    database: Path,
    gates: Sequence[Gate],
    *,
    metric: str = "psnr",
    cost: str | None = None,
    figure: Path | None = None,
    config: Path | None = None,
) -> None:
    """Prints every setting with its verdict; draws them and writes the chosen one if asked.

    Without a cost it takes attention time, or density where every case ran on a CPU, and says so.

    Raises:
        FileNotFoundError: no such database. FileExistsError: the configuration exists.
        ValueError: an unknown metric or cost, no results, or no setting passes to be written.
    """
    with Store.open(database) as store:
        table, environments = store.table(), store.environments()
    if cost is None:
        cost = "density" if _on_cpus(table, environments) else "attention"
        if cost == "density":
            sys.stderr.write(f"note: {ON_CPUS}\n")
    found = points(table, metric, gates, cost=cost)
    if not found:
        raise ValueError(f"database={str(database)!r}: no case has {metric} yet")
    sys.stdout.write(f"{front_table(found, metric, cost)!r}\n")
    if figure is not None:
        views.save(draw(found, metric, gates, cost), figure)
    if config is not None:
        best = choose(found, metric)
        text = config_text(table, best, gates, metric, cost)
        write_new(config, text)
        sys.stdout.write(f"{config}: {best.name}\n")


def _on_cpus(table: SweepTable, environments: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether there are results, and each says that it ran on a CPU."""
    kinds = {
        "cpu"
        if case.sampling.get("device") == "cpu"
        else environments.get(case.provenance or "", {}).get("device", {}).get("kind")
        for case in table.done
    }
    return kinds == {"cpu"}


def draw(found: Sequence[Point], metric: str, gates: Sequence[Gate], cost: str) -> Figure:
    """The points as a figure of their own."""
    figure = views.new_figure(9, 4.2)
    label = COSTS[cost][2]
    views.draw_pareto(figure.subplots(), found, metric, gates=gates, xlabel=label)
    return figure


def config_text(
    table: SweepTable, best: Point, gates: Sequence[Gate], metric: str, cost: str
) -> str:
    """The configuration of a point; how it was chosen stands in comments above it."""
    limits = ", ".join(map(str, gates)) or "none"
    comments = [
        f"{best.name}, from the sweep {table.name}; gates: {limits}.",
        f"{len(table.of(best.name))} videos: {metric} {best.quality:.4g} "
        f"({best.worst:.4g} .. {best.best:.4g}); {COSTS[cost][2]}: {best.gain:.3g}.",
    ]
    lines = "".join(f"# {text}\n" for text in comments)
    return lines + dump_config(configuration(table, best.name))
