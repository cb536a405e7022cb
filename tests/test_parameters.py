"""Parameters of notebooks: a value that cannot be served is named in one sentence, early."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import nbformat
import pytest

from blockattn import TokenGrid
from workbench import parameters
from workbench.capture import CaptureSpec, CaptureWriter
from workbench.paths import notebooks_dir
from workbench.synthetic import synthetic_qkv


def test_rising_numbers_pass_as_floats():
    assert parameters.rising("TAUS", [0, 1, 2.5]) == [0.0, 1.0, 2.5]


@pytest.mark.parametrize("values", [[], [1.0], [1.0, 1.0], [2.0, 1.0]])
def test_numbers_that_do_not_rise_are_named(values: list[float]):
    with pytest.raises(ValueError, match=r"TAUS=\[.*\]: must be two numbers or more, in rising"):
        parameters.rising("TAUS", values)


@pytest.mark.parametrize("value", [0, 1, -0.1, math.nan])
def test_a_number_on_or_beyond_its_bounds_is_named(value: float):
    with pytest.raises(ValueError, match="TARGET="):
        parameters.between("TARGET", value, 0, 1)
    assert parameters.between("TARGET", 0.3, 0, 1) == 0.3


def test_a_sequence_that_is_too_short_to_be_sparse_is_named():
    assert parameters.blocks("GRID", (1, 1, 193), 193) == 4
    with pytest.raises(ValueError, match=r"GRID=\(1, 8, 8\): 64 tokens make 1 of the blocks of 64"):
        parameters.blocks("GRID", (1, 8, 8), 64)


def test_calls_become_tuples_and_one_that_is_never_visited_is_named():
    assert parameters.calls("KEEP", [[0, 1], (5, 2)], 6, 3) == [(0, 1), (5, 2)]
    with pytest.raises(ValueError, match=r"step of KEEP\[1\]=3: must be at least 0 and at most 2"):
        parameters.calls("KEEP", [(0, 1), (0, 3)], 6, 3)
    with pytest.raises(ValueError, match=r"layer of KEEP\[0\]=6"):
        parameters.calls("KEEP", [(6, 1)], 6, 3)
    with pytest.raises(ValueError, match=r"KEEP=\[\]: must be pairs"):
        parameters.calls("KEEP", [], 6, 3)


def test_every_run_has_a_folder_of_its_own(tmp_path: Path):
    first, second = (parameters.new_folder(tmp_path / "out") for _ in range(2))
    assert first != second
    assert {first.parent, second.parent} == {tmp_path / "out"}
    assert parameters.new_folder(None).is_dir()


# -- in the notebooks -----------------------------------------------------------------------


def set_up(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Runs the parameters, those from outside, and the cell after them, as papermill would."""
    book = nbformat.read(notebooks_dir() / f"{name}.ipynb", as_version=4)
    first, second = [cell.source for cell in book.cells if cell.cell_type == "code"][:2]
    scope: dict[str, Any] = {}
    exec(first, scope)
    scope.update(given)
    exec(second, scope)
    return scope


def small_capture(path: Path) -> str:
    """Two blocks."""
    grid = TokenGrid((1, 8, 16))
    spec = CaptureSpec(grid, ((0, 0),), heads=1, head_dim=64, source="synthetic")
    made = synthetic_qkv(grid, heads=1, head_dim=64)
    with CaptureWriter(path, spec) as writer:
        writer.write(0, 0, time=0.5, q=made.q, k=made.k, v=made.v)
    return str(path)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("01_tune_tau", {"TAUS": [2.0, 1.0]}),
        ("01_tune_tau", {"TAU": math.nan}),
        ("01_tune_tau", {"HEAD": 2}),
        ("01_tune_tau", {"QUERY_BLOCK": 32}),
        ("02_skip_softmax", {"HEAD": 2}),
        ("02_skip_softmax", {"QUERY_TILE": 16}),
        ("02_skip_softmax", {"REAL": [-1.0]}),
        ("03_vsa", {"HEAD": -1}),
        ("03_vsa", {"QUERY_CUBE": 32}),
        ("04_quantised_attention", {"HEAD": 2}),
        ("04_quantised_attention", {"TOKEN": 2048}),
        ("08_your_own_capture", {"TARGET_DENSITY": 1}),
        ("08_your_own_capture", {"STEPS": 3}),
        ("08_your_own_capture", {"GRID": [1, 8, 8]}),
        ("08_your_own_capture", {"KEEP": [[9, 0]]}),
        ("08_your_own_capture", {"ROUNDS": 0}),
        ("10_your_own_model", {"TARGET_DENSITY": 1}),
        ("10_your_own_model", {"PROMPTS": []}),
        ("10_your_own_model", {"SEEDS": [0, 0]}),
    ],
)
def test_a_notebook_names_the_parameter_that_it_cannot_serve(name: str, given: dict[str, Any]):
    (parameter,) = {"STEPS": ["KEEP"]}.get(next(iter(given)), list(given))
    with pytest.raises(ValueError, match=rf"\b{parameter}\b"):
        set_up(name, given)


def test_a_capture_of_two_blocks_is_refused_by_name(tmp_path: Path):
    path = small_capture(tmp_path / "two.safetensors")
    with pytest.raises(ValueError, match=r"CAPTURE='.*': 128 tokens make 2 of the blocks of 64"):
        set_up("01_tune_tau", {"CAPTURE": path})


@pytest.mark.parametrize("name", ["02_skip_softmax", "04_quantised_attention"])
def test_a_capture_of_one_head_needs_no_parameter(name: str, tmp_path: Path):
    path = small_capture(tmp_path / "one.safetensors")
    given = {"CAPTURE": path, "QUERY_TILE": 0, "TOKEN": 0}
    assert set_up(name, given)["HEAD"] == 0
    assert set_up(name, {})["HEAD"] == 1  # the last of two


def test_a_head_that_a_capture_lacks_is_refused_with_those_it_has():
    assert [parameters.head("HEAD", value, [1, 4]) for value in (None, 0, 1)] == [1, 0, 1]
    message = r"HEAD=4: the capture holds heads 1, 4 of the model, here counted from 0 to 1; give"
    with pytest.raises(ValueError, match=message):
        parameters.head("HEAD", 4, [1, 4])
    with pytest.raises(ValueError, match="HEAD=-1"):
        parameters.head("HEAD", -1, [1, 4])


def test_a_second_run_of_the_capture_notebook_finds_room(tmp_path: Path):
    given = {"OUT": tmp_path / "mine", "KEEP": [[0, 1]]}
    one, other = (set_up("08_your_own_capture", given) for _ in range(2))
    assert one["folder"] != other["folder"]
    assert one["KEEP"] == [(0, 1)]


def test_a_sequence_too_short_for_a_density_is_named_with_both_parameters():
    parameters.reachable("TARGET", 0.4, "SIZE", (21, 128, 256), 768)
    message = r"SIZE=\(13, 96, 128\): 192 tokens make 3 of the blocks of 64, of which 78% .*TARGET "
    with pytest.raises(ValueError, match=message + r"is 0\.4; .* TARGET above 0\.78"):
        parameters.reachable("TARGET", 0.4, "SIZE", (13, 96, 128), 192)
    parameters.reachable("TARGET", 0.8, "SIZE", (13, 96, 128), 192)
    with pytest.raises(ValueError, match="1 of the blocks of 64, of which 100%"):
        parameters.reachable("TARGET", 0.9, "SIZE", None, 48)


def test_a_number_that_is_too_small_is_refused_with_the_reason():
    parameters.at_least("STEPS", 2, 2, "one is dense")
    parameters.at_least("STEPS", None, 2, "one is dense")
    with pytest.raises(ValueError, match="STEPS=1: must be at least 2, because one is dense"):
        parameters.at_least("STEPS", 1, 2, "one is dense")
    with pytest.raises(TypeError, match="STEPS"):
        parameters.at_least("STEPS", True, 2, "one is dense")
