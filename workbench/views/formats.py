"""Errors of number formats side by side, and what a format does to the values of a token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from numpy.typing import ArrayLike
from torch import Tensor

from workbench.views.style import ACCENT, FAINT, INK, MUTED, QUERY, SMALL, array, tidy

MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")
LINES = ((ACCENT, "-"), (QUERY, "--"), (MUTED, ":"))


def draw_formats(
    ax: Axes,
    errors: ArrayLike | Tensor,
    names: Sequence[str],
    calls: Sequence[str],
    label: str,
    *,
    title: str = "",
) -> None:
    """A row per format: a mark for every call and head, the mean as a bar with its number.

    Args:
        ax: where to draw.
        errors: ``[formats, calls, heads]``, above 0.
        names, calls: of the first two axes; each call has a mark of its own, heads share it.
        label: quantity and unit, and "emulated" where the formats were.

    Raises:
        ValueError: names or calls of another number than the errors.
    """
    cells = array(errors)
    if cells.ndim != 3 or cells.shape[:2] != (len(names), len(calls)):
        raise ValueError(
            f"errors: shape {cells.shape}, but there are {len(names)} names and {len(calls)} "
            "calls; pass [formats, calls, heads]"
        )
    for column in range(len(calls)):
        values = cells[:, column]
        rows = np.repeat(np.arange(len(names)), values.shape[1])
        # Calls lie above one another within a row, so that equal errors stay apart.
        shift = 0.0 if len(calls) == 1 else 0.44 * (column / (len(calls) - 1) - 0.5)
        style = {"color": MUTED, "markerfacecolor": "white", "markersize": 5.5, "zorder": 3}
        ax.plot(values.ravel(), rows + shift, MARKS[column % len(MARKS)], **style)
    means = cells.reshape(len(names), -1).mean(axis=1)
    for row, mean in enumerate(means):
        ax.plot([mean, mean], [row - 0.36, row + 0.36], color=ACCENT, linewidth=3.4, zorder=4)
        place = ax.get_yaxis_transform()
        number = {"fontsize": SMALL, "fontweight": "bold", "color": ACCENT, "va": "center"}
        ax.text(1.01, row, f"{mean:.4f}", transform=place, **number)
    ax.set_xscale("log")
    ax.set_ylim(len(names) - 0.4, -0.6)
    tidy(ax, xlabel=label, ylabel="", title=title)
    ax.grid(False, axis="y")
    ax.set_yticks(range(len(names)), names)
    _legend(ax, calls)


def draw_rounding(
    ax: Axes,
    original: ArrayLike | Tensor,
    decoded: Mapping[str, ArrayLike | Tensor],
    block: int,
    *,
    title: str = "",
) -> None:
    """Values of one token before and after quantisation, with the edges of the scale blocks.

    Args:
        ax: where to draw.
        original: ``[D]``.
        decoded: the same values after each format, at most three.
        block: channels that share a scale.

    Raises:
        ValueError: more formats than can be told apart.
    """
    if len(decoded) > len(LINES):
        raise ValueError(f"decoded has {len(decoded)} formats: at most {len(LINES)} in a picture")
    values = array(original).astype(float)
    channels = np.arange(len(values))
    for edge in range(0, len(values) + 1, block):
        ax.axvline(edge - 0.5, color=FAINT, linewidth=0.9, zorder=1)
    ax.plot(channels, values, "o", color=INK, markersize=3.6, label="original", zorder=4)
    for (name, after), (color, style) in zip(decoded.items(), LINES):
        ax.step(channels, array(after), style, where="mid", color=color, linewidth=1.4, label=name)
    ax.set_xlim(-0.5, len(values) - 0.5)
    tidy(ax, xlabel=f"channel (grey lines: blocks of {block})", ylabel="value", title=title)
    ax.grid(False)
    ax.legend(frameon=False, fontsize=SMALL, labelcolor=INK, ncols=4, loc="upper left")
    low, high = ax.get_ylim()
    ax.set_ylim(low, high + 0.22 * (high - low))


def _legend(ax: Axes, calls: Sequence[str]) -> None:
    marks = {"color": MUTED, "linestyle": "none", "markerfacecolor": "white", "markersize": 5.5}
    handles = [
        Line2D([], [], marker=MARKS[n % len(MARKS)], label=call, **marks)
        for n, call in enumerate(calls)
    ]
    handles.append(Line2D([], [], color=ACCENT, linewidth=3.4, label="mean"))
    ax.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(1.12, 1.02),
        frameon=False,
        fontsize=SMALL,
        labelcolor=INK,
        title="a mark per head",
        title_fontsize=SMALL,
        alignment="left",
    )
