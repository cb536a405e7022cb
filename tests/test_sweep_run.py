"""Running sweeps: a process for each case, failures as rows, interruptions, provenance."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.sweep_inputs import (
    dies,
    job,
    new_store,
    plan,
    plan_fields,
    refuses,
    running,
    small,
    threads,
    wait_until,
    write_plan,
    write_weights,
)
from workbench.provenance import sha256_of
from workbench.sweep import load
from workbench.sweep.plan import make_plan
from workbench.sweep.processes import ProcessPerTask, TaskError
from workbench.sweep.run import Workers, local_workers, run_cases, visible_gpus
from workbench.sweep.session import resume_sweep, run_sweep
from workbench.sweep.store import Outcome, Store
from workbench.sweep.worker import in_subprocess, run_content


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_weights(tmp_path_factory.mktemp("weights"))


def run_with(workers: Workers, path: Path, **fields: Any) -> None:
    with new_store(path, plan(**fields)) as store:
        store.begin({})
        with workers:
            run_cases(store, workers)


# -- processes ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def processes():
    with ProcessPerTask([{"PLACE": "a"}, {"PLACE": "b"}]) as executor:
        yield executor


def where() -> tuple[int, str]:
    time.sleep(0.3)
    return os.getpid(), os.environ["PLACE"]


def fails(error: BaseException | int) -> None:
    if isinstance(error, int):
        os._exit(error)
    raise error


def unpicklable() -> Any:
    return lambda: None


def test_every_task_has_a_process_of_its_own_and_places_run_side_by_side(processes: Executor):
    found = [future.result() for future in [processes.submit(where) for _ in range(4)]]
    pids = {pid for pid, _ in found}
    assert len(pids) == 4
    assert os.getpid() not in pids
    assert sorted(place for _, place in found) == ["a", "a", "b", "b"]


@pytest.mark.parametrize(
    "error, reason",
    [
        (ValueError("two\n lines"), "ValueError: two lines"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (3, "the process ended with exit status 3 and gave no result"),
        (0, "the process ended with exit status 0 and gave no result"),
    ],
)
def test_a_failure_says_how_the_task_ended(processes: Executor, error: Any, reason: str):
    with pytest.raises(TaskError) as caught:
        processes.submit(fails, error).result()
    assert caught.value.failure.reason == reason
    assert ("in fails" in caught.value.failure.traceback) is isinstance(error, BaseException)


def test_a_result_that_cannot_travel_is_a_failure(processes: Executor):
    with pytest.raises(TaskError, match="exit status 1"):
        processes.submit(unpicklable).result()


def interrupts_are_blocked() -> bool:
    return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_ctrl_c_reaches_the_parent_alone_even_while_a_process_starts(processes: Executor):
    """What starts with the signal blocked prints no traceback of an import that it interrupts."""
    assert processes.submit(interrupts_are_blocked).result()


def test_the_parent_itself_can_be_interrupted(processes: Executor):
    processes.submit(where).result()
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_an_executor_that_nobody_waits_for_ends_its_processes():
    executor = ProcessPerTask([{}])
    future = executor.submit(time.sleep, 600)
    began = time.monotonic()
    while not executor._children:
        time.sleep(0.01)
    executor.shutdown(wait=False)
    with pytest.raises(TaskError, match="ended by SIGKILL"):
        future.result()
    assert time.monotonic() - began < 60


def lives_long(pid_file: str) -> None:
    Path(pid_file).write_text(str(os.getpid()))
    time.sleep(600)


def parent_of_a_task(pid_file: str) -> None:
    ProcessPerTask([{}]).submit(lives_long, pid_file)
    time.sleep(600)


def test_processes_die_with_the_one_that_started_them(tmp_path: Path):
    pid_file = tmp_path / "pid"
    parent = multiprocessing.get_context("spawn").Process(
        target=parent_of_a_task, args=(str(pid_file),)
    )
    parent.start()
    wait_until(lambda: pid_file.is_file() and pid_file.read_text() != "")
    pid = int(pid_file.read_text())
    os.kill(pid, 0)  # is alive
    parent.kill()
    parent.join()
    wait_until(lambda: not running(pid))


# -- cases --------------------------------------------------------------------------------------


def test_a_real_sweep_is_sparse_counted_and_above_its_control(weights: Path, tmp_path: Path):
    path = tmp_path / "a.db"
    written = write_plan(
        tmp_path / "plan.yaml", **small(weights, cases=[{"algorithm": "vsa", "vsa_sparsity": 0.5}])
    )
    counts = run_sweep(written, path, local_workers(2), command=["workbench", "sweep", "run"])
    assert counts == {"pending": 0, "running": 0, "done": 4, "failed": 0}
    table = load(path)
    control, *sparse = table.cases
    assert control.control
    assert control.metrics["density"] == 1
    assert control.metrics["sparse_calls"] == 0
    assert 0 < control.metrics["relative_l2"] < 1e-3
    for case in sparse:
        assert 0 < case.metrics["density"] < 1
        assert case.metrics["sparse_calls"] == 2 * 2  # layers x steps
        assert case.metrics["relative_l2"] > control.metrics["relative_l2"]
        assert 0 < case.metrics["attention_seconds"] < case.metrics["seconds"]
        assert case.metrics["seconds"] < case.metrics["case_seconds"]
        assert case.ran == (f"{case.attention['algorithm']}: eager",)
        assert any("triton" in reason for reason in case.fallbacks)
        assert case.flags == ()
    # Another process, started from nothing, and this one find the same numbers.
    content = plan(**small(weights)).cases()[1].content()
    exact = sparse[0].metrics
    for other in (in_subprocess(content), run_content(content)):
        assert other.metrics["relative_l2"] == exact["relative_l2"]
        assert other.metrics["psnr"] == exact["psnr"]


def test_the_database_says_what_ran_where(weights: Path, tmp_path: Path):
    path = tmp_path / "a.db"
    written = write_plan(tmp_path / "plan.yaml", **small(weights, seeds=[5]))
    run_sweep(written, path, threads(run_content, 1), command=["/bin/workbench", "sweep", "run"])
    with Store.open(path) as store:
        (run,) = store.runs()
        ((name, environment),) = store.environments().items()
        assert (
            store.plan["inputs"][f"{weights} weights"]
            == run["record"]["inputs"][f"{weights} weights"]
        )
        assert {case.provenance for case in store.table().done} == {name}
    assert run["record"]["command"] == ["workbench", "sweep", "run"]
    assert run["record"]["seeds"] == {"noise 0": 5}
    assert len(run["record"]["inputs"][f"{weights} weights"]["sha256"]) == 64
    assert environment["device"]["threads"] == 1
    assert {"driver", "clocks", "kind"} <= set(environment["device"])
    assert environment["versions"]["torch"]


def test_failed_cases_are_rows_with_their_reason_and_the_others_run(tmp_path: Path):
    path = tmp_path / "a.db"
    run_with(threads(refuses), path, seeds=[0, 1])
    table = load(path)
    failed = [case for case in table.cases if case.state == "failed"]
    assert [case.setting for case in failed] == ["sol_attn tau=1.5"] * 2
    assert {case.reason for case in failed} == {"ValueError: tau=1.5: not today"}
    assert len(table.done) == 4
    run_with(threads(job), path, seeds=[0, 1])  # nothing is left for it
    assert len(load(path).done) == 4
    with Store.open(path) as store:
        assert store.retry_failed() == 2
    run_with(threads(job), path, seeds=[0, 1])
    assert len(load(path).done) == 6


def test_a_killed_worker_fails_its_own_case_only(tmp_path: Path):
    path = tmp_path / "a.db"
    run_with(Workers(ProcessPerTask([{}, {}]), 2, dies), path)
    states = {case.setting: (case.state, case.reason) for case in load(path).cases}
    assert states["sol_attn tau=1.5"] == (
        "failed",
        "the process was ended by SIGKILL; was the memory exhausted?",
    )
    assert states["sol_attn tau=0.5"] == ("done", None)


def test_a_setting_that_the_model_refuses_is_a_failed_case(weights: Path, tmp_path: Path):
    path = tmp_path / "a.db"
    fields = small(weights, grid={"dense_layers": [[0], [7]]})
    run_with(threads(run_content, 1), path, **fields)
    reasons = {case.setting: case.reason for case in load(path).cases}
    assert "dense_layers" in str(reasons["sol_attn tau=1 dense_layers=7"])
    assert reasons["sol_attn tau=1 dense_layers=0"] is None


def interrupted(content: Any) -> Any:
    raise AssertionError("never runs")


def test_an_interrupted_run_gives_its_cases_back(tmp_path: Path):
    class Interrupted(ThreadPoolExecutor):
        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
            raise KeyboardInterrupt

    written = write_plan(tmp_path / "plan.yaml")
    with pytest.raises(KeyboardInterrupt):
        run_sweep(written, tmp_path / "a.db", Workers(Interrupted(1), 1, interrupted))
    with Store.open(tmp_path / "a.db") as store:
        assert store.counts()["pending"] == 3
    counts = resume_sweep(tmp_path / "a.db", threads(job))
    assert counts["done"] == 3


def test_resuming_refuses_weights_that_changed(weights: Path, tmp_path: Path):
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(weights.read_bytes())
    written = write_plan(tmp_path / "plan.yaml", **small(copy))
    run_sweep(written, tmp_path / "a.db", threads(refuses))
    copy.write_bytes(weights.read_bytes() + b" ")
    with pytest.raises(ValueError, match=r"other settings(?s:.*)copy\.safetensors weights: bytes"):
        resume_sweep(tmp_path / "a.db", threads(job), retry_failed=True)
    with pytest.raises(ValueError, match=r"copy\.safetensors weights: sha256"):
        run_sweep(written, tmp_path / "a.db", threads(job))


def other_weights(content: Mapping[str, Any]) -> Outcome:
    return replace(job(content), weights="f" * 64)


def test_weights_that_change_while_a_sweep_runs_fail_the_case(weights: Path, tmp_path: Path):
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(weights.read_bytes())
    written = write_plan(tmp_path / "plan.yaml", **small(copy))
    counts = run_sweep(written, tmp_path / "a.db", threads(other_weights))
    assert counts["failed"] == 3
    told = str(load(tmp_path / "a.db").cases[0].reason)
    assert "sha256 ffffffffffff where it ran, but the sweep began with " in told
    used = run_content(make_plan(plan_fields(**small(copy))).cases()[0].content()).weights
    assert used == sha256_of(copy)


def test_weights_that_are_not_here_are_named_with_where_their_path_begins(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "copy.safetensors").write_bytes(weights.read_bytes())
    written = write_plan(tmp_path / "plan.yaml", **small(Path("copy.safetensors")))
    monkeypatch.chdir(tmp_path)
    run_sweep(written, tmp_path / "a.db", threads(refuses))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError, match=r"weights='copy\.safetensors': .*elsewhere, where"):
        resume_sweep(tmp_path / "a.db", threads(job))


@pytest.mark.parametrize("count", [0, -1])
def test_a_number_of_workers_below_one_is_refused(count: int):
    with pytest.raises(ValueError, match=f"workers={count}: must be at least 1"):
        local_workers(count)


def test_each_gpu_has_a_place_and_more_workers_share_them():
    executor = local_workers(3, ["4", "7"]).executor
    assert isinstance(executor, ProcessPerTask)
    places = [executor._places.get()["CUDA_VISIBLE_DEVICES"] for _ in range(3)]
    assert places == ["4", "7", "4"]
    assert local_workers(None, ["4", "7"]).slots == 2
    assert local_workers().slots == 1
    assert visible_gpus(plan().cases()) == []
