"""The class map that routing and skip maps share: faces, hatches, legend, labelled axes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import ScaledTranslation
from numpy.typing import NDArray

from workbench.views.style import INK, MUTED, SMALL, Look

SEPARATE = 48  # up to this many blocks a side, thin white lines make single blocks countable


def draw_classes(ax: Axes, classes: NDArray[Any], looks: Mapping[Any, Look]) -> None:
    """Paints ``[Nq, Nk]`` codes: a face for each class and a hatch over its area."""
    palette = np.array([to_rgb(looks[code].face) for code in sorted(looks)])
    ax.imshow(palette[classes], interpolation="nearest", aspect="equal")
    for code, look in looks.items():
        area = cells_path(classes == code) if look.hatch else None
        if area is not None:
            none = {"facecolor": "none", "linewidth": 0}
            ax.add_patch(PathPatch(area, hatch=look.hatch, edgecolor=look.edge, **none))
    if max(classes.shape) <= SEPARATE:
        ax.add_collection(
            LineCollection(_separators(*classes.shape), colors="white", linewidths=0.6)
        )


def _separators(rows: int, columns: int) -> list[list[tuple[float, float]]]:
    across = [[(-0.5, y - 0.5), (columns - 0.5, y - 0.5)] for y in range(1, rows)]
    return across + [[(x - 0.5, -0.5), (x - 0.5, rows - 0.5)] for x in range(1, columns)]


def cells_path(mask: NDArray[np.bool_]) -> Path | None:
    """Outline of the True cells of a matrix, as one rectangle for each run within a row."""
    padded = np.pad(mask, ((0, 0), (1, 1))).astype(np.int8)
    steps = np.diff(padded, axis=1)
    rows, starts = np.nonzero(steps == 1)
    _, ends = np.nonzero(steps == -1)
    if not rows.size:
        return None
    left, right, top = starts - 0.5, ends - 0.5, rows - 0.5
    corners = [(left, top), (right, top), (right, top + 1), (left, top + 1), (left, top)]
    vertices = np.stack([np.stack(corner, axis=1) for corner in corners], axis=1).reshape(-1, 2)
    codes = np.array([Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY])
    return Path(vertices, np.tile(codes, rows.size).astype(np.uint8))


def label_blocks(ax: Axes, what: str, title: str, *, pad: float = 6.0) -> None:
    """Axis labels "query block" and "key block" with whole numbers, and the title ``pad`` above."""
    ax.set_xlabel(f"key {what}", color=INK, fontsize=SMALL + 0.5)
    ax.set_ylabel(f"query {what}", color=INK, fontsize=SMALL + 0.5)
    ax.tick_params(colors=MUTED, labelsize=SMALL, length=3)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(nbins=9, integer=True, steps=[1, 2, 4, 5, 8, 10]))
    for spine in ax.spines.values():
        spine.set_color(MUTED)
        spine.set_linewidth(0.8)
    if title:
        ax.set_title(title, loc="left", color=INK, fontsize=SMALL + 1.5, fontweight="bold", pad=pad)


def class_legend(ax: Axes, looks: Mapping[Any, Look], counts: Mapping[Any, int]) -> None:
    """Legend below the map, one entry for each class that occurs, with its share."""
    total = max(1, sum(counts.values()))
    handles = []
    for code, look in looks.items():
        if counts.get(code, 0):
            text = f"{look.name}  {_percent(counts[code] / total)}"
            colors = {"facecolor": look.face, "edgecolor": look.edge, "linewidth": 0.6}
            handles.append(Patch(hatch=look.hatch, label=text, **colors))
    below_map(ax, handles)


def below_map(ax: Axes, handles: list[Any]) -> None:
    """A frameless legend in one row under the axis label."""
    figure = cast(Figure, ax.get_figure(root=True))
    down = ScaledTranslation(0, -34 / 72, figure.dpi_scale_trans)
    many = len(handles) > 3  # then they stand closer, so that the row ends with the map
    ax.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(-0.06 if many else -0.02, 0.0),
        bbox_transform=ax.transAxes + down,
        borderpad=0,
        ncols=max(1, len(handles)),
        frameon=False,
        fontsize=SMALL - many,
        labelcolor=INK,
        handlelength=1.2 if many else 1.9,
        handleheight=1.25,
        handletextpad=0.4 if many else 0.5,
        columnspacing=0.6 if many else 1.2,
    )


def _percent(share: float) -> str:
    return f"{share:.1%}" if share >= 0.001 else "<0.1%"
