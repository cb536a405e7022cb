"""What `workbench calibrate` and `workbench solve` print: tables, and what they must not hide."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from rich.table import Table

from workbench.calibrate.collect import Calibration
from workbench.calibrate.fit import ExponentialFit, Transfer
from workbench.calibrate.free_run import Delivery
from workbench.calibrate.probes import Probes
from workbench.calibrate.setting import Form, Setting, knob
from workbench.terminal import plain_table

LADDERS = {
    "sol_attn": (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0),
    "skip_softmax": (-12.0, -8.0, -6.0, -4.0, -2.0, -1.0, 0.0),
}
WORST = 8
POINTS_OFF = 0.005  # half a percentage point


def density_table(calibration: Calibration) -> Table:
    """Density of every layer at a few levels: mean over videos, steps and heads."""
    levels = LADDERS[calibration.algorithm]
    table = plain_table(f"{calibration.algorithm}: density (exact / valid pairs) of the dense run")
    table.add_column("layer", justify="right")
    for level in levels:
        table.add_column(knob_text(calibration.algorithm, level), justify="right")
    rows = torch.stack([calibration.density(level).mean(dim=(0, 2, 3, 4)) for level in levels])
    for layer, cells in enumerate(rows.T.tolist()):
        table.add_row(str(layer), *(f"{cell:.3f}" for cell in cells))
    table.add_row("all", *(f"{cell:.3f}" for cell in rows.mean(dim=1).tolist()), style="bold")
    return table


def knob_text(algorithm: str, level: float) -> str:
    """A level in the unit that one sets."""
    name = "tau" if algorithm == "sol_attn" else "lambda"
    return f"{name} {knob(algorithm, level):.4g}"


def fit_lines(fit: ExponentialFit, trial: Transfer | None) -> list[str]:
    """The fit with its domain, and what it delivers on another size."""
    low, high = fit.domain
    lines = [
        f"fit ({fit.space} space): threshold_scale_factor = {fit.a:.6g} * exp({fit.b:.6g} * "
        f"sparsity), R2 {fit.r2_log:.4f} of ln(factor), {fit.r2_linear:.4f} of the factor",
        f"from {len(fit.sparsity)} points with sparsity {low:.3f} to {high:.3f} at {fit.source} "
        f"({fit.dropped} outside [0.1, 0.9] left out); largest residual "
        f"{abs(fit.residuals).max():.3f} in ln(factor)",
    ]
    if trial is None:
        return [*lines, "no hold-out: how far it carries to another size is not known (--hold-out)"]
    return [
        *lines,
        f"hold-out at {trial.target}: sparsity off by {trial.mean:.4f} on average, "
        f"{trial.worst:.4f} at worst over {len(trial.requested)} targets"
        + (f"; {trial.beyond} more need lambda above 1" if trial.beyond else ""),
    ]


def steps_lines(form: Form, times: Sequence[float]) -> list[str]:
    """Denoising times as the steps they mean in this schedule."""
    lines = []
    if form.by == "window":
        for group in range(len(form.edges) + 1):
            inside = [n for n, time in enumerate(times) if form.group(0, time) == group]
            lines.append(f"window {form.group_name(group)}: steps {_list(inside)} of {len(times)}")
    if form.cutoff is not None:
        dense = [n for n, time in enumerate(times) if time >= form.cutoff]
        lines.append(f"cutoff {form.cutoff:g}: steps {_list(dense)} of {len(times)} are dense")
    return lines


def solved_table(
    setting: Setting,
    times: Sequence[float],
    columns: dict[str, Sequence[float]],
    *,
    quantity: str,
) -> Table:
    """A line for each group: its value at the noisiest and the last step, requested, delivered.

    Args:
        columns: numbers by their heading, one for each group.
    """
    table = plain_table(f"{setting.algorithm}: {quantity} by {setting.form.by} value")
    table.add_column("calls")
    ends = ["value"] if setting.form.shape == "constant" else ["first step", "last step"]
    for name in (*ends, *columns):
        table.add_column(name, justify="right")
    for group, level in enumerate(setting.levels):
        if math.isnan(level):
            table.add_row(setting.form.group_name(group), *["dense"] * len(ends))
            continue
        moments = times[:1] if len(ends) == 1 else (times[0], times[-1])
        levels = [level + setting.form.offset(time) for time in moments]
        cells = [knob_text(setting.algorithm, item) for item in levels]
        cells += [f"{numbers[group]:.4f}" for numbers in columns.values()]
        table.add_row(setting.form.group_name(group), *cells)
    return table


def missed_lines(delivered: Sequence[float], quantity: str, target: float) -> list[str]:
    """A warning when solving ended with the target missed on the calibration's own videos."""
    known = [number for number in delivered if not math.isnan(number)]
    if quantity == "error":
        missed = max(known) > target
    else:
        missed = max(abs(number - target) for number in known) > POINTS_OFF
    if not missed:
        return []
    return [f"warning: {quantity} {target:g} is still missed on the calibration's own videos"]


def delivery_lines(delivery: Delivery, requested: float | None) -> list[str]:
    """How free runs of single videos spread, and how far their mean is from the request."""
    videos = delivery.by_video
    mean, count = float(videos.mean()), len(videos)
    seeds = ", ".join(map(str, delivery.samples.seeds))
    spread = f"from {float(videos.min()):.4f} to {float(videos.max()):.4f}"
    line = f"held-out seeds {seeds}: density {mean:.4f} over {count} videos, {spread}"
    if requested is None:
        return [line]
    off = int(((videos - requested).abs() > POINTS_OFF).sum())
    return [
        f"{line}; the mean is {100 * (mean - requested):+.2f} points from the target",
        f"{off} of {count} single videos lie further than 0.5 points from it",
        f"all calls of the held-out videos, dense ones included: density {delivery.overall:.4f}",
    ]


def ran_lines(delivery: Delivery) -> list[str]:
    """Which implementation served the held-out videos, and why none that is faster."""
    calls = ", ".join(f"{name} ({count} calls)" for name, count in delivery.calls.items())
    return [f"ran: {calls}", *(f"not {reason}" for reason in delivery.fallbacks)]


def worst_table(probes: Probes) -> Table:
    """The heads with the largest error, and how much of the attention mass they kept."""
    table = plain_table("Worst heads of real calls on dense inputs (errors do not compound)")
    names = ("layer", "step", "time", "head", "density", "relative L2", "recall", "best router")
    for name in names:
        table.add_column(name, justify="right")
    for row in probes.worst(WORST):
        place = (str(row.layer), str(row.step), f"{row.time:.3f}", str(row.head))
        figures = (row.density, row.relative_l2, row.recall, row.best_recall)
        table.add_row(*place, *(f"{figure:.4f}" for figure in figures))
    return table


def probe_line(probes: Probes) -> str:
    """The means under the worst heads."""
    return (
        f"mean over {len(probes.rows)} heads of calls: "
        f"relative L2 {probes.mean('relative_l2'):.4f}, recall {probes.mean('recall'):.3f}, "
        "best that any router reaches with as many blocks "
        f"{probes.mean('best_recall'):.3f}"
    )


def _list(steps: Sequence[int]) -> str:
    if not steps:
        return "none"
    return f"{steps[0]}-{steps[-1]}" if len(steps) > 1 else str(steps[0])
