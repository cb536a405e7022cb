"""Sol-Attn's preparation on the GPU: route, summaries and index lists without a host sync."""

from __future__ import annotations

from torch import Tensor

from blockattn.impl.triton.prepare import moments, summarise
from blockattn.impl.triton.select import select
from blockattn.layout import BLOCK, block_lengths
from blockattn.problem import BlockSummary, Plan
from blockattn.route import BlockRoute


def plan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    tau: float,
    unit: float,
    floor: float,
    sink: tuple[int, int],
    band: int,
    exact: bool,
) -> Plan:
    """What :func:`blockattn.sol_attention` hands to ``attend``, from one pass over q, k, v.

    Args:
        q: ``[B, T, Hq, D]``; k, v: ``[B, T, Hk, D]``.
        tau: standard deviations; an ordinary kernel argument.
        unit: softmax scale * log2(e); floor: added to the variance, base-2 logits squared.
        sink: key blocks, half open; band: blocks beside the diagonal; both always exact.
        exact: threshold type ``exact`` instead of ``diag``.
    """
    q_mean, k_mean, v_sum = summarise(q, k, v, BLOCK)
    chosen = select(
        q_mean,
        k_mean,
        *moments(k_mean),
        tau=tau,
        unit=unit,
        floor=floor,
        sink=sink,
        band=band,
        exact=exact,
    )
    tokens = q.shape[1]
    route = BlockRoute(chosen.words, (BLOCK, BLOCK), (tokens, tokens))
    tail = BlockSummary(k_mean, v_sum, block_lengths(tokens, BLOCK, q.device))
    return Plan(route, tail, (chosen.index, chosen.count))
