"""A sweep from options to a filled database: begin or go on, progress, what became of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from workbench.provenance import origin
from workbench.sweep.cases import Case, Sampling
from workbench.sweep.plan import check_unchanged, inputs_of, load_plan
from workbench.sweep.processes import Failure
from workbench.sweep.run import Report, Workers, run_cases
from workbench.sweep.store import Outcome, Store


def run_sweep(
    plan: Path, database: Path, workers: Workers, *, command: Sequence[str] | None = None
) -> dict[str, int]:
    """Runs a plan into a database, or goes on where an earlier run of it ended.

    Args:
        plan: the YAML file of :func:`workbench.sweep.plan.load_plan`.
        database: made when it is not there.
        workers: where the cases run; shut down at the end.
        command: for the provenance; by default the command line of this process.

    Returns:
        How many cases are in each state.

    Raises:
        ValueError: the plan is wrong, or the database holds another one.
    """
    read = load_plan(plan)
    with Store.create(database, read.record(), read.cases()) as store:
        return _work(store, workers, command)


def resume_sweep(
    database: Path,
    workers: Workers,
    *,
    retry_failed: bool = False,
    command: Sequence[str] | None = None,
) -> dict[str, int]:
    """Runs what is left of a sweep; finished cases are never run again.

    Args, returns and errors as of :func:`run_sweep`, and

        retry_failed: run the failed cases again, too.

    Raises:
        FileNotFoundError: no such database. ValueError: the weights are others now.
    """
    with Store.open(database) as store:
        now = inputs_of(_samplers(store.cases()))
        check_unchanged(database, {"inputs": store.plan["inputs"]}, {"inputs": now})
        if retry_failed:
            store.retry_failed()
        return _work(store, workers, command)


def _work(store: Store, workers: Workers, command: Sequence[str] | None) -> dict[str, int]:
    cases = store.cases()
    files = {f"{s.weights} weights": s.weights_file for s in _samplers(cases)}
    seeds = {f"noise {n}": seed for n, seed in enumerate(store.plan["seeds"])}
    store.begin(origin(sys.argv if command is None else command, files, seeds=seeds))
    before = store.counts()
    with _progress(len(cases), before["done"] + before["failed"]) as report:
        with workers:
            run_cases(store, workers, report)
    return store.counts()


def _samplers(cases: Sequence[Case]) -> list[Sampling]:
    return list(dict.fromkeys(case.sampling for case in cases))


@contextmanager
def _progress(total: int, finished: int) -> Iterator[Report]:
    """A bar with the time that is left on a terminal's stderr, elsewhere a line for each case."""
    watched = sys.stderr.isatty()
    with tqdm(
        total=total, initial=finished, unit="case", smoothing=0.1, disable=not watched
    ) as bar:
        count = finished

        def report(case: Case, result: Outcome | Failure) -> None:
            nonlocal count
            count += 1
            bar.set_description(case.setting, refresh=False)
            bar.update()
            line = f"{count}/{total} {case.setting}, seed {case.seed}, {case.prompt}: "
            line += _told(result)
            if isinstance(result, Failure):
                bar.write(line, file=sys.stderr)
            elif not watched:
                print(line, file=sys.stderr, flush=True)

        yield report


def _told(result: Outcome | Failure) -> str:
    if isinstance(result, Failure):
        return f"FAILED ({result.reason})"
    found = result.metrics
    return (
        f"density {found['density']:.3f}, relative L2 {found['relative_l2']:.3g}, "
        f"{found['case_seconds']:.1f} s"
    )
