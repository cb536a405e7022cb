"""Two exact attention functions for a sampling: the baseline, and the control beside it.

Both keep a record of every call, as the policy does for the variants that it runs.
"""

from __future__ import annotations

from torch import Tensor

from blockattn import BlockRoute, attend
from workbench.attention.log import CallRecord
from workbench.models import AttentionCall, dense_attention


class BlockByBlock:
    """Exact attention another way than the baseline: a route of every block, block by block.

    It shows how far two exact implementations drift apart over a sampling: the floor under every
    verdict.
    """

    def __init__(self) -> None:
        self.records: list[CallRecord] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
        shape, tokens = (q.shape[0], q.shape[2]), (q.shape[1], k.shape[1])
        every = BlockRoute.full(shape, seqlens=tokens, device=q.device)
        out, trace = attend(q, k, v, every, return_trace=True)
        what = ("dense", "control", "every block", "dense by blocks", trace.impl, trace.density)
        reasons = tuple(map(str, trace.reasons))
        record = CallRecord(call.layer, call.step, call.time, *what, reasons=reasons)
        self.records.append(record)
        return out


class Baseline:
    """torch's attention without any policy; notes that it ran."""

    def __init__(self) -> None:
        self.records: list[CallRecord] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
        what = ("dense", "baseline", "", "dense", "torch", 1.0)
        self.records.append(CallRecord(call.layer, call.step, call.time, *what))
        return dense_attention(q, k, v, call)
