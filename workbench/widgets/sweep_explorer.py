"""SweepExplorer: the settings of a sweep as cost and quality; a point opens its configuration."""

from __future__ import annotations

from html import escape
from pathlib import Path

import ipywidgets as widgets
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from workbench import pareto, views
from workbench.pareto import QUALITY, Gate, Point
from workbench.sweep.choice import config_text
from workbench.sweep.front import COSTS, front_table, gain_name, points
from workbench.sweep.table import SweepTable, load
from workbench.views.pareto import pareto_spots
from workbench.views.style import QUERY
from workbench.widgets import sweep_texts, texts
from workbench.widgets.entry import ROW
from workbench.widgets.panel import Panel
from workbench.widgets.panels import DPI, WIDTH
from workbench.widgets.spots import Spot, SpotPicture, style

HEIGHT = 4.9  # inches
PRE = "font-size:12px;line-height:1.35;margin:4px 0"


class SweepExplorer(Panel):
    """Pareto picture of a sweep with gates and control; hover shows a point's full configuration.

    A click on a point, or the list, chooses a setting: its configuration for a server, its cases,
    what ran, and on request where they ran. The database may still be growing: "Read again".

    Args:
        database: of ``workbench sweep run``.
        gates: to begin with, such as ``"psnr=30, ssim=0.9"``.

    Attributes:
        table: the sweep as it was read last.
        points: every setting with a result.

    Raises:
        FileNotFoundError, ValueError: no database of a sweep, or a gate that is none.
    """

    def __init__(self, database: str | Path, gates: str = ""):
        self.database = Path(database)
        self.table: SweepTable = load(self.database)
        self.points: list[Point] = []
        self._maker = ParetoPanel()
        self._make_controls(gates)
        self._list, self._detail, self._origin = (widgets.HTML() for _ in range(3))
        super().__init__([self.metric, self.cost, self.gates, self.setting, self.opened])

    def _make_controls(self, gates: str) -> None:
        small = {"layout": {"width": "200px"}, "style": {"description_width": "60px"}}
        self.metric = widgets.Dropdown(options=measured(self.table), description="Quality", **small)
        costs = [(gain_name(name), name) for name in COSTS]
        self.cost = widgets.Dropdown(
            options=costs,
            description="Gain",
            layout={"width": "330px"},
            style={"description_width": "50px"},
        )
        self.gates = widgets.Text(
            value=gates,
            placeholder="none; such as psnr=30, ssim=0.9",
            description="Gates",
            continuous_update=False,
            layout={"width": "300px"},
            style={"description_width": "50px"},
        )
        self.setting = widgets.Dropdown(
            options=best_first(self.table),
            description="Setting",
            layout={"width": "520px"},
            style={"description_width": "60px"},
        )
        self.opened = widgets.ToggleButton(
            description="Open the run", icon="folder-open", tooltip="where its cases ran, and how"
        )
        self._reload = widgets.Button(
            description="Read again", icon="refresh", tooltip="the sweep may have gone on"
        )
        self._reload.on_click(lambda _: self.reload())

    @property
    def detail(self) -> str:
        """HTML about the chosen setting."""
        return self._detail.value + self._origin.value

    def reload(self) -> None:
        """Reads the database again."""
        self._guard("reading", self._read)

    def read_gates(self) -> list[Gate]:
        """The gates as they are written.

        Raises:
            ValueError: one of them is none.
        """
        parts = self.gates.get_interact_value().split(",")
        return [Gate.read(part) for part in parts if part.strip()]

    def _read(self) -> None:
        self.table = load(self.database)
        for knob, options in (
            (self.metric, measured(self.table)),
            (self.setting, best_first(self.table)),
        ):
            kept = knob.value
            if list(knob.options) != options:
                knob.options = options
                knob.value = kept if kept in options else options[0]
        self._redraw()

    def _arrangement(self) -> list[widgets.Widget]:
        self._spots = SpotPicture(self._picture, self._pick)
        first = [self.metric, self.cost, self.gates, self._reload]
        return [
            style(),
            widgets.HBox(first, layout=ROW),
            self._problem,
            self._spots,
            self._summary,
            widgets.HBox([self.setting, self.opened], layout=ROW),
            self._ran,
            self._detail,
            self._origin,
            self._list,
        ]

    def _pick(self, name: str) -> None:
        self.setting.value = name

    def _redraw(self) -> None:
        metric, cost = self.metric.get_interact_value(), self.cost.get_interact_value()
        if metric is None:
            raise ValueError(f"{self.database}: no case has a result yet; read again later")
        gates = self.read_gates()
        self.points = found = points(self.table, metric, gates, cost=cost)
        lines = sweep_texts.describe_sweep(self.table, found, metric, cost)
        png, places = self._maker.draw(found, metric, gates, cost, self.setting.value)
        spots = [
            Spot(point.name, x, y, sweep_texts.card(self.table, point, metric, cost))
            for point, x, y in places
        ]
        self._spots.show(png, f"Cost and quality of every setting. {' '.join(lines)}", spots)
        self._summary.value = texts.lines(*lines)
        self._list.value = texts.table(front_table(found, metric, cost))
        self._show_setting(metric, cost, gates)

    def _show_setting(self, metric: str, cost: str, gates: list[Gate]) -> None:
        name = self.setting.get_interact_value()
        chosen = next((point for point in self.points if point.name == name), None)
        if chosen is None or chosen.control:
            text = "no results yet" if chosen is None else "dense against dense needs no file"
        else:
            text = config_text(self.table, chosen, gates, metric, cost)
        table = texts.table(sweep_texts.cases_table(self.table, name))
        self._detail.value = f'<pre style="{PRE}">{escape(text)}</pre>{table}'
        opened = sweep_texts.origin(self.database, name) if self.opened.value else ""
        self._origin.value = f'<pre style="{PRE}">{escape(opened)}</pre>' if opened else ""

    def _show_what_ran(self) -> None:
        name = self.setting.get_interact_value()
        ran = escape(sweep_texts.what_ran(self.table, name))
        self._ran.value = texts.status(f"<b>What ran</b> for {escape(name)}: {ran}")


class ParetoPanel:
    """The picture, on one figure for life, and where its points are."""

    def __init__(self):
        self.figure = Figure(figsize=(WIDTH, HEIGHT), dpi=DPI, facecolor="white")
        FigureCanvasAgg(self.figure)
        self._ax = self.figure.add_axes((0.062, 0.115, 0.56, 0.81))

    def draw(
        self, found: list[Point], metric: str, gates: list[Gate], cost: str, chosen: str | None
    ) -> tuple[bytes, list[tuple[Point, float, float]]]:
        """PNG, and every point with its place from the top left corner."""
        ax = self._ax
        ax.clear()
        views.draw_pareto(ax, found, metric, gates=gates, xlabel=COSTS[cost][2])
        places = pareto_spots(ax, found, metric)
        for point, x, y in places:
            if point.name == chosen:
                ring = {"markerfacecolor": "none", "markeredgecolor": QUERY, "markersize": 15}
                spot = {"transform": self.figure.transFigure, "clip_on": False}
                ax.plot([x], [1 - y], "o", markeredgewidth=1.6, **ring, **spot)
        return views.to_png(self.figure), places


def measured(table: SweepTable) -> list[str]:
    """Measures of quality that some case has."""
    return [name for name in QUALITY if any(name in case.metrics for case in table.done)]


def best_first(table: SweepTable) -> list[str]:
    """Every setting: those of the front from the cheapest on, then the rest as planned."""
    front: list[str] = []
    for metric in measured(table)[:1]:
        front = [point.name for point in reversed(pareto.front(points(table, metric), metric))]
    return front + [name for name in table.settings if name not in front]
