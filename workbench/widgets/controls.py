"""The knobs of TauTuner: labelled, with units, usable from the keyboard."""

from __future__ import annotations

import ipywidgets as widgets

from blockattn.layout import num_blocks
from blockattn.sol import THRESHOLD_TYPES
from workbench.widgets.session import TunerState, TuneSession


class Controls:
    """Widgets for every field of :class:`TunerState`; they allow only what the capture has."""

    def __init__(self, session: TuneSession):
        self._capture = session.capture
        first_layer, first_step = self._capture.entries[0]
        blocks = num_blocks(self._capture.grid.tokens)
        narrow = {"layout": {"width": "150px"}, "style": {"description_width": "52px"}}
        wide = {"layout": {"width": "98%"}, "style": {"description_width": "170px"}}
        half = {"layout": {"width": "49%"}, "style": {"description_width": "90px"}}
        layers = sorted({layer for layer, _ in self._capture.entries})
        self.layer = widgets.Dropdown(
            options=layers, value=first_layer, description="Layer", **narrow
        )
        self.step = widgets.Dropdown(
            options=self._steps(first_layer), value=first_step, description="Step", **narrow
        )
        self.head = widgets.Dropdown(options=range(session.heads), description="Head", **narrow)
        self.tau = widgets.FloatSlider(
            value=1.0,
            min=-1.0,
            max=4.0,
            step=0.05,
            description="tau (standard deviations)",
            readout_format=".2f",
            **wide,
        )
        self.thresh_type = widgets.Dropdown(
            options=THRESHOLD_TYPES,
            description="Threshold",
            tooltip="diag: variance without covariance, cheap; exact: variance of the scores",
            layout={"width": "180px"},
            style={"description_width": "84px"},
        )
        self.sink_tokens = widgets.BoundedIntText(
            value=0,
            min=0,
            max=self._capture.grid.tokens,
            step=64,
            description="Sink (last tokens)",
            layout={"width": "230px"},
            style={"description_width": "140px"},
        )
        # A query block in the middle of the video says more than the first one.
        self.query_block = widgets.IntSlider(
            value=blocks // 2, min=0, max=blocks - 1, description="Query block", **half
        )
        self.key_block = widgets.IntSlider(
            value=blocks // 4, min=0, max=blocks - 1, description="Key block", **half
        )
        self.layer.observe(self._follow_layer, names="value")

    @property
    def knobs(self) -> dict[str, widgets.ValueWidget]:
        """Every control by its field of :class:`TunerState`."""
        names = TunerState.__dataclass_fields__
        return {name: getattr(self, name) for name in names}

    @property
    def state(self) -> TunerState:
        """What the controls say now."""
        values = {name: knob.get_interact_value() for name, knob in self.knobs.items()}
        values["tau"] = round(values["tau"], 6)
        return TunerState(**values)

    def top(self) -> widgets.Widget:
        """Where to look and the method's knobs."""
        row = widgets.HBox(
            [self.layer, self.step, self.head, self.thresh_type, self.sink_tokens],
            layout={"flex_flow": "row wrap", "align_items": "center"},
        )
        return widgets.VBox([row, self.tau])

    def pair(self) -> widgets.Widget:
        """The block pair to explain."""
        return widgets.HBox([self.query_block, self.key_block], layout={"width": "98%"})

    def _steps(self, layer: int) -> list[int]:
        return [step for known, step in self._capture.entries if known == layer]

    def _follow_layer(self, change: dict) -> None:
        """A layer may have been recorded at other steps."""
        steps, current = self._steps(change["new"]), self.step.value
        if list(self.step.options) != steps:
            self.step.options = steps
            self.step.value = current if current in steps else steps[0]
