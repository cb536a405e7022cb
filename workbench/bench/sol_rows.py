"""Rows 1, 2 and 4: Sol-Attn whole, where its time goes, and from which density on it is faster."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor

from blockattn import sol, sol_attention
from blockattn.layout import BLOCK, num_blocks
from blockattn.problem import Problem, make_problem
from workbench.bench import own
from workbench.bench.cases import Case, Run
from workbench.bench.inputs import KINDS, QKV, describe
from workbench.bench.roofline import attention_work
from workbench.bench.timing import medians

TAUS = {1: 1.0, 2: 2.0}
STEPS = ("prepare", "select", "lists", "prepare + route")


def sol_rows(run: Run, wanted: Collection[int]) -> list[Case]:
    """Cases of those of rows 1, 2 and 4 that are wanted, on both kinds of data."""
    found: list[Case] = []
    for kind in KINDS:
        data = run.bench.qkv(kind, run.bench.sizes.long)
        for row, tau in TAUS.items():
            if row in wanted or 4 in wanted:
                whole, share = sol_cases(run, kind, data, row, tau)
                found += [case for case in (whole, share) if case.row in wanted]
    return found


def sol_cases(run: Run, kind: str, data: QKV, row: int, tau: float) -> tuple[Case, Case]:
    """The whole call over its bound (rows 1, 2); preparation and routing over dense (row 4)."""
    name, dense = run.best_dense(data)
    parts = sol_parts(data, tau) if "triton" in run.impls else {}
    calls: dict[str, Callable[[], object]] = {f"dense {name}": dense, **parts}
    if parts and "cute" in run.impls:
        calls |= cute_parts(data, tau)
    for impl in run.impls:
        calls[impl] = lambda impl=impl: sol_attention(*data, tau=tau, impl=impl)
    samples = run.bench.timer(calls, run.bench.sizes.repeats)
    seconds = medians(samples)
    _, trace = sol_attention(*data, tau=tau, impl=run.impls[0], return_trace=True)
    density, dense_time = trace.density, seconds[f"dense {name}"]
    bound = (density + 1 / BLOCK) * dense_time
    work = attention_work(data[0], data[1], density, summaries=num_blocks(data[1].shape[1], BLOCK))
    setting = f"{describe(data[0])}, {kind}, tau {tau:g}, density {density:.4f}"
    more: dict[str, Any] = {
        "bound_seconds": bound,
        "speed_up": {impl: dense_time / seconds[impl] for impl in run.impls},
        "split": split(seconds) if parts else None,
        "roofline": work.against(seconds[run.impls[0]], run.ceilings),
        "dense_seconds": run.dense_seconds(data),
    }
    if row == 1:
        more["ladder"] = ladder(run, data)
    whole = Case(
        row,
        setting,
        f"(density + 1/64) x dense {name}",
        {impl: seconds[impl] / bound for impl in run.impls},
        density=density,
        samples=samples,
        more=more,
    )
    routing = {"triton": "prepare + route", "cute": "prepare + route, cute"}
    shares = {
        impl: 100 * seconds[key] / dense_time for impl, key in routing.items() if key in seconds
    }
    steps = [key for key in samples if key.removesuffix(", cute") in STEPS]
    kept = {key: samples[key] for key in (*steps, f"dense {name}") if parts}
    return whole, Case(4, setting, f"dense {name}", shares, density=density, samples=kept)


def sol_parts(data: QKV, tau: float) -> dict[str, Callable[[], object]]:
    """The steps of a Sol-Attn call on the Triton kernels, each as a call of its own."""
    from blockattn.impl.triton import prepare, select

    q, k, v = data
    knobs = _knobs(q, tau)
    q_mean, *_, keys = prepare.summarise(q, k, v, BLOCK)
    problem = _planned(data, knobs)
    lists = own.make_lists("triton", problem)
    return {
        "prepare": lambda: prepare.summarise(q, k, v, BLOCK),
        "select": lambda: select.select(q_mean, keys, **knobs),
        "lists": lambda: own.make_lists("triton", problem),
        "prepare + route": lambda: own.make_lists("triton", _planned(data, knobs)),
        "attend": lambda: own.run_with("triton", problem, lists),
    }


def cute_parts(data: QKV, tau: float) -> dict[str, Callable[[], object]]:
    """What the CuTe kernel adds to the same preparation and routing: its own lists, the kernel."""
    knobs = _knobs(data[0], tau)
    problem = _planned(data, knobs)
    lists = own.make_lists("cute", problem)
    return {
        "lists, cute": lambda: own.make_lists("cute", problem),
        "prepare + route, cute": lambda: own.make_lists("cute", _planned(data, knobs)),
        "attend, cute": lambda: own.run_with("cute", problem, lists),
    }


def _knobs(q: Tensor, tau: float) -> dict[str, Any]:
    """Arguments of preparing and routing, as :func:`blockattn.sol_attention` sets them."""
    return {
        "tau": tau,
        "unit": q.shape[3] ** -0.5 * sol.LOG2_E,
        "floor": sol.VARIANCE_FLOOR,
        "sink": sol.sink_blocks(q.shape[1]),
        "band": sol.BAND,
        "exact": False,
    }


def _planned(data: QKV, knobs: Mapping[str, Any]) -> Problem:
    from blockattn.impl.triton.plan import plan

    made = plan(*data, **knobs)
    return make_problem(*data, route=made.route, tail=made.tail)


def split(seconds: Mapping[str, float]) -> dict[str, float]:
    """Seconds of preparing, routing and attending; routing is what it adds to preparing."""
    return {
        "prepare": seconds["prepare"],
        "route": seconds["prepare + route"] - seconds["prepare"],
        "attend": seconds["attend"],
    }


def ladder(run: Run, data: QKV) -> dict[str, Any]:
    """Whole calls from sparse to dense against dense, and the density where the two are equal."""
    name, dense = run.best_dense(data)
    impl, calls = run.impls[0], {f"dense {name}": dense}
    densities = []
    for tau in run.bench.sizes.taus:
        call = _call(data, tau, impl)
        calls[f"tau {tau:g}"] = call
        densities.append(sol_attention(*data, tau=tau, impl=impl, return_trace=True)[1].density)
    seconds = medians(run.bench.timer(calls, max(3, run.bench.sizes.repeats // 3)))
    times = [seconds[f"tau {tau:g}"] for tau in run.bench.sizes.taus]
    limit = seconds[f"dense {name}"]
    return {
        "impl": impl,
        "taus": list(run.bench.sizes.taus),
        "densities": densities,
        "seconds": times,
        "dense": name,
        "dense_seconds": limit,
        "break_even_density": break_even(densities, times, limit),
    }


def _call(data: QKV, tau: float, impl: str) -> Callable[[], Tensor]:
    return lambda: sol_attention(*data, tau=tau, impl=impl)


def break_even(densities: Sequence[float], seconds: Sequence[float], limit: float) -> float | None:
    """Density at which a call takes ``limit`` seconds, interpolated linearly between the points.

    1.0 when even the densest is faster; ``None`` when even the sparsest is slower.
    """
    points = sorted(zip(densities, seconds))
    if points[0][1] >= limit:
        return None
    for (low, before), (high, after) in pairwise(points):
        if after >= limit:
            return low + (high - low) * (limit - before) / (after - before)
    return 1.0
