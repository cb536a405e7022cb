"""Compare: two settings or two implementations side by side, and where they differ."""

from __future__ import annotations

from functools import partial

import ipywidgets as widgets
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from workbench import views
from workbench.comparison import Setting, describe_agreement, exact_of
from workbench.widgets import texts
from workbench.widgets.capture_session import CaptureLike
from workbench.widgets.compare_controls import CompareControls
from workbench.widgets.compare_session import CompareSession, CompareState, CompareView
from workbench.widgets.panel import MEASURING, Panel
from workbench.widgets.panels import DPI, WIDTH

HEIGHT = 4.95  # inches


class Compare(Panel):
    """Maps of A and B and of their difference, flipped pairs, errors, and what ran on each side.

    Maps are drawn from plans at once; when the controls rest, both calls run, and the maps are
    then what was delivered. Implementations are compared with equal knobs on both sides.

    Args:
        capture: a :class:`workbench.capture.reader.Capture`, or anything with the same attributes.
        device: where to compute; by default CUDA when there is a GPU.

    Attributes:
        session: what is computed and remembered.
        controls: the input widgets; ``controls.a`` and ``controls.b`` are the sides.
        view: numbers behind the pictures (:class:`CompareView`).
    """

    def __init__(self, capture: CaptureLike, device: torch.device | str | None = None):
        self.session = CompareSession(capture, device)
        self.controls = CompareControls(self.session)
        self.view: CompareView | None = None
        self._maps = ComparePanel()
        self._table = widgets.HTML()
        self._button = widgets.Button(
            description="Run both", icon="play", tooltip="run A, B and the dense call now"
        )
        self._button.on_click(lambda _: self.measure())
        super().__init__(self.controls.knobs)

    @property
    def state(self) -> CompareState:
        """What the controls say."""
        return self.controls.state

    @property
    def table(self) -> str:
        """HTML of the table of heads."""
        return self._table.value

    def measure(self) -> None:
        """Runs both sides and the dense call, however long they take."""
        self._measure.cancel()
        self._guard(MEASURING, self._call)

    def _arrangement(self) -> list[widgets.Widget]:
        ran = [self._ran] if self.session.automatic else [self._ran, self._button]
        return [
            widgets.HTML(texts.heading(self.session)),
            self.controls.top(),
            self._problem,
            self._picture,
            self._summary,
            *ran,
            self._table,
        ]

    def _prepare(self) -> None:
        """Before any work: the controls offer the heads that the chosen call has."""
        self.controls.offer_heads(self.session.heads_of(self.state.layer, self.state.step))

    def _redraw(self) -> None:
        self._prepare()
        self.view = view = self.session.view(self.state)
        summary = describe_agreement(view.codes)
        self._picture.show(self._maps.draw(view), f"Maps of A, B and their difference. {summary}")
        self._summary.value = texts.lines(summary, *_surprises(view))
        self._table.value = texts.table(self.session.table(view))

    def _remeasure(self) -> None:
        if self.session.automatic:
            self._call()

    def _call(self) -> None:
        """Each side by itself, so that one that cannot run does not hide the other."""
        self._prepare()
        state = self.state
        try:
            self._guard(f"{MEASURING} A", partial(self.session.measure, state, state.a))
        finally:
            try:
                self._guard(f"{MEASURING} B", partial(self.session.measure, state, state.b))
            finally:
                # What is still to be drawn will hold the measurements anyway.
                if self.view is not None and self.view.state == state:
                    self._redraw()

    def _show_what_ran(self) -> None:
        state = self.state
        self._ran.value = self._side("A", state.a) + self._side("B", state.b)

    def _side(self, name: str, setting: Setting) -> str:
        state = self.state
        measured = self.session.measured(state, setting)
        failed = f"{MEASURING} {name}" in self._errors
        return texts.what_ran(
            self.session, measured, state.head, failed=failed, title=f"{name} ran"
        )


class ComparePanel:
    """Three maps in a row, on one figure for life."""

    def __init__(self):
        self.figure = Figure(figsize=(WIDTH, HEIGHT), dpi=DPI, facecolor="white")
        FigureCanvasAgg(self.figure)
        edge = 3.65 / WIDTH
        self._axes = [
            self.figure.add_axes((left, 0.126, edge, 0.766)) for left in (0.04, 0.37, 0.70)
        ]

    def draw(self, view: CompareView) -> bytes:
        """PNG of a view."""
        state = view.state
        for ax in self._axes:
            ax.clear()
        for ax, name, setting, route, measured in zip(
            self._axes, "AB", (state.a, state.b), view.routes, view.measured
        ):
            density = float(route.density_per_head()[0, state.head])
            kind = "delivered" if measured else "planned"
            title = f"{name}: {setting.algorithm} · {setting.impl}\n{setting.knobs}\n"
            title += f"density {density:.3f}, {kind}"
            exact = exact_of(route, 0, state.head)
            views.draw_exact(ax, exact, title, rest=setting.left_out)
        flipped = int(view.flipped[state.head])
        where = f"layer {state.layer} · step {state.step} · head {state.head}"
        views.draw_agreement(self._axes[2], view.codes, f"A and B: {flipped:,} flipped\n{where}\n")
        return views.to_png(self.figure)


def _surprises(view: CompareView) -> list[str]:
    return [
        f"{name} delivered {number:,} block pairs (over all heads) otherwise than planned."
        for name, number in zip("AB", view.surprises)
        if number
    ]
