"""Several processes, each with a part of the tokens: heads are exchanged, not keys.

Ulysses (Jacobs et al. 2023, arXiv:2309.14509): before attention every process trades its tokens of
all heads for all tokens of its heads, and trades back afterwards. Heads are independent, so every
mechanism here works unchanged. Ring attention is refused: it never has all keys in one place, and
routing statistics and thresholds need them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, distributed

from blockattn import UnsupportedError
from workbench.models.dit import AttentionCall, AttentionFn


class Ulysses:
    """An attention function for a process that holds a part of the tokens of every head.

    Args:
        attention: gets all tokens of this process's heads.
        group: the processes that share a video; `None` is all of them.

    Counters and records of `attention` are those of this process's heads.
    """

    def __init__(self, attention: AttentionFn, group: Any = None) -> None:
        self.attention = attention
        self.group = distributed.group.WORLD if group is None else group

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
        """Attention output [B, T/P, H, D] from q, k, v of that shape, P = number of processes.

        Raises:
            UnsupportedError: the heads cannot be shared out evenly.
        """
        q, k, v = (to_heads(x, self.group) for x in (q, k, v))
        if call.gate is not None:
            call = replace(call, gate=to_heads(call.gate, self.group))
        return to_tokens(self.attention(q, k, v, call), self.group)


def to_heads(x: Tensor, group: Any) -> Tensor:
    """[B, T/P, H, D], this process's tokens -> [B, T, H/P, D], this process's heads.

    Raises:
        UnsupportedError: H is no multiple of P.
    """
    ranks = distributed.get_world_size(group)
    if x.shape[2] % ranks:
        raise UnsupportedError(
            f"{x.shape[2]} heads cannot be shared out to {ranks} processes; choose a number of "
            "processes that divides them"
        )
    parts = x.unflatten(2, (ranks, -1)).movedim(2, 0)
    return _exchange(parts, group).transpose(0, 1).flatten(1, 2)


def to_tokens(x: Tensor, group: Any) -> Tensor:
    """[B, T, H/P, D], this process's heads -> [B, T/P, H, D], this process's tokens."""
    ranks = distributed.get_world_size(group)
    parts = x.unflatten(1, (ranks, -1)).transpose(0, 1)
    return _exchange(parts, group).movedim(0, 2).flatten(2, 3)


def _exchange(parts: Tensor, group: Any) -> Tensor:
    """Sends part p to process p; the result holds what every process sent here, in their order."""
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    distributed.all_to_all_single(received, parts, group=group)
    return received
