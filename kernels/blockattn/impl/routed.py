"""Attention over lists of key blocks: gather them, one product, softmax, one product.

A query block's keys are gathered into one matrix, summaries first, so that the softmax of a row is
done in one piece: no running state, no mask where blocks are whole. A summary of n keys is one
column with log2(n) added to its score and the mean value of its block: the same terms as n equal
keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from blockattn.impl import products
from blockattn.impl.masks import unit_block, valid_keys
from blockattn.impl.workers import share
from blockattn.layout import num_blocks
from blockattn.problem import LOG2_E, Problem

LN_2 = math.log(2.0)
LOWEST = -3.0e38  # stands in for the maximum of a row without keys: -inf - LOWEST is still -inf
GROUP = 1 << 26  # gathered key elements of query blocks that a GPU does together


@dataclass(frozen=True)
class _Store:
    """Blocked copies in the working dtype; a slot is one block of keys, summaries or padding.

    Slots of a key head: ``tail_slots`` of summaries, the key blocks, one of zeros.

    Attributes:
        q: ``[B * H * Nq, Lq, D]`` in base-2 logits per unit of key.
        k, v: ``[B * Hk * slots, Lk * D]``; v holds the mean value where k holds the mean key.
        bias: ``[B * Hk * slots, Lk]`` added to scores, ``-inf`` where there is no key.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor
    tail_slots: int


def run_blocks(problem: Problem, pairs: Tensor) -> tuple[Tensor, Tensor | None]:
    """Output and LSE of attending the block pairs exactly and the tail outside the route.

    Args:
        problem: the call; its skip threshold has been decided already.
        pairs: bool ``[B, H, Nq, Nk]`` in :func:`unit_block`: what is attended key by key.

    Returns:
        ``[B, Tq, H, D]`` in q's dtype; float32 ``[B, H, Tq]`` natural log, None when not traced.
    """
    store = _store(problem)
    columns, counts = _columns(problem, store, pairs)
    out = torch.empty_like(store.q)
    out[counts == 0] = 0.0
    lse = out.new_full(out.shape[:2], -torch.inf) if problem.want_trace else None
    task = _Task(problem, store, columns, counts)
    if out.device.type == "cpu":
        share(task.busy, lambda rows: task.attend(rows, out, lse))
    else:
        task.attend(task.groups(), out, lse)
    queries = problem.q.shape[1]
    shaped = out.unflatten(0, (*problem.heads_shape, -1)).flatten(2, 3)[:, :, :queries]
    if isinstance(problem.scale_output, Tensor) or problem.scale_output != 1.0:
        shaped = shaped * problem.scale_output
    result = shaped.transpose(1, 2).to(problem.q.dtype).contiguous()
    if lse is None:
        return result, None
    return result, lse.unflatten(0, (*problem.heads_shape, -1)).flatten(2, 3)[..., :queries].float()


def _store(problem: Problem) -> _Store:
    wide = torch.promote_types(problem.q.dtype, torch.float32)
    (rows, columns), tail = unit_block(problem), problem.tail
    blocks = num_blocks(problem.k.shape[1], columns)
    tail_slots = 0 if tail is None else num_blocks(blocks, columns)
    q = _blocked(problem.q, rows, 0, num_blocks(problem.q.shape[1], rows), wide)
    q *= problem.scale * LOG2_E
    first, slots = tail_slots * columns, tail_slots + blocks + 1
    keys, values = (_blocked(x, columns, first, slots, wide) for x in (problem.k, problem.v))
    if problem.block_lengths is not None:
        padding = ~valid_keys(problem)[:, None]
        for stored in (keys, values):  # padding may hold anything, also NaN
            stored[:, first : first + len(padding)].masked_fill_(padding, 0.0)
    if tail is not None:
        weight = tail.lengths.clamp(min=1)[:, None, None]
        for stored, summary in ((keys, tail.k_mean), (values, tail.v_sum.to(wide) / weight)):
            stored[:, :blocks] = summary.transpose(1, 2).flatten(0, 1)
    bias = _bias(problem, first, slots * columns, columns, wide)
    q = q.reshape(-1, rows, q.shape[-1])
    keys, values = (x.reshape(-1, columns * x.shape[-1]) for x in (keys, values))
    return _Store(q, keys, values, bias, tail_slots)


def _blocked(x: Tensor, block: int, first: int, blocks: int, dtype: torch.dtype) -> Tensor:
    """``[B, T, H, D]`` -> ``[B * H, blocks * block, D]``: the tokens from ``first``, else zeros."""
    batch, tokens, heads, dim = x.shape
    out = torch.empty(batch, heads, blocks * block, dim, dtype=dtype, device=x.device)
    out[:, :, :first] = 0.0
    out[:, :, first : first + tokens] = x.transpose(1, 2)
    out[:, :, first + tokens :] = 0.0
    return out.flatten(0, 1)


def _bias(problem: Problem, first: int, total: int, block: int, dtype: torch.dtype) -> Tensor:
    """0 on valid keys, ``-inf`` elsewhere, of every slot; summaries are set row by row later."""
    keys = problem.k.shape[1]
    bias = torch.full((total,), -torch.inf, dtype=dtype, device=problem.q.device)
    bias[first : first + keys].masked_fill_(valid_keys(problem), 0.0)
    heads = problem.k.shape[0] * problem.k.shape[2]
    return bias.expand(heads, total).reshape(-1, block)


def _columns(problem: Problem, store: _Store, pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Slots of every query block in order (int64, flat) and how many each has ``[B * H * Nq]``."""
    taken = torch.nn.functional.pad(pairs, (store.tail_slots, 0), value=True)
    counts = taken.sum(dim=-1)
    batch, head, _, slot = taken.nonzero().unbind(dim=1)
    key_heads = problem.k.shape[2]
    key_head = batch * key_heads + head // problem.group
    slots = store.k.shape[0] // (problem.k.shape[0] * key_heads)
    return key_head * slots + slot, counts.flatten()


@dataclass(frozen=True)
class _TailUse:
    """Which summaries each query block uses.

    Attributes:
        absent: bool ``[B * H * Nq, Nk]``: exact blocks, and blocks without keys.
        log_length: ``[Nk]`` log2 of the number of keys that a summary stands for.
        finite: no summary holds NaN or infinity; one that a row does not use may hold anything.
    """

    absent: Tensor
    log_length: Tensor
    finite: bool


def _tail_use(problem: Problem, dtype: torch.dtype) -> _TailUse | None:
    tail, route = problem.tail, problem.route
    if tail is None or route is None:
        return None
    absent = (route.dense() | (tail.lengths == 0)).flatten(0, 2)
    finite = torch.isfinite(tail.k_mean).all() & torch.isfinite(tail.v_sum).all()
    return _TailUse(absent, tail.lengths.to(dtype).log2(), bool(finite))


class _Task:
    """Query blocks against their gathered slots: one at a time on a CPU, in groups on a GPU."""

    def __init__(self, problem: Problem, store: _Store, columns: Tensor, counts: Tensor) -> None:
        self.problem, self.store, self.columns = problem, store, columns
        self.counts = counts.tolist()
        self.ends = counts.cumsum(dim=0).tolist()
        self.busy = [row for row, count in enumerate(self.counts) if count]
        self.block = unit_block(problem)
        self.tail = _tail_use(problem, store.q.dtype)

    def groups(self) -> list[list[int]]:
        """Query blocks of about as many slots, as many as one group may gather."""
        left = sorted(self.busy, key=lambda row: self.counts[row])
        groups = []
        while left:
            size = max(1, GROUP // (self.counts[left[-1]] * self.store.k.shape[1]))
            groups.append(left[-size:])
            del left[-size:]
        return groups

    def attend(self, groups: Iterable[int | list[int]], out: Tensor, lse: Tensor | None) -> None:
        """Output (and LSE) of query blocks or groups of them."""
        space = self.store.k.new_empty(0)  # grows; the keys and the values of a group take turns
        for rows in groups:
            index = rows if isinstance(rows, int) else torch.tensor(rows, device=out.device)
            slots = self._slots(rows)
            if space.numel() < slots.numel() * self.store.k.shape[1]:
                space = space.new_empty(slots.numel() * self.store.k.shape[1])
            scores = self._scores(index, slots, space)
            top = scores.amax(dim=-1, keepdim=True).clamp_(min=LOWEST)
            p = scores.sub_(top).exp2_()
            total = p.sum(dim=-1, keepdim=True)
            if lse is not None:
                lse[index] = ((top + total.log2()) * LN_2).squeeze(-1)
            acc = products.weighted(p, self._gather(self.store.v, slots, index, space))
            # The largest term of a row is 1: only a row without keys has a sum below 1. Output 0.
            out[index] = acc.div_(total.clamp_(min=1.0))

    def _slots(self, rows: int | list[int]) -> Tensor:
        """int64 ``[n]`` of one query block, or ``[G, n]`` filled up with the slot of zeros."""
        if isinstance(rows, int):
            return self.columns[self.ends[rows] - self.counts[rows] : self.ends[rows]]
        lists = [self.columns[self.ends[row] - self.counts[row] : self.ends[row]] for row in rows]
        zeros = self.store.k.shape[0] - 1
        return torch.nn.utils.rnn.pad_sequence(lists, batch_first=True, padding_value=zeros)

    def _gather(self, source: Tensor, slots: Tensor, index: int | Tensor, space: Tensor) -> Tensor:
        """``[..., n * Lk, D]`` in ``space``: what was gathered before is overwritten."""
        flat = space[: slots.numel() * source.shape[1]].view(-1, source.shape[1])
        torch.index_select(source, 0, slots.flatten(), out=flat)
        gathered = flat.view(*slots.shape[:-1], -1, source.shape[1] // self.block[1])
        if self.tail is not None and not self.tail.finite:
            absent = self.tail.absent[index]
            gathered[..., : absent.shape[-1], :].masked_fill_(absent[..., None], 0.0)
        return gathered

    def _scores(self, index: int | Tensor, slots: Tensor, space: Tensor) -> Tensor:
        """Base-2 logits ``[..., Lq, n * Lk]`` with ``-inf`` where nothing is."""
        bias = self.store.bias.index_select(0, slots.flatten()).view(*slots.shape[:-1], -1)
        if self.tail is not None:
            absent = self.tail.absent[index]
            bias[..., : absent.shape[-1]] = self.tail.log_length.masked_fill(absent, -torch.inf)
        keys = self._gather(self.store.k, slots, index, space)
        scores = products.scores(self.store.q[index], keys, bias)
        if self.problem.causal:
            scores.masked_fill_(self._future(index, slots), -torch.inf)
        return scores

    def _future(self, index: int | Tensor, slots: Tensor) -> Tensor:
        """bool ``[..., Lq, n * Lk]``: keys after the query (causal calls have no summaries)."""
        rows, columns = self.block
        blocks = num_blocks(self.problem.k.shape[1], columns)
        device = slots.device
        within = torch.arange(columns, device=device)
        key = ((slots % (blocks + 1))[..., None] * columns + within).flatten(-2)
        start = index % num_blocks(self.problem.q.shape[1], rows) * rows
        offset = torch.arange(rows, device=device)
        query = start + offset if isinstance(start, int) else start[:, None] + offset
        return key[..., None, :] > query[..., :, None]
