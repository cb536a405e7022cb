"""A setting: the level of every layer at every denoising time, as few numbers.

    level(layer, time) = levels[group of (layer, time)] + span * shape(time)

A level is tau, or log2(lambda): higher is sparser. One group is one global value; the layers or
windows of denoising time may be groups of their own; a shape that is not constant makes a schedule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from blockattn import checks
from workbench.attention.phase import DENSE, phase
from workbench.calibrate.scores import ALGORITHMS

GROUPS = ("global", "layer", "window")
SHAPES: dict[str, Callable[[float, float], float]] = {
    "constant": lambda time, at: 0.0,
    "linear": lambda time, at: time,
    "cosine": lambda time, at: (1 - math.cos(math.pi * time)) / 2,
    "step": lambda time, at: float(time >= at),
}


@dataclass(frozen=True)
class Form:
    """Which numbers a setting has.

    Attributes:
        by: ``global``, ``layer`` or ``window``: what has a level of its own.
        edges: for windows: falling denoising times in (0, 1); n edges make n + 1 windows, and an
            edge belongs to the noisier of its two.
        shape: over denoising time: ``constant``, ``linear``, ``cosine`` or ``step``; 0 at the video
            (t = 0) and 1 at the noise (t = 1).
        span: level at the noise minus level at the video; positive is sparser early.
        at: denoising time of a ``step``: at or above it the span is added.
        dense_layers: layers that stay dense; Sol-Attn only, as VisualGen's field.
        cutoff: dense at or above this denoising time (``disabled_until_timestep``).

    Raises:
        TypeError, ValueError: a value that is not allowed, or that nothing would look at.
    """

    by: str = "global"
    edges: tuple[float, ...] = ()
    shape: str = "constant"
    span: float = 0.0
    at: float | None = None
    dense_layers: tuple[int, ...] = ()
    cutoff: float | None = None

    def __post_init__(self) -> None:
        checks.one_of("by", self.by, GROUPS)
        checks.one_of("shape", self.shape, tuple(SHAPES))
        checks.finite_number("span", self.span)
        self._check_edges()
        if (self.shape == "constant") != (self.span == 0):
            raise ValueError(
                f"shape={self.shape!r}, span={self.span!r}: a constant has no span, and the other "
                "shapes need one (level at the noise minus level at the video, not 0)"
            )
        if (self.shape == "step") != (self.at is not None):
            raise ValueError(
                f"shape={self.shape!r}, at={self.at!r}: a step has a time, others none"
            )
        for layer in self.dense_layers:
            checks.integer("dense_layers", layer)
        for name in ("at", "cutoff"):
            time = getattr(self, name)
            if time is not None and not 0 < checks.finite_number(name, time) <= 1:
                raise ValueError(f"{name}={time!r}: must be a denoising time in (0, 1]")

    def _check_edges(self) -> None:
        edges = [checks.finite_number("edges", edge) for edge in self.edges]
        if (self.by == "window") != bool(edges):
            raise ValueError(
                f"by={self.by!r}, edges={self.edges!r}: windows, and they alone, have edges"
            )
        if edges != sorted(set(edges), reverse=True) or not all(0 < edge < 1 for edge in edges):
            raise ValueError(f"edges={self.edges!r}: must fall strictly within (0, 1)")

    def groups(self, layers: int) -> int:
        """How many levels a setting of this form has."""
        return {"global": 1, "layer": layers, "window": len(self.edges) + 1}[self.by]

    def group(self, layer: int, time: float) -> int:
        """Index of the level of a call."""
        if self.by == "layer":
            return layer
        return sum(time < edge for edge in self.edges)

    def offset(self, time: float) -> float:
        """What the schedule adds to the level at a denoising time."""
        return self.span * SHAPES[self.shape](time, 0.0 if self.at is None else self.at)

    def dense(self, layer: int, time: float) -> bool:
        """Whether a call is meant to be dense."""
        return layer in self.dense_layers or phase(time, self.cutoff) == DENSE

    def group_map(self, layers: int, times: Sequence[float]) -> Tensor:
        """Group of every call, int64 ``[layers, steps]``; -1 where it is dense."""
        return torch.tensor(
            [[-1 if self.dense(n, t) else self.group(n, t) for t in times] for n in range(layers)]
        )

    def offsets(self, times: Sequence[float]) -> Tensor:
        """:meth:`offset` of every step, float64 ``[steps]``."""
        return torch.tensor([self.offset(time) for time in times], dtype=torch.float64)

    def group_name(self, index: int) -> str:
        """Such as ``layer 3`` or ``0.5 <= t < 0.9``."""
        if self.by == "global":
            return "all calls"
        if self.by == "layer":
            return f"layer {index}"
        above = f"{self.edges[index]:g} <= " if index < len(self.edges) else ""
        return f"{above}t" + (f" < {self.edges[index - 1]:g}" if index else "")


@dataclass(frozen=True)
class Setting:
    """A form with its levels: what a sparse run needs.

    Attributes:
        algorithm: ``sol_attn`` or ``skip_softmax``.
        form: which numbers there are.
        levels: one for each group; NaN where a group has no sparse call.
        thresh_type: of Sol-Attn.
    """

    algorithm: str
    form: Form
    levels: tuple[float, ...]
    thresh_type: str = "diag"

    def __post_init__(self) -> None:
        checks.one_of("algorithm", self.algorithm, ALGORITHMS)
        count = len(self.levels) if self.form.by == "layer" else self.form.groups(0)
        if len(self.levels) != count or all(math.isnan(level) for level in self.levels):
            raise ValueError(
                f"levels={self.levels!r}: must be {count} for {self.form.by!r}, not all NaN"
            )
        if self.form.dense_layers and self.algorithm != "sol_attn":
            raise ValueError(
                f"dense_layers={self.form.dense_layers!r}: only sol_attn has this field; list them "
                "under 'ignore' in the checkpoint's calibration"
            )

    def level(self, layer: int, time: float) -> float:
        """Level of a call."""
        return self.levels[self.form.group(layer, time)] + self.form.offset(time)

    def value(self, layer: int, time: float) -> float:
        """The knob itself: tau, or lambda."""
        return knob(self.algorithm, self.level(layer, time))

    def level_map(self, layers: int, times: Sequence[float]) -> Tensor:
        """Level of every call, float64 ``[layers, steps]``; -inf where it is meant to be dense."""
        dense = self.form.group_map(layers, times) < 0
        levels = torch.tensor(
            [[self.level(layer, time) for time in times] for layer in range(layers)],
            dtype=torch.float64,
        )
        return levels.masked_fill(dense, -math.inf)

    def to_json(self) -> dict[str, Any]:
        """Ready for JSON; :meth:`from_json` reads it back equal."""
        levels = [None if math.isnan(level) else level for level in self.levels]
        return {**asdict(self), "levels": levels}

    @staticmethod
    def from_json(fields: dict[str, Any]) -> Setting:
        form: dict[str, Any] = {
            name: tuple(item) if isinstance(item, list) else item
            for name, item in fields["form"].items()
        }
        levels = tuple(math.nan if level is None else level for level in fields["levels"])
        return Setting(fields["algorithm"], Form(**form), levels, fields["thresh_type"])


def knob(algorithm: str, level: float) -> float:
    """tau is the level itself; lambda is 2 to the level."""
    return level if algorithm == "sol_attn" else 2.0**level
