"""Rows 1 to 9 and 14 of the table of targets on this GPU: `workbench bench gpu`.

Parity first, then every row by interleaved medians against the best dense attention that is
installed. Also `python -m workbench.bench.gpu` where only torch, triton and numpy are installed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from workbench.bench import files, kernel_rows, peers
from workbench.bench.cases import Case, Run, served_by
from workbench.bench.compile_rows import compile_rows
from workbench.bench.inputs import QUICK, Bench, describe, random_mask
from workbench.bench.parity import Check, broken, check_parity, checked_peers
from workbench.bench.report import Report, as_text, failed_row, row_record
from workbench.bench.roofline import measure_ceilings
from workbench.bench.sol_rows import sol_rows
from workbench.bench.targets import GPU_ROWS
from workbench.provenance import device_record, package_versions, provenance

LIBRARIES = ("flash-attn-4", "nvidia-cutlass-dsl", "quack-kernels", "nvidia-cudnn-frontend")
GROUPS: Mapping[tuple[int, ...], Callable[[Run, Collection[int]], list[Case]]] = {
    (1, 2, 4): sol_rows,
    (3,): kernel_rows.mask_rows,
    (5,): kernel_rows.sync_rows,
    (6,): kernel_rows.trace_rows,
    (7,): kernel_rows.skip_rows,
    (8,): kernel_rows.skip_rows,
    (9,): kernel_rows.quant_rows,
    (14,): compile_rows,
}


def bench_gpu(
    rows: Sequence[int] = GPU_ROWS,
    *,
    bench: Bench | None = None,
    keep: Callable[[Report], None] = lambda report: None,
    command: Sequence[str] | None = None,
) -> Report:
    """Measures rows of the table of targets, after a check of every result.

    Args:
        rows: which of 1 to 9 and 14.
        bench: sizes, device and timer; the full sizes on the current GPU by default.
        keep: called with the report after every group of rows, so that a lost machine costs one.
        command: the command line, for the report.

    Returns:
        The report, ready for JSON. A row whose result differs from the reference is not timed; it
        and a row that raised have ``failed`` instead of figures.

    Raises:
        ValueError: a row that is not measured here, or no GPU and so nothing to measure.
    """
    wanted = check_rows(rows)
    bench = bench or Bench()
    run, report, checks = prepare(bench, command)
    wrong = broken(checks)
    for row in sorted(wanted & set(wrong)):
        bench.say(f"row {row} is not measured, {wrong[row]}")
        report["rows"][str(row)] = failed_row(row, wrong[row])
    wanted -= set(wrong)
    for group, measure in GROUPS.items():
        asked = wanted & set(group)
        if asked:
            bench.say(f"measuring row {', '.join(map(str, sorted(asked)))}")
            report["rows"].update(_measured(_right(run, checks, asked), measure, asked))
            report["rows"] = dict(sorted(report["rows"].items(), key=lambda item: int(item[0])))
            report["absent"] = dict(run.absent)
            keep(report)
    return report


def check_rows(rows: Sequence[int]) -> set[int]:
    """The rows as a set.

    Raises:
        ValueError: none, or one that is not measured here.
    """
    unknown = sorted(set(rows) - set(GPU_ROWS))
    if unknown or not rows:
        raise ValueError(f"rows={list(rows)}: must be some of {', '.join(map(str, GPU_ROWS))}")
    return set(rows)


def prepare(bench: Bench, command: Sequence[str] | None) -> tuple[Run, Report, dict[str, Check]]:
    """Checks every result, measures the ceilings, begins the report."""
    if bench.device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda: torch sees no CUDA GPU here; `workbench doctor` says why")
    sizes = bench.sizes
    data = bench.qkv("random", sizes.check, sizes.check_heads)
    impls = served_by(data)
    if not impls:
        raise ValueError(f"no implementation for GPUs serves {describe(data[0])} on {bench.device}")
    bench.say(f"comparing results of {', '.join(impls)} with the reference")
    checks = check_parity(bench, impls)
    absent = unfit_peers(bench)
    bench.keep_only((sizes.long, sizes.short))
    bench.say("measuring the ceilings")
    run = Run(bench, measure_ceilings(bench), impls, absent)
    made = provenance(command, {})
    report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine_record(bench),
        "versions": {
            **_mapping(made["versions"]),
            **package_versions(LIBRARIES),
            **cuda_versions(),
        },
        **{name: made[name] for name in ("python", "platform", "git", "command")},
        "sizes": asdict(sizes),
        "ceilings": {
            "flops_per_second": run.ceilings.flops,
            "bytes_per_second": run.ceilings.bytes,
        },
        "parity": {name: {**asdict(check), "holds": check.holds} for name, check in checks.items()},
        "absent": dict(absent),
        "rows": {},
    }
    return run, report, checks


def unfit_peers(bench: Bench) -> dict[str, str]:
    """Other libraries that are missing, fail or differ from the reference, with the reason."""
    q, k, v = bench.qkv("random", bench.sizes.check, bench.sizes.check_heads)
    whole = q.shape[1] // 128 * 128  # peers want whole blocks
    data = (q[:, :whole].contiguous(), k[:, :whole].contiguous(), v[:, :whole].contiguous())
    route = random_mask(data[0], 0.3)
    tasks = {
        "dense": (peers.dense_peers(*data), {}),
        "block mask": (peers.block_mask_peers(*data, route), {"route": route}),
    }
    return {
        f"{task}: {name}": reason
        for task, (found, settings) in tasks.items()
        for name, reason in peers.reasons(checked_peers(found, data, settings)).items()
    }


def machine_record(bench: Bench) -> dict[str, Any]:
    """The GPU (or CPU): name, driver, memory, multiprocessors, clocks as found."""
    record: dict[str, Any] = {**device_record(), "clocks": bench.clocks()}
    if bench.device.type == "cuda":
        gpu = torch.cuda.get_device_properties(bench.device)
        record["capability"] = f"{gpu.major}.{gpu.minor}"
        record["multiprocessors"] = gpu.multi_processor_count
        record["memory_bytes"] = gpu.total_memory
    return record


def cuda_versions() -> dict[str, str | None]:
    """CUDA and cuDNN that torch was built with or loaded."""
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return {"cuda": torch.version.cuda, "cudnn": None if cudnn is None else str(cudnn)}


def _right(run: Run, checks: Mapping[str, Check], asked: Collection[int]) -> Run:
    """The run with those implementations alone that agree with the reference in these rows."""
    kept = []
    for impl in run.impls:
        reasons = {row: why for row, why in broken(checks, impl).items() if row in asked}
        run.absent.update({f"row {row}: {impl}": why for row, why in reasons.items()})
        if not reasons:
            kept.append(impl)
    return replace(run, impls=tuple(kept))


def _measured(
    run: Run, measure: Callable[[Run, Collection[int]], list[Case]], asked: Collection[int]
) -> dict[str, Any]:
    """Rows of a group by number; a failure is a row as well, and the next group still runs."""
    before = run.bench.clocks()
    if not run.impls:
        reason = "every implementation differs from the reference, see `absent`"
        return {str(row): failed_row(row, reason) for row in sorted(asked)}
    try:
        cases = measure(run, asked)
    except _kernel_errors() as error:
        reason = f"{type(error).__name__}: {error}"
        run.bench.say(f"failed: {reason}")
        return {str(row): failed_row(row, reason) for row in sorted(asked)}
    clocks = {"before": before, "after": run.bench.clocks()}
    return {
        str(row): row_record(row, [case for case in cases if case.row == row], clocks)
        for row in sorted(asked)
    }


def _kernel_errors() -> tuple[type[BaseException], ...]:
    """What CUDA and Triton's compiler and launcher raise."""
    try:
        from triton.errors import TritonError
    except (ImportError, OSError):
        return (RuntimeError,)
    return (RuntimeError, TritonError)


def _mapping(value: object) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}


def run_and_report(
    rows: Sequence[int],
    *,
    json: Path | None = None,
    figure: Path | None = None,
    quick: bool = False,
    command: Sequence[str] | None = None,
) -> bool:
    """Measures, prints and writes; True when no row failed and every result was right.

    Raises:
        OSError: a file cannot be written; nothing is measured then.
    """
    check_rows(rows)
    for name, path in (("json", json), ("figure", figure)):
        if path is not None:
            files.check_place(path, name)

    def keep(report: Report) -> None:
        if json is not None:
            files.save(report, json)

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    bench = Bench(QUICK, say=say) if quick else Bench(say=say)
    report = bench_gpu(rows, bench=bench, keep=keep, command=command)
    print(as_text(report))
    if figure is not None:
        from workbench.bench.figure import draw_report

        draw_report(report, figure)
    failed = any("failed" in row for row in report["rows"].values())
    return not failed and all(check["holds"] for check in report["parity"].values())


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m workbench.bench.gpu`: the command without the packages of the command line."""
    parser = argparse.ArgumentParser(prog="python -m workbench.bench.gpu", description=main.__doc__)
    parser.add_argument("--rows", default=",".join(map(str, GPU_ROWS)), help="rows, such as 1,2,3")
    parser.add_argument(
        "--json", type=Path, help="write the report here, after every group of rows"
    )
    parser.add_argument("--figure", type=Path, help="draw the report here (needs matplotlib)")
    parser.add_argument("--quick", action="store_true", help="small sizes, a few repeats")
    given = parser.parse_args(arguments)
    parts = given.rows.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        parser.error(f"--rows {given.rows}: expected integers such as 1,2,3")
    try:
        done = run_and_report(
            [int(part) for part in parts],
            json=given.json,
            figure=given.figure,
            quick=given.quick,
            command=sys.argv,
        )
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return 0 if done else 1


if __name__ == "__main__":
    sys.exit(main())
