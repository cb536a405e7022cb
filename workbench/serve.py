"""`workbench serve`: a panel as a page of its own, through Voila; no notebook, no code in sight."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

PAGE = Path(__file__).resolve().parent / "widgets" / "page.ipynb"
PANEL, FILE = "WORKBENCH_PAGE_PANEL", "WORKBENCH_PAGE_FILE"
TITLES = {
    "tau": "Tune tau of Sol-Attn",
    "threshold": "Tune the threshold of SkipSoftmax",
    "masks": "Masks of every layer, step and head",
    "compare": "Compare two attention settings",
    "schedule": "Edit a schedule",
    "sweep": "Explore a sweep",
    "time": "Where the time goes",
    "doctor": "What runs here",
}
# What the file is: optional for the first kind, needed for the second, refused elsewhere.
ON_CAPTURES, ON_DATABASES = ("tau", "threshold", "masks", "compare", "time"), ("sweep",)


def request(panel: str, file: Path | None) -> dict[str, str]:
    """What to show, as environment variables: the page's process inherits them.

    Args:
        panel: a name of :data:`TITLES`.
        file: a capture or, for ``sweep``, the database of a sweep.

    Raises:
        ValueError: no such panel, a file that it does not take or lacks, or one of another kind.
        FileNotFoundError, IsADirectoryError: there is no such file.
    """
    if panel not in TITLES:
        raise ValueError(f"panel={panel!r}: must be one of {', '.join(TITLES)}")
    if file is None:
        if panel in ON_DATABASES:
            raise ValueError(f"panel {panel!r} needs a file: the database of `workbench sweep run`")
        return {PANEL: panel}
    if panel not in ON_CAPTURES + ON_DATABASES:
        raise ValueError(f"file={str(file)!r}: panel {panel!r} takes no file; leave it out")
    _check(panel, file)
    # Voila starts the page's process in another folder.
    return {PANEL: panel, FILE: str(file.resolve())}


def _check(panel: str, file: Path) -> None:
    """Opens the file here, because on the page its error would come late and without a command."""
    from workbench.capture import open_capture
    from workbench.sweep.table import load

    if file.is_dir():
        kind = "database of a sweep" if panel in ON_DATABASES else "capture"
        raise IsADirectoryError(f"file={str(file)!r}: is a folder; name the {kind} in it")
    if panel in ON_DATABASES:
        load(file)
    else:
        open_capture(file)


def read_request(environment: Mapping[str, str] | None = None) -> tuple[str, str | None]:
    """Panel and file as :func:`request` wrote them, in the process of the page."""
    found = os.environ if environment is None else environment
    return found.get(PANEL, next(iter(TITLES))), found.get(FILE)


def voila_argv(*, port: int | None = None, browser: bool = True) -> list[str]:
    """Command line that serves the page with this Python, on this machine alone.

    Raises:
        ValueError: `port` is outside 1..65535.
    """
    if port is not None and not 1 <= port <= 65535:
        raise ValueError(f"port={port}: must be in 1..65535; leave it out for 8866 or a free one")
    argv = [sys.executable, "-m", "voila", str(PAGE), "--show_tracebacks=True"]
    if port is not None:
        argv.append(f"--port={port}")
    if not browser:
        argv.append("--no-browser")
    return argv


def serve(argv: list[str], wanted: Mapping[str, str]) -> NoReturn:
    """Replaces this process by Voila, so that Ctrl-C reaches it alone.

    Raises:
        ModuleNotFoundError: Voila is not installed.
    """
    if importlib.util.find_spec("voila") is None:
        raise ModuleNotFoundError("voila is not installed; pip install voila, or the extra voila")
    sys.stdout.flush()
    os.execve(argv[0], argv, {**os.environ, **wanted})
