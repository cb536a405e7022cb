"""Text among the video tokens of one sequence: its keys are exact for every query, its rows dense.

Text is short and steers everything, so no mechanism may drop it. Sol-Attn has a sink for its keys.
SkipSoftmax has none: there the video's keys alone are tested against the threshold, the text's are
attended beside them, and the two parts are put together by their log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blockattn import AttentionTrace, attend

Dense = Callable[[Tensor, Tensor, Tensor, Any], Tensor]
Traced = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, AttentionTrace]]


@dataclass(frozen=True)
class Delivered:
    """What a record keeps of a trace, with a density that counts the dense rows of the text."""

    algorithm: str
    impl: str
    density: float
    emulated: tuple[str, ...]
    reasons: tuple[Any, ...]


def text_tokens(call: Any) -> tuple[int, int]:
    """Text tokens (before, after) the video's in the sequence of a call."""
    return getattr(call, "prefix", 0), getattr(call, "suffix", 0)


def beside_text(
    video: Traced, dense: Dense, q: Tensor, k: Tensor, v: Tensor, call: Any, *, trace: bool
) -> tuple[Tensor, Delivered | None]:
    """Attention in which only pairs of video tokens are left to a mechanism.

    Args:
        video: the mechanism: (q, k, v) -> output and trace, of video tokens.
        dense: attention of the text rows.
        q, k, v: [B, T, H, D]; the call says which tokens are text.
        trace: whether to say what was delivered, which waits for the device.

    Returns:
        The output [B, T, H, D] and what was delivered over all pairs.
    """
    prefix, suffix = text_tokens(call)
    tokens = q.shape[1]
    rows, texts = slice(prefix, tokens - suffix), [slice(prefix), slice(tokens - suffix, tokens)]
    mixed, found = video(q[:, rows], k[:, rows], v[:, rows])
    text_k, text_v = (torch.cat([x[:, part] for part in texts], dim=1) for x in (k, v))
    exact, text_trace = attend(q[:, rows], text_k, text_v, return_trace=True)
    out = torch.empty_like(q)
    out[:, rows] = merged(mixed, found.lse, exact, text_trace.lse)
    for part in texts:
        if q[:, part].numel():
            out[:, part] = dense(q[:, part], k, v, call)
    if not trace:
        return out, None
    count, text = tokens - prefix - suffix, prefix + suffix
    pairs = count * (found.density * count + text) + text * tokens
    return out, _delivered(found, pairs / tokens**2)


def merged(a: Tensor, lse_a: Tensor, b: Tensor, lse_b: Tensor) -> Tensor:
    """Attention over two disjoint sets of keys from the attention over each.

    Args:
        a, b: outputs [B, T, H, D]; lse_a, lse_b: float32 [B, H, T], natural log, `-inf` for no key,
            but not in both.
    """
    both = torch.logaddexp(lse_a, lse_b)
    wide = torch.promote_types(a.dtype, torch.float32)
    parts = [
        out.to(wide) * (lse - both).exp().transpose(1, 2)[..., None]
        for out, lse in ((a, lse_a), (b, lse_b))
    ]
    return (parts[0] + parts[1]).to(a.dtype)


def with_dense_rows(trace: AttentionTrace, first: int, count: int) -> Delivered:
    """What was delivered when `count` query rows from `first` on ran dense after all."""
    reached = trace.reachable.counts().double().mean((0, 1)).clamp(min=1)
    share = trace.computed.counts().double().mean((0, 1)) / reached  # of every block of queries
    tokens = trace.reachable.seqlens[0]
    rows = torch.arange(tokens, device=share.device)
    per_row = share[rows // trace.reachable.block[0]]
    dense = (rows >= first) & (rows < first + count)
    return _delivered(trace, float(per_row.masked_fill(dense, 1.0).mean()))


def _delivered(trace: AttentionTrace, density: float) -> Delivered:
    return Delivered(trace.algorithm, trace.impl, density, trace.emulated, trace.reasons)
