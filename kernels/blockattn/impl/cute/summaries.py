"""Tiles of block summaries: which of their columns count, and for how many keys (CuTe DSL).

A summary counts for the keys of its block, and only where the route leaves the block out. Almost
every block has 64 keys, so that the sums of a whole tile count 64 times and nobody looks at its
lengths; a tile with a shorter block is weighed column by column.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from blockattn.impl.cute import softmax
from blockattn.impl.cute.shapes import BLOCK, WARP, Shapes

SIDE_BY_SIDE = 8  # lengths that a thread reads at once
TILES = WARP * WARP // BLOCK  # whose bits a warp holds, a word a lane


@cute.jit
def whole_tiles(shapes: Shapes, call: Any, lane: Int32) -> Int32:
    """Tiles in front of the first one with a block of other than 64 keys; for a warp."""
    blocks = cute.size(call.tail_lengths)
    short = blocks  # the first block that is not whole
    for place in cutlass.range(lane, blocks, WARP, unroll=SIDE_BY_SIDE):
        if call.tail_lengths[place] != BLOCK:
            short = cutlass.min(short, place)
    for i in cutlass.range_constexpr(5):
        short = cutlass.min(short, cute.arch.shuffle_sync_bfly(short, offset=1 << i))
    return cute.arch.make_warp_uniform(short // shapes.columns)


@cute.jit
def begin(work: Any, at: Any):
    """Starts to read the bits of an item's first tiles."""
    work.bits[1] = _bits(work, at, Int32(0))


@cute.jit
def _turn(work: Any, at: Any, tile: Int32):
    """What has been read is used from now on; starts to read from ``tile`` on."""
    work.bits[0] = work.bits[1]
    work.bits[1] = _bits(work, at, tile)


@cute.jit
def _bits(work: Any, at: Any, tile: Int32) -> Int32:
    """A lane's word of the route of the query block, from a tile on; past its end all are exact."""
    words = work.call.words
    line, place = cutlass.min(at.row // BLOCK, words.shape[2] - 1), tile * 2 + work.lane
    found = Int32(-1)
    if place < words.shape[3]:
        found = words[at.batch, at.head, line, place]
    return found


@cute.jit
def hide(shapes: Shapes, work: Any, at: Any, n: Int32, scores: Any):
    """Scores of exact and of empty blocks become -inf.

    Returns:
        Whether the thread's row of values is padding; how often the sums of the tile count, 0 where
        each column is to be weighed.
    """
    if n % TILES == 0:
        _turn(work, at, n + TILES)
    low, high = (cute.arch.shuffle_sync(work.bits[0], n % TILES * 2 + i) for i in range(2))
    void, weight = Int32(0), Float32(BLOCK)
    if n >= work.whole:
        weight = Float32(0.0)
        low, high = low | _empty(work, n * 2), high | _empty(work, n * 2 + 1)
        if const_expr(shapes.variant.lengths):
            place, lengths = n * shapes.columns + work.thread // 2, work.call.tail_lengths
            void = Int32(1) if place < cute.size(lengths) and lengths[place] == 0 else Int32(0)
    s = softmax.rows_of(scores)
    own = softmax.coordinates(work.thr_qk, shapes.columns)[0, 0][1]  # its first column
    words = low >> own, high >> own
    for j in cutlass.range_constexpr(cute.size(s, mode=[1])):
        offset = j // 2 * 8 + j % 2
        hidden = words[offset // WARP] & 1 << offset % WARP
        for r in cutlass.range_constexpr(2):
            s[r, j] = -Float32.inf if hidden != 0 else s[r, j]
    return void, weight


@cute.jit
def _empty(work: Any, word: Int32) -> Int32:
    """Bits of the blocks of a word that have no key."""
    lengths, place = work.call.tail_lengths, word * WARP + work.lane
    blocks = cute.size(lengths)
    return cute.arch.vote_ballot_sync(
        place >= blocks or lengths[cutlass.min(place, blocks - 1)] == 0
    )


@cute.jit
def weigh(shapes: Shapes, work: Any, n: Int32, scores: Any):
    """The sums of tile ``n``, whose columns have weights of their own, enter l."""
    s, lengths, share = softmax.rows_of(scores), work.call.tail_lengths, softmax.per_row()
    own = n * shapes.columns + softmax.coordinates(work.thr_qk, shapes.columns)[0, 0][1]
    last = cute.size(lengths) - 1
    share.fill(0.0)
    for j in cutlass.range_constexpr(cute.size(s, mode=[1])):
        length = Float32(lengths[cutlass.min(own + j // 2 * 8 + j % 2, last)])
        for r in cutlass.range_constexpr(2):
            shift = softmax.finite(work.m[r]) * work.unit
            p = cute.math.exp2(s[r, j] * work.unit - shift, fastmath=True)
            share[r] = share[r] + p * length
    for r in cutlass.range_constexpr(2):
        work.l[r] = work.l[r] + share[r]
