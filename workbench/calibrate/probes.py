"""Error and recall of real sparse calls along a dense sampling, call by call, worst first.

Each call runs sparse and is compared with dense on the same q, k, v; the dense output goes on, so
that an error is that call's own and does not compound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
from torch import Tensor

from workbench.calibrate.recall import best_recall, block_mass, recall
from workbench.calibrate.samples import Samples, Tick
from workbench.calibrate.setting import Setting
from workbench.models import AttentionCall, AttentionFn, VideoDiT, dense_attention
from workbench.probe import Probe, probe_skip, probe_sol


@dataclass(frozen=True)
class ProbeRow:
    """One head of one real sparse call.

    Attributes:
        label, seed: of the video. batch: 1 is the half without the class, with guidance.
        layer, step, time, head: where it is; denoising time, 1 = noisiest.
        value: tau or lambda. density: exact / valid pairs delivered.
        relative_l2, cosine, max_abs: against dense on the same q, k, v.
        recall: softmax mass inside the exact pairs, in [0, 1].
        best_recall: the most that any router reaches with as many blocks in every row.
    """

    label: str
    seed: int
    layer: int
    step: int
    time: float
    batch: int
    head: int
    value: float
    density: float
    relative_l2: float
    cosine: float
    max_abs: float
    recall: float
    best_recall: float


COLUMNS = tuple(item.name for item in fields(ProbeRow))


@dataclass(frozen=True)
class Probes:
    """Every head of every sparse call of a setting."""

    rows: list[ProbeRow]

    def worst(self, count: int | None = None) -> list[ProbeRow]:
        """Rows by falling relative error; one that is not finite comes first."""
        return sorted(self.rows, key=lambda row: -_size(row.relative_l2))[:count]

    def mean(self, name: str) -> float:
        """Mean of a column over all rows."""
        return float(np.mean(self.column(name)))

    def column(self, name: str) -> np.ndarray:
        """A column of numbers, float64 ``[rows]``.

        Raises:
            ValueError: no such column of numbers.
        """
        numbers = [column for column in COLUMNS if column != "label"]
        if name not in numbers:
            raise ValueError(f"name={name!r}: must be one of {', '.join(numbers)}")
        return np.array([getattr(row, name) for row in self.rows], dtype=float)

    def table(self, name: str, row: str = "layer", column: str = "step") -> np.ndarray:
        """Mean of a column for every pair of two others, NaN where no call was sparse."""
        values, down, across = (self.column(key) for key in (name, row, column))
        shape = (int(down.max()) + 1, int(across.max()) + 1)
        total, count = np.zeros(shape), np.zeros(shape)
        place = (down.astype(int), across.astype(int))
        np.add.at(total, place, values)
        np.add.at(count, place, 1)
        return np.where(count > 0, total / np.maximum(count, 1), math.nan)


class CallProbe:
    """An attention function that probes every sparse call of a setting and returns dense.

    Args:
        setting: what to probe.
        attention: the dense attention, compared with and handed on.
        mass: whether to compute the recall, which costs a dense pass over the scores.
        impl: implementation of the sparse calls.

    Attributes:
        rows: a row for each head of each sparse call.
    """

    def __init__(
        self,
        setting: Setting,
        label: str = "",
        seed: int = 0,
        *,
        attention: AttentionFn = dense_attention,
        mass: bool = True,
        impl: str = "auto",
    ) -> None:
        self.setting, self.attention, self.mass, self.impl = setting, attention, mass, impl
        self.label, self.seed = label, seed
        self.rows: list[ProbeRow] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
        if call.time is None or call.step is None:
            raise ValueError(
                f"layer {call.layer}: the call has no step or no denoising time, which a row "
                "states; probe a sampling"
            )
        dense = self.attention(q, k, v, call)
        if not self.setting.form.dense(call.layer, call.time):
            value = self.setting.value(call.layer, call.time)
            probe = probe_call(self.setting, value, q, k, v, dense=dense, impl=self.impl)
            self._add(q, k, probe, (call.layer, call.step, call.time), value)
        return dense

    def _add(
        self, q: Tensor, k: Tensor, probe: Probe, place: tuple[int, int, float], value: float
    ) -> None:
        route = probe.trace.computed
        share = best = None
        if self.mass:
            mass = block_mass(q, k, route.block)
            share, best = recall(mass, route), best_recall(mass, route)
        for batch, head in np.ndindex(*probe.density_per_head.shape):
            figures: Sequence[Tensor | None] = (
                probe.density_per_head,
                probe.error.relative_l2,
                probe.error.cosine,
                probe.error.max_abs,
                share,
                best,
            )
            numbers = (math.nan if x is None else float(x[batch, head]) for x in figures)
            self.rows.append(ProbeRow(self.label, self.seed, *place, batch, head, value, *numbers))


def probe_call(
    setting: Setting, value: float, q: Tensor, k: Tensor, v: Tensor, *, dense: Tensor, impl: str
) -> Probe:
    """One real sparse call at a value of the knob against its dense output."""
    run: Callable[..., Probe] = probe_skip
    extra: dict[str, str] = {}
    if setting.algorithm == "sol_attn":
        run, extra = probe_sol, {"thresh_type": setting.thresh_type}
    return run(q, k, v, value, dense=dense, impl=impl, **extra)


def probe_setting(
    model: VideoDiT,
    setting: Setting,
    samples: Samples,
    *,
    mass: bool = True,
    impl: str = "auto",
    tick: Tick = lambda label: None,
) -> Probes:
    """Probes every sparse call of a setting along dense samplings of some videos."""
    rows: list[ProbeRow] = []
    for index, (label, seed) in enumerate(samples.videos):
        tick(f"{label}, seed {seed}")
        probe = CallProbe(setting, str(label), seed, mass=mass, impl=impl)
        samples.run(model, index, probe)
        rows += probe.rows
    return Probes(rows)


def _size(error: float) -> float:
    return math.inf if math.isnan(error) else error
