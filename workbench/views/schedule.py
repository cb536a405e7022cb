"""The sampler's steps against denoising time: which are dense and which are sparse."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from workbench.attention.phase import DENSE, dense_steps, phase
from workbench.views.style import ACCENT, INK, MUTED, QUERY, SMALL, tidy


def draw_schedule(
    ax: Axes, times: Sequence[float], cutoff: float | None, *, title: str = ""
) -> None:
    """A stem per step at its denoising time: dense at or above the cutoff, sparse below.

    Dense steps are filled squares, sparse ones hollow circles, so that no colour is needed.

    Args:
        ax: where to draw.
        times: denoising time at which each step calls the model, 1 = noisiest; without the last
            time of a schedule, at which nothing is called.
        cutoff: `disabled_until_timestep`; `None` makes every step sparse.
        title: e.g. the number of steps and the shift.
    """
    dense = [phase(time, cutoff) == DENSE for time in times]
    for kept, mark, color, pen in ((True, "s", ACCENT, 2.2), (False, "o", MUTED, 1.0)):
        steps = [step for step, there in enumerate(dense) if there == kept]
        at = [times[step] for step in steps]
        # One artist for each kind: a thousand steps are drawn as fast as twenty.
        ax.vlines(steps, 0, at, colors=color, linewidths=pen, zorder=3)
        (points,) = ax.plot(steps, at, mark, markersize=5.5, zorder=4, color=color)
        points.set_markerfacecolor(color if kept else "white")
    ax.set_ylim(0, 1.22)
    ax.set_xlim(-0.8, len(times) - 0.2)
    tidy(ax, xlabel="step", ylabel="denoising time (1 = noisiest)", title=title)
    ax.set_yticks([0, 0.25, 0.5, 0.75, 1])
    ax.xaxis.set_major_locator(MaxNLocator(nbins=11, integer=True))
    if cutoff is not None:
        ax.axhline(cutoff, color=QUERY, linewidth=1.4, zorder=2)
        ax.annotate(
            f"cutoff {cutoff:g}",
            (len(times) - 0.3, cutoff),
            (0, 3),
            textcoords="offset points",
            ha="right",
            fontsize=SMALL,
            fontweight="bold",
            color=QUERY,
        )
    _legend(ax, sum(dense), len(times))


def describe_schedule(times: Sequence[float], cutoff: float | None) -> str:
    """The line under a schedule: dense steps as a number and as fractions of steps and of time."""
    number = dense_steps(times, cutoff)
    text = f"{number} of {len(times)} steps are dense ({number / max(1, len(times)):.0%} of them)"
    if cutoff is None:
        return f"{text}: there is no cutoff."
    return f"{text}, although the cutoff {cutoff:g} is {1 - cutoff:.0%} of the denoising time."


def _legend(ax: Axes, dense: int, steps: int) -> None:
    plain = {"linestyle": "none", "markersize": 6}
    handles = [
        Line2D([], [], marker="s", color=ACCENT, label=f"{dense} dense", **plain),
        Line2D(
            [],
            [],
            marker="o",
            markerfacecolor="white",
            color=MUTED,
            label=f"{steps - dense} sparse",
            **plain,
        ),
    ]
    ax.legend(
        handles=handles,
        loc="upper right",
        borderaxespad=0.0,
        ncols=2,
        frameon=False,
        fontsize=SMALL,
        labelcolor=INK,
    )
