"""The knobs of TauTuner: labelled, with units, usable from the keyboard."""

from __future__ import annotations

import ipywidgets as widgets

from blockattn.layout import num_blocks
from blockattn.sol import THRESHOLD_TYPES
from workbench.widgets.entry import ROW, EntryControls
from workbench.widgets.session import TunerState, TuneSession


class Controls(EntryControls):
    """Widgets for every field of :class:`TunerState`; they allow only what the capture has."""

    def __init__(self, session: TuneSession):
        super().__init__(session)
        tokens = session.capture.grid.tokens
        blocks = num_blocks(tokens)
        wide = {"layout": {"width": "98%"}, "style": {"description_width": "170px"}}
        half = {"layout": {"width": "49%"}, "style": {"description_width": "90px"}}
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
            max=tokens,
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
            layout=ROW,
        )
        return widgets.VBox([row, self.tau])

    def pair(self) -> widgets.Widget:
        """The block pair to explain."""
        return widgets.HBox([self.query_block, self.key_block], layout={"width": "98%"})
