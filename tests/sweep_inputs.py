"""Shared by the tests of sweeps: small weights, plans, made-up outcomes, jobs that end badly."""

from __future__ import annotations

import math
import os
import signal
import sqlite3
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

from workbench.sweep.cases import Case
from workbench.sweep.plan import Plan, make_plan
from workbench.sweep.run import Workers
from workbench.sweep.store import Outcome, Store

SAMPLING = {"grid": [4, 8, 8], "steps": 2, "device": "cpu"}
TIMED = {"case_seconds": 1.5, "seconds": 0.5}


def write_weights(folder: Path) -> Path:
    """A model of two small layers, which samples in a fraction of a second."""
    from tests.policy_inputs import model  # torch, which the processes of most tests do not need
    from workbench.models import save_model

    path = folder / "small.safetensors"
    save_model(model(), path)
    return path


def plan_fields(**fields: Any) -> dict[str, Any]:
    """A plan of two taus."""
    return {
        "name": "taus",
        "sampling": SAMPLING,
        "base": {"algorithm": "sol_attn"},
        "grid": {"tau": [0.5, 1.5]},
        **fields,
    }


def plan(**fields: Any) -> Plan:
    return make_plan(plan_fields(**fields))


def write_plan(path: Path, **fields: Any) -> Path:
    path.write_text(yaml.safe_dump(plan_fields(**fields), sort_keys=False))
    return path


def new_store(path: Path, made: Plan | None = None) -> Store:
    made = made or plan()
    return Store.create(path, made.record(), made.cases())


def outcome(case: Case, **metrics: float) -> Outcome:
    """Numbers that follow from the case; nothing ran."""
    number = int(case.key, 16) % 1000 / 1000
    found = {
        "density": number,
        "relative_l2": number / 2,
        "psnr": math.inf,
        "ssim": math.nan,
        **TIMED,
        **metrics,
    }
    return Outcome(found, {"place": "here"}, ran=("none: test",), flags=("made up",))


def job(content: Mapping[str, Any]) -> Outcome:
    return outcome(Case.from_content(content))


def refuses(content: Mapping[str, Any]) -> Outcome:
    """Fails for one of the two taus."""
    case = Case.from_content(content)
    if "tau=1.5" in case.setting:
        raise ValueError("tau=1.5: not\n  today")
    return outcome(case)


def dies(content: Mapping[str, Any]) -> Outcome:
    """Its process is killed for one of the two taus."""
    if "tau=1.5" in content["setting"]:
        os.kill(os.getpid(), signal.SIGKILL)
    return job(content)


def results(path: Path) -> dict[str, Any]:
    """What a sweep found, timings aside: state, exact metrics and notes of each case, in order."""
    with Store.open(path) as store:
        table = store.table()
    timings = {name for name, kind in table.metrics.items() if kind.timing}
    return {
        case.key: (
            case.state,
            {name: repr(x) for name, x in case.metrics.items() if name not in timings},
            set(case.metrics) & timings,
            (case.ran, case.fallbacks, case.emulated, case.flags),
        )
        for case in table.cases
    }


def finished_rows(path: Path) -> dict[str, tuple[Any, ...]]:
    """Run, time and metrics of every finished case, timings too: what nothing may change again."""
    if not path.is_file():
        return {}
    connection = sqlite3.connect(path, timeout=20)
    try:
        if connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0] == 0:
            return {}
        cases = connection.execute(
            "SELECT key, run, started, finished FROM sweep_case WHERE state = 'done'"
        ).fetchall()
        metrics = connection.execute("SELECT * FROM metric").fetchall()
    finally:
        connection.close()
    return {row[0]: (row, *(m for m in metrics if m[0] == row[0])) for row in cases}


def small(weights: Path, **fields: Any) -> dict[str, Any]:
    """Fields of a plan on the small weights."""
    return {"sampling": {**SAMPLING, "weights": str(weights)}, **fields}


def threads(function: Any, slots: int = 2) -> Workers:
    return Workers(ThreadPoolExecutor(slots), slots, function)


def running(pid: int) -> bool:
    """Whether it runs; a dead one that nobody has waited for does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def wait_until(happened: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.01)
