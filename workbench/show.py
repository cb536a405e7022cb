"""Where a result came from: the provenance of a run folder or of a sweep's database, as text."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from workbench.run_folder import PROVENANCE


def describe(path: Path) -> str:
    """The provenance in lines, nested fields indented.

    Args:
        path: a run folder, its ``provenance.json``, the database of a sweep, or a .safetensors file
            (capture, calibration, weights), which holds its own record.

    Raises:
        FileNotFoundError: nothing is there, or the folder has no provenance.
        ValueError: the file holds none.
    """
    if not path.exists():
        raise FileNotFoundError(f"run={str(path)!r}: no such file or folder")
    if path.is_dir() or path.suffix == ".json":
        record = _read(path / PROVENANCE if path.is_dir() else path)
    elif path.suffix == ".safetensors":
        record = _of_tensors(path)
    else:
        record = _of_sweep(path)
    return "\n".join([str(path), *lines(record, 1)])


def _read(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(
            f"run={str(path.parent)!r}: has no {path.name}; give a folder that a command made"
        )
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"run={str(path)!r}: is not JSON ({error})") from error
    if not isinstance(record, dict):
        raise ValueError(f"run={str(path)!r}: holds no provenance record")
    return record


def _of_tensors(path: Path) -> Mapping[str, Any]:
    try:
        with safe_open(path, framework="numpy") as file:
            found = file.metadata() or {}
    except SafetensorError as error:
        raise ValueError(f"run={str(path)!r}: is no readable safetensors file ({error})") from error
    if not found:
        raise ValueError(f"run={str(path)!r}: holds no provenance record")
    return {name: _structured(found[name]) for name in sorted(found)}


def _structured(text: str) -> Any:
    """Metadata is text; what was a mapping or a list becomes one again."""
    try:
        return json.loads(text) if text.startswith(("{", "[")) else text
    except json.JSONDecodeError:
        return text


def _of_sweep(path: Path) -> Mapping[str, Any]:
    """What was asked for in each run, what the cases ran in and on, and how many there are."""
    from workbench.sweep.store import Store

    with Store.open(path) as store:
        plan, table = store.plan, store.table()
        runs, environments = store.runs(), store.environments()
        counts = store.counts()
    return {
        "sweep": plan["name"],
        "cases": counts,
        "seeds": plan["seeds"],
        "prompts": plan["prompts"],
        "inputs": plan["inputs"],
        "runs": {run["id"]: {"command": run["record"]["command"], **_times(run)} for run in runs},
        "environments": {
            name: {"cases": sum(case.provenance == name for case in table.done), **found}
            for name, found in environments.items()
        },
        "ran": _distinct(table.done, "ran"),
        "fallbacks": _distinct(table.done, "fallbacks"),
        "emulated": _distinct(table.done, "emulated"),
    }


def _times(run: Mapping[str, Any]) -> dict[str, str]:
    return {"started": run["started"], "ended": run["ended"] or "still runs, or was killed"}


def _distinct(cases: Any, name: str) -> list[str]:
    return sorted({text for case in cases for text in getattr(case, name)})


def lines(value: Any, depth: int = 0) -> Iterator[str]:
    """``name: value``; what does not fit one line goes below, indented."""
    items = value.items() if isinstance(value, Mapping) else ((None, item) for item in value)
    for name, item in items:
        head = "  " * depth + ("-" if name is None else f"{name}:")
        if name == "command" and isinstance(item, list):
            yield f"{head} {shlex.join(map(str, item))}"  # to be pasted, however long
        elif item and (isinstance(item, Mapping) or (isinstance(item, list) and _is_long(item))):
            yield head
            yield from lines(item, depth + 1)
        else:
            yield f"{head} {_short(item)}"


def _is_long(item: list[Any]) -> bool:
    nested = any(isinstance(part, Mapping | list) for part in item)
    return nested or len(", ".join(map(str, item))) > 90


def _short(item: Any) -> str:
    if isinstance(item, Mapping | list):  # a mapping is empty here
        return "; ".join(map(str, item)) or "none"
    if isinstance(item, bool):
        return "yes" if item else "no"
    return "none" if item is None else str(item)
