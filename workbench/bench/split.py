"""Where the time of a Sol-Attn call goes, and below which density it beats dense attention.

From a report of ``workbench bench gpu --json``, or measured here on one attention call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from blockattn import BLOCK, BlockSummary, attend, checks, sol_attention, sol_route
from workbench.bench import sol_rows
from workbench.bench.cases import served_by
from workbench.bench.figure import measured_cases, title
from workbench.bench.inputs import describe
from workbench.bench.timing import interleaved, interleaved_on_gpu, medians

PARTS = ("prepare", "route", "attend")
LADDER = (3.0, 2.0, 1.0, 0.5, 0.0, -0.5, -1000.0)  # taus from sparse to dense
TOLERANCE = 0.05  # of the sum of the parts against the whole call
UNTIMED = {"cpu": 1, "cuda": 2}  # rounds that only warm up
Tick = Callable[[str], None]
QKV = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Split:
    """One setting: the parts of a call, the whole call, and dense attention beside it.

    Attributes:
        name: setting in words.
        impl: implementation that ran.
        density: exact pairs / valid pairs as delivered.
        parts: seconds of :data:`PARTS`, each timed by itself.
        whole: seconds of the whole call.
        dense_name, dense: the baseline and its seconds.
    """

    name: str
    impl: str
    density: float
    parts: Mapping[str, float]
    whole: float
    dense_name: str
    dense: float

    @property
    def bound(self) -> float:
        """Seconds that the arithmetic alone would take at the speed of dense attention."""
        return (self.density + 1 / BLOCK) * self.dense

    @property
    def together(self) -> float:
        """Sum of the parts / the whole call; far from 1, the split says little."""
        return sum(self.parts.values()) / self.whole


@dataclass(frozen=True)
class Ladder:
    """Whole calls from sparse to dense.

    Attributes:
        name: kind of data.
        densities, seconds: of each call. dense: seconds of dense attention.
        break_even: density at which both take equally long; 1 if even the densest call is faster,
            None if even the sparsest is slower.
    """

    name: str
    densities: tuple[float, ...]
    seconds: tuple[float, ...]
    dense: float
    break_even: float | None


@dataclass(frozen=True)
class SplitReport:
    """What a time split shows.

    Attributes:
        where: machine, versions, shape, how it was measured.
        ran: what ran and why nothing faster did.
    """

    where: str
    splits: tuple[Split, ...]
    ladders: tuple[Ladder, ...]
    ran: str


def from_report(report: Mapping[str, Any]) -> SplitReport:
    """Rows 1 and 2 of a report of :func:`workbench.bench.files.load`.

    Raises:
        ValueError: it has no time split.
    """
    cases = [case for row in (1, 2) for case in measured_cases(report, row)]
    splits = tuple(_split_of(case) for case in cases if case["more"].get("split"))
    if not splits:
        raise ValueError(
            "the report has no time split: measure rows 1 and 2 with the Triton kernels"
        )
    ladders = tuple(
        _ladder_of(_kind(case), case["more"]["ladder"])
        for case in cases
        if "ladder" in case["more"]
    )
    shape = cases[0]["setting"].partition(f", {_kind(cases[0])}")[0]
    absent = "; ".join(f"{name}: {why}" for name, why in report.get("absent", {}).items())
    ran = f"{', '.join(dict.fromkeys(split.impl for split in splits))}, beside the best dense "
    ran += "attention of other libraries there"
    return SplitReport(
        f"{title(report)}; {shape}", splits, ladders, f"{ran}. Not timed: {absent or 'nothing'}."
    )


def ticks(repeats: int, device: str) -> int:
    """How often :func:`measure` ticks: once a round."""
    return repeats + UNTIMED[device]


def measure(
    data: QKV,
    tau: float,
    *,
    repeats: int = 9,
    ladder: Sequence[float] = LADDER,
    tick: Tick = lambda label: None,
    where: str = "",
) -> SplitReport:
    """Times a Sol-Attn call, its parts, a ladder of taus and dense attention, all in turn.

    Args:
        data: q, k, v ``[B, T, H, D]`` on one device.
        tau: of the split.
        repeats: rounds behind each median.
        ladder: taus from sparse to dense.
        tick: called before every round; what it raises ends the measurement.
        where: machine or source, for the report.

    Raises:
        TypeError, ValueError: an argument is not allowed, or q, k or v is not finite. What the tick
            raises passes through.
    """
    checks.integer("repeats", repeats, minimum=1)
    _check_finite(data)
    _, trace = sol_attention(*data, tau=tau, return_trace=True)
    _, dense_trace = attend(*data, return_trace=True)
    kind = data[0].device.type
    calls = {
        "tick": partial(tick, "timing"),  # an entry of its own, so that no other one pays for it
        "dense": partial(attend, *data),
        "whole": partial(sol_attention, *data, tau=tau),
        **parts(data, tau),
        **{f"tau {value:g}": partial(sol_attention, *data, tau=value) for value in ladder},
    }
    timer = interleaved_on_gpu if kind == "cuda" else interleaved
    seconds = medians(timer(calls, repeats))
    split = Split(
        f"tau {tau:g}",
        trace.impl,
        trace.density,
        sol_rows.split(seconds),
        seconds["whole"],
        f"attend, {dense_trace.impl}",
        seconds["dense"],
    )
    reasons = "; ".join(map(str, trace.reasons)) or "it is the first choice"
    return SplitReport(
        f"{where or data[0].device}; {describe(data[0])}; medians of {repeats} interleaved rounds",
        (split,),
        (_measured_ladder(data, ladder, seconds),),
        f"{trace.algorithm} on {trace.impl}, dense on {dense_trace.impl}. "
        f"Faster, but not here: {reasons}.",
    )


def _check_finite(data: QKV) -> None:
    """Routes of NaN scores hold the band alone at every tau, and so would be fast for no reason."""
    for name, x in zip("qkv", data):
        bad = int((~x.isfinite()).sum())
        if bad:
            raise ValueError(
                f"{name}: {bad:,} of {x.numel():,} values are NaN or infinite, and a time of them "
                "means nothing; choose another call, or record it again"
            )


def parts(data: QKV, tau: float) -> dict[str, Callable[[], object]]:
    """The steps of a call as calls of their own, for whichever implementation serves it.

    What the Triton kernels do before they route is "prepare". Elsewhere "prepare" makes
    the summaries of keys and values, and the means that routing needs belong to "route".
    """
    if "triton" in served_by(data):
        made = sol_rows.sol_parts(data, tau)
        return {name: made[name] for name in ("prepare", "prepare + route", "attend")}
    q, k, v = data
    route, tail = sol_route(q, k, tau=tau), BlockSummary.of(k, v)
    return {
        "prepare": lambda: BlockSummary.of(k, v),
        "prepare + route": lambda: (BlockSummary.of(k, v), sol_route(q, k, tau=tau)),
        "attend": lambda: attend(q, k, v, route, tail=tail),
    }


def describe_split(report: SplitReport) -> list[str]:
    """Lines under the picture: break-even density, shares of each part, how they add up."""
    lines = [_break_even_line(ladder) for ladder in report.ladders]
    for split in report.splits:
        whole = sum(split.parts.values())
        shares = ", ".join(f"{name} {split.parts[name] / whole:.1%}" for name in PARTS)
        lines.append(
            f"{split.name}, density {split.density:.4f}: {shares}; together {split.together:.1%} "
            f"of the whole call. Whole call {1e3 * split.whole:.2f} ms, dense "
            f"{1e3 * split.dense:.2f} ms ({split.dense_name}): {split.dense / split.whole:.2f} x "
            f"as fast.{_doubt(split)}"
        )
    return lines


def _doubt(split: Split) -> str:
    if abs(split.together - 1) <= TOLERANCE:
        return ""
    return " The parts do not add up: the machine was busy; measure again, with more rounds."


def _break_even_line(ladder: Ladder) -> str:
    low, high = min(ladder.densities), max(ladder.densities)
    if low == high:
        return (
            f"{ladder.name}: no break-even can be found, because every tau has density {low:.3f}; "
            "with so few blocks, take a longer sequence."
        )
    if ladder.break_even is None:
        return (
            f"{ladder.name}: no break-even; even at density {low:.3f} the sparse call is slower "
            "than dense."
        )
    if ladder.break_even == 1:
        return (
            f"{ladder.name}: the sparse call is faster than dense at every density up to "
            f"{high:.3f}."
        )
    return (
        f"{ladder.name}: break-even density {ladder.break_even:.3f}; sparser than that, the sparse "
        "call is faster than dense, routing included."
    )


def _measured_ladder(data: QKV, taus: Sequence[float], seconds: Mapping[str, float]) -> Ladder:
    traces = (sol_attention(*data, tau=value, return_trace=True)[1] for value in taus)
    densities = tuple(trace.density for trace in traces)
    times = tuple(seconds[f"tau {value:g}"] for value in taus)
    limit = seconds["dense"]
    return Ladder(
        "measured here", densities, times, limit, sol_rows.break_even(densities, times, limit)
    )


def _split_of(case: Mapping[str, Any]) -> Split:
    samples, impl = medians(case["samples"]), next(iter(case["measured"]))
    dense = next(name for name in samples if name.startswith("dense "))
    tau = next(part for part in case["setting"].split(", ") if part.startswith("tau "))
    return Split(
        f"{_kind(case)}, {tau}",
        impl,
        case["density"],
        {name: case["more"]["split"][name] for name in PARTS},
        samples[impl],
        dense.removeprefix("dense "),
        samples[dense],
    )


def _ladder_of(name: str, found: Mapping[str, Any]) -> Ladder:
    densities, seconds = tuple(found["densities"]), tuple(found["seconds"])
    return Ladder(name, densities, seconds, found["dense_seconds"], found["break_even_density"])


def _kind(case: Mapping[str, Any]) -> str:
    parts = case["setting"].split(", ")
    return next(part for part in parts if part in ("random", "video-like"))
