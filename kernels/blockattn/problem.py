"""One checked attention call, as handed to an implementation, and what comes back."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blockattn import checks
from blockattn.layout import BLOCK, block_lengths, block_mean, block_sum, num_blocks
from blockattn.route import BlockRoute

if TYPE_CHECKING:
    from blockattn.quant import QuantOperands

LOG2_E = math.log2(math.e)  # natural logits to base-2 logits
SKIP_REFERENCES = ("exact", "lagging")


@dataclass(frozen=True)
class BlockSummary:
    """What an approximate block contributes instead of its keys (sol_attn specification section 3).

    Attributes:
        k_mean: ``[B, N, Hk, D]`` mean of the valid keys of each block, in the inputs' dtype.
        v_sum: ``[B, N, Hk, D]`` sum (not mean) of its values, in the inputs' dtype; infinite where
            that is float16 and the sum is beyond 65,504.
        lengths: int32 ``[N]`` valid keys of each block: its weight in the softmax denominator.
        block: tokens of a whole block.
    """

    k_mean: Tensor
    v_sum: Tensor
    lengths: Tensor
    block: int = BLOCK

    @classmethod
    def of(cls, k: Tensor, v: Tensor, block: int = BLOCK) -> BlockSummary:
        """Summaries of k, v ``[B, T, Hk, D]``: float32 sums, rounded once to the inputs' dtype.

        Raises:
            TypeError, ValueError: k and v are not such tensors of one shape, or block is not >= 1.
        """
        checks.query_key_value(k, k, v)
        checks.integer("block", block, minimum=1)
        lengths = block_lengths(k.shape[1], block, k.device)
        k_mean, v_sum = block_mean(k, block).to(k.dtype), block_sum(v, block).to(v.dtype)
        return cls(k_mean, v_sum, lengths, block)

    def to(self, dtype: torch.dtype) -> BlockSummary:
        """The same rounded summaries in another dtype."""
        return replace(self, k_mean=self.k_mean.to(dtype), v_sum=self.v_sum.to(dtype))


@dataclass(frozen=True)
class Plan:
    """A route with its tail."""

    route: BlockRoute
    tail: BlockSummary


@dataclass(frozen=True)
class Problem:
    """Arguments of one call after every check; see :func:`blockattn.attend` for their meaning.

    A quantised call also carries its encoded operands. An implementation that takes codes reads
    them; for any other one q, k and v are replaced by the decoded operands before it runs.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float | Tensor
    route: BlockRoute | None = None
    tail: BlockSummary | None = None
    skip_threshold: float | None = None
    skip_tile: tuple[int, int] = (128, 128)
    skip_reference: str = "exact"
    block_lengths: Tensor | None = None
    scale_output: float | Tensor = 1.0
    causal: bool = False
    want_trace: bool = False
    round_p: bool = False  # e4m3 probabilities, see quantised_attention
    lists: tuple[Tensor, Tensor] | None = None  # of the route, as BlockRoute.lists() gives them
    operands: QuantOperands | None = None  # of a quantised call
    tail_to_come: bool = False  # a quantised call makes its tail from what its implementation reads

    @property
    def group(self) -> int:
        """Query heads that share one key head."""
        return self.q.shape[2] // self.k.shape[2]

    @property
    def seqlens(self) -> tuple[int, int]:
        return self.q.shape[1], self.k.shape[1]

    @property
    def block(self) -> tuple[int, int]:
        """Block sizes of the route; 64 where there is none."""
        return (BLOCK, BLOCK) if self.route is None else self.route.block

    @property
    def heads_shape(self) -> tuple[int, int]:
        return self.q.shape[0], self.q.shape[2]

    @cached_property
    def algorithm(self) -> str:
        """Which mechanism the arguments add up to."""
        names = []
        if self.route is not None:
            with_tail = self.tail is not None or self.tail_to_come
            names.append("sol_attn" if with_tail else "block_mask")
        if self.skip_threshold is not None:
            names.append("skip_softmax")
        return "+".join(names) or "dense"

    @property
    def plain(self) -> bool:
        """Dense attention over every key: no route, no skip vote, no padded blocks."""
        return self.algorithm == "dense" and self.block_lengths is None

    @property
    def skip_limit(self) -> float:
        """log2(lambda), with which gaps in base-2 units are compared; -inf where nothing drops."""
        return math.log2(self.skip_threshold) if self.skip_threshold else -math.inf

    @cached_property
    def visited(self) -> BlockRoute | None:
        """The route without blocks that lie wholly in a causal call's future."""
        if self.route is None or not self.causal:
            return self.route
        return self.route & self.reachable(self.route.block)

    def reachable(self, block: tuple[int, int]) -> BlockRoute:
        """Valid block pairs: all, or those on and below the diagonal when causal."""
        make = BlockRoute.causal if self.causal else BlockRoute.full
        return make(self.heads_shape, seqlens=self.seqlens, block=block, device=self.q.device)


@dataclass(frozen=True)
class Result:
    """Output ``[B, Tq, Hq, D]``; LSE float32 ``[B, Hq, Tq]`` and skipped tiles when traced.

    An implementation that takes codes says which formats it emulated; others leave ``None``. One
    that had to get its kernel for this call says how.
    """

    out: Tensor
    lse: Tensor | None = None
    skipped: BlockRoute | None = None
    emulated: tuple[str, ...] | None = None
    loaded: str | None = None


def check_route(route: object, problem: Problem) -> BlockRoute:
    """The route fits the call: type, sequence lengths, heads, device."""
    if not isinstance(route, BlockRoute):
        raise TypeError(f"route: expected a BlockRoute, got {type(route).__name__}")
    if route.seqlens != problem.seqlens:
        heads = problem.q.shape[2], problem.k.shape[2]
        hint = checks.layout_hint(route.seqlens == heads)
        raise ValueError(
            f"route: made for (Tq, Tk) = {route.seqlens}, but q and k have {problem.seqlens} "
            f"tokens; route these tensors anew{hint}"
        )
    if route.shape[:2] != problem.heads_shape:
        raise ValueError(
            f"route: made for (B, H) = {route.shape[:2]}, but q has {problem.heads_shape}; "
            "route these tensors anew"
        )
    if route.device != problem.q.device:
        raise ValueError(
            f"route: on {route.device}, but q is on {problem.q.device}; use route.to()"
        )
    return route


def check_tail(tail: object, problem: Problem) -> BlockSummary:
    """The summaries fit the keys and the route's key blocks."""
    if not isinstance(tail, BlockSummary):
        raise TypeError(f"tail: expected a BlockSummary, got {type(tail).__name__}")
    if problem.route is None:
        raise ValueError("tail: summaries need a route that says which blocks they stand for")
    if problem.causal:
        raise ValueError(
            "tail: a block summary mixes past and future keys; causal=True has no tail"
        )
    if tail.block != problem.route.block[1]:
        raise ValueError(
            f"tail: blocks of {tail.block} keys, but the route's key block is "
            f"{problem.route.block[1]}; summarise with BlockSummary.of(k, v, block)"
        )
    batch, keys, heads, dim = problem.k.shape
    expected = (batch, num_blocks(keys, tail.block), heads, dim)
    for name, value in (("k_mean", tail.k_mean), ("v_sum", tail.v_sum)):
        if tuple(value.shape) != expected:
            raise ValueError(f"tail.{name}: shape {tuple(value.shape)}, expected {expected}")
        checks.same_kind(f"tail.{name}", value, "k", problem.k)
    check_lengths("tail.lengths", tail.lengths, problem, tail.block)
    return tail


def check_lengths(name: str, value: object, problem: Problem, block: int) -> Tensor:
    """Valid keys of each key block: int32 ``[Nk]`` on the device (values are not read)."""
    if not isinstance(value, Tensor) or value.dtype != torch.int32:
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{name}: expected an int32 tensor [Nk], got {kind}")
    count = num_blocks(problem.k.shape[1], block)
    if tuple(value.shape) != (count,):
        raise ValueError(
            f"{name}: shape {tuple(value.shape)}, expected ({count},), one per key block"
        )
    if value.device != problem.q.device:
        raise ValueError(
            f"{name}: on {value.device}, but q is on {problem.q.device}; move it there"
        )
    return value


def check_skip(threshold: object, tile: object, reference: object, problem: Problem) -> Problem:
    """Threshold as a ratio >= 0, and a tile that whole blocks of the route make up.

    Tile and reference are checked without a threshold too: a misspelt one is never ignored.
    """
    pair = checks.integer_pair("skip_tile", tile)
    kind = checks.one_of("skip_reference", reference, SKIP_REFERENCES)
    if threshold is None:
        return replace(problem, skip_tile=pair, skip_reference=kind)
    ratio = checks.finite_number("skip_threshold", threshold, minimum=0.0)
    if problem.route is not None and any(t % b for t, b in zip(pair, problem.route.block)):
        raise ValueError(
            f"skip_tile={pair}: must be whole blocks of the route, which are {problem.route.block}"
        )
    return replace(problem, skip_threshold=ratio, skip_tile=pair, skip_reference=kind)


def make_problem(
    q: object,
    k: object,
    v: object,
    *,
    route: object = None,
    tail: object = None,
    skip_threshold: object = None,
    skip_tile: object = (128, 128),
    skip_reference: object = "exact",
    block_lengths: object = None,
    scale: object = None,
    scale_output: object = None,
    causal: object = False,
    want_trace: object = False,
) -> Problem:
    """Checks every argument before any work is done."""
    query, key, value = checks.query_key_value(q, k, v)
    own = checks.default_scale(query.shape[3])
    problem = Problem(
        query,
        key,
        value,
        scale=checks.scale_argument("scale", scale, query, default=own),
        scale_output=checks.scale_argument("scale_output", scale_output, query, default=1.0),
        causal=checks.flag("causal", causal),
        want_trace=checks.flag("return_trace", want_trace),
    )
    if route is not None:
        problem = replace(problem, route=check_route(route, problem))
    if tail is not None:
        problem = replace(problem, tail=check_tail(tail, problem))
    if block_lengths is not None:
        lengths = check_lengths("block_lengths", block_lengths, problem, problem.block[1])
        problem = replace(problem, block_lengths=lengths)
    return check_skip(skip_threshold, skip_tile, skip_reference, problem)
