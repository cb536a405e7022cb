"""How far videos are from their dense run, a column for each way to compute them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import ArrayLike

from workbench.views.style import FAINT, INK, QUERY, SMALL, array, tidy


def draw_distances(
    ax: Axes,
    names: Sequence[str],
    distances: ArrayLike,
    *,
    ylabel: str = "relative L2 from dense",
    title: str = "",
) -> None:
    """A point for each pair of prompt and seed, a line through each pair, a bar at the mean.

    The scale is logarithmic: rounding and another seed are orders of magnitude apart. Distances of
    0 have no place on it and are written below their name.

    Args:
        ax: where to draw.
        names: of the columns.
        distances: ``[names, pairs]``, at least 0; NaN leaves a gap.

    Raises:
        ValueError: another number of rows than names.
    """
    values = array(distances)
    if values.ndim != 2 or len(values) != len(names):
        raise ValueError(f"distances {values.shape}: must be [{len(names)} names, pairs]")
    shown = np.where(values > 0, values, np.nan)
    x = np.arange(len(names))
    ax.plot(x, shown, "-", color=FAINT, linewidth=1.0, zorder=1)
    for column, row in enumerate(shown):
        ax.plot(np.full(row.shape, column), row, "o", color=QUERY, markersize=5, alpha=0.7)
        if np.isfinite(row).any():
            mean = float(np.nanmean(row))
            ax.plot([column - 0.18, column + 0.18], [mean, mean], color=INK, linewidth=2.0)
            ax.annotate(
                f"{mean:.3g}",
                (column, mean),
                (0, 9),
                textcoords="offset points",
                ha="center",
                fontsize=SMALL,
                color=INK,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0},
            )
    zero = (values == 0).sum(axis=1)
    labels = [f"{name}\n{n} equal" if n else name for name, n in zip(names, zero)]
    tidy(ax, xlabel="", ylabel=ylabel, title=title)
    ax.set_yscale("log")
    ax.margins(y=0.1)
    ax.set_xticks(x, labels, fontsize=SMALL)
    ax.set_xlim(-0.5, len(names) - 0.5)
