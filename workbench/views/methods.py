"""One quantity of several methods as bars with standard errors, or a text where there is none."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill

from matplotlib.axes import Axes
from numpy.typing import ArrayLike
from torch import Tensor

from workbench.views.heads import BAR
from workbench.views.style import ACCENT, INK, MUTED, SMALL, array, tidy


def draw_methods(
    ax: Axes,
    names: Sequence[str],
    values: ArrayLike | Tensor,
    errors: ArrayLike | Tensor | None = None,
    *,
    highlight: int | None = None,
    label: str = "",
    title: str = "",
    missing: str = "",
) -> None:
    """A bar per method with its value and standard error; without methods, why there are none.

    Args:
        ax: where to draw.
        names: of the methods; empty shows `missing` instead.
        values, errors: ``[methods]``, the value and its standard error.
        highlight: the method to draw in the accent colour.
        label: quantity and unit.
    """
    if not len(names):
        ax.set_axis_off()
        ax.text(0.0, 0.5, fill(missing, 90), color=INK, fontsize=SMALL + 1.5, va="center")
        return
    numbers = array(values)
    spread = None if errors is None else array(errors)
    colors = [ACCENT if row == highlight else BAR for row in range(len(names))]
    ax.barh(range(len(names)), numbers, height=0.62, color=colors, zorder=3)
    if spread is not None:
        bars = {"fmt": "none", "ecolor": INK, "elinewidth": 1.2, "capsize": 3, "zorder": 4}
        ax.errorbar(numbers, range(len(names)), xerr=spread, **bars)
    for row, value in enumerate(numbers):
        text = f"{value:.4f}" if spread is None else f"{value:.4f} ± {spread[row]:.4f}"
        place = ax.get_yaxis_transform()
        ax.text(1.02, row, text, transform=place, va="center", fontsize=SMALL, color=MUTED)
    ax.set_xlim(left=0)
    ax.set_ylim(len(names) - 0.4, -0.6)
    tidy(ax, xlabel=label, ylabel="", title=title)
    ax.grid(False, axis="y")
    ax.set_yticks(range(len(names)), names)
