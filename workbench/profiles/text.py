"""What `workbench apply` prints: what was understood, distances, what ran, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.text import Text

from workbench.profiles.compare import (
    CONTROL,
    DENSE,
    OTHER_SEED,
    Comparison,
    Difference,
)
from workbench.profiles.profile import Profile
from workbench.profiles.understood import remarks, understood_table
from workbench.profiles.verdict import verdict
from workbench.profiles.video import VideoModel
from workbench.sweep.statistics import CONFIDENCE, FEWEST
from workbench.views.table import Table

TITLES = {"relative_l2": "relative L2", "psnr": "PSNR dB", "ssim": "SSIM"}
METRICS = tuple(TITLES)


def show_understood(profiles: Sequence[Profile], model: VideoModel, console: Console) -> None:
    """The model, and what every profile means for its layers."""
    console.print(model.title, style="bold", soft_wrap=True, highlight=False)
    for profile in profiles:
        console.print(f"\n{understood_table(profile, model)!r}", soft_wrap=True, markup=False)
        for note in remarks(profile, model):
            console.print(f"note: {note}", soft_wrap=True, markup=False)
    console.print()


def show(found: Comparison, console: Console) -> None:
    """Everything a reader needs to judge the verdict, and the verdict last."""
    lines = [f"{distance_table(found)!r}", *meaning(found), "", f"{ran_table(found)!r}"]
    for line in (*lines, *between(found)):
        console.print(line, soft_wrap=True, markup=False)
    for line in alarms(found):
        text = Text("warning: ", style="bold yellow")
        console.print(text.append(line, style="default"), soft_wrap=True)
    console.print(f"\n{verdict(found)}", style="bold", soft_wrap=True, markup=False)


def distance_table(found: Comparison) -> Table:
    """A line for each name: means over prompts x seeds, and the difference from the control."""
    shown = [metric for metric in METRICS if found.mean(OTHER_SEED, metric) is not None]
    rows = []
    for name in (CONTROL, *found.names, OTHER_SEED):
        own = name in found.names
        above = _difference(found.difference(name, CONTROL, METRICS[0])) if own else "-"
        metrics = [_mean(found, name, metric) for metric in shown]
        rows.append((name, *metrics, above, *_cost(found, name)))
    titles = [TITLES[metric] for metric in shown]
    columns = ("", *titles, "relative L2 above the control", "density", "seconds")
    count = len(found.pairs)
    pairs = "pair" if count == 1 else "pairs"
    return Table(columns, rows, f"Distance from dense, mean of {count} {pairs} of prompt and seed")


def ran_table(found: Comparison) -> Table:
    """Where the calls of every name went, over all pairs; densities per step of the first."""
    rows = []
    for name in (DENSE, CONTROL, *found.names):
        runs = [pair.runs[name] for pair in found.pairs]
        kinds = ("sparse", "dense", "ineligible")
        counts = [sum(run.count(kind) for run in runs) for kind in kinds]
        steps = " ".join(f"{density:.2f}" for density in runs[0].densities)
        rows.append((name, *counts, runs[0].ran, steps))
    columns = (
        "",
        "by the sparse path",
        "meant to be dense",
        "ineligible",
        "ran",
        "density per step",
    )
    return Table(columns, rows, "What ran")


def meaning(found: Comparison) -> Iterable[str]:
    """One line for each quantity."""
    yield (
        f"{CONTROL}: the sparse path with every block exact, so dense attention summed in another "
        f"order: the floor. {OTHER_SEED}: dense attention from another seed of the same prompt: "
        "the scale."
    )
    yield (
        f"In brackets the {CONFIDENCE:.0%} bootstrap interval of the mean difference, paired by "
        f"prompt and seed, from {FEWEST} pairs on."
    )
    prompts = {pair.prompt for pair in found.pairs}
    if len(prompts) > 1 and len(found.pairs) > len(prompts):
        yield "Prompts of one seed start from one noise, so the interval may be too narrow."
    if not found.pairs[0].runs[DENSE].pixels:
        yield "Distances are of latents: no decoder is here, so there are no PSNR and SSIM."
    yield (
        "density: exact pairs / valid pairs as delivered, mean over all calls, dense or not. "
        "seconds: one sampling each, reading of densities included; no benchmark."
    )


def between(found: Comparison) -> list[str]:
    """The two profiles against each other, a line for each metric."""
    if len(found.names) < 2:
        return []
    one, other = found.names
    lines = []
    for metric in METRICS:
        gap = found.difference(one, other, metric)
        if gap is not None:
            lines.append(f"{metric} of {one} minus {other}: {_difference(gap)}")
    return lines


def alarms(found: Comparison) -> list[str]:
    """Everything that makes a run worthless or misleading."""
    told = [
        f"{name} ({pair.prompt}, seed {pair.seed}): {flag}"
        for pair in found.pairs
        for name, flags in pair.flags.items()
        for flag in flags
    ]
    return list(dict.fromkeys(told))


def _mean(found: Comparison, name: str, metric: str) -> str:
    mean = found.mean(name, metric)
    if mean is None:
        values = sorted({f"{value:g}" for value in found.values(name, metric)})
        return " or ".join(values)
    error = "" if mean.standard_error is None else f" ± {mean.standard_error:.1g}"
    return f"{mean.mean:.4g}{error}"


def _cost(found: Comparison, name: str) -> tuple[str, str]:
    runs = [pair.runs[name] for pair in found.pairs]
    density = sum(run.density for run in runs) / len(runs)
    seconds = sorted(run.seconds for run in runs)[len(runs) // 2]
    return ("-" if math.isnan(density) else f"{density:.3f}"), f"{seconds:.1f}"


def _difference(gap: Difference | None) -> str:
    if gap is None:
        return "-"
    text = f"{gap.values.mean:+.3g}"
    if gap.interval is None:
        return text
    return f"{text} [{gap.interval[0]:+.3g}, {gap.interval[1]:+.3g}]"
