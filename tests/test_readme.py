"""README keeps its word: files of its tree, pictures, commands and options exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from workbench import cli

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
TREE = README.partition("## The tree")[2]


def named_in_the_tree() -> list[str]:
    """Paths of the tree; an indented name lies below the last one that is not."""
    found, folder = [], ""
    for line in TREE.partition("```text\n")[2].partition("```")[0].splitlines():
        names = re.findall(r"(?:^|\s)([.\w/]+(?:\.(?:py|md|txt|ipynb)|/run|/))(?=\s|,|$)", line)
        if not line.startswith(" ") and names:
            folder = names[0]
            found.append(names[0])
        elif line.startswith("    ") and not line.startswith(" " * 12):
            found += [folder + name for name in names]
    return found


def test_the_tree_names_the_main_files():
    assert {"kernels/blockattn/attend.py", "workbench/tune/", "docs/log.md", ".ci/run"} <= set(
        named_in_the_tree()
    )


@pytest.mark.parametrize("path", named_in_the_tree())
def test_what_the_tree_names_exists(path: str):
    # The files of the model are named in the line of its folder.
    places = [ROOT / path, ROOT / "workbench/models" / Path(path).name]
    assert any(place.exists() for place in places)


@pytest.mark.parametrize("picture", re.findall(r"!\[[^]]*\]\(([^)]+)\)", README))
def test_pictures_are_there(picture: str):
    assert (ROOT / picture).stat().st_size > 10_000


# `train` passes its options on: tests/test_cli.py.
@pytest.mark.parametrize("line", re.findall(r"`workbench ((?!train)[^`]+)`", README))
def test_commands_and_options_exist(line: str):
    command, *rest = line.split()
    words = [command, *(word for word in rest[:1] if command in ("bench", "sweep"))]
    help_text = CliRunner().invoke(cli.app, [*words, "--help"], env={"COLUMNS": "200"}).output
    assert "Usage" in help_text
    for option in re.findall(r"--[\w-]+", line):
        assert option in help_text


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_python_runs_and_says_what_ran(code: str, capsys):
    exec(code, {})
    assert re.match(r"sol_attn ran on eager, density 0\.2\d", capsys.readouterr().out)
