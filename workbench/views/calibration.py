"""What a calibration says: the fit and its hold-out, solved against delivered, recall at a budget.

Plain numbers in, so that the pictures know nothing of how they were computed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import ArrayLike
from torch import Tensor

from workbench.views.style import ACCENT, FAINT, INK, MUTED, QUERY, SMALL, array, tidy

POINTS = 200  # of a drawn curve
COLORS, MARKERS = (ACCENT, QUERY, MUTED), "osD^v"


def draw_fit(
    ax: Axes,
    sparsity: ArrayLike,
    factor: ArrayLike,
    coefficients: tuple[float, float],
    *,
    label: str = "fitted points",
    title: str = "",
) -> None:
    """Points and a * exp(b * sparsity): solid where it was fitted, dotted where it extrapolates.

    Args:
        ax: where to draw; the factor is logarithmic.
        sparsity, factor: ``[n]``, the points that were fitted.
        coefficients: (a, b).
        label: of the points, such as the sequence length they come from.
    """
    x, y, (a, b) = array(sparsity), array(factor), coefficients
    low, high = float(x.min()), float(x.max())
    ax.plot(x, y, "o", color=ACCENT, markersize=4, alpha=0.7, label=label, zorder=4)
    inside = np.linspace(low, high, POINTS)
    text = f"{a:.4g} * exp({b:.4g} * sparsity)"
    ax.plot(inside, a * np.exp(b * inside), color=INK, linewidth=1.8, label=text, zorder=3)
    for start, stop in ((0.0, low), (high, 1.0)):
        outside = np.linspace(start, stop, POINTS)
        name = "extrapolation" if start == 0.0 else None
        style = {"color": MUTED, "linestyle": ":", "linewidth": 1.4, "label": name}
        ax.plot(outside, a * np.exp(b * outside), **style)
    ax.axvspan(low, high, color=FAINT, alpha=0.18, linewidth=0)
    ax.set_yscale("log")
    ax.set_xlim(0, 1)
    tidy(
        ax,
        xlabel="sparsity (skipped / valid tiles)",
        ylabel="threshold_scale_factor (lambda * Sk)",
        title=title,
    )
    ax.legend(frameon=False, fontsize=SMALL, labelcolor=INK)


def draw_residuals(ax: Axes, sparsity: ArrayLike, residuals: ArrayLike, *, title: str = "") -> None:
    """ln(factor) - ln(fit) of every fitted point, around zero."""
    ax.axhline(0, color=INK, linewidth=1.2)
    ax.vlines(array(sparsity), 0, array(residuals), color=FAINT, linewidth=1.0)
    ax.plot(array(sparsity), array(residuals), "o", color=ACCENT, markersize=4, zorder=3)
    tidy(
        ax,
        xlabel="sparsity (skipped / valid tiles)",
        ylabel="residual, ln(factor / fit)",
        title=title,
    )


def draw_transfer(
    ax: Axes, requested: ArrayLike, delivered: ArrayLike, *, labels: Sequence[str], title: str = ""
) -> None:
    """Sparsity that a fit delivers against the one asked for; the diagonal is a perfect transfer.

    Args:
        ax: where to draw.
        requested, delivered: ``[n]``, or a list of such for several hold-outs.
        labels: a name for each hold-out.

    Raises:
        ValueError: not as many labels as hold-outs.
    """
    pairs = list(zip(_several(requested), _several(delivered), strict=True))
    if len(pairs) != len(labels):
        raise ValueError(f"labels={list(labels)!r}: must name {len(pairs)} hold-outs")
    ax.plot([0, 1], [0, 1], color=MUTED, linewidth=1.0, linestyle="--", label="as requested")
    for index, ((x, y), name) in enumerate(zip(pairs, labels)):
        look = {"color": COLORS[index % len(COLORS)], "markersize": 5, "linewidth": 1.3}
        ax.plot(x, y, f"{MARKERS[index % len(MARKERS)]}-", label=name, **look)
    top = max(float(np.max(x)) for pair in pairs for x in pair) * 1.08
    ax.set_xlim(0, top)
    ax.set_ylim(0, top)
    tidy(ax, xlabel="sparsity requested", ylabel="sparsity delivered", title=title)
    ax.legend(frameon=False, fontsize=SMALL, labelcolor=INK)


def draw_delivery(
    ax: Axes,
    groups: Sequence[str],
    requested: float,
    predicted: ArrayLike,
    delivered: ArrayLike,
    *,
    spread: ArrayLike | None = None,
    band: float = 0.005,
    ylabel: str = "density (exact / valid pairs)",
    title: str = "",
) -> None:
    """Predicted and delivered beside the request, a column for each group of calls.

    Args:
        ax: where to draw.
        groups: names of what has a value of its own.
        requested: the target, drawn as a line with a band around it.
        predicted, delivered: ``[groups]``; NaN leaves a gap.
        spread: ``[videos, groups]``, single videos of what was delivered.
        band: half its width.
    """
    x = np.arange(len(groups))
    ax.axhspan(requested - band, requested + band, color=FAINT, alpha=0.3, linewidth=0)
    ax.axhline(requested, color=INK, linewidth=1.4, label=f"requested {requested:g}")
    ax.plot(x - 0.12, array(predicted), "s", color=MUTED, markersize=7, label="predicted (dense)")
    if spread is not None:
        for video in array(spread):
            ax.plot(x + 0.12, video, "_", color=QUERY, markersize=9, alpha=0.6)
    ax.plot(x + 0.12, array(delivered), "o", color=QUERY, markersize=7, label="delivered (sparse)")
    tidy(ax, xlabel="", ylabel=ylabel, title=title)
    few = len(groups) < 4
    ax.set_xticks(x, groups, rotation=0 if few else 30, fontsize=SMALL)
    ax.set_xlim(-0.6, len(groups) - 0.4)
    place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.09 if few else -0.19), "ncols": 3}
    ax.legend(frameon=False, fontsize=SMALL, labelcolor=INK, **place)


def draw_recall(
    ax: Axes,
    recall: ArrayLike | Tensor,
    best: ArrayLike | Tensor,
    colors: ArrayLike | Tensor,
    *,
    label: str,
    title: str = "",
) -> None:
    """Attention mass that a route holds against the most that any could with as many blocks.

    Args:
        ax: where to draw.
        recall, best: ``[n]`` in [0, 1], a point for each head of each call.
        colors: ``[n]``, a quantity that colours the points; label names it.
    """
    ax.plot([0, 1], [0, 1], color=MUTED, linewidth=1.0, linestyle="--", label="perfect router")
    points = ax.scatter(array(best), array(recall), c=array(colors), cmap="cividis", s=16, zorder=3)
    bar = ax.figure.colorbar(points, ax=ax, pad=0.02)
    bar.set_label(label, color=INK, fontsize=SMALL + 0.5)
    bar.ax.tick_params(colors=MUTED, labelsize=SMALL)
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
    ax.set_xlim(0, 1.02)
    ax.set_ylim(0, 1.02)
    tidy(
        ax,
        xlabel="most that any router holds (share of mass)",
        ylabel="recall of this one",
        title=title,
    )
    ax.legend(frameon=False, fontsize=SMALL, labelcolor=INK)


def _several(values: ArrayLike) -> list[np.ndarray]:
    """One row, or several of different lengths."""
    if isinstance(values, list) and values and not np.isscalar(values[0]):
        return [np.asarray(row, dtype=float) for row in values]
    return [np.asarray(values, dtype=float)]
