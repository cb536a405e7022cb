"""Rows 3 and 5 to 9: block masks, host syncs, traces, the skip vote, quantisers."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from functools import partial
from itertools import product
from typing import Any

from torch import Tensor

from blockattn import attend, sol_attention
from blockattn.impl import triton
from blockattn.problem import make_problem
from blockattn.quant_formats import (
    BlockScaled,
    Fp8Values,
    quantise_fp8_values,
    quantise_mxfp8,
    quantise_nvfp4,
)
from blockattn.route import BlockRoute
from workbench.bench import own, peers
from workbench.bench.cases import Case, Run
from workbench.bench.inputs import KINDS, QKV, describe, random_mask
from workbench.bench.roofline import Work, attention_work
from workbench.bench.timing import medians

SKIPPED = 0.70  # share of tiles that row 8 is stated at
HIGHEST = 6  # log2 of the largest threshold tried for it
QUANTISERS: Mapping[str, Callable[[Tensor], BlockScaled | Fp8Values]] = {
    "mxfp8": quantise_mxfp8,
    "nvfp4": quantise_nvfp4,
    "fp8 v": quantise_fp8_values,
    "fp8 v by channel": partial(quantise_fp8_values, scale="channel"),
}
# Passes over x: a scale that more than a block shares is known only after the first one.
READS: Mapping[str, int] = {"mxfp8": 1, "nvfp4": 2, "fp8 v": 2, "fp8 v by channel": 2}


def quantiser_impl(x: Tensor) -> str:
    """Which implementation the public quantisers take for a 16-bit tensor."""
    return "triton" if triton.encodes(x) else "pytorch"


def mask_rows(run: Run, wanted: Collection[int]) -> list[Case]:
    """Row 3: the rate under random block masks over the dense rate, lists made before."""
    found = []
    for grid in (run.bench.sizes.short, run.bench.sizes.long):
        data = run.bench.qkv("random", grid)
        for density in run.bench.sizes.densities:
            found.append(mask_case(run, data, random_mask(data[0], density)))
    return found


def mask_case(run: Run, data: QKV, route: BlockRoute) -> Case:
    """One mask; peers and own kernels get the same lists, one entry also makes them itself."""
    name, dense = run.best_dense(data)
    others = run.fit("block mask", peers.block_mask_peers(*data, route))
    calls: dict[str, Callable[[], object]] = {f"dense {name}": dense, **others}
    for impl in run.impls:
        calls[f"{impl}, lists made in the call"] = partial(attend, *data, route, impl=impl)
    problem = make_problem(*data, route=route)
    for impl in run.impls:
        lists = own.make_lists(impl, problem)
        calls[impl] = partial(own.run_with, impl, problem, lists)
    samples = run.bench.timer(calls, run.bench.sizes.repeats)
    seconds, density = medians(samples), route.density()
    limit = density * seconds[f"dense {name}"]
    work = attention_work(data[0], data[1], density)
    return Case(
        3,
        f"{describe(data[0])}, random, density {density:.4f}, lists made before",
        f"density x dense {name}",
        {impl: limit / seconds[impl] for impl in run.impls},
        peers={other: limit / seconds[other] for other in others},
        density=density,
        samples=samples,
        more={
            "flops_per_second": {key: work.flops / value for key, value in seconds.items()}
            | {f"dense {name}": work.flops / limit},
            "roofline": work.against(seconds[run.impls[0]], run.ceilings),
        },
    )


def sync_rows(run: Run, wanted: Collection[int]) -> list[Case]:
    """Row 5: host waits of every public call, after a call that is known to wait."""
    data = run.bench.qkv("random", run.bench.sizes.short)
    control = run.bench.count_syncs(lambda: data[0].flatten()[0].item())
    if control < 1:
        raise RuntimeError("sync-debug mode reports nothing for .item(): syncs cannot be counted")
    route = random_mask(data[0], run.bench.sizes.densities[0])
    found = []
    for name, call in _public_calls(data, route, run.impls).items():
        syncs = run.bench.count_syncs(call)
        found.append(
            Case(
                5,
                f"{describe(data[0])}, {name[0]}",
                f"torch's sync-debug mode; .item() counts {control}",
                {name[1]: float(syncs)},
                more={"host_seconds": run.bench.host_seconds(call, run.bench.sizes.repeats)},
            )
        )
    return found


def _public_calls(
    data: QKV, route: BlockRoute, impls: tuple[str, ...]
) -> dict[tuple[str, str], Callable[[], object]]:
    skip = {"skip_threshold": 0.01, "skip_tile": triton.BLOCK}
    calls: dict[tuple[str, str], Callable[[], object]] = {}
    for impl in impls:
        calls["sol_attention", impl] = partial(sol_attention, *data, impl=impl)
        calls["attend with a route", impl] = partial(attend, *data, route, impl=impl)
        calls["attend with a skip threshold", impl] = partial(attend, *data, impl=impl, **skip)
        calls["sol_attention with trace", impl] = partial(
            sol_attention, *data, impl=impl, return_trace=True
        )
    for name, encode in QUANTISERS.items():
        calls[f"quantiser {name}", quantiser_impl(data[0])] = partial(encode, data[0])
    return calls


def trace_rows(run: Run, wanted: Collection[int]) -> list[Case]:
    """Row 6: what returning route, LSE and skip map adds to a call."""
    data = run.bench.qkv("random", run.bench.sizes.long)
    skip = {"skip_threshold": 0.01, "skip_tile": triton.BLOCK}
    pairs: dict[str, Callable[..., object]] = {
        "sol_attention, tau 1": partial(sol_attention, *data),
        "attend with a skip threshold": partial(attend, *data, **skip),
    }
    found = []
    for name, call in pairs.items():
        calls: dict[str, Callable[[], object]] = {}
        for impl in run.impls:
            calls[impl] = partial(call, impl=impl)
            calls[f"{impl} traced"] = partial(call, impl=impl, return_trace=True)
        samples = run.bench.timer(calls, run.bench.sizes.repeats)
        seconds = medians(samples)
        shares = {x: 100 * (seconds[f"{x} traced"] / seconds[x] - 1) for x in run.impls}
        setting = f"{describe(data[0])}, random, {name}"
        found.append(Case(6, setting, "the same call without trace", shares, samples=samples))
    return found


def skip_rows(run: Run, wanted: Collection[int]) -> list[Case]:
    """Rows 7 and 8: the kernel with the vote, when nothing and when much is skipped."""
    found = []
    for kind, tile in product(KINDS, triton.SKIP_TILES):
        data = run.bench.qkv(kind, run.bench.sizes.long)
        if 7 in wanted:
            found.append(skip_case(run, kind, data, 7, 0.0, tile))
        if 8 in wanted:
            threshold = threshold_for(data, SKIPPED, tile)
            if threshold is None:
                reason = f"no lambda up to {2**HIGHEST} drops {SKIPPED:.0%} of tiles {tile}"
                run.absent[f"row 8, {kind}, tiles {tile}"] = reason
            else:
                found.append(skip_case(run, kind, data, 8, threshold, tile))
    if not found:
        raise RuntimeError(f"no lambda up to {2**HIGHEST} drops {SKIPPED:.0%} of the tiles")
    return found


def skip_case(
    run: Run, kind: str, data: QKV, row: int, threshold: float, tile: tuple[int, int]
) -> Case:
    """A vote of every implementation over its dense attention, Triton's fastest of two tilings."""
    settings: dict[str, Any] = {"skip_threshold": threshold, "skip_tile": tile}
    problems = make_problem(*data, **settings), make_problem(*data)
    calls = {
        prefix(impl) + name: call
        for impl in run.impls
        for name, call in own.vote_calls(impl, *problems).items()
    }
    name, best = run.best_dense(data)
    calls[f"dense {name}"] = best
    samples = run.bench.timer(calls, run.bench.sizes.repeats)
    seconds = medians(samples)
    skipped = skipped_share(data, threshold, tile)
    slower = {
        impl: seconds[f"{prefix(impl)}vote"]
        / min(value for name, value in seconds.items() if name.startswith(f"{prefix(impl)}no vote"))
        for impl in run.impls
    }
    first = f"{prefix(run.impls[0])}vote"
    tiles = f"{tile[0]} x {tile[1]}"
    return Case(
        row,
        f"{describe(data[0])}, {kind}, lambda {threshold:.3g}, tiles {tiles}, "
        f"{skipped:.1%} skipped",
        f"dense attention of the same implementation as configured; for triton's kernel "
        f"{own.kernel_of_vote(problems[0])} that of attention, as configured or in tiles {tiles}, "
        "whichever is faster",
        {impl: value if row == 7 else 1 / value for impl, value in slower.items()},
        density=1 - skipped,
        samples=samples,
        more={
            "skipped": skipped,
            "speed_up_over": {key: seconds[key] / seconds[first] for key in seconds},
            "roofline": attention_work(data[0], data[1], 1 - skipped / 2).against(
                seconds[first], run.ceilings
            ),
        },
    )


def prefix(impl: str) -> str:
    """What tells the series of an implementation from those of Triton's kernels."""
    return "" if impl == "triton" else f"{impl} "


def skipped_share(data: QKV, threshold: float, tile: tuple[int, int]) -> float:
    """Share of tiles that a call drops."""
    _, trace = attend(
        *data,
        impl="triton",
        skip_threshold=threshold,
        skip_tile=tile,
        return_trace=True,
    )
    return int(trace.skipped.counts().sum()) / int(trace.reachable.counts().sum())


def threshold_for(data: QKV, share: float, tile: tuple[int, int], steps: int = 14) -> float | None:
    """Smallest threshold found (bisection over its logarithm) that drops at least a share.

    ``None`` when not even the largest one tried drops as much.
    """
    low, high = -24.0, float(HIGHEST)
    if skipped_share(data, 2.0**high, tile) < share:
        return None
    for _ in range(steps):
        middle = (low + high) / 2
        if skipped_share(data, 2.0**middle, tile) >= share:
            high = middle
        else:
            low = middle
    return math.pow(2.0, high)


def quant_rows(run: Run, wanted: Collection[int]) -> list[Case]:
    """Row 9: every quantiser over the time in which the bytes it must move could be copied."""
    x = run.bench.qkv("random", run.bench.sizes.long)[0]
    calls = {name: partial(encode, x) for name, encode in QUANTISERS.items()}
    samples = run.bench.timer(calls, run.bench.sizes.repeats)
    found = []
    for name, encode in QUANTISERS.items():
        moved = READS[name] * x.nbytes + encoded_bytes(encode(x))
        work = Work(0.0, float(moved)).against(medians(samples)[name], run.ceilings)
        times = "once" if READS[name] == 1 else "twice (the first time for its largest magnitude)"
        found.append(
            Case(
                9,
                f"{describe(x)}, {name}, {moved:,} bytes, x read {times}",
                f"bytes / copy bandwidth, {run.ceilings.bytes / 1e12:.2f} TB/s",
                {quantiser_impl(x): float(work["time_over_floor"])},
                samples={name: samples[name]},
                more={"roofline": work},
            )
        )
    return found


def encoded_bytes(encoded: BlockScaled | Fp8Values) -> int:
    """Bytes of elements and scales."""
    if isinstance(encoded, BlockScaled):
        return encoded.nbytes
    return encoded.data.nbytes + encoded.scale.nbytes
