"""TimeSplit: prepare, route, attend of a Sol-Attn call, and the density where it beats dense."""

from __future__ import annotations

from pathlib import Path

import ipywidgets as widgets
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from workbench import views
from workbench.bench import files
from workbench.bench.split import (
    PARTS,
    SplitReport,
    describe_split,
    from_report,
    measure,
    ticks,
)
from workbench.paths import checkout_dir
from workbench.views.table import Table
from workbench.widgets import texts
from workbench.widgets.capture_session import CaptureLike, CaptureSession
from workbench.widgets.entry import NARROW, ROW
from workbench.widgets.job import Job
from workbench.widgets.panel import MEASURING, Panel
from workbench.widgets.panels import DPI, WIDTH

HERE = "this machine"
HEIGHT = 4.3  # inches


class TimeSplit(Panel):
    """Times of a committed benchmark, or of one call of a capture measured here.

    A measurement runs in the background, round by round; it can be cancelled, and a change of the
    controls does not start another one.

    Args:
        capture: where the call to time comes from.
        reports: files of ``workbench bench gpu --json``; by default those of the checkout.
        device: where to time; by default CUDA when there is a GPU.

    Attributes:
        report: what is shown, or None.
        job: the measurement under way.
    """

    def __init__(
        self,
        capture: CaptureLike,
        reports: list[Path] | None = None,
        device: torch.device | str | None = None,
    ):
        self.session = CaptureSession(capture, device)
        self.job = Job(self._measured, self._failed)
        self.report: SplitReport | None = None
        self._live: SplitReport | None = None
        self._maker = SplitPanel()
        self._table = widgets.HTML()
        self._make_controls(committed_reports() if reports is None else reports)
        super().__init__([self.source])

    def _make_controls(self, reports: list[Path]) -> None:
        entries = self.session.capture.entries
        options = [*((path.stem, path) for path in reports), (HERE, HERE)]
        self.source = widgets.Dropdown(
            options=options,
            description="Measured on",
            layout={"width": "270px"},
            style={"description_width": "90px"},
        )
        self.entry = widgets.Dropdown(
            options=[(f"layer {layer}, step {step}", (layer, step)) for layer, step in entries],
            description="Call",
            layout={"width": "220px"},
            style={"description_width": "44px"},
        )
        self.tau = widgets.BoundedFloatText(
            value=1.0,
            min=-1.0,
            max=1000.0,
            step=0.25,
            description="tau (std)",
            layout={"width": "160px"},
            style={"description_width": "66px"},
        )
        self.repeats = widgets.BoundedIntText(
            value=9, min=1, max=99, description="Rounds", **NARROW
        )
        self._button = widgets.Button(
            description="Measure here",
            icon="clock-o",
            tooltip="times this call on this machine, in the background",
        )
        self._button.on_click(lambda _: self.measure())

    @property
    def table(self) -> str:
        """HTML of the figures."""
        return self._table.value

    def measure(self) -> None:
        """Starts a measurement of the chosen call; one that still runs is cancelled."""
        self._guard(MEASURING, self._start)

    def _start(self) -> None:
        x = self.session.inputs(*self.entry.get_interact_value())
        tau, repeats = self.tau.get_interact_value(), self.repeats.get_interact_value()
        where = (
            f"{self.session.capture.title}, layer {x.layer}, step {x.step}, {self.session.device}"
        )
        self.job.start(
            lambda tick: measure((x.q, x.k, x.v), tau, repeats=repeats, tick=tick, where=where),
            ticks(repeats, self.session.device.type),
        )

    def _measured(self, report: SplitReport) -> None:
        self._live = report
        if self.source.value == HERE:
            self._redraw()
            self._show_state()
        else:
            self.source.value = HERE

    def _failed(self, error: Exception) -> None:
        self._report(MEASURING, error)
        self._show_state()

    def _arrangement(self) -> list[widgets.Widget]:
        live = widgets.HBox([self.entry, self.tau, self.repeats, self._button], layout=ROW)
        return [
            self.source,
            live,
            self.job.box,
            self._problem,
            self._picture,
            self._summary,
            self._ran,
            self._table,
        ]

    def _redraw(self) -> None:
        source = self.source.get_interact_value()
        report = self._live if source == HERE else from_report(files.load(source))
        self.report = report
        if report is None:
            self._picture.layout.display = "none"
            self._summary.value, self._table.value = texts.lines("Press “Measure here”."), ""
            return
        lines = [report.where, *describe_split(report)]
        self._picture.show(self._maker.draw(report), " ".join(lines))
        self._summary.value = texts.lines(*lines)
        self._table.value = texts.table(split_table(report))

    def _show_what_ran(self) -> None:
        ran = "nothing yet" if self.report is None else self.report.ran
        self._ran.value = texts.what_was(ran)


class SplitPanel:
    """Stacked parts of every setting, and speed-up against density, on one figure for life."""

    def __init__(self):
        self.figure = Figure(figsize=(WIDTH, HEIGHT), dpi=DPI, facecolor="white")
        FigureCanvasAgg(self.figure)
        self._parts = self.figure.add_axes((0.115, 0.2, 0.30, 0.7))
        self._even = self.figure.add_axes((0.635, 0.13, 0.35, 0.77))

    def draw(self, report: SplitReport) -> bytes:
        """PNG of a report."""
        for ax in (self._parts, self._even):
            ax.clear()
        splits = report.splits
        views.draw_split(
            self._parts,
            [split.name for split in splits],
            {name: [1e3 * split.parts[name] for split in splits] for name in PARTS},
            [1e3 * split.bound for split in splits],
            title="Where the time goes",
        )
        ladders = {
            ladder.name: (
                ladder.densities,
                [ladder.dense / value for value in ladder.seconds],
                ladder.break_even,
            )
            for ladder in report.ladders
        }
        views.draw_break_even(self._even, ladders, title="Where sparse is faster: above 1")
        return views.to_png(self.figure)


def split_table(report: SplitReport) -> Table:
    """A row for each setting, in milliseconds."""
    rows = [
        (
            split.name,
            split.impl,
            f"{split.density:.4f}",
            *(f"{1e3 * split.parts[name]:.3f}" for name in PARTS),
            f"{1e3 * split.whole:.3f}",
            f"{1e3 * split.dense:.3f}",
            f"{split.dense / split.whole:.2f}",
            f"{split.whole / split.bound:.2f}",
        )
        for split in report.splits
    ]
    times = tuple(f"{name} (ms)" for name in (*PARTS, "whole call", "dense"))
    columns = ("setting", "impl", "density", *times, "dense / whole", "whole / bound")
    return Table(columns, rows, "bound = (density + 1/64) x dense")


def committed_reports() -> list[Path]:
    """Reports in ``docs/bench`` of the checkout; none in an installed wheel."""
    root = checkout_dir()
    return [] if root is None else sorted((root / "docs" / "bench").glob("*.json"))
