"""The definition of the operation, in plain PyTorch at float32 or float64, written to be read.

One query tile at a time, over its key tiles in ascending order; the softmax state of a row is its
running maximum m, denominator l and unnormalised output. Scores stay in raw units (q . k); the
scale enters inside the exponential only, as in the kernels. Sources: sol_attn specification
section 6, skip_vsa_quant specification sections 1.1 and 2.1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from blockattn.layout import num_blocks
from blockattn.problem import LOG2_E, Problem, Result
from blockattn.quant_formats import E4M3_MAX
from blockattn.route import BlockRoute

SUMMARY = "float32/float64 PyTorch, the definition of the result"
LAG = 8.0  # base-2 units by which a lagging reference may trail the running maximum


def obstacles(problem: Problem | None) -> list[str]:
    """The reference serves every call that passed the checks, on every machine."""
    if problem is not None and problem.q.device.type == "meta":
        return ["q, k and v are on the meta device, which holds no data; give real tensors"]
    return []


@dataclass
class _State:
    """Online softmax of the rows of one query tile; every field is ``[B, H, rows, ...]``."""

    maximum: Tensor
    reference: Tensor
    denominator: Tensor
    output: Tensor

    @classmethod
    def empty(cls, q: Tensor) -> _State:
        row = torch.full_like(q[..., :1], -torch.inf)
        return cls(row, row, torch.zeros_like(row), torch.zeros_like(q))

    def add(
        self,
        scores: Tensor,
        values: Tensor,
        weights: Tensor,
        unit: float | Tensor,
        keep: Tensor,
        round_p: bool = False,
    ) -> None:
        """Folds in columns with raw ``scores``; heads whose ``keep`` is False stay as they are."""
        top = torch.maximum(self.maximum, scores.amax(dim=-1, keepdim=True))
        safe = torch.where(top == -torch.inf, torch.zeros_like(top), top)
        shrink = torch.exp2((self.maximum - safe) * unit)
        p = torch.exp2((scores - safe) * unit)
        denominator = self.denominator * shrink + (p * weights).sum(dim=-1, keepdim=True)
        trails = (top - self.reference) * unit <= LAG
        reference = torch.where(trails, self.reference, top)
        if round_p:
            p = _rounded_p(p, torch.where(top == -torch.inf, 0.0, (top - reference) * unit))
        output = self.output * shrink + p @ values
        self.maximum = torch.where(keep, top, self.maximum)
        self.reference = torch.where(keep, reference, self.reference)
        self.denominator = torch.where(keep, denominator, self.denominator)
        self.output = torch.where(keep, output, self.output)


def run(problem: Problem) -> Result:
    """Executes the call; memory grows with one query tile times the keys, never Tq times Tk."""
    wide = torch.promote_types(problem.q.dtype, torch.float32)
    q, k, v = (x.transpose(1, 2).to(wide) for x in (problem.q, problem.k, problem.v))
    k, v = (x.repeat_interleave(problem.group, dim=1) for x in (k, v))
    rows = _tile(problem)[0]
    out, lse, skipped = torch.zeros_like(q), q.new_full(q.shape[:3], -torch.inf), []
    for start in range(0, q.shape[2], rows):
        tile = slice(start, min(start + rows, q.shape[2]))
        out[:, :, tile], lse[:, :, tile], tiles = _query_tile(problem, q[:, :, tile], k, v, tile)
        skipped.append(tiles)
    out = (out * problem.scale_output).to(problem.q.dtype).transpose(1, 2).contiguous()
    return Result(out, lse.float(), _skip_map(problem, skipped))


def _query_tile(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, rows: slice
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, LSE and skipped key tiles (bool ``[B, H, tiles]``) of one query tile."""
    unit = problem.scale * LOG2_E
    state = _State.empty(q)
    everywhere = torch.ones(*q.shape[:2], 1, 1, dtype=torch.bool, device=q.device)
    if problem.tail is not None:
        _add_tail(problem, state, q, rows, unit, everywhere)
    columns = _tile(problem)[1]
    skipped = torch.zeros(
        *q.shape[:2], num_blocks(k.shape[2], columns), dtype=torch.bool, device=q.device
    )
    for index, start in enumerate(range(0, k.shape[2], columns)):
        keys = slice(start, min(start + columns, k.shape[2]))
        valid = _valid_pairs(problem, rows, keys)
        if not valid.any():
            continue
        scores = (q @ k[:, :, keys].transpose(2, 3)).masked_fill(~valid, -torch.inf)
        drop = _vote(problem, state, scores, unit) & valid.any(dim=(2, 3)).expand(q.shape[:2])
        skipped[:, :, index] = drop
        # Columns that no row attends may hold anything, also NaN: take them out, 0 * NaN is NaN.
        values = v[:, :, keys].masked_fill(~valid.any(dim=2)[..., None], 0.0)
        ones = torch.ones_like(scores[:1, :1, :1])
        state.add(scores, values, ones, unit, ~drop[..., None, None], problem.round_p)
    return *_finish(state, problem.scale), skipped


def _rounded_p(p: Tensor, lag: Tensor) -> Tensor:
    """e4m3 probabilities, relative to a maximum that trails by ``lag`` (base 2), as in kernels."""
    grow = torch.exp2(lag)
    return (p * grow).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).to(p.dtype) / grow


def _tile(problem: Problem) -> tuple[int, int]:
    """Tiles that vote where there is a threshold; otherwise any tile gives the same result."""
    if problem.skip_threshold is None and problem.route is not None:
        return problem.block
    return problem.skip_tile


def _finish(state: _State, scale: float | Tensor) -> tuple[Tensor, Tensor]:
    """Normalised output and natural-log LSE; rows without keys give 0 and -inf."""
    empty = state.denominator == 0
    lse = state.maximum * scale + state.denominator.log()
    lse = torch.where(empty, torch.full_like(lse, -torch.inf), lse)
    out = torch.where(empty, torch.zeros_like(state.output), state.output / state.denominator)
    return out, lse.squeeze(-1)


def _vote(problem: Problem, state: _State, scores: Tensor, unit: float | Tensor) -> Tensor:
    """bool ``[B, H]``: every row of the tile lies below the threshold, so the tile is dropped."""
    if problem.skip_threshold is None:
        return torch.zeros(scores.shape[:2], dtype=torch.bool, device=scores.device)
    exact = problem.skip_reference == "exact"
    before = state.maximum if exact else state.reference
    top = scores.amax(dim=-1, keepdim=True)
    # A row whose keys here are all masked has nothing to lose, whatever its reference is.
    gap = torch.where(top == -torch.inf, top, (top - before) * unit)
    return (gap < problem.skip_limit).all(dim=(2, 3))


def _add_tail(problem: Problem, state: _State, q: Tensor, rows: slice, unit, keep: Tensor) -> None:
    """Every block outside the route enters through its summary, weighted by its length."""
    tail, route = problem.tail, problem.route
    if tail is None or route is None:
        return
    k_mean, v_sum = (x.transpose(1, 2).to(q.dtype) for x in (tail.k_mean, tail.v_sum))
    k_mean, v_sum = (x.repeat_interleave(problem.group, dim=1) for x in (k_mean, v_sum))
    exact = route.dense()[:, :, _blocks_of(rows, route.block[0], q.device)]
    absent = exact | (tail.lengths == 0)
    scores = (q @ k_mean.transpose(2, 3)).masked_fill(absent, -torch.inf)
    v_sum = v_sum.masked_fill(absent.all(dim=2)[..., None], 0.0)
    state.add(scores, v_sum, tail.lengths.to(q.dtype), unit, keep)


def _valid_pairs(problem: Problem, rows: slice, keys: slice) -> Tensor:
    """bool ``[B or 1, H or 1, rows, keys]``: pairs of the tile that are attended key by key."""
    device = problem.q.device
    row = torch.arange(rows.start, rows.stop, device=device)
    key = torch.arange(keys.start, keys.stop, device=device)
    valid = torch.ones(1, 1, len(row), len(key), dtype=torch.bool, device=device)
    if problem.causal:
        valid = valid & (key[None, :] <= row[:, None])
    if problem.block_lengths is not None:
        block = problem.block[1]
        valid = valid & (key % block < problem.block_lengths[key // block])
    if problem.route is not None:
        pairs = problem.route.dense()[:, :, _blocks_of(rows, problem.block[0], device)]
        valid = valid & pairs[..., _blocks_of(keys, problem.block[1], device)]
    return valid


def _blocks_of(tokens: slice, block: int, device: torch.device) -> Tensor:
    """Block index of each token of a range."""
    return torch.arange(tokens.start, tokens.stop, device=device) // block


def _skip_map(problem: Problem, skipped: list[Tensor]) -> BlockRoute | None:
    if problem.skip_threshold is None:
        return None
    mask = torch.stack(skipped, dim=2) if skipped else _no_tiles(problem)
    return BlockRoute.from_dense(mask, block=problem.skip_tile, seqlens=problem.seqlens)


def _no_tiles(problem: Problem) -> Tensor:
    tiles = num_blocks(problem.k.shape[1], problem.skip_tile[1])
    return torch.zeros(*problem.heads_shape, 0, tiles, dtype=torch.bool, device=problem.q.device)
