"""Which tiles of one head a SkipSoftmax run computed and which it dropped."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import ArrayLike
from torch import Tensor

from workbench.decisions import TileState
from workbench.views.blocks import class_legend, draw_classes, label_blocks
from workbench.views.marks import mark_frames, mark_row
from workbench.views.style import TILES, array


def draw_skip(
    ax: Axes,
    states: ArrayLike | Tensor,
    title: str = "",
    *,
    query: int | None = None,
    key: int | None = None,
    frame_edges: Sequence[float] = (),
) -> None:
    """Skip map: computed dark, skipped light, masked hatched; rows = query tiles.

    Args:
        ax: where to draw.
        states: uint8 ``[Nq, Nk]`` of :func:`workbench.decisions.skip_states`.
        title: e.g. layer, step, head, threshold and density.
        query, key, frame_edges: as of :func:`workbench.views.draw_route`, in tiles.
    """
    grid = array(states)
    draw_classes(ax, grid, TILES)
    numbers = np.bincount(grid.ravel(), minlength=len(TileState))
    class_legend(ax, TILES, {state: int(numbers[state]) for state in TileState})
    label_blocks(ax, "tile", title, pad=17 if len(frame_edges) > 2 else 6)
    mark_frames(ax, frame_edges)
    if query is not None:
        mark_row(ax, query, key, grid.shape)
