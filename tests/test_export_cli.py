"""The commands `export` and `import`: files, notes beside the text, errors as one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.export_inputs import FORMULA
from workbench import cli
from workbench.config import load_config
from workbench.export import TARGETS

CONFIG = """
attention_config:
  backend: CUTEDSL
  sparse_attention_config: {algorithm: sol_attn, tau: 1.5, disabled_until_timestep: 0.9}
"""
SKIP = """
attention_config:
  sparse_attention_config: {algorithm: skip_softmax, target_sparsity: 0.5}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    return path


def run(*arguments: object):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def test_a_file_goes_out_and_comes_back(config: Path, tmp_path: Path):
    out, back = tmp_path / "sglang.json", tmp_path / "back.yaml"
    times = "1.0,0.95,0.9,0.5"
    done = run("export", config, "--to", "sglang", "--times", times, "--out", out)
    assert (done.exit_code, done.stdout) == (0, "")
    assert "note: disabled_until_timestep=0.9 became 3 dense of 4 steps" in done.stderr
    assert json.loads(out.read_text())["attention_backend_config"]["dense_steps"] == 3
    assert run("import", out, "--from", "sglang", "--times", times, "--out", back).exit_code == 0
    found, source = load_config(back).attention_config, load_config(config).attention_config
    assert found.sparse_attention_config == source.sparse_attention_config


def test_text_alone_goes_to_the_terminal(config: Path):
    done = run("export", config, "--to", "tensorrt_llm")
    assert load_config(done.stdout) == load_config(config)


def test_without_a_target_a_table_says_who_can(config: Path):
    done = run("export", config)
    rows = {line.split()[0]: line for line in done.stdout.splitlines()[1:]}
    assert list(rows) == list(TARGETS)
    assert "  yes" in rows["tensorrt_llm"]
    assert "--times" in rows["sglang"]
    assert "start_percent" in rows["comfyui"]


def test_the_help_names_every_target():
    text = run("export", "--help").output
    assert all(name in text for name in TARGETS)


def test_a_calibration_comes_from_a_checkpoint(tmp_path: Path):
    source, checkpoint = tmp_path / "skip.yaml", tmp_path / "config.json"
    source.write_text(SKIP)
    group = {"algorithm": "skip_softmax", "threshold_scale_factor": FORMULA}
    section = {"config_groups": {"group_0": group}}
    checkpoint.write_text(json.dumps({"sparse_attention_config": section}))
    done = run("export", source, "--to", "model_optimizer", "--calibration", checkpoint)
    made = json.loads(done.stdout)["sparse_attention_config"]["config_groups"]["group_0"]
    assert made == {**group, "target_sparsity": 0.5}


def test_an_older_file_is_not_overwritten(config: Path, tmp_path: Path):
    out = tmp_path / "old.yaml"
    out.write_text("mine")
    done = run("export", config, "--to", "tensorrt_llm", "--out", out)
    assert isinstance(done.exception, FileExistsError)
    assert "exists already and nothing is overwritten" in str(done.exception)
    assert out.read_text() == "mine"
    nowhere = tmp_path / "none" / "new.yaml"
    lost = run("export", config, "--to", "tensorrt_llm", "--out", nowhere).exception
    assert f"out={str(nowhere)!r}: cannot be written" in str(lost)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not JSON"),
        (b"\xff", "is no text in UTF-8"),
        (b'{"a": 1, "a": 2}', "'a' is given twice"),
        (b"{}", "no SkipSoftmax group"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": ' + b"1" * 5000 + b"}", "limit"),
    ],
)
def test_errors_of_a_file_begin_with_its_path(tmp_path: Path, content: bytes, message: str):
    source, bad = tmp_path / "skip.yaml", tmp_path / "bad.json"
    source.write_text(SKIP)
    bad.write_bytes(content)
    told = run("export", source, "--to", "model_optimizer", "--calibration", bad).exception
    assert str(told).startswith(f"{bad}: ")
    assert message in str(told)
    if content != b"{}":
        assert str(run("import", bad, "--from", "sglang").exception).startswith(f"{bad}: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("export", "CONFIG", "--to", "sglang"), "Give the denoising time of every step (--times)"),
        (("export", "CONFIG", "--to", "trt"), "target='trt': must be one of"),
        (("export", "CONFIG", "--to", "sglang", "--times", "1,a"), "--times: 'a' is no number"),
        (("export", "CONFIG", "--to", "comfyui"), "comfyui: disabled_until_timestep=0.9"),
        (
            ("export", "CONFIG", "--calibration", "CONFIG"),
            "(char 1)); give a calibrated component's config.json",
        ),
        (("export", "CONFIG", "--calibration", "none.json"), "--calibration none.json: no such"),
        (("export", "CONFIG", "--out", "new.json"), "--out new.json: a file has one format"),
        (("import", "nothing.json", "--from", "sglang"), "nothing.json: no such file"),
        (
            ("import", "CONFIG", "--from", "sglang"),
            "config.yaml: sglang: not JSON (Expecting value: line 2 column 1 (char 1)); give one "
            "JSON object, as workbench export CONFIG.yaml --to sglang writes it; a configuration",
        ),
    ],
)
def test_an_error_is_one_line_and_status_2(
    arguments: tuple[str, ...], message: str, config: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):  # fmt: skip
    words = [str(config) if word == "CONFIG" else word for word in arguments]
    monkeypatch.setattr(sys, "argv", ["workbench", *words])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_exporting_needs_no_torch():
    code = "import sys, workbench.export; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
