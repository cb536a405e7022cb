"""The capture on its device: one pass for every entry, then real calls, one value at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from blockattn import attend
from workbench.capture import QKV, Capture
from workbench.curves import Curve, Evaluate
from workbench.devices import choose_device
from workbench.probe import Probe, time_ratio
from workbench.tune.rows import Row
from workbench.tune.settings import TuneSettings

CURVE_POINTS = 201

Entry = tuple[int, int]  # (layer, step)
Tick = Callable[[str], None]


@dataclass
class Ran:
    """What served the calls: implementation -> calls, and every reason against a faster one."""

    calls: Counter[str] = field(default_factory=Counter)
    reasons: list[str] = field(default_factory=list)

    def add(self, probe: Probe) -> None:
        self.calls[probe.trace.impl] += 1
        for reason in map(str, probe.trace.reasons):
            if reason not in self.reasons:
                self.reasons.append(reason)


class Sweep:
    """The capture on its device with the one-pass results; measures one value at a time."""

    def __init__(self, capture: Capture, settings: TuneSettings, tick: Tick) -> None:
        self.capture, self.settings, self.tick = capture, settings, tick
        self.device = choose_device(settings.device)
        self.method = settings.method()
        self.ran = Ran()
        self.entries = entries_of(capture, settings)
        self.dtype = str(self.load(self.entries[0]).q.dtype).removeprefix("torch.")
        self.prepared = {entry: self._prepare(entry) for entry in self.entries}

    def load(self, entry: Entry) -> QKV:
        return self.capture.load_rows(*entry).to(self.device)

    def _prepare(self, entry: Entry) -> Any:
        self.tick(f"one pass, layer {entry[0]} step {entry[1]}")
        data = self.load(entry)
        return self.method.prepare(data.q, data.k, data.query_blocks)

    def curve(self, values: Sequence[float]) -> Curve:
        """Density at many values between the least and the largest of those given."""
        low, high = (self.method.position(value) for value in (min(values), max(values)))
        if low == high:
            low -= 1.0  # a curve needs a range; towards dense every position is allowed
        ladder = [self.method.value(float(x)) for x in np.linspace(low, high, CURVE_POINTS)]
        curves = [Curve(ladder, one(ladder), self.method.knob, one) for one in self.passes()]
        return Curve.join(curves)

    def passes(self) -> list[Evaluate]:
        """Density of every head at many values, one function for each entry."""
        return [partial(self.method.density, one) for one in self.prepared.values()]

    def measure(self, value: float) -> list[Row]:
        """Real calls at one value on every entry."""
        return [row for entry in self.entries for row in self._measure_entry(entry, value)]

    def _measure_entry(self, entry: Entry, value: float) -> list[Row]:
        self.tick(f"{self.method.word} {value:.4g}, layer {entry[0]} step {entry[1]}")
        data = self.load(entry)
        inputs = (data.q, data.k, data.v, value, self.settings.impl, data.query_blocks)
        probe = self.method.probe(*inputs)
        self.ran.add(probe)
        density = self.method.density(self.prepared[entry], [value])[..., 0]
        alone = self.method.alone(self.prepared[entry], value)
        return list(self._rows(data, value, probe, density, alone, self._times(data, value)))

    def _times(self, data: QKV, value: float) -> tuple[float | None, float | None]:
        """Medians (dense, sparse) in milliseconds; dense is the best dense implementation here.

        None of a sample of rows: the keys are prepared as for all of them.
        """
        if not self.settings.repeats or data.query_blocks is not None:
            return None, None
        q, k, v = data.q, data.k, data.v
        measured = time_ratio(
            lambda: self.method.run(q, k, v, value, self.settings.impl),
            lambda: attend(q, k, v),
            repeats=self.settings.repeats,
        )
        return 1e3 * measured.dense, 1e3 * measured.sparse

    def _rows(
        self,
        data: QKV,
        value: float,
        probe: Probe,
        density: Tensor,
        alone: Tensor | None,
        times: tuple[float | None, float | None],
    ) -> Iterable[Row]:
        delivered = probe.density_per_head
        for batch, head in np.ndindex(*density.shape):
            at = (batch, head)
            yield Row(
                layer=data.layer,
                step=data.step,
                time=data.time,
                batch=batch,
                head=self.capture.head_indices[head],
                value=value,
                density=float(density[at]),
                density_delivered=float(delivered[at]),
                density_alone=None if alone is None else float(alone[at]),
                relative_l2=float(probe.error.relative_l2[at]),
                cosine=float(probe.error.cosine[at]),
                max_abs=float(probe.error.max_abs[at]),
                ratio_estimated=self.method.estimate(float(delivered[at])),
                dense_ms=times[0],
                sparse_ms=times[1],
                impl=probe.trace.impl,
            )


def entries_of(capture: Capture, settings: TuneSettings) -> list[Entry]:
    """(layer, step) pairs to measure, without those that the server will run dense.

    Raises:
        ValueError: the capture lacks a layer or step asked for, or nothing is left.
    """
    chosen = _among("layers", settings.layers, capture.layers)
    steps = _among("steps", settings.steps, capture.steps)
    dense = settings.dense_layers or ()
    found = [(a, b) for a, b in capture.entries if a in chosen and b in steps and a not in dense]
    cutoff = settings.disabled_until_timestep
    if cutoff is not None:
        found = [entry for entry in found if capture.time(*entry) < cutoff]
    if not found:
        raise ValueError(
            f"layers={settings.layers}, steps={settings.steps}, "
            f"dense_layers={settings.dense_layers}, disabled_until_timestep={cutoff}: "
            f"nothing sparse is left of the capture's (layer, step) {capture.entries}"
        )
    return found


def _among(name: str, wanted: Sequence[int] | None, present: Sequence[int]) -> set[int]:
    missing = sorted(set(wanted or ()) - set(present))
    if missing:
        raise ValueError(
            f"{name}={list(wanted or ())}: the capture has no {missing}; it has {present}"
        )
    return set(present if wanted is None else wanted)
