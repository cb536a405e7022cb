"""SkipSoftmax: drop a tile whose largest score lies far below the running maximum.

Method of BLASST (arXiv:2512.12087). A tile of queries x keys is dropped when, for every query row,
exp(scale * (tile max - running max)) < lambda, strictly, with the running maximum of the tiles kept
before it. The first tile of a row is never dropped. ``threshold_scale_factor`` = lambda * Sk, the
number that calibrations are fitted in.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from blockattn import checks
from blockattn.attend import attend
from blockattn.compiled import one_node
from blockattn.impl.gaps import tile_gaps
from blockattn.precision import own_precision
from blockattn.problem import make_problem
from blockattn.route import BlockRoute

TILE = (128, 128)


@dataclass(frozen=True)
class SkipGaps:
    """Largest (tile max - running max) of every tile; the skip map for any threshold follows.

    Attributes:
        gaps: float32 ``[B, H, Nq, Nk]`` in base-2 logits: the maximum over the tile's rows.
            ``+inf`` for a first tile, ``-inf`` for one whose keys are all masked.
        reachable: tiles that a dense call computes.

    A dropped tile holds no new maximum as long as lambda <= 1, so one pass decides for every such
    threshold exactly; for lambda > 1 the running maximum depends on what was dropped before.
    """

    gaps: Tensor
    reachable: BlockRoute

    def skipped(self, threshold: float) -> BlockRoute:
        """Tiles that a run with ``skip_threshold=threshold`` (lambda in [0, 1]) drops."""
        limit = threshold_log2(_one_pass_threshold(threshold))
        mask = self.gaps < limit
        geometry = self.reachable
        return (
            BlockRoute.from_dense(mask, block=geometry.block, seqlens=geometry.seqlens) & geometry
        )

    def sparsity(self, thresholds: list[float] | Tensor) -> Tensor:
        """Share of valid tiles dropped, per head: float64 ``[B, H, len(thresholds)]``."""
        values = checks.numbers("thresholds", thresholds)
        limits = [threshold_log2(_one_pass_threshold(value)) for value in values]
        valid = self.reachable.dense().flatten(2)
        # Tiles that never drop sort last; searchsorted counts the strictly smaller ones.
        never = ~valid | self.gaps.flatten(2).isnan()
        free = self.gaps.flatten(2).masked_fill(never, torch.inf).sort(dim=-1).values
        cuts = torch.tensor(limits, dtype=torch.float32, device=free.device)
        cuts = cuts.expand(*free.shape[:2], -1).contiguous()
        dropped = torch.searchsorted(free, cuts, right=False)
        return dropped.double() / valid.sum(dim=-1, keepdim=True).clamp(min=1)


def threshold_from_factor(threshold_scale_factor: float, keys: int) -> float:
    """lambda = threshold_scale_factor / Sk, with the length of the whole key sequence."""
    factor = checks.finite_number("threshold_scale_factor", threshold_scale_factor, minimum=0.0)
    return factor / checks.integer("keys", keys, minimum=1)


def threshold_log2(threshold: float) -> float:
    """log2(lambda), the form in which kernels compare; -inf for 0, which never drops."""
    ratio = checks.finite_number("threshold", threshold, minimum=0.0)
    return math.log2(ratio) if ratio > 0 else -math.inf


@own_precision()
def skip_gaps(
    q: Tensor,
    k: Tensor,
    *,
    scale: float | Tensor | None = None,
    causal: bool = False,
    tile: tuple[int, int] = TILE,
) -> SkipGaps:
    """One pass over q k^T from which the skip map for every threshold in [0, 1] follows.

    Args:
        q: ``[B, Tq, Hq, D]``; k: ``[B, Tk, Hk, D]``, Hk dividing Hq.
        scale: softmax scale, default D ** -0.5.
        causal: query t sees keys 0..t.
        tile: (queries, keys) that vote together; use the kernel's own granularity.

    Raises:
        TypeError, ValueError: an argument is not allowed.
    """
    checks.query_key(q, k)
    tile = checks.integer_pair("tile", tile)
    problem = make_problem(q, k, k, scale=scale, causal=causal, skip_threshold=0.0, skip_tile=tile)
    return SkipGaps(tile_gaps(problem), problem.reachable(problem.skip_tile))


@one_node
def skip_softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    threshold_scale_factor: float | None = None,
    threshold: float | None = None,
    causal: bool = False,
    scale: float | Tensor | None = None,
    tile: tuple[int, int] = TILE,
    skip_reference: str = "exact",
    impl: str = "auto",
    return_trace: bool = False,
) -> Any:
    """Attention that drops tiles far below the running maximum (BLASST, arXiv:2512.12087).

    Args:
        q: ``[B, Tq, Hq, D]``; k, v: ``[B, Tk, Hk, D]``.
        threshold_scale_factor: lambda * Tk; ``None`` or 0 is dense. Not with ``threshold``.
        threshold: lambda itself; ``None`` is dense, 0 runs the skipping kernel and drops nothing.
            From lambda = 1 on a dropped tile may hold a row's largest score: warns once.
        tile: (queries, keys) that vote together.
        causal, scale, skip_reference, impl, return_trace: as for :func:`blockattn.attend`.

    Returns:
        The output ``[B, Tq, Hq, D]``, or ``(output, AttentionTrace)`` whose ``skipped`` is the map.

    Raises:
        TypeError, ValueError, UnsupportedError: before any work is done.
    """
    if threshold is not None and threshold_scale_factor is not None:
        raise ValueError(
            f"threshold={threshold!r} and threshold_scale_factor={threshold_scale_factor!r} "
            "set the same thing; give one of them"
        )
    checks.query_key_value(q, k, v)
    tile = checks.integer_pair("tile", tile)
    if threshold is not None:
        threshold = checks.finite_number("threshold", threshold, minimum=0.0)
    if threshold_scale_factor is not None:
        factor = checks.finite_number("threshold_scale_factor", threshold_scale_factor, minimum=0.0)
        threshold = threshold_from_factor(factor, k.shape[1]) if factor and k.shape[1] else None
    if threshold is not None and threshold >= 1:
        _warn_large_threshold(threshold, k.shape[1])
    return attend(
        q,
        k,
        v,
        skip_threshold=threshold,
        skip_tile=tile,
        skip_reference=skip_reference,
        causal=causal,
        scale=scale,
        impl=impl,
        return_trace=return_trace,
    )


def _one_pass_threshold(threshold: float) -> float:
    value = checks.finite_number("threshold", threshold, minimum=0.0)
    if value > 1:
        raise ValueError(
            f"threshold={threshold!r}: above 1 a dropped tile may hold a new maximum, so one pass "
            "cannot tell; use a value in [0, 1] or run skip_softmax_attention at this one"
        )
    return value


@lru_cache(maxsize=256)  # a schedule of thresholds must not fill the memory
def _warn_large_threshold(threshold: float, keys: int) -> None:
    """Once per (threshold, length)."""
    warnings.warn(
        f"threshold={threshold:.3g} (threshold_scale_factor={threshold * keys:g} over {keys} keys) "
        "is at least 1: tiles are dropped even where they hold a row's largest score. Use a factor "
        f"below the number of keys, {keys}",
        stacklevel=4,  # the caller: past this function, skip_softmax_attention and its wrapper
    )
