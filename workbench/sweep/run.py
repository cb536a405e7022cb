"""Runs the cases of a sweep that are left, on any executor, and writes each as it ends."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from dataclasses import dataclass, replace
from typing import Any

from workbench.sweep.cases import Case
from workbench.sweep.plan import weights_role
from workbench.sweep.processes import Failure, ProcessPerTask, TaskError
from workbench.sweep.store import Outcome, Store
from workbench.sweep.worker import in_subprocess, run_content

Report = Callable[[Case, Outcome | Failure], None]
Job = Callable[[Mapping[str, Any]], Outcome]


@dataclass(frozen=True)
class Workers:
    """Where cases run.

    Attributes:
        executor: any executor of ``concurrent.futures``'s kind.
        slots: cases that it runs at a time; so many are claimed and no more.
        job: what it is given; by default a case starts a process of its own, wherever it lands.
        close: called at the end, for what the executor itself leaves open.

    A context that ends with an error does not wait for running cases: nobody would write them.
    """

    executor: Executor
    slots: int
    job: Job = in_subprocess
    close: Callable[[], object] = lambda: None

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.executor.shutdown(wait=kind is None)
        self.close()


def local_workers(count: int | None = None, gpus: Sequence[str] = ()) -> Workers:
    """Processes of this machine.

    Args:
        count: cases at a time; by default one for each GPU, or one on the CPU, with one thread.
        gpus: as of :func:`visible_gpus`; several processes share one when there are too few.

    Raises:
        ValueError: a count below 1.
    """
    wanted = max(1, len(gpus)) if count is None else count
    if wanted < 1:
        raise ValueError(f"workers={wanted}: must be at least 1")
    if not gpus:
        executor = ProcessPerTask([{}] * wanted, preload=["workbench.sweep.execute"])
    else:
        names = itertools.islice(itertools.cycle(gpus), wanted)
        executor = ProcessPerTask([{"CUDA_VISIBLE_DEVICES": name} for name in names])
    return Workers(executor, wanted, run_content)


def visible_gpus(cases: Iterable[Case]) -> list[str]:
    """Names for ``CUDA_VISIBLE_DEVICES`` of the GPUs here; none when all cases want the CPU."""
    if all(case.sampling.device == "cpu" for case in cases):
        return []
    import torch

    count = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else map(str, range(count))
    return list(names)[:count]


def run_cases(store: Store, workers: Workers, report: Report = lambda case, result: None) -> None:
    """Claims, runs and writes cases until none is left that this run could take.

    Args:
        store: after :meth:`workbench.sweep.store.Store.begin`.
        report: called after each case was written.

    Raises:
        What the executor or the database raises; what a case raises becomes a row.
    """
    inputs = store.plan["inputs"]
    running: dict[Future[Outcome], tuple[Case, float]] = {}
    while True:
        while len(running) < workers.slots and (case := _next(store)) is not None:
            future = workers.executor.submit(workers.job, case.content())
            running[future] = case, time.perf_counter()
        if not running:
            return
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            case, began = running.pop(future)
            result = _with_planned_weights(case, _outcome(future, began), inputs)
            if isinstance(result, Failure):
                store.fail(case, result.reason, result.traceback)
            else:
                store.finish(case, result)
            report(case, result)


def run_case_on(workers: Workers, case: Case) -> Outcome:
    """Runs one case and writes nothing.

    Raises:
        TaskError: it failed.
    """
    began = time.perf_counter()
    result = _outcome(workers.executor.submit(workers.job, case.content()), began)
    if isinstance(result, Failure):
        raise TaskError(result)
    return result


def _next(store: Store) -> Case | None:
    """A free case, if need be one that a killed run had."""
    case = store.claim()
    if case is None and store.free_lost():
        case = store.claim()
    return case


def _with_planned_weights(
    case: Case, result: Outcome | Failure, inputs: Mapping[str, Any]
) -> Outcome | Failure:
    """Fails a case whose weights are others by now, or on the machine where it ran."""
    planned = inputs.get(weights_role(case.sampling.weights), {}).get("sha256")
    if isinstance(result, Failure) or result.weights in ("", planned):
        return result
    return Failure(
        f"weights={case.sampling.weights!r}: sha256 {result.weights[:12]} where it ran, but the "
        f"sweep began with {str(planned)[:12]}; put those back and resume with --retry-failed"
    )


def _outcome(future: Future[Outcome], began: float) -> Outcome | Failure:
    error = future.exception()
    if isinstance(error, TaskError):
        return error.failure
    if error is not None:
        return Failure.of(error)
    outcome = future.result()
    seconds = time.perf_counter() - began
    return replace(outcome, metrics={**outcome.metrics, "case_seconds": seconds})
