"""The GPU benchmark measures what it says: rehearsed on the CPU with planted times.

The kernels run in the interpreter at tiny sizes, so every call that would be timed is a real one;
the times are planted, so every figure can be predicted.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from blockattn.impl import cute, flash, registry
from blockattn.impl import triton as kernels
from blockattn.impl.cute.variant import Variant
from blockattn.problem import make_problem
from workbench.bench import (
    compile_rows,
    figure,
    gpu,
    inputs,
    kernel_rows,
    own,
    parity,
    peers,
    report,
    sol_rows,
    timing,
)
from workbench.bench.cases import Case, Run
from workbench.bench.inputs import Bench, Sizes
from workbench.bench.roofline import Ceilings, Work, attention_work, measure_ceilings
from workbench.bench.targets import GPU_ROWS, GPU_TARGETS, verdict
from workbench.cli import app
from workbench.views import draw_break_even, draw_targets, new_figure

ROOT = Path(__file__).resolve().parent.parent
TINY = Sizes(
    long=(1, 12, 16),
    short=(1, 8, 16),
    check=(1, 11, 18),
    heads=1,
    check_heads=1,
    head_dim=64,
    densities=(0.34,),
    taus=(2.0, -1000.0),
    repeats=2,
    matrix=16,
    copy_bytes=2**12,
)
SECONDS = {
    "dense sdpa default": 20.0,
    "sdpa default": 20.0,
    "triton": 5.0,
    "triton traced": 5.1,
    "cute": 2.5,
    "prepare + route, cute": 0.4,
    "cute vote": 4.2,
    "cute no vote": 4.0,
    "prepare": 0.1,
    "prepare + route": 0.3,
    "attend": 4.5,
    "triton, lists made in the call": 6.0,
    "vote": 10.0,
    "no vote": 8.0,
    "no vote, its tiles": 7.0,
    "tau 2": 4.0,
    "tau -1000": 30.0,
    "product": 1.0,
    "copy": 1.0,
}


def planted(calls, repeats):
    """Runs every call once and says it took what the table has, 1 s where it has nothing."""
    for call in calls.values():
        call()
    return {name: [SECONDS.get(name, 1.0)] * repeats for name in calls}


EVERY_DENSE_PEER = peers.dense_peers


def only_torch(q, k, v):
    """The same baseline on every machine."""
    return {"sdpa default": EVERY_DENSE_PEER(q, k, v)["sdpa default"]}


@pytest.fixture
def without_parity(monkeypatch):
    """For tests of what comes after it."""
    monkeypatch.setattr(gpu, "check_parity", lambda *_: {})


@pytest.fixture
def bench(monkeypatch):
    pytest.importorskip("triton", reason="needs triton (Linux)")
    monkeypatch.setattr(kernels, "DEVICES", ("cuda", "cpu"))
    monkeypatch.setattr(peers, "dense_peers", only_torch)
    missing = {"flash-attn-4": peers.Absent("not installed: planted")}
    monkeypatch.setattr(peers, "block_mask_peers", lambda *_: missing)
    return Bench(
        TINY,
        device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
        dtype=torch.float16,
        timer=planted,
        count_syncs=lambda call: 1,
        host_seconds=lambda call, repeats: 2e-4,
        clocks=lambda: {"clocks.sm": 1980.0},
    )


@pytest.fixture
def run(bench):
    return Run(bench, Ceilings(flops=1e6, bytes=1e3), ("triton",))


@pytest.fixture
def both(run, monkeypatch):
    """A run in which the CuTe kernel is served, by Triton's kernels in its place."""
    from blockattn.impl.cute import launch as hopper
    from blockattn.impl.triton import launch

    planted = [
        replace(item, obstacles=kernels.obstacles, run=kernels.run) if item.name == "cute" else item
        for item in registry.implementations()
    ]
    monkeypatch.setattr(registry, "_FASTEST_FIRST", tuple(planted))
    monkeypatch.setattr(hopper, "run", lambda problem, lists=None: launch.run(problem))
    run.impls = ("triton", "cute")
    return run


# -- figures from times ------------------------------------------------------------------------


def test_sol_is_measured_over_its_bound_and_preparation_over_dense(run):
    cases = sol_rows.sol_rows(run, {1, 4})
    assert [case.row for case in cases] == [1, 4, 4, 1, 4, 4]
    whole, share = cases[0], cases[1]
    assert whole.density is not None
    assert 0 < whole.density <= 1
    assert whole.measured["triton"] == pytest.approx(5.0 / ((whole.density + 1 / 64) * 20.0))
    assert whole.more["split"] == pytest.approx({"prepare": 0.1, "route": 0.2, "attend": 4.5})
    assert whole.more["speed_up"] == {"triton": 4.0}
    assert share.measured["triton"] == pytest.approx(100 * 0.3 / 20.0)
    assert f"density {whole.density:.4f}" in whole.setting
    assert "random" in cases[0].setting
    assert "video-like" in cases[3].setting


def test_the_ladder_ends_dense_and_gives_the_break_even_density(run):
    data = run.bench.qkv("random", TINY.long)
    found = sol_rows.ladder(run, data)
    assert found["densities"][-1] == 1.0
    first = found["densities"][0]
    assert first < 1
    expected = first + (1 - first) * (20 - 4) / (30 - 4)
    assert found["break_even_density"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("densities", "seconds", "expected"),
    [
        ([0.1, 0.5, 1.0], [1, 5, 10], 0.8),
        ([1.0, 0.1, 0.5], [10, 1, 5], 0.8),
        ([0.1, 1.0], [1, 7], 1.0),
        ([0.1, 1.0], [9, 10], None),
        ([0.2, 1.0], [4, 8], 1.0),
    ],
)
def test_break_even_is_where_the_call_takes_as_long_as_dense(densities, seconds, expected):
    found = sol_rows.break_even(densities, seconds, 8.0)
    assert found == (None if expected is None else pytest.approx(expected))


def test_a_block_mask_is_measured_by_its_rate_over_the_dense_rate(run):
    (short, long) = kernel_rows.mask_rows(run, {3})
    assert short.density == pytest.approx(0.5)
    assert long.density == pytest.approx(1 / 3)
    assert short.measured["triton"] == pytest.approx(0.5 * 20 / 5.0)
    assert long.more["flops_per_second"]["triton"] == pytest.approx(4 * 192 * 64 * 64 / 5.0)


def test_a_peer_that_runs_is_measured_like_our_own(run, monkeypatch):
    monkeypatch.setattr(
        peers,
        "block_mask_peers",
        lambda q, k, v, route: {"other": lambda: q, "broken": peers.Absent("fails here: why")},
    )
    monkeypatch.setitem(SECONDS, "other", 2.0)
    case = kernel_rows.mask_rows(run, {3})[0]
    assert case.peers == {"other": pytest.approx(0.5 * 20 / 2.0)}
    assert run.absent["block mask: broken"] == "fails here: why"


def test_syncs_are_counted_only_where_a_known_wait_is_counted(run):
    run.bench.count_syncs = lambda call: 0
    with pytest.raises(RuntimeError, match="cannot be counted"):
        kernel_rows.sync_rows(run, {5})


def test_every_public_call_is_asked_for_syncs(run):
    counts = iter([1, *[0] * 20])
    run.bench.count_syncs = lambda call: (call(), next(counts))[1]
    cases = kernel_rows.sync_rows(run, {5})
    names = " ".join(case.setting for case in cases)
    for word in ("sol_attention", "with a route", "skip threshold", "mxfp8", "nvfp4", "fp8 v"):
        assert word in names
    assert all(case.measured == {"triton": 0.0} for case in cases)
    assert all(case.more["host_seconds"] == 2e-4 for case in cases)


def test_a_trace_is_measured_as_a_share_of_the_call(run):
    cases = kernel_rows.trace_rows(run, {6})
    assert [case.measured["triton"] for case in cases] == [pytest.approx(2.0)] * 2


def test_the_skip_vote_is_measured_against_the_faster_of_two_dense_tilings(run, monkeypatch):
    case, larger, *_ = kernel_rows.skip_rows(run, {7})
    assert case.measured["triton"] == pytest.approx(10 / 7)
    assert "128 x 128" in larger.baseline
    assert case.more["skipped"] == 0
    assert case.more["speed_up_over"]["no vote"] == pytest.approx(0.8)
    assert case.more["speed_up_over"]["no vote, its tiles"] == pytest.approx(0.7)
    assert "64 x 64" in case.baseline
    monkeypatch.setitem(SECONDS, "no vote", 5.0)
    assert kernel_rows.skip_rows(run, {7})[0].measured["triton"] == pytest.approx(10 / 5)


@pytest.mark.parametrize(("groups", "name"), [(True, "vote_groups"), (False, "attention")])
def test_a_row_about_the_vote_names_the_kernel_that_serves_it(run, monkeypatch, groups, name):
    from blockattn.impl.triton import launch

    data = run.bench.qkv("random", TINY.long)
    vote = make_problem(*data, skip_threshold=0.0, skip_tile=(64, 64))
    with monkeypatch.context() as other:
        other.setattr(launch, "votes_in_groups", lambda problem: groups)
        assert own.kernel_of_vote(vote) == name
    monkeypatch.setattr(own, "kernel_of_vote", lambda vote: name)
    case = kernel_rows.skip_case(run, "random", data, 7, 0.0, (64, 64))
    assert f"kernel {name} that of attention" in case.baseline


def test_the_cute_column_stands_beside_the_triton_column_in_every_row(both):
    whole, share, *_ = sol_rows.sol_rows(both, {1, 4})
    assert whole.measured["cute"] == pytest.approx(whole.measured["triton"] / 2)
    assert share.measured == {"triton": pytest.approx(1.5), "cute": pytest.approx(2.0)}
    assert {"attend, cute", "lists, cute"} <= set(whole.seconds)
    (mask, _) = kernel_rows.mask_rows(both, {3})
    assert mask.measured["cute"] == pytest.approx(0.5 * 20 / 2.5)
    assert {"cute", "cute, lists made in the call"} <= set(mask.seconds)
    case = kernel_rows.skip_rows(both, {7})[0]
    assert case.measured == {"triton": pytest.approx(10 / 7), "cute": pytest.approx(4.2 / 4.0)}
    assert case.more["speed_up_over"]["cute vote"] == pytest.approx(0.42)
    row = report.row_record(7, [case], {})
    assert row["verdict"]["cute"] == "missed"


def test_a_kernel_in_a_new_process_is_timed_compiled_and_from_disk(run, monkeypatch):
    asked = []
    monkeypatch.setattr(cute, "obstacles", lambda problem: [])
    monkeypatch.setattr(
        compile_rows,
        "measure",
        lambda variant, folder, source: (
            asked.append(source),
            2.0 if source == "compiled" else 0.1 * len(asked),
        )[1],
    )
    cases = compile_rows.compile_rows(run, {14})
    assert len(cases) == 2 * len(compile_rows.VARIANTS)
    assert asked == ["compiled", "disk", "disk", "disk"] * len(compile_rows.VARIANTS)
    row = report.row_record(14, cases, {})
    assert row["measured"] == {"cute": 2.0, "cute from disk": pytest.approx(0.7)}
    assert row["verdict"] == {"cute": "aim", "cute from disk": "missed"}
    assert "cute from disk 0.7 s" in report.as_text(
        {"machine": {"name": "x"}, "date": "", "versions": {"torch": ""}, "absent": {},
         "rows": {"14": row}}
    )  # fmt: skip


def test_without_the_cute_stack_row_fourteen_is_left_out_by_name(run, monkeypatch):
    monkeypatch.setattr(cute, "obstacles", lambda problem: ["tvm-ffi is not installed"])
    assert compile_rows.compile_rows(run, {14}) == []
    assert run.absent["row 14"] == "tvm-ffi is not installed"


def test_a_process_that_fails_or_loads_otherwise_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr(compile_rows, "SCRIPT", "raise SystemExit('no compiler')")
    with pytest.raises(RuntimeError, match="no compiler"):
        compile_rows.measure(Variant(), tmp_path, "compiled")
    answer = '{"source": "disk", "seconds": 0.1, "note": "why"}'
    monkeypatch.setattr(compile_rows, "SCRIPT", f"print({answer!r})")
    assert compile_rows.measure(Variant(), tmp_path, "disk") == 0.1
    with pytest.raises(RuntimeError, match="came from disk, not compiled: why"):
        compile_rows.measure(Variant(), tmp_path, "compiled")


def test_the_threshold_of_row_eight_drops_at_least_what_was_asked(run, monkeypatch):
    monkeypatch.setattr(
        kernel_rows, "skipped_share", lambda data, threshold, tile: min(0.9, threshold / 2)
    )
    threshold = kernel_rows.threshold_for(run.bench.qkv("random", TINY.long), 0.7, kernels.BLOCK)
    assert threshold is not None
    assert threshold == pytest.approx(1.4, rel=0.01)
    assert threshold >= 1.4
    monkeypatch.setattr(kernel_rows, "skipped_share", lambda data, threshold, tile: 0.1)
    assert kernel_rows.threshold_for(run.bench.qkv("random", TINY.long), 0.7, kernels.BLOCK) is None


def test_data_that_skips_too_little_is_left_out_by_name(run, monkeypatch):
    random = run.bench.qkv("random", TINY.long)
    monkeypatch.setattr(
        kernel_rows,
        "threshold_for",
        lambda data, share, tile: 2.0 if data is random and tile == kernels.BLOCK else None,
    )
    (case,) = kernel_rows.skip_rows(run, {8})
    assert "random" in case.setting
    assert case.measured["triton"] == pytest.approx(7 / 10)
    assert case.density == pytest.approx(1 - case.more["skipped"])
    assert "drops 70%" in run.absent["row 8, video-like, tiles (64, 64)"]
    assert "drops 70%" in run.absent["row 8, random, tiles (128, 128)"]
    monkeypatch.setattr(kernel_rows, "threshold_for", lambda *_: None)
    with pytest.raises(RuntimeError, match="no lambda"):
        kernel_rows.skip_rows(run, {8})


def test_dropped_tiles_are_counted_by_the_kernel_itself(run):
    data = run.bench.qkv("random", TINY.long)
    assert kernel_rows.skipped_share(data, 0.0, kernels.BLOCK) == 0
    assert 0 < kernel_rows.skipped_share(data, 1e9, kernels.BLOCK) < 1


def test_quantisers_are_measured_over_the_time_of_their_bytes(run):
    cases = kernel_rows.quant_rows(run, {9})
    x = run.bench.qkv("random", TINY.long)[0]
    assert len(cases) == len(kernel_rows.QUANTISERS)
    assert set(kernel_rows.READS) == set(kernel_rows.QUANTISERS)
    for case, (name, encode) in zip(cases, kernel_rows.QUANTISERS.items()):
        reads = 1 if name == "mxfp8" else 2
        size = reads * x.nbytes + kernel_rows.encoded_bytes(encode(x))
        assert case.measured == {"triton": pytest.approx(1.0 / (size / 1e3))}
        assert f"{size:,} bytes, x read {('once', 'twice')[reads - 1]}" in case.setting


def test_the_roofline_is_set_by_the_slower_of_the_two():
    ceilings = Ceilings(flops=100.0, bytes=10.0)
    found = Work(flops=1000.0, bytes=50.0).against(20.0, ceilings)
    assert (found["floor_seconds"], found["floor_set_by"]) == (10.0, "product")
    assert found["time_over_floor"] == 2.0
    assert Work(0.0, 50.0).against(20.0, ceilings)["floor_set_by"] == "copy"


def test_the_work_of_attention_counts_both_products_and_every_tensor_once():
    q = torch.zeros(2, 128, 4, 64, dtype=torch.float16)
    work = attention_work(q, q, 0.5, summaries=2)
    assert work.flops == 4 * 2 * 4 * 128 * (64 + 2) * 64
    assert work.bytes == 4 * q.nbytes


def test_ceilings_are_rates_of_what_was_timed(bench):
    found = measure_ceilings(bench)
    assert found == Ceilings(flops=2 * 16**3, bytes=2 * 2**12)


# -- parity ------------------------------------------------------------------------------------


def test_every_timed_operation_agrees_with_the_reference(bench):
    checks = parity.check_parity(bench, ("triton",))
    assert all(check.holds for check in checks.values())
    assert {row for check in checks.values() for row in check.rows} == set(GPU_ROWS) - {5, 14}


def test_a_wrong_result_names_its_rows_and_the_figure():
    checks = {
        "a": parity.Check((1, 4), 2e-2, 1e-2),
        "b": parity.Check((4,), math.nan, 1.0),
        "c": parity.Check((3,), 0.0, 0.0),
    }
    found = parity.broken(checks)
    assert set(found) == {1, 4}
    assert "a: 0.02, allowed 0.01" in found[1]
    assert "b: nan" in found[4]


def test_a_wrong_row_is_not_timed_and_fails_the_run(bench, monkeypatch):
    wrong = {"planted": parity.Check((9,), 1.0, 0.0)}
    monkeypatch.setattr(gpu, "check_parity", lambda *_: wrong)
    monkeypatch.setitem(gpu.GROUPS, (9,), lambda *_: pytest.fail("timed a wrong result"))
    made = gpu.bench_gpu((9,), bench=bench)
    assert "differs from the reference" in made["rows"]["9"]["failed"]


def test_an_implementation_that_is_wrong_is_left_out_of_its_rows_alone(both, monkeypatch):
    wrong = {"cute mask, random": parity.Check((3,), 2.0, 1.0, "cute")}
    monkeypatch.setattr(gpu, "check_parity", lambda *_: wrong)
    monkeypatch.setattr(gpu, "served_by", lambda data: ("triton", "cute"))
    made = gpu.bench_gpu((3, 6), bench=both.bench)
    assert set(made["rows"]["3"]["measured"]) == {"triton"}
    assert set(made["rows"]["6"]["measured"]) == {"triton", "cute"}
    assert "cute mask, random: 2, allowed 1" in made["absent"]["row 3: cute"]
    assert not made["parity"]["cute mask, random"]["holds"]


def test_a_row_in_which_every_implementation_is_wrong_fails(bench, monkeypatch):
    wrong = {"triton mask": parity.Check((3,), 2.0, 1.0, "triton")}
    monkeypatch.setattr(gpu, "check_parity", lambda *_: wrong)
    monkeypatch.setitem(gpu.GROUPS, (3,), lambda *_: pytest.fail("timed a wrong result"))
    made = gpu.bench_gpu((3,), bench=bench)
    assert "differs from the reference" in made["rows"]["3"]["failed"]


def test_a_peer_that_differs_from_the_reference_is_not_timed():
    data = tuple(torch.randn(1, 64, 1, 16) for _ in range(3))
    honest = peers.dense_peers(*data)["sdpa default"]
    found = parity.checked_peers({"good": honest, "bad": lambda: 2 * honest()}, data, {})
    assert found["good"] is honest
    assert "differs" in found["bad"].reason


# -- peers -------------------------------------------------------------------------------------


def raises(error):
    def call():
        raise error

    return call


def test_a_missing_library_is_named_with_the_cause():
    for error in (ImportError("no module of that name"), OSError("libcuda.so: cannot open")):
        found = peers.attempt(raises(error))
        assert isinstance(found, peers.Absent)
        assert found.reason.startswith(f"not installed: {type(error).__name__}")
        assert str(error) in found.reason


def test_a_library_that_fails_is_named_and_a_broken_import_is_loud():
    found = peers.attempt(lambda: raises(RuntimeError("no kernel for this GPU")))
    assert isinstance(found, peers.Absent)
    assert found.reason == "fails here: RuntimeError: no kernel for this GPU"
    with pytest.raises(AttributeError):
        peers.attempt(raises(AttributeError("renamed")))


def test_a_library_that_its_adapter_refuses_is_absent_with_every_reason():
    q = torch.randn(1, 64, 1, 16)
    found = peers.attempt(lambda: peers._adapter(flash, make_problem(q, q, q)))
    assert isinstance(found, peers.Absent)
    assert "needs a CUDA GPU" in found.reason
    assert "head dim 16" in found.reason


def test_without_a_gpu_only_torch_is_a_peer():
    q = torch.randn(1, 64, 1, 16)
    assert set(peers.working(peers.dense_peers(q, q, q))) == {"sdpa default"}
    route = inputs.random_mask(q, 1.0)
    absent = peers.reasons(peers.block_mask_peers(q, q, q, route))
    assert set(absent) == {"cudnn block-sparse", "flash-attn-4", "flexattention"}
    assert all("needs a CUDA GPU" in reason for reason in absent.values())


# -- timing, with a GPU that only keeps a diary -------------------------------------------------


class Diary:
    """Stands in for the GPU: events carry the position at which they were recorded."""

    def __init__(self, monkeypatch):
        self.lines: list[str] = []
        diary = self.lines

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing
                self.at = -1

            def record(self):
                self.at = len(diary)

            def elapsed_time(self, other):
                return 1e3 * (other.at - self.at)

        class Buffer:
            def zero_(self):
                diary.append("flush")

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: diary.append("wait"))
        monkeypatch.setattr(torch, "empty", lambda *_, **__: Buffer())

    def call(self, name, steps=1):
        return lambda: self.lines.extend([name] * steps)


def test_calls_on_a_gpu_alternate_behind_a_backlog_each_after_a_flush(monkeypatch):
    diary = Diary(monkeypatch)
    calls = {"a": diary.call("a"), "b": diary.call("b", steps=3)}
    samples = timing.interleaved_on_gpu(calls, 2)
    warm_up = ["a", "b", "b", "b"] * 2 + ["wait"]
    assert diary.lines[: len(warm_up)] == warm_up
    a, b = ["flush", "a"], ["flush", "b", "b", "b"]
    rounds = [["flush"] * timing.BACKLOG + one + ["wait"] for one in (a + b, b + a)]
    length = len(rounds[0])
    found = diary.lines[len(warm_up) :]
    assert len(found) == 2 * length
    assert all(found[start : start + length] in rounds for start in (0, length))
    assert samples == {"a": [1.0, 1.0], "b": [3.0, 3.0]}


def test_every_call_follows_every_other_one_and_two_runs_keep_one_order(monkeypatch):
    diary = Diary(monkeypatch)
    calls = {name: diary.call(name) for name in "abc"}

    def order():
        diary.lines.clear()
        samples = timing.interleaved_on_gpu(calls, 21)
        assert samples == {name: [1.0] * 21 for name in "abc"}
        return "".join(line for line in diary.lines if line in calls)[6:]

    first = order()
    rounds = [first[start : start + 3] for start in range(0, len(first), 3)]
    assert all(sorted(one) == list("abc") for one in rounds)
    assert len({pair for one in rounds for pair in (one[:2], one[1:])}) == 6
    assert order() == first


def test_the_launch_time_is_taken_behind_a_backlog(monkeypatch):
    diary = Diary(monkeypatch)
    assert timing.host_seconds(diary.call("a"), 1) < 1
    backlog = ["flush"] * 20 * timing.BACKLOG
    assert diary.lines == ["a", "wait", *backlog, "a", "wait"]


def test_only_warnings_about_waits_are_counted_and_the_mode_is_restored(monkeypatch):
    modes = []

    def set_mode(mode):
        modes.append(mode)
        warnings.warn("the mode may not detect all synchronizing operations", stacklevel=1)

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)

    def call():
        if modes:
            for text in ("called a synchronizing CUDA operation", "something else"):
                warnings.warn(text, stacklevel=1)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert timing.count_syncs(call) == 1
    assert modes == ["warn", 0]


def test_clocks_are_absent_without_the_tool_that_reads_them(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    gpu_without_uuid = SimpleNamespace()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu_without_uuid)
    monkeypatch.setenv("PATH", "")
    assert timing.gpu_clocks() is None


# -- inputs, clocks, targets -------------------------------------------------------------------


@pytest.mark.parametrize("density", [0.01, 0.3, 1.0])
def test_a_random_mask_keeps_the_same_number_of_blocks_in_every_row(density):
    q = torch.zeros(1, 64 * 10, 2, 16)
    route = inputs.random_mask(q, density)
    assert set(route.counts().flatten().tolist()) == {max(1, round(10 * density))}
    assert route == inputs.random_mask(q, density)
    assert density == 1 or route != inputs.random_mask(q, density, seed=2)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1980, 3201, 612.50, 41\n", [1980.0, 3201.0, 612.5, 41.0]),
        ("1980, [N/A], 612.50, 41\n", None),
        ("", None),
        ("No devices were found\n", None),
    ],
)
def test_clocks_are_numbers_or_nothing(text, expected):
    found = timing.parse_clocks(text)
    assert found == (None if expected is None else dict(zip(timing.CLOCKS, expected)))


def test_every_row_has_levels_for_both_kinds_of_kernels():
    assert (*range(1, 10), 14) == GPU_ROWS
    for row, target in GPU_TARGETS.items():
        assert set(target.levels) == {"cute", "cute from disk" if row == 14 else "triton"}
        for must, aim in target.levels.values():
            assert verdict(aim, must, aim, more_is_better=target.more_is_better) == "aim"
            assert verdict(must, must, aim, more_is_better=target.more_is_better) in ("must", "aim")


# -- the report --------------------------------------------------------------------------------


def test_the_headline_of_a_row_is_its_worst_case():
    cases = [Case(1, "good", "b", {"triton": 1.3}), Case(1, "bad", "b", {"triton": 1.7})]
    row = report.row_record(1, cases, {})
    assert row["measured"] == {"triton": 1.7}
    assert row["setting"] == {"triton": "bad"}
    assert row["verdict"] == {"triton": "missed"}
    more = report.row_record(3, [Case(3, "x", "b", {"triton": v}) for v in (0.7, 0.6)], {})
    assert more["measured"] == {"triton": 0.6}
    assert more["verdict"] == {"triton": "must"}


@pytest.mark.usefixtures("without_parity")
def test_a_run_is_written_after_every_group_and_read_again(bench):
    lengths = []
    made = gpu.bench_gpu((3, 6), bench=bench, keep=lambda now: lengths.append(len(now["rows"])))
    assert lengths == [1, 2]
    again = json.loads(json.dumps(made, allow_nan=False))
    assert {"date", "machine", "versions", "rows", "ceilings", "parity", "absent"} <= set(again)
    assert again["versions"]["torch"] == torch.__version__
    for number, row in again["rows"].items():
        assert set(row["measured"]) == {"triton"}, number
        assert set(row["setting"]) == set(row["baseline"]) == {"triton"}
        assert row["clocks"] == {key: {"clocks.sm": 1980.0} for key in ("before", "after")}
        assert all(case["samples"] and case["seconds"] for case in row["cases"])
    text = report.as_text(again)
    assert "row 3" in text
    assert "block mask: flash-attn-4: not installed: planted" in text


@pytest.mark.usefixtures("without_parity")
def test_a_row_that_raises_is_a_row_and_the_others_are_measured(bench, monkeypatch):
    monkeypatch.setitem(gpu.GROUPS, (3,), lambda *_: raises(RuntimeError("out of memory"))())
    made = gpu.bench_gpu((3, 6), bench=bench)
    assert made["rows"]["3"]["failed"] == "RuntimeError: out of memory"
    assert made["rows"]["6"]["measured"]
    assert "FAILED: RuntimeError: out of memory" in report.as_text(made)


def test_rows_that_are_not_measured_here_are_refused(bench):
    for rows in ((), (10,), (1, 0)):
        with pytest.raises(ValueError, match="rows="):
            gpu.bench_gpu(rows, bench=bench)


@pytest.mark.usefixtures("without_parity")
def test_the_figure_is_drawn_from_the_file_alone(bench, tmp_path):
    made = gpu.bench_gpu((1, 2, 3, 7), bench=bench)
    made["rows"]["8"] = report.failed_row(8, "planted")
    path = tmp_path / "report.json"
    path.write_text(json.dumps(made))
    target = tmp_path / "made" / "report.png"
    done = CliRunner().invoke(app, ["bench", "draw", str(path), str(target)])
    assert done.exit_code == 0, done.output
    assert target.stat().st_size > 20_000


def test_scores_put_every_row_on_one_scale():
    less = report.row_record(1, [Case(1, "", "", {"triton": 3.3})], {})
    assert figure.scores(less) == [("triton", pytest.approx(0.5), pytest.approx(1.65 / 1.4))]
    more = report.row_record(8, [Case(8, "", "", {"triton": 2.8})], {})
    assert figure.scores(more) == [("triton", pytest.approx(2.0), pytest.approx(1.6 / 1.4))]
    zero = report.row_record(5, [Case(5, "", "", {"triton": 0.0})], {})
    assert math.isnan(figure.scores(zero)[0][1])


def test_a_figure_that_reaches_its_requirement_is_filled_and_another_hollow():
    ax = new_figure().subplots()
    draw_targets(ax, ["a", "b", "c"], [1.5, 0.5, math.nan], [2.0, 2.0, math.nan], ["x"] * 3)
    circles = [line for line in ax.lines if line.get_marker() == "o"]
    filled, hollow = circles
    assert list(filled.get_xdata()) == [1.5]
    assert hollow.get_markerfacecolor() == "white"
    assert hollow.get_xdata()[0] == 0.5


def test_the_break_even_density_is_marked_on_the_line_of_equal_time():
    ax = new_figure().subplots()
    draw_break_even(ax, {"a": ([0.1, 1.0], [8.0, 0.9], 0.9), "b": ([0.1, 1.0], [0.5, 0.2], None)})
    marks = [line for line in ax.lines if len(line.get_xdata()) == 1]
    assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in marks] == [(0.9, 1.0)]
    texts = [text.get_text() for text in ax.get_legend().get_texts()]
    assert texts[:2] == ["a, break-even 0.90", "b, break-even none"]


# -- the commands ------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA GPU")
def test_without_a_gpu_the_command_says_so():
    done = CliRunner().invoke(app, ["bench", "gpu"])
    assert isinstance(done.exception, ValueError)
    assert "torch sees no CUDA GPU" in str(done.exception)


def test_a_report_that_is_none_is_refused(tmp_path):
    for text, message in (("{", "is not JSON"), ("[]", "is not a report")):
        path = tmp_path / "report.json"
        path.write_text(text)
        done = CliRunner().invoke(app, ["bench", "draw", str(path), str(tmp_path / "a.png")])
        assert isinstance(done.exception, ValueError)
        assert message in str(done.exception)


def test_a_report_that_is_not_there_is_refused_with_the_way_to_make_one(tmp_path):
    done = CliRunner().invoke(app, ["bench", "draw", str(tmp_path / "no.json"), "a.png"])
    assert isinstance(done.exception, FileNotFoundError)
    assert "no.json': no such file; make one with `workbench bench gpu" in str(done.exception)


def test_it_starts_without_the_packages_of_the_command_line():
    code = (
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name.split('.')[0] in {'pydantic', 'typer', 'rich', 'yaml', 'matplotlib',\n"
        "                                  'packaging', 'tqdm', 'ipywidgets'}:\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "from workbench.bench import gpu\n"
        "sys.exit(gpu.main(['--rows', '0']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 2
    assert "rows=[0]: must be some of 1, 2" in done.stderr


def test_the_script_for_a_gpu_machine_is_sound_bash():
    done = subprocess.run(
        ["bash", "-n", str(ROOT / ".ci" / "gpu")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (ROOT / ".ci" / "gpu").stat().st_mode & 0o100


# -- on a GPU ----------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_wait_is_counted_and_a_plain_kernel_is_not():
    x = torch.ones(8, device="cuda")
    assert timing.count_syncs(lambda: x[0].item()) >= 1
    assert timing.count_syncs(lambda: x + 1) == 0


@pytest.mark.gpu
def test_gpu_times_grow_with_the_work():
    small, large = (torch.randn(n, n, device="cuda", dtype=torch.float16) for n in (1024, 8192))
    calls = {"small": lambda: small @ small, "large": lambda: large @ large}
    samples = timing.interleaved_on_gpu(calls, 3)
    assert {name: len(values) for name, values in samples.items()} == {"small": 3, "large": 3}
    assert timing.ratio(samples, "large", "small") > 20
