"""A window of a mask of any size, as a figure: what the route viewer shows, for papers."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle
from matplotlib.transforms import Affine2D

from workbench.decisions import Decision
from workbench.masks import Window
from workbench.views.blocks import below_map, class_legend, draw_classes, label_blocks
from workbench.views.route_map import RAMP
from workbench.views.style import DECISIONS, FAINT, QUERY, Look


def looks(rest: str) -> Mapping[Decision, Look]:
    """How decisions are drawn when the pairs that are not exact were treated as ``rest`` says."""
    base = DECISIONS[Decision.APPROXIMATE]
    return {**DECISIONS, Decision.APPROXIMATE: Look(rest, base.face, base.hatch, base.edge)}


def draw_mask(
    ax: Axes,
    window: Window,
    title: str = "",
    *,
    query: int | None = None,
    rest: str = "approximate",
) -> None:
    """Decisions where a cell is one pair, else the mean density with the pooling rule printed.

    Args:
        ax: where to draw.
        window: of :meth:`workbench.masks.Mask.window`.
        query: a query block whose row is marked.
        rest: what became of the pairs that are not exact.
    """
    rows, columns = window.rows, window.columns
    if window.classes is None:
        _draw_density(ax, window)
    else:
        draw_classes(ax, window.classes, looks(rest))
        _move(ax, rows, columns)
        numbers = np.bincount(window.classes.ravel(), minlength=len(Decision))
        class_legend(ax, looks(rest), {code: int(numbers[code]) for code in Decision})
    left, right, bottom, top = _edges(rows, columns)
    ax.set_xlim(left, right)
    ax.set_ylim(bottom, top)
    label_blocks(ax, "block", title)
    if query is not None and rows[0] <= query < rows[1]:
        corner = (columns[0] - 0.5, query - 0.5)
        mark = {"fill": False, "edgecolor": QUERY, "linewidth": 1.0}
        ax.add_patch(Rectangle(corner, columns[1] - columns[0], 1, **mark))


def _move(ax: Axes, rows: tuple[int, int], columns: tuple[int, int]) -> None:
    """Cells drawn from (0, 0) on to where the window lies."""
    ax.images[-1].set_extent(_edges(rows, columns))
    shift = Affine2D().translate(columns[0], rows[0]) + ax.transData
    for artist in (*ax.patches, *ax.collections):
        artist.set_transform(shift)


def _draw_density(ax: Axes, window: Window) -> None:
    down, across = window.density.shape
    # The last pixel may stand for fewer pairs, so the picture can overhang the axes by a fraction.
    bottom = window.rows[0] + down * window.factor[0]
    right = window.columns[0] + across * window.factor[1]
    extent = _edges((window.rows[0], bottom), (window.columns[0], right))
    shades = {"cmap": RAMP, "vmin": 0, "vmax": 1, "interpolation": "nearest"}
    ax.imshow(window.density, extent=extent, aspect="equal", **shades)
    levels = [("density 0", 0.0), ("0.5", 0.5), ("1", 1.0)]
    handles = [Patch(facecolor=RAMP(x), edgecolor=FAINT, label=text) for text, x in levels]
    below_map(ax, [*handles, Patch(alpha=0, label=window.rule)])


def _edges(rows: tuple[int, int], columns: tuple[int, int]) -> tuple[float, float, float, float]:
    return columns[0] - 0.5, columns[1] - 0.5, rows[1] - 0.5, rows[0] - 0.5
