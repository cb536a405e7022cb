"""Block summaries and statistics in one pass over q, k, v (Triton).

Plan. ``_summarise``: one program per (block, head, batch) loads its 64 rows of q, k and v once,
sums them in float32 and writes the query mean (float32), the key mean and the value sum (rounded
once to the inputs' dtype): 3 T H D elements read, 1/64 of that written, so bound by bandwidth.
``_moments``: one program per (head, batch, slice of channels) walks the key means twice, mean first
and then the centred second moment, so that a large mean key costs no precision.
Rows past the sequence are never read and every offset is 64 bits wide.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockattn.layout import num_blocks

CHANNELS = 32  # channels per program of the moments kernel


@triton.jit
def _load_block(
    x, batch, head, block, stride_b, stride_t, stride_h, tokens, alive,
    L: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """A block of x ``[B, T, H, D]`` as ``[L, D]``, zeros past the sequence (and if not alive)."""
    rows = block * L + tl.arange(0, L)
    base = x + batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h
    offsets = rows.to(tl.int64)[:, None] * stride_t + tl.arange(0, D)[None, :]
    return tl.load(base + offsets, mask=((rows < tokens) & alive)[:, None], other=0.0)


@triton.jit
def _summarise(
    q, k, v, q_mean, k_mean, v_sum,
    q_stride_b, q_stride_t, q_stride_h,
    k_stride_b, k_stride_t, k_stride_h,
    v_stride_b, v_stride_t, v_stride_h,
    tokens, blocks, heads, key_heads,
    L: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    block, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    has_keys = head < key_heads
    # All loads are issued before the first sum, so that three blocks are in flight at once.
    query = _load_block(
        q, batch, head, block, q_stride_b, q_stride_t, q_stride_h, tokens, True, L, D
    )
    key = _load_block(
        k, batch, head, block, k_stride_b, k_stride_t, k_stride_h, tokens, has_keys, L, D
    )
    value = _load_block(
        v, batch, head, block, v_stride_b, v_stride_t, v_stride_h, tokens, has_keys, L, D
    )
    channel = tl.arange(0, D)
    length = tl.minimum(tokens - block * L, L).to(tl.float32)
    row = (batch.to(tl.int64) * heads + head) * blocks + block
    tl.store(q_mean + row * D + channel, tl.sum(query.to(tl.float32), axis=0) / length)
    row = (batch.to(tl.int64) * blocks + block) * key_heads + head
    mean = tl.sum(key.to(tl.float32), axis=0) / length
    tl.store(k_mean + row * D + channel, mean.to(k_mean.dtype.element_ty), mask=has_keys)
    total = tl.sum(value.to(tl.float32), axis=0)
    tl.store(v_sum + row * D + channel, total.to(v_sum.dtype.element_ty), mask=has_keys)


@triton.jit
def _moments(
    k_mean, center, variance, blocks, key_heads,
    D: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    head, batch = tl.program_id(1), tl.program_id(2)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    base = k_mean + (batch.to(tl.int64) * blocks * key_heads + head) * D + channel[None, :]
    total = tl.zeros([CHANNELS], tl.float32)
    for start in range(0, blocks, ROWS):
        rows = start + tl.arange(0, ROWS)
        inside = (rows < blocks)[:, None]
        values = tl.load(base + rows.to(tl.int64)[:, None] * key_heads * D, mask=inside, other=0.0)
        total += tl.sum(values.to(tl.float32), axis=0)
    mean = total / blocks
    total = tl.zeros([CHANNELS], tl.float32)
    for start in range(0, blocks, ROWS):
        rows = start + tl.arange(0, ROWS)
        inside = (rows < blocks)[:, None]
        values = tl.load(base + rows.to(tl.int64)[:, None] * key_heads * D, mask=inside, other=0.0)
        centred = tl.where(inside, values.to(tl.float32) - mean[None, :], 0.0)
        total += tl.sum(centred * centred, axis=0)
    row = (batch.to(tl.int64) * key_heads + head) * D + channel
    tl.store(center + row, mean)
    tl.store(variance + row, total / blocks)


def summarise(q: Tensor, k: Tensor, v: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query means float32 ``[B, Hq, N, D]``, key means and value sums ``[B, N, Hk, D]``."""
    batch, tokens, heads, dim = q.shape
    key_heads, blocks = k.shape[2], num_blocks(tokens, block)
    q_mean = torch.empty(batch, heads, blocks, dim, dtype=torch.float32, device=q.device)
    k_mean = torch.empty(batch, blocks, key_heads, dim, dtype=k.dtype, device=k.device)
    v_sum = torch.empty_like(k_mean)
    kernel: Any = _summarise
    kernel[(blocks, heads, batch)](
        q, k, v, q_mean, k_mean, v_sum,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        tokens, blocks, heads, key_heads,
        L=block, D=dim, num_warps=4,
    )  # fmt: skip
    return q_mean, k_mean, v_sum


def moments(k_mean: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and population variance of the key means over all blocks, float32 ``[B, Hk, D]``."""
    batch, blocks, key_heads, dim = k_mean.shape
    center = torch.empty(batch, key_heads, dim, dtype=torch.float32, device=k_mean.device)
    variance = torch.empty_like(center)
    channels = min(CHANNELS, dim)
    kernel: Any = _moments
    kernel[(dim // channels, key_heads, batch)](
        k_mean, center, variance, blocks, key_heads,
        D=dim, CHANNELS=channels, ROWS=64, num_warps=4,
    )  # fmt: skip
    return center, variance
