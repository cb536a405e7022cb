"""A real browser on a real JupyterLab: what the browser tests share.

Set WORKBENCH_SCREENSHOTS to a folder to keep the pictures that the tests take.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
)
PICTURES = "WORKBENCH_SCREENSHOTS"
OUTPUT = ".jp-OutputArea-output"
FAILED = f"{OUTPUT}[data-mime-type='application/vnd.jupyter.error']"
SECONDS = 1000  # playwright counts in milliseconds


def browser_path() -> str | None:
    return next(filter(None, map(shutil.which, BROWSERS)), None)


# The marks of every module of browser tests: a skip says what to install.
needs_browser = [
    pytest.mark.skipif(
        importlib.util.find_spec("playwright") is None,
        reason="needs the package playwright: pip install playwright (no browser download)",
    ),
    pytest.mark.skipif(
        browser_path() is None,
        reason=f"needs Chromium: apt-get install chromium (looked for {', '.join(BROWSERS)})",
    ),
    pytest.mark.timeout(300),
]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(url: str, server: subprocess.Popen[bytes], seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"the server of {url} ended with status {server.returncode}")
        try:
            urllib.request.urlopen(url, timeout=1).read()
            return
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            time.sleep(0.2)
    raise TimeoutError(f"{url} did not answer within {seconds} s")


def lab_settings(folder: Path) -> Path:
    """JupyterLab without news, and with every cell in the page, also those scrolled away."""
    choices = {
        "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
        "notebook-extension/tracker": {"windowingMode": "none"},
    }
    for plugin, values in choices.items():
        path = folder / "@jupyterlab" / f"{plugin}.jupyterlab-settings"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(values))
    return folder


@contextmanager
def jupyterlab(root: Path, state: Path) -> Iterator[str]:
    """Address of a JupyterLab that serves the folder `root` and keeps its own files in `state`."""
    folders = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")
    environment = {**os.environ, **{name: str(state / name) for name in folders}}
    environment["JUPYTERLAB_SETTINGS_DIR"] = str(lab_settings(state / "settings"))
    port = free_port()
    options = ["--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}"]
    options += ["--IdentityProvider.token=", f"--ServerApp.root_dir={root}"]
    with (state / "server.log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *options], env=environment, stdout=log, stderr=log
        )
    try:
        wait_for(f"http://127.0.0.1:{port}/api/status", server)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(20)


@contextmanager
def open_page(width: int = 1500, height: int = 1300) -> Iterator:
    """A page of Chromium; an error that no script caught fails the test when the page closes."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path(), args=FLAGS)
        viewport = {"width": width, "height": height}
        sharp = 1.25 if os.environ.get(PICTURES) else 1.0
        page = browser.new_page(viewport=viewport, device_scale_factor=sharp)
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.set_default_timeout(120 * SECONDS)
        yield page
        browser.close()
    assert problems == []


def open_notebook(page, lab: str, name: str) -> None:
    """Opens a notebook in a fresh workspace and waits until its kernel is idle."""
    page.goto(f"{lab}/lab/tree/{name}?reset")
    page.wait_for_selector(".jp-NotebookPanel .jp-Cell")
    page.wait_for_selector(".jp-StatusBar-TextItem:has-text('| Idle')")


def run_all_cells(page, wanted: str) -> None:
    """Runs every cell and waits for the selector `wanted`; an error of a cell fails the test."""
    started = ".jp-NotebookPanel .jp-InputPrompt:text-matches('[0-9*]')"
    for _ in range(5):
        page.locator(".jp-NotebookPanel .jp-Cell").first.click()
        page.locator(".lm-MenuBar-itemLabel", has_text="Run").first.click()
        page.locator('.lm-Menu-itemLabel:text-is("Run All Cells")').click()
        # JupyterLab drops what is sent while its connection to a fresh kernel settles.
        page.wait_for_timeout(1 * SECONDS)
        if page.locator(started).count():
            break
    page.wait_for_selector(f"{wanted}, {FAILED}")
    assert page.locator(FAILED).all_inner_texts() == []


def keep_picture(where, name: str) -> None:
    """A picture of a page or an element, where WORKBENCH_SCREENSHOTS names a folder."""
    folder = os.environ.get(PICTURES)
    if folder:
        where.screenshot(path=Path(folder) / f"{name}.png")
