"""Sol-Attn's preparation on the GPU: route and summaries without a host sync."""

from __future__ import annotations

from torch import Tensor

from blockattn.impl.triton.prepare import summarise
from blockattn.impl.triton.select import select
from blockattn.layout import BLOCK
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

    Index lists are made by the implementation that runs, as each walks lists of its own form.

    Args:
        q: ``[B, T, Hq, D]``; k, v: ``[B, T, Hk, D]``.
        tau: standard deviations; a number at every launch, so another one compiles nothing.
        unit: softmax scale * log2(e); floor: added to the variance, base-2 logits squared.
        sink: key blocks, half open; band: blocks beside the diagonal; both always exact.
        exact: threshold type ``exact`` instead of ``diag``.
    """
    q_mean, k_mean, v_sum, lengths, keys = summarise(q, k, v, BLOCK)
    chosen = select(
        q_mean,
        keys,
        tau=tau,
        unit=unit,
        floor=floor,
        sink=sink,
        band=band,
        exact=exact,
    )
    tokens = q.shape[1]
    route = BlockRoute(chosen.words, (BLOCK, BLOCK), (tokens, tokens))
    tail = BlockSummary(k_mean, v_sum, lengths)
    return Plan(route, tail)
