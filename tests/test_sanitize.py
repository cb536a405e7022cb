"""The sanitizer's step of `.ci/gpu` without a GPU: its launches, its verdicts, one that hangs."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from blockattn.problem import make_problem

FILE = Path(__file__).resolve().parent.parent / ".ci" / "sanitize.py"
SPEC = importlib.util.spec_from_file_location("sanitize", FILE)
assert SPEC is not None
assert SPEC.loader is not None
sanitize = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(sanitize)

TOOL = """#!/bin/sh
case "$*" in
    *racecheck*"cute dense") sleep 60 & wait ;;
    *racecheck*) echo "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)" ;;
    *memcheck*"triton dense") echo "========= Invalid __global__ read of size 2 bytes"
        echo "========= ERROR SUMMARY: 3 errors" ;;
    *synccheck*"triton dense") exit 7 ;;
    *--version*) echo "Version 1" ;;
    *) echo "========= ERROR SUMMARY: 0 errors" ;;
esac
"""


@pytest.fixture
def tool(monkeypatch, tmp_path):
    """A sanitizer that finds what it is told to, over launches that succeed at once."""
    program = tmp_path / "compute-sanitizer"
    program.write_text(TOOL)
    program.chmod(0o755)
    launch = tmp_path / "launch.py"
    launch.write_text("")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(sanitize, "__file__", str(launch))
    monkeypatch.setattr(sanitize, "LIMIT", 2)
    monkeypatch.setattr(sanitize, "kernels", lambda: ["triton dense", "cute dense"])
    return launch


@pytest.mark.usefixtures("tool")
def test_every_tool_and_kernel_has_a_line_and_one_that_hangs_is_named(capfd):
    assert sanitize.main() == 1
    said = [line.split(None, 3) for line in capfd.readouterr().out.splitlines()]
    verdicts = {
        tuple(words[:3]): words[3] for words in said if words[1:2] in (["triton"], ["cute"])
    }
    assert verdicts == {
        ("racecheck", "triton", "dense"): "nothing found",
        ("racecheck", "cute", "dense"): "not finished after 2 s",
        ("memcheck", "triton", "dense"): "3 reports",
        ("memcheck", "cute", "dense"): "nothing found",
        ("synccheck", "triton", "dense"): "failed with status 7",
        ("synccheck", "cute", "dense"): "nothing found",
    }


def test_a_kernel_that_does_not_run_is_not_given_to_a_tool(tool, capfd):
    tool.write_text("import sys; sys.exit(sys.argv[1].startswith('triton'))")
    assert sanitize.main() == 1
    out = capfd.readouterr().out
    assert "no tool    triton dense      failed with status 1" in out
    assert "memcheck   triton dense" not in out
    assert "memcheck   cute dense        nothing found" in out


def test_a_tool_that_is_absent_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sanitize, "glob", lambda pattern: [])
    with pytest.raises(FileNotFoundError, match="compute-sanitizer"):
        sanitize.main()


@pytest.mark.parametrize(
    "kernel", [f"triton {x}" for x in (*sanitize.SPARSE, "quantised", *sanitize.FORCED)]
)
def test_every_attention_kernel_has_something_to_do(kernel):
    out = sanitize.result(kernel, "cpu")
    assert torch.isfinite(out).all()
    # A route and a vote leave something out, codes are rounded.
    if kernel not in ("triton dense", "triton split"):
        assert not torch.equal(out, sanitize.result("triton dense", "cpu"))


@pytest.mark.parametrize("name", sanitize.QUANTISERS)
def test_the_quantisers_run(name):
    assert sanitize.launch(f"quantiser {name}", device="cpu") == 0


@pytest.mark.parametrize("value", [1.0, torch.nan])
def test_a_result_that_differs_or_is_not_a_number_fails(monkeypatch, value):
    results = {"cuda": torch.full((4,), value), "cpu": torch.zeros(4)}
    monkeypatch.setattr(sanitize, "result", lambda kernel, device: results[device])
    assert sanitize.launch("triton dense") == 1


@pytest.mark.parametrize("name", sanitize.GROUPS)
def test_a_small_vote_is_forced_onto_groups_that_serve_it_and_onto_nothing_else(name, monkeypatch):
    launch = pytest.importorskip("blockattn.impl.triton.launch", reason="needs triton (Linux)")
    q = torch.zeros(1, 330, 2, 128, dtype=torch.bfloat16)
    tile = int(name.split()[1])
    problem = make_problem(q, q, q, skip_threshold=0.2, skip_tile=(tile, tile))
    assert not launch.configure(problem).groups
    with sanitize.forced(name), pytest.raises(RuntimeError, match="does not serve"):
        launch.configure(problem)
    with sanitize.forced(name), monkeypatch.context() as changed:
        changed.setattr(launch, "groups_serve", lambda problem: True)
        config = launch.configure(problem)
    assert config.groups
    assert (config.rows, config.columns) == (tile, tile)
    assert not launch.configure(problem).groups


def test_keys_are_forced_into_shares():
    launch = pytest.importorskip("blockattn.impl.triton.launch", reason="needs triton (Linux)")
    q = torch.zeros(1, 330, 2, 128, dtype=torch.bfloat16)
    problem = make_problem(q, q, q)
    with sanitize.forced("split"):
        assert launch.split_count(problem, 6) == sanitize.SPLITS > 1
    assert launch.split_count(problem, 6) == 1


def test_a_result_of_a_gpu_is_that_of_the_forced_kernel(monkeypatch):
    """The call runs while the kernel is forced; the CPU stands for the GPU."""
    launch = pytest.importorskip("blockattn.impl.triton.launch", reason="needs triton (Linux)")
    seen = []

    def call(*data, impl):
        seen.append((impl, launch.split_count(None, 6)))
        return data[0]

    monkeypatch.setattr(sanitize, "SPARSE", {"dense": call})
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *rest: self)
    sanitize.result("triton split", "cuda")
    assert seen == [("triton", sanitize.SPLITS)]


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0)])
def test_kernels_with_groups_are_launched_on_hopper_alone(capability, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    names = sanitize.kernels()
    assert "triton split" in names
    groups = [name for name in names if name.startswith("triton groups")]
    assert len(groups) == (len(sanitize.GROUPS) if capability == (9, 0) else 0)


def test_kernels_are_those_whose_packages_are_here(monkeypatch):
    monkeypatch.setattr(sanitize, "find_spec", lambda name: None if name == "cutlass" else object())
    assert not any(name.startswith("cute") for name in sanitize.kernels())
    monkeypatch.setattr(sanitize, "find_spec", lambda name: object())
    assert sum(name.startswith("cute") for name in sanitize.kernels()) == len(sanitize.SPARSE)
