"""Lists of a route for two neighbouring query blocks that share their loads (Triton).

An order in which both find their own entries by counting: first the key blocks of both, then those
of one alone, in turn as long as both have some, so that neither waits while the other works through
a run of its own. The kernel may take two blocks as one entry: then a last block of both without a
partner is listed for each alone, and an entry of one block is filled up with that block once more,
marked as -1 - block.

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
def _write_alone(target, rank, entry, mask, total, fewer, TURN: tl.constexpr, STEP: tl.constexpr):
    """Blocks of one query block by rank; the last one again where its entry has room."""
    step = rank // STEP
    place = tl.where(step < fewer, 2 * step + TURN, fewer + step) * STEP + rank % STEP
    tl.store(target + place, entry, mask=mask)
    if STEP == 2:
        fill = mask & (rank == total - 1) & (rank % 2 == 0)
        tl.store(target + place + 1, -1 - entry, mask=fill)


@triton.jit
def _shared_lists(
    words_ptr, index_ptr, count_ptr, lines, rows, words, width,
    TOGETHER: tl.constexpr, STEP: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Lists ``[lines, width]`` and counts ``[lines, 3]`` of the pairs of rows."""
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
    odd = total_both % STEP  # a block of both without a partner
    total_both -= odd
    total_first += odd
    total_second += odd
    tl.store(count_ptr + line * 3, total_both, mask=alive)
    tl.store(count_ptr + line * 3 + 1, total_first, mask=alive)
    tl.store(count_ptr + line * 3 + 2, total_second, mask=alive)

    fewer = tl.minimum((total_first + STEP - 1) // STEP, (total_second + STEP - 1) // STEP)
    fewer = fewer[:, None, None]
    target = index_ptr + (line * width)[:, None, None]
    alone = target + total_both[:, None, None]
    of_both, of_first = total_both[:, None, None], total_first[:, None, None]
    of_second = total_second[:, None, None]
    bit = tl.arange(0, 32)[None, None, :]
    seen_both = tl.zeros([ROWS], tl.int32)
    seen_first, seen_second = odd, odd  # the one without a partner comes before all others
    for start in range(0, words, WIDTH):
        place = start + tl.arange(0, WIDTH)
        inside = alive[:, None] & (place < words)[None, :]
        both, one, two = _pair_words(words_ptr, first, second, place, inside, words, TOGETHER)
        entry = tl.broadcast_to((place * 32)[None, :, None] + bit, [ROWS, WIDTH, 32])
        if TOGETHER:
            here = (both[:, :, None] >> bit) & 1 != 0
            rank = _rank(both, seen_both)
            tl.store(target + rank, entry, mask=here & (rank < of_both))
            if STEP == 2:
                left, none = here & (rank == of_both), tl.zeros_like(rank)
                _write_alone(alone, none, entry, left, of_first, fewer, 0, STEP)
                _write_alone(alone, none, entry, left, of_second, fewer, 1, STEP)
            seen_both += tl.sum(_bits(both), axis=1)
        here = (one[:, :, None] >> bit) & 1 != 0
        _write_alone(alone, _rank(one, seen_first), entry, here, of_first, fewer, 0, STEP)
        here = (two[:, :, None] >> bit) & 1 != 0
        _write_alone(alone, _rank(two, seen_second), entry, here, of_second, fewer, 1, STEP)
        seen_first += tl.sum(_bits(one), axis=1)
        seen_second += tl.sum(_bits(two), axis=1)


def shared_lists(
    words: Tensor, blocks: int, *, together: bool = True, step: int = 1
) -> tuple[Tensor, Tensor]:
    """Key blocks of query blocks 2 i and 2 i + 1 in the order that the kernel walks.

    Args:
        words: int32 ``[B, H, Nq, ceil(blocks / 32)]``, pad bits 0.
        blocks: key blocks.
        together: blocks of both query blocks are listed once and come first. Otherwise each has its
            own entry, so that each query block meets its key blocks in ascending order.
        step: key blocks of an entry, 1 or 2.

    Returns:
        index int32 ``[B, H, ceil(Nq / 2), K]``, K enough for any route, places past the counts
        unwritten; count int32 ``[B, H, ceil(Nq / 2), 3]``: blocks of both, of the first alone, of
        the second alone.
    """
    batch, heads, rows, width = words.shape
    lines = num_blocks(rows, 2)
    size = (blocks if together else 2 * blocks) + (4 if step == 2 else 0)
    index = torch.empty(batch, heads, lines, size, dtype=torch.int32, device=words.device)
    count = torch.empty(batch, heads, lines, 3, dtype=torch.int32, device=words.device)
    if not index.numel():
        return index, count.zero_()
    at_once = min(WIDEST, 1 << (width - 1).bit_length())
    total, rows_each = batch * heads * lines, max(1, ELEMENTS // at_once)
    kernel: Any = _shared_lists
    kernel[(num_blocks(total, rows_each),)](
        words.contiguous(), index, count, total, rows, width, size,
        TOGETHER=together, STEP=step, ROWS=rows_each, WIDTH=at_once, num_warps=WARPS,
    )  # fmt: skip
    return index, count
