"""Runs a case in a process of its own, wherever the call itself runs.

:func:`run_content` is for executors that give each task a process; :func:`in_subprocess` for all
others, such as dask workers, which run many tasks in one. ``python -m workbench.sweep.worker`` is
the process it starts: a case as JSON comes in, what became of it goes out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from workbench.sweep.cases import Case
from workbench.sweep.processes import Failure, TaskError
from workbench.sweep.store import Outcome


def run_content(content: Mapping[str, Any]) -> Outcome:
    """Runs the case of :meth:`workbench.sweep.cases.Case.content` in this process."""
    import torch

    from workbench.sweep.execute import run_case

    # Rounding depends on how work is split over threads; results must not depend on the machine's
    # number of cores. Several cases at a time use the cores better than one with several threads.
    torch.set_num_threads(1)
    return run_case(Case.from_content(content))


def in_subprocess(content: Mapping[str, Any]) -> Outcome:
    """Runs the case in a fresh interpreter.

    Raises:
        TaskError: the case failed, or its process died.
    """
    done = subprocess.run(
        [sys.executable, "-m", "workbench.sweep.worker"],
        input=json.dumps(content),
        capture_output=True,
        text=True,
        check=False,
    )
    if not done.stdout:
        lines = done.stderr.strip().splitlines() or ["no message"]
        how = f"the process ended with exit status {done.returncode}: {lines[-1]}"
        raise TaskError(Failure(how, done.stderr))
    answer = json.loads(done.stdout)
    if "reason" in answer:
        raise TaskError(Failure(**answer))
    return Outcome(**{name: _frozen(value) for name, value in answer.items()})


def main() -> None:
    """A case from stdin to stdout; whatever else is printed goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        outcome = run_content(json.load(sys.stdin))
    except BaseException as error:
        json.dump(asdict(Failure.of(error)), answers)
        answers.close()
        raise
    json.dump(asdict(outcome), answers)
    answers.close()


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


if __name__ == "__main__":
    main()
