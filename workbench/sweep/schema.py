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
from typing import Any

APPLICATION_ID = 0x53575042  # marks the file as ours in its header
BUSY_SECONDS = 60.0  # a writer waits so long for another one's transaction
_OPTIONS: dict[str, Any] = {"timeout": BUSY_SECONDS, "isolation_level": None}

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


# What may happen to any statement, by SQLite's primary result code: an error of its own kind, and
# words for the user. Other codes are mistakes of this program and stay as they are.
_TROUBLE: dict[int, tuple[type[Exception], str]] = {
    sqlite3.SQLITE_NOTADB: (ValueError, "is no SQLite file"),
    sqlite3.SQLITE_CORRUPT: (
        ValueError,
        "is damaged; take a copy of it, or save what can be read with sqlite3's .recover",
    ),
    sqlite3.SQLITE_READONLY: (
        OSError,
        "cannot be written; make it and its folder writable, or copy it to one that is",
    ),
    sqlite3.SQLITE_CANTOPEN: (
        OSError,
        "cannot be opened; name a file in a folder where you can write",
    ),
    sqlite3.SQLITE_FULL: (
        OSError,
        "the disk is full; make room and go on with sweep resume, what was finished is kept",
    ),
    sqlite3.SQLITE_IOERR: (OSError, "its disk fails; name a place on a disk of this machine"),
    sqlite3.SQLITE_BUSY: (
        OSError,
        f"another program has held it for {BUSY_SECONDS:g} s; end that, and go on with resume",
    ),
}


@contextmanager
def told(path: Path) -> Iterator[None]:
    """Makes SQLite's errors those of this database, with what to do.

    Raises:
        ValueError: the file is no database, or damaged. OSError: its disk or folder is at fault.
    """
    try:
        yield
    except sqlite3.Error as error:
        if _code(error) not in _TROUBLE:
            raise
        kind, words = _TROUBLE[_code(error)]
        raise kind(f"database={str(path)!r}: {words} ({error})") from error


def connect(path: Path) -> sqlite3.Connection:
    """Opens a database at the newest version, making the tables of an empty one.

    One that cannot be written, such as a colleague's, is opened to read.

    Raises:
        ValueError: the file is something else, damaged, or of a newer version.
        OSError: its place cannot be written.
    """
    with told(path):
        try:
            return _prepared(path, sqlite3.connect(path, **_OPTIONS))
        except sqlite3.OperationalError as error:
            if _code(error) not in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN):
                raise
            if not path.is_file():
                raise
            return _to_read(path)


def _prepared(path: Path, connection: sqlite3.Connection) -> sqlite3.Connection:
    connection.row_factory = sqlite3.Row
    try:
        _migrate(connection, path)  # looks first whether the file is ours
        _use_wal(connection)
        connection.execute("PRAGMA foreign_keys = ON")
    except BaseException:
        connection.close()
        raise
    return connection


def _to_read(path: Path) -> sqlite3.Connection:
    """A connection that changes nothing, not even the files of WAL beside the database."""
    address = path.absolute().as_uri()
    try:
        return _readable(path, sqlite3.connect(f"{address}?mode=ro", uri=True, **_OPTIONS))
    except sqlite3.OperationalError:  # WAL wants to make a file there
        beside = path.with_name(f"{path.name}-wal")
        if beside.is_file() and beside.stat().st_size:
            raise
        return _readable(path, sqlite3.connect(f"{address}?immutable=1", uri=True, **_OPTIONS))


def _readable(path: Path, connection: sqlite3.Connection) -> sqlite3.Connection:
    connection.row_factory = sqlite3.Row
    try:
        _check_ours(connection, path)
        if _version(connection) != len(MIGRATIONS):
            raise ValueError(
                f"database={str(path)!r}: has version {_version(connection)} and cannot be brought "
                f"to {len(MIGRATIONS)} where it cannot be written; copy it elsewhere"
            )
    except BaseException:
        connection.close()
        raise
    return connection


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """All or nothing; other writers wait from the start, so what is read inside stays true."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # SQLite ends it itself when the disk is full
            connection.execute("ROLLBACK")
        raise


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
            if _code(error) != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _check_ours(connection: sqlite3.Connection, path: Path) -> None:
    """An empty file is ours to fill; another program's database is not."""
    mark = _pragma(connection, "application_id")
    tables = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
    if mark != APPLICATION_ID and (mark or tables):
        raise ValueError(f"database={str(path)!r}: is another program's SQLite file; name another")


def _code(error: sqlite3.Error) -> int:
    """SQLite's primary result code; 0 of an error that Python's module raised itself."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _version(connection: sqlite3.Connection) -> int:
    return _pragma(connection, "user_version")


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    return connection.execute(f"PRAGMA {name}").fetchone()[0]
