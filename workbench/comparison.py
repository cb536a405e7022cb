"""Two attention settings on the same inputs: which block pairs each computes, and who differs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from blockattn import (
    BLOCK,
    AttentionTrace,
    BlockRoute,
    attend,
    checks,
    skip_gaps,
    skip_softmax_attention,
    sol_attention,
    sol_route,
)
from workbench.capture import QKV

ALGORITHMS = ("sol_attn", "skip_softmax", "dense")


class Agreement(IntEnum):
    """What two settings do with a block pair; the value is the code in a class map."""

    NEITHER = 0
    BOTH = 1
    ONLY_A = 2
    ONLY_B = 3


@dataclass(frozen=True)
class Setting:
    """One way to compute an attention call.

    Attributes:
        algorithm: ``sol_attn``, ``skip_softmax`` or ``dense``; each looks at its own fields.
        tau, thresh_type, sink_tokens: of Sol-Attn.
        log2_threshold, tile: of SkipSoftmax, log2(lambda) and tokens a side of the tiles.
        impl: implementation, ``auto`` for the fastest that serves the call.

    Raises:
        ValueError: another algorithm.
    """

    algorithm: str = "sol_attn"
    tau: float = 1.0
    thresh_type: str = "diag"
    sink_tokens: int = 0
    log2_threshold: float = -4.0
    tile: int = 2 * BLOCK
    impl: str = "auto"

    def __post_init__(self) -> None:
        checks.one_of("algorithm", self.algorithm, ALGORITHMS)

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.algorithm, self.knobs, f"impl {self.impl}")))

    @property
    def knobs(self) -> str:
        """The knobs that the algorithm looks at, in words."""
        if self.algorithm == "sol_attn":
            sink = f", sink {self.sink_tokens}" if self.sink_tokens else ""
            return f"tau {self.tau:g} {self.thresh_type}{sink}"
        if self.algorithm == "skip_softmax":
            return f"log2(lambda) {self.log2_threshold:g}, tile {self.tile}"
        return ""

    @property
    def left_out(self) -> str:
        """What becomes of a pair that is not exact."""
        return "skipped" if self.algorithm == "skip_softmax" else "approximate"

    def plan(self, q: Tensor, k: Tensor) -> BlockRoute:
        """Blocks of 64 x 64 that will be computed exactly, without an attention call."""
        if self.algorithm == "sol_attn":
            knobs = {"thresh_type": self.thresh_type, "sink_tokens": self.sink_tokens}
            return sol_route(q, k, tau=self.tau, **knobs)
        if self.algorithm == "dense":
            heads, tokens = (q.shape[0], q.shape[2]), (q.shape[1], k.shape[1])
            return BlockRoute.full(heads, seqlens=tokens, device=q.device)
        gaps = skip_gaps(q, k, tile=(self.tile, self.tile))
        kept = gaps.reachable - gaps.skipped(2.0**self.log2_threshold)
        return kept.refine((BLOCK, BLOCK))

    def run(self, x: QKV) -> tuple[Tensor, AttentionTrace]:
        """The real call: output ``[B, T, H, D]`` and what ran."""
        how = {"impl": self.impl, "return_trace": True}
        if self.algorithm == "sol_attn":
            knobs = {"thresh_type": self.thresh_type, "sink_tokens": self.sink_tokens}
            return sol_attention(x.q, x.k, x.v, tau=self.tau, **knobs, **how)
        if self.algorithm == "dense":
            return attend(x.q, x.k, x.v, **how)
        threshold, tile = 2.0**self.log2_threshold, (self.tile, self.tile)
        return skip_softmax_attention(x.q, x.k, x.v, threshold=threshold, tile=tile, **how)


def delivered(trace: AttentionTrace) -> BlockRoute:
    """Blocks of 64 x 64 that a call computed exactly."""
    return trace.computed.refine((BLOCK, BLOCK))


def agreement(a: BlockRoute, b: BlockRoute, batch: int = 0, head: int = 0) -> Tensor:
    """Who computes every block pair of one head, uint8 ``[Nq, Nk]`` of :class:`Agreement`.

    Raises:
        ValueError: routes of other tensors or blocks, or no such head.
    """
    a.differing(b)  # refuses routes that cannot be compared
    checks.integer("batch", batch, maximum=a.shape[0] - 1)
    checks.integer("head", head, maximum=a.shape[1] - 1)
    one, other = (exact_of(route, batch, head) for route in (a, b))
    codes = torch.zeros_like(one, dtype=torch.uint8)
    codes.masked_fill_(one & other, Agreement.BOTH)
    codes.masked_fill_(one & ~other, Agreement.ONLY_A)
    return codes.masked_fill_(~one & other, Agreement.ONLY_B)


def exact_of(route: BlockRoute, batch: int, head: int) -> Tensor:
    """Exact pairs of one head, bool ``[Nq, Nk]``, without unpacking the other heads."""
    return route.heads(slice(head, head + 1)).dense()[batch, 0]


def flipped_per_head(a: BlockRoute, b: BlockRoute) -> Tensor:
    """Block pairs that only one of the two computes, int64 ``[B, H]``."""
    return ((a - b).counts() + (b - a).counts()).sum(dim=-1)


def describe_agreement(codes: Tensor) -> str:
    """The line under a map of differences: flipped pairs, and which side has them."""
    numbers = torch.bincount(codes.flatten().long(), minlength=len(Agreement)).tolist()
    flipped = numbers[Agreement.ONLY_A] + numbers[Agreement.ONLY_B]
    total = max(1, codes.numel())
    return (
        f"{flipped:,} of {codes.numel():,} block pairs flipped ({flipped / total:.2%}): exact in A "
        f"alone {numbers[Agreement.ONLY_A]:,}, in B alone {numbers[Agreement.ONLY_B]:,}; in both "
        f"{numbers[Agreement.BOTH]:,}, in neither {numbers[Agreement.NEITHER]:,}."
    )
