"""Writing a capture: tensors go to disk as they come, the finished file appears in one step."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self, cast

import torch
from torch import Tensor

from workbench.attention.phase import step_time
from workbench.capture.format import PARTS, VIDEO, CaptureSpec, tensor_name
from workbench.capture.journal import Digests, Journal, Progress, Times, entries_in

LIMIT_BYTES = 2**30  # 1 GiB: a capture that nobody meant to make this large


def check_target(path: Path) -> None:
    """A capture can be written to ``path``.

    Raises:
        ValueError: it is a folder.
        FileExistsError: it is there already.
    """
    if not path.name or path.is_dir():
        raise ValueError(f"path={str(path)!r}: a folder; name a file in it: a.safetensors")
    if path.exists():
        raise FileExistsError(
            f"path={str(path)!r}: exists already, and a capture replaces nothing; give another "
            "path, or delete the file first"
        )


def check_size(path: Path, spec: CaptureSpec, limit_bytes: int) -> None:
    """Refuses a capture above the limit, or one that the disk has no room for, before any work.

    What an interrupted recording of it already occupies needs no more room.

    Raises:
        ValueError: above the limit. OSError: the disk is too full.
    """
    size = spec.total_bytes
    if size > limit_bytes:
        raise ValueError(
            f"the capture would take {size:,} bytes ({len(spec.entries)} entries of "
            f"{spec.grid.tokens:,} tokens), above limit_bytes={limit_bytes:,}; record fewer layers "
            f"or steps, or raise the limit (--limit-mb {-(-size // 2**20)})"
        )
    partial = _partial(path)
    missing = size - (partial.stat().st_blocks * 512 if partial.is_file() else 0)
    folder = next(folder for folder in path.absolute().parents if folder.is_dir())
    free = shutil.disk_usage(folder).free
    if missing > free:
        raise _full(path, f"{missing:,} bytes, but only {free:,} are free")


def _partial(path: Path) -> Path:
    """Where a recording grows until it is whole."""
    return path.with_name(path.name + ".partial")


def _full(path: Path, what: str) -> OSError:
    advice = "record fewer layers, steps, heads or query rows, or write to another disk"
    return OSError(errno.ENOSPC, f"the capture would take {what}; {advice}", str(path))


class CaptureWriter:
    """Writes `path.partial` and renames it to `path` when everything is there.

    Tensors may come in any order and none is kept in memory. The room of the whole file is taken
    from the disk at the start. A recording that is killed or fails leaves the `.partial` file,
    which no reader takes for a capture, and a list of what it holds; `resume` goes on from there.

        with CaptureWriter("a.safetensors", spec) as writer:
            writer.write(0, 4, time=0.9, q=q, k=k, v=v)

    Args:
        path: the file to make; one that exists is never replaced.
        spec: what the file will hold.
        limit_bytes: the largest file allowed.
        resume: go on with an interrupted recording of the same spec, if there is one. What it holds
            is compared with its checksums; a tensor that differs is recorded again.

    Raises:
        FileExistsError: the file exists, or an interrupted recording and `resume` is False.
        BlockingIOError: another process records this file. ValueError, OSError: it would be too
        large (see `check_size`), or the interrupted recording is of another spec.

    Attributes:
        resumed: entries that an interrupted recording had left.
    """

    def __init__(
        self,
        path: str | Path,
        spec: CaptureSpec,
        *,
        limit_bytes: int = LIMIT_BYTES,
        resume: bool = False,
    ) -> None:
        self.path = Path(path)
        self.spec = spec
        check_target(self.path)
        self.partial = _partial(self.path)
        self._journal = Journal(self.path.with_name(self.path.name + ".journal"), spec)
        left = self._left_over(resume)
        check_size(self.path, spec, limit_bytes)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        done = self._journal.read() if left else Progress()
        self._file = self._open(fresh=not left)
        self._times, self._digests = self._kept(done) if left else self._begin()
        self.resumed = len(self._times)

    def _left_over(self, resume: bool) -> bool:
        """Whether there is an interrupted recording to go on with."""
        count = entries_in(self._journal.path) if self.partial.is_file() else 0
        if count and not resume:
            raise FileExistsError(
                f"{self.partial}: an interrupted recording with {count} of "
                f"{len(self.spec.entries)} entries; resume=True (--resume) goes on with it, or "
                "delete it"
            )
        return count > 0

    def _open(self, *, fresh: bool) -> BinaryIO:
        """The partial file, for this process alone and with the room for all of it."""
        number = os.open(self.partial, os.O_RDWR | os.O_CREAT, 0o666)
        file = cast(BinaryIO, os.fdopen(number, "r+b"))
        size = self.spec.total_bytes
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(number, 0, size)
        except BlockingIOError as error:
            file.close()
            raise BlockingIOError(
                error.errno, "another process records this capture; wait for it", str(self.partial)
            ) from error
        except OSError as error:
            file.close()
            if fresh:
                self.partial.unlink()
            if error.errno != errno.ENOSPC:
                raise
            raise _full(self.path, f"{size:,} bytes, more than is free") from error
        file.truncate(size)  # a longer one of an older attempt, which held nothing
        return file

    def _begin(self) -> tuple[Times, Digests]:
        self._journal.start()
        return {}, {}

    def _kept(self, done: Progress) -> tuple[Times, Digests]:
        """What an interrupted recording really holds: entries whose bytes fit their checksums."""
        good = {name: digest for name, digest in done.digests.items() if self._holds(name, digest)}
        whole = [e for e in done.times if all(tensor_name(*e, part) in good for part in PARTS)]
        names = [tensor_name(*entry, part) for entry in whole for part in PARTS]
        times = {entry: done.times[entry] for entry in whole}
        return times, {name: good[name] for name in names}

    def _holds(self, name: str, digest: str) -> bool:
        place = self.spec.tensors[name]
        self._file.seek(self.spec.header_bytes + place.start)
        found, left = hashlib.sha256(), place.stop - place.start
        while left:
            piece = self._file.read(min(left, 2**24))
            if not piece:
                return False
            found.update(piece)
            left -= len(piece)
        return found.hexdigest() == digest

    def has(self, layer: int, step: int) -> bool:
        """Whether the entry has been written."""
        return (layer, step) in self._times

    def write(self, layer: int, step: int, *, time: float, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Writes one entry, rounded to bfloat16.

        Args:
            layer, step: an entry of the spec.
            time: denoising time in [0, 1], 1 = noisiest.
            q, k, v: `[B, T, H, D]`, any float dtype and device.

        Raises:
            ValueError: an entry that was not announced or is already there, another shape than the
                spec's, a time outside [0, 1], or values that are not finite.
        """
        entry = (layer, step)
        if entry not in self.spec.entries or self.has(layer, step):
            state = "is written already" if self.has(layer, step) else "was not announced"
            raise ValueError(f"layer={layer}, step={step} {state}; entries: {self.spec.entries}")
        if step_time(time) is None:
            raise ValueError("time=None: a capture states the denoising time of every entry")
        names = [tensor_name(layer, step, part) for part in PARTS]
        for name, value in zip(names, (q, k, v)):
            self._check_shape(name, value)
        digests = {name: self._put_rounded(name, value) for name, value in zip(names, (q, k, v))}
        self._file.flush()
        self._journal.add(digests, entry, float(time))
        self._digests.update(digests)
        self._times[entry] = float(time)

    def write_video(self, video: Tensor) -> None:
        """Writes the sampled video, uint8 `[frames, height, width, 3]`."""
        if VIDEO not in self.spec.tensors:
            raise ValueError("video: the spec has no video_shape, so the file has no room for one")
        if video.dtype != torch.uint8:
            raise TypeError(f"video: dtype {video.dtype}, expected uint8 (0 to 255)")
        self._check_shape(VIDEO, video)
        self._digests[VIDEO] = self._put(VIDEO, video.cpu())

    def finish(self) -> Path:
        """Writes the header and gives the file its name.

        Raises:
            ValueError: announced tensors are missing; the `.partial` file stays.
        """
        missing = [name for name in self.spec.tensors if name not in self._digests]
        if missing:
            self._file.close()
            raise ValueError(
                f"{self.partial}: {len(missing)} of {len(self.spec.tensors)} tensors never came, "
                f"first {missing[:3]}; record the layers and steps that the sampling really visits"
            )
        self._file.seek(0)
        self._file.write(self.spec.header(self._times, self._digests))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        made = self.partial.replace(self.path)
        self._journal.path.unlink(missing_ok=True)
        return made

    def close(self) -> None:
        """Gives up: the `.partial` file stays behind, for `resume`."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.finish()
        else:
            self.close()

    def _check_shape(self, name: str, value: Tensor) -> None:
        expected = self.spec.tensors[name].shape
        if tuple(value.shape) != expected:
            raise ValueError(f"{name}: shape {tuple(value.shape)}, but the file holds {expected}")

    def _put_rounded(self, name: str, value: Tensor) -> str:
        rounded = value.detach().to("cpu", torch.bfloat16, memory_format=torch.contiguous_format)
        _check_finite(name, rounded)
        return self._put(name, rounded)

    def _put(self, name: str, value: Tensor) -> str:
        """Writes the bytes; their sha256."""
        data = value.contiguous().view(torch.uint8).numpy().data
        self._file.seek(self.spec.header_bytes + self.spec.tensors[name].start)
        self._file.write(data)
        return hashlib.sha256(data).hexdigest()


def _check_finite(name: str, value: Tensor) -> None:
    # The extremes tell in one pass without a mask: both propagate NaN.
    if all(bool(extreme.isfinite()) for extreme in value.aminmax()):
        return
    bad = ~torch.isfinite(value)
    batch, token, head, _ = bad.nonzero()[0].tolist()
    raise ValueError(
        f"{name}: {int(bad.sum())} values are not finite in bfloat16, the first in batch {batch}, "
        f"head {head}, token {token}; a capture of them would be useless"
    )
