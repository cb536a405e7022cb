"""The denoising phase: dense while the denoising time is at or above a cutoff, sparse below it.

Denoising time t is normalised, 1 = noisiest, and falls. A time is read on the host once per step;
no layer reads a device tensor by itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

DENSE, SPARSE = 0, 1


@dataclass(frozen=True)
class StepTime:
    """Denoising time of one step, on the host.

    Attributes:
        value: in [0, 1]; of per-token times the largest.
        dtype: of the tensor that it was read from, ``None`` for a Python number.
    """

    value: float
    dtype: torch.dtype | None = None

    def phase(self, cutoff: float) -> int:
        """``DENSE`` at or above the cutoff, ``SPARSE`` below."""
        return DENSE if self.value >= self.rounded(cutoff) else SPARSE

    def rounded(self, value: float) -> float:
        """A number as the time's own dtype holds it.

        Otherwise float32 0.9 (0.89999998) would lie below a cutoff of 0.9, and equality is dense.
        """
        if self.dtype is None or not self.dtype.is_floating_point:
            return value
        return torch.tensor(value, dtype=self.dtype).item()


def step_time(time: Any, *, name: str = "time") -> StepTime | None:
    """Reads a denoising time; a device tensor costs one wait for the device.

    Args:
        time: a number, or a tensor of times of which the largest counts: the step stays dense until
            every token is below the cutoff. ``None`` and an empty tensor are no time.

    Raises:
        TypeError: a bool, or something that is no real number.
        ValueError: NaN, infinite, or outside [0, 1].
        RuntimeError: a CUDA tensor while a CUDA graph is being captured.
    """
    if time is None:
        return None
    if not isinstance(time, Tensor):
        return StepTime(_checked(name, time))
    if time.dtype == torch.bool or time.is_complex():
        raise TypeError(f"{name}: dtype {time.dtype}, expected real numbers")
    if time.numel() == 0:
        return None
    if capturing(time):
        raise RuntimeError(
            f"{name}: a tensor on {time.device} cannot be read while a CUDA graph is captured; "
            "resolve it before the capture, with begin_step(time), and capture one graph for each "
            "graph_key()"
        )
    return StepTime(_checked(name, time.detach().max().item()), time.dtype)


def capturing(tensor: Tensor) -> bool:
    """Whether reading the tensor would break a running CUDA graph capture."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def phase(time: Any, cutoff: float | None) -> int | None:
    """Phase of a time: ``DENSE``, ``SPARSE``, or ``None`` without a cutoff or a time."""
    if cutoff is None:
        return None
    moment = step_time(time)
    return None if moment is None else moment.phase(cutoff)


def dense_steps(times: Sequence[float], cutoff: float | None) -> int:
    """How many steps of a schedule are dense: the times at or above the cutoff.

    It is no fraction of the number of steps when the schedule is shifted.
    """
    return sum(phase(time, cutoff) == DENSE for time in times)


def _checked(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}={value!r}: expected a number, got {type(value).__name__}")
    if not math.isfinite(value):
        raise ValueError(f"{name}={value!r}: must be finite")
    if not 0 <= value <= 1:
        raise ValueError(
            f"{name}={value!r}: must be in [0, 1], 1 = noisiest; divide a scheduler's timestep by "
            "its number of training steps"
        )
    return float(value)
