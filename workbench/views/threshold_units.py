"""The three units of a SkipSoftmax threshold: lambda, log2(lambda), lambda * Sk."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

from workbench.views.style import FAINT, INK, MUTED, SMALL
from workbench.views.table import Table

UNITS = ("log2(lambda)", "lambda", "threshold_scale_factor = lambda * Sk")


def units_table(log2_values: Sequence[float], keys: int) -> Table:
    """The same thresholds in every unit.

    Args:
        log2_values: log2(lambda), the form in which kernels compare.
        keys: Sk, the length of the key sequence.
    """
    rows = [(f"{n:g}", f"{2.0**n:.3g}", f"{2.0**n * keys:.4g}") for n in log2_values]
    return Table(UNITS, rows, f"One threshold in three units, for Sk = {keys:,} keys")


def add_threshold_units(ax: Axes, keys: int) -> None:
    """Adds lambda and the scale factor above a chart whose x axis is log2(lambda).

    Args:
        ax: a finished chart; its x limits decide about the ticks.
        keys: Sk, the length of the key sequence.
    """
    low, high = ax.get_xlim()
    step = max(1, int(np.ceil((high - low) / 4)))
    ticks = np.arange(np.floor(high), np.ceil(low) - 0.5, -step)[::-1]
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    for place, texts, name in (
        (1.0, [_short(2.0**tick) for tick in ticks], "lambda"),
        (1.16, [_short(2.0**tick * keys) for tick in ticks], "threshold_scale_factor"),
    ):
        above = ax.secondary_xaxis(place)
        above.set_xticks(ticks, texts)
        above.tick_params(colors=MUTED, labelsize=SMALL - 1, length=2, pad=1)
        above.spines["top"].set_color(FAINT)
        above.set_xlabel(name, color=INK, fontsize=SMALL - 0.5, labelpad=2)


def _short(value: float) -> str:
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.2g}" if value >= 0.001 else f"{value:.0e}".replace("e-0", "e-")
