"""Cost against quality of many settings: front, dominated points, gate and control."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from workbench.pareto import QUALITY, Gate, Point, front, is_candidate
from workbench.views.style import ACCENT, FAINT, INK, MUTED, QUERY, RULE, SMALL, tidy

DASHED = (0, (5, 3))
TITLES = {"psnr": "PSNR", "ssim": "SSIM", "lpips": "LPIPS", "relative_l2": "relative L2"}


def draw_pareto(
    ax: Axes,
    points: Sequence[Point],
    metric: str,
    *,
    gates: Sequence[Gate] = (),
    xlabel: str = "attention time, dense / sparse (routing included)",
) -> None:
    """A point per setting, with the range over its videos; those of the front are numbered.

    Filled points may be chosen, hollow ones miss a gate or more; grey ones are dominated. A gate on
    the drawn metric is a line. The control, dense against dense, is a diamond: what lies above it
    is noise. A value far above all settings stands at the upper edge, with its number.

    Args:
        ax: where to draw; the key of the numbers goes to its right.
        points: all settings, the control among them; those without a finite gain are left out.
        metric: that :attr:`Point.quality` holds, a name of :data:`workbench.pareto.QUALITY`.
        gates: those on other metrics show in the filling alone.
        xlabel: what the gain is.

    Raises:
        ValueError: an unknown metric, or nothing to draw.
    """
    shown = [p for p in points if math.isfinite(p.gain) and not math.isnan(p.quality)]
    best = front(shown, metric)
    if not shown:
        raise ValueError("points: none has a finite gain and a quality; wait for results")
    top = _edge(shown, metric)
    for point in shown:
        _draw_point(ax, point, top, ahead=point in best)
    heights = [min(p.quality, top) for p in best]
    ax.plot([p.gain for p in best], heights, color=ACCENT, lw=1, zorder=2)
    for number, (point, height) in enumerate(zip(best, heights), start=1):
        spot = {"textcoords": "offset points", "fontsize": SMALL, "color": INK}
        ax.annotate(str(number), (point.gain, height), (6, 5), **spot)
    _draw_gates(ax, [gate for gate in gates if gate.metric == metric])
    unit, high = QUALITY[metric]
    title = "up and to the right is better"
    label = f"{TITLES[metric]} against dense{f' ({unit})' if unit else ''}, median and range"
    tidy(ax, xlabel=xlabel, ylabel=label, title=title)
    ax.margins(0.09)
    if not high:
        ax.invert_yaxis()
    _draw_key(ax, best, shown, gates, metric)


def pareto_spots(
    ax: Axes, points: Sequence[Point], metric: str
) -> list[tuple[Point, float, float]]:
    """Where :func:`draw_pareto` has put each point: shares of the figure from its top left corner.

    The figure must have fixed axes; a layout engine moves them when it draws.
    """
    shown = [p for p in points if math.isfinite(p.gain) and not math.isnan(p.quality)]
    figure = ax.get_figure(root=True)
    if figure is None:
        raise ValueError("ax belongs to no figure any more; draw into a new one")
    ax.autoscale_view()  # else the limits follow only when the figure is drawn
    to_figure = ax.transData + figure.transFigure.inverted()
    top, found = _edge(shown, metric), []
    for point in shown:
        x, y = to_figure.transform((point.gain, min(point.quality, top)))
        found.append((point, float(x), 1 - float(y)))
    return found


def _draw_point(ax: Axes, point: Point, top: float, *, ahead: bool) -> None:
    color = QUERY if point.control else ACCENT if ahead else FAINT
    height = min(point.quality, top)
    ends = [min(value, top) for value in (point.worst, point.best)]
    if point.quality > top:
        spot = {"textcoords": "offset points", "fontsize": SMALL, "color": INK, "va": "center"}
        ax.annotate(f"{point.quality:.3g} ↑", (point.gain, top), (8, 0), **spot)
    if not any(map(math.isnan, ends)):
        ax.plot([point.gain] * 2, ends, color=color, lw=1, alpha=0.6, zorder=2)
    ax.plot(
        [point.gain],
        [height],
        marker="D" if point.control else "o",
        markersize=7 if ahead or point.control else 5,
        markerfacecolor="white" if point.missed else color,
        markeredgecolor=color,
        linestyle="none",
        zorder=3,
    )


def _draw_gates(ax: Axes, gates: Sequence[Gate]) -> None:
    for gate in gates:
        ax.axhline(gate.limit, color=MUTED, lw=1, linestyle=DASHED, zorder=1)


def _draw_key(
    ax: Axes, best: Sequence[Point], shown: Sequence[Point], gates: Sequence[Gate], metric: str
) -> None:
    """What the marks mean, and the numbered settings of the front."""

    def mark(label: str, color: str, **look: object) -> Line2D:
        options = {"marker": "o", "linestyle": "none", "markerfacecolor": color, **look}
        return Line2D([], [], color=color, label=label, **options)  # pyright: ignore

    handles = [mark("on the front", ACCENT)]
    if len(best) < sum(map(is_candidate, shown)):
        handles.append(mark("dominated", FAINT, markersize=5))
    if any(point.missed for point in shown):
        handles.append(mark("may not be chosen", MUTED, markerfacecolor="white"))
    if any(point.control for point in shown):
        handles.append(mark("dense against dense", QUERY, marker="D"))
    for gate in gates:
        line = DASHED if gate.metric == metric else "none"
        handles.append(mark(f"gate: {gate}", MUTED, marker="none", linestyle=line))
    for number, point in enumerate(best, start=1):
        handles.append(mark(f"{number}  {point.name}", RULE, marker="none"))
    ax.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(1.02, 1), frameon=False,
        fontsize=SMALL, labelcolor=INK, borderaxespad=0, handlelength=1.6,
    )  # fmt: skip


def _edge(points: Sequence[Point], metric: str) -> float:
    """The height above which a value is drawn at the edge, with its number beside it.

    Infinite PSNR has no place on an axis, and a control far above all settings would leave them
    none. Where less is better the control is near 0 and needs no such care.
    """
    judged = [p for p in points if not p.control] or points
    values = [v for p in judged for v in (p.worst, p.quality, p.best) if math.isfinite(v)]
    if not values:
        return 1.0
    return max(values) + 0.15 * (max(values) - min(values) or 1.0)
