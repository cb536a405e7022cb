"""A quantity over two axes such as layer x step or layer x head."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import ArrayLike
from torch import Tensor

from workbench.views.style import INK, MUTED, SMALL, array

WRITTEN = 240  # cells that still get their number


def heatmap(
    ax: Axes,
    values: ArrayLike | Tensor,
    rows: Sequence[object],
    columns: Sequence[object],
    label: str,
    *,
    row_label: str = "layer",
    column_label: str = "step",
    title: str = "",
    limits: tuple[float, float] | None = None,
) -> None:
    """Cells in cividis (dark is low) with their numbers, a colour bar with the unit.

    Args:
        ax: where to draw.
        values: ``[rows, columns]``; NaN is an empty cell (not measured).
        rows, columns: names along the axes.
        label: quantity and unit of the colour bar.
        row_label, column_label: names of the axes.
        limits: range of the colours; by default that of the data.
    """
    cells = array(values).astype(float)
    if cells.shape != (len(rows), len(columns)):
        raise ValueError(
            f"values: shape {cells.shape}, but there are {len(rows)} rows and {len(columns)} "
            "columns; pass [rows, columns]"
        )
    low, high = limits if limits is not None else _range(cells)
    image = ax.imshow(cells, cmap="cividis", vmin=low, vmax=high, aspect="auto")
    ax.set_facecolor("#f4f5f7")
    _ticks(ax, rows, columns)
    if cells.size <= WRITTEN:
        _write(ax, cells, low, high)
    ax.set_xlabel(column_label, color=INK, fontsize=SMALL + 0.5)
    ax.set_ylabel(row_label, color=INK, fontsize=SMALL + 0.5)
    ax.set_title(title, loc="left", color=INK, fontsize=SMALL + 1.5, fontweight="bold")
    bar = ax.figure.colorbar(image, ax=ax, pad=0.02)
    bar.set_label(label, color=INK, fontsize=SMALL + 0.5)
    bar.ax.tick_params(colors=MUTED, labelsize=SMALL)
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]


def _range(cells: np.ndarray) -> tuple[float, float]:
    seen = cells[np.isfinite(cells)]
    return (float(seen.min()), float(seen.max())) if seen.size else (0.0, 1.0)


def _ticks(ax: Axes, rows: Sequence[object], columns: Sequence[object]) -> None:
    for axis, names in ((ax.yaxis, rows), (ax.xaxis, columns)):
        stride = -(-len(names) // 24)
        axis.set_ticks(range(0, len(names), stride), [str(name) for name in names[::stride]])
    ax.tick_params(colors=MUTED, labelsize=SMALL, length=0)
    for spine in ax.spines.values():
        spine.set_visible(False)
    # White gaps between the cells.
    ax.set_xticks(np.arange(1, len(columns)) - 0.5, minor=True)
    ax.set_yticks(np.arange(1, len(rows)) - 0.5, minor=True)
    ax.grid(which="minor", color="white", linewidth=1.2)
    ax.tick_params(which="minor", length=0)


def _write(ax: Axes, cells: np.ndarray, low: float, high: float) -> None:
    middle = low + 0.55 * (high - low)
    for (row, column), value in np.ndenumerate(cells):
        if np.isfinite(value):
            color = "white" if value < middle else INK
            ax.text(
                column, row, f"{value:.3g}", ha="center", va="center", fontsize=SMALL, color=color
            )
