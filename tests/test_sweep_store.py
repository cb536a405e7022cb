"""The database of a sweep: whole or not at all, no case twice, killed runs, migrations."""

from __future__ import annotations

import fcntl
import math
import multiprocessing
import os
import random
import signal
import sqlite3
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.sweep_inputs import finished_rows, new_store, outcome, plan, results
from workbench.sweep import SweepTable, load, schema
from workbench.sweep.cases import Case
from workbench.sweep.liveness import is_alive, lock_path
from workbench.sweep.metrics import METRICS
from workbench.sweep.store import Store

SPAWN = multiprocessing.get_context("spawn")
MANY = {"grid": {"tau": [n / 10 for n in range(11)]}, "seeds": [0, 1, 2, 3]}  # 48 cases


def database(folder: Path, **fields: Any) -> Path:
    """A new sweep, closed again."""
    path = folder / "sweep.db"
    new_store(path, plan(**fields)).close()
    return path


def work(path: str, pause: float = 0.0) -> None:
    """Claims and finishes until nothing is left: what a run does, without the sampling."""
    with Store.open(Path(path)) as store:
        store.begin({})
        while (case := store.claim()) is not None:
            time.sleep(pause)
            store.finish(case, outcome(case))


# -- one run ------------------------------------------------------------------------------------


def test_a_finished_case_comes_back_with_its_exact_metrics(tmp_path: Path):
    path = database(tmp_path)
    with Store.open(path) as store:
        store.begin({"command": ["x"]})
        case = store.claim()
        assert case is not None
        store.finish(case, outcome(case, relative_l2=0.1 + 0.2))
    found = load(path).done
    assert [item.key for item in found] == [case.key]
    assert found[0].metrics["relative_l2"] == 0.1 + 0.2
    assert found[0].metrics["psnr"] == math.inf
    assert math.isnan(found[0].metrics["ssim"])
    assert "lpips" not in found[0].metrics
    assert (found[0].ran, found[0].flags) == (("none: test",), ("made up",))
    assert found[0].control


def test_the_table_knows_units_directions_and_the_control_of_each_case(tmp_path: Path):
    table = load(database(tmp_path, seeds=[0, 1], prompts=["disc", "ring"]))
    assert isinstance(table, SweepTable)
    assert table.metrics == METRICS
    assert table.settings == ("dense_control", "sol_attn tau=0.5", "sol_attn tau=1.5")
    assert len(table.of("sol_attn tau=0.5")) == 4
    assert table.of("sol_attn tau=0.5")[0].attention["tau"] == 0.5
    for case in table.cases:
        control = table.control_of(case)
        assert control.control
        assert (control.seed, control.prompt) == (case.seed, case.prompt)
    with pytest.raises(KeyError, match="must be one of dense_control"):
        table.of("tau")


def test_cases_are_claimed_once_and_in_the_order_of_the_plan(tmp_path: Path):
    made = plan()
    with new_store(tmp_path / "a.db", made) as store:
        store.begin({})
        claimed = [store.claim() for _ in made.cases()]
        assert claimed == made.cases()
        assert store.claim() is None
        assert store.counts() == {"pending": 0, "running": 3, "done": 0, "failed": 0}


def test_what_an_ended_run_had_claimed_is_free_again(tmp_path: Path):
    path = database(tmp_path)
    with Store.open(path) as store:
        store.begin({})
        store.claim()
    with Store.open(path) as store:
        assert store.counts()["pending"] == 3
        (run,) = store.runs()
        assert run["ended"] >= run["started"]
    assert not list(tmp_path.glob("*-run-*"))


def test_a_failed_case_is_a_row_with_its_reason_and_can_be_retried(tmp_path: Path):
    with new_store(tmp_path / "a.db") as store:
        store.begin({})
        case = store.claim()
        assert case is not None
        store.fail(case, "ValueError: no", "Traceback")
        assert store.table().cases[0].state == "failed"
        assert store.table().cases[0].reason == "ValueError: no"
        assert store.claim() != case
        assert store.retry_failed() == 1
        assert store.table().cases[0].reason is None
        assert store.claim() == case


def test_a_case_is_written_as_a_whole_or_not_at_all(tmp_path: Path):
    with new_store(tmp_path / "a.db") as store:
        store.begin({})
        case = store.claim()
        assert case is not None
        with pytest.raises(sqlite3.IntegrityError):
            store.finish(case, outcome(case, no_such_metric=1.0))
        assert store.counts()["done"] == 0
        assert store.environments() == {}
        assert store.table().cases[0].metrics == {}
        store.finish(case, outcome(case))
        assert store.counts()["done"] == 1


def test_only_the_run_that_claimed_a_case_can_finish_it(tmp_path: Path):
    path = database(tmp_path)
    with Store.open(path) as one, Store.open(path) as two:
        one.begin({})
        two.begin({})
        case = one.claim()
        assert case is not None
        with pytest.raises(RuntimeError, match="is not claimed by this run"):
            two.finish(case, outcome(case))
        one.finish(case, outcome(case))
        with pytest.raises(RuntimeError, match="is not claimed by this run"):
            one.finish(case, outcome(case))
        assert len(finished_rows(path)) == 1


# -- several runs -------------------------------------------------------------------------------


def test_two_concurrent_writers_lose_nothing_and_repeat_nothing(tmp_path: Path):
    path = database(tmp_path, **MANY)
    writers = [SPAWN.Process(target=work, args=(str(path), 0.002)) for _ in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    with Store.open(path) as store:
        assert store.counts() == {"pending": 0, "running": 0, "done": 48, "failed": 0}
        shares = {run["id"]: 0 for run in store.runs()}
    for key, (case, *metrics) in finished_rows(path).items():
        shares[case[1]] += 1
        assert len(metrics) == 6, key
    assert len(shares) == 2
    assert min(shares.values()) > 0  # both did some of it


def test_two_runs_may_make_the_same_database_at_once(tmp_path: Path):
    path, made, errors = tmp_path / "new.db", plan(**MANY), []
    start = threading.Barrier(4)

    def create() -> None:
        start.wait()
        try:
            new_store(path, made).close()
        except sqlite3.Error as error:
            errors.append(error)

    threads = [threading.Thread(target=create) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(load(path).cases) == 48


def test_a_living_run_keeps_its_cases_and_a_killed_one_loses_them(tmp_path: Path):
    path = database(tmp_path)
    writer = SPAWN.Process(target=work, args=(str(path), 60))
    writer.start()
    with Store.open(path) as store:
        deadline = time.monotonic() + 60
        while store.counts()["running"] == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        store.begin({})
        assert store.counts()["running"] == 1
        assert store.free_lost() == 0
        writer.kill()
        writer.join()
        assert store.free_lost() == 1
        assert store.counts()["pending"] == 3
        assert [run["ended"] for run in store.runs()] == [None, None]
        assert len(list(tmp_path.glob("*-run-*"))) == 1  # only our own lock is left


def test_writers_killed_at_random_moments_leave_whole_cases_only(tmp_path: Path):
    path = database(tmp_path, **MANY)
    moments = random.Random(0)
    before: dict[str, Any] = {}
    for _ in range(4):
        writer = SPAWN.Process(target=work, args=(str(path), 0.005))
        writer.start()
        while len(finished_rows(path)) == len(before) and writer.is_alive():
            time.sleep(0.002)
        time.sleep(moments.uniform(0, 0.05))
        writer.kill()
        writer.join()
        assert writer.exitcode == -signal.SIGKILL
        after = finished_rows(path)
        assert len(after) > len(before)
        assert after | before == after  # what was finished stayed as it was
        assert {len(found) for found in after.values()} == {7}
        before = after
    assert len(before) < 48
    work(str(path))
    undisturbed = database(tmp_path / "other", **MANY)
    work(str(undisturbed))
    assert results(path) == results(undisturbed)
    assert finished_rows(path) | before == finished_rows(path)


# -- the file -----------------------------------------------------------------------------------


def test_the_file_is_in_wal_mode_and_marked_with_its_version(tmp_path: Path):
    connection = sqlite3.connect(database(tmp_path))
    pragmas = ("journal_mode", "user_version", "application_id")
    found = [connection.execute(f"PRAGMA {name}").fetchone()[0] for name in pragmas]
    connection.close()
    assert found == ["wal", len(schema.MIGRATIONS), schema.APPLICATION_ID]


def test_an_older_database_is_brought_up_to_date_with_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = database(tmp_path)
    work(str(path))
    old = results(path)
    added = ("ALTER TABLE sweep_case ADD COLUMN note TEXT DEFAULT 'new'",)
    monkeypatch.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS, added))
    assert results(path) == old
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA user_version").fetchone()[0] == len(schema.MIGRATIONS)
    assert connection.execute("SELECT DISTINCT note FROM sweep_case").fetchall() == [("new",)]
    connection.close()


def test_a_migration_that_fails_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = database(tmp_path)
    before = len(schema.MIGRATIONS)
    broken = ("ALTER TABLE sweep_case ADD COLUMN note TEXT", "ALTER TABLE nothing ADD COLUMN x")
    with monkeypatch.context() as patch:
        patch.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS, broken))
        with pytest.raises(sqlite3.OperationalError):
            load(path)
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA user_version").fetchone()[0] == before
    columns = [row[1] for row in connection.execute("PRAGMA table_info(sweep_case)")]
    connection.close()
    assert "note" not in columns


def test_a_database_of_a_newer_version_is_refused(tmp_path: Path):
    path = database(tmp_path)
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(ValueError, match="has version 99, this workbench knows up to"):
        load(path)


def test_other_files_are_refused_and_left_alone(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="no such file"):
        load(tmp_path / "none.db")
    text = tmp_path / "text.db"
    text.write_text("no database at all, but longer than a header of SQLite would be" * 4)
    foreign = tmp_path / "foreign.db"
    connection = sqlite3.connect(foreign)
    connection.execute("CREATE TABLE a (b)")
    connection.close()
    for path, told in ((text, "is no SQLite file"), (foreign, "is another program's SQLite file")):
        before = path.read_bytes()
        with pytest.raises(ValueError, match=told):
            new_store(path)
        assert path.read_bytes() == before
    (tmp_path / "empty.db").touch()
    with pytest.raises(ValueError, match="holds no sweep"):
        load(tmp_path / "empty.db")
    assert (tmp_path / "empty.db").stat().st_size == 0


def test_a_damaged_database_is_named(tmp_path: Path):
    path = database(tmp_path)
    content = bytearray(path.read_bytes())
    content[4096:] = random.Random(0).randbytes(len(content) - 4096)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"sweep\.db': is damaged; take a copy"):
        load(path)


def test_a_full_disk_loses_the_case_alone_and_says_what_to_do(tmp_path: Path):
    def fill(path: Path) -> None:
        with Store.open(path) as store:
            store.begin({})
            store._db.execute("PRAGMA max_page_count = 1")  # not a page more than there are
            for text in ("", "x" * 5000):
                case = store.claim()
                assert case is not None
                store.finish(case, replace(outcome(case), environment={"text": text}))

    path = database(tmp_path)
    with pytest.raises(OSError, match="the disk is full; make room"):
        fill(path)
    assert len(load(path).done) == 1
    assert not list(tmp_path.glob("*-run-*"))
    work(str(path))
    assert len(load(path).done) == 3


def test_a_database_that_cannot_be_written_is_still_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = database(tmp_path)
    work(str(path))
    written = results(path)

    def refused(path: Path, connection: sqlite3.Connection) -> sqlite3.Connection:
        connection.execute("PRAGMA query_only = ON")  # root would write whatever the permissions
        connection.execute("DELETE FROM metric")
        raise AssertionError

    monkeypatch.setattr(schema, "_prepared", refused)
    assert results(path) == written
    with pytest.raises(OSError, match="cannot be written; make it"):
        with Store.open(path) as store:
            store.retry_failed()
    monkeypatch.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS, ()))
    with pytest.raises(ValueError, match="has version 1 and cannot be brought to 2"):
        load(path)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"file/a\.db': no folder can be made there"):
        new_store(tmp_path / "file" / "a.db")


def test_the_same_plan_opens_the_sweep_and_another_one_is_refused(tmp_path: Path):
    path = database(tmp_path)
    work(str(path))
    new_store(path).close()
    assert load(path).done
    with pytest.raises(ValueError, match=r"other settings(?s:.*)seeds: \[0\] -> \[5\]"):
        new_store(path, plan(seeds=[5]))
    assert len(load(path).done) == 3


def test_a_lock_is_beside_the_database_and_follows_its_process(tmp_path: Path):
    path = database(tmp_path)
    with Store.open(path) as store:
        run = store.begin({})
        assert lock_path(path, run).is_file()
        assert os.access(lock_path(path, run), os.R_OK)
    assert not lock_path(path, run).exists()


def test_two_who_look_at_a_dead_run_do_not_take_each_other_for_it(tmp_path: Path):
    path = lock_path(tmp_path / "a.db", "dead")
    path.touch()
    with path.open() as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        assert not is_alive(tmp_path / "a.db", "dead")
    assert not path.exists()


def test_a_run_killed_between_two_cases_leaves_no_lock_behind(tmp_path: Path):
    path = database(tmp_path)
    connection = sqlite3.connect(path)
    with connection:
        connection.execute("INSERT INTO run VALUES ('dead', '{}', '2026-01-01', NULL)")
    connection.close()
    lock_path(path, "dead").touch()
    with Store.open(path) as store:
        store.begin({})
        assert not lock_path(path, "dead").exists()


def test_claims_survive_the_round_trip_through_the_database(tmp_path: Path):
    with new_store(tmp_path / "a.db") as store:
        stored = store.cases()
    assert stored == plan().cases()
    assert all(isinstance(case, Case) for case in stored)
