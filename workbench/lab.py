"""`workbench lab`: JupyterLab on a notebook of the project."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path
from typing import NoReturn
from urllib.parse import quote

from workbench.paths import checkout_dir, notebooks_dir

DEFAULT_NOTEBOOK = "01_tune_tau.ipynb"


def working_copy(name: str = DEFAULT_NOTEBOOK, folder: Path | None = None) -> Path:
    """The notebook to open: the checkout's own, or a copy in `folder` of the installed one.

    A copy that is already there is kept, because it may hold the user's work.

    Args:
        name: file name in the notebooks folder.
        folder: where a copy goes; the current folder by default.

    Raises:
        FileNotFoundError: no notebook of that name; the message lists those that exist.
    """
    source = notebooks_dir() / name
    if not source.is_file():
        known = sorted(path.name for path in source.parent.glob("*.ipynb")) or ["none"]
        raise FileNotFoundError(f"notebook={name!r} does not exist; there are: {', '.join(known)}")
    if checkout_dir() is not None:
        return source
    target = (folder or Path.cwd()) / name
    if not target.exists():
        shutil.copyfile(source, target)
    return target


def lab_argv(
    notebook: Path, *, port: int | None = None, browser: bool = True, extra: tuple[str, ...] = ()
) -> list[str]:
    """Command line that starts JupyterLab on `notebook` with this Python.

    The notebook is the default page, and not a file to run: then the address that JupyterLab prints
    leads to it, too, where no browser can be opened.

    Raises:
        ValueError: `port` is outside 1..65535.
    """
    if port is not None and not 1 <= port <= 65535:
        raise ValueError(f"port={port}: must be in 1..65535; leave it out for the first free one")
    where = notebook.absolute()
    argv = [
        *(sys.executable, "-m", "jupyterlab"),
        f"--ServerApp.root_dir={where.parent}",
        f"--LabApp.default_url=/lab/tree/{quote(where.name)}",
    ]
    if port is not None:
        argv.append(f"--port={port}")
    if not browser:
        argv.append("--no-browser")
    # In a container one is usually root, and JupyterLab then refuses to start without this.
    if getattr(os, "geteuid", lambda: 1)() == 0:
        argv.append("--allow-root")
    return [*argv, *extra]


def open_lab(argv: list[str]) -> NoReturn:
    """Replace this process by JupyterLab, so that Ctrl-C reaches it alone.

    Raises:
        ModuleNotFoundError: JupyterLab is not installed.
    """
    if importlib.util.find_spec("jupyterlab") is None:
        raise ModuleNotFoundError("jupyterlab is not installed; pip install 'jupyterlab>=4'")
    sys.stdout.flush()
    os.execv(argv[0], argv)
