"""Videos side by side: frames of each, and how far they are from a reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from workbench.views.style import INK, MUTED, QUERY, SMALL, array

SPACE = 0.06  # between frames, as a share of a frame
# Inches.
LABEL, PANEL, TOP, BOTTOM, GAP = 2.15, 0.78, 0.34, 0.52, 0.14
FAINTEST = 1 / 255  # the colours never span less than one step of an 8-bit pixel


@dataclass(frozen=True)
class Strip:
    """One row of the picture.

    Attributes:
        name, detail: shown in front of the row.
        video: [F, H, W, 3] in [0, 1].
        reference: what it is compared with, ``None`` for no difference.
        warn: draw the name in the warning colour.
    """

    name: str
    detail: str
    video: ArrayLike | Tensor
    reference: ArrayLike | Tensor | None = None
    warn: bool = False


def videos_size(rows: int, columns: int = 6, ratio: float = 1.0) -> tuple[float, float]:
    """Figure size in inches for that many rows; ``ratio`` is height / width of a frame."""
    width = LABEL + 2 * columns * PANEL * (1 + SPACE) + GAP + 0.3
    return width, TOP + BOTTOM + rows * PANEL * (ratio + SPACE)


def draw_videos(figure: Figure, strips: Sequence[Strip], *, columns: int = 6) -> None:
    """A row per video: evenly spaced frames, and beside them the difference from the reference.

    Differences are means over the colour channels of |video - reference|, in one colour scale for
    all rows, which the 99.5th percentile of all of them ends. It follows the square root, so that
    small differences show beside large ones.

    Args:
        figure: an empty figure, which is filled; :func:`videos_size` gives its size.
        strips: at least one; all videos of one shape.
        columns: frames shown of each.

    Raises:
        ValueError: no strips, or videos of several shapes.
    """
    shapes = {array(strip.video).shape for strip in strips}
    if len(shapes) != 1:
        raise ValueError(f"strips: shapes {sorted(shapes)}, expected videos of one shape")
    frames = shapes.pop()[0]
    chosen = np.linspace(0, frames - 1, min(columns, frames)).round().astype(int)
    gaps = [_difference(strip, chosen) for strip in strips]
    seen = [gap.ravel() for gap in gaps if gap is not None]
    top = max(FAINTEST, float(np.quantile(np.concatenate(seen), 0.995))) if seen else FAINTEST
    axes = _axes(figure, len(strips))
    scale = None
    for strip, gap, (label, left, right) in zip(strips, gaps, axes):
        _name(label, strip)
        left.imshow(_row(array(strip.video)[chosen], 1.0), aspect="auto")
        if gap is not None:
            row = np.ma.masked_invalid(_row(gap, np.nan))
            norm = PowerNorm(0.5, vmin=0, vmax=top, clip=True)
            scale = right.imshow(row, cmap="cividis", norm=norm, aspect="auto")
    axes[0][1].set_title(_title("video, frames", chosen), **_TITLE)
    if scale is not None:
        axes[0][2].set_title("difference from the dense run", **_TITLE)
        _colour_bar(figure, scale, top)


_TITLE = {"loc": "left", "color": INK, "fontsize": SMALL + 1, "fontweight": "bold"}


def _title(text: str, chosen: NDArray[np.int64]) -> str:
    return f"{text} {', '.join(map(str, chosen))}"


def _axes(figure: Figure, rows: int) -> list[tuple[Axes, Axes, Axes]]:
    """Label, frames and differences of every row, placed in inches."""
    figure.set_layout_engine("none")
    width, height = (float(size) for size in figure.get_size_inches())
    panel = (width - LABEL - GAP - 0.2) / 2
    tall = (height - TOP - BOTTOM) / rows

    def place(row: int, x: float, wide: float) -> Axes:
        y = BOTTOM + (rows - 1 - row) * tall
        ax = figure.add_axes((x / width, y / height, wide / width, 0.95 * tall / height))
        ax.set_axis_off()
        return ax

    lefts = (0.1, LABEL, LABEL + panel + GAP)
    wides = (LABEL - 0.1, panel, panel)
    return [
        (
            place(row, lefts[0], wides[0]),
            place(row, lefts[1], wides[1]),
            place(row, lefts[2], wides[2]),
        )
        for row in range(rows)
    ]


def _name(ax: Axes, strip: Strip) -> None:
    color = QUERY if strip.warn else INK
    common = {"transform": ax.transAxes, "va": "top"}
    ax.text(0, 0.92, strip.name, color=color, fontsize=SMALL + 0.5, fontweight="bold", **common)
    ax.text(0, 0.68, strip.detail, color=MUTED, fontsize=SMALL - 0.5, linespacing=1.3, **common)


def _row(frames: NDArray[np.float64], fill: float) -> NDArray[np.float64]:
    """Frames beside each other with gaps of a plain value."""
    shape = list(frames.shape[1:])
    shape[1] = max(1, round(SPACE * shape[1]))
    gap = np.full(shape, fill)
    parts = [part for frame in frames for part in (frame, gap)]
    return np.concatenate(parts[:-1], axis=1)


def _difference(strip: Strip, chosen: NDArray[np.int64]) -> NDArray[np.float64] | None:
    if strip.reference is None:
        return None
    a, b = array(strip.video)[chosen], array(strip.reference)[chosen]
    return np.abs(a.astype(float) - b.astype(float)).mean(axis=-1)


def _colour_bar(figure: Figure, scale: AxesImage, top: float) -> None:
    width, height = (float(size) for size in figure.get_size_inches())
    panel = (width - LABEL - GAP - 0.2) / 2
    place = ((LABEL + panel + GAP) / width, 0.34 / height, 0.4 * panel / width, 0.09 / height)
    bar = figure.colorbar(scale, cax=figure.add_axes(place), orientation="horizontal")
    # Under a square root these lie at 0, 1/5, 1/2 and 1 of the bar.
    ticks = [share * top for share in (0, 0.04, 0.25, 1)]
    bar.set_ticks(ticks, labels=[f"{tick:.2g}" for tick in ticks])
    bar.minorticks_off()
    bar.ax.tick_params(colors=MUTED, labelsize=SMALL - 1, length=2)
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
    x = (LABEL + 1.44 * panel + GAP) / width
    text = "mean |difference| of the channels (square-root scale)"
    figure.text(x, 0.34 / height, text, color=MUTED, fontsize=SMALL - 0.5)
