"""A sweep killed with SIGKILL and resumed ends as if nothing had happened."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.sweep_inputs import (
    finished_rows,
    results,
    running,
    small,
    threads,
    wait_until,
    write_plan,
    write_weights,
)
from workbench.paths import data_dir
from workbench.sweep import load
from workbench.sweep.cases import BUNDLED
from workbench.sweep.session import run_sweep
from workbench.sweep.worker import run_content

# Ten take two minutes; then it is 24 cases of the bundled model, else 12 of a smaller one.
KILLS = int(os.environ.get("WORKBENCH_SWEEP_KILLS", "2"))
PROMPTS = ["disc", "ring"] if KILLS >= 10 else ["disc"]
CASES = {"seeds": [0, 1, 2], "prompts": PROMPTS, "grid": {"tau": [0.5, 1, 1.5]}}
COUNT = 3 * len(PROMPTS) * 4
# Twelve starts of the program and 24 cases twice: minutes where others use the machine as well.
SECONDS = 120 if KILLS < 10 else 1200


@pytest.mark.timeout(SECONDS)
def test_killed_at_random_moments_and_resumed_it_ends_as_if_undisturbed(
    tmp_path: Path,
):
    """After each kill what was finished stays as it was, and no process is left."""
    path, moments = tmp_path / "killed.db", random.Random(KILLS)
    weights = write_weights(tmp_path) if KILLS < 10 else data_dir() / BUNDLED["base"]
    written = write_plan(tmp_path / "plan.yaml", **small(weights, **CASES))
    before: dict[str, Any] = {}
    for number in range(KILLS):
        sweep = start(written, path)
        if number % 3 < 2:  # while cases run, which takes seconds to begin; else at any moment
            wait_for_more(path, len(before))
        time.sleep(moments.uniform(0, 0.5 if number % 3 < 2 else 3))
        kill(sweep, whole_group=number % 2 == 0)
        after = finished_rows(path)
        assert after | before == after
        before = after
    assert 0 < len(before) < COUNT
    sweep = start(written, path)
    assert sweep.wait(SECONDS) == 0
    assert finished_rows(path) | before == finished_rows(path)
    undisturbed = tmp_path / "undisturbed.db"
    run_sweep(written, undisturbed, threads(run_content, 1))
    assert len(load(path).done) == COUNT
    assert results(path) == results(undisturbed)


def wait_for_more(path: Path, known: int) -> None:
    wait_until(lambda: len(finished_rows(path)) > known)


def start(written: Path, path: Path) -> subprocess.Popen[bytes]:
    """A sweep in a process group of its own, begun or gone on with by the command line."""
    words = ["resume", str(path)] if finished_rows(path) else ["run", str(written), "--out", path]
    return subprocess.Popen(
        [sys.executable, "-m", "workbench.cli", "sweep", *map(str, words)],
        start_new_session=True,
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )


def kill(sweep: subprocess.Popen[bytes], *, whole_group: bool) -> None:
    """Kills the program alone, whose workers have to notice, or all of its processes at once."""
    if whole_group:
        os.killpg(sweep.pid, signal.SIGKILL)
    else:
        sweep.kill()
    assert sweep.wait(60) == -signal.SIGKILL
    wait_until(lambda: not group(sweep.pid))


def group(leader: int) -> list[int]:
    """Processes of a group that still run."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        try:
            if os.getpgid(pid) == leader and running(pid):
                found.append(pid)
        except ProcessLookupError:
            continue
    return found
