"""Which keys and which block pairs of a call are valid, for code that works block by block."""

from __future__ import annotations

import torch
from torch import Tensor

from blockattn.layout import num_blocks
from blockattn.problem import Problem
from blockattn.route import BlockRoute


def unit_block(problem: Problem) -> tuple[int, int]:
    """Blocks in which the call is executed: the route's, or the voting tiles without a route."""
    if problem.route is None and problem.skip_threshold is not None:
        return problem.skip_tile
    return problem.block


def valid_keys(problem: Problem) -> Tensor:
    """bool ``[Tk]``: keys that ``block_lengths`` leaves."""
    key = torch.arange(problem.k.shape[1], device=problem.q.device)
    if problem.block_lengths is None:
        return torch.ones_like(key, dtype=torch.bool)
    block = problem.block[1]
    return key % block < problem.block_lengths[key // block]


def valid_blocks(problem: Problem) -> Tensor:
    """bool ``[B, H, Nq, Nk]`` in :func:`unit_block`: pairs with at least one attended key."""
    rows, columns = unit_block(problem)
    queries, keys = problem.seqlens
    device = problem.q.device
    key = torch.arange(keys, device=device).masked_fill(~valid_keys(problem), keys)
    missing = -keys % columns
    first_key = torch.nn.functional.pad(key, (0, missing), value=keys)
    first_key = first_key.unflatten(0, (-1, columns)).amin(dim=1) if keys else key
    last_query = (torch.arange(num_blocks(queries, rows), device=device) + 1) * rows - 1
    pairs = (first_key < keys).expand(len(last_query), -1)
    if problem.causal:
        pairs = pairs & (first_key[None, :] <= last_query.clamp(max=queries - 1)[:, None])
    if problem.route is not None:
        return problem.route.dense() & pairs
    return pairs.expand(*problem.heads_shape, *pairs.shape)


def without_invalid(skipped: BlockRoute, problem: Problem) -> BlockRoute:
    """A map of dropped tiles less those without a valid key, which have nothing to be dropped.

    A kernel that masks padding finds -inf alone there, as it does far below the threshold. Tiles
    in the future of a causal call it never visits.
    """
    if problem.block_lengths is None:
        return skipped
    valid = BlockRoute.from_dense(
        valid_blocks(problem), block=skipped.block, seqlens=skipped.seqlens
    )
    return skipped & valid


def any_of_tiles(pairs: Tensor, rows: int, columns: int) -> Tensor:
    """bool ``[..., Nq, Nk]`` -> tiles of ``rows`` x ``columns`` blocks that hold a True."""
    if (rows, columns) == (1, 1):
        return pairs
    height, width = pairs.shape[-2:]
    pairs = torch.nn.functional.pad(pairs, (0, -width % columns, 0, -height % rows))
    tiles = (num_blocks(height, rows), rows, num_blocks(width, columns), columns)
    return pairs.reshape(*pairs.shape[:-2], *tiles).any(dim=-1).any(dim=-2)
