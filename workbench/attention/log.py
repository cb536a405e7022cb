"""What the attention policy decided, call by call: counted always, recorded on request."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import torch
from torch import Tensor

Kind = Literal["sparse", "dense", "ineligible"]
Key = TypeVar("Key")
MISSING_TIME = ("note", "no denoising time")  # counted besides the call itself
TAGS = (torch.Tag.cudagraph_unsafe,)  # its tensor is on the CPU


@dataclass(frozen=True)
class Verdict:
    """Where one call goes, and why.

    Attributes:
        kind: ``sparse``; ``dense`` because it is meant to be; ``ineligible``, dense because the
            sparse path cannot serve it.
        reason: short and fixed, the key under which the call is counted and warned of.
        detail: what was found, in words.
    """

    kind: Kind
    reason: str
    detail: str = ""


@dataclass(frozen=True)
class CallRecord:
    """One attention call as it ran.

    Attributes:
        layer, step: as the model gave them.
        time: denoising time that decided, ``None`` when there was none.
        kind, reason, detail: the verdict.
        algorithm: what ran, such as ``sol_attn``, ``skip_softmax`` or ``dense``.
        impl: implementation that ran; ``baseline`` is the dense function handed in.
        density: exact pairs / valid pairs that were delivered; 1 for dense.
        emulated: number formats that were emulated on this hardware.
        note: what else one should know, such as a missing denoising time.
        reasons: why faster implementations did not run.
    """

    layer: int
    step: int | None
    time: float | None
    kind: Kind
    reason: str
    detail: str
    algorithm: str
    impl: str
    density: float
    emulated: tuple[str, ...] = ()
    note: str = ""
    reasons: tuple[str, ...] = ()

    @property
    def ran(self) -> str:
        """Algorithm and implementation, such as ``sol_attn: eager``."""
        return f"{self.algorithm}: {self.impl}"


@dataclass(frozen=True)
class CallCounts:
    """How many calls went where since the last reset.

    Attributes:
        sparse: calls that the sparse path served.
        dense: intended dense calls by reason.
        ineligible: calls that the sparse path could not serve, by reason.
        missing_time: sparse calls of a configuration with a dense phase that had no denoising time.
    """

    sparse: int = 0
    dense: dict[str, int] = field(default_factory=dict)
    ineligible: dict[str, int] = field(default_factory=dict)
    missing_time: int = 0

    @property
    def total(self) -> int:
        return self.sparse + sum(self.dense.values()) + sum(self.ineligible.values())

    def __add__(self, other: CallCounts) -> CallCounts:
        return CallCounts(
            self.sparse + other.sparse,
            dict(Counter(self.dense) + Counter(other.dense)),
            dict(Counter(self.ineligible) + Counter(other.ineligible)),
            self.missing_time + other.missing_time,
        )

    def __str__(self) -> str:
        parts = [f"{self.sparse} sparse"]
        parts += [f"{n} dense ({reason})" for reason, n in sorted(self.dense.items())]
        parts += [f"{n} ineligible ({reason})" for reason, n in sorted(self.ineligible.items())]
        if self.missing_time:
            parts.append(f"{self.missing_time} of the sparse ones without a denoising time")
        return ", ".join(parts)


@torch.library.custom_op("workbench::tally", mutates_args=("counts",), tags=TAGS)
def _tally(counts: Tensor, slot: int) -> None:
    """One more in a slot: a node of a compiled graph, so that every run of it counts."""
    counts[slot] += 1


@torch.compiler.assume_constant_result
def _warn(message: str) -> None:
    """Dynamo cannot trace a warning; like this it gives it when it traces, and keeps one graph."""
    warnings.warn(message, stacklevel=5)


class CallLog:
    """Counters, records and what has been warned of, of one attention object.

    Counts live in a small CPU tensor. As Python numbers they would be guarded by ``torch.compile``,
    and every call would compile anew.

    Args:
        known: every (kind, reason) that a verdict can have.
        layers: of the model, counted one by one; without it, all together.
        record: keep a :class:`CallRecord` of every call; reading its density waits for the device.
    """

    def __init__(
        self,
        known: Iterable[tuple[Kind, str]],
        *,
        layers: int | None = None,
        record: bool = False,
    ) -> None:
        self.record = record
        self.records: list[CallRecord] = []
        self._layers = layers
        self._slots: dict[tuple[str, str], int] = {}
        for slot, pair in enumerate((*known, MISSING_TIME)):
            self._slots[pair] = slot
        with torch.inference_mode(False):  # or nothing could be counted outside that mode
            self._counts = torch.zeros((layers or 1) * len(self._slots), dtype=torch.int64)
        self._warned: set[str] = set()

    def count(self, verdict: Verdict, *, layer: int = 0, missing_time: bool = False) -> None:
        """Counts a call that has run."""
        self._add(verdict.kind, verdict.reason, layer)
        if missing_time:
            self._add(*MISSING_TIME, layer)

    def counts(self, layer: int | None = None) -> CallCounts:
        """A snapshot that later calls do not change, of one layer or of all.

        Raises:
            ValueError: a layer of a log that counts them all together.
        """
        table = self._counts.view(-1, len(self._slots))
        if layer is not None and not 0 <= layer < (self._layers or 0):
            raise ValueError(f"layer={layer}: this log counts {self._layers or 'no'} single layers")
        chosen = table.sum(0) if layer is None else table[layer]
        numbers = dict(zip(self._slots, chosen.tolist()))

        def of(kind: str) -> dict[str, int]:
            return {reason: n for (k, reason), n in numbers.items() if k == kind and n}

        sparse = sum(of("sparse").values())
        return CallCounts(sparse, of("dense"), of("ineligible"), numbers[MISSING_TIME])

    def warn_once(self, key: str, message: str) -> None:
        """Warns at the first call with this key, until the next reset."""
        if key not in self._warned:
            self._warned.add(key)
            _warn(message)

    def reset(self) -> None:
        """Forgets calls, records and warnings, for example after a warm-up."""
        self.records.clear()
        self._counts.zero_()
        self._warned.clear()

    def _add(self, kind: str, reason: str, layer: int) -> None:
        slot = self._slots[kind, reason]
        if self._layers is not None:
            slot += layer * len(self._slots)
        if torch.compiler.is_compiling():
            _tally(self._counts, slot)
        else:
            self._counts[slot] += 1


def density_by_step(records: Iterable[CallRecord]) -> dict[int | None, float]:
    """Mean delivered density of each step over its calls, dense ones included; steps ascend."""
    means = _means((record.step, record.density) for record in records)
    return {step: means[step] for step in sorted(means, key=lambda n: n or 0)}


def density_by_layer(records: Iterable[CallRecord]) -> dict[int, float]:
    """Mean delivered density of each layer over its calls, dense ones included."""
    return _means((record.layer, record.density) for record in records)


def mean_density(records: Sequence[CallRecord]) -> float:
    """Mean delivered density over all calls, dense ones included; NaN without a call."""
    return sum(r.density for r in records) / len(records) if records else math.nan


def what_ran(records: Iterable[CallRecord]) -> tuple[str, ...]:
    """Algorithms and implementations, such as ``sol_attn: eager``, each once."""
    return tuple(sorted({record.ran for record in records}))


def _means(pairs: Iterable[tuple[Key, float]]) -> dict[Key, float]:
    groups: dict[Key, list[float]] = {}
    for key, density in pairs:
        groups.setdefault(key, []).append(density)
    return {key: sum(values) / len(values) for key, values in groups.items()}
