"""The knobs of ThresholdTuner: one threshold in two units, the tile, and what to explain."""

from __future__ import annotations

import ipywidgets as widgets

from blockattn.layout import num_blocks
from workbench.widgets.entry import ROW, EntryControls
from workbench.widgets.skip_session import LOWEST, SkipSession, SkipState, log2_of_factor

TILES = (128, 64)


STEP = 0.05  # of the slider, in log2(lambda)


class SkipControls(EntryControls):
    """Widgets for every field of :class:`SkipState`.

    The threshold has two handles: the slider and the factor. The factor is what counts, because a
    browser rounds a slider to whole steps, and a factor from a configuration must stay as it is.
    """

    def __init__(self, session: SkipSession):
        super().__init__(session)
        self._tokens = session.capture.grid.tokens
        tiles = num_blocks(self._tokens, TILES[0])
        wide = {"layout": {"width": "98%"}, "style": {"description_width": "170px"}}
        half = {"layout": {"width": "49%"}, "style": {"description_width": "90px"}}
        self.log2_threshold = widgets.FloatSlider(
            value=-4.0,
            min=LOWEST,
            max=0.0,
            step=STEP,
            description="log2(lambda)",
            readout_format=".2f",
            **wide,
        )
        self.factor = widgets.BoundedFloatText(
            value=2.0**-4 * self._tokens,
            min=0.0,
            max=float(self._tokens),
            description="Factor (lambda x keys)",
            tooltip="threshold_scale_factor, the number of configurations and calibrations",
            layout={"width": "270px"},
            style={"description_width": "150px"},
        )
        self.tile = widgets.Dropdown(
            options=[(f"{size} x {size}", size) for size in TILES],
            description="Tile (tokens)",
            layout={"width": "200px"},
            style={"description_width": "90px"},
        )
        self.query_block = widgets.IntSlider(
            value=tiles // 2, min=0, max=tiles - 1, description="Query tile", **half
        )
        self.key_block = widgets.IntSlider(
            value=tiles // 4, min=0, max=tiles - 1, description="Key tile", **half
        )
        self.log2_threshold.observe(self._follow_threshold, names="value")
        self.factor.observe(self._follow_factor, names="value")
        self.tile.observe(self._follow_tile, names="value")

    @property
    def knobs(self) -> dict[str, widgets.ValueWidget]:
        """Every control by its field of :class:`SkipState`; the factor stands for the threshold."""
        found = {name: getattr(self, name) for name in SkipState.__dataclass_fields__}
        found["log2_threshold"] = self.factor
        return found

    @property
    def state(self) -> SkipState:
        """What the controls say now."""
        values = {name: knob.get_interact_value() for name, knob in self.knobs.items()}
        values["log2_threshold"] = self._log2_of_factor
        return SkipState(**values)

    def top(self) -> widgets.Widget:
        """Where to look and the method's knobs."""
        row = [self.layer, self.step, self.head, self.tile, self.factor]
        return widgets.VBox([widgets.HBox(row, layout=ROW), self.log2_threshold])

    def pair(self) -> widgets.Widget:
        """The tile to explain."""
        return widgets.HBox([self.query_block, self.key_block], layout={"width": "98%"})

    @property
    def _log2_of_factor(self) -> float:
        return round(log2_of_factor(self.factor.get_interact_value(), self._tokens), 6)

    def _follow_threshold(self, change: dict) -> None:
        if abs(change["new"] - self._log2_of_factor) > STEP / 2:
            self.factor.value = 2.0 ** change["new"] * self._tokens

    def _follow_factor(self, change: dict) -> None:
        if abs(self.log2_threshold.value - self._log2_of_factor) > STEP / 2:
            self.log2_threshold.value = self._log2_of_factor

    def _follow_tile(self, change: dict) -> None:
        """The same place in the video, in tiles of the new size."""
        tiles = num_blocks(self._tokens, change["new"])
        for slider in (self.query_block, self.key_block):
            place = slider.value * change["old"] // change["new"]
            # The value moves between the two bounds, so that it never lies outside.
            slider.max = max(slider.max, tiles - 1)
            slider.value = min(place, tiles - 1)
            slider.max = tiles - 1
