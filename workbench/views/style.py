"""Colours, hatches and small helpers that every view shares; no pyplot and no global state."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from workbench.decisions import Decision, TileState

INK = "#1c2430"
MUTED = "#5d6876"  # 5.6:1 on white, still readable as small text
RULE = "#d9dfe6"
FAINT = "#aab4c0"
ACCENT = "#1f3f77"
QUERY = "#d1370f"
DPI = 110
SMALL = 8.5


@dataclass(frozen=True)
class Look:
    """How one class is drawn; lightness and hatch each tell the classes apart without colour."""

    name: str
    face: str
    hatch: str | None = None
    edge: str = INK


# Lightness (CIELAB L*) 95, 27, 62, 84: told apart in grey as well.
DECISIONS: dict[Decision, Look] = {
    Decision.APPROXIMATE: Look("approximate", "#edf1f5"),
    Decision.ROUTED: Look("routed", ACCENT),
    Decision.DIAGONAL: Look("diagonal", "#4aa3a8", "//////", "#0d4145"),
    Decision.SINK: Look("sink", "#f6cf6b", ".....", "#6b4a00"),
}
TILES: dict[TileState, Look] = {
    TileState.COMPUTED: Look("computed", ACCENT),
    TileState.SKIPPED: Look("skipped", "#edf1f5"),
    TileState.MASKED: Look("masked (causal)", "#ffffff", "xxxxxx", "#b3bcc7"),
}


def new_figure(width: float = 6.4, height: float = 4.8) -> Figure:
    """An empty figure (inches) that belongs to no pyplot state; tight around what is drawn."""
    figure = Figure(figsize=(width, height), dpi=DPI, layout="compressed", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def to_png(figure: Figure) -> bytes:
    """The figure as PNG bytes."""
    buffer = io.BytesIO()
    # No software tag: equal pictures are then equal bytes.
    figure.savefig(buffer, format="png", dpi=figure.dpi, metadata={"Software": None})
    return buffer.getvalue()


@dataclass(frozen=True)
class Picture:
    """A figure's PNG that a notebook shows, with a text for readers who do not see it."""

    png: bytes
    alt: str

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return {"image/png": base64.b64encode(self.png).decode(), "text/plain": self.alt}


def picture(figure: Figure, alt: str) -> Picture:
    """The figure as the last value of a notebook cell."""
    return Picture(to_png(figure), alt)


def save(figure: Figure, path: str | Path) -> Path:
    """Writes the figure; the suffix (.png, .svg, .pdf) chooses the format. Folders are made."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=figure.dpi)
    return target


def array(values: ArrayLike | Tensor) -> NDArray[Any]:
    """A tensor from any device, a list or an array, as a numpy array."""
    if isinstance(values, Tensor):
        return values.detach().cpu().numpy()
    return np.asarray(values)


def tidy(ax: Axes, *, xlabel: str, ylabel: str, title: str = "", grid: bool = True) -> None:
    """The common look of a chart: two quiet spines, light grid, left-aligned title."""
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        ax.spines[side].set_color(FAINT)
    ax.tick_params(colors=MUTED, labelsize=SMALL, length=3)
    ax.set_xlabel(xlabel, color=INK, fontsize=SMALL + 0.5)
    ax.set_ylabel(ylabel, color=INK, fontsize=SMALL + 0.5)
    if title:
        ax.set_title(title, loc="left", color=INK, fontsize=SMALL + 1.5, fontweight="bold")
    if grid:
        ax.grid(True, color=RULE, linewidth=0.6)
        ax.set_axisbelow(True)
