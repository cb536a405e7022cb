"""The database of a sweep: its plan, its cases and what became of each.

A case is claimed by a run before it starts and finished in one transaction with all its metrics.
Several runs may share one database: no case is given to two of them, and what a killed run had
claimed goes back to the others.
"""

from __future__ import annotations

import json
import math
import sqlite3
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from workbench.provenance import record_id
from workbench.sweep.cases import Case, flat
from workbench.sweep.liveness import RunLock, is_alive
from workbench.sweep.metrics import METRICS, Metric
from workbench.sweep.plan import check_unchanged
from workbench.sweep.schema import connect, told, transaction
from workbench.sweep.table import SweepCase, SweepTable

NOTES = ("ran", "fallbacks", "emulated", "flags")


@dataclass(frozen=True)
class Outcome:
    """What a case brought.

    Attributes:
        metrics: by name of :data:`METRICS`.
        environment: of the process that ran it, for the provenance.
        ran, fallbacks, emulated, flags: as of :class:`workbench.sweep.table.SweepCase`.
        weights: sha256 of those it used, compared with the plan's before anything is written.
    """

    metrics: dict[str, float]
    environment: dict[str, Any] = field(default_factory=dict)
    ran: tuple[str, ...] = ()
    fallbacks: tuple[str, ...] = ()
    emulated: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    weights: str = ""


class Store:
    """An open database. Use it in the thread that opened it, as a context manager.

    Open one with :meth:`open` or :meth:`create`.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self._db = connection
        self._run: str | None = None
        self._lock: RunLock | None = None

    @classmethod
    def open(cls, path: Path) -> Store:
        """Opens an existing sweep.

        Raises:
            FileNotFoundError: there is none. ValueError: the file is something else, or damaged.
        """
        if not path.is_file():
            raise FileNotFoundError(f"database={str(path)!r}: no such file; make it with sweep run")
        if not path.stat().st_size:  # and it stays so
            raise ValueError(f"database={str(path)!r}: holds no sweep; make it with sweep run")
        store = cls(path, connect(path))
        try:
            with told(path):
                found = store._db.execute("SELECT count(*) FROM sweep").fetchone()[0]
            if found == 0:
                raise ValueError(f"database={str(path)!r}: holds no sweep; make it with sweep run")
        except BaseException:
            store.close()
            raise
        return store

    @classmethod
    def create(cls, path: Path, plan: Mapping[str, Any], cases: Sequence[Case]) -> Store:
        """Opens a sweep, and makes it when it is not there.

        Args:
            path: of the database; its folder is made.
            plan: JSON-able, with its `name`; kept as it is.
            cases: without repeats, in the order in which they run.

        Raises:
            ValueError: the sweep that is there has another plan (the message has the differences),
                or the file is something else, or damaged. OSError: nothing can be written there.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(
                f"database={str(path)!r}: no folder can be made there ({error.strerror}); "
                "name another"
            ) from error
        store = cls(path, connect(path))
        try:
            with told(path), transaction(store._db):
                store._fill(plan, cases)
        except BaseException:
            store.close()
            raise
        return store

    def _fill(self, plan: Mapping[str, Any], cases: Sequence[Case]) -> None:
        found = self._db.execute("SELECT plan FROM sweep").fetchone()
        if found is not None:
            check_unchanged(self.path, json.loads(found["plan"]), json.loads(json.dumps(plan)))
            return
        values = (plan["name"], json.dumps(plan), _now())
        self._db.execute("INSERT INTO sweep VALUES (?, ?, ?)", values)
        kinds = [(name, *astuple(kind)) for name, kind in METRICS.items()]
        self._db.executemany("INSERT INTO metric_kind VALUES (?, ?, ?, ?, ?)", kinds)
        self._db.executemany(
            "INSERT INTO sweep_case (key, position, content) VALUES (?, ?, ?)",
            [(case.key, n, json.dumps(case.content())) for n, case in enumerate(cases)],
        )

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        with told(self.path):
            try:
                self.close()
            finally:
                if isinstance(error, sqlite3.Error):
                    raise error

    def close(self) -> None:
        """Ends the run, if one was begun, and closes the file."""
        try:
            if self._run is not None:
                self.end()
        finally:
            if self._lock is not None:  # the run could not be ended: the others free its cases
                self._lock.close()
                self._lock = None
            self._db.close()

    # -- a run -----------------------------------------------------------------------------------

    def begin(self, record: Mapping[str, Any]) -> str:
        """Begins a run on this sweep and returns its id.

        Args:
            record: its command, inputs and seeds, for the provenance.
        """
        run = uuid.uuid4().hex[:12]
        try:
            self._lock = RunLock(self.path, run)  # before the row, or others would take it for dead
        except OSError as error:
            raise OSError(
                f"database={str(self.path)!r}: nothing can be written beside it "
                f"({error.strerror}); copy it to a folder where you can write, and resume there"
            ) from error
        with transaction(self._db):
            self._db.execute(
                "INSERT INTO run VALUES (?, ?, ?, NULL)", (run, json.dumps(record), _now())
            )
        self._run = run
        self.free_lost()
        return run

    def end(self) -> None:
        """Ends the run; what it had claimed and not finished is free again."""
        with transaction(self._db):
            self._free(self._run)
            self._db.execute("UPDATE run SET ended = ? WHERE id = ?", (_now(), self._run))
        if self._lock is not None:
            self._lock.close()
        self._run = self._lock = None

    def claim(self) -> Case | None:
        """The next case that nobody has, now this run's; ``None`` when there is none."""
        with transaction(self._db):
            row = self._db.execute(
                """UPDATE sweep_case SET state = 'running', run = ?, started = ?
                WHERE key = (SELECT key FROM sweep_case WHERE state = 'pending'
                             ORDER BY position LIMIT 1) RETURNING content""",
                (self._run, _now()),
            ).fetchone()
        return None if row is None else Case.from_content(json.loads(row["content"]))

    def finish(self, case: Case, outcome: Outcome) -> None:
        """Writes a finished case: its state, metrics and provenance, or nothing of it.

        Raises:
            RuntimeError: it is not this run's.
        """
        notes = json.dumps({name: list(getattr(outcome, name)) for name in NOTES})
        environment = record_id(outcome.environment)
        rows = [
            (case.key, name, None if math.isnan(value) else float(value))
            for name, value in outcome.metrics.items()
        ]
        with transaction(self._db):
            self._db.execute(
                "INSERT OR IGNORE INTO provenance VALUES (?, ?)",
                (environment, json.dumps(outcome.environment)),
            )
            self._close_case(case, "done", notes=notes, provenance=environment)
            self._db.executemany("INSERT INTO metric VALUES (?, ?, ?)", rows)

    def fail(self, case: Case, reason: str, traceback: str = "") -> None:
        """Writes a failed case with its reason.

        Raises:
            RuntimeError: it is not this run's.
        """
        with transaction(self._db):
            self._close_case(case, "failed", reason=reason, traceback=traceback)

    def _close_case(self, case: Case, state: str, **columns: str) -> None:
        assignments = "".join(f", {name} = ?" for name in columns)
        done = self._db.execute(
            f"UPDATE sweep_case SET state = ?, finished = ?{assignments} "
            "WHERE key = ? AND state = 'running' AND run = ?",
            (state, _now(), *columns.values(), case.key, self._run),
        )
        if done.rowcount != 1:
            raise RuntimeError(f"case {case.key} ({case.setting}): is not claimed by this run")

    def retry_failed(self) -> int:
        """Failed cases become pending again; returns how many."""
        with transaction(self._db):
            return self._db.execute(
                """UPDATE sweep_case SET state = 'pending', reason = NULL, traceback = NULL,
                run = NULL, started = NULL, finished = NULL WHERE state = 'failed'"""
            ).rowcount

    def free_lost(self) -> int:
        """Frees what runs claimed that are no more, killed ones included; returns how many."""
        with transaction(self._db):
            # All that never ended: one killed between two cases leaves its lock's file behind.
            open_runs = self._db.execute("SELECT id FROM run WHERE ended IS NULL").fetchall()
            lost = [row["id"] for row in open_runs if not is_alive(self.path, row["id"])]
            return sum(self._free(run) for run in lost)

    def _free(self, run: str | None) -> int:
        return self._db.execute(
            """UPDATE sweep_case SET state = 'pending', run = NULL, started = NULL
            WHERE state = 'running' AND run = ?""",
            (run,),
        ).rowcount

    # -- reading ---------------------------------------------------------------------------------

    @property
    def plan(self) -> dict[str, Any]:
        """What :meth:`create` was given."""
        return json.loads(self._db.execute("SELECT plan FROM sweep").fetchone()["plan"])

    def counts(self) -> dict[str, int]:
        """Number of cases in each state, in the order pending, running, done, failed."""
        rows = self._db.execute("SELECT state, count(*) AS n FROM sweep_case GROUP BY state")
        found = {row["state"]: row["n"] for row in rows}
        return {state: found.get(state, 0) for state in ("pending", "running", "done", "failed")}

    def cases(self, *states: str) -> list[Case]:
        """The cases in some states, or all of them, in order."""
        rows = self._db.execute("SELECT state, content FROM sweep_case ORDER BY position")
        wanted = [row["content"] for row in rows if not states or row["state"] in states]
        return [Case.from_content(json.loads(content)) for content in wanted]

    def runs(self) -> list[dict[str, Any]]:
        """Every run: its record, when it started and ended; ``ended`` is ``None`` if killed."""
        rows = self._db.execute("SELECT * FROM run ORDER BY started").fetchall()
        return [{**dict(row), "record": json.loads(row["record"])} for row in rows]

    def environments(self) -> dict[str, dict[str, Any]]:
        """The environments that cases ran in, by id."""
        rows = self._db.execute("SELECT * FROM provenance").fetchall()
        return {row["id"]: json.loads(row["record"]) for row in rows}

    def table(self) -> SweepTable:
        """All cases with their metrics, as of one moment."""
        self._db.execute("BEGIN")  # one snapshot for all the reads
        try:
            kinds = self._db.execute("SELECT * FROM metric_kind").fetchall()
            values: dict[str, dict[str, float]] = {}
            for row in self._db.execute("SELECT * FROM metric"):
                value = math.nan if row["value"] is None else row["value"]
                values.setdefault(row["case_key"], {})[row["name"]] = value
            rows = self._db.execute("SELECT * FROM sweep_case ORDER BY position").fetchall()
        finally:
            self._db.execute("COMMIT")
        names = {row["name"]: _kind(row) for row in kinds}
        order = {name: n for n, name in enumerate(names)}
        cases = []
        for row in rows:
            mine = values.get(row["key"], {})
            cases.append(_case(row, dict(sorted(mine.items(), key=lambda item: order[item[0]]))))
        return SweepTable(self.plan["name"], tuple(cases), names)


def _kind(row: sqlite3.Row) -> Metric:
    return Metric(row["unit"], row["meaning"], row["better"], bool(row["timing"]))


def _case(row: sqlite3.Row, metrics: dict[str, float]) -> SweepCase:
    case = Case.from_content(json.loads(row["content"]))
    notes = json.loads(row["notes"] or "{}")
    return SweepCase(
        key=case.key,
        setting=case.setting,
        attention=flat(case.attention),
        sampling=case.sampling.model_dump(mode="json"),
        seed=case.seed,
        prompt=case.prompt,
        control=case.control,
        state=row["state"],
        reason=row["reason"],
        metrics=metrics,
        provenance=row["provenance"],
        **{name: tuple(found) for name, found in notes.items()},
    )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
