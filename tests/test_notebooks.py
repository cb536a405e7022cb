"""The notebooks are one course: first cell, parameters, assertions, texts for review, renderings.

That each runs is tested by nbmake, which collects the notebooks themselves.
"""

from __future__ import annotations

import ast
import importlib.util
import itertools
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import nbformat
import papermill
import pytest
from nbformat import NotebookNode

from workbench import render
from workbench.paths import notebooks_dir

ROOT = Path(__file__).resolve().parent.parent
FOLDER = notebooks_dir()
RENDERED = ROOT / "docs" / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
TIMEOUT = 5  # seconds for a cell that never ends


def read(name: str) -> NotebookNode:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def code(name: str) -> list[NotebookNode]:
    return [cell for cell in read(name).cells if cell.cell_type == "code"]


def test_the_course_is_numbered_and_no_number_is_used_twice():
    numbers = [int(name[:2]) for name in NAMES]
    assert numbers == [*range(1, 9), 10]  # 9 is not written


@pytest.mark.parametrize("name", NAMES)
def test_the_first_cell_says_what_one_learns_needs_and_how_long(name: str):
    first = read(name).cells[0]
    assert first.cell_type == "markdown"
    for words in (
        f"# {int(name[:2])}. ",
        "**What you learn.**",
        "**What you need.**",
        "**How long.**",
    ):
        assert words in first.source


@pytest.mark.parametrize("before, after", list(itertools.pairwise(NAMES)))
def test_neighbours_link_to_each_other(before: str, after: str):
    assert f"]({after}.ipynb)" in read(before).cells[0].source
    assert f"]({before}.ipynb)" in read(after).cells[0].source


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_to_notebooks_that_exist(name: str):
    texts = "\n".join(cell.source for cell in read(name).cells if cell.cell_type == "markdown")
    assert set(re.findall(r"\]\((\w+)\.ipynb\)", texts)) <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_first_code_cell_alone_holds_the_parameters(name: str):
    tagged = [cell for cell in code(name) if "parameters" in cell.metadata.get("tags", [])]
    assert tagged == code(name)[:1]
    found = papermill.inspect_notebook(str(FOLDER / f"{name}.ipynb"))
    assert len([parameter for parameter in found if parameter.isupper()]) >= 2


@pytest.mark.parametrize("name", NAMES)
def test_the_last_cell_asserts_what_was_shown(name: str):
    last = read(name).cells[-1]
    assert last.cell_type == "code"
    assert last.source.startswith("# What was shown is true")
    assert last.source.count("assert ") >= 3


@pytest.mark.parametrize("name", NAMES)
def test_cells_hold_calls_and_no_logic_of_their_own(name: str):
    source = "\n".join(cell.source for cell in code(name))
    assert not re.findall(r"^\s*(?:def|class|while|try|import warnings)\b.*", source, re.MULTILINE)


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_not_stored(name: str):
    assert [cell for cell in code(name) if cell.outputs or cell.execution_count] == []
    assert set(read(name).metadata) == {"kernelspec", "language_info"}


def test_every_widget_stands_beside_a_figure_of_the_same_view():
    """Readers without a kernel, and nbmake, see figures; a panel also stores its picture."""
    for name in NAMES:
        sources = [cell.source for cell in code(name)]
        if any("workbench.widgets" in source for source in sources):
            assert any("views.picture(" in source for source in sources)


@pytest.mark.skipif(
    importlib.util.find_spec("jupytext") is None,
    reason="needs the package jupytext: pip install -e '.[dev]'",
)
@pytest.mark.parametrize("name", NAMES)
def test_the_text_for_review_agrees_with_the_notebook(name: str):
    import jupytext

    text = jupytext.read(FOLDER / "text" / f"{name}.py")
    assert [cell_facts(cell) for cell in text.cells] == [cell_facts(c) for c in read(name).cells], (
        f"run: jupytext --sync notebooks/{name}.ipynb"
    )


def cell_facts(cell: NotebookNode) -> tuple[str, str, list[str]]:
    return cell.cell_type, cell.source, cell.metadata.get("tags", [])


def test_no_text_is_left_of_a_notebook_that_is_gone():
    assert sorted(path.stem for path in (FOLDER / "text").iterdir()) == NAMES
    assert sorted(path.stem for path in RENDERED.glob("*.md")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_rendered_copy_is_of_this_source(name: str):
    page = RENDERED / f"{name}.md"
    assert render.rendered_from(page) == render.source_checksum(read(name)), (
        f"run: python -m workbench.render {name}"
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_rendered_copy_is_small_and_complete(name: str):
    text = (RENDERED / f"{name}.md").read_text()
    pictures = re.findall(r"!\[([^]]+)\]\(([^)]+)\)", text)
    files = sorted(path.name for path in (RENDERED / name).iterdir())
    assert sorted(Path(path).name for _, path in pictures) == files
    sizes = [(RENDERED / path).stat().st_size for _, path in pictures]
    assert len(sizes) >= 2
    assert sum(sizes) + len(text) < 1_000_000
    assert "Traceback" not in text
    assert not re.findall(r"(?:/home|/root|/tmp|/work)/\S+", text)


def test_parameters_given_from_outside_change_the_result(tmp_path: Path):
    """As papermill puts them in: a cell after the one that is tagged."""
    short = read("01_tune_tau")  # up to the line that says what ran, without the widget
    last = [cell.id for cell in short.cells].index("what-ran")
    short.cells = [cell for cell in short.cells[: last + 1] if cell.id != "tuner"]
    nbformat.write(short, tmp_path / "short.ipynb")
    given = {"TAUS": [0.0, 2.0], "TAU": 2.0}
    made = papermill.execute_notebook(
        str(tmp_path / "short.ipynb"), str(tmp_path / "out.ipynb"), given, progress_bar=False
    )
    printed = made.cells[-1].outputs[0].text
    assert f"density {density_printed_at(2.0)}" in printed
    assert f"density {density_printed_at(1.0)}" not in printed


def test_a_cutoff_on_one_side_of_all_recorded_times_is_named():
    """The last cell of the notebook on thresholds says what to change, and to what."""
    source = read("02_skip_softmax").cells[-1].source
    (check,) = [part for part in ast.parse(source).body if "policy.counts()" in ast.unparse(part)]
    line = compile(ast.Module([check], []), "cell", "exec")
    calls = {(0, n): SimpleNamespace(time=time) for n, time in enumerate((0.9, 0.87))}
    for sparse in (0, 2):
        policy = SimpleNamespace(counts=lambda n=sparse: SimpleNamespace(sparse=n, total=2))
        with pytest.raises(AssertionError, match=r"CUTOFF=0\.86: .*\[0\.87, 0\.9\].*set CUTOFF"):
            exec(line, {"policy": policy, "calls": calls, "CUTOFF": 0.86})
    policy = SimpleNamespace(counts=lambda: SimpleNamespace(sparse=1, total=2))
    exec(line, {"policy": policy, "calls": calls, "CUTOFF": 0.88})


def density_printed_at(tau: float) -> str:
    from blockattn import sol_attention
    from workbench.capture import open_capture

    capture = open_capture()
    call = capture.load(*capture.entries[-1])
    return f"{sol_attention(call.q, call.k, call.v, tau=tau, return_trace=True)[1].density:.4f}"


def test_a_cell_that_never_ends_fails_and_is_named(tmp_path: Path):
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert "--nbmake-timeout=60" in options["addopts"]
    cells = [nbformat.v4.new_code_cell("while True:\n    pass  # for ever")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "endless.ipynb")
    command = [sys.executable, "-m", "pytest", "--nbmake", f"--nbmake-timeout={TIMEOUT}", "-q"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    done = subprocess.run(
        [*command, str(tmp_path)], capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert done.returncode == 1
    assert "for ever" in done.stdout
    assert "1 failed" in done.stdout
