"""Error of a real VSA or quantised call against dense attention on the same inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from blockattn import (
    TokenGrid,
    attend,
    quantised_attention,
    video_sparse_attention,
)
from workbench.probe import Probe, make_probe


def probe_vsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sparsity: float,
    *,
    grid: TokenGrid | Sequence[int],
    gate_compress: Tensor | None = None,
    dense: Tensor | None = None,
    impl: str = "auto",
) -> Probe:
    """Runs VSA at one sparsity and compares it with dense.

    Args:
        q, k, v: `[B, T * H * W, H, D]` in the grid's order.
        sparsity: share of the cubes to drop, in [0, 1].
        grid: as for :func:`blockattn.video_sparse_attention`.
        gate_compress: gate of the coarse branch like q; None is a zero gate, which is training-free
            top-k.
        dense: dense output to compare with; computed with the implementation that ran when None.
        impl: implementation of the sparse call.
    """
    gate = torch.zeros_like(q) if gate_compress is None else gate_compress
    out, trace = video_sparse_attention(
        q,
        k,
        v,
        grid=grid,
        gate_compress=gate,
        sparsity=sparsity,
        impl=impl,
        return_trace=True,
    )
    return make_probe(out, trace, dense, lambda name: attend(q, k, v, impl=name))


def probe_quantised(
    q: Tensor, k: Tensor, v: Tensor, *, dense: Tensor | None = None, **call: Any
) -> Probe:
    """Runs quantised attention and compares it with dense attention over the unquantised operands.

    Args:
        q, k, v: `[B, T, H, D]`.
        dense: dense output to compare with; computed with the implementation that ran when None.
        call: as for :func:`blockattn.quantised_attention` (qk_dtype, v_scale, smooth, route, ...).
    """
    out, trace = quantised_attention(q, k, v, **call, return_trace=True)
    return make_probe(out, trace, dense, lambda name: attend(q, k, v, impl=name))
