"""How long a sweep will take, from cases that ran: finished ones, or controls timed for it."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from workbench.sweep.cases import Case, Sampling
from workbench.sweep.run import Workers, run_case_on
from workbench.sweep.table import SweepTable

Seconds = Mapping[Sampling, Sequence[float]]


@dataclass(frozen=True)
class Estimate:
    """Seconds that are left, and what they were taken from.

    Attributes:
        seconds: ``None`` when some sampler was never timed.
        basis: in words.
    """

    seconds: float | None
    basis: str

    def __str__(self) -> str:
        if self.seconds is None:
            return f"time unknown ({self.basis})"
        return f"about {duration(self.seconds)} ({self.basis})"


def measured_seconds(table: SweepTable) -> dict[Sampling, list[float]]:
    """Seconds of the finished cases of each sampler."""
    found: dict[Sampling, list[float]] = {}
    for case in table.done:
        sampling = Sampling.model_validate(case.sampling)
        found.setdefault(sampling, []).append(case.metrics["case_seconds"])
    return found


def time_controls(cases: Iterable[Case], workers: Workers) -> dict[Sampling, list[float]]:
    """Runs one control of each sampler, one after the other, and keeps nothing else of it.

    Raises:
        TaskError: a control failed.
    """
    first = {case.sampling: case for case in reversed(list(cases)) if case.control}
    return {
        sampling: [run_case_on(workers, case).metrics["case_seconds"]]
        for sampling, case in first.items()
    }


def estimate(cases: Sequence[Case], seconds: Seconds, slots: int, basis: str) -> Estimate:
    """Time that cases take: the median of their sampler's measured ones, over the slots.

    Args:
        cases: that are left.
        seconds: as of :func:`measured_seconds` or :func:`time_controls`.
        slots: cases at a time; that they do not slow each other down is assumed.
        basis: what the seconds are, in words.
    """
    lacking = [case for case in cases if not seconds.get(case.sampling)]
    if lacking:
        return Estimate(None, f"no case like {lacking[0].setting} was timed yet")
    total = sum(statistics.median(seconds[case.sampling]) for case in cases)
    return Estimate(total / min(slots, max(1, len(cases))), basis)


def duration(seconds: float) -> str:
    """``1 h 05 min``, ``3 min 20 s`` or ``12 s``."""
    whole = round(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {whole % 60:02d} s" if minutes else f"{whole} s"
