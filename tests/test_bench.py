"""The benchmark measures what it says, after it has checked the results, against its targets."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from blockattn import TokenGrid
from workbench.bench import cpu as bench
from workbench.bench.files import check_place
from workbench.cli import app

SMALL = (2, 8, 16)


def row(measured: float, more_is_better: bool) -> bench.Row:
    must, aim = (1.8, 3.5) if more_is_better else (50, 16)
    return bench.Row(1, "q", measured, must, aim, "x", more_is_better, "", {})


@pytest.mark.parametrize(
    ("measured", "more_is_better", "verdict"),
    [
        (3.5, True, "aim"),
        (1.8, True, "must"),
        (1.79, True, "missed"),
        (16, False, "aim"),
        (50, False, "must"),
        (50.1, False, "missed"),
        (float("nan"), True, "missed"),
        (float("nan"), False, "missed"),
    ],
)
def test_the_verdict_is_the_best_level_that_the_figure_reaches(measured, more_is_better, verdict):
    assert row(measured, more_is_better).verdict == verdict


def test_calls_are_interleaved_after_a_round_that_does_not_count():
    order = []
    calls = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    samples = bench.interleaved(calls, 3)
    assert order == ["a", "b"] * 4
    assert {name: len(times) for name, times in samples.items()} == {"a": 3, "b": 3}


def test_row_ten_is_the_ratio_of_medians_at_the_density_it_states():
    rows = bench.speed_of_sol(TokenGrid((4, 16, 16)), 3)
    assert len(rows) == 2
    for found in rows:
        sdpa, sol = (sorted(found.samples[name])[1] for name in ("sdpa", "sol_attn"))
        assert found.measured == pytest.approx(sdpa / sol)
        density = float(found.setting.split("density ")[1].split(",")[0])
        assert 0 < density < 1


def test_every_row_is_measured_and_written(tmp_path):
    path = tmp_path / "deep" / "report.json"
    arguments = ["bench", "cpu", "--grid", "2,8,16", "--repeats", "1", "--json", str(path)]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    made = json.loads(path.read_text())
    assert {item["number"] for item in made["rows"]} == set(bench.CPU_ROWS)
    assert all(item["measured"] > 0 and item["samples"] for item in made["rows"])
    assert made["versions"]["torch"] == torch.__version__
    assert made["device"]["threads"] == torch.get_num_threads()


@pytest.mark.parametrize(
    ("options", "grid", "repeats"),
    [
        ((), (8, 32, 32), 9),
        (("--quick",), (8, 16, 16), 3),
        (("--quick", "--grid", "2,8,16", "--repeats", "1"), (2, 8, 16), 1),
    ],
)
def test_quick_is_small_where_nothing_else_is_asked_for(options, grid, repeats, monkeypatch):
    given = {}
    monkeypatch.setattr(bench, "bench_cpu", lambda rows, **found: given.update(found) or [])
    done = CliRunner().invoke(app, ["bench", "cpu", *options], catch_exceptions=False)
    assert (given["grid"], given["repeats"]) == (grid, repeats)
    assert ("quick: targets are stated for" in done.output) == bool(options)


@pytest.mark.parametrize("rows", [(9,), (), (10, 1)])
def test_a_row_that_is_not_measured_here_is_refused(rows):
    with pytest.raises(ValueError, match="rows="):
        bench.bench_cpu(rows, grid=SMALL)


def test_nothing_is_timed_when_a_result_is_wrong(monkeypatch):
    honest = bench.sol_attention

    def wrong(*data, impl, **settings):
        return honest(*data, impl=impl, **settings) + (0.01 if impl == "eager" else 0.0)

    monkeypatch.setattr(bench, "sol_attention", wrong)
    monkeypatch.setattr(bench, "interleaved", lambda *_: pytest.fail("timed a wrong result"))
    with pytest.raises(RuntimeError, match="error"):
        bench.bench_cpu((10,), grid=SMALL)


def test_a_report_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(bench, "bench_cpu", None)
    (tmp_path / "file").touch()
    done = CliRunner().invoke(app, ["bench", "cpu", "--json", str(tmp_path / "file" / "a.json")])
    assert isinstance(done.exception, OSError)
    assert "cannot be written" in str(done.exception)
    check_place(tmp_path / "new" / "a.json")
    assert list((tmp_path / "new").iterdir()) == []
