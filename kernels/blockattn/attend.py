"""The one operation: check, choose an implementation, run, trace."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from blockattn.compiled import one_node
from blockattn.impl import registry
from blockattn.problem import BlockSummary, Problem, make_problem
from blockattn.route import BlockRoute
from blockattn.trace import make_trace


@one_node
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    route: BlockRoute | None = None,
    *,
    tail: BlockSummary | None = None,
    skip_threshold: float | None = None,
    skip_tile: tuple[int, int] = (128, 128),
    skip_reference: str = "exact",
    block_lengths: Tensor | None = None,
    scale: float | Tensor | None = None,
    scale_output: float | Tensor | None = None,
    causal: bool = False,
    impl: str = "auto",
    return_trace: bool = False,
) -> Any:
    """Attention over the keys that a route leaves exact, the rest by summary or not at all.

    Without a route it is dense; with ``route`` and ``tail`` it is Sol-Attn; with ``route`` alone a
    block mask; with ``skip_threshold`` it is SkipSoftmax. Any combination is legal.

    Args:
        q: ``[B, Tq, Hq, D]``, float32, bfloat16, float16 or float64; any strides.
        k, v: ``[B, Tk, Hk, D]``, Hk dividing Hq; query head h reads key head h // (Hq / Hk).
        route: exact block pairs per query head.
        tail: summaries through which blocks outside the route enter the same softmax; they enter
            before the first exact tile. Not with ``causal``.
        skip_threshold: lambda >= 0. A tile is dropped when, for every query row of it,
            exp(tile max - running max) < lambda (strictly). ``None``: no threshold; 0 never skips.
        skip_tile: (queries, keys) of the tiles that vote, whole blocks of the route.
        skip_reference: ``exact`` running maximum, or ``lagging`` as kernels keep it that rescale
            only when the maximum grows by more than 8 (log2 units).
        block_lengths: int32 ``[Nk]``, valid keys at the start of each key block (padded layouts).
        scale: softmax scale, default D ** -0.5; a float > 0 or one float32 element on q's device.
        scale_output: factor on the output, likewise.
        causal: query t sees keys 0..t.
        impl: ``auto`` takes the fastest implementation that serves the call; a name insists on it.
        return_trace: also return the :class:`AttentionTrace`.

    Returns:
        The output, or ``(output, AttentionTrace)`` with ``return_trace``. The output is
        ``[B, Tq, Hq, D]`` in q's dtype, also under autocast; rows without keys are 0 (and ``-inf``
        in the LSE). Inputs are never modified. Forward only.

    Raises:
        TypeError, ValueError: an argument is not allowed, before any work is done.
        UnsupportedError: the named ``impl`` cannot serve the call, with all reasons.
    """
    problem = make_problem(
        q,
        k,
        v,
        route=route,
        tail=tail,
        skip_threshold=skip_threshold,
        skip_tile=skip_tile,
        skip_reference=skip_reference,
        block_lengths=block_lengths,
        scale=scale,
        scale_output=scale_output,
        causal=causal,
        want_trace=return_trace,
    )
    return run(problem, impl)


def run(problem: Problem, impl: str) -> Any:
    """Executes a checked problem; with the trace when it asks for one."""
    chosen, reasons = registry.choose(problem, impl)
    result = chosen.run(problem)
    if not problem.want_trace:
        return result.out
    return result.out, make_trace(problem, result, chosen.name, reasons)
