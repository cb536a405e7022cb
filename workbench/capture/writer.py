"""Writing a capture: tensors go to disk as they come, the finished file appears in one step."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from workbench.attention.phase import step_time
from workbench.capture.format import PARTS, VIDEO, CaptureSpec, tensor_name

LIMIT_BYTES = 2**30  # 1 GiB: a capture that nobody meant to make this large


def check_size(path: Path, spec: CaptureSpec, limit_bytes: int) -> None:
    """Refuses a capture above the limit, or one that the disk has no room for, before any work.

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
    free = shutil.disk_usage(path.parent).free
    if size > free:
        raise OSError(
            errno.ENOSPC,
            f"the capture would take {size:,} bytes, but only {free:,} are free; "
            "record fewer layers or steps, or write to another disk",
            str(path),
        )


class CaptureWriter:
    """Writes `path.partial` and renames it to `path` when everything is there.

    Tensors may come in any order and none is kept in memory. A recording that is killed or fails
    leaves only the `.partial` file, which no reader takes for a capture.

        with CaptureWriter("a.safetensors", spec) as writer:
            writer.write(0, 4, time=0.9, q=q, k=k, v=v)

    Args:
        path: the file to make; one that exists is never replaced.
        spec: what the file will hold.
        limit_bytes: the largest file allowed.

    Raises:
        FileExistsError: the file exists. ValueError, OSError: it would be too large (see
        `check_size`).
    """

    def __init__(
        self, path: str | Path, spec: CaptureSpec, *, limit_bytes: int = LIMIT_BYTES
    ) -> None:
        self.path = Path(path)
        self.spec = spec
        if not self.path.name or self.path.is_dir():
            raise ValueError(f"path={str(path)!r}: a folder; name a file in it: a.safetensors")
        if self.path.exists():
            raise FileExistsError(
                f"path={str(path)!r}: exists already, and a capture replaces nothing; give another "
                "path, or delete the file first"
            )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        check_size(self.path, spec, limit_bytes)
        self._times: dict[tuple[int, int], float] = {}
        self._digests: dict[str, str] = {}
        self.partial = self.path.with_name(self.path.name + ".partial")
        self._file = self.partial.open("wb")
        self._file.truncate(spec.total_bytes)

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
        for part, value in zip(PARTS, (q, k, v)):
            name = tensor_name(layer, step, part)
            self._check_shape(name, value)
            rounded = value.detach().to("cpu", torch.bfloat16)
            _check_finite(name, rounded)
            self._put(name, rounded)
        self._times[entry] = float(time)

    def write_video(self, video: Tensor) -> None:
        """Writes the sampled video, uint8 `[frames, height, width, 3]`."""
        if VIDEO not in self.spec.tensors:
            raise ValueError("video: the spec has no video_shape, so the file has no room for one")
        if video.dtype != torch.uint8:
            raise TypeError(f"video: dtype {video.dtype}, expected uint8 (0 to 255)")
        self._check_shape(VIDEO, video)
        self._put(VIDEO, video.cpu())

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
        return self.partial.replace(self.path)

    def close(self) -> None:
        """Gives up: the `.partial` file stays behind."""
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

    def _put(self, name: str, value: Tensor) -> None:
        data = value.contiguous().view(torch.uint8).numpy().data
        self._file.seek(self.spec.header_bytes + self.spec.tensors[name].start)
        self._file.write(data)
        self._digests[name] = hashlib.sha256(data).hexdigest()


def _check_finite(name: str, value: Tensor) -> None:
    bad = ~torch.isfinite(value)
    if bool(bad.any()):
        batch, token, head, _ = bad.nonzero()[0].tolist()
        raise ValueError(
            f"{name}: {int(bad.sum())} values are not finite in bfloat16, the first in batch "
            f"{batch}, head {head}, token {token}; a capture of them would be useless"
        )
