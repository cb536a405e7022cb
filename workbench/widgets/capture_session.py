"""Attention calls of one capture on one device, kept for a while; no widget, no picture."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from blockattn import AttentionTrace, TokenGrid, attend
from workbench.capture import QKV
from workbench.probe import attention_error

# Above this many multiply-adds x 2 of dense attention, errors are measured on request only.
AUTOMATIC_FLOPS = {"cpu": 1e11, "cuda": 1e14}

Item = TypeVar("Item")
Call = Callable[[QKV], tuple[Tensor, AttentionTrace]]


class CaptureLike(Protocol):
    """What a panel needs of a capture; :class:`workbench.capture.reader.Capture` has it."""

    grid: TokenGrid
    entries: list[tuple[int, int]]
    heads: int
    head_dim: int
    title: str

    @property
    def video(self) -> Any:  # no narrower type fits a reader that caches it by a descriptor
        """uint8 ``[frames, height, width, 3]`` or None."""
        ...

    def load(self, layer: int, step: int) -> QKV:
        """q, k, v of one attention call."""
        ...


@dataclass(frozen=True)
class Measured:
    """A real call next to the dense one.

    Attributes:
        trace: what ran, and why nothing faster did.
        relative_l2: float64 ``[H]``, error of each head against dense.
        seconds: wall time of the call, routing included (one call, not a benchmark).
        out: its output ``[1, T, H, D]`` on the CPU, where somebody compares it; else None.
    """

    trace: AttentionTrace
    relative_l2: Tensor
    seconds: float
    out: Tensor | None = None


class Recent:
    """The newest few results by key."""

    def __init__(self, limit: int):
        self._limit = limit
        self._items: OrderedDict[Any, Any] = OrderedDict()

    def peek(self, key: Any) -> Any | None:
        """What is stored, or None."""
        return self._items.get(key)

    def get(self, key: Any, make: Callable[[], Item]) -> Item:
        """What is stored, or else made now and stored."""
        if key not in self._items:
            self._items[key] = make()
        self._items.move_to_end(key)
        while len(self._items) > self._limit:
            self._items.popitem(last=False)
        return self._items[key]


class CaptureSession:
    """Inputs and dense outputs of a capture; the first sequence of a batch is used.

    Nothing is loaded before it is asked for, so that a panel opens although a call is broken.

    Args:
        capture: where q, k, v come from.
        device: where to compute; by default CUDA when there is a GPU.
    """

    def __init__(self, capture: CaptureLike, device: torch.device | str | None = None):
        if not capture.entries:
            raise ValueError("capture: it holds no (layer, step); record at least one")
        default = "cuda" if torch.cuda.is_available() else "cpu"
        self.capture = capture
        self.device = torch.device(default if device is None else device)
        self._inputs, self._dense = Recent(3), Recent(3)
        self.heads, self.head_dim = capture.heads, capture.head_dim

    @property
    def flops(self) -> float:
        """Operations of one dense call: 4 H D T^2."""
        return 4.0 * self.heads * self.head_dim * self.capture.grid.tokens**2

    @property
    def automatic(self) -> bool:
        """Whether an attention call is short enough to follow every setting."""
        return self.flops <= AUTOMATIC_FLOPS.get(self.device.type, AUTOMATIC_FLOPS["cpu"])

    def inputs(self, layer: int, step: int) -> QKV:
        """q, k, v on the device."""

        def make() -> QKV:
            loaded = self.capture.load(layer, step)
            q, k, v = (x[:1].to(self.device) for x in (loaded.q, loaded.k, loaded.v))
            return QKV(q, k, v, loaded.layer, loaded.step, loaded.time)

        return self._inputs.get((layer, step), make)

    def heads_of(self, layer: int, step: int) -> int:
        """Heads of one call; layers may differ."""
        return self.inputs(layer, step).q.shape[2]

    def dense(self, layer: int, step: int) -> Tensor:
        """Output of the dense call ``[1, T, H, D]``."""
        x = self.inputs(layer, step)
        return self._dense.get((layer, step), lambda: attend(x.q, x.k, x.v))

    def run(self, layer: int, step: int, call: Call, *, keep: bool = False) -> Measured:
        """Makes a call, times it, and compares it with dense.

        Args:
            call: takes the inputs, gives the output and its trace.
            keep: also keeps the output.
        """
        x, dense = self.inputs(layer, step), self.dense(layer, step)
        start = self._now()
        out, trace = call(x)
        seconds = self._now() - start
        error = attention_error(out, dense).relative_l2[0].cpu()
        return Measured(trace, error, seconds, out.cpu() if keep else None)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


class TunerSession(CaptureSession):
    """Answers to the states of a tuner."""

    def view(self, state: Any) -> Any:
        """Everything that a picture needs at once, without an attention call."""
        raise NotImplementedError

    def measured(self, state: Any) -> Measured | None:
        """The attention call of this setting if it has been made."""
        raise NotImplementedError

    def measure(self, state: Any) -> Measured:
        """Makes it if need be."""
        raise NotImplementedError
