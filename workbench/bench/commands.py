"""`workbench bench`: options to plain calls, nothing more."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from workbench.options import integers, three_sizes

bench = typer.Typer(help="Measure what the project claims about speed.", no_args_is_help=True)


@bench.command()
def cpu(
    rows: Annotated[str, typer.Option(help="Rows of the table of targets.")] = "10,11,12,15",
    grid: Annotated[
        str | None,
        typer.Option(help="Tokens along t,h,w. [default: 8,32,32; 8,16,16 with --quick]"),
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option(help="Interleaved repeats behind each median. [default: 9; 3 with --quick]"),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Also write the report here.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Small sizes, a few repeats; targets need more.")
    ] = False,
) -> None:
    """Measure the rows of the table of targets that a CPU can show; checks the results first."""
    from workbench.bench import cpu as bench_
    from workbench.bench import files

    if json is not None:
        files.check_place(json)  # before minutes of measuring
    found = bench_.bench_cpu(
        integers("--rows", rows),
        grid=three_sizes("--grid", ("8,16,16" if quick else "8,32,32") if grid is None else grid),
        repeats=(3 if quick else 9) if repeats is None else repeats,
        say=lambda text: typer.echo(text, err=True),
    )
    made = bench_.report(found, sys.argv)
    bench_.show(found, made)
    if quick:
        typer.echo("quick: targets are stated for the sizes without --quick")
    if json is not None:
        files.save(made, json)


@bench.command()
def gpu(
    rows: Annotated[str, typer.Option(help="Rows of the targets.")] = "1,2,3,4,5,6,7,8,9,14",
    json: Annotated[
        Path | None, typer.Option(help="Also write the report here, after every group of rows.")
    ] = None,
    figure: Annotated[Path | None, typer.Option(help="Also draw the report here.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes, a few repeats.")] = False,
) -> None:
    """Measure the rows that need a GPU, beside other libraries; checks the results first.

    Exit status 1 when a row failed or differs from the reference.
    """
    from workbench.bench import gpu as bench_

    numbers = integers("--rows", rows)
    done = bench_.run_and_report(numbers, json=json, figure=figure, quick=quick, command=sys.argv)
    raise typer.Exit(0 if done else 1)


@bench.command()
def draw(
    report: Annotated[Path, typer.Argument(help="What bench gpu --json wrote.")],
    figure: Annotated[Path, typer.Argument(help="The picture (.png, .svg or .pdf).")],
) -> None:
    """Draw a report of bench gpu; needs no GPU."""
    from workbench.bench.figure import draw_report
    from workbench.bench.files import load

    typer.echo(f"{draw_report(load(report), figure)}: drawn")
