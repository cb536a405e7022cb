"""The route viewer in a page without any kernel: its saved state and a browser, nothing else.

The state is what a notebook keeps of a widget; the page stands for whatever shows such a notebook.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ipywidgets.embed import embed_data

from blockattn import sol_scores
from tests.browser import keep_picture, needs_browser, open_page
from workbench import decisions
from workbench.capture import open_capture
from workbench.masks import Mask, capture_masks
from workbench.widgets.route_viewer import RouteViewer

pytestmark = needs_browser

# A model as anywidget hands it over, without anybody at the other end.
PAGE = """<!DOCTYPE html><meta charset="utf-8"><style>%(css)s</style><div id="host"></div>
<script type="module">
const saved = %(saved)s;
const state = saved.state;
for (const { path, data } of saved.buffers) {
  const bytes = Uint8Array.from(atob(data), (one) => one.charCodeAt(0));
  state[path[0]] = new DataView(bytes.buffer);
}
const heard = {};
const model = {
  get: (name) => state[name],
  set: (name, value) => {
    if (state[name] === value) return;
    state[name] = value;
    for (const act of heard[`change:${name}`] ?? []) act();
  },
  on: (name, act) => (heard[name] ??= []).push(act),
  off: () => {},
  save_changes: () => {},
};
const code = new Blob([state._esm], { type: "text/javascript" });
const { default: widget } = await import(URL.createObjectURL(code));
widget.render({ model, el: document.getElementById("host") });
</script>"""
DRAWN = "() => document.querySelector('.rv')?.routeViewer.times.length"


def saved(viewer: RouteViewer) -> dict[str, Any]:
    """State and buffers as a notebook stores them."""
    models = embed_data(views=[viewer], drop_defaults=False)["manager_state"]["state"]
    return json.loads(json.dumps(models[viewer.model_id]))


@pytest.fixture
def page(tmp_path: Path):
    viewer = RouteViewer(capture_masks(open_capture()))
    viewer.tau = 0.5
    viewer.flush()
    text = PAGE % {"css": viewer._css, "saved": json.dumps(saved(viewer)).replace("</", "<\\/")}
    (tmp_path / "saved.html").write_text(text, "utf-8")
    with open_page() as opened:
        opened.goto((tmp_path / "saved.html").as_uri())
        opened.wait_for_function(DRAWN)
        yield opened


def read(page: Any, expression: str) -> Any:
    """An expression of the viewer ``v`` once it has drawn."""
    frames = "await new Promise(end => requestAnimationFrame(() => requestAnimationFrame(end)))"
    look = f"(v => ({expression}))(document.querySelector('.rv').routeViewer)"
    return page.evaluate(f"async () => {{ {frames}; return {look}; }}")


def wanted(tau: float, head: int) -> str:
    call = open_capture().load(*open_capture().entries[0])
    return decisions.describe(Mask.of_scores(sol_scores(call.q, call.k), tau).classes(head))


def test_tau_moves_the_mask_and_the_index(page: Any):
    assert read(page, "v.summary.textContent") == wanted(0.5, 0)
    page.locator("input.rv-tau").focus()
    for _ in range(25):
        page.keyboard.press("ArrowRight")
    assert read(page, "v.tau") == 1.0
    assert read(page, "v.summary.textContent") == wanted(1.0, 0)
    assert "density at tau 1.00, 8 of 8 known" in read(page, "v.index.text.textContent")
    page.locator("select").nth(2).select_option("1")
    assert read(page, "v.summary.textContent") == wanted(1.0, 1)
    keep_picture(page, "viewer_without_kernel")


def test_zoom_hover_and_frames_work(page: Any):
    page.get_by_role("button", name="zoom in", exact=True).click()
    assert read(page, "v.window()") != [0, 32, 0, 32]
    page.locator("canvas.rv-map").hover(position={"x": 200, "y": 200})
    assert "Query block" in page.locator(".rv-tip").inner_text()
    page.wait_for_function("() => !document.querySelector('.rv').routeViewer.framesTimer")
    assert "video tokens are attended exactly" in read(page, "v.selection.textContent")


def test_a_call_that_is_not_here_is_waited_for_in_words(page: Any):
    page.locator("select").nth(0).select_option("5")
    page.get_by_text("No answer from a kernel").wait_for()
    assert read(page, "v.place.layer") == 1
    assert page.get_by_role("alert").count() == 0
