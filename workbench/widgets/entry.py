"""Where in a capture to look: layer, step and head."""

from __future__ import annotations

import ipywidgets as widgets

from workbench.widgets.capture_session import CaptureSession

NARROW = {"layout": {"width": "150px"}, "style": {"description_width": "52px"}}
ROW = {"flex_flow": "row wrap", "align_items": "center"}


class EntryControls:
    """Dropdowns that offer only what the capture holds: a layer has the steps recorded for it."""

    def __init__(self, session: CaptureSession):
        self._entries = session.capture.entries
        layer, step = self._entries[0]
        layers = sorted({layer for layer, _ in self._entries})
        self.layer = widgets.Dropdown(options=layers, value=layer, description="Layer", **NARROW)
        self.step = widgets.Dropdown(
            options=self._steps(layer), value=step, description="Step", **NARROW
        )
        self.head = widgets.Dropdown(options=range(session.heads), description="Head", **NARROW)
        self.layer.observe(self._follow_layer, names="value")

    def offer_heads(self, count: int) -> None:
        """Another layer may have fewer heads; one that it lacks becomes its last one."""
        if len(self.head.options) != count:
            wanted = min(int(self.head.value or 0), count - 1)
            self.head.options = range(count)
            self.head.value = wanted

    def _steps(self, layer: int) -> list[int]:
        return [step for known, step in self._entries if known == layer]

    def _follow_layer(self, change: dict) -> None:
        steps, current = self._steps(change["new"]), self.step.value
        if list(self.step.options) != steps:
            self.step.options = steps
            self.step.value = current if current in steps else steps[0]
