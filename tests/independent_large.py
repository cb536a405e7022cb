"""Sol-Attn and SkipSoftmax at full length, from their definitions, for chosen query blocks.

Plain float64 torch on whatever device the inputs are on, sharing no code with blockattn: every
decision of a route is checked, and the output and the skip map of as many query blocks as one asks
for, each against all keys at once, where the kernels walk tiles with a running softmax.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

LOG2_E = math.log2(math.e)


def block_sums(x: Tensor, block: int = 64) -> tuple[Tensor, Tensor]:
    """Float64 sums over blocks of x ``[B, T, H, D]`` -> ``[B, N, H, D]``, and true lengths [N]."""
    parts = x.split(block, dim=1)
    sums = torch.stack([part.double().sum(dim=1) for part in parts], dim=1)
    lengths = torch.tensor([part.shape[1] for part in parts], dtype=torch.float64, device=x.device)
    return sums, lengths


@dataclass
class Plan:
    """Score and threshold of every block pair in base-2 logits, what is exact, what is doubtful."""

    score: Tensor
    theta: Tensor
    exact: Tensor
    doubtful: Tensor


def sol_plan(
    q: Tensor,
    k_mean: Tensor,
    tau: float,
    thresh_type: str,
    *,
    scale: float,
    sink: tuple[int, int] = (0, 0),
    margin: float = 1e-4,
) -> Plan:
    """The route for queries and key means as a kernel sees them; near ties are doubtful."""
    sums, lengths = block_sums(q)
    query = (sums / lengths[None, :, None, None]).transpose(1, 2)
    keys = k_mean.double().transpose(1, 2).repeat_interleave(q.shape[2] // k_mean.shape[2], dim=1)
    unit = scale * LOG2_E
    center = keys.mean(dim=2, keepdim=True)
    score = unit * (query @ keys.transpose(2, 3))
    if thresh_type == "exact":
        variance = score.var(dim=-1, correction=0)
    else:
        variance = unit**2 * (query.square() @ keys.var(dim=2, correction=0)[..., None])[..., 0]
    theta = unit * (query @ center.transpose(2, 3))[..., 0] + tau * (variance + 1e-6).sqrt()
    index = torch.arange(score.shape[-1], device=q.device)
    always = (index[:, None] - index[None, :]).abs() <= 1
    always = always | ((index >= sink[0]) & (index < sink[1]))[None, :]
    gap = (score - theta[..., None]).abs()
    doubtful = (gap <= margin * theta.abs().clamp(min=1)[..., None]) & ~always
    return Plan(score, theta, (score > theta[..., None]) | always, doubtful)


@dataclass
class Rows:
    """Output ``[rows, D]`` and LSE of the queries of one block; error of plain rounding."""

    out: Tensor
    lse: Tensor
    rounding: float


def attention_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    exact: Tensor,
    block: tuple[int, int] = (64, 64),
    tail: tuple[Tensor, Tensor] | None = None,
) -> Rows:
    """Attention of one head's query block, q ``[rows, D]``, to keys k, v ``[T, D]``.

    Args:
        exact: bool ``[N]``, blocks of keys that are attended key by key.
        block: (queries, keys).
        tail: mean keys and summed values ``[N, D]`` of all blocks; those that are not exact enter
            with the weight of their length.
    """
    size, tokens = block[1], k.shape[0]
    keep = exact.repeat_interleave(size)[:tokens]
    keys, values = [k[keep]], [v[keep]]
    weights = [torch.ones(int(keep.sum()), dtype=torch.float64, device=q.device)]
    if tail is not None:
        lengths = torch.full(exact.shape, float(size), dtype=torch.float64, device=q.device)
        lengths[-1] = tokens - size * (len(exact) - 1)
        keys.append(tail[0][~exact])
        # A sum of values stands for as many keys as its weight in the denominator says.
        values.append(tail[1][~exact])
        weights.append(lengths[~exact])
    key, value, weight = torch.cat(keys), torch.cat(values), torch.cat(weights)
    logits = scale * (q.double() @ key.double().T)
    top = logits.amax(dim=1, keepdim=True)
    p = torch.exp(logits - top)
    total = (p * weight).sum(dim=1, keepdim=True)
    out = p @ value.double() / total
    rounded = (p.to(q.dtype).double() @ value.double() / total).to(q.dtype).double()
    return Rows(out, (top + total.log())[:, 0], float((rounded - out).abs().max()))


def dropped_tiles(
    q: Tensor, k: Tensor, *, scale: float, threshold: float, tile: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Which key tiles one query tile drops at a threshold <= 1, and which votes are near ties.

    A tile goes when exp(its largest logit - largest logit before it) < threshold for every row; a
    dropped tile holds no new maximum, so that the maximum before it is that of all earlier tiles.
    """
    logits = scale * (q.double() @ k.double().T)
    tops = torch.stack([part.amax(dim=1) for part in logits.split(tile[1], dim=1)], dim=1)
    before = tops.cummax(dim=1).values.roll(1, dims=1)
    before[:, 0] = -math.inf
    gap = (tops - before).amax(dim=0)
    limit = math.log(threshold) if threshold > 0 else -math.inf
    near = (gap - limit).abs() <= 1e-4 * max(1.0, abs(limit)) if threshold > 0 else gap.isnan()
    return gap < limit, near
