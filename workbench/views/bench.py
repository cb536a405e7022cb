"""Measured speed as pictures: figures against targets, where time goes, rates, break-even."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from numpy.typing import ArrayLike

from workbench.views.style import ACCENT, FAINT, INK, MUTED, QUERY, SMALL, array, tidy

PARTS = {"prepare": "#f6cf6b", "route": "#4aa3a8", "attend": ACCENT}  # told apart in grey as well
LINES = (("o-", ACCENT), ("s--", "#4aa3a8"), ("D:", "#8a6d00"), ("^-.", MUTED), ("v--", FAINT))


def draw_targets(
    ax: Axes,
    names: Sequence[str],
    scores: ArrayLike,
    aims: ArrayLike,
    texts: Sequence[str],
    *,
    title: str = "",
) -> None:
    """A point per figure on an axis on which 1 is the requirement and larger is better.

    Args:
        ax: where to draw.
        names: of the figures.
        scores: ``[n]``, how many times better than required; NaN where that has no meaning.
        aims: ``[n]``, where the wish lies, drawn as a bar across.
        texts: the figures themselves, written to the right.
    """
    x, wish = array(scores).astype(float), array(aims).astype(float)
    rows = np.arange(len(names))
    reached = x >= 1
    ax.axvline(1.0, color=INK, linewidth=1.2, zorder=2)
    ax.hlines(rows, 1.0, np.nan_to_num(x, nan=1.0), color=FAINT, linewidth=2.0, zorder=2)
    ax.plot(wish, rows, "|", color=INK, markersize=13, markeredgewidth=1.6, zorder=3)
    ax.plot(x[reached], rows[reached], "o", color=ACCENT, markersize=8, zorder=4)
    missed = {"markerfacecolor": "white", "markeredgewidth": 2.0, "markersize": 8, "zorder": 4}
    ax.plot(x[~reached], rows[~reached], "o", color=QUERY, **missed)
    for row, text in enumerate(texts):
        place = ax.get_yaxis_transform()
        ax.text(1.02, row, text, transform=place, va="center", fontsize=SMALL, color=MUTED)
    ax.set_xscale("log", base=2)
    known = np.concatenate([x[np.isfinite(x)], wish[np.isfinite(wish)], [1.0]])
    low, high = min(float(known.min()), 0.5), max(float(known.max()), 2.0)
    ax.set_xlim(low / 1.15, high * 1.15)
    ticks = 2.0 ** np.arange(np.ceil(np.log2(low)), np.floor(np.log2(high)) + 1)
    ax.set_ylim(len(names) - 0.4, -0.6)
    tidy(ax, xlabel="times better than required", ylabel="", title=title)
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.minorticks_off()
    ax.grid(False, axis="y")
    ax.set_yticks(rows, names)
    ax.legend(
        handles=_target_legend(),
        ncols=3,
        **_LEGEND,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.13),
    )


def _target_legend() -> list[Line2D]:
    common = {"linestyle": "none", "markersize": 8}
    return [
        Line2D([], [], marker="o", color=ACCENT, label="reached", **common),
        Line2D([], [], marker="o", color=QUERY, markerfacecolor="white", label="missed", **common),
        Line2D([], [], marker="|", color=INK, markeredgewidth=1.6, label="aim", **common),
    ]


def draw_split(
    ax: Axes,
    names: Sequence[str],
    parts: Mapping[str, ArrayLike],
    bounds: ArrayLike,
    *,
    title: str = "",
) -> None:
    """Stacked times of prepare, route and attend of every case, and the bound under each.

    Args:
        ax: where to draw.
        names: of the cases.
        parts: milliseconds ``[n]`` by part, in the order of drawing.
        bounds: milliseconds ``[n]``.
    """
    rows, left = np.arange(len(names)), np.zeros(len(names))
    for name, values in parts.items():
        width = array(values).astype(float)
        ax.barh(rows, width, 0.6, left=left, color=PARTS[name], label=name, zorder=3)
        left = left + width
    limit = array(bounds).astype(float)
    ax.vlines(limit, rows - 0.42, rows + 0.42, color=QUERY, linewidth=2.2, label="bound", zorder=4)
    for row, (whole, bound) in enumerate(zip(left, limit)):
        text = f"{whole:.2f} ms = {whole / bound:.2f} x bound"
        ax.text(1.02, row, text, transform=ax.get_yaxis_transform(), va="center", fontsize=SMALL,
                color=MUTED)  # fmt: skip
    ax.set_xlim(0, 1.06 * float(max(left.max(), limit.max())))
    ax.set_ylim(len(names) - 0.4, -0.6)
    tidy(ax, xlabel="milliseconds", ylabel="", title=title)
    ax.grid(False, axis="y")
    ax.set_yticks(rows, names)
    ax.legend(ncols=4, **_LEGEND, loc="upper center", bbox_to_anchor=(0.5, -0.13))


def draw_rates(
    ax: Axes,
    density: ArrayLike,
    rates: Mapping[str, ArrayLike],
    dense: tuple[str, float],
    *,
    title: str = "",
) -> None:
    """TFLOP/s of every implementation against the density of a block mask.

    Args:
        ax: where to draw.
        density: ``[n]``, exact / valid pairs.
        rates: TFLOP/s ``[n]`` over the exact pairs, by implementation; NaN leaves a gap.
        dense: name and TFLOP/s of the dense baseline.
    """
    x = array(density).astype(float)
    for (style, color), (name, values) in zip(LINES, rates.items()):
        ax.plot(100 * x, array(values).astype(float), style, color=color, label=name, zorder=3)
    ax.axhline(dense[1], color=INK, linewidth=1.2)
    label = f"dense {dense[0]}: {dense[1]:.0f}"
    ax.annotate(label, (0.99, dense[1]), (0, 4), xycoords=("axes fraction", "data"),
                textcoords="offset points", ha="right", fontsize=SMALL, color=INK)  # fmt: skip
    ax.set_ylim(0, 1.18 * dense[1])
    tidy(ax, xlabel="density (exact / valid pairs), %", ylabel="TFLOP/s", title=title)
    ax.set_xticks(100 * x, [f"{100 * value:.3g}" for value in x])
    ax.legend(**_LEGEND, loc="lower right")


def draw_break_even(
    ax: Axes, ladders: Mapping[str, tuple[ArrayLike, ArrayLike, float | None]], *, title: str = ""
) -> None:
    """Speed-up of whole calls over dense against density, and where it crosses 1.

    Args:
        ax: where to draw.
        ladders: densities ``[n]``, speed-ups ``[n]`` and the break-even density, by kind of data.
    """
    smallest = 1.0
    for (style, color), (name, (density, speed, crossing)) in zip(LINES, ladders.items()):
        x = array(density).astype(float)
        smallest = min(smallest, float(x.min()))
        known = "none" if crossing is None else f"{crossing:.2f}"
        label = f"{name}, break-even {known}"
        ax.plot(x, array(speed).astype(float), style, color=color, label=label, zorder=3)
        if crossing is not None:
            ax.plot(crossing, 1.0, "o", color=QUERY, markeredgecolor="white", zorder=5)
    x = np.geomspace(smallest, 1.0, 60)
    ax.plot(x, 1 / (x + 1 / 64), color=FAINT, linewidth=1.4, label="bound 1 / (density + 1/64)")
    ax.axhline(1.0, color=INK, linewidth=1.2)
    ax.set_xscale("log")
    ax.set_yscale("log")
    tidy(ax, xlabel="density (exact / valid pairs)", ylabel="speed-up over dense", title=title)
    for axis, values in (
        (ax.xaxis, (0.02, 0.05, 0.1, 0.2, 0.5, 1)),
        (ax.yaxis, (0.5, 1, 2, 5, 10, 20)),
    ):
        axis.set_ticks(values, [f"{value:g}" for value in values])
    ax.minorticks_off()
    ax.legend(**_LEGEND, loc="upper right")


_LEGEND = {"frameon": False, "fontsize": SMALL, "labelcolor": INK}
