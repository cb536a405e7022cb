"""The commands `tune` and `train`: options, the run folder, errors as one line."""

from __future__ import annotations

import csv
import hashlib
import json
import re
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.tune_inputs import ENTRIES, HEADS, write_capture
from workbench import cli
from workbench.config import SkipSoftmaxConfig, SolAttnConfig, SparseConfig, load_config
from workbench.run_folder import default_folder
from workbench.tune import figures as report_figures
from workbench.tune import report
from workbench.tune.session import tune_capture
from workbench.tune.settings import TuneSettings

FILES = {
    "config.yaml",
    "curve.png",
    "error.png",
    "frames.png",
    "heatmap_density.png",
    "heatmap_error.png",
    "overview.png",
    "provenance.json",
    "results.csv",
    "route.png",
    "summary.txt",
}
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def capture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_capture(tmp_path_factory.mktemp("cli") / "fields.safetensors").path


@pytest.fixture(scope="module")
def falling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "falling.safetensors"
    return write_capture(path, entries=((0, 3),), tile_gap=1.0).path


def tune(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, ["tune", *map(str, arguments)])


@pytest.fixture(scope="module")
def first(capture: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Run folder and output of one plain run."""
    folder = tmp_path_factory.mktemp("runs") / "a" / "first"
    done = tune(capture, "--taus", "0:3:3", "--repeats", 1, "--out", folder)
    assert done.exit_code == 0, done.output
    return folder, done.output


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "results.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def sparse_of(folder: Path) -> SparseConfig | None:
    return load_config(folder / "config.yaml").attention_config.sparse_attention_config


# -- the run folder -----------------------------------------------------------------------------


def test_the_folder_holds_what_it_promises_and_nothing_else(first: tuple[Path, str]):
    folder, _ = first
    assert {path.name for path in folder.iterdir()} == FILES
    assert {path.name for path in folder.parent.iterdir()} == {"first"}
    for picture in folder.glob("*.png"):
        assert picture.read_bytes().startswith(PNG)
        assert picture.stat().st_size > 3000


def test_results_have_the_documented_columns_and_a_row_for_each_head_and_value(
    first: tuple[Path, str],
):
    folder, _ = first
    rows = rows_of(folder)
    assert list(rows[0]) == list(report.COLUMNS)
    # Three taus and the chosen one, tau = 1.
    assert len(rows) == len(ENTRIES) * HEADS * 4
    chosen = [row for row in rows if row["chosen"] == "1"]
    assert {float(row["tau"]) for row in chosen} == {1.0}
    assert len(chosen) == len(ENTRIES) * HEADS


def test_figures_in_the_results_agree_with_each_other(first: tuple[Path, str]):
    for row in rows_of(first[0]):
        assert row["density"] == row["density_delivered"]
        assert 0 < float(row["density_alone"]) < float(row["density"]) < 1
        assert float(row["time_ratio_estimated"]) == float(row["density"]) + 1 / 64
        ratio = float(row["sparse_ms"]) / float(row["dense_ms"])
        assert float(row["time_ratio_measured"]) == ratio
        assert row["threshold"] == row["threshold_scale_factor"] == ""


def test_the_summary_is_what_was_printed_and_explains_the_columns(first: tuple[Path, str]):
    folder, output = first
    text = (folder / "summary.txt").read_text()
    printed = output.partition("Run folder: ")[0]
    assert text.startswith(printed.rstrip())
    assert all(f"\n{name} " in text for name in report.COLUMNS)
    assert str(folder) in output


def test_the_configuration_reads_back_as_what_was_chosen(first: tuple[Path, str]):
    folder, _ = first
    assert sparse_of(folder) == SolAttnConfig(tau=1.0, thresh_type="diag")
    text = (folder / "config.yaml").read_text()
    assert text.startswith("# sol_attn, chosen by workbench tune: the method's default")


def test_the_provenance_says_how_to_do_it_again(
    capture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    command = ["/somewhere/bin/workbench", "tune", str(capture)]
    monkeypatch.setattr(sys, "argv", command)
    done = tune(capture, "--taus", "1", "--repeats", 0, "--out", tmp_path / "run")
    assert done.exit_code == 0, done.output
    record = json.loads((tmp_path / "run" / "provenance.json").read_text())
    assert record["command"] == ["workbench", *command[1:]]
    assert record["inputs"]["capture"]["sha256"] == hashlib.sha256(capture.read_bytes()).hexdigest()
    assert record["capture"]["source"] == "synthetic"
    assert record["settings"]["values"] == [1.0]
    assert record["chosen"]["value"] == 1.0
    assert record["ran"]["calls"]
    assert {"versions", "device", "git", "time"} <= set(record)


def test_a_folder_that_exists_is_never_touched(first: tuple[Path, str], capture: Path):
    folder, _ = first
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    done = tune(capture, "--out", folder)
    assert isinstance(done.exception, FileExistsError)
    assert "exists already and a run overwrites nothing" in str(done.exception)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_the_default_folder_has_time_and_algorithm_and_is_always_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    now = datetime(2026, 11, 30, 7, 5, 9)
    first = default_folder("sol_attn", now)
    assert first == Path("runs/20261130-070509-sol_attn")
    first.mkdir(parents=True)
    assert default_folder("sol_attn", now).name == "20261130-070509-sol_attn-2"


def test_without_out_the_folder_is_below_runs(
    capture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    assert tune(capture, "--taus", "1", "--repeats", 0, "--layers", 2).exit_code == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.endswith("-sol_attn")
    assert (folder / "config.yaml").is_file()


@pytest.mark.parametrize("where", ["frames", "heatmap_error"])
def test_an_interrupted_run_leaves_nothing_that_looks_whole(
    where: str, capture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def interrupt(result: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(report_figures.FIGURES, where, interrupt)
    done = tune(capture, "--taus", "1", "--repeats", 0, "--out", tmp_path / "run")
    assert done.exit_code != 0
    assert list(tmp_path.iterdir()) == []


# -- options ------------------------------------------------------------------------------------


def test_sol_attn_options_reach_the_run_and_the_export(capture: Path, tmp_path: Path):
    done = tune(
        *(capture, "--taus", "0,2", "--thresh-type", "exact", "--sink-tokens", 64),
        *("--target-density", 0.6, "--layers", "0,2", "--steps", "9", "--dense-layers", "0"),
        *("--disabled-until-timestep", 0.9, "--impl", "reference", "--device", "cpu"),
        *("--repeats", 0, "--out", tmp_path / "run"),
    )
    assert done.exit_code == 0, done.output
    sparse = sparse_of(tmp_path / "run")
    assert isinstance(sparse, SolAttnConfig)
    assert sparse.thresh_type == "exact"
    assert sparse.dense_layers == (0,)
    assert sparse.disabled_until_timestep == 0.9
    rows = rows_of(tmp_path / "run")
    assert {(row["layer"], row["step"], row["impl"]) for row in rows} == {("2", "9", "reference")}
    assert {0.0, 2.0, sparse.tau} == {float(row["tau"]) for row in rows}
    assert "0.6000 requested" in done.output
    assert "no field for sink_tokens" in done.output


def test_a_target_error_is_kept_by_what_is_exported(capture: Path, tmp_path: Path):
    done = tune(
        *(capture, "--taus", "0:3:4", "--target-error", 0.25, "--repeats", 0),
        *("--out", tmp_path / "run"),
    )
    assert done.exit_code == 0, done.output
    chosen = [row for row in rows_of(tmp_path / "run") if row["chosen"] == "1"]
    assert sum(float(row["relative_l2"]) for row in chosen) / len(chosen) <= 0.25
    assert "at most 0.2500 requested" in done.output


def test_skip_softmax_is_tuned_and_exported_in_every_unit(falling: Path, tmp_path: Path):
    done = tune(
        *(falling, "--algorithm", "skip_softmax", "--thresholds", "0.01,0.1,0.3"),
        *("--target-density", 0.6, "--repeats", 0, "--out", tmp_path / "run"),
    )
    assert done.exit_code == 0, done.output
    rows = rows_of(tmp_path / "run")
    by_lambda = {float(row["threshold"]): row for row in rows}
    tenth = by_lambda[0.1]
    assert float(tenth["threshold_scale_factor"]) == pytest.approx(0.1 * 600)
    assert float(tenth["threshold_log2"]) == pytest.approx(-3.3219, abs=1e-4)
    assert float(tenth["density_delivered"]) == pytest.approx(0.6)
    assert tenth["tau"] == tenth["density_alone"] == ""
    sparse = sparse_of(tmp_path / "run")
    assert isinstance(sparse, SkipSoftmaxConfig)
    (chosen,) = {row["threshold_scale_factor"] for row in rows if row["chosen"] == "1"}
    assert sparse.threshold_scale_factor == float(chosen)
    assert {path.name for path in (tmp_path / "run").iterdir()} == FILES


def test_nothing_is_drawn_on_stderr_where_nobody_watches(capture: Path, tmp_path: Path):
    done = tune(capture, "--taus", "1", "--repeats", 0, "--layers", 2, "--out", tmp_path / "run")
    assert done.stderr == ""


# -- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.safetensors"], "none.safetensors: no such file"),
        (["--taus", "a"], "--taus 'a': 'a' is not a finite number"),
        (["--thresholds", "0.1"], "--thresholds 0.1: sol_attn has no such setting; use --taus"),
        (["--algorithm", "vsa"], "algorithm='vsa': must be one of"),
        (["--thresh-type", "mean"], "thresh_type='mean': must be one of 'diag', 'exact'"),
        (["--layers", "9"], "layers=[9]: the capture has no [9]"),
        (["--steps", "x"], "--steps 'x': item 1 is 'x'"),
        (["--dense-layers", ","], "--dense-layers ',': item 1 is empty"),
        (["--target-density", "2"], "target_density=2: must be in (0, 1]"),
        (["--target-density", "0.001"], "target_density=0.001"),
        (["--sink-tokens", "5000"], "sink_tokens=5000"),
        (["--device", "tpu"], "device='tpu'"),
        (["--impl", "fast"], "impl='fast': must be one of"),
    ],
)
def test_bad_input_is_one_clear_line_and_leaves_nothing(
    arguments: list[str], message: str, capture: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
):  # fmt: skip
    source = [] if arguments[0].endswith("safetensors") else [str(capture)]
    out = ["--repeats", "0", "--out", str(tmp_path / "run")]
    monkeypatch.setattr(sys, "argv", ["workbench", "tune", *source, *arguments, *out])
    monkeypatch.delenv("WORKBENCH_DEBUG", raising=False)
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    first_line, *rest = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 2
    assert first_line.startswith("workbench: error: ")
    assert message in first_line
    assert len(rest) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def measuring_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("measured before the check")

    monkeypatch.setattr("workbench.tune.run", never)


def test_a_place_that_takes_no_folder_is_refused_before_any_work(
    capture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measuring_fails: None
):
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OSError, match=r"out='file/run': nothing can be written in"):
        tune_capture(capture, TuneSettings(), out=Path("file/run"))
    (tmp_path / "runs").touch()
    with pytest.raises(OSError, match=r"out='runs/.*: nothing can be written in"):
        tune_capture(capture, TuneSettings())


def test_a_capture_whose_bytes_changed_is_not_tuned_on(
    capture: Path, tmp_path: Path, measuring_fails: None
):
    damaged = tmp_path / "damaged.safetensors"
    data = bytearray(capture.read_bytes())
    data[-1] ^= 64
    damaged.write_bytes(bytes(data))
    with pytest.raises(ValueError, match="checksum mismatch"):
        tune_capture(damaged, TuneSettings(), out=tmp_path / "run")


# -- train --------------------------------------------------------------------------------------


def test_train_passes_every_option_to_the_training(monkeypatch: pytest.MonkeyPatch):
    from workbench.models import train

    given: list[list[str]] = []
    monkeypatch.setattr(train, "main", lambda words, **_: given.append(words))
    options = ["--out", "folder", "--steps", "3", "--minutes", "0.5", "--compile", "--help"]
    done = CliRunner().invoke(cli.app, ["train", *options])
    assert done.exit_code == 0, done.output
    assert given == [options]


def test_train_shows_the_options_of_the_training():
    command = [sys.executable, "-m", "workbench.cli", "train", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--learning-rate" in done.stdout
    assert done.stdout.startswith("usage: workbench train ")


def test_help_of_tune_names_every_option():
    text = CliRunner().invoke(cli.app, ["tune", "--help"], env={"COLUMNS": "200"}).output
    for name in ("taus", "thresholds", "target-density", "target-error", "impl", "device", "out"):
        assert f"--{name}" in text


@pytest.mark.parametrize(
    ("command", "defaults"),
    [
        ("record", ("[default: all]", "[default: the pipeline's own]", "[default: 1024]")),
        ("apply", ("[default: recognised]", "[default: the small model]", "[default: 0,1,2]")),
        ("tune", ("[default: runs/TIME-ALGORITHM]",)),
    ],
)
def test_the_help_of_a_command_says_what_is_taken_where_nothing_is_given(
    command: str, defaults: tuple[str, ...]
):
    output = CliRunner().invoke(cli.app, [command, "--help"], env={"COLUMNS": "200"}).output
    assert all(default in output for default in defaults), output


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--layers", "0,2,0", r"layers=\(0, 2, 0\): must be without repeats"),
        ("--at-steps", "1,1", "at_steps=.* without repeats"),
        ("--heads", "0,0", "heads=.* without repeats"),
        ("--order", "hilbert", "order='hilbert'.*raster"),
        ("--query-blocks", "1", "query_blocks=1: must be at least 2"),
        ("--seed", "-1", "seed=-1: must be at least 0"),
    ],
)
def test_record_refuses_what_no_model_could_serve_before_it_looks_for_one(
    tmp_path: Path, option: str, value: str, message: str
):
    given = {"--out": "a", "--prompt": "a", "--layers": "0", "--at-steps": "1", option: value}
    words = [word for pair in given.items() for word in pair]
    done = CliRunner().invoke(cli.app, ["record", str(tmp_path / "none"), *words])
    assert isinstance(done.exception, ValueError)
    assert re.search(message, str(done.exception))
