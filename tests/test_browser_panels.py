"""Panels in a real browser: handles that agree, cards on points, cancelled work, errors.

Every panel is its own cell of one notebook, and the numbers are those of the Python side.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.browser import (
    FAILED,
    SECONDS,
    jupyterlab,
    keep_picture,
    needs_browser,
    open_notebook,
    open_page,
    run_all_cells,
)
from tests.sweep_inputs import new_store, outcome, plan
from workbench.models import denoising_times
from workbench.provenance import origin
from workbench.schedule import Schedule
from workbench.sweep.cases import Case, flat
from workbench.sweep.run import Workers, run_cases
from workbench.sweep.store import Outcome

pytestmark = needs_browser

TAUS = [0.5, 1.5, 2.5]
CODE = {
    "threshold": "widgets.ThresholdTuner(open_capture())",
    "schedule": "widgets.ScheduleEditor()",
    "sweep": "widgets.SweepExplorer('taus.db', gates='psnr=25')",
    "doctor": "widgets.Doctor()",
}
FIRST = """import torch
from workbench import widgets
from workbench.capture import open_capture

torch.set_num_threads(1)"""


def job(content: Mapping[str, Any]) -> Outcome:
    """A larger tau is faster and worse; nothing ran."""
    case = Case.from_content(content)
    tau = flat(case.attention).get("tau", 0.0)
    times = {"attention_seconds": 1.0, "dense_attention_seconds": 1.0 + tau}
    return outcome(case, psnr=40.0 - 8 * tau, density=1 / (1 + tau), **times)


def write_notebook(folder: Path) -> None:
    with new_store(folder / "taus.db", plan(grid={"tau": TAUS}, seeds=[0])) as store:
        store.begin(origin(["test"], {}, seeds={}))
        run_cases(store, Workers(ThreadPoolExecutor(1), 1, job))
    book = nbformat.v4.new_notebook()
    book.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    cells = [FIRST, *CODE.values(), "print('all', 'there')"]
    book.cells = [nbformat.v4.new_code_cell(text) for text in cells]
    nbformat.write(book, folder / "panels.ipynb")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    root, state = (tmp_path_factory.mktemp(name) for name in ("root", "state"))
    write_notebook(root)
    with jupyterlab(root, state) as lab, open_page() as opened:
        open_notebook(opened, lab, "panels.ipynb")
        run_all_cells(opened, ".jp-OutputArea-output:has-text('all there')")
        yield opened
        assert opened.locator(FAILED).count() == 0


def panel(page: Any, name: str) -> Any:
    """The panel of a cell, scrolled into view."""
    number = 1 + list(CODE).index(name)
    found = page.locator(".jp-CodeCell").nth(number).locator(".widget-vbox").first
    found.wait_for()
    found.scroll_into_view_if_needed()
    return found


def test_a_typed_factor_stays_and_the_slider_goes_on_from_it(page: Any):
    tuner = panel(page, "threshold")
    factor, readout = tuner.locator("input[type=number]"), tuner.locator(".widget-readout").first
    factor.fill("100")
    page.keyboard.press("Tab")
    tuner.get_by_text("threshold_scale_factor = lambda * 2,048 keys = 100.").wait_for()
    assert factor.input_value() == "100"
    assert readout.inner_text() == "−4.35"  # log2(100 / 2048) = -4.356, to whole steps
    tuner.locator(".noUi-handle").first.focus()
    page.keyboard.press("ArrowRight")
    tuner.get_by_text("log2(lambda) = -4.30").first.wait_for()
    assert float(factor.input_value()) == pytest.approx(2.0**-4.3 * 2048)
    tuner.locator("[role=status]").get_by_text("skip_softmax on implementation").wait_for()
    keep_picture(tuner, "threshold_tuner")


def test_every_step_of_the_keyboard_is_one_dense_step_more(page: Any):
    editor = panel(page, "schedule")
    times = tuple(denoising_times(20, 3.0)[:-1])
    cutoff, steps = (editor.locator(".widget-readout").nth(n) for n in (0, 1))
    editor.locator(".noUi-handle").nth(1).focus()
    for _ in range(3):
        wanted = int(steps.inner_text()) + 1
        page.keyboard.press("ArrowRight")
        editor.get_by_text(f"{wanted} of 20 steps are dense").wait_for()
        assert int(steps.inner_text()) == wanted
        assert Schedule(times, 6, cutoff=float(cutoff.inner_text())).dense_steps == wanted


def test_fewer_steps_and_back_leave_the_cutoff_as_it_was(page: Any):
    editor = panel(page, "schedule")
    cutoff, steps = (editor.locator(".widget-readout").nth(n) for n in (0, 1))
    before, number = cutoff.inner_text(), editor.locator("input[type=number]").nth(1)
    for count in (5, 20):
        number.fill(f"{count}")
        page.keyboard.press("Tab")
        editor.get_by_text(f"of {count} steps are dense").wait_for()
        dense = Schedule(tuple(denoising_times(count, 3.0)[:-1]), 6, float(before)).dense_steps
        assert (cutoff.inner_text(), steps.inner_text()) == (before, f"{dense}")


def test_a_mistake_is_shown_where_it_was_made(page: Any):
    editor = panel(page, "schedule")
    layers = editor.locator("input[type=text]").first
    layers.fill("0,x")
    page.keyboard.press("Tab")
    alert = editor.locator("[role=alert]")
    alert.wait_for()
    assert "item 2 is 'x'" in alert.inner_text()
    layers.fill("0,5")
    page.keyboard.press("Tab")
    alert.wait_for(state="detached")
    editor.get_by_text("layers 0, 5 stay dense throughout").wait_for()


def test_long_work_leaves_the_page_alive_and_can_be_cancelled(page: Any):
    editor = panel(page, "schedule")
    editor.get_by_role("button", name="Sample a video").click()
    editor.get_by_text(re.compile(r"step \d+ of 60, about")).wait_for()
    before = editor.locator("img").get_attribute("src")
    editor.locator(".noUi-handle").nth(1).focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_function(
        "([image, old]) => image.src !== old",
        arg=[editor.locator("img").element_handle(), before],
    )
    assert "of 60" in editor.locator(".widget-hbox:has(.progress)").last.inner_text()
    keep_picture(editor, "schedule_editor")
    editor.get_by_role("button", name="Cancel").click()
    editor.get_by_text("cancelled after").wait_for(timeout=60 * SECONDS)
    assert editor.locator("[role=alert]").count() == 0


def test_a_point_shows_its_configuration_and_a_click_opens_it(page: Any):
    explorer = panel(page, "sweep")
    spots = explorer.locator(".wb-spot")
    assert spots.count() == 4
    small = spots.nth(1).bounding_box()
    spots.nth(1).hover()
    page.wait_for_function(
        "([spot, width]) => spot.getBoundingClientRect().width > 4 * width",
        arg=[spots.nth(1).element_handle(), small["width"]],
    )
    card = spots.nth(1).inner_text()
    tau = next(tau for tau in TAUS if f"tau={tau}" in card)
    for line in (f"tau: {tau}", "algorithm: sol_attn", "thresh_type: diag", "steps: 2"):
        assert line in card.splitlines()
    keep_picture(explorer, "sweep_explorer")
    spots.nth(1).click()
    explorer.locator("[role=status]").get_by_text(f"for sol_attn tau={tau}").wait_for()
    explorer.locator("pre").get_by_text(f"tau: {tau}").wait_for()


def test_the_doctor_looks_again(page: Any):
    doctor = panel(page, "doctor")
    doctor.get_by_role("button", name="Look again").click()
    doctor.get_by_text("done").wait_for()
    assert "eager" in doctor.locator("[role=status]").inner_text()
    keep_picture(doctor, "doctor")
