"""A picture with places that answer: hover or focus shows a card, a click or Enter picks it.

The places are real buttons, so the Tab key reaches them and a screen reader reads their card.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import ipywidgets as widgets

from workbench.widgets.picture import Picture

STYLE = """<style>
.wb-spots {position: relative; overflow: visible !important}
.jupyter-widgets.jupyter-button.wb-spot {
  position: absolute; width: 22px; min-width: 0; height: 22px; margin: -11px 0 0 -11px; padding: 0;
  border: none; border-radius: 11px; background: transparent; box-shadow: none; font-size: 0;
  color: transparent; white-space: pre; text-align: left; line-height: 1.4; z-index: 1}
.jupyter-widgets.jupyter-button.wb-spot:hover,
.jupyter-widgets.jupyter-button.wb-spot:focus-visible {
  width: auto; height: auto; padding: 6px 10px; border: 1px solid #1f3f77; border-radius: 4px;
  background: #ffffff; color: #1c2430; font-size: 12px; box-shadow: 0 2px 8px #5d6876; z-index: 9}
.jupyter-widgets.jupyter-button.wb-spot:hover {z-index: 10}
.jupyter-widgets.jupyter-button.wb-spot.wb-left:hover,
.jupyter-widgets.jupyter-button.wb-spot.wb-left:focus-visible {
  transform: translateX(calc(-100% + 22px))}
</style>"""
MIDDLE = 0.45  # cards of places right of this open to the left


@dataclass(frozen=True)
class Spot:
    """One place.

    Attributes:
        name: what a pick hands over.
        x, y: shares of the picture from its top left corner.
        card: plain text, a line each.
    """

    name: str
    x: float
    y: float
    card: str


class SpotPicture(widgets.Box):
    """A picture with its places; ``show`` replaces both.

    Args:
        picked: called with the name of a place that was clicked.
    """

    def __init__(self, picture: Picture, picked: Callable[[str], None]):
        self._picture, self._picked = picture, picked
        self.spots: tuple[Spot, ...] = ()
        self._buttons: list[widgets.Button] = []
        picture.layout.margin = "0"
        super().__init__([picture], layout={"width": "100%", "max_width": "1240px"})
        self.add_class("wb-spots")

    def show(self, png: bytes, alt: str, spots: Sequence[Spot]) -> None:
        """The next picture, its text and its places."""
        self._picture.show(png, alt)
        if tuple(spots) != self.spots:
            self.spots = tuple(spots)
            self._buttons = [self._button(spot) for spot in spots]
            self.children = (self._picture, *self._buttons)

    def _button(self, spot: Spot) -> widgets.Button:
        button = widgets.Button(
            description=spot.card,
            tooltip="",  # else the browser would show the card a second time
            layout={"left": f"{100 * spot.x:.2f}%", "top": f"{100 * spot.y:.2f}%", "width": None},
        )
        button.add_class("wb-spot")
        if spot.x > MIDDLE:
            button.add_class("wb-left")
        button.on_click(lambda _: self._picked(spot.name))
        return button


def style() -> widgets.HTML:
    """What makes buttons into places; goes into the page once, and takes no room."""
    return widgets.HTML(STYLE, layout={"display": "none"})
