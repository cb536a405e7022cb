"""Bit words of a route from a map of bytes that a kernel wrote (Triton).

Plan. One lane reads the bytes of one word, puts each at its bit and adds them up. The map of a long
call is some megabytes: this pass reads it once, where packing by tensor operations would write and
read it several times over.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockattn.layout import num_blocks

WORDS = 64  # of a program
WARPS = 4


@triton.jit
def _words(map_ptr, words_ptr, total, blocks, words, WORDS: tl.constexpr):
    """Words ``[lines, words]`` of a map ``[lines, blocks]``; total = lines * words."""
    place = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    line, word = place // words, (place % words).to(tl.int32)
    block = (word * 32)[:, None] + tl.arange(0, 32)[None, :]
    inside = (place < total)[:, None] & (block < blocks)
    found = tl.load(map_ptr + (line * blocks)[:, None] + block, mask=inside, other=0)
    bits = (found == 1).to(tl.int32) << tl.arange(0, 32)[None, :]
    tl.store(words_ptr + place, tl.sum(bits, axis=1), mask=place < total)


def map_words(found: Tensor) -> Tensor:
    """Packs a map; the words are those of a :class:`blockattn.BlockRoute`.

    Args:
        found: int8 ``[B, H, Nq, Nk]``, contiguous, 1 = the pair is in the route.

    Returns:
        int32 ``[B, H, Nq, ceil(Nk / 32)]``, pad bits 0.
    """
    blocks = found.shape[3]
    words = num_blocks(blocks, 32)
    out = torch.empty(*found.shape[:3], words, dtype=torch.int32, device=found.device)
    if out.numel():
        kernel: Any = _words
        kernel[(num_blocks(out.numel(), WORDS),)](
            found, out, out.numel(), blocks, words, WORDS=WORDS, num_warps=WARPS
        )
    return out
