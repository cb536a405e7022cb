"""What `workbench sample` prints: the table, what the columns mean, and what must not be missed."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from workbench.quality import Statistics, lpips_obstacle, over_seeds, paired
from workbench.sample.run import Quality, Row, Sampled, SampleResult
from workbench.sample.variants import BASELINE, CONTROL
from workbench.terminal import plain_table


def show(result: SampleResult, console: Console) -> None:
    """Prints everything a reader needs to judge the variants."""
    console.print(_input(result), soft_wrap=True)
    console.print(quality_table(result))
    for line in meaning(result):
        console.print(line, style="dim", soft_wrap=True, highlight=False)
    console.print()
    console.print(what_ran_table(result))
    if len(result.settings.seeds) > 1:
        console.print(seeds_table(result))
    for line in notes(result):
        console.print(line, soft_wrap=True, highlight=False)
    for line in alarms(result):
        text = Text("warning: ", style="bold yellow")
        console.print(text.append(line, style="default"), soft_wrap=True)


def _input(result: SampleResult) -> Text:
    settings = result.settings
    grid = " x ".join(map(str, settings.grid))
    seeds = ", ".join(map(str, settings.seeds))
    text = Text(f"tiny video DiT, class {settings.label}, seed {seeds}", style="bold")
    text.append(
        f"\n{math.prod(settings.grid):,} tokens (grid {grid}), {settings.steps} steps, guidance "
        f"{settings.guidance:g}, {result.dtype} on {result.device}\n",
        style="default",
    )
    return text


def quality_table(result: SampleResult) -> Table:
    """A line per variant, medians over seeds."""
    count = len(result.settings.seeds)
    title = "Distance from the dense run of the same seed"
    table = plain_table(title if count == 1 else f"{title}, median of {count} seeds")
    table.add_column("variant")
    for name in ("PSNR\ndB", "SSIM", "relative\nL2", "LPIPS", "density\nmean", "dense\nsteps"):
        table.add_column(name, justify="right")
    table.add_column("seconds", justify="right")
    table.add_column("compared with")
    for variant in result.variants:
        rows = result.of(variant.name)
        style = "bold" if variant.role != "policy" else None
        table.add_row(variant.name, *_cells(rows), style=style)
    return table


def _cells(rows: Sequence[Row]) -> list[str]:
    first = rows[0]
    variant, itself = first.sampled.variant, first.sampled.variant.name == BASELINE
    figures = ["-"] * 4
    if not itself:
        figures = [
            number(median([_shown(row).psnr for row in rows]), 2),
            number(median([_shown(row).ssim for row in rows]), 4),
            small(median([_shown(row).relative_l2 for row in rows])),
            _lpips(rows),
        ]
    total = len(first.sampled.densities())
    return [
        *figures,
        number(median([row.sampled.density for row in rows]), 3),
        f"{first.dense_steps} of {total}" if variant.cutoff is not None else "-",
        number(median([row.sampled.seconds for row in rows]), 1),
        "-" if itself else (BASELINE if _own(first) else variant.compared_with),
    ]


def _own(row: Row) -> bool:
    """Whether the row is itself the baseline of fine-tuned weights."""
    return row.sampled.variant.role == "baseline"


def _shown(row: Row) -> Quality:
    """A baseline is compared with the base model's, everything else with its own."""
    return row.to_base if _own(row) else row.quality


def _lpips(rows: Sequence[Row]) -> str:
    values = [_shown(row).lpips for row in rows]
    known = [value for value in values if value is not None]
    return number(median(known), 4) if known else ""


def what_ran_table(result: SampleResult) -> Table:
    """Which implementation ran, and where the policy sent the calls (of all seeds)."""
    table = plain_table("What ran")
    table.add_column("variant")
    for name in ("sparse\ncalls", "intended\ndense", "ineligible"):
        table.add_column(name, justify="right")
    for name in ("ran", "density per step", "emulated"):
        table.add_column(name, no_wrap=name == "density per step")
    for variant in result.variants:
        found = [row.sampled for row in result.of(variant.name)]
        steps = " ".join(_short(value) for value in found[0].densities())
        table.add_row(
            variant.name,
            *(str(sum(counted[n] for counted in map(calls, found))) for n in range(3)),
            found[0].ran,
            steps,
            ", ".join(found[0].emulated),
        )
    return table


def _short(density: float) -> str:
    """`1` only where it is 1."""
    return "1" if density == 1.0 else f"{min(density, 0.99):.2f}".lstrip("0")


def calls(sampled: Sampled) -> tuple[int, int, int]:
    """Sparse, intended dense and ineligible calls; without a policy all are intended dense."""
    counts = sampled.counts
    if counts is None:
        return 0, len(sampled.records), 0
    return counts.sparse, sum(counts.dense.values()), sum(counts.ineligible.values())


def seeds_table(result: SampleResult) -> Table:
    """Over seeds: range of PSNR, and relative L2 above the control's, paired."""
    table = plain_table("Over seeds")
    for name in ("variant", "PSNR dB\nmedian \\[min..max]", "relative L2 above the control\nmean"):
        table.add_column(name, justify="left" if name == "variant" else "right")
    floor = [row.quality.relative_l2 for row in result.of(CONTROL)]
    for variant in result.variants:
        rows = result.of(variant.name)
        if variant.role == "policy":
            error = [row.quality.relative_l2 for row in rows]
            above = "-" if not all(map(math.isfinite, error)) else plus_minus(paired(error, floor))
            table.add_row(variant.name, _range([row.quality.psnr for row in rows]), above)
    return table


def _range(values: Sequence[float]) -> str:
    if not all(map(math.isfinite, values)):
        return "-"
    found = over_seeds(values)
    return f"{found.median:.2f} [{found.low:.2f}..{found.high:.2f}]"


def plus_minus(found: Statistics) -> str:
    """Mean and standard error."""
    error = "" if found.standard_error is None else f" ± {found.standard_error:.2g}"
    return f"{found.mean:.3g}{error}"


def meaning(result: SampleResult) -> list[str]:
    """One line for each quantity."""
    lines = [
        f"{CONTROL}: exact attention computed block by block; what it differs from dense is the "
        "floor, rounding alone.",
        "density: exact pairs / valid pairs as delivered, mean over all calls, dense or not. "
        "seconds: one sampling each, reading of densities included; no benchmark.",
        "PSNR, SSIM and relative L2 measure how far the video moved, not whether it is worse.",
    ]
    if not any(row.quality.lpips is not None for row in result.rows):
        lines.append(f"LPIPS is blank: {lpips_obstacle() or 'it was not asked for'}.")
    return lines


def notes(result: SampleResult) -> list[str]:
    """Denoising cutoffs as fraction and as steps, and what variants say about themselves."""
    found = []
    times = result.settings.times
    for variant in result.variants:
        row = result.of(variant.name)[0]
        if variant.cutoff is not None:
            found.append(
                f"{variant.name}: dense while t >= {variant.cutoff:g} of the denoising time "
                f"(1 = noisiest), which is {row.dense_steps} of the {len(times)} steps of this "
                "schedule"
            )
        if variant.dense_layers:
            layers = ", ".join(map(str, variant.dense_layers))
            found.append(f"{variant.name}: dense layers {layers}")
        if variant.note:
            found.append(f"{variant.name}: {variant.note}")
        if row.quality is not row.to_base and not _own(row):
            base = row.to_base
            found.append(
                f"{variant.name}: against {BASELINE} of the base weights PSNR {base.psnr:.2f} dB, "
                f"relative L2 {base.relative_l2:.3g}"
            )
    return found


def alarms(result: SampleResult) -> list[str]:
    """Everything that makes a row worthless or misleading."""
    many = len(result.settings.seeds) > 1
    found = []
    for row in result.rows:
        where = row.sampled.variant.name + (f" (seed {row.sampled.seed})" if many else "")
        found += [f"{where}: {flag}" for flag in row.flags]
        if row.sampled.variant.sparse and _below_floor(result, row):
            found.append(f"{where}: no farther from dense than the control, so nothing was gained")
    return found


def _below_floor(result: SampleResult, row: Row) -> bool:
    controls = (item for item in result.of(CONTROL) if item.sampled.seed == row.sampled.seed)
    floor = next(controls).quality.relative_l2
    return row.quality.relative_l2 <= floor


def median(values: Sequence[float]) -> float:
    """Of values that may be infinite or NaN; NaN if any is."""
    if any(math.isnan(value) for value in values):
        return math.nan
    ordered = sorted(values)
    low, high = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
    return low if low == high else (low + high) / 2


def number(value: float, digits: int) -> str:
    """Fixed digits; `inf` and `nan` as they are."""
    return f"{value:.{digits}f}"


def small(value: float) -> str:
    """Three digits, with an exponent where it is tiny."""
    return f"{value:.4f}" if value >= 1e-3 or value == 0 else f"{value:.1e}"
