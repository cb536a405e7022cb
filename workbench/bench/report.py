"""Rows of a GPU's report: what is written about each, and the same as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from workbench.bench.cases import Case
from workbench.bench.targets import GPU_TARGETS, verdict

Report = dict[str, Any]


def failed_row(row: int, reason: str) -> dict[str, Any]:
    """A row without figures, and why."""
    target = GPU_TARGETS[row]
    names = {"quantity": target.quantity, "short": target.short}
    return {**names, "failed": reason, "measured": {}, "cases": []}


def row_record(row: int, cases: Sequence[Case], clocks: Mapping[str, Any]) -> dict[str, Any]:
    """A row for the report: its targets, the worst figure by implementation, every case."""
    target = GPU_TARGETS[row]
    worst = min if target.more_is_better else max
    names = list(dict.fromkeys(name for case in cases for name in case.measured))
    measured = {
        name: worst(case.measured[name] for case in cases if name in case.measured)
        for name in names
    }
    worst_case = {
        name: next(case for case in cases if case.measured.get(name) == measured[name])
        for name in names
    }
    return {
        "quantity": target.quantity,
        "short": target.short,
        "unit": target.unit,
        "more_is_better": target.more_is_better,
        "targets": {
            name: {"must": must, "aim": aim} for name, (must, aim) in target.levels.items()
        },
        "measured": measured,
        "verdict": {name: _verdict(row, name, value) for name, value in measured.items()},
        "setting": {name: case.setting for name, case in worst_case.items()},
        "baseline": {name: case.baseline for name, case in worst_case.items()},
        "clocks": dict(clocks),
        "cases": [_case_record(case) for case in cases],
    }


def _verdict(row: int, impl: str, value: float) -> str:
    target = GPU_TARGETS[row]
    must, aim = target.levels.get(impl) or target.levels["triton"]
    return verdict(value, must, aim, more_is_better=target.more_is_better)


def _case_record(case: Case) -> dict[str, Any]:
    return {**asdict(case), "seconds": case.seconds}


def as_text(report: Report) -> str:
    """The report as a plain table: figures, targets, cases, peers and who is absent."""
    machine = report["machine"]
    lines = [f"{machine['name']}, {report['date']}, torch {report['versions']['torch']}"]
    for number, row in report["rows"].items():
        lines += ["", f"row {number}: {row['quantity']}"]
        if "failed" in row:
            lines.append(f"  FAILED: {row['failed']}")
            continue
        for name, value in row["measured"].items():
            target = row["targets"].get(name) or row["targets"]["triton"]
            figures = f"must {target['must']:g}, aim {target['aim']:g}: {row['verdict'][name]}"
            lines.append(f"  {name} {value:.3g} {row['unit']} ({figures})")
        lines += [f"    {_case_line(case)}" for case in row["cases"]]
    if report["absent"]:
        lines += ["", "not timed:"]
        lines += [f"  {name}: {reason}" for name, reason in sorted(report["absent"].items())]
    return "\n".join(lines)


def _case_line(case: Mapping[str, Any]) -> str:
    figures = {**case["measured"], **{f"[{name}]": value for name, value in case["peers"].items()}}
    text = ", ".join(f"{name} {value:.3f}" for name, value in figures.items())
    times = ", ".join(f"{name} {1e3 * value:.3f}" for name, value in case["seconds"].items())
    return f"{text} | {case['setting']}" + (f" | ms: {times}" if times else "")
