"""Whether a run still lives: it holds a lock that the kernel drops with the process, killed or not.

No heartbeat has to run out before the cases of a killed run are free again, and a number of a
process that the system has given away again misleads nobody. Works on one machine, as SQLite's WAL
mode does.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path


class RunLock:
    """Held while a run works; close it at the end.

    Args:
        database: of the sweep; the lock's file is beside it.
        run: id of the run.
    """

    def __init__(self, database: Path, run: str) -> None:
        self._path = lock_path(database, run)
        self._file = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def close(self) -> None:
        """Gives the lock back and removes its file."""
        self._path.unlink(missing_ok=True)
        os.close(self._file)


def lock_path(database: Path, run: str) -> Path:
    """The lock's file."""
    return database.with_name(f"{database.name}-run-{run}")


def is_alive(database: Path, run: str) -> bool:
    """Whether some process holds the lock of a run; the file of a dead one is removed.

    Looking takes a shared lock, so that two who look at once do not take each other for the run,
    and reads only, so that others may look at a sweep that is not theirs to write.
    """
    path = lock_path(database, run)
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    with suppress(OSError):
        path.unlink(missing_ok=True)
    return False
