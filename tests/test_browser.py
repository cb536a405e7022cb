"""The notebook in a real JupyterLab in a real browser: the slider moves and the pictures follow.

Set WORKBENCH_SCREENSHOT to a path to keep a picture of the widget.
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
from pathlib import Path

import pytest

from workbench.paths import notebooks_dir

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage")
QUIET_FLAGS = ("--disable-quic", "--disable-background-networking", "--disable-component-update")
NOTEBOOK = "01_tune_tau.ipynb"
TUNER = ".jp-OutputArea-output .widget-vbox"
SECONDS = 1000  # playwright counts in milliseconds


def browser_path() -> str | None:
    return next(filter(None, map(shutil.which, BROWSERS)), None)


pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("playwright") is None,
        reason="needs the package playwright (pip install playwright; no browser download)",
    ),
    pytest.mark.skipif(browser_path() is None, reason=f"needs a browser: one of {BROWSERS}"),
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
            raise RuntimeError(f"JupyterLab ended with status {server.returncode}")
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


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[str]:
    """Address of a JupyterLab of its own that holds a copy of the notebook."""
    root = tmp_path / "root"
    root.mkdir()
    shutil.copy(notebooks_dir() / NOTEBOOK, root)
    folders = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")
    environment = {**os.environ, **{name: str(tmp_path / name) for name in folders}}
    environment["JUPYTERLAB_SETTINGS_DIR"] = str(lab_settings(tmp_path / "settings"))
    port = free_port()
    options = ["--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}"]
    options += ["--IdentityProvider.token=", f"--ServerApp.root_dir={root}"]
    with (tmp_path / "server.log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *options], env=environment, stdout=log, stderr=log
        )
    try:
        wait_for(f"http://127.0.0.1:{port}/api/status", server)
        yield f"http://127.0.0.1:{port}/lab/tree/{NOTEBOOK}?reset"
    finally:
        server.terminate()
        server.wait(20)


def test_moving_the_slider_changes_the_pictures_in_the_browser(lab: str):
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=browser_path(), args=[*FLAGS, *QUIET_FLAGS]
        )
        page = browser.new_page(
            viewport={"width": 1500, "height": 1300}, device_scale_factor=scale()
        )
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.set_default_timeout(120 * SECONDS)
        run_all_cells(page, lab)
        pictures = page.locator(f"{TUNER} img")
        before = [pictures.nth(n).get_attribute("src") for n in range(2)]
        tau = page.locator(f"{TUNER} .widget-slider").first
        assert tau.locator(".widget-readout").inner_text() == "1.00"
        tau.locator(".noUi-handle").focus()
        for _ in range(10):
            page.keyboard.press("ArrowRight")
        assert tau.locator(".widget-readout").inner_text() == "1.50"
        for n, source in enumerate(before):
            changed = "([css, n, old]) => document.querySelectorAll(css)[n].src !== old"
            page.wait_for_function(changed, arg=[f"{TUNER} img", n, source])
        status = page.locator(f"{TUNER} [role=status]")
        status.get_by_text("Relative L2 error against dense").wait_for()
        assert page.locator(f"{TUNER} [role=alert]").count() == 0
        keep_picture(page)
        browser.close()
    assert problems == []


def run_all_cells(page, address: str) -> None:
    page.goto(address)
    page.wait_for_selector(".jp-NotebookPanel .jp-Cell")
    page.wait_for_selector(".jp-StatusBar-TextItem:has-text('| Idle')")
    started = ".jp-NotebookPanel .jp-InputPrompt:text-matches('[0-9*]')"
    for _ in range(5):
        page.locator(".jp-NotebookPanel .jp-Cell").first.click()
        page.locator(".lm-MenuBar-itemLabel", has_text="Run").first.click()
        page.locator('.lm-Menu-itemLabel:text-is("Run All Cells")').click()
        # JupyterLab drops what is sent while its connection to a fresh kernel settles.
        page.wait_for_timeout(1 * SECONDS)
        if page.locator(started).count():
            break
    measured = f"{TUNER} [role=status]:has-text('Relative L2 error')"
    failed = ".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.error']"
    page.wait_for_selector(f"{measured}, {failed}")
    assert page.locator(failed).all_inner_texts() == []


def scale() -> float:
    return 1.25 if os.environ.get("WORKBENCH_SCREENSHOT") else 1.0


def keep_picture(page) -> None:
    target = os.environ.get("WORKBENCH_SCREENSHOT")
    if target:
        page.locator(f"{TUNER} input[type=number]").fill("128")
        page.keyboard.press("Tab")
        page.locator(f"{TUNER} .noUi-handle").nth(1).focus()
        page.keyboard.press("ArrowRight")
        page.wait_for_timeout(4 * SECONDS)
        page.locator(TUNER).first.screenshot(path=target)
