"""Some rows of a map: what a sample of query blocks attends exactly."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from numpy.typing import ArrayLike
from torch import Tensor

from blockattn import BlockRoute
from workbench.views.blocks import below_map, label_blocks
from workbench.views.route_map import RAMP
from workbench.views.style import FAINT, array

PIXELS = 1024  # across; more key blocks are shown as means of neighbours
NAMES = 16  # rows that still get their number


def draw_rows(
    ax: Axes,
    exact: ArrayLike | Tensor,
    places: Sequence[int],
    title: str = "",
    *,
    what: str = "block",
    rest: str = "approximate",
) -> None:
    """Rows of a routing or skip map one below the other, however far apart they are.

    Args:
        ax: where to draw.
        exact: bool ``[rows, Nk]``, the key blocks that each row attends exactly.
        places: index of every row in the whole map; written at the axis.
        title: e.g. layer, step, head and tau.
        what: a row is a ``block`` or a ``tile``.
        rest: what became of the other pairs: approximate, or skipped.
    """
    rows = torch.as_tensor(array(exact)).bool()
    if rows.shape[0] != len(places):
        raise ValueError(f"exact: {tuple(rows.shape)}, but places names {len(places)} rows")
    picture = BlockRoute.from_dense(rows[None, None], block=(1, 1)).image(size=PIXELS)
    factor = -(-rows.shape[1] // PIXELS)
    edge = (-0.5, picture.shape[1] * factor - 0.5, len(places) - 0.5, -0.5)
    shades = {"cmap": RAMP, "vmin": 0, "vmax": 1, "interpolation": "nearest"}
    ax.imshow(array(picture), extent=edge, aspect="auto", **shades)
    ax.set_xlim(-0.5, rows.shape[1] - 0.5)
    label_blocks(ax, what, title)
    named = np.unique(np.linspace(0, len(places) - 1, min(NAMES, len(places))).round().astype(int))
    ax.set_yticks(named, [f"{places[n]:,}" for n in named])
    ax.set_ylabel(f"query {what} (a sample)")
    levels = [("exact", 1.0), (rest, 0.0)]
    handles = [Patch(facecolor=RAMP(x), edgecolor=FAINT, label=text) for text, x in levels]
    if factor > 1:
        handles.append(Patch(alpha=0, label=f"1 pixel = mean of {factor} key {what}s"))
    below_map(ax, handles)
