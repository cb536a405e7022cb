"""Marks on a map of blocks: where latent frames begin, the chosen query row and key block."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from blockattn import checks
from workbench.views.style import FAINT, MUTED, QUERY, SMALL


def mark_frames(ax: Axes, edges: Sequence[float]) -> None:
    """Thin lines between latent frames and their numbers along the top."""
    if len(edges) < 3:
        return
    width = 0.9 if edges[-1] <= 512 else 0.5
    for across, edge in itertools.product((ax.axhline, ax.axvline), edges[1:-1]):
        across(edge - 0.5, color=FAINT, linewidth=width)
    stride = -(-(len(edges) - 1) // 12)
    quiet = {"ha": "center", "va": "bottom", "fontsize": SMALL - 1, "color": MUTED}
    for frame in range(0, len(edges) - 1, stride):
        x = (edges[frame] + edges[frame + 1]) / 2 - 0.5
        ax.text(x, 1.006, f"t {frame}", transform=ax.get_xaxis_transform(), **quiet)


def mark_row(ax: Axes, query: int, key: int | None, grid: tuple[int, int]) -> None:
    """Frame around the chosen query block's row, an arrow beside it, a box around the key block.

    Raises:
        ValueError: a block outside the map of ``grid`` (query, key) blocks.
    """
    rows, columns = grid
    checks.integer("query", query, maximum=rows - 1)
    width = 1.6 if columns <= 128 else 0.6
    row = Rectangle((-0.5, query - 0.5), columns, 1, fill=False, edgecolor=QUERY, linewidth=width)
    ax.add_patch(row)
    right = columns - 0.5
    arrow = {"arrowstyle": "-|>", "color": QUERY, "linewidth": 1.6}
    tail = (14, 0)
    ax.annotate(
        "",
        (right, query),
        tail,
        textcoords="offset points",
        arrowprops=arrow,
        annotation_clip=False,
    )
    if key is None:
        return
    checks.integer("key", key, maximum=columns - 1)
    size = max(1.0, columns / 40)
    corner = (key - size / 2, query - size / 2)
    ax.add_patch(Rectangle(corner, size, size, fill=False, edgecolor="white", linewidth=4))
    ax.add_patch(Rectangle(corner, size, size, fill=False, edgecolor=QUERY, linewidth=2))
