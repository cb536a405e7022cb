"""What every panel shares: debounced work, errors that are seen, one picture, texts under it."""

from __future__ import annotations

import base64
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import ipywidgets as widgets

from workbench.widgets import texts
from workbench.widgets.debounce import Debouncer
from workbench.widgets.picture import Picture

logger = logging.getLogger(__name__)

DRAW_WAIT = 0.04  # seconds of quiet before the pictures follow
DRAW_LIMIT = 0.25  # a drag that goes on is followed at least this often
MEASURE_WAIT = 0.4  # seconds of quiet before real calls run
DRAWING, MEASURING = "drawing", "measuring"


class Panel(widgets.VBox):
    """Knobs above, a picture and texts below.

    A subclass gives ``_arrangement``, ``_redraw`` (fast: follows every knob) and, where it has slow
    work, ``_remeasure``, which runs when the knobs rest. An error in either is shown in the panel
    and logged; to a script, which has no event loop, it is also raised. A panel always opens: an
    error of its first setting is only shown, so that another setting can mend it.

    Args:
        knobs: the controls; a change of any of them asks for both kinds of work.
    """

    def __init__(self, knobs: Iterable[widgets.Widget]):
        self._errors: dict[str, Exception] = {}
        self._opening = True
        self._picture = Picture()
        self._summary, self._ran, self._problem = (widgets.HTML() for _ in range(3))
        self._draw = Debouncer(lambda: self._guard(DRAWING, self._redraw), DRAW_WAIT, DRAW_LIMIT)
        self._measure = Debouncer(lambda: self._guard(MEASURING, self._remeasure), MEASURE_WAIT)
        super().__init__(layout={"max_width": "1260px"})
        self.children = tuple(self._arrangement())
        for knob in knobs:
            knob.observe(lambda _: self._changed(), names="value")
        self._changed()
        self.flush()
        self._opening = False

    @property
    def picture(self) -> bytes:
        """PNG of the first picture."""
        return bytes(self._picture.value)

    @property
    def problem(self) -> str:
        """HTML of the open errors, empty when all is well."""
        return self._problem.value

    @property
    def summary(self) -> str:
        """HTML of the lines under the picture."""
        return self._summary.value

    @property
    def what_ran(self) -> str:
        """HTML of the line that says what ran and why."""
        return self._ran.value

    def flush(self) -> None:
        """Does now what waits for the controls to rest."""
        try:
            self._measure.flush()
        finally:
            self._draw.flush()

    def _arrangement(self) -> Sequence[widgets.Widget]:
        raise NotImplementedError

    def _redraw(self) -> None:
        raise NotImplementedError

    def _remeasure(self) -> None:
        """Nothing is slow, unless a subclass says so."""

    def _show_what_ran(self) -> None:
        """Called after all work, also after work that failed."""

    def _changed(self) -> None:
        # What failed while measuring belonged to the setting before.
        self._errors = {doing: e for doing, e in self._errors.items() if doing == DRAWING}
        # Without an event loop both run at once, and then one drawing shows both.
        try:
            self._measure()
        finally:
            self._draw()

    def _guard(self, doing: str, work: Callable[[], object]) -> None:
        """Runs work and shows its exception, which would else vanish in the kernel's log."""
        try:
            work()
        except Exception as error:
            self._report(doing, error)
            if not self._opening:
                raise
        else:
            self._errors.pop(doing, None)
        finally:
            self._show_state()

    def _report(self, doing: str, error: Exception) -> None:
        if any(error is known for known in self._errors.values()):
            return  # a part of this work has reported it, under a better name
        name = type(self).__name__
        logger.error("%s failed while %s: %s", name, doing, error, exc_info=error)
        self._errors[doing] = error

    def _show_state(self) -> None:
        old = DRAWING in self._errors
        self._problem.value = texts.problems(self._errors, old=old and bool(self.picture))
        self._dim(old)
        self._show_what_ran()

    def _dim(self, old: bool) -> None:
        """What stands below the error goes pale while it belongs to the setting before."""
        parts = list(self.children)
        for part in parts[parts.index(self._problem) + 1 :]:
            if isinstance(part, widgets.DOMWidget):
                (part.add_class if old else part.remove_class)(texts.OLD)

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        """With the picture beside the widget, for readers of the notebook without a kernel."""
        bundle: Any = super()._repr_mimebundle_(**kwargs)
        data = bundle[0] if isinstance(bundle, tuple) else bundle
        if data is not None and self.picture:
            data["image/png"] = base64.b64encode(self.picture).decode()
        return bundle
