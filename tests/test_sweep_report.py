"""Statistics, tables, estimates and commands of sweeps; where a result came from."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from tests.calibrate_inputs import small_calibration
from tests.sweep_inputs import (
    job,
    new_store,
    plan,
    refuses,
    small,
    threads,
    write_plan,
    write_weights,
)
from workbench import cli
from workbench.calibrate.file import save_calibration
from workbench.paths import data_dir
from workbench.provenance import provenance
from workbench.run_folder import write_provenance
from workbench.show import describe
from workbench.sweep import METRICS, SweepCase, SweepTable, load
from workbench.sweep.cases import Sampling
from workbench.sweep.estimate import duration, estimate, measured_seconds
from workbench.sweep.report import alarms, case_rows, show, statistics_rows
from workbench.sweep.session import run_sweep
from workbench.sweep.statistics import bootstrap, compare
from workbench.sweep.store import Store

CONTROL_VALUES, VALUES = (1.0, 2.0, 4.0, 8.0), (2.0, 4.0, 7.0, 12.0)


def case(seed: int, value: float | None, *, control: bool = False, **fields: object) -> SweepCase:
    made = SweepCase(
        key=f"{control}{seed}",
        setting="dense_control" if control else "x",
        attention={} if control else {"algorithm": "sol_attn", "tau": 1.0},
        sampling=Sampling().model_dump(mode="json"),
        seed=seed,
        prompt="disc",
        control=control,
        state="failed" if value is None else "done",
        reason="ValueError: no" if value is None else None,
        metrics={} if value is None else {"relative_l2": value, "case_seconds": 3.0},
        ran=("sol_attn: eager",),
        provenance="e",
    )
    return replace(made, **fields)  # pyright: ignore[reportArgumentType]


def table(values: tuple[float | None, ...] = VALUES) -> SweepTable:
    """One setting beside its control, a seed for each value."""
    controls = [case(n, value, control=True) for n, value in enumerate(CONTROL_VALUES)]
    found = [case(n, value) for n, value in enumerate(values)]
    return SweepTable("made-up", (*controls, *found), METRICS)


def printed(made: SweepTable, environments: dict[str, object] | None = None) -> str:
    console = Console(width=150, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    show(made, environments or {}, console)
    return console.export_text()


# -- statistics ---------------------------------------------------------------------------------


def test_differences_are_paired_by_seed():
    found = compare(table(), "x", "relative_l2")
    # 1, 2, 3 and 4 above the control: mean 2.5, deviation sqrt(5 / 3), error of the mean half it.
    assert found.difference is not None
    assert (found.difference.count, found.difference.mean) == (4, 2.5)
    assert found.difference.standard_error == pytest.approx(math.sqrt(5 / 3) / 2, rel=1e-12)
    assert found.values is not None
    assert found.values.mean == 6.25
    assert found.interval is not None
    assert 1 <= found.interval[0] < 2.5 < found.interval[1] <= 4
    assert found.differs
    assert found.left_out == 0


def test_the_order_of_cases_does_not_matter_but_their_pairing_does():
    made = table()
    mixed = replace(made, cases=tuple(sorted(made.cases, key=lambda c: (-c.seed, c.control))))
    assert (
        compare(mixed, "x", "relative_l2").difference
        == compare(made, "x", "relative_l2").difference
    )
    other = table((12.0, 7.0, 4.0, 2.0))
    assert (
        compare(other, "x", "relative_l2").difference
        != compare(made, "x", "relative_l2").difference
    )


def test_the_control_differs_from_itself_by_nothing():
    found = compare(table(), "dense_control", "relative_l2")
    assert found.interval == (0.0, 0.0)
    assert not found.differs


def test_failed_cases_and_failed_controls_are_in_no_pair():
    made = table((2.0, None, 7.0, 12.0))
    lost = replace(made.cases[3], state="failed", metrics={})
    made = replace(made, cases=(*made.cases[:3], lost, *made.cases[4:]))
    found = compare(made, "x", "relative_l2")
    assert found.difference is not None
    assert found.values is not None
    assert (found.values.count, found.difference.count) == (3, 2)
    assert found.interval is None  # two pairs are too few to resample
    assert not found.differs


def test_differences_that_are_not_finite_are_left_out_and_counted():
    found = compare(table((math.inf, math.nan, 7.0, 12.0)), "x", "relative_l2")
    assert found.difference is not None
    assert (found.difference.count, found.left_out) == (2, 2)
    nothing = compare(table((math.inf,) * 4), "x", "relative_l2")
    assert (nothing.values, nothing.difference, nothing.interval) == (None, None, None)


def test_a_metric_that_nobody_measures_is_an_error():
    with pytest.raises(KeyError, match="must be one of density"):
        compare(table(), "x", "fvd")


def test_the_bootstrap_agrees_with_theory_where_there_is_one():
    values = np.random.default_rng(1).normal(3, 2, size=400)
    low, high = bootstrap(values.tolist())
    half = 1.96 * values.std(ddof=1) / 20
    assert low == pytest.approx(values.mean() - half, abs=0.05 * half)
    assert high == pytest.approx(values.mean() + half, abs=0.05 * half)
    assert bootstrap([2.0] * 5) == (2.0, 2.0)
    assert bootstrap([1.0, 5.0, 2.0]) == bootstrap([1.0, 5.0, 2.0])
    with pytest.raises(ValueError, match="is empty"):
        bootstrap([])


# -- the table ----------------------------------------------------------------------------------


def test_the_table_shows_means_and_intervals_of_every_setting():
    text = printed(table())
    assert "made-up: mean over seeds x prompts" in text
    low, high = compare(table(), "x", "relative_l2").interval or (0, 0)
    assert f"2.5 [{low:.3g}, {high:.3g}]" in text  # not swallowed as markup
    assert "6.25 ± 2" in text
    assert "4/4" in text


def test_values_without_a_mean_are_shown_as_they_are():
    equal = table((math.inf,) * 4)
    line = next(line for line in printed(equal).splitlines() if line.startswith("x "))
    assert line.split() == ["x", "4/4", "inf", "-"]
    failed = next(line for line in printed(table((None,) * 4)).splitlines() if line[:2] == "x ")
    assert failed.split() == ["x", "0/4", "-", "-"]


def test_what_makes_a_table_misleading_is_said():
    made = table((2.0, None, 7.0, 12.0))
    flagged = replace(made.cases[-1], flags=("SKIPPED NOTHING",))
    waiting = replace(made.cases[-2], state="pending", metrics={})
    made = replace(made, cases=(*made.cases[:-2], waiting, flagged))
    two = {"a": {"device": {"name": "A"}}, "b": {"device": {"name": "B"}}}
    assert alarms(made, two) == [
        "FAILED x (1 cases): ValueError: no",
        "x (1 cases): SKIPPED NOTHING",
        "NOT FINISHED: 1 of 8 cases have not run",
        "MIXED: cases ran in several environments: device: name: 'A' -> 'B'",
    ]
    assert all(line in printed(made, two) for line in alarms(made, two))
    assert alarms(table(), {"a": {}}) == []


def test_rows_hold_every_case_and_every_statistic():
    rows = case_rows(table((2.0, None, 7.0, 12.0)))
    assert len(rows) == 8
    assert all(list(row) == list(rows[0]) for row in rows)
    assert rows[4]["tau"] == 1.0
    assert rows[0]["tau"] is None
    assert (rows[5]["state"], rows[5]["reason"]) == ("failed", "ValueError: no")
    assert rows[7]["relative_l2"] == 12.0
    found = {(row["setting"], row["metric"]): row for row in statistics_rows(table())}
    assert set(found) == {
        (setting, metric)
        for setting in ("dense_control", "x")
        for metric in ("relative_l2", "case_seconds")
    }
    assert found["x", "relative_l2"]["difference_mean"] == 2.5
    assert found["x", "case_seconds"]["timing"] == 1


# -- time ---------------------------------------------------------------------------------------


def test_an_estimate_is_the_median_of_cases_like_those_that_are_left():
    cases = plan(grid={"tau": [1], "steps": [2, 4]}).cases()
    two, four = (next(c for c in cases if c.sampling.steps == n).sampling for n in (2, 4))
    found = estimate(cases, {two: [1.0, 2.0, 9.0], four: [10.0]}, 2, "test")
    assert found.seconds == (2 * 2.0 + 2 * 10.0) / 2
    assert str(found) == "about 12 s (test)"
    unknown = estimate(cases, {two: [1.0]}, 1, "test")
    assert unknown.seconds is None
    assert "no case like dense_control steps=4 was timed yet" in str(unknown)
    assert estimate([], {}, 4, "test").seconds == 0
    assert measured_seconds(table()) == {Sampling(): [3.0] * 8}


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0.4, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (3599.7, "1 h 00 min"),
        (7980, "2 h 13 min"),
    ],
)
def test_durations_are_written_as_people_say_them(seconds: float, text: str):
    assert duration(seconds) == text


# -- commands -----------------------------------------------------------------------------------


def sweep(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, ["sweep", *map(str, arguments)])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with two failed cases."""
    folder = tmp_path_factory.mktemp("finished")
    written = write_plan(folder / "plan.yaml", seeds=[0, 1])
    run_sweep(written, folder / "a.db", threads(refuses), command=["/x/workbench", "sweep"])
    return folder / "a.db"


def test_a_plan_is_listed_and_nothing_is_written(tmp_path: Path):
    written = write_plan(tmp_path / "plan.yaml", seeds=[0, 1])
    done = sweep("plan", written)
    assert done.exit_code == 0
    assert "sol_attn tau=0.5\n" in done.output
    assert "3 settings (controls included) x 2 seeds x 1 prompts = 6 cases" in done.output
    assert "time unknown; --time runs one control" in done.output
    assert [path.name for path in tmp_path.iterdir()] == ["plan.yaml"]


def test_run_report_and_resume_by_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    written = write_plan(Path("plan.yaml"), **small(write_weights(tmp_path)))
    timed = sweep("plan", written, "--time")
    assert "from one timed control for each sampler, 1 at a time" in timed.output
    done = sweep("run", written)
    assert done.exit_code == 0, done.output
    assert done.output.endswith("runs/taus.db: 3 done\n")
    again = sweep("run", written, "--out", "runs/taus.db")
    assert again.exit_code == 0
    files = ["--csv", "out/cases.csv", "--statistics", "out/statistics.csv"]
    told = sweep("report", "runs/taus.db", *files)
    assert "sol_attn tau=0.5" in told.output
    with Path("out/cases.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["state"] for row in rows] == ["done"] * 3
    found = load("runs/taus.db").cases[1].metrics["relative_l2"]
    assert float(rows[1]["relative_l2"]) == found
    assert "relative_l2" in Path("out/statistics.csv").read_text()
    changed = sweep("run", write_plan(Path("plan.yaml"), **small(written)), "--out", "runs/taus.db")
    assert isinstance(changed.exception, ValueError)
    assert "other settings" in str(changed.exception)


def test_failed_cases_make_the_exit_status_1_and_status_says_why(finished: Path):
    done = sweep("resume", finished)
    assert done.exit_code == 1
    assert done.output == f"{finished}: 4 done, 2 failed\n"
    told = sweep("status", finished).output
    assert "taus: 0 pending, 0 running, 4 done, 2 failed" in told
    assert "FAILED sol_attn tau=1.5, seed 1, disc: ValueError: tau=1.5: not today" in told
    assert told.count("\nrun ") == 2


def test_a_sweep_without_a_result_has_no_statistics_to_write(tmp_path: Path):
    new_store(tmp_path / "a.db").close()
    out = tmp_path / "statistics.csv"
    told = sweep("report", tmp_path / "a.db", "--statistics", out)
    assert "no case has a result yet" in str(told.exception)
    assert not out.exists()


def test_status_of_a_sweep_that_runs(tmp_path: Path):
    with new_store(tmp_path / "a.db") as store:
        store.begin({})
        first = store.claim()
        assert first is not None
        store.finish(first, job(first.content()))
        store.claim()
        told = sweep("status", tmp_path / "a.db").output
    assert "taus: 1 pending, 1 running, 1 done, 0 failed" in told
    assert "runs now" in told
    assert "left: about 3 s (from finished cases, one at a time)" in told


def test_options_that_do_not_go_together_are_refused(finished: Path):
    done = sweep("resume", finished, "--workers", 2, "--scheduler", "tcp://x:1")
    assert isinstance(done.exception, ValueError)
    assert "a dask cluster has its own" in str(done.exception)


# -- where a result came from -------------------------------------------------------------------


def test_show_tells_where_a_sweep_came_from(finished: Path):
    text = describe(finished)
    with Store.open(finished) as store:
        inputs = store.plan["inputs"]["base weights"]
    for line in (
        "  sweep: taus",
        "    failed: 2",
        "  seeds: 0; 1",
        "  prompts: disc",
        f"      sha256: {inputs['sha256']}",
        "      command: workbench sweep",
        "      place: here",
        "      cases: 4",
        "  ran: none: test",
    ):
        assert f"\n{line}\n" in f"{text}\n", line


def test_show_tells_where_a_run_folder_came_from(tmp_path: Path):
    source = tmp_path / "in.bin"
    source.write_bytes(b"abc")
    words = ["/bin/workbench", "tune", "a b.safetensors", "--out", "x" * 90]
    record = provenance(words, {"capture": source}, seeds={"noise": 4})
    write_provenance(
        tmp_path, {**record, "warnings": ["a" * 60, "b" * 60], "none": [], "empty": {}}
    )
    done = CliRunner().invoke(cli.app, ["show", str(tmp_path)])
    assert done.exit_code == 0
    for line in (
        f"  command: workbench tune 'a b.safetensors' --out {'x' * 90}",
        f"      path: {source}",
        "      bytes: 3",
        "    noise: 4",
        f"    - {'a' * 60}",
        "  none: none",
        "  empty: none",
    ):
        assert f"\n{line}\n" in done.output, line
    path = tmp_path / "provenance.json"
    assert describe(path).splitlines()[1:] == done.output.splitlines()[1:]


def test_show_tells_what_a_calibration_and_a_capture_hold(tmp_path: Path):
    made = replace(small_calibration("sol_attn"), record={"command": ["workbench", "calibrate"]})
    path = save_calibration(made, tmp_path / "a.safetensors")
    text = describe(path)
    for line in ("  algorithm: sol_attn", "    command: workbench calibrate", "    steps: 3"):
        assert f"\n{line}\n" in text, text
    assert "\n  device: cpu\n" in describe(data_dir() / "tiny_video_capture.safetensors")
    path.write_text("no tensors")
    with pytest.raises(ValueError, match="no readable safetensors file"):
        describe(path)


def test_show_refuses_what_has_no_provenance(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        describe(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match=r"has no provenance\.json"):
        describe(tmp_path)
    path = tmp_path / "provenance.json"
    for content, told in (("{", "is not JSON"), (json.dumps([1]), "holds no provenance record")):
        path.write_text(content)
        with pytest.raises(ValueError, match=told):
            describe(tmp_path)
