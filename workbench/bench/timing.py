"""Interleaved timing on the host's clock and on the GPU's, host syncs counted, clocks read."""

from __future__ import annotations

import csv
import random
import statistics
import subprocess
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

Calls = Mapping[str, Callable[[], object]]
Samples = dict[str, list[float]]
FLUSH_BYTES = 256 * 2**20  # several times the second-level cache of any current GPU
BACKLOG = 12  # flushes queued before a round, so that the host runs ahead of the GPU
CLOCKS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")


class Timer(Protocol):
    """Seconds of every call, each called once per round."""

    def __call__(self, calls: Calls, repeats: int) -> Samples: ...


def interleaved(calls: Calls, repeats: int) -> Samples:
    """By the host's clock, after one round that does not count."""
    samples: Samples = {name: [] for name in calls}
    for number in range(repeats + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if number:
                samples[name].append(time.perf_counter() - start)
    return samples


def interleaved_on_gpu(calls: Calls, repeats: int) -> Samples:
    """By events on the current stream, after two rounds that do not count (they also compile).

    Before each call the second-level cache is flushed by writing a buffer. Every round starts
    behind a backlog of such writes, so that what is timed is the GPU's work and not the launches.
    The order of a round is random, the same in every run: at the power limit a call is faster or
    slower by some percent according to what ran before it.
    """
    flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
    for _ in range(2):
        for call in calls.values():
            call()
    torch.cuda.synchronize()
    events = {name: [] for name in calls}
    order, chance = list(calls), random.Random(0)
    for _ in range(repeats):
        for _ in range(BACKLOG):
            flush.zero_()
        chance.shuffle(order)
        for name in order:
            flush.zero_()
            events[name].append(_between_events(calls[name]))
        torch.cuda.synchronize()
    return {name: [a.elapsed_time(b) / 1e3 for a, b in pairs] for name, pairs in events.items()}


def _between_events(call: Callable[[], object]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    stop.record()
    return start, stop


def medians(samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Median of every series."""
    return {name: statistics.median(values) for name, values in samples.items()}


def ratio(samples: Mapping[str, Sequence[float]], over: str, under: str) -> float:
    """Median of one series over the median of another."""
    return statistics.median(samples[over]) / statistics.median(samples[under])


def count_syncs(call: Callable[[], object]) -> int:
    """Times a call makes the host wait for the GPU, as torch's sync-debug mode reports them."""
    call()
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            call()
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return sum("called a synchronizing" in str(item.message) for item in caught)


def host_seconds(call: Callable[[], object], repeats: int) -> float:
    """Median time until a call returns while the GPU is busy: launches alone, if nothing waits."""
    call()
    flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
    samples = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        for _ in range(20 * BACKLOG):
            flush.zero_()
        start = time.perf_counter()
        call()
        samples.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return statistics.median(samples)


def gpu_clocks() -> dict[str, float] | None:
    """Clocks (MHz), power (W) and temperature (C) of the current GPU now; None if unreadable."""
    if not torch.cuda.is_available():
        return None
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    uuid = getattr(gpu, "uuid", None)  # nvidia-smi numbers GPUs otherwise than torch
    which = [] if uuid is None else [f"--id=GPU-{str(uuid).removeprefix('GPU-')}"]
    query = [f"--query-gpu={','.join(CLOCKS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            ["nvidia-smi", *which, *query], capture_output=True, text=True, check=True, timeout=20
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return parse_clocks(done.stdout)


def parse_clocks(text: str) -> dict[str, float] | None:
    """First line of nvidia-smi's answer by name; None where it holds no numbers."""
    rows = [row for row in csv.reader(text.splitlines(), skipinitialspace=True) if row]
    if not rows or len(rows[0]) != len(CLOCKS):
        return None
    try:
        return {name: float(value) for name, value in zip(CLOCKS, rows[0])}
    except ValueError:  # "[N/A]", where a machine hides one of them
        return None
