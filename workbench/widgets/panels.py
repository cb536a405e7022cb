"""The tuner's two pictures. Each keeps one figure for its life and clears it before it draws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

from workbench import decisions, views
from workbench.widgets.capture_session import Measured
from workbench.widgets.session import CURVE_TAUS, TunerView

WIDTH = 12.4
HEIGHT = 6.3
DPI = 130


def title_of(view: TunerView) -> str:
    """Layer, step, head, tau and density, as every picture names them."""
    state = view.state
    return (
        f"layer {state.layer} · step {state.step} · head {state.head} · tau {state.tau:.2f} · "
        f"density {decisions.density(view.classes):.3f}"
    )


class FourPlots:
    """The figure of a tuner: a map, a curve, a histogram and a table of heads."""

    def __init__(self):
        self.figure = Figure(figsize=(WIDTH, HEIGHT), dpi=DPI, facecolor="white")
        FigureCanvasAgg(self.figure)
        # Fixed places: no layout engine has to measure every text again for each picture.
        self._map = self.figure.add_axes((0.052, 0.125, 5.1 / WIDTH, 5.1 / HEIGHT))
        self._curve = self.figure.add_axes((0.538, 0.567, 0.192, 0.367))
        self._histogram = self.figure.add_axes((0.796, 0.567, 0.192, 0.367))
        self._heads = self.figure.add_axes((0.538, 0.125, 0.34, 0.285))


class RoutePanel(FourPlots):
    """Routing map, density curve, z-score histogram, density and error of every head."""

    def __init__(self, frame_edges: Sequence[float] = ()):
        super().__init__()
        self._frame_edges = frame_edges

    def draw(self, view: TunerView, measured: Measured | None) -> bytes:
        """PNG of a view; without a measurement the errors are ellipses."""
        state = view.state
        for ax in self.figure.axes:
            ax.clear()
        views.draw_route(
            self._map,
            view.classes,
            title_of(view),
            query=state.query_block,
            key=state.key_block,
            frame_edges=self._frame_edges,
        )
        views.draw_curve(
            self._curve,
            CURVE_TAUS,
            view.curve,
            (state.tau, float(view.density[state.head])),
            [f"head {head}" for head in range(len(view.curve))],
            highlight=state.head,
            xlabel="tau (standard deviations)",
            title="Density against tau",
        )
        views.draw_histogram(
            self._histogram, view.z, state.tau, title=f"Scores of head {state.head}"
        )
        views.draw_heads(
            self._heads,
            view.density,
            None if measured is None else measured.relative_l2,
            highlight=state.head,
            title="Every head",
        )
        return views.to_png(self.figure)


class FramesPanel:
    """The key blocks that the chosen query block attends exactly, on the frames of the video."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        video: Tensor | None,
        title_of: Callable[[Any], str],
        what: str = "query block",
        rest: str = "approximate",
    ):
        size = views.frames_size(shape, WIDTH)
        self.figure = Figure(figsize=size, dpi=DPI, facecolor="white")
        FigureCanvasAgg(self.figure)
        self._video, self._title_of = video, title_of
        self._what, self._rest = what, rest

    def draw(self, view: Any) -> bytes:
        """PNG of a view."""
        self.figure.clear()
        title = f"{self._what} {view.state.query_block} · {self._title_of(view)}"
        views.draw_frames(
            self.figure, view.selected, view.own, self._video, title=title, rest=self._rest
        )
        return views.to_png(self.figure)
