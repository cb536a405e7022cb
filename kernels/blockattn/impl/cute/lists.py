"""Lists of a route for two neighbouring query blocks that share their loads (Triton).

An order in which both find their own entries by counting: first the key blocks of both, then those
of one alone, in turn as long as both have some. So neither waits while the other works through a
run of its own.

One lane owns one bit of a word; a first pass over the words counts, a second writes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockattn.impl.triton.lists import ELEMENTS, WARPS, WIDEST, _bits
from blockattn.layout import num_blocks


@triton.jit
def _pair_words(
    words_ptr, first, second, place, inside, words,
    TOGETHER: tl.constexpr,
):  # fmt: skip
    """Bits of both query blocks, of the first alone, of the second alone."""
    own = tl.load(words_ptr + first[:, None] * words + place[None, :], mask=inside, other=0)
    other = tl.load(
        words_ptr + second[:, None] * words + place[None, :],
        mask=inside & (second >= 0)[:, None],
        other=0,
    )
    if TOGETHER:
        both = own & other
        return both, own ^ both, other ^ both
    return tl.zeros_like(own), own, other


@triton.jit
def _rank(bits, seen):
    """How many set bits come before each bit of a row, of which ``seen`` before these words."""
    count = _bits(bits)
    before = seen[:, None] + tl.cumsum(count, axis=1) - count
    bit = tl.arange(0, 32)[None, None, :]
    return before[:, :, None] + _bits(bits[:, :, None] & ((1 << bit) - 1))


@triton.jit
def _shared_lists(
    words_ptr, index_ptr, count_ptr, counter_ptr, lines, rows, words, width,
    TOGETHER: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Lists ``[lines, width]``, counts ``[lines, 3]`` of the pairs of rows, a counter of 0."""
    if tl.program_id(0) == 0:
        tl.store(counter_ptr, 0)
    line = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    alive = line < lines
    pairs = tl.cdiv(rows, 2)
    first = line // pairs * rows + line % pairs * 2
    second = tl.where(line % pairs * 2 + 1 < rows, first + 1, -1)
    total_both = tl.zeros([ROWS], tl.int32)
    total_first = tl.zeros([ROWS], tl.int32)
    total_second = tl.zeros([ROWS], tl.int32)
    for start in range(0, words, WIDTH):
        place = start + tl.arange(0, WIDTH)
        inside = alive[:, None] & (place < words)[None, :]
        both, one, two = _pair_words(words_ptr, first, second, place, inside, words, TOGETHER)
        total_both += tl.sum(_bits(both), axis=1)
        total_first += tl.sum(_bits(one), axis=1)
        total_second += tl.sum(_bits(two), axis=1)
    tl.store(count_ptr + line * 3, total_both, mask=alive)
    tl.store(count_ptr + line * 3 + 1, total_first, mask=alive)
    tl.store(count_ptr + line * 3 + 2, total_second, mask=alive)

    in_turn = tl.minimum(total_first, total_second)[:, None, None]
    alone = total_both[:, None, None]
    target = index_ptr + (line * width)[:, None, None]
    bit = tl.arange(0, 32)[None, None, :]
    seen_both = tl.zeros([ROWS], tl.int32)
    seen_first = tl.zeros([ROWS], tl.int32)
    seen_second = tl.zeros([ROWS], tl.int32)
    for start in range(0, words, WIDTH):
        place = start + tl.arange(0, WIDTH)
        inside = alive[:, None] & (place < words)[None, :]
        both, one, two = _pair_words(words_ptr, first, second, place, inside, words, TOGETHER)
        entry = tl.broadcast_to((place * 32)[None, :, None] + bit, [ROWS, WIDTH, 32])
        if TOGETHER:
            rank = _rank(both, seen_both)
            tl.store(target + rank, entry, mask=(both[:, :, None] >> bit) & 1 != 0)
            seen_both += tl.sum(_bits(both), axis=1)
        rank = _rank(one, seen_first)
        rank = alone + tl.where(rank < in_turn, 2 * rank, in_turn + rank)
        tl.store(target + rank, entry, mask=(one[:, :, None] >> bit) & 1 != 0)
        rank = _rank(two, seen_second)
        rank = alone + tl.where(rank < in_turn, 2 * rank + 1, in_turn + rank)
        tl.store(target + rank, entry, mask=(two[:, :, None] >> bit) & 1 != 0)
        seen_first += tl.sum(_bits(one), axis=1)
        seen_second += tl.sum(_bits(two), axis=1)


def shared_lists(
    words: Tensor, blocks: int, *, together: bool = True, counter: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Key blocks of query blocks 2 i and 2 i + 1 in the order that the kernel walks.

    Args:
        words: int32 ``[B, H, Nq, ceil(blocks / 32)]``, pad bits 0.
        blocks: key blocks.
        together: blocks of both query blocks are listed once and come first. Otherwise each has its
            own entry, so that each query block meets its key blocks in ascending order.
        counter: int32 ``[1]`` that is zero afterwards: the kernel which walks the lists counts in
            it, and is spared a launch that zeroes it.

    Returns:
        index int32 ``[B, H, ceil(Nq / 2), K]``, K = ``blocks`` (twice that unless ``together``),
        entries past the counts unwritten; count int32 ``[B, H, ceil(Nq / 2), 3]``: entries of both,
        of the first alone, of the second alone.
    """
    batch, heads, rows, width = words.shape
    lines = num_blocks(rows, 2)
    size = blocks if together else 2 * blocks
    index = torch.empty(batch, heads, lines, size, dtype=torch.int32, device=words.device)
    count = torch.empty(batch, heads, lines, 3, dtype=torch.int32, device=words.device)
    if counter is None:
        counter = torch.empty(1, dtype=torch.int32, device=words.device)
    if not index.numel():
        counter.zero_()
        return index, count.zero_()
    step = min(WIDEST, 1 << (width - 1).bit_length())
    total, rows_each = batch * heads * lines, max(1, ELEMENTS // step)
    kernel: Any = _shared_lists
    kernel[(num_blocks(total, rows_each),)](
        words.contiguous(), index, count, counter, total, rows, width, size,
        TOGETHER=together, ROWS=rows_each, WIDTH=step, num_warps=WARPS,
    )  # fmt: skip
    return index, count
