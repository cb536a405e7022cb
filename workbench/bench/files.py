"""Reports as files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def check_place(path: Path, name: str = "json") -> None:
    """Refuses a file that cannot be written, before any work.

    Raises:
        OSError: with the path and why.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = not path.exists()
        with path.open("a", encoding="utf-8"):
            pass
        if new:
            path.unlink()
    except OSError as error:
        raise OSError(
            f"{name}={str(path)!r}: cannot be written ({error.strerror}); name another file"
        ) from error


def save(made: Mapping[str, Any], path: Path) -> None:
    """Writes a report as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(made, indent=2) + "\n")


def load(path: Path) -> dict[str, Any]:
    """Reads a report.

    Raises:
        OSError, ValueError: no such file, or not a report of ``workbench bench gpu``.
    """
    try:
        made = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"report={str(path)!r}: no such file; make one with `workbench bench gpu --json FILE`"
        ) from error
    except json.JSONDecodeError as error:
        raise ValueError(f"report={str(path)!r}: is not JSON ({error})") from error
    if not isinstance(made, dict) or not isinstance(made.get("rows"), dict):
        raise ValueError(f"report={str(path)!r}: is not a report of workbench bench gpu --json")
    return made
