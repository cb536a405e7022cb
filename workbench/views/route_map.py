"""Which blocks of one head are exact, and by which rule."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.patches import Patch
from numpy.typing import ArrayLike
from torch import Tensor

from workbench.decisions import Decision, pooled_density
from workbench.views.blocks import below_map, class_legend, draw_classes, label_blocks
from workbench.views.marks import mark_frames, mark_row
from workbench.views.style import DECISIONS, FAINT, array

PIXELS = 512  # larger maps are shown as pooled density
# From the colour of approximate blocks to that of exact ones.
ENDS = [DECISIONS[code].face for code in (Decision.APPROXIMATE, Decision.ROUTED)]
RAMP = LinearSegmentedColormap.from_list("density", ENDS)


def draw_route(
    ax: Axes,
    classes: ArrayLike | Tensor,
    title: str = "",
    *,
    query: int | None = None,
    key: int | None = None,
    frame_edges: Sequence[float] = (),
) -> None:
    """Routing map: four decisions told apart by lightness and hatch, rows = query blocks.

    Args:
        ax: where to draw.
        classes: uint8 ``[Nq, Nk]`` of :func:`workbench.decisions.classify`. Above 512 blocks a
            side it is shown as the mean density of square groups of pairs, with that rule printed.
        title: e.g. layer, step, head, tau and density.
        query, key: a query block whose row is marked, and a key block in it.
        frame_edges: block positions where latent frames begin
            (:func:`workbench.decisions.frame_edges`).
    """
    grid = array(classes)
    if max(grid.shape) > PIXELS:
        _draw_pooled(ax, grid)
    else:
        draw_classes(ax, grid, DECISIONS)
        numbers = np.bincount(grid.ravel(), minlength=len(Decision))
        class_legend(ax, DECISIONS, {code: int(numbers[code]) for code in Decision})
    label_blocks(ax, "block", title, pad=17 if len(frame_edges) > 2 else 6)
    mark_frames(ax, frame_edges)
    if query is not None:
        mark_row(ax, query, key, grid.shape)


def _draw_pooled(ax: Axes, grid: np.ndarray) -> None:
    picture, factor = pooled_density(torch.as_tensor(grid), PIXELS)
    rows, columns = grid.shape
    extent = (-0.5, columns - 0.5, rows - 0.5, -0.5)
    # The last pixel may cover fewer pairs, so the picture can overhang the axes by a fraction.
    overhang = (-0.5, picture.shape[1] * factor - 0.5, picture.shape[0] * factor - 0.5, -0.5)
    shades = {"cmap": RAMP, "vmin": 0, "vmax": 1, "interpolation": "nearest"}
    ax.imshow(array(picture), extent=overhang, aspect="equal", **shades)
    ax.set_xlim(*extent[:2])
    ax.set_ylim(*extent[2:])
    levels = [("density 0", 0.0), ("0.5", 0.5), ("1", 1.0)]
    handles = [Patch(facecolor=RAMP(x), edgecolor=FAINT, label=text) for text, x in levels]
    rule = f"1 pixel = mean of {factor} x {factor} pairs"
    below_map(ax, [*handles, Patch(alpha=0, label=rule)])
