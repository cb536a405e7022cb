"""The commands calibrate and solve, from options to run folder, on a small model."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import matplotlib.image
import pytest
import torch
from typer.testing import CliRunner, Result

from tests.calibrate_inputs import made_calibration, small_model
from workbench import cli
from workbench.calibrate.file import open_calibration
from workbench.calibrate.fit import fit_calibration
from workbench.calibrate.options import Target, parse_form, parse_labels
from workbench.calibrate.report import COLUMNS
from workbench.calibrate.samples import Samples
from workbench.calibrate.session import fit_report, write_formula
from workbench.calibrate.setting import Form, Setting
from workbench.calibrate.text import missed_lines
from workbench.config import SolAttnConfig, load_config
from workbench.config.checkpoint import read_calibration
from workbench.export import export_config
from workbench.models import save_model

SIZE = ["--grid", "3,8,25", "--steps", "3", "--labels", "ring"]


def invoke(*words: object) -> Result:
    return CliRunner().invoke(cli.app, [str(word) for word in words])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Weights of the small model and a calibration of each algorithm."""
    folder = tmp_path_factory.mktemp("calibrate")
    files = {"weights": folder / "weights.safetensors"}
    save_model(small_model(), files["weights"])
    files["sol_attn"] = folder / "sol_attn.safetensors"
    model = ("--weights", files["weights"], "--device", "cpu")
    done = invoke("calibrate", "--out", files["sol_attn"], "--seeds", "0,1", *model, *SIZE)
    assert done.exit_code == 0, done.output
    files["printed"] = folder / "printed.txt"
    files["printed"].write_text(done.output)
    return files


def solve(made: dict[str, Path], out: Path, *words: object) -> Result:
    model = ("--weights", made["weights"], "--device", "cpu", "--held-out", "7,8")
    return invoke("solve", made["sol_attn"], *words, *model, "--out", out)


def test_calibrate_says_what_it_takes_and_what_it_found(made: dict[str, Path]):
    calibration = open_calibration(made["sol_attn"])
    printed = made["printed"].read_text()
    assert f"{calibration.table.points.numel() * 4:,} bytes, densities exact" in printed
    mean = float(calibration.density(1.0).mean())
    assert f"{mean:.3f}" in printed
    assert calibration.record["model_sha256"]
    assert calibration.samples.seeds == (0, 1)


def test_solve_writes_a_run_folder_that_says_requested_and_delivered(
    made: dict[str, Path], tmp_path: Path
):
    done = solve(made, tmp_path / "run", "--target-sparsity", "0.5")
    assert done.exit_code == 0, done.output
    assert all(word in done.output for word in ("requested", "predicted", "delivered", "held out"))
    folder = tmp_path / "run"
    names = {path.name for path in folder.iterdir()}
    assert names == {"config.yaml", "overview.png", "provenance.json", "results.csv",
                     "setting.json", "summary.txt"}  # fmt: skip
    setting = Setting.from_json(json.loads((folder / "setting.json").read_text()))
    config = load_config(folder / "config.yaml").attention_config.sparse_attention_config
    assert config == SolAttnConfig(tau=setting.value(0, 0.5))
    assert export_config(load_config(folder / "config.yaml"), "tensorrt_llm").text
    rows = list(csv.DictReader((folder / "results.csv").open()))
    assert len(rows) == 2 * 3 * 2  # layers, steps, heads of the first held-out video
    assert set(rows[0]) == set(COLUMNS)
    assert all(float(row["recall"]) <= float(row["best_recall"]) + 1e-9 for row in rows)
    record = json.loads((folder / "provenance.json").read_text())
    assert record["target"] == {"quantity": "density", "value": 0.5}
    assert record["inputs"]["calibration"]["sha256"]
    assert record["ran"] == {"device": "cpu", "calls": {"sol_attn: eager": 2 * 2 * 3}}
    assert any(text.startswith("triton: q is on cpu") for text in record["fallbacks"])
    assert "ran: sol_attn: eager (12 calls)" in done.output
    assert matplotlib.image.imread(folder / "overview.png").std() > 0.05


def test_a_setting_with_several_values_has_no_server_configuration(
    made: dict[str, Path], tmp_path: Path
):
    words = ("--target-density", "0.5", "--by", "window", "--edges", "0.9")
    done = solve(made, tmp_path / "run", *words)
    assert done.exit_code == 0, done.output
    assert "window 0.9 <= t: steps 0 of 3" in done.output
    assert "window t < 0.9: steps 1-2 of 3" in done.output
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_an_error_is_a_target_too(made: dict[str, Path], tmp_path: Path):
    done = solve(made, tmp_path / "run", "--target-error", "0.3", "--dense-layers", "0")
    assert done.exit_code == 0, done.output
    assert "error by global value" in done.output
    config = load_config(tmp_path / "run" / "config.yaml").attention_config.sparse_attention_config
    assert isinstance(config, SolAttnConfig)
    assert config.dense_layers == (0,)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "give exactly one"),
        (("--target-density", "0.5", "--target-error", "0.1"), "give exactly one"),
        (("--target-density", "0.01"), "reaches"),
        (("--target-density", "0.5", "--held-out", "1,2"), "the calibration has seen them"),
        (("--target-density", "0.5", "--schedule", "linear"), "need one"),
        (("--target-density", "0.5", "--impl", "nope"), "impl='nope': must be one of 'auto'"),
        (("--target-density", "0.5", "--by", "window", "--edges", "a"), "expected numbers"),
    ],
)
def test_what_solve_cannot_do_is_an_error_and_writes_nothing(
    made: dict[str, Path], tmp_path: Path, words: tuple[str, ...], message: str
):
    model = ("--weights", made["weights"], "--device", "cpu", "--out", tmp_path / "run")
    done = invoke("solve", made["sol_attn"], *model, *words)
    assert isinstance(done.exception, ValueError)
    assert message in str(done.exception)
    assert not list(tmp_path.iterdir())


def test_other_weights_are_noticed(made: dict[str, Path], tmp_path: Path):
    done = invoke("solve", made["sol_attn"], "--target-density", "0.5", "--out", tmp_path / "run")
    assert "was made with other weights" in str(done.exception)


def test_a_place_that_takes_no_file_is_refused_before_anything_is_sampled():
    done = invoke("calibrate", "--out", "/proc/none/a.safetensors", "--device", "cpu", *SIZE)
    assert "nothing can be written in /proc" in str(done.exception)
    assert "heads" not in done.output


def test_calibrate_overwrites_nothing_and_tries_no_fit_that_is_not_there(made: dict[str, Path]):
    again = invoke("calibrate", "--out", made["sol_attn"], *SIZE)
    assert isinstance(again.exception, FileExistsError)
    new = made["sol_attn"].with_name("new.safetensors")
    wrong = invoke("calibrate", "--out", new, "--hold-out", made["sol_attn"], *SIZE)
    assert "the fit is skip_softmax's" in str(wrong.exception)
    assert not new.exists()


def test_a_calibration_too_small_for_a_fit_is_kept_and_says_so(
    made: dict[str, Path], tmp_path: Path
):
    path = tmp_path / "skip.safetensors"
    model = ("--weights", made["weights"], "--device", "cpu", "--algorithm", "skip_softmax")
    done = invoke("calibrate", "--out", path, "--seeds", "0", *model, *SIZE)
    assert done.exit_code == 0, done.output
    assert "no fit: 20 points, 0 of them with a sparsity" in done.output
    assert open_calibration(path).algorithm == "skip_softmax"


def test_a_fit_is_printed_in_both_spaces_with_what_it_delivers_elsewhere():
    near, far = (
        made_calibration(torch.linspace(-9, 0, 256).expand(1, 1, 1, 1, 1, -1), samples)
        for samples in (Samples(steps=1), Samples(steps=1, grid=(4, 16, 32)))
    )
    lines = "\n".join(fit_report(near, far))
    assert "fit (linear space)" in lines
    assert "fit (log space)" in lines
    assert "hold-out at 2,048 keys (grid 4 x 16 x 32)" in lines
    assert "no hold-out" in "\n".join(fit_report(near, None))


def test_the_written_fit_is_the_calibration_that_an_export_reads(tmp_path: Path):
    made = made_calibration(torch.linspace(-9, 0, 256).expand(1, 1, 1, 1, 1, -1), Samples(steps=1))
    path = tmp_path / "ring.config.json"
    assert "export --calibration" in write_formula(made, path)[0]
    config, out = tmp_path / "config.yaml", tmp_path / "group.json"
    sparse = "{algorithm: skip_softmax, target_sparsity: 0.5}"
    config.write_text(f"attention_config: {{sparse_attention_config: {sparse}}}\n")
    options = ["--to", "model_optimizer", "--calibration", str(path), "--out", str(out)]
    done = CliRunner().invoke(cli.app, ["export", str(config), *options])
    assert done.exit_code == 0, done.output
    found = read_calibration(checkpoint_config=json.loads(path.read_text()))
    assert found is not None
    assert found.factor(0.5) == pytest.approx(fit_calibration(made, space="log").predict(0.5))
    assert out.exists()
    with pytest.raises(FileExistsError, match="nothing is overwritten"):
        write_formula(made, path)


def test_a_missed_target_is_a_warning():
    assert missed_lines([0.2, math.nan], "error", 0.1)
    assert not missed_lines([0.05, 0.1], "error", 0.1)
    assert missed_lines([0.15, 0.156], "density", 0.15)
    assert not missed_lines([0.1501], "density", 0.15)


def test_texts_of_the_command_line():
    assert parse_labels("disc, 3") == ("disc", 3)
    assert parse_form("layer", None, "constant", dense_layers="0,2-3") == Form(
        by="layer", dense_layers=(0, 2, 3)
    )
    assert Target.of(sparsity=0.75) == Target("density", 0.25)
    assert Target.of(error=0.1) == Target("error", 0.1)
