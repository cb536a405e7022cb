"""Fast PyTorch: computes only the block pairs that a route and a skip threshold leave.

Dense calls go to torch's own scaled_dot_product_attention, unchanged; everything else is executed
block by block (:mod:`blockattn.impl.routed`). CPU and CUDA, float16 to float64; statistics and
softmax state are float32 or wider. Tiles below a skip threshold are found first, over the whole
call (:mod:`blockattn.impl.gaps`), and then left out like blocks outside a route.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from blockattn.impl import products
from blockattn.impl.gaps import tile_gaps
from blockattn.impl.masks import any_of_tiles, unit_block, valid_blocks
from blockattn.impl.routed import run_blocks
from blockattn.problem import Problem, Result
from blockattn.route import BlockRoute

SUMMARY = "fast PyTorch for CPU and CUDA, computes only the blocks that are exact"
LSE_ROWS = 256  # query rows whose scores are held at once when a dense call is traced


def obstacles(problem: Problem | None) -> list[str]:
    """Why it cannot serve a call; nothing stops it from running on a machine."""
    found = []
    if problem is not None and problem.q.device.type == "meta":
        found.append("q, k and v are on the meta device, which holds no data; give real tensors")
    if problem is None or problem.skip_threshold is None:
        return found
    if problem.skip_reference != "exact":
        found.append(
            f"skip_reference={problem.skip_reference!r} needs tiles one after another; "
            "it serves 'exact'"
        )
    if problem.skip_threshold > 1:
        found.append(
            f"skip_threshold={problem.skip_threshold:g} is above 1, where a dropped tile may hold "
            "a new maximum and later votes depend on it; it serves at most 1"
        )
    return found


def run(problem: Problem) -> Result:
    """Executes a call without obstacles."""
    if problem.q.numel() == 0 or problem.k.numel() == 0:
        return _no_keys(problem)
    if problem.plain:
        return Result(_dense(problem), _dense_lse(problem) if problem.want_trace else None)
    pairs = valid_blocks(problem)
    skipped = None if problem.skip_threshold is None else _skipped(problem, pairs)
    if skipped is not None:
        pairs = pairs & ~skipped.refine(unit_block(problem)).dense()
    out, lse = run_blocks(problem, pairs)
    return Result(out, lse, skipped)


def _no_keys(problem: Problem) -> Result:
    """Empty sequences: rows, if any, see no key."""
    rows = (*problem.heads_shape, problem.q.shape[1])
    lse = torch.full(rows, -torch.inf, device=problem.q.device)
    skipped = None
    if problem.skip_threshold is not None:
        full = problem.reachable(problem.skip_tile)
        skipped = full - full
    return Result(torch.zeros_like(problem.q, memory_format=torch.contiguous_format), lse, skipped)


def _skipped(problem: Problem, pairs: Tensor) -> BlockRoute:
    """Tiles that the threshold drops; ``pairs`` are the valid pairs in :func:`unit_block`."""
    factors = [tile // own for tile, own in zip(problem.skip_tile, unit_block(problem))]
    valid = any_of_tiles(pairs, *factors)
    if problem.skip_threshold:
        drop = valid & (tile_gaps(problem) < problem.skip_limit)
    else:
        drop = torch.zeros_like(valid)  # zero never drops, so nothing needs to be looked at
    return BlockRoute.from_dense(drop, block=problem.skip_tile, seqlens=problem.seqlens)


def _dense(problem: Problem) -> Tensor:
    """torch's attention; a scale on the device is folded into q."""
    q, k, v = (x.transpose(1, 2) for x in (problem.q, problem.k, problem.v))
    scale = problem.scale
    if isinstance(scale, Tensor):
        q, scale = (q * scale).to(q.dtype), 1.0
    grouped = problem.group > 1
    out = scaled_dot_product_attention(
        q, k, v, is_causal=problem.causal, scale=scale, enable_gqa=grouped
    )
    if isinstance(problem.scale_output, Tensor) or problem.scale_output != 1.0:
        wide = torch.promote_types(out.dtype, torch.float32)
        out = (out.to(wide) * problem.scale_output).to(out.dtype)
    return out.transpose(1, 2).contiguous()


def _dense_lse(problem: Problem) -> Tensor:
    """Natural-log LSE, float32 ``[B, H, Tq]``, a few rows at a time."""
    wide = torch.promote_types(problem.q.dtype, torch.float32)
    q, k = (x.transpose(1, 2).to(wide) for x in (problem.q, problem.k))
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    key = torch.arange(k.shape[2], device=q.device)
    for batch in range(q.shape[0]):
        for head in range(q.shape[1]):
            keys = k[batch, head // problem.group].contiguous()
            for start in range(0, q.shape[2], LSE_ROWS):
                rows = slice(start, min(start + LSE_ROWS, q.shape[2]))
                scores = products.scores(q[batch, head, rows].contiguous(), keys) * problem.scale
                if problem.causal:
                    query = torch.arange(rows.start, rows.stop, device=q.device)
                    scores.masked_fill_(key[None, :] > query[:, None], -torch.inf)
                lse[batch, head, rows] = scores.logsumexp(dim=-1)
    return lse
