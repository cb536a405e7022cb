"""SweepExplorer: points with their full configuration, gates, control, the run behind a point."""

from __future__ import annotations

import io
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import ipywidgets as widgets
import numpy as np
import pytest
from matplotlib import colors, image

from tests.panel_inputs import PNG
from tests.sweep_inputs import new_store, outcome, plan
from workbench import pareto, views
from workbench.config import load_config
from workbench.pareto import Gate, Point
from workbench.provenance import origin
from workbench.sweep import load
from workbench.sweep.cases import Case, flat
from workbench.sweep.front import configuration, points
from workbench.sweep.run import Workers, run_cases
from workbench.sweep.store import Outcome
from workbench.views.pareto import pareto_spots
from workbench.views.style import QUERY
from workbench.widgets import SweepExplorer
from workbench.widgets.sweep_explorer import ParetoPanel

TAUS = [0.5, 1.5, 2.5]
BEST, CONTROL = "sol_attn tau=1.5", "dense_control"


def job(content: Mapping[str, Any]) -> Outcome:
    """A larger tau is faster and worse; the largest fails for one seed. Nothing ran."""
    case = Case.from_content(content)
    tau = flat(case.attention).get("tau", -9.0)
    if (tau, case.seed) == (2.5, 2):
        raise ValueError("not <today>")
    found = outcome(
        case,
        psnr=40.0 - 8 * tau + case.seed if tau > 0 else 99.0,
        density=1 / (1 + tau) if tau > 0 else 1.0,
        attention_seconds=1.0,
        dense_attention_seconds=1.0 + max(tau, 0.0),
    )
    return replace(found, flags=(), fallbacks=("triton: no <GPU>",))


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("explorer") / "taus.db"
    with new_store(path, plan(grid={"tau": TAUS}, seeds=[0, 2])) as store:
        store.begin(origin(["sweep", "<test>"], {}, seeds={}))
        run_cases(store, Workers(ThreadPoolExecutor(1), 1, job))
    return path


@pytest.fixture
def explorer(database: Path) -> SweepExplorer:
    return SweepExplorer(database, gates="psnr=25")


def test_it_starts_with_the_front_the_choice_the_control_and_the_failures(
    explorer: SweepExplorer,
):
    assert explorer.picture.startswith(PNG)
    assert len(explorer.picture) < 1_000_000
    assert explorer.problem == ""
    assert "4 settings, 8 cases (7 done, 1 failed)" in explorer.summary
    assert f"Cheapest that passes: {BEST}, gain 2.5, psnr 29 dB." in explorer.summary
    assert "Dense against dense has psnr 99 dB" in explorer.summary
    assert "1 failed: ValueError: not &lt;today&gt;" in explorer.summary


def test_its_points_are_those_of_the_plain_functions(explorer: SweepExplorer, database: Path):
    expected = points(load(database), "psnr", [Gate("psnr", 25)], cost="attention")
    assert explorer.points == expected
    explorer.cost.value = "density"
    explorer.gates.value = "psnr=30, relative_l2=0.4"
    gates = [Gate("psnr", 30), Gate("relative_l2", 0.4)]
    assert explorer.points == points(load(database), "psnr", gates, cost="density")
    explorer.metric.value = "relative_l2"
    assert explorer.points == points(load(database), "relative_l2", gates, cost="density")


def test_every_point_answers_with_its_full_configuration(explorer: SweepExplorer):
    cards = {spot.name: spot.card for spot in explorer._spots.spots}
    assert set(cards) == {point.name for point in explorer.points}
    for name, card in cards.items():
        case = explorer.table.of(name)[0]
        lines = card.splitlines()
        assert lines[0] == name
        fields = {**case.attention, **case.sampling}
        assert all(any(line.startswith(f"{field}: ") for line in lines) for field in fields)
    assert "tau: 1.5" in cards[BEST]
    assert "against it: 1 of 2 cases have no result" in cards["sol_attn tau=2.5"]


def test_a_click_on_a_point_chooses_it_and_opens_its_configuration(explorer: SweepExplorer):
    pictures = set()
    buttons = [x for x in explorer._spots.children if isinstance(x, widgets.Button)]
    for button, spot in zip(buttons, explorer._spots.spots):
        button.click()
        assert explorer.setting.value == spot.name
        assert f"Cases of {spot.name}" in explorer.detail
        pictures.add(explorer.picture)
    assert len(pictures) == len(buttons) == 4  # the ring moves with the choice
    explorer.setting.value = BEST
    text = explorer._detail.value.partition(">")[2].partition("</pre>")[0].replace("&gt;", ">")
    shown = load_config(text)
    assert shown.attention_config == configuration(explorer.table, BEST).attention_config
    assert "none: test" in explorer.what_ran
    assert "Faster, but not here: triton: no &lt;GPU&gt;." in explorer.what_ran


def test_the_control_needs_no_file(explorer: SweepExplorer):
    explorer.setting.value = CONTROL
    assert "dense against dense needs no file" in explorer.detail
    assert explorer.problem == ""


def test_the_run_is_opened_on_request(explorer: SweepExplorer):
    assert "commands" not in explorer.detail
    explorer.opened.value = True
    assert "commands: sweep &lt;test&gt;" in explorer.detail
    assert "place: here" in explorer.detail
    assert all(case.key in explorer.detail for case in explorer.table.of(explorer.setting.value))
    explorer.opened.value = False
    assert "commands" not in explorer.detail


def test_a_gate_that_is_none_is_shown_as_an_error(explorer: SweepExplorer):
    with pytest.raises(ValueError, match="gate"):
        explorer.gates.value = "psnr>30"
    assert "expected METRIC=LIMIT" in explorer.problem
    explorer.gates.value = ""
    assert explorer.problem == ""


def test_nothing_to_choose_is_said_with_its_reason(explorer: SweepExplorer):
    explorer.gates.value = "psnr=60"
    assert "Nothing to choose: no setting may be chosen; against" in explorer.summary


def test_a_sweep_that_goes_on_is_read_again(tmp_path: Path):
    path = tmp_path / "growing.db"
    with new_store(path, plan(grid={"tau": TAUS}, seeds=[0])) as store:
        store.begin(origin(["sweep"], {}, seeds={}))
        early = SweepExplorer(path)
        assert "no case has a result yet" in early.problem
        for _ in range(2):
            case = store.claim()
            assert case is not None
            store.finish(case, job(case.content()))
        explorer = SweepExplorer(path)
        assert len(explorer.points) == 2
        early.reload()
        assert early.problem == ""
        assert early.points == explorer.points
        run_cases(store, Workers(ThreadPoolExecutor(1), 1, job))
    kept = explorer.setting.value
    explorer.reload()
    assert len(explorer.points) == 4
    assert explorer.setting.value == kept
    assert "8 cases" not in explorer.summary
    assert "4 settings, 4 cases (4 done)" in explorer.summary


def test_a_file_that_is_no_sweep_is_refused(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        SweepExplorer(tmp_path / "none.db")


# -- where the points are -------------------------------------------------------------------

CLOUD = [
    Point("a", 2.0, 30, 28, 31),
    Point("b", 3.0, 25, 24, 27),
    Point("control", 1.0, 120, 110, 130, control=True),
]


@pytest.mark.parametrize("chosen", ["a", "b", "control"])
def test_a_place_is_where_the_point_was_drawn(chosen: str):
    png, places = ParetoPanel().draw(CLOUD, "psnr", [], "attention", chosen)
    pixels = image.imread(io.BytesIO(png))[..., :3]
    height, width = pixels.shape[:2]
    ((x, y),) = ((x, y) for point, x, y in places if point.name == chosen)
    near = np.abs(pixels - colors.to_rgb(QUERY)).max(axis=2) < 0.1
    # The ring around the chosen point is the only mark of its colour there.
    row, column = round(y * height), round(x * width)
    window = near[row - 18 : row + 19, column - 18 : column + 19]
    rows, columns = np.nonzero(window)
    assert abs(rows.mean() - 18) < 1.5
    assert abs(columns.mean() - 18) < 1.5
    assert np.ptp(rows) > 24


def test_places_follow_the_axes_and_leave_out_what_is_not_drawn():
    figure = views.new_figure()
    figure.set_layout_engine("none")
    ax = figure.subplots()
    cloud = [*CLOUD, Point("nowhere", float("nan"), 20, 20, 20)]
    views.draw_pareto(ax, cloud, "psnr")
    places = {point.name: (x, y) for point, x, y in pareto_spots(ax, cloud, "psnr")}
    assert set(places) == {"a", "b", "control"}
    assert places["control"][0] < places["a"][0] < places["b"][0]
    assert places["control"][1] < places["a"][1] < places["b"][1]  # from the top
    assert pareto.front(CLOUD, "psnr")[0].name == "a"
