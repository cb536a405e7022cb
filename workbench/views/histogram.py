"""How the scores of one head are spread, and what lies above the threshold."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter
from numpy.typing import ArrayLike
from torch import Tensor

from workbench.views.style import ACCENT, QUERY, SMALL, array, tidy

LIMITS = (-8.0, 12.0)
BINS = 72


def draw_histogram(
    ax: Axes,
    z: ArrayLike | Tensor,
    tau: float,
    *,
    title: str = "",
    xlabel: str = "z-score (standard deviations)",
    ylabel: str = "block pairs",
    limits: tuple[float, float] = LIMITS,
    label: str | None = None,
) -> None:
    """Histogram of z-scores with the tau line; what lies right of it is dark and has its share.

    Args:
        ax: where to draw.
        z: z-scores of one head's block pairs, any shape. Scores outside the limits are counted
            in the outermost bins; what is not finite is left out, and the title says how much.
        tau: the threshold in standard deviations.
        xlabel, ylabel, limits: for other quantities than z-scores, with units.
        label: text beside the line; by default the share above tau.
    """
    every = array(z).ravel()
    scores = every[np.isfinite(every)]
    if len(scores) < len(every):
        title = f"{title}  ({len(every) - len(scores):,} of {len(every):,} not finite)".strip()
    above = float((scores > np.float32(tau)).mean()) if scores.size else 0.0
    counts, edges = np.histogram(np.clip(scores, *limits), bins=BINS)
    ax.stairs(counts, edges, fill=True, color="#c5ced9")
    _fill_right(ax, counts, edges, tau)
    ax.axvline(tau, color=QUERY, linewidth=1.4)
    ax.set_xlim(min(edges[0], tau - 0.6), max(edges[-1], tau + 1.2))
    ax.set_ylim(0, max(1, int(counts.max())) * 1.25)
    tidy(ax, xlabel=xlabel, ylabel=ylabel, title=title)
    ax.yaxis.set_major_formatter(EngFormatter(sep=""))
    _label(ax, tau, label or f"{above:.1%} above\ntau = {tau:.2f}")


def _fill_right(ax: Axes, counts: np.ndarray, edges: np.ndarray, tau: float) -> None:
    """The part of the bars right of tau, cut within a bin."""
    inside = edges[edges > tau]
    if not inside.size or tau >= edges[-1]:
        return
    cut = edges if tau < edges[0] else np.concatenate([[tau], inside])
    ax.stairs(counts[len(counts) + 1 - len(cut) :], cut, fill=True, color=ACCENT)


def _label(ax: Axes, tau: float, text: str) -> None:
    low, high = ax.get_xlim()
    right = tau < low + 0.62 * (high - low)
    ax.annotate(
        text,
        (tau, ax.get_ylim()[1]),
        (6 if right else -6, -3),
        textcoords="offset points",
        ha="left" if right else "right",
        va="top",
        fontsize=SMALL,
        fontweight="bold",
        color=QUERY,
    )
