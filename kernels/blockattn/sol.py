"""Sol-Attn: blocks that score tau standard deviations above the mean are exact, others a summary.

Method of "Sol-Attn: Accelerating Video Generation Inference via On-the-Fly Attention
Sparsification" (arXiv:2607.24027). A query block keeps key block j exact when the mean score of its
queries against the mean key of j lies more than tau standard deviations above the mean over all key
blocks. Blocks near the diagonal and sink blocks are always exact. All statistics are float32 or
better.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from blockattn import checks
from blockattn.attend import run
from blockattn.compiled import one_node
from blockattn.impl import registry, triton
from blockattn.layout import BLOCK, block_mean, num_blocks
from blockattn.precision import own_precision
from blockattn.problem import LOG2_E, BlockSummary, Plan, make_problem
from blockattn.route import BlockRoute

THRESHOLD_TYPES = ("diag", "exact")
VARIANCE_FLOOR = 1e-6  # added to the variance, base-2 logits squared
BAND = 1  # key blocks on either side of the diagonal that are always exact


@dataclass(frozen=True)
class BlockScores:
    """Routing score of every block pair, from which the route for any tau follows without q and k.

    Attributes:
        z: float32 ``[B, H, Nq, Nk]``, standard deviations above the row's mean score.
        mean, std: float32 ``[B, H, Nq]``, the row's statistics in base-2 logits.
        always: blocks that are exact whatever tau is (band and sink).
        sink: key blocks of the sink, half open.
        thresh_type: which standard deviation: ``diag`` or ``exact``.
    """

    z: Tensor
    mean: Tensor
    std: Tensor
    always: BlockRoute
    sink: tuple[int, int]
    thresh_type: str

    def threshold(self, tau: float) -> Tensor:
        """theta of every query block in base-2 logits, float32 ``[B, H, Nq]``."""
        return self.mean + checks.finite_number("tau", tau) * self.std

    def scores(self) -> Tensor:
        """Mean score of every block pair in base-2 logits, float32 ``[B, H, Nq, Nk]``."""
        return self.mean[..., None] + self.z * self.std[..., None]

    def passing(self, tau: float) -> BlockRoute:
        """Blocks above the threshold alone, without band and sink (a tie stays approximate)."""
        above = self.z > _as_float32([checks.finite_number("tau", tau)], self.z.device)
        return BlockRoute.from_dense(above, block=self.always.block, seqlens=self.always.seqlens)

    def route(self, tau: float) -> BlockRoute:
        """Exact blocks at ``tau``: above the threshold, in the band, or in the sink."""
        return self.passing(tau) | self.always

    def density(self, taus: list[float] | Tensor) -> Tensor:
        """Density of every head's route at many taus, one sort: float64 ``[B, H, len(taus)]``."""
        values = _as_float32(checks.numbers("taus", taus), self.z.device)
        forced = self.always.dense()
        # NaN passes no threshold, but it would sort above every one.
        never = forced | self.z.isnan()
        free = self.z.masked_fill(never, -torch.inf).flatten(2).sort(dim=-1).values
        pairs = free.shape[-1]
        values = values.expand(*free.shape[:2], -1).contiguous()
        below = torch.searchsorted(free, values, right=True)
        return (pairs - below + forced.flatten(2).sum(dim=-1, keepdim=True)).double() / pairs

    def heads(self, index: slice) -> BlockScores:
        """The scores of a slice of the heads."""
        always = self.always.heads(index)
        rows = (self.z[:, index], self.mean[:, index], self.std[:, index])
        return replace(self, z=rows[0], mean=rows[1], std=rows[2], always=always)


def sink_blocks(
    tokens: int, *, sink_start: int | None = None, sink_tokens: int = 0, block: int = BLOCK
) -> tuple[int, int]:
    """Key blocks (half open) that a token range touches, rounded outward.

    ``sink_start=None`` means the last ``sink_tokens`` tokens. No sink is (N, N).
    """
    count = checks.integer("sink_tokens", sink_tokens, maximum=tokens)
    start = tokens - count
    if sink_start is not None:
        start = checks.integer("sink_start", sink_start, maximum=tokens)
    if start + count > tokens:
        raise ValueError(
            f"sink_start={sink_start!r}, sink_tokens={sink_tokens}: the range ends at token "
            f"{start + count}, but the sequence has {tokens}; make it shorter"
        )
    if count == 0:
        return num_blocks(tokens, block), num_blocks(tokens, block)
    return start // block, num_blocks(start + count, block)


def score_statistics(
    q_mean: Tensor, k_mean: Tensor, thresh_type: str, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """z-score, mean and standard deviation of every query block's scores over all key blocks.

    Args:
        q_mean: ``[B, N, Hq, D]`` mean query of each block, float32 or wider.
        k_mean: ``[B, N, Hk, D]`` mean key of each block as the kernels see it.
        thresh_type: ``exact`` takes the variance of the scores themselves, ``diag`` drops the
            covariance between channels.
        scale: softmax scale.

    Returns:
        z ``[B, Hq, Nq, Nk]``, mean and std ``[B, Hq, Nq]`` in base-2 logits, in q_mean's dtype.
    """
    group = q_mean.shape[2] // k_mean.shape[2]
    queries = q_mean.transpose(1, 2)
    keys = k_mean.to(torch.float64).transpose(1, 2).repeat_interleave(group, dim=1)
    # Centred in float64: equal keys then give exact ties, and a large mean key costs no precision.
    center = keys.mean(dim=2, keepdim=True)
    centred = keys - center
    scores = queries @ centred.to(queries.dtype).transpose(2, 3)
    # Squares in float64: in float32 scores from 1e19 on would leave an infinite deviation, a z of 0
    # everywhere and so a tau that does nothing.
    if thresh_type == "exact":
        spread = torch.linalg.vector_norm(scores, dim=-1, dtype=torch.float64)
        spread = spread / math.sqrt(scores.shape[-1])
    else:
        channel = centred.square().mean(dim=2, keepdim=True)
        spread = (queries.double().square() * channel).sum(dim=-1).sqrt()
    unit = scale * LOG2_E
    std = ((spread * unit).square() + VARIANCE_FLOOR).sqrt()
    mean = unit * (queries @ center.to(queries.dtype).transpose(2, 3)).squeeze(-1)
    z = scores * (unit / std).to(scores.dtype)[..., None]
    return z, mean, std.to(scores.dtype)


@own_precision()
def sol_scores(
    q: Tensor,
    k: Tensor,
    *,
    thresh_type: str = "diag",
    sink_start: int | None = None,
    sink_tokens: int = 0,
    scale: float | None = None,
    block: int = BLOCK,
) -> BlockScores:
    """Scores every block pair once; :meth:`BlockScores.route` then serves every tau.

    Args:
        q: ``[B, T, Hq, D]``; k: ``[B, T, Hk, D]`` of the same sequence.
        thresh_type: ``diag`` or ``exact``; they give different densities at the same tau.
        sink_start, sink_tokens: token range whose blocks every query attends exactly; without a
            start it is the end of the sequence. Rounded outward to blocks.
        scale: softmax scale, default D ** -0.5.
        block: tokens of a block, the same for queries and keys.

    Raises:
        TypeError, ValueError: an argument is not allowed.
    """
    query, key = checks.query_key(q, k)
    kind, sink, factor = _check_routing(
        query,
        key,
        thresh_type,
        sink_start=sink_start,
        sink_tokens=sink_tokens,
        scale=scale,
        block=block,
    )
    k_mean = block_mean(key, block).to(key.dtype)
    z, mean, std = score_statistics(block_mean(query, block), k_mean, kind, factor)
    always = _always_exact(query, sink, block)
    return BlockScores(z.float(), mean.float(), std.float(), always, sink, kind)


def _check_routing(
    q: Tensor,
    k: Tensor,
    thresh_type: object,
    *,
    sink_start: int | None,
    sink_tokens: int,
    scale: object,
    block: int = BLOCK,
) -> tuple[str, tuple[int, int], float]:
    """Threshold type, sink blocks and host scale of a checked routing call."""
    checks.self_attention("sol_scores", q, k)
    kind = checks.one_of("thresh_type", thresh_type, THRESHOLD_TYPES)
    checks.integer("block", block, minimum=1)
    sink = sink_blocks(q.shape[1], sink_start=sink_start, sink_tokens=sink_tokens, block=block)
    return kind, sink, _host_scale(scale, q)


def sol_route(q: Tensor, k: Tensor, *, tau: float = 1.0, **settings: Any) -> BlockRoute:
    """Exact blocks at one tau; ``settings`` as for :func:`sol_scores`. Larger tau is sparser."""
    checks.finite_number("tau", tau)
    return sol_scores(q, k, **settings).route(tau)


@one_node
def sol_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    tau: float = 1.0,
    thresh_type: str = "diag",
    sink_start: int | None = None,
    sink_tokens: int = 0,
    scale: float | None = None,
    impl: str = "auto",
    return_trace: bool = False,
) -> Any:
    """Sol-Attn self-attention, non-causal (arXiv:2607.24027).

    Args:
        q: ``[B, T, Hq, D]``; k, v: ``[B, T, Hk, D]``, Hk dividing Hq.
        tau: standard deviations above the mean score that a block needs to be exact; any finite
            number. tau = -1000 is dense for N <= 7,800 blocks, tau = +1000 leaves band and sink.
        thresh_type, sink_start, sink_tokens, scale: as for :func:`sol_scores`.
        impl, return_trace: as for :func:`blockattn.attend`.

    Returns:
        The output ``[B, T, Hq, D]``, or ``(output, AttentionTrace)``. In float16 a block of 64
        values of mean 1,024 or more has no summary, as their sum is beyond 65,504: every row that
        needs it is infinite or NaN, on a GPU other rows too. bfloat16 has the range.

    Raises:
        TypeError, ValueError, UnsupportedError: before any work is done.
    """
    query, key, value = checks.query_key_value(q, k, v)
    registry.check_name(impl)
    checks.flag("return_trace", return_trace)
    routing = {
        "thresh_type": thresh_type,
        "sink_start": sink_start,
        "sink_tokens": sink_tokens,
        "scale": scale,
    }
    plan = _plan(query, key, value, tau, impl, **routing)
    problem = make_problem(
        query, key, value, route=plan.route, tail=plan.tail, scale=scale, want_trace=return_trace
    )
    return run(problem, impl)


def _plan(
    q: Tensor, k: Tensor, v: Tensor, tau: float, impl: str, *, thresh_type: str, **routing: Any
) -> Plan:
    """Route and summaries, by the GPU's kernels where the call will run on them."""
    call = make_problem(q, k, v)
    if impl not in ("auto", "triton", "cute", "cudnn") or triton.obstacles(call):
        route = sol_route(q, k, tau=tau, thresh_type=thresh_type, **routing)
        return Plan(route, BlockSummary.of(k, v))
    from blockattn.impl.triton import plan

    number = checks.finite_number("tau", tau)
    kind, sink, scale = _check_routing(q, k, thresh_type, **routing)
    return plan.plan(
        q,
        k,
        v,
        tau=number,
        unit=scale * LOG2_E,
        floor=VARIANCE_FLOOR,
        sink=sink,
        band=BAND,
        exact=kind == "exact",
    )


def _as_float32(taus: list[float], device: torch.device) -> Tensor:
    """Taus as the scores are compared with them; one beyond float32 becomes infinite."""
    return torch.tensor(taus, dtype=torch.float64).to(device, torch.float32)


def _host_scale(scale: object, q: Tensor) -> float:
    """Routing needs the scale on the host; it enters only through the variance floor."""
    value = checks.scale_argument("scale", scale, q, default=checks.default_scale(q.shape[3]))
    if isinstance(value, Tensor):
        raise TypeError(
            f"scale: {value.dtype} tensor on {value.device}, but routing takes a float; "
            "pass the device scale to attend() instead"
        )
    return value


def _always_exact(q: Tensor, sink: tuple[int, int], block: int) -> BlockRoute:
    """Diagonal band and sink blocks of every head."""
    index = torch.arange(num_blocks(q.shape[1], block), device=q.device)
    band = (index[:, None] - index[None, :]).abs() <= BAND
    exact = band | ((index >= sink[0]) & (index < sink[1]))[None, :]
    mask = exact.expand(q.shape[0], q.shape[2], *exact.shape)
    return BlockRoute.from_dense(mask, block=(block, block), seqlens=(q.shape[1], q.shape[1]))
