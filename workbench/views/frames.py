"""What one query block attends, painted on the frames of the video."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from workbench.views.style import ACCENT, INK, MUTED, QUERY, SMALL, array

TINT = np.array([0.10, 0.34, 0.80])
MAX_FRAMES = 24
COLUMNS = 8
# Inches.
WIDTH, MARGIN, GAP = 12.0, 0.06, 0.1
TITLE, CAPTION, LEGEND = 0.32, 0.24, 0.36
TALLEST = 3.2
FINEST = 180  # pixels along the shorter edge of a frame that a panel can show


@dataclass(frozen=True)
class _Place:
    """Where panels lie, in inches from the top left corner."""

    width: float
    height: float
    columns: int

    def corner(self, index: int, top: float) -> tuple[float, float]:
        row, column = divmod(index, self.columns)
        x = MARGIN + column * (self.width + GAP)
        return x, top + row * (self.height + CAPTION) + CAPTION


def frames_size(shape: tuple[int, int, int], width: float = WIDTH) -> tuple[float, float]:
    """Figure size in inches in which the frames of a (T, H, W) grid fill the width."""
    count = min(shape[0], MAX_FRAMES)
    place = _place(shape, count, width, np.inf)
    return width, TITLE + LEGEND + -(-count // place.columns) * (place.height + CAPTION)


def draw_frames(
    figure: Figure,
    selected: ArrayLike | Tensor,
    own: ArrayLike | Tensor,
    video: ArrayLike | Tensor | None = None,
    *,
    title: str = "",
    rest: str = "approximate",
) -> None:
    """A small panel per latent frame: exact keys tinted and outlined, the rest washed out.

    Above 24 latent frames, an even choice of 24 is shown.

    Args:
        figure: an empty figure, which is filled; :func:`frames_size` gives its best size.
        selected: bool ``[T, H, W]`` of :func:`workbench.decisions.selected_tokens`.
        own: bool ``[T, H, W]``, the query block's own tokens, outlined strongly.
        video: uint8 ``[frames, height, width, 3]`` behind the panels in grey; a latent token
            covers a patch of pixels. Without it the ground is plain.
        title: e.g. layer, step, head, tau and the query block.
        rest: what became of the other keys, for the legend: approximate or skipped.

    Raises:
        ValueError: shapes that do not belong together.
    """
    keys, query = array(selected).astype(bool), array(own).astype(bool)
    if keys.shape != query.shape or keys.ndim != 3:
        raise ValueError(
            f"selected {keys.shape} and own {query.shape}: both must be [T, H, W] of one grid"
        )
    pixels = None if video is None else checked_video(video)
    ax, (width, height) = _inch_axes(figure)
    frames = shown_frames(query, MAX_FRAMES)
    place = _place(keys.shape, len(frames), width, height)
    grounds = grey_frames(pixels, frames, keys.shape)
    for index, t in enumerate(frames):
        _draw_panel(ax, place, place.corner(index, TITLE), grounds[index], keys[t], query[t])
        _caption(ax, place, place.corner(index, TITLE), t, keys[t], query[t])
    if title:
        ax.text(
            MARGIN, 0.19, title, fontsize=SMALL + 1.5, color=INK, fontweight="bold", va="center"
        )
    _legend(ax, rest)


def shown_frames(query: NDArray[np.bool_], limit: int) -> list[int]:
    """All latent frames, or an even choice of ``limit`` that includes the query's first one."""
    count = len(query)
    if count <= limit:
        return list(range(count))
    chosen = np.linspace(0, count - 1, limit).round().astype(int)
    home = np.flatnonzero(query.any(axis=(1, 2)))
    if home.size:
        chosen[np.abs(chosen - home[0]).argmin()] = home[0]
    return chosen.tolist()


def outline(mask: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Edges between True and False cells of a matrix: straight runs ``[n, 2, 2]`` of (x, y)."""
    padded = np.pad(mask, 1).astype(np.int8)
    across = _runs(np.diff(padded, axis=0)[:, 1:-1] != 0)
    down = _runs(np.diff(padded, axis=1)[1:-1].T != 0)[..., ::-1]
    return np.concatenate([across, down]).astype(float)


def _runs(edges: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Runs of True within each row as segments (x, row) to (x, row)."""
    steps = np.diff(np.pad(edges, ((0, 0), (1, 1))).astype(np.int8), axis=1)
    rows, starts = np.nonzero(steps == 1)
    _, ends = np.nonzero(steps == -1)
    return np.stack([np.stack([starts, rows], 1), np.stack([ends, rows], 1)], 1)


def _place(shape: tuple[int, ...], count: int, width: float, height: float) -> _Place:
    """Panels as large as width and height allow."""
    columns = min(COLUMNS, count)
    rows = -(-count // columns)
    ratio = shape[1] / shape[2]
    widest = (width - 2 * MARGIN - (columns - 1) * GAP) / columns
    tallest = min(TALLEST, (height - TITLE - LEGEND) / rows - CAPTION)
    panel = max(0.1, min(widest, tallest / ratio))
    return _Place(panel, panel * ratio, columns)


def _inch_axes(figure: Figure) -> tuple[Axes, tuple[float, float]]:
    """One invisible axes over the whole figure with inches as data units, y downwards.

    One axes for all panels draws many times faster than one for each.
    """
    figure.set_layout_engine("none")
    width, height = (float(size) for size in figure.get_size_inches())
    ax = figure.add_axes((0, 0, 1, 1))
    ax.set_axis_off()
    ax.set_xlim(0, width)
    ax.set_ylim(height, 0)
    ax.set_autoscale_on(False)
    return ax, (width, height)


def checked_video(video: ArrayLike | Tensor) -> NDArray[Any]:
    """Frames ``[frames, height, width, 3]`` as an array.

    Raises:
        ValueError: another shape, or no frame or pixel in it.
    """
    frames = array(video)
    if frames.ndim != 4 or frames.shape[3] != 3 or not frames.size:
        raise ValueError(
            f"video: shape {frames.shape}, expected [frames, height, width, 3] with a frame and a "
            "pixel at least; without a video give None"
        )
    return frames


def grey_frames(
    video: NDArray[Any] | None, frames: list[int], shape: tuple[int, ...]
) -> NDArray[np.float64]:
    """Grey in [0, 1] behind every panel; one contrast for all of them."""
    if video is None:
        return np.full((len(frames), *shape[1:]), 0.5)
    grey = np.stack([_luminance(video, t, shape[0]) for t in frames])
    low, high = np.quantile(grey, (0.005, 0.995))
    return np.clip((grey - low) / max(high - low, 0.1), 0, 1)


def _luminance(frames: NDArray[Any], t: int, latent_frames: int) -> NDArray[np.float64]:
    """Luminance in [0, 1] of the pixel frame in the middle of latent frame t."""
    middle = min(len(frames) - 1, int((t + 0.5) * len(frames) / latent_frames))
    frame = frames[middle]
    step = max(1, min(frame.shape[:2]) // FINEST)
    return frame[::step, ::step].astype(float) @ np.array([0.2126, 0.7152, 0.0722]) / 255


def _draw_panel(
    ax: Axes,
    place: _Place,
    corner: tuple[float, float],
    ground: NDArray[np.float64],
    keys: NDArray[np.bool_],
    query: NDArray[np.bool_],
) -> None:
    x, y = corner
    extent = (x, x + place.width, y + place.height, y)
    ax.imshow(_paint(ground, keys), extent=extent, interpolation="nearest", aspect="auto")
    border = QUERY if query.any() else "#b3bcc7"
    box = Rectangle(corner, place.width, place.height, fill=False, edgecolor=border, linewidth=1)
    ax.add_patch(box)
    token = place.width / keys.shape[1]
    ax.add_collection(
        LineCollection(list(outline(keys) * token + corner), colors=ACCENT, linewidths=1.2)
    )
    if query.any():
        lines = list(outline(query) * token + corner)
        for color, width in (("white", 4.6), (QUERY, 2.4)):
            ax.add_collection(
                LineCollection(lines, colors=color, linewidths=width, capstyle="projecting")
            )


def _paint(ground: NDArray[np.float64], keys: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Exact keys in full contrast with a tint, the rest washed out; RGB in [0, 1]."""
    rows = np.arange(ground.shape[0]) * keys.shape[0] // ground.shape[0]
    columns = np.arange(ground.shape[1]) * keys.shape[1] // ground.shape[1]
    exact = keys[np.ix_(rows, columns)][..., None]
    grey = ground[..., None]
    tinted = 0.52 * grey + 0.48 * TINT
    washed = np.broadcast_to(0.72 + 0.24 * grey, tinted.shape)
    return np.where(exact, tinted, washed)


def _caption(
    ax: Axes,
    place: _Place,
    corner: tuple[float, float],
    t: int,
    keys: NDArray[np.bool_],
    query: NDArray[np.bool_],
) -> None:
    home = bool(query.any())
    ax.text(
        corner[0] + place.width / 2,
        corner[1] - 0.05,
        f"t {t}   {keys.mean():.0%} exact",
        ha="center",
        va="bottom",
        fontsize=SMALL,
        color=QUERY if home else (INK if keys.any() else MUTED),
        fontweight="bold" if home else "normal",
    )


def _legend(ax: Axes, rest: str) -> None:
    handles = [
        Patch(facecolor="#5475b3", edgecolor=ACCENT, linewidth=1.2, label="exact key tokens"),
        Patch(facecolor="#d5d8dc", edgecolor="none", label=f"{rest} (washed out)"),
        Patch(facecolor="none", edgecolor=QUERY, linewidth=2.2, label="the query block itself"),
    ]
    ax.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0.0, 0.0),
        ncols=3,
        frameon=False,
        fontsize=SMALL,
        labelcolor=INK,
        borderaxespad=0.5,
    )
