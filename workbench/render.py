"""Rendered notebooks: run each one and write it with its results as Markdown for docs/notebooks.

    python -m workbench.render [NAME ...]

The notebooks are stored without outputs; these copies are for readers who do not run them. Each
names the checksum of the source it was made from, and tests/test_notebooks.py compares.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import re
from collections.abc import Sequence
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from workbench.paths import checkout_dir, notebooks_dir

CELL_SECONDS = 600
# Pictures carry the text that a figure has for readers who do not see it. Widgets without a
# picture, such as progress bars, are left out.
TEMPLATE = """{% extends 'markdown/index.md.j2' %}
{% block data_png %}
{% if 'application/vnd.jupyter.widget-view+json' in output.data %}
![The panel as it first appears; with a kernel it follows its controls]
{%- else %}
![{{ output.data['text/plain'] | replace('\\n', ' ') }}]
{%- endif %}({{ output.metadata.filenames['image/png'] | path2url }})
{% endblock %}
{% block data_text %}
{%- if 'application/vnd.jupyter.widget-view+json' not in output.data %}{{ super() }}{% endif -%}
{% endblock %}"""


def source_checksum(notebook: NotebookNode) -> str:
    """sha256 over kind and text of every cell; outputs and metadata do not count."""
    digest = hashlib.sha256()
    for cell in notebook.cells:
        digest.update(f"{cell.cell_type}\0{cell.source}\0".encode())
    return digest.hexdigest()


def rendered_from(page: Path) -> str:
    """The checksum of the source that a rendered copy names; empty where it names none."""
    found = re.search(r"sha256 ([0-9a-f]{64})", page.read_text())
    return found[1] if found else ""


def run(notebook: NotebookNode, folder: Path) -> NotebookNode:
    """The notebook after its cells have run, each within ten minutes, started in `folder`.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed; the message holds its traceback.
    """
    from nbclient import NotebookClient

    resources = {"metadata": {"path": str(folder)}}
    return NotebookClient(notebook, timeout=CELL_SECONDS, resources=resources).execute()


def write_markdown(notebook: NotebookNode, name: str, out: Path) -> Path:
    """Writes `out/NAME.md`, its pictures in `out/NAME/`, and returns the page.

    Args:
        notebook: with outputs.
        name: of the notebook, without suffix.
        out: the folder; it is made. Pictures of an earlier rendering are removed.
    """
    from jinja2 import DictLoader
    from nbconvert import MarkdownExporter

    loaders = [DictLoader({"page.md.j2": TEMPLATE})]
    exporter = MarkdownExporter(extra_loaders=loaders, template_file="page.md.j2")
    resources = {"output_files_dir": name, "unique_key": "figure"}
    body, made = exporter.from_notebook_node(notebook, resources=resources)
    (out / name).mkdir(parents=True, exist_ok=True)
    for old in (out / name).glob("*.png"):
        old.unlink()
    for path, png in made["outputs"].items():
        (out / path).write_bytes(fewer_colours(png))
    page = out / f"{name}.md"
    page.write_text(f"{note(notebook, name)}\n\n{tidy(body)}")
    return page


def note(notebook: NotebookNode, name: str) -> str:
    """The first line of a rendered copy: not to be edited, and made from what."""
    checksum = source_checksum(notebook)
    return f"<!-- notebooks/{name}.ipynb, sha256 {checksum}, run by python -m workbench.render -->"


def tidy(body: str) -> str:
    """Single empty lines, links to the other rendered pages, no folder of this machine."""
    lines = "\n".join(line.rstrip() for line in body.replace(f"{checkout_dir()}/", "").splitlines())
    linked = re.sub(r"\]\((\w+)\.ipynb\)", r"](\1.md)", lines)
    return re.sub(r"\n{3,}", "\n\n", linked).strip() + "\n"


def fewer_colours(png: bytes) -> bytes:
    """The picture with at most 256 colours, a third of its size."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.open(io.BytesIO(png)).convert("RGB").quantize(256).save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def render(name: str, out: Path) -> Path:
    """Runs `notebooks/NAME.ipynb` and writes its page (see :func:`write_markdown`)."""
    source = notebooks_dir() / f"{name}.ipynb"
    if not source.is_file():
        known = ", ".join(sorted(path.stem for path in notebooks_dir().glob("*.ipynb")))
        raise FileNotFoundError(f"name={name!r}: no such notebook; there are: {known}")
    return write_markdown(run(nbformat.read(source, as_version=4), source.parent), name, out)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m workbench.render", description=__doc__)
    parser.add_argument("name", nargs="*", help="notebooks without suffix; all by default")
    parser.add_argument("--out", type=Path, help="folder to write to; docs/notebooks by default")
    options = parser.parse_args(arguments)
    out = options.out or (checkout_dir() or Path.cwd()) / "docs" / "notebooks"
    for name in options.name or sorted(path.stem for path in notebooks_dir().glob("*.ipynb")):
        print(render(name, out), flush=True)


if __name__ == "__main__":
    main()
