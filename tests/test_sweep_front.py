"""``workbench sweep front``: the table, the picture and the chosen configuration of a database."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.sweep_inputs import SAMPLING, new_store, outcome, plan
from workbench import cli
from workbench.config import SolAttnConfig, load_config
from workbench.export import import_config
from workbench.provenance import origin
from workbench.sweep.cases import Case, flat
from workbench.sweep.run import Workers, run_cases
from workbench.sweep.store import Outcome

TAUS = [0.5, 1.5, 2.5]


def job(content: Mapping[str, Any]) -> Outcome:
    """A larger tau is faster and worse; nothing ran."""
    case = Case.from_content(content)
    tau = flat(case.attention).get("tau", -9.0)
    found = outcome(
        case,
        psnr=40.0 - 8 * tau + case.seed,
        density=1 / (1 + tau) if tau > 0 else 1.0,
        attention_seconds=1.0,
        dense_attention_seconds=1.0 + tau,
    )
    return replace(found, flags=())


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("front") / "taus.db"
    with new_store(path, plan(grid={"tau": TAUS}, seeds=[0, 2])) as store:
        store.begin(origin(["test"], {}, seeds={}))
        run_cases(store, Workers(ThreadPoolExecutor(1), 1, job))
    return path


def front(*arguments: object):
    return CliRunner().invoke(cli.app, ["sweep", "front", *map(str, arguments)])


def test_the_table_has_a_place_for_every_setting_and_what_speaks_against_it(database: Path):
    done = front(database, "--cost", "attention", "--gate", "psnr=25", "--gate", "psnr=1")
    assert (done.exit_code, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    ends = {line.partition("  ")[0]: re.split("  +", line.strip())[-2:] for line in lines}
    assert ends["sol_attn tau=2.5"] == ["front", "psnr >= 25 dB: worst 20"]
    assert ends["sol_attn tau=1.5"] == ["front", "—"]
    assert lines[0] == "attention time, dense / sparse (routing included)"
    assert ends["dense_control"] == ["control", "—"]


def test_the_cheapest_that_passes_is_written_with_its_reason(database: Path, tmp_path: Path):
    chosen = tmp_path / "chosen.yaml"
    arguments = ("--cost", "attention", "--gate", "psnr=25", "--choose", chosen)
    assert front(database, *arguments).exit_code == 0
    sparse = load_config(chosen).attention_config.sparse_attention_config
    assert sparse == SolAttnConfig(tau=1.5)
    text = chosen.read_text()
    assert text.startswith("# sol_attn tau=1.5, from the sweep taus; gates: psnr >= 25 dB.\n")
    assert "# 2 videos: psnr 29 (28 .. 30); attention time" in text
    assert front(database, "--choose", chosen).exit_code != 0
    assert chosen.read_text() == text


def test_density_is_the_cost_where_all_ran_on_cpus_and_it_is_said(database: Path):
    done = front(database)
    assert done.stdout.splitlines()[0] == "block pairs, all / exact"
    assert "note: all ran on CPUs" in done.stderr
    assert "--cost attention" in done.stderr


@pytest.mark.parametrize(
    ("device", "kind", "first"),
    [("auto", "cpu", "block pairs"), ("auto", "cuda", "attention"), ("auto", None, "attention"),
     ("cuda", "cuda", "attention"), ("cpu", "cuda", "block pairs")],
)  # fmt: skip
def test_the_device_of_the_cases_decides_about_the_cost(
    device: str, kind: str | None, first: str, tmp_path: Path
):
    def ran(content: Mapping[str, Any]) -> Outcome:
        return replace(job(content), environment={"device": {"kind": kind}} if kind else {})

    path = tmp_path / "one.db"
    sampling = {**SAMPLING, "device": device}
    with new_store(path, plan(grid={"tau": TAUS}, sampling=sampling)) as store:
        store.begin(origin(["test"], {}, seeds={}))
        run_cases(store, Workers(ThreadPoolExecutor(1), 1, ran))
    assert front(path).stdout.startswith(first)


def test_the_chosen_setting_goes_on_to_a_server(database: Path, tmp_path: Path):
    chosen = tmp_path / "chosen.yaml"
    front(database, "--choose", chosen)
    source = load_config(chosen)
    for target in ("tensorrt_llm", "sglang", "vllm_omni", "comfyui"):
        made = CliRunner().invoke(cli.app, ["export", str(chosen), "--to", target])
        found = import_config(made.stdout, target).config.attention_config
        wanted = source.attention_config.sparse_attention_config
        assert found.sparse_attention_config == wanted


@pytest.mark.parametrize("cost", ["density", "attention"])
def test_a_picture_is_drawn(cost: str, database: Path, tmp_path: Path):
    figure = tmp_path / "front.png"
    assert front(database, "--cost", cost, "--figure", figure).exit_code == 0
    assert figure.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gate", "psnr"), "expected METRIC=LIMIT such as psnr=30"),
        (("--quality", "density"), "metric='density'"),
        (("--quality", "lpips"), "no case has lpips yet"),
        (("--cost", "money"), "cost='money'"),
        (("--gate", "psnr=99", "--choose", "x.yaml"), "no setting may be chosen; against sol_attn"),
    ],
)
def test_an_error_is_one_line_and_status_2(
    arguments: tuple[str, ...], message: str, database: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], tmp_path: Path,
):  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["workbench", "sweep", "front", str(database), *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
