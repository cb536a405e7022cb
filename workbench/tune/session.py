"""One `workbench tune` from capture to run folder: progress, table, files."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from workbench.capture import open_capture
from workbench.run_folder import check_new, default_folder
from workbench.terminal import recording_console
from workbench.tune import report
from workbench.tune import run as tune
from workbench.tune import text as tune_text
from workbench.tune.settings import TuneSettings

WIDTH = 110  # of the printed table where the terminal does not say


def tune_capture(
    path: Path | None,
    settings: TuneSettings,
    *,
    out: Path | None = None,
    command: Sequence[str] | None = None,
    console: Console | None = None,
) -> Path:
    """Tunes, prints and writes; returns the run folder.

    Args:
        path: a capture, ``None`` for the bundled one.
        settings: what to try and aim for.
        out: run folder, which must not exist; by default ``runs/<time>-<algorithm>``.
        command: for the provenance; by default the command line of this process.
        console: where to print.

    Raises:
        FileExistsError: ``out`` exists. OSError: nothing can be written there.
        FileNotFoundError, ValueError, TypeError, UnsupportedError: the capture is damaged, or it
        and the settings do not fit; nothing is written then.
    """
    check_new(out or default_folder(settings.algorithm))
    capture = open_capture(path)
    capture.verify()  # damaged numbers would be tuned on without a sign of it
    with _progress(tune.units(capture, settings)) as tick:
        result = tune.run(capture, settings, tick=tick)
    screen = console or recording_console(WIDTH)
    tune_text.show(result, screen)
    folder = out or default_folder(settings.algorithm)
    argv = list(sys.argv if command is None else command)
    with Console(stderr=True).status("drawing the figures"):  # silent where it is no terminal
        report.write(result, folder, command=argv, summary=screen.export_text(clear=False))
    screen.print(f"Run folder: {folder}", style="bold", soft_wrap=True, highlight=False)
    return folder


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar on a terminal's stderr; silent elsewhere. Yields what is called before each unit."""
    screen = Console(stderr=True)
    columns = (TextColumn("{task.description:<32}"), BarColumn(), MofNCompleteColumn())
    bar = Progress(
        *columns,
        TimeRemainingColumn(),
        console=screen,
        transient=True,
        disable=not screen.is_terminal,
    )
    with bar:
        task = bar.add_task("reading the capture", total=total)
        started = count()

        def tick(label: str) -> None:
            done = next(started)  # a unit is done when the next one begins
            bar.update(task, completed=done, description=label, total=max(total, done + 1))

        yield tick
