"""Attention over two sets of keys from attention over each, by their LSE (Triton)."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockattn.layout import num_blocks

ROWS = 64
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _merge(
    first_ptr, first_lse_ptr, second_ptr, second_lse_ptr, out_ptr, lse_ptr, tokens, heads,
    ROWS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Rows of one head; a part without keys has LSE -inf and so weight 0."""
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    alive = row < tokens
    line = (batch * heads + head) * tokens + row
    first_lse = tl.load(first_lse_ptr + line, mask=alive, other=-float("inf"))
    second_lse = tl.load(second_lse_ptr + line, mask=alive, other=-float("inf"))
    top = tl.maximum(first_lse, second_lse)
    base = tl.where(top == -float("inf"), 0.0, top)
    first = tl.exp2((first_lse - base) * LOG2_E)
    second = tl.exp2((second_lse - base) * LOG2_E)
    total = first + second
    share = 1.0 / tl.where(total == 0.0, 1.0, total)
    channel = tl.arange(0, WIDTH)
    place = ((batch * tokens + row) * heads + head)[:, None] * D + channel[None, :]
    inside = alive[:, None] & (channel < D)[None, :]
    acc = tl.load(first_ptr + place, mask=inside, other=0.0).to(tl.float32)
    acc *= (first * share)[:, None]
    other = tl.load(second_ptr + place, mask=inside, other=0.0).to(tl.float32)
    acc += other * (second * share)[:, None]
    tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=inside)
    lse = tl.where(total == 0.0, -float("inf"), base + tl.log2(total) * LN_2)
    tl.store(lse_ptr + line, lse, mask=alive)


def merge(
    first: Tensor, first_lse: Tensor, second: Tensor, second_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Output and LSE over both sets of keys; rows without keys stay 0 and ``-inf``.

    Args:
        first, second: contiguous ``[B, T, H, D]`` of one dtype, normalised.
        first_lse, second_lse: contiguous float32 ``[B, H, T]``, natural log, ``-inf`` for rows
            without keys, whose output is 0.
    """
    batch, tokens, heads, dim = first.shape
    out, lse = torch.empty_like(first), torch.empty_like(first_lse)
    if not out.numel():
        return out, lse
    kernel: Any = _merge
    kernel[(num_blocks(tokens, ROWS), heads, batch)](
        first, first_lse, second, second_lse, out, lse, tokens, heads,
        ROWS=ROWS, D=dim, WIDTH=1 << (dim - 1).bit_length(), num_warps=4,
    )  # fmt: skip
    return out, lse
