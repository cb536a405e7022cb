"""Quality against density for a grid of schedules."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import ArrayLike

from workbench.views.style import ACCENT, FAINT, INK, MUTED, SMALL, array, tidy

MARKERS, DASHES = "osD^vP", ("-", "--", ":", "-.")


def draw_tradeoff(
    ax: Axes,
    density: ArrayLike,
    psnr: ArrayLike,
    dense_layers: Sequence[int],
    dense_steps: Sequence[int],
    *,
    control: float,
) -> None:
    """A point per schedule, a line per number of dense layers, the number of dense steps beside it.

    Args:
        ax: where to draw.
        density, psnr: ``[layers, steps]``; psnr in dB.
        dense_layers, dense_steps: names of the rows and columns.
        control: PSNR of the second exact implementation, written above the points.

    Raises:
        ValueError: shapes that do not fit.
    """
    x, y = array(density), array(psnr)
    if x.shape != y.shape or x.shape != (len(dense_layers), len(dense_steps)):
        raise ValueError(
            f"density {x.shape} and psnr {y.shape}: both must be "
            f"({len(dense_layers)}, {len(dense_steps)})"
        )
    shades = np.linspace(0, 0.75, len(x))
    for row, layers in enumerate(dense_layers):
        color = tuple((1 - shades[row]) * _rgb(ACCENT) + shades[row] * _rgb(FAINT))
        style = f"{MARKERS[row % len(MARKERS)]}{DASHES[row % len(DASHES)]}"
        ax.plot(x[row], y[row], style, color=color, markersize=6, label=f"{layers} dense layers")
        for column, steps in enumerate(dense_steps):
            place = (x[row, column], y[row, column])
            ax.annotate(
                str(steps), place, (6, -9), textcoords="offset points", fontsize=SMALL, color=MUTED
            )
    title = f"number at a point: dense steps; dense against dense: {control:.0f} dB"
    tidy(ax, xlabel="density (exact / valid pairs)", ylabel="PSNR against dense (dB)", title=title)
    ax.margins(0.08)
    ax.legend(frameon=False, fontsize=SMALL, labelcolor=INK, handlelength=3)


def _rgb(color: str) -> np.ndarray:
    return np.array([int(color[n : n + 2], 16) / 255 for n in (1, 3, 5)])
