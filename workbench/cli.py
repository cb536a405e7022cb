"""The command line. A command parses its options and calls a plain function, nothing more.

To add a command, write one function with `@app.command()` and import what it needs inside it:
`workbench --help` must not wait for torch. A group is a `typer.Typer()` given to `app.add_typer`.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from workbench import __version__

app = typer.Typer(
    name="workbench",
    help="See, tune and measure sparse attention for video diffusion.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

USER_ERRORS = (ValueError, TypeError, OSError, ModuleNotFoundError)


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"workbench {__version__}")
        raise typer.Exit


def _set_debug(value: bool) -> None:
    if value:
        os.environ["WORKBENCH_DEBUG"] = "1"


@app.callback()
def _options(
    debug: Annotated[
        bool,
        typer.Option(
            "--debug",
            callback=_set_debug,
            help="Show the traceback of an error (also: WORKBENCH_DEBUG=1).",
        ),
    ] = False,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Options that come before the command; the callbacks act on them."""


@app.command()
def doctor(
    json: Annotated[bool, typer.Option("--json", help="Machine-readable report.")] = False,
) -> None:
    """Say what this machine can run, and why not the rest.

    Exit status 1 when something that is required is missing or broken.
    """
    from workbench import doctor as checks
    from workbench import doctor_text

    report = checks.examine()
    if json:
        typer.echo(checks.to_json(report))
    else:
        doctor_text.show(report)
    raise typer.Exit(0 if report.ok else 1)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def lab(
    context: typer.Context,
    notebook: Annotated[
        str, typer.Option(help="Name of a notebook of the project.")
    ] = "01_tune_tau.ipynb",
    port: Annotated[int | None, typer.Option(help="Port; the first free one by default.")] = None,
    browser: Annotated[bool, typer.Option(help="Open a browser window.")] = True,
) -> None:
    """Open JupyterLab on a notebook. Further options go to JupyterLab."""
    from workbench import lab as lab_

    path = lab_.working_copy(notebook)
    lab_.open_lab(lab_.lab_argv(path, port=port, browser=browser, extra=tuple(context.args)))


def main() -> None:
    """Entry point: an error in what the user gave is one line and exit status 2."""
    try:
        app()
    except _user_errors() as error:
        if os.environ.get("WORKBENCH_DEBUG") == "1":
            raise
        sys.stderr.write(f"workbench: error: {error or type(error).__name__}\n")
        sys.stderr.write("  (workbench --debug COMMAND shows where it came from)\n")
        sys.exit(2)


def _user_errors() -> tuple[type[BaseException], ...]:
    """USER_ERRORS, and blockattn's own once something has imported it (it brings torch)."""
    loaded = sys.modules.get("blockattn.errors")
    return USER_ERRORS if loaded is None else (*USER_ERRORS, loaded.UnsupportedError)


if __name__ == "__main__":
    main()
