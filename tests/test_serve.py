"""`workbench serve`: what is asked for reaches the page, and the page holds the panel."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import nbformat
import pytest
from typer.testing import CliRunner

from tests.browser import SECONDS, free_port, keep_picture, needs_browser, open_page, wait_for
from workbench import cli, serve
from workbench.paths import data_dir
from workbench.serve import FILE, PAGE, PANEL, TITLES, read_request, request, voila_argv

CAPTURE = data_dir() / "tiny_video_capture.safetensors"
needs_voila = pytest.mark.skipif(
    importlib.util.find_spec("voila") is None, reason="needs voila: pip install voila"
)


# -- what is asked for ----------------------------------------------------------------------


@pytest.mark.parametrize("panel", [name for name in TITLES if name != "sweep"])
def test_a_panel_needs_no_file(panel: str):
    wanted = request(panel, None)
    assert wanted == {PANEL: panel}
    assert read_request(wanted) == (panel, None)


def test_a_file_reaches_the_page_wherever_that_runs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(CAPTURE.parent)
    wanted = request("threshold", Path(CAPTURE.name))
    assert read_request(wanted) == ("threshold", str(CAPTURE.resolve()))


def test_without_a_request_the_page_shows_the_first_panel():
    assert read_request({}) == ("tau", None)


@pytest.mark.parametrize(
    ("panel", "file", "error", "message"),
    [
        ("taus", None, ValueError, "panel='taus': must be one of tau, threshold"),
        ("sweep", None, ValueError, "needs a file: the database"),
        ("doctor", CAPTURE, ValueError, "takes no file; leave it out"),
        ("tau", Path("no.safetensors"), FileNotFoundError, "no such file"),
        ("tau", CAPTURE.parent, IsADirectoryError, "is a folder; name the capture in it"),
        ("sweep", CAPTURE.parent, IsADirectoryError, "name the database of a sweep in it"),
        ("tau", PAGE, ValueError, "page.ipynb: no capture"),
        ("masks", PAGE, ValueError, "page.ipynb: no capture"),
        ("sweep", CAPTURE, ValueError, "is no SQLite file"),
    ],
)
def test_what_cannot_be_shown_is_refused(panel, file, error, message: str):
    with pytest.raises(error, match=message):
        request(panel, file)


def test_voila_gets_the_page_and_the_options():
    argv = voila_argv(port=8890, browser=False)
    assert argv[:4] == [sys.executable, "-m", "voila", str(PAGE)]
    assert {"--port=8890", "--no-browser"} < set(argv)
    assert "--no-browser" not in voila_argv()
    with pytest.raises(ValueError, match="port=0"):
        voila_argv(port=0)


def test_the_command_starts_voila_with_the_request(monkeypatch: pytest.MonkeyPatch):
    started = {}

    def execve(path: str, argv: list[str], environment: Mapping[str, str]) -> None:
        started.update(path=path, argv=argv, environment=environment)
        raise SystemExit(0)

    monkeypatch.setattr(serve.os, "execve", execve)
    monkeypatch.setattr(serve.importlib.util, "find_spec", lambda name: object())
    done = CliRunner().invoke(cli.app, ["serve", "compare", "--no-browser"])
    assert done.exit_code == 0
    assert started["argv"] == voila_argv(browser=False)
    assert started["environment"][PANEL] == "compare"
    assert FILE not in started["environment"]


def test_without_voila_the_fix_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(serve.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install voila"):
        serve.serve(voila_argv(), {})


def test_the_page_is_one_call_and_keeps_no_output():
    book = nbformat.read(PAGE, as_version=4)
    nbformat.validate(book)
    (cell,) = book.cells
    assert cell.source.endswith("page()")
    assert cell.outputs == []


@pytest.mark.parametrize(
    ("panel", "name"),
    [("schedule", "ScheduleEditor"), ("doctor", "Doctor"), ("masks", "RouteViewer")],
)
def test_a_page_holds_its_panel_under_its_title(
    panel: str, name: str, monkeypatch: pytest.MonkeyPatch
):
    from workbench.widgets.pages import MAKERS, page

    assert set(MAKERS) == set(TITLES)
    monkeypatch.setenv(PANEL, panel)
    tab, heading, made = page().children
    assert tab.text == TITLES[panel]
    assert TITLES[panel] in heading.value
    assert type(made).__name__ == name
    assert made.problem == ""


# -- the page, served -----------------------------------------------------------------------


@contextmanager
def served(folder: Path, *words: str) -> Iterator[str]:
    """Address of `workbench serve` with these words."""
    port = free_port()
    folders = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")
    environment = {**os.environ, **{name: str(folder / name) for name in folders}}
    command = [sys.executable, "-c", "from workbench.cli import main; main()", "serve", *words]
    command += ["--no-browser", f"--port={port}"]
    with (folder / "voila.log").open("wb") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=folder)
    try:
        wait_for(f"http://127.0.0.1:{port}/voila/static/voila.js", server)
        yield f"http://127.0.0.1:{port}/"
    finally:
        server.terminate()
        server.wait(20)


@needs_voila
def test_the_page_is_served_with_the_panel_in_it(tmp_path: Path):
    with served(tmp_path, "doctor") as address:
        answer = urllib.request.urlopen(address, timeout=100)
        text = answer.read().decode()
    assert answer.status == 200
    assert "application/vnd.jupyter.widget-view+json" in text
    assert "from workbench" not in text  # no code in sight
    assert "Traceback" not in text


class TestInABrowser:
    pytestmark: ClassVar = [*needs_browser, needs_voila]

    def test_the_tuner_answers_on_its_page(self, tmp_path: Path):
        with served(tmp_path, "tau", str(CAPTURE)) as address, open_page(1400, 1200) as page:
            page.goto(address)
            page.get_by_text(TITLES["tau"]).wait_for()
            status = page.locator("[role=status]")
            status.get_by_text("Relative L2 error against dense").wait_for()
            slider = page.locator(".widget-slider").first
            picture = page.locator(".widget-image").first
            before = picture.get_attribute("src")
            slider.locator(".noUi-handle").focus()
            for _ in range(10):
                page.keyboard.press("ArrowRight")
            assert slider.locator(".widget-readout").inner_text() == "1.50"
            page.wait_for_function(
                "([old]) => document.querySelector('.widget-image').src !== old", arg=[before]
            )
            page.get_by_text("tau = 1.5").first.wait_for(timeout=60 * SECONDS)
            assert page.locator("[role=alert]").count() == 0
            assert page.title() == TITLES["tau"]
            keep_picture(page, "served_tau_tuner")
