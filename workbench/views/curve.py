"""A quantity of every head against tau or against a threshold."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import ArrayLike
from torch import Tensor

from workbench.views.style import ACCENT, FAINT, INK, MUTED, QUERY, SMALL, array, tidy

DASHES = ("-", "--", ":", "-.")


def draw_curve(
    ax: Axes,
    taus: ArrayLike | Tensor,
    per_head: ArrayLike | Tensor,
    current: tuple[float, float] | None = None,
    labels: Sequence[str] | None = None,
    *,
    highlight: int | None = None,
    xlabel: str = "tau (standard deviations above the mean score)",
    ylabel: str = "density (exact / valid pairs)",
    title: str = "",
    ylim: tuple[float, float] | None = (0.0, 1.0),
    log: bool = False,
) -> None:
    """One thin line per head, their mean bold, and the current point with its value.

    Args:
        ax: where to draw.
        taus: ``[n]``, the setting along x.
        per_head: ``[heads, n]``, the quantity; NaN leaves a gap.
        current: (x, y) of the point to mark.
        labels: a name for each line; shown for up to four lines.
        highlight: index of the head to draw in the accent colour.
        xlabel, ylabel: with units.
        ylim: ``None`` fits the data.
        log: logarithmic y axis, for errors.
    """
    x, lines = array(taus), np.atleast_2d(array(per_head))
    few = len(lines) <= len(DASHES)
    for index, line in enumerate(lines):
        chosen = index == highlight
        name = labels[index] if few and labels is not None else None
        style = DASHES[index] if few else "-"
        color, width = (ACCENT, 1.9) if chosen else (MUTED if few else FAINT, 1.1)
        ax.plot(x, line, style, color=color, linewidth=width, label=name, zorder=3 + chosen)
    if len(lines) > 1:
        mean = lines.mean(axis=0)
        ax.plot(x, mean, color=INK, linewidth=2.6, alpha=0.85, label="mean", zorder=3.5)
    if log:
        ax.set_yscale("log")
    elif ylim is not None:
        ax.set_ylim(*ylim)
    if x.min() < x.max():
        ax.set_xlim(float(x.min()), float(x.max()))
    tidy(ax, xlabel=xlabel, ylabel=ylabel, title=title)
    if current is not None:
        _mark(ax, current)
    if ax.get_legend_handles_labels()[1]:
        ax.legend(frameon=False, fontsize=SMALL, labelcolor=INK, handlelength=2.4)


def _mark(ax: Axes, point: tuple[float, float]) -> None:
    x, y = point
    ax.axvline(x, color=QUERY, linewidth=1.0, zorder=2)
    ax.plot(x, y, "o", color=QUERY, markeredgecolor="white", markersize=8, zorder=6)
    # The label stays inside the axes, on the side with more room, on a pale ground.
    across, up = (ax.transData + ax.transAxes.inverted()).transform(point)
    left, below = across > 0.6, up > 0.85
    ax.annotate(
        f"{y:#.3g}",
        (x, y),
        (-9 if left else 9, -16 if below else 8),
        textcoords="offset points",
        ha="right" if left else "left",
        fontsize=SMALL + 1,
        fontweight="bold",
        color=QUERY,
        bbox={"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 1.0},
        zorder=7,
    )
