"""Smooth-QK: less range in q and k before they are quantised, with the same softmax.

Method of SageAttention (arXiv:2410.02367: the mean key shifts every score of a row alike) and
SmoothQuant (arXiv:2211.10438: range moves from one factor of a product to the other); the formula
is that of TensorRT-LLM VisualGen.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from blockattn import checks

SMOOTH_FLOOR = 1e-4  # smallest per-channel maximum, and bound 1e-4 .. 1e4 of the factor
QUERY_POWER, KEY_POWER = 0.7, 0.3


@dataclass(frozen=True)
class SmoothedQK:
    """q and k with the same softmax but a smaller range.

    Attributes:
        q, k: in the inputs' shape and dtype.
        k_mean: float32 ``[Hk, D]``, the mean key that was taken off.
        factor: float32 ``[Hk, D]``, what k was multiplied and q divided by.
    """

    q: Tensor
    k: Tensor
    k_mean: Tensor
    factor: Tensor


def smooth_qk(q: Tensor, k: Tensor) -> SmoothedQK:
    """Takes the mean key off k and balances the channels of q and k before they are quantised.

    For every (key head, channel), with maxima over batch, tokens and the queries' group, at least
    1e-4: s = max|q| ** 0.7 / max|k| ** 0.3 within 1e-4 .. 1e4; q * (1 / s) and (k - mean) * s,
    where 1 / s and s are rounded to the inputs' dtype. The mean over batch and tokens is float32.
    The softmax does not see the shift; the LSE does, see :func:`smoothing_lse_shift`. NaN in q or k
    spreads to its whole head.

    Args:
        q: ``[B, Tq, Hq, D]``; k: ``[B, Tk, Hk, D]``, Hk dividing Hq.

    Raises:
        TypeError, ValueError: q and k are not such tensors.
    """
    query, key = checks.query_key(q, k)
    heads = key.shape[2]
    if query.shape[1] == 0 or key.shape[1] == 0:
        ones = torch.ones(heads, key.shape[3], device=key.device)
        return SmoothedQK(query, key, torch.zeros_like(ones), ones)
    grouped, wide = query.float().unflatten(2, (heads, -1)), key.float()
    q_max = grouped.abs().amax(dim=(0, 1, 3)).clamp(min=SMOOTH_FLOOR)
    k_max = wide.abs().amax(dim=(0, 1)).clamp(min=SMOOTH_FLOOR)
    factor = (q_max**QUERY_POWER / k_max**KEY_POWER).clamp(SMOOTH_FLOOR, 1 / SMOOTH_FLOOR)
    shrink, grow = ((1 / factor).to(query.dtype).float(), factor.to(query.dtype).float())
    k_mean = wide.mean(dim=(0, 1))
    smooth_q = (grouped * shrink[:, None]).flatten(2, 3).to(query.dtype)
    return SmoothedQK(smooth_q, ((wide - k_mean) * grow).to(key.dtype), k_mean, factor)


def smoothing_lse_shift(q: Tensor, k_mean: Tensor, scale: float | Tensor) -> Tensor:
    """What smoothing took from the LSE of every query: scale * (q . k_mean), float32 ``[B, H, T]``.

    Args:
        q: ``[B, T, Hq, D]`` before smoothing; k_mean: ``[Hk, D]`` of :func:`smooth_qk`.
        scale: softmax scale of the unquantised q and k.
    """
    grouped = q.float().unflatten(2, (k_mean.shape[0], -1))
    shift = (grouped * k_mean[:, None]).sum(dim=-1).flatten(2, 3)
    return shift.transpose(1, 2) * scale
