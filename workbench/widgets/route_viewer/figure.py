"""What the viewer shows, as one Matplotlib figure for papers and for readers without a kernel."""

from __future__ import annotations

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from workbench import views
from workbench.masks import Mask, MaskSet, Window
from workbench.views.style import DPI

WIDTH, HEIGHT = 10.4, 5.6  # inches
MAP, INDEX = (0.06, 0.16, 0.42, 0.78), (0.57, 0.16, 0.4, 0.78)


def draw(
    book: MaskSet, mask: Mask, window: Window, density: np.ndarray, title: str, query: int
) -> Figure:
    """Map of a window, beside it the density of every layer and step where there are several.

    Args:
        book: for the names of the index.
        mask, window: the shown head and the part of it.
        density: ``[layers, steps]`` of the shown head, NaN where it is not known.
        title: what the map shows.
        query: the query block whose row is marked.
    """
    # Fixed places: a layout engine would draw every text twice, and the viewer waits for this.
    figure = Figure(figsize=(WIDTH, HEIGHT), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    views.draw_mask(figure.add_axes(MAP), window, title, query=query, rest=mask.rest)
    if density.size > 1:
        index = figure.add_axes(INDEX)
        name = "This head, every call"
        views.heatmap(index, density, book.layers, book.steps, "density", title=name)
    return figure
