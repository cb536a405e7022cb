"""How wrong and how fast: error of a real sparse call against dense, and its time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from blockattn import AttentionTrace, attend, checks, skip_softmax_attention, sol_attention


class ErrorTotal(NamedTuple):
    """Error over all heads and samples together."""

    relative_l2: float
    cosine: float
    max_abs: float


@dataclass(frozen=True)
class AttentionError:
    """Difference of an output from a reference, computed in float64.

    Attributes:
        relative_l2: `[B, H]` |out - dense| / |dense|; 0 when both are 0, inf when only dense is.
        cosine: `[B, H]` of the angle between them; 1 when both are 0, 0 when one is.
        max_abs: `[B, H]` largest absolute difference.
        total: the three figures over all heads.

    A head whose output is not finite has errors `inf` and cosine `nan`.
    """

    relative_l2: Tensor
    cosine: Tensor
    max_abs: Tensor
    total: ErrorTotal


@dataclass(frozen=True)
class Probe:
    """One real sparse call compared with dense.

    Attributes:
        error: against dense attention of the same implementation.
        trace: what ran.
        density: exact pairs / valid pairs delivered. density_per_head: the same, float64 `[B, H]`.
        dense_impl: implementation of the dense call, `given` when the caller passed its output.
    """

    error: AttentionError
    trace: AttentionTrace
    density: float
    density_per_head: Tensor
    dense_impl: str


class TimeRatio(NamedTuple):
    """Medians of two interleaved measurements, in seconds, and sparse / dense."""

    ratio: float
    sparse: float
    dense: float


def attention_error(out: Tensor, dense: Tensor, *, where: str = "") -> AttentionError:
    """Error of `out` against the reference `dense`, per head and over all.

    Args:
        out, dense: `[B, T, H, D]`, any float dtype.
        where: names the call in an error message, e.g. "layer 3, step 4".

    Raises:
        TypeError, ValueError: no attention tensors, shapes or devices that differ, or a reference
            that is not finite (its first bad batch, head and token are named).
    """
    checks.attention_tensor("out", out)
    checks.attention_tensor("dense", dense)
    if out.shape != dense.shape or out.device != dense.device:
        raise ValueError(
            f"out: {tuple(out.shape)} on {out.device} must match dense's "
            f"{tuple(dense.shape)} on {dense.device}"
        )
    _check_reference(dense, where)
    sums = _HeadSums.of(out, dense)
    relative, cosine, largest = (x.cpu() for x in sums.figures())
    return AttentionError(relative, cosine, largest, sums.total())


def probe_sol(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tau: float,
    *,
    thresh_type: str = "diag",
    sink_start: int | None = None,
    sink_tokens: int = 0,
    scale: float | None = None,
    dense: Tensor | None = None,
    impl: str = "auto",
) -> Probe:
    """Runs Sol-Attn at one tau and compares it with dense.

    Args:
        q, k, v: `[B, T, H, D]`.
        tau, thresh_type, sink_start, sink_tokens, scale: as :func:`blockattn.sol_attention`.
        dense: dense output to compare with; computed with the implementation that ran when None.
        impl: implementation of the sparse call.
    """
    out, trace = sol_attention(
        q,
        k,
        v,
        tau=tau,
        thresh_type=thresh_type,
        sink_start=sink_start,
        sink_tokens=sink_tokens,
        scale=scale,
        impl=impl,
        return_trace=True,
    )
    return make_probe(out, trace, dense, lambda name: attend(q, k, v, scale=scale, impl=name))


def probe_skip(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    threshold: float,
    *,
    tile: tuple[int, int] = (128, 128),
    causal: bool = False,
    scale: float | None = None,
    dense: Tensor | None = None,
    impl: str = "auto",
) -> Probe:
    """Runs SkipSoftmax at one threshold (lambda) and compares it with dense; see `probe_sol`."""
    out, trace = skip_softmax_attention(
        q,
        k,
        v,
        threshold=threshold,
        tile=tile,
        causal=causal,
        scale=scale,
        impl=impl,
        return_trace=True,
    )
    return make_probe(
        out, trace, dense, lambda name: attend(q, k, v, causal=causal, scale=scale, impl=name)
    )


def make_probe(
    out: Tensor, trace: AttentionTrace, dense: Tensor | None, run_dense: Callable[[str], Tensor]
) -> Probe:
    """What a traced call delivered, against dense attention.

    Args:
        out, trace: of the call, `[B, T, H, D]`.
        dense: output to compare with; computed with the implementation that ran when None.
        run_dense: the dense call, given the name of an implementation.
    """
    name = trace.impl if dense is None else "given"
    error = attention_error(out, run_dense(trace.impl) if dense is None else dense)
    return Probe(error, trace, trace.density, density_per_head(trace), name)


def density_per_head(trace: AttentionTrace) -> Tensor:
    """Exact pairs / valid pairs that a call delivered, float64 `[B, H]`."""
    exact, valid = (route.counts().sum(dim=-1) for route in (trace.computed, trace.reachable))
    return (exact.double() / valid.clamp(min=1)).cpu()


def time_ratio(
    sparse: Callable[[], object],
    dense: Callable[[], object],
    *,
    repeats: int = 5,
    warmup: int = 1,
) -> TimeRatio:
    """Median times of two calls measured in turn, so that a change of clocks meets both.

    By CUDA events once CUDA is in use, else by the wall clock.

    Raises:
        TypeError, ValueError: repeats below 1 or warmup below 0.
    """
    _check_repeats(repeats, warmup)
    for _ in range(warmup):
        sparse()
        dense()
    pairs = [(_seconds(sparse), _seconds(dense)) for _ in range(repeats)]
    ours, theirs = (statistics.median(column) for column in zip(*pairs))
    return TimeRatio(ours / theirs, ours, theirs)


class _HeadSums(NamedTuple):
    """Sums per head from which every figure follows, float64 `[B, H]`."""

    dot: Tensor
    out: Tensor
    dense: Tensor
    difference: Tensor
    largest: Tensor

    @classmethod
    def of(cls, out: Tensor, dense: Tensor) -> _HeadSums:
        """One head at a time, so that float64 copies stay small."""
        columns = [
            _sums(out[:, :, head].double(), dense[:, :, head].double())
            for head in range(out.shape[2])
        ]
        return cls(*(torch.stack(rows, dim=1) for rows in zip(*columns)))

    def figures(self) -> tuple[Tensor, Tensor, Tensor]:
        """relative_l2, cosine and max_abs."""
        bad = ~self.out.isfinite()
        relative = (self.difference / self.dense).sqrt().nan_to_num(nan=0.0, posinf=torch.inf)
        cosine = self.dot / (self.out.sqrt() * self.dense.sqrt())
        empty = (self.out == 0) | (self.dense == 0)
        cosine = torch.where(empty, ((self.out == 0) & (self.dense == 0)).double(), cosine)
        cosine = cosine.clamp(-1, 1)
        return (
            relative.masked_fill(bad, torch.inf),
            cosine.masked_fill(bad, torch.nan),
            self.largest.masked_fill(bad, torch.inf),
        )

    def total(self) -> ErrorTotal:
        dot, out, dense, difference = (x.sum() for x in self[:4])
        whole = _HeadSums(dot, out, dense, difference, self.largest.max())
        relative, cosine, largest = (float(x) for x in whole.figures())
        return ErrorTotal(relative, cosine, largest)


def _sums(out: Tensor, dense: Tensor) -> tuple[Tensor, ...]:
    """Of one head `[B, T, D]`: dot product, squared norms of out, dense, difference, largest."""
    gap = out - dense
    squares = (x.square().sum(dim=(1, 2)) for x in (out, dense, gap))
    largest = gap.abs().flatten(1)
    top = largest.amax(dim=1) if largest.shape[1] else largest.new_zeros(largest.shape[0])
    return (out * dense).sum(dim=(1, 2)), *squares, top


def _check_reference(dense: Tensor, where: str) -> None:
    bad = ~torch.isfinite(dense)
    if not bool(bad.any()):
        return
    batch, token, head, _ = bad.nonzero()[0].tolist()
    place = f" at {where}" if where else ""
    raise ValueError(
        f"dense: the reference is not finite{place}, first in batch {batch}, head {head}, token "
        f"{token} ({int(bad.sum())} values); a comparison with it would mean nothing, so look at "
        "the inputs of that head"
    )


def _check_repeats(repeats: int, warmup: int) -> None:
    checks.integer("repeats", repeats, minimum=1)
    checks.integer("warmup", warmup)


def _seconds(fn: Callable[[], object]) -> float:
    # An idle GPU takes an event at once, so events also time a call that never leaves the CPU.
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return _cuda_seconds(fn)
    start = time.perf_counter()
    fn()
    return time.perf_counter() - start


def _cuda_seconds(fn: Callable[[], object]) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    fn()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / 1000
