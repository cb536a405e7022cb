"""Density and error of Sol-Attn in several token orders."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure

from workbench.views.style import ACCENT, INK, QUERY, SMALL, tidy

# Told apart by marker and dash as well as by colour.
LOOKS = {
    "raster": {"color": INK, "linestyle": "--", "marker": "s"},
    "tile": {"color": QUERY, "linestyle": "-", "marker": "o"},
    "morton": {"color": ACCENT, "linestyle": ":", "marker": "^"},
}
TAU = "tau (standard deviations)"
DENSITY = "density (exact / valid pairs)"
ERROR = "relative L2 error against dense"


class Line(Protocol):
    """Means of one order at one tau; :class:`workbench.orders.OrderLine` is one."""

    @property
    def tau(self) -> float: ...
    @property
    def density(self) -> float: ...
    @property
    def relative_l2(self) -> float: ...


def draw_orders(
    figure: Figure | SubFigure, lines: Mapping[str, Sequence[Line]], title: str = ""
) -> None:
    """Three panels: density and error at equal tau, and error at equal density.

    Args:
        figure: where to draw, about 11 x 4 inches.
        lines: token order -> its means, rising in tau.
        title: what was measured.
    """
    left, middle, right = figure.subplots(1, 3)
    _panel(left, lines, _tau, _density, (TAU, DENSITY), "density at equal tau")
    _panel(middle, lines, _tau, _error, (TAU, ERROR), "error at equal tau")
    _panel(right, lines, _density, _error, (DENSITY, ERROR), "error at equal density")
    left.legend(frameon=False, fontsize=SMALL, labelcolor=INK, handlelength=3)
    if title:
        figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize=SMALL + 2, fontweight="bold")


def _panel(
    ax: Axes,
    lines: Mapping[str, Sequence[Line]],
    across: Callable[[Line], float],
    up: Callable[[Line], float],
    labels: tuple[str, str],
    title: str,
) -> None:
    for order, points in lines.items():
        look = {"markersize": 4.5, "linewidth": 1.8, **LOOKS[order]}
        ax.plot([across(x) for x in points], [up(x) for x in points], label=order, **look)
    ax.set_ylim(bottom=0)
    tidy(ax, xlabel=labels[0], ylabel=labels[1], title=title)


def _tau(line: Line) -> float:
    return line.tau


def _density(line: Line) -> float:
    return line.density


def _error(line: Line) -> float:
    return line.relative_l2
