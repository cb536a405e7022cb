"""VSA's cubes: on the frames of the video, and how their tokens are stored."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from blockattn.vsa import CUBE
from workbench.views.blocks import below_map, draw_classes
from workbench.views.frames import grey_frames, outline, shown_frames
from workbench.views.style import ACCENT, INK, MUTED, SMALL, Look, array, tidy

COLUMNS = 8
NUMBERED = 40  # cubes in a frame that still get their number
TINT = np.array([0.96, 0.81, 0.42])  # of cubes that are not full
SLOTS = {False: Look("padding", "#edf1f5"), True: Look("token", ACCENT)}


def cubes_size(shape: tuple[int, int, int], width: float = 12.0) -> tuple[float, float]:
    """Figure size in inches in which the frames of a (T, H, W) grid fill the width."""
    columns = min(COLUMNS, shape[0])
    rows = math.ceil(shape[0] / columns)
    return width, 0.3 + rows * (0.2 + 0.95 * width / columns * shape[1] / shape[2])


def draw_cubes(
    figure: Figure,
    cubes: ArrayLike | Tensor,
    video: ArrayLike | Tensor | None = None,
    *,
    title: str = "",
) -> None:
    """A panel per latent frame with the border and the number of every cube.

    A cube on a ragged edge holds fewer than 64 tokens: it is tinted, and the number of its tokens
    stands below its own.

    Args:
        figure: an empty figure, which is filled; :func:`cubes_size` gives its best size.
        cubes: int ``[T, H, W]`` of :func:`workbench.mechanisms.cubes.cube_index`.
        video: uint8 ``[frames, height, width, 3]`` behind the panels in grey.
        title: e.g. the grid.

    Raises:
        ValueError: cubes of another rank.
    """
    index = array(cubes)
    if index.ndim != 3:
        raise ValueError(f"cubes: shape {index.shape}, expected [T, H, W]")
    frames = shown_frames(np.zeros(index.shape, dtype=bool), 24)
    pixels = None if video is None else array(video)
    grounds = grey_frames(pixels, frames, index.shape)
    columns = min(COLUMNS, len(frames))
    panels = figure.subplots(math.ceil(len(frames) / columns), columns, squeeze=False).ravel()
    sizes = np.bincount(index.ravel())
    for ax in panels:
        ax.set_axis_off()
    for ax, t, ground in zip(panels, frames, grounds):
        _draw_panel(ax, ground if pixels is not None else np.ones((1, 1)), index[t], sizes)
        ax.set_title(f"t {t}", fontsize=SMALL, color=MUTED, pad=3)
    if title:
        figure.suptitle(
            title, x=0.01, ha="left", color=INK, fontsize=SMALL + 1.5, fontweight="bold"
        )


def draw_slots(ax: Axes, filled: ArrayLike | Tensor, title: str = "") -> None:
    """Slots of every cube, a row each: a token dark, padding light.

    Args:
        ax: where to draw.
        filled: bool ``[N, 64]`` of :func:`workbench.mechanisms.cubes.filled_slots`.
    """
    slots = array(filled).astype(bool)
    draw_classes(ax, slots.astype(int), {int(key): look for key, look in SLOTS.items()})
    ax.set_aspect("auto")
    tidy(ax, xlabel="slot in the cube", ylabel="cube", title=title, grid=False)
    ax.set_xticks([0, 16, 32, 48, 63])
    below_map(ax, _slot_handles(slots))


def _slot_handles(slots: NDArray[np.bool_]) -> list[Patch]:
    shares = {True: slots.mean(), False: 1 - slots.mean()}
    return [
        Patch(facecolor=look.face, edgecolor=look.edge, label=f"{look.name}  {shares[key]:.1%}")
        for key, look in sorted(SLOTS.items(), reverse=True)
    ]


def _draw_panel(
    ax: Axes, ground: NDArray[np.float64], cubes: NDArray[np.int64], sizes: NDArray[np.int64]
) -> None:
    height, width = cubes.shape
    extent = (-0.5, width - 0.5, height - 0.5, -0.5)
    ax.imshow(_paint(ground, cubes, sizes), extent=extent, interpolation="nearest")
    lines = [segment for number in np.unique(cubes) for segment in outline(cubes == number) - 0.5]
    ax.add_collection(LineCollection(lines, colors=ACCENT, linewidths=1.1))
    if len(np.unique(cubes)) > NUMBERED:
        return
    for number in np.unique(cubes):
        y, x = np.argwhere(cubes == number).mean(axis=0)
        ragged = sizes[number] < CUBE
        text = ax.text(
            x,
            y,
            f"{number}\n({sizes[number]})" if ragged else f"{number}",
            ha="center",
            va="center",
            fontsize=SMALL - (1.5 if ragged else 0.5),
            color=INK,
            linespacing=0.95,
        )
        text.set_path_effects([withStroke(linewidth=2.2, foreground="white")])


def _paint(
    ground: NDArray[np.float64], cubes: NDArray[np.int64], sizes: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Washed grey, with a warm tint where a cube is not full; RGB in [0, 1]."""
    rows = max(ground.shape[0], cubes.shape[0])
    columns = max(ground.shape[1], cubes.shape[1])
    grey = _stretch(ground, rows, columns)[..., None]
    ragged = _stretch(sizes[cubes] < CUBE, rows, columns)[..., None]
    washed = np.repeat(0.45 + 0.53 * grey, 3, axis=-1)
    return np.where(ragged, 0.55 * washed + 0.45 * TINT, washed)


def _stretch(image: NDArray, rows: int, columns: int) -> NDArray:
    """Nearest-neighbour enlargement."""
    y = np.arange(rows) * image.shape[0] // rows
    x = np.arange(columns) * image.shape[1] // columns
    return image[np.ix_(y, x)]
