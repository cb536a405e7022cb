"""The knobs of Compare: where to look, and two sides of which each shows its own knobs alone."""

from __future__ import annotations

import ipywidgets as widgets

from blockattn.impl import registry
from blockattn.sol import THRESHOLD_TYPES
from workbench.comparison import ALGORITHMS, Setting
from workbench.widgets.compare_session import CompareSession, CompareState
from workbench.widgets.entry import ROW, EntryControls
from workbench.widgets.skip_controls import TILES
from workbench.widgets.skip_session import LOWEST

USED = {
    "sol_attn": ("tau", "thresh_type", "sink_tokens"),
    "skip_softmax": ("log2_threshold", "tile"),
    "dense": (),
}


class Side:
    """Widgets for every field of a :class:`workbench.comparison.Setting`."""

    def __init__(self, name: str, tokens: int, tau: float):
        wide = {"layout": {"width": "96%"}, "style": {"description_width": "170px"}}
        small = {"layout": {"width": "47%"}, "style": {"description_width": "106px"}}
        self.name = name
        self.algorithm = widgets.Dropdown(options=ALGORITHMS, description="Algorithm", **small)
        self.impl = widgets.Dropdown(
            options=("auto", *registry.names()), description="Implementation", **small
        )
        self.tau = widgets.FloatSlider(
            value=tau,
            min=-1.0,
            max=4.0,
            step=0.05,
            description="tau (standard deviations)",
            readout_format=".2f",
            **wide,
        )
        self.thresh_type = widgets.Dropdown(
            options=THRESHOLD_TYPES, description="Threshold", **small
        )
        self.sink_tokens = widgets.BoundedIntText(
            min=0, max=tokens, step=64, description="Sink (tokens)", **small
        )
        self.log2_threshold = widgets.FloatSlider(
            value=-4.0,
            min=LOWEST,
            max=0.0,
            step=0.25,
            description="log2(lambda)",
            readout_format=".2f",
            **wide,
        )
        self.tile = widgets.Dropdown(
            options=[(f"{size} x {size}", size) for size in TILES],
            description="Tile (tokens)",
            **small,
        )
        self.algorithm.observe(lambda _: self._show_used(), names="value")
        self._show_used()

    @property
    def knobs(self) -> dict[str, widgets.ValueWidget]:
        """Every control by its field."""
        return {name: getattr(self, name) for name in Setting.__dataclass_fields__}

    @property
    def setting(self) -> Setting:
        """What the controls say. Knobs of other algorithms stay at their defaults."""
        names = ("algorithm", "impl", *self._used)
        return Setting(**{name: getattr(self, name).get_interact_value() for name in names})

    def box(self) -> widgets.Widget:
        """The side as a column under its name."""
        which = widgets.HBox([self.algorithm, self.impl], layout=ROW)
        rest = widgets.HBox([self.thresh_type, self.sink_tokens, self.tile], layout=ROW)
        heading = widgets.HTML(f"<b>{self.name}</b>")
        column = [heading, which, self.tau, self.log2_threshold, rest]
        border = {"border_left": "4px solid #aab4c0", "padding": "0 0 0 8px", "width": "49%"}
        return widgets.VBox(column, layout=border)

    @property
    def _used(self) -> tuple[str, ...]:
        return USED[self.algorithm.get_interact_value()]

    def _show_used(self) -> None:
        for name in (name for names in USED.values() for name in names):
            getattr(self, name).layout.display = None if name in self._used else "none"


class CompareControls(EntryControls):
    """Layer, step, head, and the sides A and B."""

    def __init__(self, session: CompareSession):
        super().__init__(session)
        tokens = session.capture.grid.tokens
        self.a, self.b = Side("A", tokens, 1.0), Side("B", tokens, 2.0)

    @property
    def knobs(self) -> list[widgets.ValueWidget]:
        """All controls."""
        sides = [*self.a.knobs.values(), *self.b.knobs.values()]
        return [self.layer, self.step, self.head, *sides]

    @property
    def state(self) -> CompareState:
        """What the controls say now."""
        layer, step, head = (x.get_interact_value() for x in (self.layer, self.step, self.head))
        return CompareState(layer, step, head, self.a.setting, self.b.setting)

    def top(self) -> widgets.Widget:
        """Everything, the sides next to each other."""
        where = widgets.HBox([self.layer, self.step, self.head], layout=ROW)
        return widgets.VBox([where, widgets.HBox([self.a.box(), self.b.box()])])
