"""Index lists of a route from its bit words (Triton), for one query block or for a pair of them.

Plan. One lane owns one bit of a word, so that a warp writes the entries of a word side by side: a
running sum over the words of a row says where a word's part of the list begins, the number of set
bits below its own where a lane's entry goes. No sort, no atomic, no host sync; the bytes written
are those of the entries that exist.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockattn.layout import num_blocks

ELEMENTS = 64  # words per step of a program
WIDEST = 64  # words of a row per step
WARPS = 4


@triton.jit
def _bits(word):
    """How many bits of each word are set; compilers know this form and take one instruction."""
    word = word.to(tl.uint32, bitcast=True)
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _lists(
    words_ptr, index_ptr, count_ptr, lines, rows, blocks, words,
    PAIRS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Lists ``[lines, blocks]``: a line is a row of the route, or a pair of rows of one head."""
    line = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    alive = line < lines
    first, second = line, line
    if PAIRS:
        pairs = tl.cdiv(rows, 2)
        first = line // pairs * rows + line % pairs * 2
        second = tl.where(line % pairs * 2 + 1 < rows, first + 1, -1)
    seen = tl.zeros([ROWS], tl.int32)
    for start in range(0, words, WIDTH):
        place = start + tl.arange(0, WIDTH)
        inside = alive[:, None] & (place < words)[None, :]
        own = tl.load(words_ptr + first[:, None] * words + place[None, :], mask=inside, other=0)
        used, other = own, own
        if PAIRS:
            source = words_ptr + second[:, None] * words + place[None, :]
            other = tl.load(source, mask=inside & (second >= 0)[:, None], other=0)
            used = own | other
        count = _bits(used)
        begin = seen[:, None] + tl.cumsum(count, axis=1) - count
        bit = tl.arange(0, 32)[None, None, :]
        here = used[:, :, None] >> bit
        entry = (place * 32)[None, :, None] + bit
        if PAIRS:
            entry = entry * 4 + ((own[:, :, None] >> bit) & 1)
            entry += ((other[:, :, None] >> bit) & 1) * 2
        target = index_ptr + (line * blocks)[:, None, None] + begin[:, :, None]
        target += _bits(used[:, :, None] & ((1 << bit) - 1))
        entry = tl.broadcast_to(entry, [ROWS, WIDTH, 32])
        tl.store(target, entry, mask=(here & 1) != 0)
        seen += tl.sum(count, axis=1)
    tl.store(count_ptr + line, seen, mask=alive)


def row_lists(words: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
    """Exact key blocks of every query block.

    Args:
        words: int32 ``[B, H, Nq, ceil(blocks / 32)]``, pad bits 0.
        blocks: key blocks.

    Returns:
        index int32 ``[B, H, Nq, blocks]``, ascending, entries past the count unwritten; count int32
        ``[B, H, Nq]``.
    """
    return _made(words, blocks, pairs=False)


def pair_lists(words: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
    """Union of the lists of query blocks 2 i and 2 i + 1, with who owns an entry.

    Returns:
        int32 ``[B, H, ceil(Nq / 2), blocks]`` and ``[B, H, ceil(Nq / 2)]``: an entry is 4 * key
        block + owners, bit 0 for the first query block and bit 1 for the second.
    """
    return _made(words, blocks, pairs=True)


def _made(words: Tensor, blocks: int, *, pairs: bool) -> tuple[Tensor, Tensor]:
    batch, heads, rows, width = words.shape
    lines = num_blocks(rows, 2) if pairs else rows
    index = torch.empty(batch, heads, lines, blocks, dtype=torch.int32, device=words.device)
    count = torch.empty(batch, heads, lines, dtype=torch.int32, device=words.device)
    if not index.numel():
        return index, count.zero_()
    step = min(WIDEST, 1 << (width - 1).bit_length())
    total, together = batch * heads * lines, max(1, ELEMENTS // step)
    kernel: Any = _lists
    kernel[(num_blocks(total, together),)](
        words.contiguous(), index, count, total, rows, blocks, width,
        PAIRS=pairs, ROWS=together, WIDTH=step, num_warps=WARPS,
    )  # fmt: skip
    return index, count
