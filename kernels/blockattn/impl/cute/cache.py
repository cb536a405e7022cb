"""Compiled kernels in memory and on disk.

A kernel is looked for in this process, then in a folder of shared libraries, and then compiled.
The file name holds a digest of all that the machine code depends on: the source of this package,
the variant, the architecture, the versions of the packages. A file ends in the SHA-256 of what
comes before, because the system's loader crashes on one that is cut short; it is written under
another name and then renamed, so that processes may come at the same time. Kernels are never
unloaded: a captured CUDA graph may hold them, and there are only as many as variants.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from blockattn.impl.cute.variant import Variant

FOLDER_VARIABLE = "BLOCKATTN_CACHE"
LIMIT_BYTES = 256 * 2**20  # of the folder; what was used least recently goes first
PACKAGES = (
    "nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-cu12", "nvidia-cutlass-dsl-libs-cu13",
    "apache-tvm-ffi", "torch",
)  # fmt: skip
DIGEST_BYTES = 32

Kernel = Callable[..., Any]


@dataclass(frozen=True)
class Load:
    """How a kernel came into this process.

    Attributes:
        source: ``disk`` (a hit) or ``compiled`` (a miss).
        seconds: until it could be launched, imports of compiler and loader included.
        note: what else is worth knowing: a damaged file, a kernel that could not be kept.
    """

    variant: Variant
    arch: str
    source: Literal["disk", "compiled"]
    seconds: float
    note: str = ""

    def __str__(self) -> str:
        verb = "compiled" if self.source == "compiled" else "loaded from disk"
        text = f"kernel for {self.arch} ({self.variant}) {verb} in {self.seconds:.3f} s"
        return f"{text}; {self.note}" if self.note else text


_kernels: dict[tuple[Variant, str], Kernel] = {}
_loads: list[Load] = []
_lock = threading.Lock()


def kernel(variant: Variant, arch: str) -> tuple[Kernel, Load | None]:
    """The host function of a variant, and how it came if this process had to get it."""
    found = _kernels.get((variant, arch))
    if found is not None:
        return found, None
    with _lock:
        found = _kernels.get((variant, arch))
        if found is not None:
            return found, None
        found, load = _obtain(variant, arch)
        _kernels[variant, arch] = found
        _loads.append(load)
    return found, load


def loads() -> tuple[Load, ...]:
    """Every kernel that this process got, in order."""
    return tuple(_loads)


def folder() -> Path:
    """Where kernels are kept: ``$BLOCKATTN_CACHE``, else below the user's cache folder."""
    chosen = os.environ.get(FOLDER_VARIABLE)
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "blockattn" / "cute"


def kept(variant: Variant, arch: str) -> bool:
    """The kernel is in this process or on disk, so that nothing has to be compiled."""
    return (variant, arch) in _kernels or kept_on_disk(variant, arch)


def kept_on_disk(variant: Variant, arch: str) -> bool:
    """The folder has its file, intact or not."""
    return place(variant, arch).is_file()


def contents() -> dict[str, int]:
    """Files of the folder and their bytes, least recently used first."""
    try:
        files = [(path, path.stat()) for path in folder().glob("*.so")]
    except OSError:  # one that another process removed meanwhile
        files = []
    return {path.name: found.st_size for path, found in sorted(files, key=lambda x: x[1].st_mtime)}


def place(variant: Variant, arch: str) -> Path:
    """The file of a variant; its name begins with words for people."""
    words = f"{arch}-{variant.dtype}-{variant.dim}"
    return folder() / f"{words}-{_digest(variant, arch)}.so"


def _digest(variant: Variant, arch: str) -> str:
    what = {
        "variant": asdict(variant),
        "arch": arch,
        "python": sys.version_info[:2],
        "packages": _versions(),
        "source": source_digest(Path(__file__).parent),
    }
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:24]


@cache
def _versions() -> dict[str, str | None]:
    return {name: _version(name) for name in PACKAGES}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


@lru_cache(maxsize=16)
def source_digest(package: Path) -> str:
    """SHA-256 of every Python file of a folder, names included."""
    digest = hashlib.sha256()
    for path in sorted(package.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _obtain(variant: Variant, arch: str) -> tuple[Kernel, Load]:
    start, path, complaint = time.perf_counter(), place(variant, arch), ""
    name = f"attention_{path.stem.rpartition('-')[2]}"
    if path.is_file():
        found, complaint = _from_disk(path, name)
        if found is not None:
            return found, Load(variant, arch, "disk", time.perf_counter() - start)
        warnings.warn(f"{complaint}; compiling the kernel again", stacklevel=2)
    found, note = _compiled(variant, arch, path, name)
    notes = "; ".join(text for text in (complaint, note) if text)
    return found, Load(variant, arch, "compiled", time.perf_counter() - start, notes)


def _from_disk(path: Path, name: str) -> tuple[Kernel | None, str]:
    """The kernel, or what is wrong with its file."""
    import tvm_ffi

    try:
        data = path.read_bytes()
    except OSError as error:
        return None, f"{path} cannot be read ({error})"
    if not intact(data):
        return None, f"{path} is damaged (its checksum differs)"
    try:
        library = tvm_ffi.load_module(str(path))
    except RuntimeError as error:  # a library that it was linked with is gone
        return None, f"{path} cannot be loaded ({' '.join(str(error).split())[:300]})"
    _touch(path)
    return library[name], ""


def intact(data: bytes) -> bool:
    """A file's content ends in the checksum of what comes before."""
    return hashlib.sha256(data[:-DIGEST_BYTES]).digest() == data[-DIGEST_BYTES:]


def _compiled(variant: Variant, arch: str, path: Path, name: str) -> tuple[Kernel, str]:
    """The kernel as it was kept on disk, or compiled again for memory and why it is not kept."""
    from blockattn.impl.cute import build

    try:
        store(path, build.shared_object(build.compile_variant(variant, arch), name))
        found, complaint = _from_disk(path, name)
    except OSError as error:
        found, complaint = None, f"not kept on disk: {error}"
    if found is None:
        found = build.compile_variant(variant, arch, call=True)
    return found, complaint


def store(path: Path, library: bytes) -> None:
    """Writes a library with its checksum in one step, then removes what is too much.

    Raises:
        OSError: the folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(library + hashlib.sha256(library).digest())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    _prune(path)


def _prune(newest: Path) -> None:
    """Removes the least recently used files until the folder is within its limit."""
    files = []
    for path in newest.parent.iterdir():
        try:
            found = path.stat()
        except FileNotFoundError:  # another process was faster
            continue
        files.append((found.st_mtime, found.st_size, path))
    total = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if total <= LIMIT_BYTES:
            return
        if path != newest:
            path.unlink(missing_ok=True)
            total -= size


def _touch(path: Path) -> None:
    """Notes that a file was used; a folder that is only read keeps its times."""
    with suppress(OSError):
        os.utime(path)
