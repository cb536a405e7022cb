"""``workbench sweep``: each command parses its options and calls plain functions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from workbench.sweep.cases import Case
    from workbench.sweep.run import Workers

sweep = typer.Typer(
    help="Many settings x seeds x prompts in one resumable database.", no_args_is_help=True
)
WIDTH = 150  # of the printed tables where the terminal does not say

PlanPath = Annotated[Path, typer.Argument(help="The plan, a YAML file (docs/sweeps.md).")]
Database = Annotated[Path, typer.Argument(help="The database of a sweep.")]
WorkersOption = Annotated[
    int | None,
    typer.Option("--workers", help="Cases at a time. [default: one for each GPU; 1 on the CPU]"),
]
SchedulerOption = Annotated[
    str | None,
    typer.Option("--scheduler", help="Run on a dask cluster, such as tcp://host:8786."),
]


@sweep.command()
def plan(
    plan: PlanPath,
    time: Annotated[
        bool, typer.Option("--time", help="Time one control of each sampler for an estimate.")
    ] = False,
    workers: WorkersOption = None,
) -> None:
    """Check a plan, list what it would run, and estimate the time; writes nothing."""
    from workbench.sweep import estimate as estimates
    from workbench.sweep.plan import load_plan
    from workbench.sweep.text import show_plan

    read = load_plan(plan)
    cases = read.cases()
    show_plan(read)
    if not time:
        typer.echo("time unknown; --time runs one control of each sampler to estimate it")
        return
    chosen = _workers(cases, workers, None)
    with chosen:
        seconds = estimates.time_controls(cases, chosen)
    basis = f"from one timed control for each sampler, {chosen.slots} at a time"
    typer.echo(estimates.estimate(cases, seconds, chosen.slots, basis))


@sweep.command()
def run(
    plan: PlanPath,
    out: Annotated[
        Path | None, typer.Option(help="The database. [default: runs/NAME.db, NAME of the plan]")
    ] = None,
    workers: WorkersOption = None,
    scheduler: SchedulerOption = None,
) -> None:
    """Run a plan, or go on with it; refuses a database whose settings were others.

    Exit status 1 when a case failed.
    """
    from workbench.sweep.plan import load_plan
    from workbench.sweep.session import run_sweep

    read = load_plan(plan)
    database = out or Path("runs") / f"{read.name}.db"
    _finish(database, run_sweep(plan, database, _workers(read.cases(), workers, scheduler)))


@sweep.command()
def resume(
    database: Database,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Run the failed cases again, too.")
    ] = False,
    workers: WorkersOption = None,
    scheduler: SchedulerOption = None,
) -> None:
    """Run what is left of a sweep, after an interruption or beside another run of it.

    Exit status 1 when a case failed.
    """
    from workbench.sweep.session import resume_sweep
    from workbench.sweep.store import Store

    with Store.open(database) as store:
        cases = store.cases()
    chosen = _workers(cases, workers, scheduler)
    _finish(database, resume_sweep(database, chosen, retry_failed=retry_failed))


@sweep.command()
def status(database: Database) -> None:
    """Say what is done, what runs, what failed and why, and how long the rest will take."""
    from workbench.sweep.store import Store
    from workbench.sweep.text import show_status

    with Store.open(database) as store:
        show_status(store)


@sweep.command()
def report(
    database: Database,
    csv: Annotated[
        Path | None, typer.Option(help="Write every case with all its metrics here.")
    ] = None,
    statistics: Annotated[
        Path | None, typer.Option(help="Write the statistics of every setting and metric here.")
    ] = None,
) -> None:
    """Print the table of a sweep, each setting against the control of the same seeds."""
    from workbench.sweep import report as report_
    from workbench.sweep.store import Store
    from workbench.terminal import recording_console

    with Store.open(database) as store:
        table, environments = store.table(), store.environments()
    report_.show(table, environments, recording_console(WIDTH))
    if csv is not None:
        report_.write_csv(csv, report_.case_rows(table))
    if statistics is not None:
        report_.write_csv(statistics, report_.statistics_rows(table))


@sweep.command()
def front(
    database: Database,
    gate: Annotated[
        list[str] | None,
        typer.Option(help="METRIC=LIMIT for every video, such as psnr=30; may be repeated."),
    ] = None,
    quality: Annotated[
        str, typer.Option(help="Of the points: psnr, ssim, lpips or relative_l2.")
    ] = "psnr",
    cost: Annotated[
        str | None,
        typer.Option(
            help="attention or video time, measured beside dense; or density. "
            "[default: attention; density where all ran on CPUs]"
        ),
    ] = None,
    figure: Annotated[Path | None, typer.Option(help="Draw the points here.")] = None,
    choose: Annotated[
        Path | None, typer.Option(help="Write the cheapest setting that passes here (.yaml).")
    ] = None,
) -> None:
    """Say which settings no other one beats in cost and quality, and which of them pass the gates.

    The control, dense against dense, is the floor under every verdict.
    """
    from workbench.pareto import Gate
    from workbench.sweep.choice import show_front

    gates = [Gate.read(text) for text in gate or ()]
    show_front(database, gates, metric=quality, cost=cost, figure=figure, config=choose)


def _workers(cases: Sequence[Case], workers: int | None, scheduler: str | None) -> Workers:
    from workbench.sweep.run import local_workers, visible_gpus

    if scheduler is None:
        return local_workers(workers, visible_gpus(cases))
    if workers is not None:
        raise ValueError("--workers: a dask cluster has its own; drop it, or --scheduler")
    from workbench.sweep.cluster import cluster_workers

    return cluster_workers(scheduler)


def _finish(database: Path, counts: dict[str, int]) -> None:
    typer.echo(f"{database}: " + ", ".join(f"{n} {state}" for state, n in counts.items() if n))
    raise typer.Exit(1 if counts["failed"] else 0)
