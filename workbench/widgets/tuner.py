"""What the tuners share: maps at once from one pass, the real call when the controls rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import ipywidgets as widgets

from workbench import decisions
from workbench.config import (
    AttentionConfig,
    SkipSoftmaxConfig,
    SolAttnConfig,
    VisualGenConfig,
    dump_config,
)
from workbench.widgets import texts
from workbench.widgets.capture_session import Measured, TunerSession
from workbench.widgets.panel import MEASURING, Panel
from workbench.widgets.picture import Picture


class TunerControls(Protocol):
    """Knobs of a tuner; ``state`` says what they stand at."""

    @property
    def knobs(self) -> Mapping[str, widgets.ValueWidget]:
        """By the fields of the state."""
        ...

    @property
    def state(self) -> Any:
        """Of the session's own kind, with ``head`` and ``query_block``."""
        ...

    def offer_heads(self, count: int) -> None:
        """Lets one choose among so many heads."""
        ...

    def top(self) -> widgets.Widget:
        """Where to look and the method's knobs."""
        ...

    def pair(self) -> widgets.Widget:
        """What to explain."""
        ...


class MapPanel(Protocol):
    """Draws a view of the session."""

    def draw(self, view: Any, measured: Measured | None) -> bytes:
        """PNG."""
        ...


class FramesDrawer(Protocol):
    """Draws the chosen query block on the frames."""

    def draw(self, view: Any) -> bytes:
        """PNG."""
        ...


class Tuner(Panel):
    """One setting on one capture: map and charts, frames, what ran and its error.

    Attributes:
        session: what is computed and remembered.
        controls: the input widgets; setting a value acts like a user.
        view: numbers behind the pictures.
        measured: the last real call for this setting, or None while it is pending.
        config: this setting as YAML for a server; the panel has a link that saves it.
    """

    def __init__(
        self,
        session: TunerSession,
        controls: TunerControls,
        map_panel: MapPanel,
        frames_panel: FramesDrawer,
    ):
        self.session, self.controls = session, controls
        self._map_panel, self._frames_panel = map_panel, frames_panel
        self.view: Any = None
        self._errors_shown = False
        self._frames = Picture()
        self._pair_text, self._yaml = widgets.HTML(), widgets.HTML()
        self._button = widgets.Button(
            description="Measure error",
            icon="play",
            tooltip="run the sparse and the dense call now",
        )
        self._button.on_click(lambda _: self.measure())
        super().__init__(controls.knobs.values())

    @property
    def state(self) -> Any:
        """What the controls say."""
        return self.controls.state

    @property
    def measured(self) -> Measured | None:
        return self.session.measured(self.state)

    @property
    def frames(self) -> bytes:
        """PNG of the frames."""
        return bytes(self._frames.value)

    @property
    def summary(self) -> str:
        """HTML of the lines under the pictures."""
        return self._summary.value + self._pair_text.value

    @property
    def config(self) -> str:
        """The current setting as the configuration that every command reads (YAML)."""
        sparse, remarks = self._setting()
        attention = AttentionConfig(backend="CUTEDSL", sparse_attention_config=sparse)
        lines = [f"Turned by hand on {self.session.capture.title}.", *remarks]
        text = "".join(f"# {line}\n" for line in lines)
        return text + dump_config(VisualGenConfig(attention_config=attention))

    def measure(self) -> None:
        """Runs the sparse and the dense call of the current setting, however long they take."""
        self._measure.cancel()
        self._guard(MEASURING, self._call)

    def _setting(self) -> tuple[SolAttnConfig | SkipSoftmaxConfig, list[str]]:
        """The current setting for a server, and what a server cannot be told of it."""
        raise NotImplementedError

    def _describe(self, view: Any) -> str:
        """The line under the map."""
        raise NotImplementedError

    def _explain(self, view: Any) -> str:
        """The line about the chosen blocks."""
        raise NotImplementedError

    def _arrangement(self) -> list[widgets.Widget]:
        ran = [self._ran] if self.session.automatic else [self._ran, self._button]
        return [
            widgets.HTML(texts.heading(self.session)),
            self.controls.top(),
            self._problem,
            self._picture,
            self._summary,
            *ran,
            self._yaml,
            self.controls.pair(),
            self._pair_text,
            self._frames,
        ]

    def _redraw(self) -> None:
        """The fast part: everything that follows from one pass over q and k."""
        self._prepare()
        state = self.state
        self.view = view = self.session.view(state)
        selection = decisions.describe_selection(view.selected, view.own)
        self._show_map()
        alt = f"Query block {state.query_block} on the video frames. {selection}"
        self._frames.show(self._frames_panel.draw(view), alt)
        self._pair_text.value = texts.lines(self._explain(view), selection)
        self._yaml.value = texts.configuration(self.config)

    def _prepare(self) -> None:
        """Before any work: the controls offer what the chosen call has."""
        self.controls.offer_heads(self.session.heads_of(self.state.layer, self.state.step))

    def _remeasure(self) -> None:
        """The slow part, unless it is too slow to follow the controls."""
        if self.session.automatic:
            self._call()

    def _call(self) -> None:
        self._prepare()
        self.session.measure(self.state)
        drawn = self.view is not None and self.view.state == self.state
        # A picture that is still to be drawn will hold the errors anyway.
        if drawn and not self._errors_shown:
            self._show_map()

    def _show_map(self) -> None:
        if self.view is None:
            return
        summary = self._describe(self.view)
        png = self._map_panel.draw(self.view, self.measured)
        self._picture.show(png, f"Map and charts. {summary}")
        self._summary.value = texts.lines(summary)
        self._errors_shown = self.measured is not None

    def _show_what_ran(self) -> None:
        failed = MEASURING in self._errors
        self._ran.value = texts.what_ran(
            self.session, self.measured, self.state.head, failed=failed
        )
