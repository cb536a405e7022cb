"""What the viewer shows, as one Matplotlib figure for papers and for readers without a kernel."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from workbench import views
from workbench.masks import Mask, MaskSet, Window

WIDTH, HEIGHT = 10.4, 5.6  # inches
MAP, INDEX = (0.06, 0.16, 0.42, 0.78), (0.57, 0.16, 0.4, 0.78)


def draw(
    book: MaskSet, mask: Mask, window: Window, density: np.ndarray, title: str, query: int
) -> Figure:
    """Map of a window beside the density of every layer and step.

    Args:
        book: for the names of the index.
        mask, window: the shown head and the part of it.
        density: ``[layers, steps]`` of the shown head, NaN where it is not known.
        title: what the map shows.
        query: the query block whose row is marked.
    """
    figure = views.new_figure(WIDTH, HEIGHT)
    # Fixed places: a layout engine would measure every text, and a viewer is shown the sooner.
    figure.set_layout_engine("none")
    left, right = figure.add_axes(MAP), figure.add_axes(INDEX)
    views.draw_mask(left, window, title, query=query, rest=mask.rest)
    views.heatmap(right, density, book.layers, book.steps, "density", title="This head, every call")
    return figure
