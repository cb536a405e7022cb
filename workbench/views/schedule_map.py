"""Steps x layers: which attention calls of a sampling are dense, and why."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from workbench.schedule import CallKind, Schedule
from workbench.views.blocks import class_legend, draw_classes
from workbench.views.style import ACCENT, INK, MUTED, SMALL, Look, array

# Lightness (CIELAB L*) 95, 27, 79, 27: the two dark ones differ in their hatch.
KINDS: dict[CallKind, Look] = {
    CallKind.SPARSE: Look("sparse", "#edf1f5"),
    CallKind.DENSE_STEP: Look("dense step", ACCENT),
    CallKind.DENSE_LAYER: Look("dense layer", "#9ed0d3", "///", "#0d4145"),
    CallKind.DENSE_BOTH: Look("both", ACCENT, "...", "#ffffff"),
}
NAMED = 16  # steps that still get their denoising time written above


def draw_schedule_map(ax: Axes, schedule: Schedule, *, title: str = "") -> None:
    """A cell per call; rows = layers, columns = steps with their denoising times above.

    Args:
        ax: where to draw.
        schedule: what to show.
    """
    kinds = array(schedule.kinds())
    draw_classes(ax, kinds, KINDS)
    ax.set_aspect("auto")
    class_legend(ax, KINDS, {kind: int((kinds == kind).sum()) for kind in CallKind})
    ax.set_xlabel("step", color=INK, fontsize=SMALL + 0.5)
    ax.set_ylabel("layer", color=INK, fontsize=SMALL + 0.5)
    ax.tick_params(colors=MUTED, labelsize=SMALL, length=3)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(nbins=12, integer=True, steps=[1, 2, 5, 10]))
    for spine in ax.spines.values():
        spine.set_color(MUTED)
        spine.set_linewidth(0.8)
    _write_times(ax, schedule.times)
    ax.set_title(title, loc="left", color=INK, fontsize=SMALL + 1.5, fontweight="bold", pad=18)


def _write_times(ax: Axes, times: tuple[float, ...]) -> None:
    stride = -(-len(times) // NAMED)
    for step in range(0, len(times), stride):
        ax.text(
            step, 1.01, f"{times[step]:.2f}", transform=ax.get_xaxis_transform(), ha="center",
            va="bottom", fontsize=SMALL - 1, color=MUTED,
        )  # fmt: skip
