"""TauTuner: turn tau and see which blocks stay exact, how dense that is, and what it costs."""

from __future__ import annotations

import base64
import logging
from collections.abc import Callable
from typing import Any

import ipywidgets as widgets
import torch

from workbench import decisions
from workbench.widgets import texts
from workbench.widgets.controls import Controls
from workbench.widgets.debounce import Debouncer
from workbench.widgets.panels import FramesPanel, RoutePanel
from workbench.widgets.picture import Picture
from workbench.widgets.session import CaptureLike, Measured, TunerState, TunerView, TuneSession

logger = logging.getLogger(__name__)

DRAW_WAIT = 0.04  # seconds of quiet before the pictures follow
DRAW_LIMIT = 0.25  # a drag that goes on is followed at least this often
MEASURE_WAIT = 0.4  # seconds of quiet before a real attention call
DRAWING, MEASURING = "drawing", "measuring"


class TauTuner(widgets.VBox):
    """Interactive tuning of Sol-Attn on one capture.

    Pictures follow the controls at once, from scores that serve every tau. When the controls rest,
    the real sparse call runs and is compared with dense. An error in either part is shown in the
    widget and logged; to a script, which has no event loop, it is also raised.

    Args:
        capture: a :class:`workbench.capture.reader.Capture`, or anything with the same attributes.
        device: where to compute; by default CUDA when there is a GPU.

    Attributes:
        controls: the input widgets; setting a value acts like a user.
        view: numbers behind the pictures (:class:`TunerView`).
        measured: the last real call for this setting, or None while it is pending.
    """

    def __init__(self, capture: CaptureLike, device: torch.device | str | None = None):
        self.session = TuneSession(capture, device)
        self.controls = Controls(self.session)
        self._route_panel = RoutePanel(decisions.frame_edges(capture.grid))
        self._frames_panel = FramesPanel(capture.grid.shape, capture.video)
        self._errors: dict[str, Exception] = {}
        self.view: TunerView | None = None
        self._errors_shown = False
        self._picture, self._frames = Picture(), Picture()
        self._summary, self._pair_text, self._ran = (widgets.HTML() for _ in range(3))
        self._problem = widgets.HTML()
        self._button = widgets.Button(
            description="Measure error",
            icon="play",
            tooltip="run the sparse and the dense call now",
        )
        self._draw = Debouncer(lambda: self._guard(DRAWING, self._redraw), DRAW_WAIT, DRAW_LIMIT)
        self._measure = Debouncer(lambda: self._guard(MEASURING, self._remeasure), MEASURE_WAIT)
        super().__init__(self._arrangement(), layout={"max_width": "1260px"})
        self._button.on_click(lambda _: self.measure())
        for knob in self.controls.knobs.values():
            knob.observe(lambda _: self._changed(), names="value")
        self._changed()
        self.flush()

    @property
    def state(self) -> TunerState:
        """What the controls say."""
        return self.controls.state

    @property
    def measured(self) -> Measured | None:
        return self.session.measured(self.state)

    @property
    def picture(self) -> bytes:
        """PNG of the routing map and the charts."""
        return bytes(self._picture.value)

    @property
    def frames(self) -> bytes:
        """PNG of the frames."""
        return bytes(self._frames.value)

    @property
    def problem(self) -> str:
        """HTML of the open errors, empty when all is well."""
        return self._problem.value

    @property
    def what_ran(self) -> str:
        """HTML of the line about the real call."""
        return self._ran.value

    @property
    def summary(self) -> str:
        """HTML of the lines under the pictures."""
        return self._summary.value + self._pair_text.value

    def flush(self) -> None:
        """Does now what waits for the controls to rest."""
        try:
            self._measure.flush()
        finally:
            self._draw.flush()

    def measure(self) -> None:
        """Runs the sparse and the dense call of the current setting, however long they take."""
        self._measure.cancel()
        self._guard(MEASURING, self._call)

    def _arrangement(self) -> list[widgets.Widget]:
        heading = widgets.HTML(texts.heading(self.session))
        ran = [self._ran] if self.session.automatic else [self._ran, self._button]
        return [
            heading,
            self.controls.top(),
            self._problem,
            self._picture,
            self._summary,
            *ran,
            self.controls.pair(),
            self._pair_text,
            self._frames,
        ]

    def _changed(self) -> None:
        self._errors.pop(MEASURING, None)  # it belonged to the setting before
        # Without an event loop both run at once, and then one drawing shows both.
        try:
            self._measure()
        finally:
            self._draw()

    def _redraw(self) -> None:
        """The fast part: everything that follows from the scores."""
        state = self.state
        self.view = view = self.session.view(state)
        selection = decisions.describe_selection(view.selected, view.own)
        self._show_route()
        alt = f"Query block {state.query_block} on the video frames. {selection}"
        self._frames.show(self._frames_panel.draw(view), alt)
        self._pair_text.value = texts.lines(str(view.explanation), selection)

    def _remeasure(self) -> None:
        """The slow part, unless it is too slow to follow the controls."""
        if self.session.automatic:
            self._call()

    def _call(self) -> None:
        self.session.measure(self.state)
        drawn = self.view is not None and self.view.state == self.state
        # A picture that is still to be drawn will hold the errors anyway.
        if drawn and not self._errors_shown:
            self._show_route()

    def _show_route(self) -> None:
        if self.view is None:
            return
        summary = decisions.describe(self.view.classes)
        png = self._route_panel.draw(self.view, self.measured)
        self._picture.show(png, f"Routing map and charts. {summary}")
        self._summary.value = texts.lines(summary)
        self._errors_shown = self.measured is not None

    def _show_what_ran(self) -> None:
        failed = MEASURING in self._errors
        self._ran.value = texts.what_ran(self.session, self.state, self.measured, failed=failed)

    def _guard(self, doing: str, work: Callable[[], None]) -> None:
        """Runs work and shows its exception, which would else vanish in the kernel's log."""
        try:
            work()
        except Exception as error:
            logger.exception("TauTuner failed while %s at %s", doing, self.state)
            self._errors[doing] = error
            raise
        else:
            self._errors.pop(doing, None)
        finally:
            self._problem.value = texts.problems(self._errors)
            self._show_what_ran()

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        """With the picture beside the widget, for readers of the notebook without a kernel."""
        bundle: Any = super()._repr_mimebundle_(**kwargs)
        data = bundle[0] if isinstance(bundle, tuple) else bundle
        if data is not None and self.picture:
            data["image/png"] = base64.b64encode(self.picture).decode()
        return bundle
