"""What ran: which implementation served a call, why no better one did, and how much of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from blockattn import checks
from blockattn.errors import Reason
from blockattn.problem import Problem, Result
from blockattn.route import BlockRoute


@dataclass(frozen=True)
class AttentionTrace:
    """Record of one call.

    Attributes:
        algorithm: ``dense``, ``block_mask``, ``sol_attn``, ``skip_softmax`` or a sum of them.
        impl: implementation that ran.
        reasons: why each faster implementation did not run.
        route: exact block pairs asked for, ``None`` = every pair.
        skipped: tiles that the skip threshold dropped at run time, ``None`` without a threshold.
        lse: float32 ``[B, H, Tq]``, natural log, ``-inf`` for rows without keys.
        reachable: valid block pairs (all, or the causal half).
        emulated: number formats that were emulated because no matrix unit here takes them.
        loaded: how the kernel came into the process, where this call had to compile or load it.
    """

    algorithm: str
    impl: str
    reasons: tuple[Reason, ...]
    route: BlockRoute | None
    skipped: BlockRoute | None
    lse: Tensor
    reachable: BlockRoute
    emulated: tuple[str, ...] = ()
    loaded: str | None = None

    @cached_property
    def computed(self) -> BlockRoute:
        """Block pairs that were computed exactly: asked for, valid, and not skipped."""
        pairs = self.reachable if self.route is None else self.route & self.reachable
        return pairs if self.skipped is None else pairs - self.skipped.refine(pairs.block)

    @cached_property
    def density(self) -> float:
        """Exact pairs / valid pairs that were delivered, in [0, 1] (reads the device)."""
        valid = int(self.reachable.counts().sum())
        return int(self.computed.counts().sum()) / valid if valid else 0.0

    def __str__(self) -> str:
        lines = [f"{self.algorithm} ran on {self.impl}, density {self.density:.4f}"]
        if self.skipped is not None:
            lines[0] += f", {int(self.skipped.counts().sum())} tiles skipped"
        if self.emulated:
            lines.append(f"emulated: {', '.join(self.emulated)}")
        if self.loaded:
            lines.append(self.loaded)
        heads, (queries, keys) = self.lse.shape[1], self.reachable.seqlens
        if 1 < queries < heads > keys:
            lines.append(f"q has {queries} tokens, {heads:,} heads{checks.layout_hint(True)}")
        return "\n".join([*lines, *(f"not {reason}" for reason in self.reasons)])


def make_trace(
    problem: Problem, result: Result, impl: str, reasons: tuple[Reason, ...]
) -> AttentionTrace:
    """Trace of a call that asked for one."""
    if result.lse is None:
        raise RuntimeError(f"implementation {impl} returned no LSE for a traced call")
    by_tile = problem.route is None and result.skipped is not None
    block = problem.skip_tile if by_tile else problem.block
    return AttentionTrace(
        algorithm=problem.algorithm,
        impl=impl,
        reasons=reasons,
        route=problem.route,
        skipped=result.skipped,
        lse=result.lse,
        reachable=problem.reachable(block),
        loaded=result.loaded,
    )
