"""A PNG with a text for readers who do not see it."""

from __future__ import annotations

import ipywidgets as widgets
from traitlets import Unicode


class Picture(widgets.Image):
    """``widgets.Image`` whose ``tooltip`` works: it becomes the title, and so the accessible name.

    The browser side of ipywidgets 8.1 asks every widget with a tooltip for its description, which
    an Image does not have, and then shows nothing at all.
    """

    description = Unicode("").tag(sync=True)

    def __init__(self):
        room = {"width": "100%", "max_width": "1240px", "display": "none"}
        super().__init__(format="png", layout=room)

    def show(self, png: bytes, alt: str) -> None:
        """The next picture and its text. Until the first one it takes no room."""
        self.value = png
        self.layout.display = None
        self.tooltip = alt
