"""The first notebook in a real browser: what one sees there is what Python computes."""

from __future__ import annotations

import base64
import shutil
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest

from blockattn import sol_attention
from tests.browser import (
    OUTPUT,
    SECONDS,
    jupyterlab,
    keep_picture,
    needs_browser,
    open_notebook,
    open_page,
    run_all_cells,
)
from workbench.capture import open_capture
from workbench.config import SolAttnConfig, load_config
from workbench.paths import notebooks_dir
from workbench.probe import probe_sol
from workbench.widgets import TauTuner

NOTEBOOK = "01_tune_tau.ipynb"
TUNER = f"{OUTPUT} .widget-vbox:has([role=status])"
MEASURED = f"{TUNER} [role=status]:has-text('Relative L2 error')"
# Calls above tau 1 fail as on a full GPU.
BREAK = """
measure = tuner.session.measure
def out_of_memory(state):
    if state.tau > 1:
        raise MemoryError("no room for the dense call")
    return measure(state)
tuner.session.measure = out_of_memory
"""

pytestmark = needs_browser


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[str]:
    """A JupyterLab of its own that holds a copy of the notebook."""
    root = tmp_path / "root"
    root.mkdir()
    shutil.copy(notebooks_dir() / NOTEBOOK, root)
    with jupyterlab(root, tmp_path) as address:
        yield address


def end_at_the_tuner(root: Path, *more: str) -> None:
    """Cuts the notebook after the tuner's cell and adds cells."""
    book = nbformat.read(root / NOTEBOOK, as_version=4)
    last = next(n for n, cell in enumerate(book.cells) if "TauTuner(" in cell.source)
    book.cells = [*book.cells[: last + 1], *map(nbformat.v4.new_code_cell, more)]
    nbformat.write(book, root / NOTEBOOK)


def press(page, key: str, times: int) -> None:
    page.locator(f"{TUNER} .noUi-handle").first.focus()
    for _ in range(times):
        page.keyboard.press(key)


def readout(page) -> str:
    return page.locator(f"{TUNER} .widget-readout").first.inner_text()


def first_picture(page) -> bytes:
    """The PNG behind the tuner's first picture, as the browser holds it."""
    text = page.evaluate(
        """async css => {
            const blob = await (await fetch(document.querySelector(css).src)).blob();
            const bytes = new Uint8Array(await blob.arrayBuffer());
            return btoa(Array.from(bytes, b => String.fromCharCode(b)).join(''));
        }""",
        f"{TUNER} img",
    )
    return base64.b64decode(text)


def wait_until_measured(page, tau: float) -> None:
    """Waits for the density that Python's own call delivers at this tau."""
    call = open_capture().load(*open_capture().entries[0])
    trace = sol_attention(call.q, call.k, call.v, tau=tau, return_trace=True)[1]
    page.locator(MEASURED).get_by_text(f"{trace.density:.4f}").wait_for()


def test_tau_follows_keyboard_and_mouse_and_shows_what_python_computes(lab: str):
    with open_page() as page:
        open_notebook(page, lab, NOTEBOOK)
        run_all_cells(page, MEASURED)
        assert readout(page) == "1.00"
        press(page, "ArrowRight", 10)
        assert readout(page) == "1.50"
        wait_until_measured(page, 1.5)
        check_against_python(page, 1.5)
        keep_picture(page.locator(TUNER).first, "tau_tuner")
        tau = drag(page, by=120)
        wait_until_measured(page, tau)
        check_against_python(page, tau)
        assert saved_configuration(page).tau == tau


def drag(page, by: int) -> float:
    """Drags the handle by some pixels; the tau it comes to rest at."""
    before = readout(page)
    box = page.locator(f"{TUNER} .noUi-handle").first.bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + by, y, steps=8)
    page.mouse.up()
    assert float(readout(page)) > float(before)
    return float(readout(page))


def saved_configuration(page) -> SolAttnConfig:
    """What the link of the tuner saves as config.yaml."""
    with page.expect_download() as download:
        page.locator(f"{TUNER} a[download='config.yaml']").click()
    config = load_config(Path(download.value.path())).attention_config.sparse_attention_config
    assert isinstance(config, SolAttnConfig)
    return config


def check_against_python(page, tau: float) -> None:
    """Error of every head and the picture itself, byte for byte, from calls of this process."""
    call = open_capture().load(*open_capture().entries[0])
    errors = probe_sol(call.q, call.k, call.v, tau).error.relative_l2[0]
    text = page.locator(MEASURED).inner_text()
    for head, error in enumerate(errors.tolist()):
        assert f"head {head} {error:.4f}" in text
    here = TauTuner(open_capture())
    here.controls.tau.value = tau
    page.wait_for_timeout(0.5 * SECONDS)
    assert first_picture(page) == here.picture


def test_an_error_is_seen_where_it_happens_and_goes_with_the_next_good_call(
    lab: str, tmp_path: Path
):
    end_at_the_tuner(tmp_path / "root", BREAK)
    with open_page() as page:
        open_notebook(page, lab, NOTEBOOK)
        run_all_cells(page, MEASURED)
        assert page.locator(f"{TUNER} [role=alert]").count() == 0
        press(page, "ArrowRight", 1)
        alert = page.locator(f"{TUNER} [role=alert]")
        alert.get_by_text("MemoryError: no room for the dense call").wait_for()
        keep_picture(page.locator(TUNER).first, "tau_tuner_error")
        press(page, "ArrowLeft", 1)
        alert.wait_for(state="detached")
        wait_until_measured(page, 1.0)


def test_a_reloaded_page_shows_the_widget_as_it_was_left(lab: str, tmp_path: Path):
    end_at_the_tuner(tmp_path / "root")
    with open_page() as page:
        open_notebook(page, lab, NOTEBOOK)
        run_all_cells(page, MEASURED)
        press(page, "ArrowRight", 4)
        wait_until_measured(page, 1.2)
        picture = first_picture(page)
        page.keyboard.press("Control+s")
        page.locator(".jp-mod-dirty").wait_for(state="detached")
        page.reload()
        page.locator(MEASURED).wait_for()
        assert readout(page) == "1.20"
        assert first_picture(page) == picture
