"""Rendering: a notebook becomes a page with its results, pictures and where it came from."""

from __future__ import annotations

import io
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode
from PIL import Image

from workbench import render

FIGURE = """
from workbench import views
figure = views.new_figure(4, 2)
views.draw_curve(figure.subplots(), [0, 1], [[0.5, 1.0]], title="a line")
views.picture(figure, "A line that\\nrises.")
"""
BAR = "import ipywidgets\nipywidgets.IntProgress(value=3)"


def notebook(*sources: str) -> NotebookNode:
    cells = [nbformat.v4.new_markdown_cell("# Title\n\nSee [next](02_b.ipynb).")]
    return nbformat.v4.new_notebook(cells=cells + [nbformat.v4.new_code_cell(s) for s in sources])


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("pages")
    (out / "01_a").mkdir()
    (out / "01_a" / "old.png").write_bytes(b"of an earlier rendering")
    done = render.run(notebook("print(6 * 7)", FIGURE, BAR), out)
    return render.write_markdown(done, "01_a", out)


def test_the_page_holds_text_code_and_results(page: Path):
    text = page.read_text()
    for part in ("# Title", "print(6 * 7)", "    42"):
        assert part in text
    assert "\n\n\n" not in text


def test_links_lead_to_the_other_pages(page: Path):
    assert "[next](02_b.md)" in page.read_text()


def test_a_picture_lies_beside_the_page_and_has_the_text_of_the_figure(page: Path):
    (picture,) = (page.parent / "01_a").iterdir()
    assert f"![A line that rises.](01_a/{picture.name})" in page.read_text()
    assert Image.open(picture).width > 100


def test_a_widget_without_a_picture_is_left_out(page: Path):
    assert page.read_text().endswith("ipywidgets.IntProgress(value=3)\n```\n")


def test_the_page_names_the_source_and_not_its_outputs(page: Path):
    source = notebook("print(6 * 7)", FIGURE, BAR)
    assert render.rendered_from(page) == render.source_checksum(source)
    assert render.source_checksum(source) != render.source_checksum(notebook("print(42)", FIGURE))


def test_no_folder_of_the_machine_is_left():
    assert render.tidy(f"read {render.checkout_dir()}/data/a.png") == "read data/a.png\n"


def test_fewer_colours_keep_the_picture(page: Path):
    buffer = io.BytesIO()
    Image.linear_gradient("L").convert("RGB").save(buffer, "PNG")
    small = Image.open(io.BytesIO(render.fewer_colours(buffer.getvalue()))).convert("RGB")
    assert small.size == (256, 256)
    assert small.getpixel((10, 10))[0] < small.getpixel((10, 200))[0]


def test_a_cell_that_fails_stops_the_rendering(tmp_path: Path):
    with pytest.raises(Exception, match="ZeroDivisionError"):
        render.run(notebook("1 / 0"), tmp_path)


def test_a_name_that_does_not_exist_is_refused(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"name='99_x': no such notebook.*01_tune_tau"):
        render.main(["99_x", "--out", str(tmp_path)])
    assert list(tmp_path.iterdir()) == []
