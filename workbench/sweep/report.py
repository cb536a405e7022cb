"""The table of a sweep: one line for each setting on the screen, everything in CSV files."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from workbench.sweep.plan import differences
from workbench.sweep.statistics import CONFIDENCE, FEWEST, Paired, compare
from workbench.sweep.table import SweepCase, SweepTable
from workbench.terminal import plain_table

SHOWN = ("density", "relative_l2", "psnr", "ssim", "lpips", "seconds")
CASE_COLUMNS = ("key", "setting", "seed", "prompt", "control", "state", "reason")
NOTE_COLUMNS = ("ran", "fallbacks", "emulated", "flags")


def show(table: SweepTable, environments: Mapping[str, object], console: Console) -> None:
    """Prints the table, what failed, and what makes rows misleading."""
    console.print(_settings(table))
    for line in [*_meaning(table), *alarms(table, environments)]:
        console.print(escape(line), soft_wrap=True)


def alarms(table: SweepTable, environments: Mapping[str, object]) -> list[str]:
    """Failed cases with their reasons, flags, and a mixture of environments."""
    failed = Counter((c.setting, c.reason) for c in table.cases if c.state == "failed")
    flagged = Counter((c.setting, flag) for c in table.done for flag in c.flags)
    lines = [f"FAILED {setting} ({n} cases): {reason}" for (setting, reason), n in failed.items()]
    lines += [f"{setting} ({n} cases): {flag}" for (setting, flag), n in flagged.items()]
    left = sum(case.state in ("pending", "running") for case in table.cases)
    if left:
        lines.append(f"NOT FINISHED: {left} of {len(table.cases)} cases have not run")
    first, *others = environments.values() or [{}]
    for other in others:
        found = "; ".join(differences(first, other))
        lines.append(f"MIXED: cases ran in several environments: {found}")
    return lines


def statistics_rows(table: SweepTable) -> list[dict[str, object]]:
    """A row for each setting and metric: mean, its error, difference from the control."""
    found = [
        compare(table, setting, metric)
        for setting in table.settings
        for metric in table.metrics
        if any(metric in case.metrics for case in table.of(setting))
    ]
    return [_statistics_row(table, item) for item in found]


def case_rows(table: SweepTable) -> list[dict[str, object]]:
    """A row for each case: what it is, what it brought, every metric in a column."""
    return [_case_row(table, case) for case in table.cases]


def write_csv(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Writes rows with equal keys; the file is replaced.

    Raises:
        ValueError: there is no row.
    """
    if not rows:
        raise ValueError(f"{path}: nothing to write, no case has a result yet")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def _settings(table: SweepTable) -> Table:
    shown = [name for name in SHOWN if any(name in case.metrics for case in table.done)]
    made = plain_table(f"{table.name}: mean over seeds x prompts")
    made.add_column("setting", overflow="fold")
    made.add_column("n", justify="right")
    for name in shown:
        unit = table.metrics[name].unit
        made.add_column(name if unit == "1" else f"{name}\n{unit}", justify="right")
        if name == "relative_l2":
            made.add_column("above\nthe control", justify="right")
    for setting in table.settings:
        cells: list[str] = []
        for name in shown:
            found = compare(table, setting, name)
            cells.append(_mean(found) or _not_finite(table, setting, name))
            cells += [_difference(found)] if name == "relative_l2" else []
        done = sum(case.state == "done" for case in table.of(setting))
        made.add_row(escape(setting), f"{done}/{len(table.of(setting))}", *cells)
    return made


def _mean(found: Paired) -> str:
    if found.values is None:
        return ""
    error = found.values.standard_error
    return f"{found.values.mean:.4g}" + ("" if error is None else f" ± {error:.1g}")


def _not_finite(table: SweepTable, setting: str, name: str) -> str:
    """What stands for the mean where no value is finite, such as the PSNR of equal videos."""
    values = {c.metrics[name] for c in table.of(setting) if name in c.metrics}
    return " or ".join(sorted({str(value) for value in values})) or "-"


def _difference(found: Paired) -> str:
    if found.difference is None:
        return "-"
    text = f"{found.difference.mean:.3g}"
    if found.interval is None:
        return text
    return escape(f"{text} [{found.interval[0]:.3g}, {found.interval[1]:.3g}]")


def _meaning(table: SweepTable) -> Iterable[str]:
    yield "n: cases done / all. ±: standard error of the mean."
    yield (
        "above the control: paired by seed, prompt and sampler; in brackets the "
        f"{CONFIDENCE:.0%} bootstrap interval of the mean, from {FEWEST} pairs on."
    )
    yield "dense_control: dense by a second exact implementation, the floor under a verdict."
    if any("seconds" in case.metrics for case in table.done):
        yield "seconds: of the sampling, reading of densities included; no benchmark."


def _statistics_row(table: SweepTable, found: Paired) -> dict[str, object]:
    values, difference = found.values, found.difference
    low, high = found.interval or (None, None)
    return {
        "setting": found.setting,
        "metric": found.metric,
        "unit": table.metrics[found.metric].unit,
        "timing": int(table.metrics[found.metric].timing),
        "count": 0 if values is None else values.count,
        "mean": None if values is None else values.mean,
        "standard_error": None if values is None else values.standard_error,
        "pairs": 0 if difference is None else difference.count,
        "pairs_left_out": found.left_out,
        "difference_mean": None if difference is None else difference.mean,
        "difference_standard_error": None if difference is None else difference.standard_error,
        "difference_low": low,
        "difference_high": high,
    }


def _case_row(table: SweepTable, case: SweepCase) -> dict[str, object]:
    row: dict[str, object] = {name: getattr(case, name) for name in CASE_COLUMNS}
    row["control"] = int(case.control)
    for part in ("attention", "sampling"):
        fields = dict.fromkeys(name for other in table.cases for name in getattr(other, part))
        row |= {name: getattr(case, part).get(name) for name in fields}
    row |= {name: case.metrics.get(name) for name in table.metrics}
    return row | {name: "; ".join(getattr(case, name)) for name in NOTE_COLUMNS}
