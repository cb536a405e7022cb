"""Which tiles of one head a SkipSoftmax run computed and which it dropped."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import ArrayLike
from torch import Tensor

from workbench.decisions import TileState
from workbench.views.blocks import class_legend, draw_classes, label_blocks
from workbench.views.style import TILES, array


def draw_skip(ax: Axes, states: ArrayLike | Tensor, title: str = "") -> None:
    """Skip map: computed dark, skipped light, masked hatched; rows = query tiles.

    Args:
        ax: where to draw.
        states: uint8 ``[Nq, Nk]`` of :func:`workbench.decisions.skip_states`.
        title: e.g. layer, step, head, threshold and density.
    """
    grid = array(states)
    draw_classes(ax, grid, TILES)
    numbers = np.bincount(grid.ravel(), minlength=len(TileState))
    class_legend(ax, TILES, {state: int(numbers[state]) for state in TileState})
    label_blocks(ax, "tile", title)
