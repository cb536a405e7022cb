"""A measured case of a row, and what is shared by the rows: the baseline, the implementations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from blockattn.impl import registry
from blockattn.problem import make_problem
from workbench.bench import peers
from workbench.bench.inputs import QKV, Bench
from workbench.bench.roofline import Ceilings
from workbench.bench.timing import medians

NOT_OURS = ("cudnn", "flash", "eager", "reference")  # what the table of targets is not about


@dataclass(frozen=True)
class Case:
    """One setting of one row.

    Attributes:
        row: of the table of targets.
        setting: shape, dtype, kind of data, delivered density and what was compared, in words.
        baseline: what the figure is a ratio to.
        measured: the figure by implementation, in the row's unit.
        peers: the same figure of other libraries.
        density: exact pairs / valid pairs that were delivered, where there is a route.
        samples: seconds of every repeat by what was timed.
        more: time split, roofline, ladder: what explains the figure.
    """

    row: int
    setting: str
    baseline: str
    measured: Mapping[str, float]
    peers: Mapping[str, float] = field(default_factory=dict)
    density: float | None = None
    samples: Mapping[str, Sequence[float]] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> dict[str, float]:
        """Medians of the samples."""
        return medians(self.samples)


@dataclass
class Run:
    """A run in progress: how it measures, the ceilings, what other libraries said.

    Attributes:
        impls: implementations of this project that are measured, best first.
        absent: peers that are not timed, with the reason.
    """

    bench: Bench
    ceilings: Ceilings
    impls: tuple[str, ...]
    absent: dict[str, str] = field(default_factory=dict)
    _dense: dict[tuple, tuple[str, dict[str, float]]] = field(default_factory=dict)

    def best_dense(self, data: QKV) -> tuple[str, Callable[[], Tensor]]:
        """Name and call of the fastest dense attention of other libraries for these tensors."""
        key = (tuple(data[0].shape), data[0].data_ptr())
        calls = self.fit("dense", peers.dense_peers(*data))
        if key not in self._dense:
            found = medians(self.bench.timer(calls, max(3, self.bench.sizes.repeats // 3)))
            self._dense[key] = (min(found, key=lambda name: found[name]), found)
        name = self._dense[key][0]
        return name, calls[name]

    def dense_seconds(self, data: QKV) -> dict[str, float]:
        """Medians behind :meth:`best_dense`, by library."""
        self.best_dense(data)
        return self._dense[tuple(data[0].shape), data[0].data_ptr()][1]

    def fit(self, task: str, found: peers.Found) -> dict[str, Callable[[], Tensor]]:
        """Peers that run and agreed with the reference; the others are remembered."""
        for name, reason in peers.reasons(found).items():
            self.absent.setdefault(f"{task}: {name}", reason)
        return {
            name: call
            for name, call in peers.working(found).items()
            if f"{task}: {name}" not in self.absent
        }


def served_by(data: QKV) -> tuple[str, ...]:
    """Implementations of this project's own kernels that serve such tensors here."""
    problem = make_problem(*data)
    return tuple(
        item.name
        for item in registry.implementations()
        if item.name not in NOT_OURS and not item.obstacles(problem)
    )
