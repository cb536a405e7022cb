"""A sweep from options to a filled database: begin or go on, progress, what became of it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from workbench.provenance import origin
from workbench.sweep.cases import Case, Sampling
from workbench.sweep.plan import check_unchanged, inputs_of, load_plan, weights_role
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
    files = {weights_role(s.weights): s.weights_file for s in _samplers(cases)}
    seeds = {f"noise {n}": seed for n, seed in enumerate(store.plan["seeds"])}
    store.begin(origin(sys.argv if command is None else command, files, seeds=seeds))
    try:
        with _progress(store) as report, workers:
            run_cases(store, workers, report)
    except KeyboardInterrupt:
        path = shlex.quote(str(store.path))
        print(f"stopped; workbench sweep resume {path} goes on", file=sys.stderr)
        raise
    return store.counts()


def _samplers(cases: Sequence[Case]) -> list[Sampling]:
    return list(dict.fromkeys(case.sampling for case in cases))


@contextmanager
def _progress(store: Store) -> Iterator[Report]:
    """A bar with the time that is left on a terminal's stderr, elsewhere a line for each case.

    What another run of the sweep finishes counts, too.
    """
    watched = sys.stderr.isatty()
    begun, total = _finished(store), sum(store.counts().values())
    with tqdm(total=total, initial=begun, unit="case", smoothing=0.1, disable=not watched) as bar:
        shown = begun

        def report(case: Case, result: Outcome | Failure) -> None:
            nonlocal shown
            count = _finished(store)
            bar.set_description(case.setting, refresh=False)
            bar.update(count - shown)
            shown = count
            line = f"{count}/{total} {case.setting}, seed {case.seed}, {case.prompt}: "
            if isinstance(result, Failure) or not watched:
                bar.write(line + _told(result), file=sys.stderr)
                sys.stderr.flush()

        yield report


def _finished(store: Store) -> int:
    counts = store.counts()
    return counts["done"] + counts["failed"]


def _told(result: Outcome | Failure) -> str:
    if isinstance(result, Failure):
        return f"FAILED ({result.reason})"
    found = result.metrics
    return (
        f"density {found['density']:.3f}, relative L2 {found['relative_l2']:.3g}, "
        f"{found['case_seconds']:.1f} s"
    )
