"""What the viewer shows, as one Matplotlib figure for papers and for readers without a kernel."""

from __future__ import annotations

import io

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from workbench import views
from workbench.masks import Mask, MaskSet, Window
from workbench.views.style import DPI

WIDTH, HEIGHT = 10.4, 5.6  # inches
ALONE = 5.4  # inches that the map takes without an index
MAP, INDEX = (0.06, 0.16, 0.42, 0.78), (0.57, 0.16, 0.4, 0.78)
QUICK_DPI = 100


def draw(
    book: MaskSet, mask: Mask, window: Window, density: np.ndarray, title: str, query: int
) -> Figure:
    """Map of a window, beside it the density of every layer and step where several are known.

    Args:
        book: for the names of the index.
        mask, window: the shown head and the part of it.
        density: ``[layers, steps]`` of the shown head, NaN where it is not known.
        title: what the map shows.
        query: the query block whose row is marked.
    """
    # Fixed places: a layout engine would draw every text twice, and the viewer waits for this.
    several = np.isfinite(density).sum() > 1
    width = WIDTH if several else ALONE
    figure = Figure(figsize=(width, HEIGHT), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    left, bottom, across, up = MAP
    scale = WIDTH / width
    place = (left * scale, bottom, across * scale, up)
    views.draw_mask(figure.add_axes(place), window, title, query=query, rest=mask.rest)
    if several:
        index = figure.add_axes(INDEX)
        name = "This head, every call"
        views.heatmap(index, density, book.layers, book.steps, "density", title=name)
    return figure


def quick_png(figure: Figure) -> bytes:
    """A PNG for the page, made in about half the time: the viewer appears only behind it.

    A pooled mask is noise to a compressor, so little is lost by not trying hard.
    """
    buffer = io.BytesIO()
    options = {"metadata": {"Software": None}, "pil_kwargs": {"compress_level": 1}}
    figure.savefig(buffer, format="png", dpi=QUICK_DPI, **options)
    return buffer.getvalue()
