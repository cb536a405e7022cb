"""Taking q, k, v off a GPU without holding it up.

The model's stream only makes a private copy on the device. A side stream carries that copy to
pinned memory of the host, and a thread writes it to disk once it is there. Memory is bounded by a
fixed number of buffers: when the disk is slower than the model the host waits for the oldest one,
and `waited` says for how long.
"""

from __future__ import annotations

import time as clock
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import torch
from torch import Tensor

from blockattn import checks
from workbench.capture.format import PARTS, CaptureSpec
from workbench.capture.writer import CaptureWriter

BUFFERS = 2


@dataclass
class Buffer:
    """Room on the host for one entry: q, k, v in bfloat16, and what is being done with it."""

    parts: tuple[Tensor, ...]
    copied: torch.cuda.Event | None = None
    job: Future[None] | None = None


class BackgroundWriter:
    """Hands entries to a `CaptureWriter` from a thread of its own.

    Args:
        writer: the file; nothing else may write to it until `finish` has returned.
        buffers: entries under way at once, each `host_bytes(spec, 1)` of pinned memory.

    Attributes:
        waited: seconds the caller was held up because every buffer was still being written.
    """

    def __init__(self, writer: CaptureWriter, *, buffers: int = BUFFERS) -> None:
        self.writer = writer
        self.waited = 0.0
        self._count = checks.integer("buffers", buffers, minimum=1)
        self._buffers: list[Buffer] = []
        self._next = 0
        self._side: torch.cuda.Stream | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="capture")

    def put(self, layer: int, step: int, *, time: float, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Queues one entry; arguments as for `CaptureWriter.write`, of shapes the file holds.

        Raises:
            ValueError, OSError: what the thread met at an earlier entry.
        """
        buffer = self._free_buffer(pinned=q.is_cuda)
        self._copy(buffer, (q, k, v))
        buffer.job = self._thread.submit(self._write, buffer, layer, step, time)

    def finish(self) -> None:
        """Waits until everything queued is written.

        Raises:
            ValueError, OSError: what the thread met, the earliest first.
        """
        for buffer in self._buffers[self._next :] + self._buffers[: self._next]:
            if buffer.job is not None:
                buffer.job.result()

    def close(self) -> None:
        """Finishes and ends the thread."""
        self._thread.shutdown(wait=True)
        self.finish()

    def _free_buffer(self, *, pinned: bool) -> Buffer:
        if not self._buffers:  # all at once: pinning memory makes every stream wait
            shapes = [self.writer.spec.part_shape(part) for part in PARTS]
            self._buffers = [Buffer(_room(shapes, pinned=pinned)) for _ in range(self._count)]
        buffer = self._buffers[self._next]
        self._next = (self._next + 1) % self._count
        if buffer.job is not None and not buffer.job.done():
            start = clock.perf_counter()
            wait([buffer.job])
            self.waited += clock.perf_counter() - start
        if buffer.job is not None:
            buffer.job.result()
        return buffer

    def _copy(self, buffer: Buffer, values: tuple[Tensor, ...]) -> None:
        if not values[0].is_cuda:
            for room, value in zip(buffer.parts, values):
                room.copy_(value.detach())
            return
        device = values[0].device
        self._side = self._side or torch.cuda.Stream(device)
        # A copy of our own: the model may write into q, k, v as soon as its attention is done.
        whole = {"copy": True, "memory_format": torch.contiguous_format}
        kept = [value.detach().to(torch.bfloat16, **whole) for value in values]
        self._side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._side):
            for room, value in zip(buffer.parts, kept):
                value.record_stream(self._side)  # its memory is not reused before the copy is done
                room.copy_(value, non_blocking=True)
        buffer.copied = torch.cuda.Event(blocking=True)  # the thread sleeps until then
        buffer.copied.record(self._side)

    def _write(self, buffer: Buffer, layer: int, step: int, time: float) -> None:
        if buffer.copied is not None:
            buffer.copied.synchronize()
        q, k, v = buffer.parts
        self.writer.write(layer, step, time=time, q=q, k=k, v=v)


def host_bytes(spec: CaptureSpec, buffers: int = BUFFERS) -> int:
    """Pinned memory of so many buffers: torch rounds each one up to a power of two."""
    return buffers * (1 << (spec.entry_bytes - 1).bit_length())


def _room(shapes: list[tuple[int, int, int, int]], *, pinned: bool) -> tuple[Tensor, ...]:
    """One piece of memory, cut into q, k and v."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    whole = torch.empty(sum(sizes), dtype=torch.bfloat16, pin_memory=pinned)
    return tuple(x.view(shape) for x, shape in zip(whole.split(sizes), shapes))
