"""The route viewer in a real JupyterLab: what the browser shows is what Python computes.

Targets 12 and 13 are measured in the page and printed (``pytest -s``).
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest

from blockattn import BlockRoute, sol_scores
from tests.browser import (
    SECONDS,
    jupyterlab,
    keep_picture,
    needs_browser,
    open_notebook,
    open_page,
    run_all_cells,
)
from tests.viewer_inputs import LARGE, SMALL, field_mask, field_scores, skip_map
from workbench import decisions
from workbench.capture import open_capture
from workbench.mask_codes import coded, ladder
from workbench.masks import Mask

pytestmark = needs_browser

NOTEBOOK = "viewer.ipynb"
SINK = 3  # key blocks
FIRST = """
import torch
torch.set_num_threads(1)  # as in the test, so that both compute the same bits
from tests.viewer_inputs import LARGE, field_masks
from workbench.widgets.route_viewer import RouteViewer
RouteViewer(field_masks(sink_blocks=3, broken=(5,)))
"""
SECOND = "book = field_masks(LARGE, 40, entries=((0, 0),)); book.load(0, 0).passing.nbytes"
THIRD = "RouteViewer(book)"
FOURTH = "from tests.viewer_inputs import skip_map; RouteViewer(skip_map())"
FIFTH = """from workbench.capture import open_capture
from workbench.masks import capture_masks
RouteViewer(capture_masks(open_capture()))"""
CELLS = (FIRST, SECOND, THIRD, FOURTH, FIFTH)
TWO_FRAMES = "() => new Promise(end => requestAnimationFrame(() => requestAnimationFrame(end)))"
DRAWN = "() => [...document.querySelectorAll('.rv')].every(el => el.routeViewer.times.length)"
END_KERNELS = """async () => {
  const token = document.cookie.match(/_xsrf=([^;]+)/)[1];
  for (const session of await (await fetch('/api/sessions')).json()) {
    const how = { method: 'DELETE', headers: { 'X-XSRFToken': token } };
    if (!(await fetch(`/api/sessions/${session.id}`, how)).ok) throw new Error('still runs');
  }
}"""


@dataclass
class Lab:
    """A JupyterLab of its own and a page in it whose cells have run."""

    page: Any
    address: str
    notebook: Path

    def viewer(self, index: int) -> Viewer:
        return Viewer(self.page, self.page.locator(".rv").nth(index))


@dataclass
class Viewer:
    """One route viewer on the page."""

    page: Any
    root: Any

    def read(self, expression: str) -> Any:
        """An expression of the viewer ``v`` in the page, once it has drawn what was asked for."""
        self.settle()
        return self.root.evaluate(f"el => {{ const v = el.routeViewer; return {expression}; }}")

    def settle(self) -> None:
        """Waits for two screen frames, so that everything asked for is drawn."""
        twice = (
            "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
        )
        self.page.evaluate(twice)

    def picture(self) -> np.ndarray:
        flat = self.read("Array.from(v.picture.density)")
        return np.array(flat, np.float32).reshape(self.read("[v.picture.rows, v.picture.columns]"))

    def window(self) -> tuple[tuple[int, int], tuple[int, int]]:
        top, bottom, left, right = self.read("v.window()")
        return (top, bottom), (left, right)

    def press(self, button: str) -> None:
        self.root.get_by_role("button", name=button, exact=True).click()
        self.settle()

    def hover(self, i: int, j: int) -> list[str]:
        """Moves the mouse to a pair and reads the lines of the tip."""
        at = f"[v.map.x({j} + 0.5), v.map.y({i} + 0.5)]"
        x, y = self.read(at)
        canvas = self.root.locator("canvas.rv-map")
        canvas.scroll_into_view_if_needed()
        canvas.hover(position={"x": x, "y": y})
        return self.root.locator(".rv-tip div").all_inner_texts()

    def set_tau(self, tau: float) -> None:
        self.root.locator("input.rv-number").fill(f"{tau}")
        self.root.locator("input.rv-number").press("Enter")
        self.settle()

    def summary(self) -> str:
        return self.read("v.summary.textContent")


@pytest.fixture(scope="module")
def lab(tmp_path_factory) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("lab")
    root = folder / "root"
    root.mkdir()
    cells = [nbformat.v4.new_code_cell(code.strip()) for code in CELLS]
    kernel = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
    notebook = nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel})
    nbformat.write(notebook, root / NOTEBOOK)
    with jupyterlab(root, folder) as address, open_page() as page:
        save_widgets(folder / "settings")
        page.set_default_timeout(60 * SECONDS)
        open_notebook(page, address, NOTEBOOK)
        run_all_cells(page, ".rv >> nth=3 >> canvas.rv-map")
        page.wait_for_function(DRAWN)
        yield Lab(page, address, root / NOTEBOOK)


def save_widgets(settings: Path) -> None:
    """Widgets are saved with the notebook; in JupyterLab that is a choice in the menu Settings."""
    path = settings / "@jupyter-widgets/jupyterlab-manager/plugin.jupyterlab-settings"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"saveState": True}))


@pytest.fixture(scope="module")
def large_mask() -> Mask:
    """Head 0 of the large mask; the notebook has 40 heads."""
    return field_mask(LARGE, 1, 0, 1.0)


def assert_same(picture: np.ndarray, density: np.ndarray) -> None:
    """Equal but for the last bit: Python takes the mean of rows, then of columns."""
    assert picture.shape == density.shape
    np.testing.assert_allclose(picture, density, rtol=0, atol=1e-6)


# -- row 13: 100,000 tokens -----------------------------------------------------------------------


def test_the_first_picture_of_100_000_tokens_is_the_pooled_mask(lab: Lab, large_mask: Mask):
    viewer = lab.viewer(1)
    seconds = viewer.read("v.firstPicture")
    keep_picture(viewer.root, "viewer_large")
    wanted = large_mask.window(0)
    assert_same(viewer.picture(), wanted.density)
    assert wanted.rule.replace(" x ", " × ") in viewer.root.inner_text()
    assert viewer.summary() == decisions.describe(large_mask.classes(0))
    print(f"\nrow 13: first picture {seconds * 1e3:.0f} ms after RouteViewer(book) began")
    assert seconds < 3  # the target is 1 s; a machine that does other work takes longer


def test_zooming_repools_from_the_bits(lab: Lab, large_mask: Mask):
    viewer = lab.viewer(1)
    viewer.read("v.times.length = 0")
    for name in ["zoom in"] * 5 + ["zoom out"] * 3 + ["show the whole mask"]:
        viewer.press(name)
        rows, columns = viewer.window()
        wanted = large_mask.window(0, rows, columns)
        assert_same(viewer.picture(), wanted.density)
        classes = viewer.read("v.picture.classes && Array.from(v.picture.classes)")
        assert (classes is None) == (wanted.classes is None)
        if wanted.classes is not None:
            assert classes == wanted.classes.ravel().tolist()
    times = viewer.read("v.times.filter(t => t.why === 'zoom').map(t => t.total)")
    print(f"\nrow 13: zoom, median {statistics.median(times):.0f} ms, worst {max(times):.0f} ms")
    assert statistics.median(times) < 300


def test_wheel_drag_and_keys_move_the_window(lab: Lab):
    viewer = lab.viewer(1)
    canvas = viewer.root.locator("canvas.rv-map")
    canvas.scroll_into_view_if_needed()
    canvas.click(position={"x": 200, "y": 300})
    chosen = viewer.read("[v.model.get('query_block'), v.model.get('key_block')]")
    for _ in range(6):
        lab.page.mouse.wheel(0, -100)
        viewer.settle()
    (top, bottom), (left, right) = viewer.window()
    assert bottom - top == right - left < 500
    assert top <= chosen[0] < bottom  # the wheel keeps what is under the pointer
    assert left <= chosen[1] < right
    box = canvas.bounding_box()
    lab.page.mouse.down()
    lab.page.mouse.move(box["x"] + 250, box["y"] + 250, steps=4)
    lab.page.mouse.up()
    moved = viewer.window()
    assert moved[0][0] > top
    assert moved[1][0] < left
    canvas.press("Shift+ArrowDown")
    assert viewer.window()[0][0] > moved[0][0]
    canvas.press("ArrowDown")
    assert viewer.read("v.model.get('query_block')") == chosen[0] + 1
    canvas.press("0")
    assert viewer.window() == ((0, 1563), (0, 1563))


def test_large_scores_come_when_asked_for_and_tau_then_moves(lab: Lab):
    viewer = lab.viewer(1)
    assert viewer.root.locator("input.rv-tau").is_disabled()
    viewer.root.get_by_role("button", name=re.compile("Load scores")).click()
    lab.page.wait_for_function("() => document.querySelectorAll('.rv')[1].routeViewer.pairs.codes")
    viewer.read("v.times.length = 0")
    move_slider(viewer, 20)
    times = viewer.read("v.times.filter(t => t.why === 'tau').map(t => t.total)")
    scores = field_scores(LARGE, range(1), 0)
    mask = Mask.of_scores(scores, 1.4)
    assert viewer.summary() == decisions.describe(mask.classes(0))
    assert_same(viewer.picture(), mask.window(0).density)
    text = viewer.read("v.index.text.textContent")
    assert text.startswith("density of head 0 of the shown call at tau 1.40, of the others as made")
    print(f"\n100,000 tokens: tau, median {statistics.median(times):.0f} ms")
    keep_picture(viewer.root, "viewer_large_tau")
    viewer.set_tau(1.0)


# -- row 12: tau at 8,192 tokens ------------------------------------------------------------------


def move_slider(viewer: Viewer, steps: int) -> None:
    viewer.root.locator("input.rv-tau").focus()
    for _ in range(steps):
        viewer.page.keyboard.press("ArrowRight")
        viewer.settle()


def test_tau_moves_mask_density_and_curve_in_the_browser(lab: Lab):
    viewer = lab.viewer(0)
    scores = field_scores(SMALL, range(2), 0, SINK)
    before = viewer.picture()
    viewer.read("v.times.length = 0")
    move_slider(viewer, 40)
    times = viewer.read("v.times.filter(t => t.why === 'tau')")
    assert viewer.read("v.tau") == 1.8
    mask = Mask.of_scores(scores, 1.8)
    assert viewer.summary() == decisions.describe(mask.classes(0))
    picture = viewer.picture()
    assert_same(picture, mask.window(0).density)
    assert (picture != before).any()
    curves = viewer.read("[0, 1].map(head => Array.from(v.curves.get(head)))")
    known = scores.density(list(ladder(1.0)))[0]
    np.testing.assert_allclose(curves, known.numpy(), rtol=0, atol=1e-12)
    work, total = ([time[name] for time in times] for name in ("work", "total"))
    print(
        f"\nrow 12: tau at T = 8,192, 2 heads: work median {statistics.median(work):.1f} ms, "
        f"worst {max(work):.1f}; with the wait for the screen {statistics.median(total):.1f} ms"
    )
    assert statistics.median(total) < 50


def test_a_tau_between_two_stops_leaves_pairs_undecided_and_says_so(lab: Lab):
    viewer = lab.viewer(0)
    viewer.set_tau(1.013)
    counts = viewer.read("v.total.counts")
    scores = field_scores(SMALL, range(1), 0, SINK)
    stops = ladder(1.0)
    below = sum(stop < 1.013 for stop in stops)
    always = scores.always.dense()[0, 0]
    unsure = (coded(scores.z[0, 0], stops) == below) & ~always
    assert counts[4] == int(unsure.sum()) > 0
    assert f"{counts[4]} more are undecided" in viewer.summary()
    exact = scores.route(1.013)
    sure = BlockRoute.from_dense(~unsure[None, None], seqlens=exact.seqlens)
    assert sum(counts[1:4]) == round((exact & sure).density() * unsure.numel())
    keep_picture(viewer.root, "viewer_undecided")
    viewer.set_tau(1.0)
    assert "undecided" not in viewer.summary()


# -- hover, index, errors -------------------------------------------------------------------------


@pytest.mark.parametrize(("i", "j"), [(64, 63), (64, 64), (5, 127), (30, 90), (70, 20)])
def test_hovering_explains_a_pair_as_python_does(lab: Lab, i: int, j: int):
    viewer = lab.viewer(0)
    viewer.set_tau(1.0)
    lines = viewer.hover(i, j)
    known = decisions.explain(field_scores(SMALL, range(1), 0, SINK), 1.0, SMALL, i, j)
    assert lines[0] == f"Query block {i}: {box_text(known.query_box)}"
    assert lines[1] == f"Key block {j}: {box_text(known.key_box)}"
    score, z = numbers(lines[2]), numbers(lines[3])
    assert score[-2] == pytest.approx(known.threshold, abs=0.006)  # the last is "base-2"
    assert_between(known.score, score[:-2], lines[2])
    assert_between(known.z, z[:-1], lines[3])
    names = ["approximate", "exact by score", "exact always (diagonal)", "exact always (sink)"]
    reason = known.reason.replace("z = " + f"{known.z:.2f}", "z").replace("tau = 1", "tau = 1.00")
    assert lines[4] == f"{names[known.decision]}: {reason}"


def numbers(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"(?<![\w-])-?\d+\.\d+|(?<=base-)\d", text)]


def assert_between(value: float, bounds: list[float], text: str) -> None:
    """The printed bounds are rounded to two digits."""
    if "at most" in text:
        assert value <= bounds[0] + 0.006
    elif "above" in text:
        assert value > bounds[0] - 0.006
    else:
        assert bounds[0] - 0.006 < value <= bounds[1] + 0.006


def box_text(box) -> str:
    spans = ((low, high - 1) for low, high in box.axes)
    return ", ".join(f"{n} {a}" if a == b else f"{n} {a}-{b}" for n, (a, b) in zip("thw", spans))


def test_a_click_paints_the_keys_of_a_query_block_on_the_frames(lab: Lab):
    viewer = lab.viewer(0)
    x, y = viewer.read("[v.map.x(20.5), v.map.y(80.5)]")
    viewer.root.locator("canvas.rv-map").click(position={"x": x, "y": y})
    row = field_mask(SMALL, 1, 0, 1.0, SINK).exact(0).dense()[0, 0, 80]
    selected = decisions.selected_tokens(row, SMALL)
    lab.page.wait_for_function("() => !document.querySelector('.rv').routeViewer.framesTimer")
    text = viewer.read("v.selection.textContent")
    assert text.startswith(f"{int(selected.sum()):,} of 8,192 video tokens are attended exactly")
    assert "lies in frame 5." in text
    assert "Query block 80" in viewer.read("v.pair.textContent")


def test_a_click_in_the_index_opens_the_mask_of_another_layer_and_head(lab: Lab):
    viewer = lab.viewer(0)
    click_cell(viewer, row=1, column=1)
    title = "layer 2 · step 0 · head 1"
    viewer.root.get_by_text(title).wait_for()
    mask = field_mask(SMALL, 2, 200, 1.0, SINK)
    assert_same(viewer.picture(), mask.window(1).density)
    assert viewer.root.locator("select").nth(0).input_value() == "2"
    click_cell(viewer, row=0, column=0)
    viewer.root.get_by_text("layer 0 · step 0 · head 0").wait_for()


def test_the_index_shows_errors_across_steps_and_says_which_call_is_worst(lab: Lab):
    viewer = lab.viewer(0)
    viewer.root.get_by_label("Quantity").select_option("error")
    viewer.root.get_by_label("Across").select_option("step")
    text = viewer.read("v.index.text.textContent")
    assert "4 of 12 known: 0.250 (layer 0, step 0, head 0) to 0.750 (layer 2, step 8" in text
    click_cell(viewer, row=1, column=1)
    viewer.root.get_by_text("layer 2 · step 8 · head 0").wait_for()
    click_cell(viewer, row=0, column=0)
    viewer.root.get_by_text("layer 0 · step 0 · head 0").wait_for()
    viewer.root.get_by_label("Quantity").select_option("density")
    viewer.root.get_by_label("Across").select_option("head")


def click_cell(viewer: Viewer, row: int, column: int) -> None:
    width, height = viewer.read("v.index.size")
    place = {"x": 46 + (column + 0.5) * width, "y": 8 + (row + 0.5) * height}
    viewer.root.locator("canvas.rv-index").click(position=place)


def test_an_error_while_loading_is_shown_where_it_happened_and_the_next_mask_heals(lab: Lab):
    viewer = lab.viewer(0)
    alert = viewer.root.get_by_role("alert")
    click_cell(viewer, row=2, column=0)
    alert.wait_for()
    assert "layer 5, step 8, head 0: OSError: capture file of layer 5" in alert.inner_text()
    assert viewer.root.locator("select").nth(1).input_value() == "8"  # step 0 was not recorded
    keep_picture(viewer.root, "viewer_error")
    click_cell(viewer, row=0, column=0)
    alert.wait_for(state="hidden")
    assert viewer.read("v.place.layer") == 0


def test_an_error_in_the_browser_is_shown_and_told_to_the_kernel(lab: Lab):
    viewer = lab.viewer(0)
    viewer.read("v.set({ window: [5, 5, 0, 9] })")
    alert = viewer.root.get_by_role("alert")
    alert.wait_for()
    assert "window=[5,5,0,9]: expected [top, bottom, left, right]" in alert.inner_text()
    assert "window=[5,5,0,9]" in viewer.read("v.model.get('browser_problem')")
    viewer.press("show the whole mask")
    alert.wait_for(state="hidden")


def test_a_skip_map_of_other_blocks_and_token_order_has_no_tau_and_its_own_word(lab: Lab):
    viewer = lab.viewer(2)
    book = skip_map()
    mask = book.load(0, 0)
    assert viewer.root.locator("input.rv-tau").count() == 0
    assert_same(viewer.picture(), mask.window(0).density)
    queries, keys = mask.grid
    exact = int(mask.passing.counts().sum())
    assert f"{exact:,} of {queries * keys:,} block pairs are exact, " in viewer.summary()
    assert f"{queries * keys - exact:,} skipped." in viewer.summary()
    lines = viewer.hover(3, 5)
    assert lines[1] == f"Key block 5: {box_text(book.grid.box(5, 128))}"
    assert lines[2] == "No scores belong to this mask"


def test_frames_show_query_and_keys_also_where_their_blocks_differ_in_size(lab: Lab):
    viewer, book = lab.viewer(2), skip_map()
    lab.page.wait_for_function("() => !document.querySelectorAll('.rv')[2].routeViewer.framesTimer")
    text = viewer.read("v.selection.textContent")
    query = viewer.read("v.model.get('query_block')")
    row = book.load(0, 0).passing.dense()[0, 0, query]
    selected = decisions.selected_tokens(row, book.grid, 128)
    assert text.startswith(f"{int(selected.sum()):,} of {selected.numel():,} video tokens")
    home = decisions.own_tokens(query, book.grid, 64).nonzero()[:, 0].unique().tolist()
    assert f"lies in frame {', '.join(map(str, home))}." in text


def test_the_index_follows_tau_in_every_call(lab: Lab):
    viewer, capture = lab.viewer(3), open_capture()
    viewer.root.get_by_label("Across").select_option("step")
    viewer.set_tau(1.5)
    assert "density at tau 1.50, 8 of 8 known" in viewer.read("v.index.text.textContent")
    for layer, step in capture.entries:
        call = capture.load(layer, step)
        wanted = sol_scores(call.q, call.k).density([1.5])[0, :, 0].tolist()
        shown = viewer.read(f"[0, 1].map(head => v.index.value([{layer}, {step}, head]))")
        assert shown == pytest.approx(wanted, abs=1e-5)
    keep_picture(viewer.root, "viewer_capture")


def test_without_curves_the_index_follows_tau_in_the_shown_call(lab: Lab):
    viewer = lab.viewer(0)
    made = viewer.read("v.index.value([0, 0, 0])")
    viewer.set_tau(2.0)
    text = viewer.read("v.index.text.textContent")
    assert text.startswith("density of the shown call at tau 2.00, of the others as made")
    assert viewer.read("v.index.value([0, 0, 0])") == viewer.read("Math.fround(v.total.density)")
    assert viewer.read("v.index.value([0, 0, 0])") < made
    viewer.set_tau(1.0)
    assert viewer.read("v.index.value([0, 0, 0])") == pytest.approx(made)


# -- without a kernel: last, because it ends the kernel --------------------------------------------


def test_a_saved_notebook_keeps_picture_and_tau_without_its_kernel(lab: Lab):
    viewer = lab.viewer(0)
    viewer.set_tau(0.5)
    lab.page.wait_for_timeout(1 * SECONDS)  # the kernel hears of it once the slider rests
    save_notebook(lab)
    lab.page.evaluate(END_KERNELS)
    lab.page.goto(f"{lab.address}/lab/tree/{NOTEBOOK}?reset")
    drawn = "() => document.querySelector('.rv')?.routeViewer.times.length"
    lab.page.wait_for_function(drawn)
    viewer = lab.viewer(0)
    scores = field_scores(SMALL, range(2), 0, SINK)
    assert viewer.summary() == decisions.describe(Mask.of_scores(scores, 0.5).classes(0))
    move_slider(viewer, 5)
    assert viewer.summary() == decisions.describe(Mask.of_scores(scores, 0.6).classes(0))
    viewer.root.locator("select").nth(2).select_option("1")
    other = decisions.describe(Mask.of_scores(scores, 0.6).classes(1))
    viewer.settle()
    assert viewer.summary() == other
    keep_picture(viewer.root, "viewer_saved")


def test_where_no_kernel_is_chosen_jupyterlab_shows_the_picture(lab: Lab):
    """Its widget manager restores nothing without one; other pages do (test_browser_saved.py)."""
    lab.page.evaluate(END_KERNELS)
    open_without_kernel(lab)
    picture = lab.page.locator(".jp-OutputArea-output img").first
    picture.wait_for()
    assert picture.evaluate("image => image.naturalWidth") > 500
    assert lab.page.locator(".rv").count() == 0


def open_without_kernel(lab: Lab) -> None:
    """As somebody who was sent the file: its kernel does not exist here, and none is chosen."""
    lab.page.goto("about:blank")  # or the open notebook would be saved once more
    book = json.loads(lab.notebook.read_text())
    book["metadata"]["kernelspec"] = {"name": "gone", "display_name": "gone", "language": "gone"}
    book["metadata"].pop("language_info", None)  # by which another kernel would be found
    lab.notebook.write_text(json.dumps(book))
    lab.page.goto(f"{lab.address}/lab/tree/{NOTEBOOK}?reset")
    dialog = lab.page.locator(".jp-Dialog:has-text('Select Kernel')")
    dialog.locator("button", has_text="No Kernel").click()


def save_notebook(lab: Lab) -> None:
    """Saves by the menu and waits until the file holds the widgets."""
    lab.page.locator(".lm-MenuBar-itemLabel", has_text="File").first.click()
    lab.page.locator('.lm-Menu-itemLabel:text-is("Save Notebook")').click()
    for _ in range(60):
        text = lab.notebook.read_text()  # perhaps while it is being written
        if text.rstrip().endswith("}") and "widgets" in json.loads(text)["metadata"]:
            return
        lab.page.wait_for_timeout(0.5 * SECONDS)
    raise TimeoutError(f"{lab.notebook.name} was not saved with its widgets within 30 s")
