"""How a result was made: versions, device, git state, checksums of the inputs, command, seeds.

A record has two halves: the :func:`origin`, what was asked for, and the :func:`environment`, what
it ran in. A run folder holds both as one; a sweep keeps them apart: its cases may run elsewhere.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from workbench import __version__
from workbench.paths import checkout_dir, data_dir

PACKAGES = ("torch", "triton", "numpy", "safetensors")
# Fields of nvidia-smi. The limits belong to the machine; the clock of the moment is a measurement.
LIMITS = {"max_sm_mhz": "clocks.max.sm", "max_memory_mhz": "clocks.max.mem", "watts": "power.limit"}
CLOCK = {"sm_mhz": "clocks.sm"}
_CHUNK = 2**20


def provenance(
    command: Sequence[str] | None,
    inputs: Mapping[str, Path | str],
    *,
    seeds: Mapping[str, int] | None = None,
) -> dict[str, object]:
    """A record that says how to make a result again, ready for JSON.

    Args:
        command: the command line; the folder of the program itself is left out.
        inputs: files that went in, by role. Paths stay as given; bundled files are named
            relative to the project, so no folder of this machine enters the record unasked.
        seeds: seeds by what they seed.

    Returns:
        `command`, `time` (UTC, ISO 8601), `versions`, `python`, `platform`, `device`, `git` (commit
        and whether tracked files differ from it, None outside a checkout), `inputs` (path, bytes,
        sha256), `seeds`.

    Raises:
        FileNotFoundError: an input is not there.
    """
    return {**origin(command, inputs, seeds=seeds), **environment()}


def origin(
    command: Sequence[str] | None,
    inputs: Mapping[str, Path | str],
    *,
    seeds: Mapping[str, int] | None = None,
) -> dict[str, object]:
    """What was asked for, and when; needs no torch.

    Args, fields and errors as of :func:`provenance`.
    """
    return {
        "command": None if command is None else _short_command(command),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "inputs": {role: file_record(Path(path)) for role, path in inputs.items()},
        "seeds": dict(seeds or {}),
    }


def environment() -> dict[str, object]:
    """What a result is computed in; equal records of two processes mean equal conditions."""
    return {
        "versions": {"workbench": __version__, **package_versions(PACKAGES)},
        "python": platform.python_version(),
        "platform": platform.platform(terse=True),
        "device": device_record(),
        "git": git_state(checkout_dir()),
    }


def record_id(record: Mapping[str, object]) -> str:
    """12 hex digits that follow from a JSON-able record, whatever the order of its fields."""
    text = json.dumps(record, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def package_versions(names: Iterable[str]) -> dict[str, str | None]:
    """Version of each distribution, None where it is not installed."""
    return {name: _version(name) for name in names}


def device_record() -> dict[str, object]:
    """The GPU that torch uses, or the CPU: name, driver, highest clocks, cores, threads."""
    import torch

    record: dict[str, object] = {"cores": os.cpu_count(), "threads": torch.get_num_threads()}
    if not torch.cuda.is_available():
        nothing = {"driver": None, "clocks": None}
        return {"kind": "cpu", "name": _cpu_name(), **nothing, **record}
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    limits = gpu_state(gpu, LIMITS)
    return {
        "kind": "cuda",
        "name": gpu.name,
        "driver": driver_version(),
        "clocks": limits,
        **record,
    }


def gpu_state(gpu: Any, fields: Mapping[str, str]) -> dict[str, float | None] | None:
    """Clocks (MHz) and power (W) of a GPU as its driver's tool tells them; None without the tool.

    Args:
        gpu: properties of a CUDA device, as of `torch.cuda.get_device_properties`.
        fields: names of the tool's `--query-gpu`, by the names wanted here.
    """
    query = ["--query-gpu=" + ",".join(fields.values()), "--format=csv,noheader,nounits"]
    # By its UUID: the tool counts all GPUs, torch only those it may see.
    text = _output(["nvidia-smi", f"--id=GPU-{gpu.uuid}", *query], Path.cwd())
    if text is None:
        return None
    return dict(zip(fields, map(_number, text.split(","))))


def driver_version(path: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """Version of the NVIDIA kernel driver, None without one."""
    return _first_match(path, r"\s(\d+\.\d+(?:\.\d+)?)\s")


def git_state(root: Path | None) -> dict[str, object] | None:
    """Commit of a checkout and whether tracked files differ from it; None when git cannot say."""
    if root is None or not (root / ".git").exists():
        return None
    commit = _git(root, "rev-parse", "HEAD")
    changes = _git(root, "status", "--porcelain", "--untracked-files=no")
    if commit is None or changes is None:
        return None
    return {"commit": commit, "dirty": bool(changes)}


def sha256_of(path: Path) -> str:
    """Checksum of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def file_record(path: Path) -> dict[str, object]:
    """Path, size and checksum of an input file; FileNotFoundError without it."""
    if not path.is_file():
        raise FileNotFoundError(f"inputs has {str(path)!r}: no such file, so no checksum of it")
    return {"path": _short_path(path), "bytes": path.stat().st_size, "sha256": sha256_of(path)}


def _short_path(path: Path) -> str:
    bundled = data_dir().resolve()
    whole = path.resolve()
    if whole.is_relative_to(bundled):
        return (Path("data") / whole.relative_to(bundled)).as_posix()
    return str(path)


def _short_command(command: Sequence[str]) -> list[str]:
    return [Path(command[0]).name, *command[1:]] if command else []


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    named = _first_match(Path("/proc/cpuinfo"), r"model name\s*:\s*(.+)")
    return named or platform.processor() or platform.machine()


def _first_match(path: Path, pattern: str) -> str | None:
    """First group of the pattern in a system file, None where there is no such file or match."""
    try:
        found = re.search(pattern, path.read_text())
    except OSError:
        return None
    return found.group(1).strip() if found else None


def _git(root: Path, *arguments: str) -> str | None:
    """Output of a git command, None when git is missing or refuses."""
    return _output(["git", "--no-optional-locks", *arguments], root)


def _output(command: Sequence[str], folder: Path) -> str | None:
    """What a program prints, None when it is missing or refuses."""
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=False, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _number(text: str) -> float | None:
    """A figure of a driver's tool; it writes [N/A] where there is none."""
    try:
        return float(text)
    except ValueError:
        return None
