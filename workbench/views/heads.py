"""Density and error of every head, side by side."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from numpy.typing import ArrayLike
from torch import Tensor

from workbench.views.style import ACCENT, INK, QUERY, SMALL, array, tidy

BAR = "#8fa3c4"
WRITTEN = 12  # values are written beside the bars up to this many heads


def draw_heads(
    ax: Axes,
    density: ArrayLike | Tensor,
    error: ArrayLike | Tensor | None = None,
    *,
    highlight: int | None = None,
    title: str = "",
) -> None:
    """A row per head: density as a bar, relative L2 error against dense as a diamond.

    Both are ratios on one axis; an error above 1 is drawn at the right edge and written out.

    Args:
        ax: where to draw.
        density: ``[heads]``, exact / valid pairs.
        error: ``[heads]``, relative L2 error; ``None`` = not measured yet, shown as an ellipsis.
        highlight: the head to draw in the accent colour.
    """
    bars = array(density)
    errors = None if error is None else array(error)
    rows = np.arange(len(bars))
    colors = [ACCENT if row == highlight else BAR for row in rows]
    thickness = 0.36 if len(rows) <= 3 else 0.6
    ax.barh(rows, bars, height=thickness, color=colors, zorder=3)
    if errors is not None:
        spots = np.clip(errors, 0, 1)
        size = 7 if len(rows) <= WRITTEN else 4.5
        ax.plot(spots, rows, "D", color=QUERY, markeredgecolor="white", markersize=size, zorder=5)
    if len(rows) <= WRITTEN:
        _write_values(ax, bars, errors)
    ax.set_xlim(0, 1)
    ax.set_ylim(len(rows) - 0.4, -0.6)
    tidy(ax, xlabel="density, and relative L2 error against dense", ylabel="", title=title)
    ax.grid(False, axis="y")
    shown = rows[:: -(-len(rows) // WRITTEN)]
    ax.set_yticks(shown, [f"head {row}" for row in shown])
    _legend(ax)


def _write_values(ax: Axes, bars: np.ndarray, errors: np.ndarray | None) -> None:
    """Density and error as numbers beyond the right edge, one line a head."""
    for row, value in enumerate(bars):
        shown = "…" if errors is None else f"{errors[row]:.3f}"
        place = ax.get_yaxis_transform()
        ax.text(1.02, row, f"{value:.3f}", transform=place, va="center", fontsize=SMALL, color=INK)
        ax.text(1.17, row, shown, transform=place, va="center", fontsize=SMALL, color=QUERY)


def _legend(ax: Axes) -> None:
    diamond = Line2D([], [], color=QUERY, marker="D", linestyle="none", markeredgecolor="white")
    diamond.set_label("error")
    handles = [Patch(facecolor=BAR, label="density"), diamond]
    ax.legend(
        handles=handles,
        loc="lower right",
        bbox_to_anchor=(1.34, 1.0),
        ncols=2,
        frameon=False,
        fontsize=SMALL,
        borderpad=0,
        columnspacing=1.0,
        handletextpad=0.4,
    )
