"""Two settings side by side: what one computes exactly, and where two of them differ."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.patches import Patch
from numpy.typing import NDArray
from torch import Tensor

from blockattn import BlockRoute
from workbench.comparison import Agreement
from workbench.views.blocks import below_map, class_legend, draw_classes, label_blocks
from workbench.views.style import ACCENT, FAINT, Look, array

PIXELS = 512  # larger maps are shown as pooled means
HATCHED = 128  # on larger maps a hatch is finer than what can be seen, and slow to draw
PALE = "#edf1f5"
ORANGE = "#f0a35e"
# Lightness (CIELAB L*) 95, 70, 27, 74: the two that are near in grey differ in their hatch.
AGREEMENTS: dict[Agreement, Look] = {
    Agreement.NEITHER: Look("neither", PALE),
    Agreement.BOTH: Look("both", "#a3adb9"),
    Agreement.ONLY_A: Look("only A", ACCENT, "....", "#ffffff"),
    Agreement.ONLY_B: Look("only B", ORANGE, "//////", "#6b3a00"),
}
DENSITY = LinearSegmentedColormap.from_list("density", [PALE, ACCENT])
SIGNED = LinearSegmentedColormap.from_list("a - b", [ORANGE, "#ffffff", ACCENT])


def draw_exact(ax: Axes, exact: Tensor, title: str = "", *, rest: str = "approximate") -> None:
    """Which block pairs of a head are exact: dark, the rest light; rows = query blocks.

    Args:
        ax: where to draw.
        exact: bool ``[Nq, Nk]``. Above 512 blocks a side it is shown as mean density.
        rest: what becomes of the other pairs.
    """
    looks = {0: Look(rest, PALE), 1: Look("exact", ACCENT)}
    if max(exact.shape) > PIXELS:
        _draw_pooled(ax, _pooled(exact), exact.shape, DENSITY, ("density 0", "0.5", "1"), 0)
    else:
        codes = array(exact).astype(np.uint8)
        draw_classes(ax, codes, looks)
        class_legend(ax, looks, {code: int((codes == code).sum()) for code in looks})
    label_blocks(ax, "block", title)


def draw_agreement(ax: Axes, codes: Tensor, title: str = "") -> None:
    """Where two settings differ: in neither, in both, in A alone, in B alone.

    Args:
        ax: where to draw.
        codes: uint8 ``[Nq, Nk]`` of :func:`workbench.comparison.agreement`. Above 128 blocks a side
            it is shown as A - B, above 512 as density of A - density of B.
    """
    if max(codes.shape) > HATCHED:
        signed = _pooled(codes == Agreement.ONLY_A) - _pooled(codes == Agreement.ONLY_B)
        names = ("only B", "equal", "only A")
        _draw_pooled(ax, signed, codes.shape, SIGNED, names, -1)
    else:
        grid = array(codes)
        draw_classes(ax, grid, AGREEMENTS)
        class_legend(ax, AGREEMENTS, {code: int((grid == code).sum()) for code in Agreement})
    label_blocks(ax, "block", title)


def _pooled(mask: Tensor) -> NDArray[np.float32]:
    route = BlockRoute.from_dense(mask[None, None], block=(1, 1))
    return array(route.image(size=PIXELS))


def _draw_pooled(
    ax: Axes,
    picture: NDArray[np.float32],
    shape: tuple[int, ...],
    colors: LinearSegmentedColormap,
    names: tuple[str, ...],
    low: int,
) -> None:
    factor = -(-max(shape) // PIXELS)
    rows, columns = picture.shape
    extent = (-0.5, columns * factor - 0.5, rows * factor - 0.5, -0.5)
    shades = {"cmap": colors, "vmin": low, "vmax": 1, "interpolation": "nearest"}
    ax.imshow(picture, extent=extent, aspect="equal", **shades)
    ax.set_xlim(-0.5, shape[1] - 0.5)
    ax.set_ylim(shape[0] - 0.5, -0.5)
    ends = zip(names, (0.0, 0.5, 1.0))
    handles = [Patch(facecolor=colors(x), edgecolor=FAINT, label=name) for name, x in ends]
    if factor > 1:
        handles.append(Patch(alpha=0, label=f"1 pixel = mean of {factor} x {factor} pairs"))
    below_map(ax, handles)
