"""Block summaries and statistics in one pass over q, k, v (Triton).

Plan. ``_mean_keys`` and ``_summarise``: one program per (head; block; batch) loads 64 rows, sums
them in float32 and writes a query mean (float32), a key mean or a value sum (rounded once to the
inputs' dtype): 3 T H D elements read, 1/64 of that written, so bound by bandwidth. Heads come first
in the grid, because the rows of neighbouring heads lie side by side in memory, and programs are
small (16 kB, 8 loads of 16 bytes a thread), so that many of them are in flight.
Key means come in a launch of their own, so that the first programs of the next one can center them
while the others still read queries and values: ``_center_slice`` is bound by latency and costs no
time there. It walks the key means of a head three times: mean, centred second moment (so that a
large mean key costs no precision), centred keys. Squares are taken of numbers scaled by a power of
two near the channel's largest, so that none overflows. The centred keys, scaled by a power of two
near 1 / deviation, leave as two float16 halves for the product that routes.
Rows past the sequence are never read, every offset is 64 bits wide, any strides are served.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockattn.impl.triton.overlap import arrived, awaited, early, follows
from blockattn.layout import num_blocks

SUMMARY_WARPS = 2
CHANNELS = 16  # channels of a program that centers keys
CENTER_ROWS = 128  # and key blocks of each of its steps


@triton.jit
def _load_block(
    x, batch, head, block, stride_b, stride_t, stride_h, stride_d, tokens,
    L: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """A block of x ``[B, T, H, D]`` as float32 ``[L, D]``, zeros past the sequence."""
    rows = block * L + tl.arange(0, L)
    base = x + batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h
    channel = tl.arange(0, D).to(tl.int64) * stride_d
    source = base + rows.to(tl.int64)[:, None] * stride_t + channel[None, :]
    # Two ways to one value: whatever is loaded is in registers before the first sum, so that all
    # loads are in flight at once (masked ones are otherwise issued a few at a time).
    if block * L + L <= tokens:
        values = tl.load(source)
    else:
        values = tl.load(source, mask=(rows < tokens)[:, None], other=0.0)
    return values.to(tl.float32)


@triton.jit
def _mean(rows, count):
    """Sum over the rows by their count, rounded correctly: equal rows have exactly that mean."""
    total = tl.sum(rows, axis=0)
    return tl.div_rn(total, tl.zeros_like(total) + count)


@triton.jit
def inverse_power(size):
    """A power of two near 1 / size for size >= 0: products with it are about 1, or 0."""
    exponent = size.to(tl.int32, bitcast=True) & 0x7F800000
    return tl.maximum((254 << 23) - exponent, 1 << 23).to(tl.float32, bitcast=True)


@triton.jit
def halves(x):
    """float32 numbers of moderate size as two float16 numbers whose sum has 22 leading bits."""
    upper = x.to(tl.float16)
    return upper, (x - upper.to(tl.float32)).to(tl.float16)


@triton.jit
def _key_rows(base, start, blocks, stride, ROWS: tl.constexpr):
    """Key means ``[ROWS, channels]`` in float32 from block ``start`` on, and which exist."""
    rows = start + tl.arange(0, ROWS)
    inside = (rows < blocks)[:, None]
    source = base + rows.to(tl.int64)[:, None] * stride
    if start + ROWS <= blocks:  # two ways to one value, as in _load_block
        values = tl.load(source)
    else:
        values = tl.load(source, mask=inside, other=0.0)
    return values.to(tl.float32), rows, inside


@triton.jit
def _center_slice(
    k_mean, upper_ptr, lower_ptr, center_ptr, deviation_ptr, part, head, batch, blocks, key_heads,
    D: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Mean, deviation and centred key means of CHANNELS channels of a head."""
    channel = part * CHANNELS + tl.arange(0, CHANNELS)
    base = k_mean + (batch.to(tl.int64) * blocks * key_heads + head) * D + channel[None, :]
    stride = key_heads * D
    sums = tl.zeros([ROWS, CHANNELS], tl.float32)
    sizes = tl.zeros([ROWS, CHANNELS], tl.float32)
    for start in range(0, blocks, ROWS):
        values, rows, inside = _key_rows(base, start, blocks, stride, ROWS)
        sums += values
        sizes = tl.maximum(sizes, tl.abs(values))
    mean = _mean(sums, blocks)
    unit = inverse_power(tl.max(sizes, axis=0))
    squares = tl.zeros([ROWS, CHANNELS], tl.float32)
    for start in range(0, blocks, ROWS):
        values, rows, inside = _key_rows(base, start, blocks, stride, ROWS)
        centred = tl.where(inside, values - mean[None, :], 0.0) * unit[None, :]
        squares += centred * centred
    deviation = tl.sqrt(tl.sum(squares, axis=0) / blocks) / unit
    group = batch.to(tl.int64) * key_heads + head
    tl.store(center_ptr + group * D + channel, mean)
    tl.store(deviation_ptr + group * D + channel, deviation)
    power = inverse_power(deviation)
    for start in range(0, blocks, ROWS):
        values, rows, inside = _key_rows(base, start, blocks, stride, ROWS)
        centred = tl.where(inside, values - mean[None, :], 0.0) * power[None, :]
        upper, lower = halves(centred)
        target = (group * blocks + rows)[:, None] * D + channel[None, :]
        tl.store(upper_ptr + target, upper, mask=inside)
        tl.store(lower_ptr + target, lower, mask=inside)


@triton.jit
def _mean_keys(
    k, k_mean, stride_b, stride_t, stride_h, stride_d, tokens, blocks, key_heads,
    L: tl.constexpr, D: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    arrived(EARLY)
    head, block, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows = _load_block(k, batch, head, block, stride_b, stride_t, stride_h, stride_d, tokens, L, D)
    line = (batch.to(tl.int64) * blocks + block) * key_heads + head
    mean = _mean(rows, tl.minimum(tokens - block * L, L))
    tl.store(k_mean + line * D + tl.arange(0, D), mean.to(k_mean.dtype.element_ty))


@triton.jit
def _summarise(
    q, v, q_mean, v_sum, length_ptr, k_mean, upper_ptr, lower_ptr, center_ptr, deviation_ptr,
    q_stride_b, q_stride_t, q_stride_h, q_stride_d,
    v_stride_b, v_stride_t, v_stride_h, v_stride_d,
    tokens, blocks, heads, key_heads, centring,
    L: tl.constexpr, D: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    arrived(EARLY)
    part, place, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    block = place - centring
    channel = tl.arange(0, D)
    length = tl.minimum(tokens - block * L, L)
    if block < 0:
        task = place * (heads + key_heads) + part
        if task < key_heads * (D // CHANNELS):
            awaited(EARLY)
            head = task // (D // CHANNELS)
            _center_slice(
                k_mean, upper_ptr, lower_ptr, center_ptr, deviation_ptr,
                task % (D // CHANNELS), head, batch, blocks, key_heads, D, CHANNELS, ROWS,
            )  # fmt: skip
    elif part < heads:
        rows = _load_block(
            q, batch, part, block, q_stride_b, q_stride_t, q_stride_h, q_stride_d, tokens, L, D
        )
        line = (batch.to(tl.int64) * heads + part) * blocks + block
        tl.store(q_mean + line * D + channel, _mean(rows, length))
        if (part == 0) & (batch == 0):
            tl.store(length_ptr + block, length)
    else:
        head = part - heads
        rows = _load_block(
            v, batch, head, block, v_stride_b, v_stride_t, v_stride_h, v_stride_d, tokens, L, D
        )
        line = (batch.to(tl.int64) * blocks + block) * key_heads + head
        total = tl.sum(rows, axis=0)
        tl.store(v_sum + line * D + channel, total.to(v_sum.dtype.element_ty))


@dataclass(frozen=True)
class CenteredKeys:
    """Key means minus their mean over all blocks, as routing multiplies them.

    Attributes:
        upper, lower: float16 ``[B, Hk, N, D]``, whose sum is the centred key mean times the power
            of two near 1 / deviation of its channel.
        center, deviation: float32 ``[B, Hk, D]``: mean and standard deviation (of the population).
    """

    upper: Tensor
    lower: Tensor
    center: Tensor
    deviation: Tensor

    @classmethod
    def empty(cls, k_mean: Tensor) -> CenteredKeys:
        """Room for the key means ``[B, N, Hk, D]`` that :func:`summarise` gives."""
        batch, blocks, key_heads, dim = k_mean.shape
        device = k_mean.device
        keys = torch.empty(2, batch, key_heads, blocks, dim, dtype=torch.float16, device=device)
        rows = torch.empty(2, batch, key_heads, dim, dtype=torch.float32, device=device)
        return cls(*keys, *rows)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.upper, self.lower, self.center, self.deviation


def summarise(
    q: Tensor, k: Tensor, v: Tensor, block: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, CenteredKeys]:
    """Query means float32 ``[B, Hq, N, D]``, key means and value sums ``[B, N, Hk, D]``, the
    length of every block, int32 ``[N]``, and the centred key means.

    Args:
        q: ``[B, T, Hq, D]``; k, v: ``[B, T, Hk, D]``; any strides.
        block: tokens of a block, a power of two.
    """
    batch, tokens, heads, dim = q.shape
    key_heads, blocks = k.shape[2], num_blocks(tokens, block)
    k_mean = _mean_of_keys(k, block)
    keys = CenteredKeys.empty(k_mean)
    q_mean = torch.empty(batch, heads, blocks, dim, dtype=torch.float32, device=q.device)
    v_sum = torch.empty_like(k_mean)
    lengths = torch.empty(blocks, dtype=torch.int32, device=q.device)
    channels = min(CHANNELS, dim)
    parts = heads + key_heads
    centring = num_blocks(key_heads * (dim // channels), parts)  # rows of programs in front
    kernel: Any = _summarise
    kernel[(parts, centring + blocks, batch)](
        q, v, q_mean, v_sum, lengths, k_mean, *keys.tensors(), *q.stride(), *v.stride(),
        tokens, blocks, heads, key_heads, centring,
        L=block, D=dim, CHANNELS=channels, ROWS=CENTER_ROWS, num_warps=SUMMARY_WARPS,
        **follows(q.device),
    )  # fmt: skip
    return q_mean, k_mean, v_sum, lengths, keys


def _mean_of_keys(k: Tensor, block: int) -> Tensor:
    batch, tokens, key_heads, dim = k.shape
    blocks = num_blocks(tokens, block)
    k_mean = torch.empty(batch, blocks, key_heads, dim, dtype=k.dtype, device=k.device)
    kernel: Any = _mean_keys
    kernel[(key_heads, blocks, batch)](
        k, k_mean, *k.stride(), tokens, blocks, key_heads,
        L=block, D=dim, EARLY=early(k.device), num_warps=SUMMARY_WARPS,
    )  # fmt: skip
    return k_mean
