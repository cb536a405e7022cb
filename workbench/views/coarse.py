"""VSA's coarse stage: attention between cube means, and the cubes that each row keeps."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import LogNorm
from matplotlib.patches import Rectangle
from numpy.typing import ArrayLike
from torch import Tensor

from workbench.views.blocks import label_blocks
from workbench.views.frames import outline
from workbench.views.style import INK, MUTED, QUERY, SMALL, array

DECADES = 4  # the colours span at most this much below the largest share


def draw_coarse(
    ax: Axes,
    shares: ArrayLike | Tensor,
    kept: ArrayLike | Tensor | None = None,
    *,
    query: int | None = None,
    title: str = "",
) -> None:
    """Share of the coarse attention of every (query cube, key cube), logarithmic; kept ones framed.

    Args:
        ax: where to draw.
        shares: ``[N, N]`` of one head of :func:`workbench.mechanisms.cubes.coarse_attention`.
        kept: bool ``[N, N]``, the selection, e.g. ``vsa_route(...).dense()[batch, head]``.
        query: a query cube whose row is marked.
        title: e.g. layer, step, head and sparsity.

    Raises:
        ValueError: a selection of another shape.
    """
    cells = array(shares).astype(float)
    top = float(cells.max())
    low = max(float(cells[cells > 0].min()), top * 10.0**-DECADES)
    norm = LogNorm(low, top if top > low else low * 10, clip=True)
    image = ax.imshow(np.maximum(cells, low), cmap="cividis", norm=norm, interpolation="nearest")
    if kept is not None:
        chosen = array(kept).astype(bool)
        if chosen.shape != cells.shape:
            raise ValueError(f"kept: shape {chosen.shape}, but shares has {cells.shape}")
        lines = list(outline(chosen) - 0.5)
        for color, width in ((INK, 2.4), ("white", 1.1)):
            ax.add_collection(LineCollection(lines, colors=color, linewidths=width))
    label_blocks(ax, "cube", title)
    if query is not None:
        box = {"fill": False, "edgecolor": QUERY, "linewidth": 1.8, "zorder": 5}
        ax.add_patch(Rectangle((-0.5, query - 0.5), cells.shape[1], 1, **box))
    bar = ax.figure.colorbar(image, ax=ax, pad=0.02)
    note = "share of the row; white frames: kept" if kept is not None else "share of the row"
    bar.set_label(note, color=INK, fontsize=SMALL)
    bar.ax.tick_params(colors=MUTED, labelsize=SMALL)
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
