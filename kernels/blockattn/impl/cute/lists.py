"""Lists of a route for two neighbouring query blocks that share their loads (Triton).

An order in which both find their own entries by counting: first the key blocks of both, then those
of one alone, in turn as long as both have some. So neither waits while the other works through a
run of its own.

Plan. One lane owns one word of a pair, whose words are all in registers at once: sums over them say
how long the lists are and where a word's part begins. Then each lane takes its lowest set bit, as
often as the fullest word has bits: routes are sparse, a word holds few.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockattn.impl.triton.lists import _bits
from blockattn.impl.triton.overlap import awaited, follows
from blockattn.layout import num_blocks

ELEMENTS = 32  # words of a program where a row has no more: one each for the lanes of one warp
MOST_WARPS = 8


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
def _ranks(bits):
    """How many set bits of its row come before each word, and how many there are in all."""
    count = _bits(bits)
    return tl.cumsum(count, axis=1) - count, tl.sum(count, axis=1)


@triton.jit
def _lowest(bits):
    """Place of the lowest set bit of each word; 32 where none is set."""
    return _bits(~bits & (bits - 1))


@triton.jit
def _shared_lists(
    words_ptr, index_ptr, count_ptr, counter_ptr, lines, rows, words, width,
    TOGETHER: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Lists ``[lines, width]``, counts ``[lines, 3]`` of the pairs of rows, a counter of 0."""
    awaited(EARLY)
    if tl.program_id(0) == 0:
        tl.store(counter_ptr, 0)
    line = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    pairs = tl.cdiv(rows, 2)
    pair = line % pairs
    first = (line // pairs).to(tl.int64) * rows + pair * 2
    second = tl.where(pair * 2 + 1 < rows, first + 1, -1)
    place = tl.arange(0, WIDTH)
    alive = line < lines
    inside = alive[:, None] & (place < words)[None, :]
    both, one, two = _pair_words(words_ptr, first, second, place, inside, words, TOGETHER)
    rank_both, total_both = _ranks(both)
    rank_one, total_one = _ranks(one)
    rank_two, total_two = _ranks(two)
    count = count_ptr + line.to(tl.int64) * 3
    tl.store(count, total_both, mask=alive)
    tl.store(count + 1, total_one, mask=alive)
    tl.store(count + 2, total_two, mask=alive)

    in_turn = tl.minimum(total_one, total_two)[:, None]
    target = index_ptr + (line.to(tl.int64) * width)[:, None]
    alone = target + total_both[:, None]
    fullest = tl.maximum(_bits(both), tl.maximum(_bits(one), _bits(two)))
    for _ in range(tl.max(tl.max(fullest, axis=1), axis=0)):
        if TOGETHER:
            tl.store(target + rank_both, place[None, :] * 32 + _lowest(both), mask=both != 0)
            both, rank_both = both & (both - 1), rank_both + 1
        spot = tl.where(rank_one < in_turn, 2 * rank_one, in_turn + rank_one)
        tl.store(alone + spot, place[None, :] * 32 + _lowest(one), mask=one != 0)
        one, rank_one = one & (one - 1), rank_one + 1
        spot = tl.where(rank_two < in_turn, 2 * rank_two + 1, in_turn + rank_two)
        tl.store(alone + spot, place[None, :] * 32 + _lowest(two), mask=two != 0)
        two, rank_two = two & (two - 1), rank_two + 1


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
    step = 1 << (width - 1).bit_length()
    total, rows_each = batch * heads * lines, max(1, ELEMENTS // step)
    warps = min(MOST_WARPS, max(1, step // 128))  # one needs no barrier; more have the registers
    kernel: Any = _shared_lists
    kernel[(num_blocks(total, rows_each),)](
        words.contiguous(), index, count, counter, total, rows, width, size,
        TOGETHER=together, ROWS=rows_each, WIDTH=step, num_warps=warps,
        **follows(words.device),
    )  # fmt: skip
    return index, count
