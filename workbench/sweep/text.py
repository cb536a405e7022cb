"""What `workbench sweep plan` and `status` print."""

from __future__ import annotations

from workbench.sweep.estimate import estimate, measured_seconds
from workbench.sweep.liveness import is_alive
from workbench.sweep.plan import Plan
from workbench.sweep.store import Store


def show_plan(plan: Plan) -> None:
    """The settings, and how many cases they make."""
    for setting in plan.settings:
        print(setting.name)
    seeds, prompts = len(plan.seeds), len(plan.prompts)
    print(
        f"{plan.name}: {len(plan.settings)} settings (controls included) x {seeds} seeds x "
        f"{prompts} prompts = {len(plan.cases())} cases"
    )


def show_status(store: Store) -> None:
    """Counts, runs, failures with their reasons, and the time that is left."""
    table, counts = store.table(), store.counts()
    print(f"{table.name}: " + ", ".join(f"{n} {state}" for state, n in counts.items()))
    for run in store.runs():
        lives = run["ended"] is None and is_alive(store.path, run["id"])
        ending = "runs now" if lives else f"ended {run['ended'] or 'by force'}"
        print(f"run {run['id']}: began {run['started']}, {ending}")
    for case in table.cases:
        if case.state == "failed":
            print(f"FAILED {case.setting}, seed {case.seed}, {case.prompt}: {case.reason}")
    left = store.cases("pending", "running")
    if left:
        seconds = measured_seconds(table)
        print(f"left: {estimate(left, seconds, 1, 'from finished cases, one at a time')}")
