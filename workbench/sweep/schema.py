"""Tables of a sweep's database, and the steps from each older version to the newest one.

SQLite in WAL mode: readers and writers do not block each other, and a transaction is there as a
whole or not at all, whenever the process is killed. WAL needs shared memory, so the file has to be
on a disk of the machine whose processes write it.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

APPLICATION_ID = 0x53575042  # marks the file as ours in its header
BUSY_SECONDS = 60.0  # a writer waits so long for another one's transaction

# MIGRATIONS[n] leads from version n to n + 1. A released one is never edited: add another.
MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        "CREATE TABLE sweep (name TEXT NOT NULL, plan TEXT NOT NULL, created TEXT NOT NULL)",
        # One start of the program on this sweep. ended is NULL while it works, or was killed.
        """CREATE TABLE run (
            id TEXT PRIMARY KEY, record TEXT NOT NULL, started TEXT NOT NULL, ended TEXT)""",
        "CREATE TABLE provenance (id TEXT PRIMARY KEY, record TEXT NOT NULL)",
        """CREATE TABLE sweep_case (
            key TEXT PRIMARY KEY,
            position INTEGER NOT NULL UNIQUE,
            content TEXT NOT NULL,
            state TEXT NOT NULL DEFAULT 'pending'
                CHECK (state IN ('pending', 'running', 'done', 'failed')),
            reason TEXT,
            traceback TEXT,
            notes TEXT,
            run TEXT REFERENCES run (id),
            provenance TEXT REFERENCES provenance (id),
            started TEXT,
            finished TEXT)""",
        "CREATE INDEX sweep_case_state ON sweep_case (state, position)",
        """CREATE TABLE metric_kind (
            name TEXT PRIMARY KEY, unit TEXT NOT NULL, meaning TEXT NOT NULL,
            better TEXT NOT NULL, timing INTEGER NOT NULL)""",
        # NULL is NaN, which SQLite does not store.
        """CREATE TABLE metric (
            case_key TEXT NOT NULL REFERENCES sweep_case (key),
            name TEXT NOT NULL REFERENCES metric_kind (name),
            value REAL,
            PRIMARY KEY (case_key, name)) WITHOUT ROWID""",
    ),
)


def connect(path: Path) -> sqlite3.Connection:
    """Opens a database at the newest version, making the tables of an empty one.

    Raises:
        ValueError: the file is something else, or of a newer version.
        OSError: its place cannot be written.
    """
    try:
        connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None)
    except sqlite3.OperationalError as error:
        raise OSError(f"database={str(path)!r}: cannot be opened ({error})") from error
    connection.row_factory = sqlite3.Row
    try:
        _migrate(connection, path)  # looks first whether the file is ours
        _use_wal(connection)
        connection.execute("PRAGMA foreign_keys = ON")
    except (sqlite3.DatabaseError, ValueError) as error:
        connection.close()
        if type(error) is sqlite3.DatabaseError:  # its subclasses are about other things
            raise ValueError(f"database={str(path)!r}: is no SQLite file ({error})") from error
        raise
    return connection


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """All or nothing; other writers wait from the start, so what is read inside stays true."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def _migrate(connection: sqlite3.Connection, path: Path) -> None:
    if _version(connection) == len(MIGRATIONS) and _pragma(connection, "application_id"):
        return _check_ours(connection, path)
    with transaction(connection):
        _check_ours(connection, path)
        found = _version(connection)
        if found > len(MIGRATIONS):
            raise ValueError(
                f"database={str(path)!r}: has version {found}, this workbench knows up to "
                f"{len(MIGRATIONS)}; use the newer workbench that wrote it"
            )
        for statement in (line for step in MIGRATIONS[found:] for line in step):
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")


def _use_wal(connection: sqlite3.Connection) -> None:
    """Waits for others itself: SQLite's own timeout does not hold for a change of this mode."""
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _check_ours(connection: sqlite3.Connection, path: Path) -> None:
    """An empty file is ours to fill; another program's database is not."""
    mark = _pragma(connection, "application_id")
    tables = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
    if mark != APPLICATION_ID and (mark or tables):
        raise ValueError(f"database={str(path)!r}: is another program's SQLite file; name another")


def _version(connection: sqlite3.Connection) -> int:
    return _pragma(connection, "user_version")


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    return connection.execute(f"PRAGMA {name}").fetchone()[0]
