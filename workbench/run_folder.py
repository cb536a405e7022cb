"""Run folders: one command's results, which appear whole or not at all and replace nothing."""

from __future__ import annotations

import csv
import json
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

RESULTS, PROVENANCE, SUMMARY = "results.csv", "provenance.json", "summary.txt"


def default_folder(name: str, now: datetime | None = None) -> Path:
    """``runs/<time>-<name>`` in the current directory, with a number when it is taken."""
    stamp = (now or datetime.now()).strftime("%Y%m%d-%H%M%S")
    base = Path("runs") / f"{stamp}-{name}"
    number = 1
    path = base
    while path.exists():
        number += 1
        path = base.with_name(f"{base.name}-{number}")
    return path


def check_new(folder: Path) -> Path:
    """Refuses a folder that exists or cannot be made, before any work.

    Raises:
        FileExistsError: it exists; nothing is ever overwritten.
        OSError: its place takes no new folder (tried, because permissions do not tell it all).
    """
    if folder.exists():
        raise FileExistsError(
            f"out={str(folder)!r}: exists already and a run overwrites nothing; give another --out"
        )
    place = next(path for path in folder.absolute().parents if path.exists())
    try:
        with tempfile.TemporaryDirectory(prefix=".workbench-", dir=place):
            pass
    except OSError as error:
        raise OSError(
            f"out={str(folder)!r}: nothing can be written in {place} ({error.strerror}); "
            "give --out a place where you can write"
        ) from error
    return folder


@contextmanager
def whole(folder: Path) -> Iterator[Path]:
    """A hidden folder beside the target that takes its name when everything is written.

    Raises:
        FileExistsError, OSError: as of :func:`check_new`.
    """
    check_new(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.partial")
    part.mkdir()
    try:
        yield part
        check_new(folder)  # another run may have finished meanwhile
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def write_new(path: Path, text: str) -> None:
    """Writes one file that a command was asked for.

    Raises:
        FileExistsError: it exists; an older file is somebody's. OSError: it cannot be made.
    """
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise FileExistsError(
            f"out={str(path)!r}: exists already and nothing is overwritten; give another name"
        ) from error
    except OSError as error:
        raise OSError(f"out={str(path)!r}: cannot be written ({error.strerror})") from error


def write_results(
    folder: Path, columns: Mapping[str, str], rows: Iterable[Mapping[str, object]]
) -> None:
    """``results.csv``: a line for each row; ``columns`` holds every name with its meaning.

    Raises:
        ValueError: a row has a value that no column names.
    """
    with (folder / RESULTS).open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(columns))
        writer.writeheader()
        writer.writerows(rows)


def write_summary(folder: Path, text: str, columns: Mapping[str, str]) -> None:
    """``summary.txt``: what was printed, and what the columns of ``results.csv`` mean."""
    width = max(map(len, columns))
    lines = [f"{name:<{width}}  {meaning}" for name, meaning in columns.items()]
    body = "\n".join([text.rstrip(), "", f"Columns of {RESULTS}", *lines, ""])
    (folder / SUMMARY).write_text(body, encoding="utf-8")


def write_provenance(folder: Path, record: Mapping[str, object]) -> None:
    """``provenance.json``."""
    text = json.dumps(record, indent=2, ensure_ascii=False)
    (folder / PROVENANCE).write_text(text + "\n", encoding="utf-8")
