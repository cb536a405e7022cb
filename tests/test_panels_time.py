"""TimeSplit: parts of a call and break-even density, from a report or measured here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from blockattn import TokenGrid, attend, sol_attention
from tests.panel_inputs import PNG, capture_of, load, press
from workbench.bench import split as splits
from workbench.bench.split import describe_split, from_report, measure, parts, ticks
from workbench.synthetic import synthetic_qkv
from workbench.widgets import TimeSplit, time_split

X = load(4, 9)
DATA = (X.q, X.k, X.v)
SECONDS = {
    "tick": 0.0,
    "dense": 8.0,
    "whole": 4.0,
    "prepare": 0.5,
    "prepare + route": 1.25,
    "attend": 2.75,
    "tau 1": 4.0,
    "tau -1000": 12.0,
}


def planted(calls, repeats):
    """Every call is made and takes a known time."""
    for call in calls.values():
        call()
    return {name: [SECONDS[name]] * repeats for name in calls}


def report(**changes) -> dict:
    """A report of one case, as `workbench bench gpu --json` writes it."""
    ladder = {"densities": [0.1, 1.0], "seconds": [1.0, 3.0], "dense_seconds": 2.0}
    case = {
        "row": 1,
        "setting": "B 1, T 512, H 2, D 64, bfloat16, random, tau 1, density 0.2500",
        "measured": {"triton": 1.9},
        "density": 0.25,
        "samples": {"dense lib": [1.9, 2.0, 2.4], "triton": [1.0, 1.0, 9.0]},
        "more": {
            "split": {"prepare": 0.1, "route": 0.2, "attend": 0.7},
            "ladder": {**ladder, "break_even_density": 0.55},
        },
        **changes,
    }
    return {
        "machine": {"name": "GPU <x>"},
        "versions": {"torch": "2", "triton": "3"},
        "date": "2026-01-02T00:00",
        "absent": {"dense: other": "not installed"},
        "rows": {"1": {"cases": [case]}, "2": {"failed": "no"}},
    }


# -- plain functions ------------------------------------------------------------------------


def test_a_report_becomes_parts_bound_and_ladder():
    found = from_report(report())
    (split,) = found.splits
    assert (split.name, split.impl, split.density) == ("random, tau 1", "triton", 0.25)
    assert split.parts == {"prepare": 0.1, "route": 0.2, "attend": 0.7}
    assert (split.whole, split.dense_name, split.dense) == (1.0, "lib", 2.0)
    assert split.bound == pytest.approx((0.25 + 1 / 64) * 2.0)
    assert found.ladders[0].break_even == 0.55
    assert found.where == "GPU <x>, torch 2, triton 3, 2026-01-02; B 1, T 512, H 2, D 64, bfloat16"
    assert "dense: other: not installed" in found.ran
    even, line = describe_split(found)
    assert even.startswith("random: break-even density 0.550")
    assert "prepare 10.0%, route 20.0%, attend 70.0%; together 100.0% of the whole call" in line
    assert "2.00 x as fast." in line
    assert "do not add up" not in line


def test_a_report_without_a_split_is_refused():
    with pytest.raises(ValueError, match="has no time split"):
        from_report(report(more={"split": None}))


def test_a_measurement_is_split_as_planted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(splits, "interleaved", planted)
    found = measure(DATA, 1.0, repeats=3, ladder=(1.0, -1000.0), where="here")
    (split,) = found.splits
    assert split.parts == {"prepare": 0.5, "route": 0.75, "attend": 2.75}
    assert split.together == 1.0
    assert (split.whole, split.dense) == (4.0, 8.0)
    density = sol_attention(*DATA, tau=1.0, return_trace=True)[1].density
    assert split.density == density < 1
    (ladder,) = found.ladders
    assert ladder.densities == (density, 1.0)
    assert ladder.break_even == pytest.approx((1 + density) / 2)  # half way from 4 s to 12 s
    assert found.where.startswith("here; B 1, T 320, H 2, D 32, float32; medians of 3")
    assert "sol_attn on eager, dense on eager" in found.ran


def test_the_parts_are_those_of_the_call_that_runs():
    made = parts(DATA, 1.0)
    assert list(made) == ["prepare", "prepare + route", "attend"]
    out = made["attend"]()
    assert isinstance(out, torch.Tensor)
    assert torch.equal(out, sol_attention(*DATA, tau=1.0))
    assert not torch.equal(out, attend(*DATA))


def test_every_round_ticks_and_a_tick_can_end_it():
    seen = []
    measure(DATA, 1.0, repeats=2, ladder=(1.0,), tick=seen.append)
    assert len(seen) == ticks(2, "cpu") == 3

    def stop(label: str) -> None:
        raise InterruptedError(label)

    with pytest.raises(InterruptedError, match="timing"):
        measure(DATA, 1.0, tick=stop)


@pytest.mark.parametrize(
    ("even", "text"),
    [
        (None, "no break-even; even at density 0.100"),
        (1.0, "faster than dense at every density up to 1.000."),
        (0.5, "break-even density 0.500"),
    ],
)
def test_the_break_even_in_words(even: float | None, text: str):
    made = report()
    made["rows"]["1"]["cases"][0]["more"]["ladder"]["break_even_density"] = even
    assert text in describe_split(from_report(made))[0]


def test_a_call_of_one_block_has_no_break_even_to_find():
    x = synthetic_qkv(TokenGrid((1, 4, 8)), heads=1, head_dim=32)
    line = describe_split(measure((x.q, x.k, x.v), 1.0, repeats=1))[0]
    assert "no break-even can be found, because every tau has density 1.000" in line
    assert "faster" not in line


@pytest.mark.parametrize("index", [0, 1, 2])
def test_values_that_are_not_finite_are_not_timed(index: int):
    data = [x.clone() for x in DATA]
    data[index][0, 3, 1, :2] = torch.nan
    with pytest.raises(ValueError, match=f"{'qkv'[index]}: 2 of 20,480 values are NaN"):
        measure((data[0], data[1], data[2]), 1.0, repeats=1)


def test_parts_that_do_not_add_up_are_called_so():
    made = report(samples={"dense lib": [2.0], "triton": [1.2]})
    assert "do not add up" in describe_split(from_report(made))[1]


# -- the panel ------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "gpu_x.json"
    path.write_text(json.dumps(report()))
    return path


@pytest.fixture
def panel(file: Path) -> TimeSplit:
    return TimeSplit(capture_of(), [file], device="cpu")


def test_it_starts_with_a_committed_report(panel: TimeSplit):
    assert panel.picture.startswith(PNG)
    assert len(panel.picture) < 1_000_000
    assert panel.problem == ""
    assert panel.source.label == "gpu_x"
    assert panel.report == from_report(report())
    assert "GPU &lt;x&gt;" in panel.summary
    assert "<b>What ran:</b> triton" in panel.what_ran
    assert '<td style="text-align:left">100.000</td>' in panel.table  # prepare, in ms


def test_without_a_report_it_asks_for_a_measurement():
    panel = TimeSplit(capture_of(), [], device="cpu")
    assert panel.report is None
    assert panel.picture == b""
    assert "Press" in panel.summary
    assert "nothing yet" in panel.what_ran


def test_a_measurement_runs_in_the_background_and_is_shown(
    panel: TimeSplit, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(splits, "interleaved", planted)
    made = {}

    def small(*args, **kwargs):
        made["report"] = measure(*args, ladder=(1.0, -1000.0), **kwargs)
        return made["report"]

    monkeypatch.setattr(time_split, "measure", small)
    panel.entry.value = (4, 9)
    panel.repeats.value = 2

    press(panel)
    assert panel.problem == ""
    assert panel.source.value == time_split.HERE
    assert panel.report is made["report"]
    assert "synthetic &lt;test&gt;, layer 4, step 9, cpu" in panel.summary
    assert "sol_attn on eager" in panel.what_ran


def test_a_measurement_can_be_cancelled(panel: TimeSplit):
    before = panel.report
    panel.repeats.value = 99

    press(panel, cancel_at="step")
    assert "cancelled after" in panel.job.text
    assert panel.report is before
    assert panel.problem == ""


def test_an_error_of_a_measurement_is_shown(panel: TimeSplit, monkeypatch: pytest.MonkeyPatch):
    def broken(*_, **__):
        raise RuntimeError("clock <lost>")

    monkeypatch.setattr(time_split, "measure", broken)

    press(panel)
    assert "RuntimeError: clock &lt;lost&gt;" in panel.problem


def test_a_file_that_is_no_report_is_an_error(tmp_path: Path):
    path = tmp_path / "bad.json"
    path.write_text("[]")
    panel = TimeSplit(capture_of(), [path], device="cpu")
    assert "is not a report" in panel.problem
    panel.source.value = time_split.HERE
    assert panel.problem == ""


@pytest.mark.parametrize("path", time_split.committed_reports(), ids=lambda path: path.stem)
def test_committed_reports_can_be_shown(path: Path):
    panel = TimeSplit(capture_of(), [path], device="cpu")
    assert panel.report is not None
    for split in panel.report.splits:
        assert split.together == pytest.approx(1, abs=0.03)
