"""The vote of a tile's rows whether to drop it (CuTe DSL); skip_vsa_quant specification 2.

Where the verdict is wanted at once (``ahead``), a barrier of the group brings it. Where it is read
later (``voting``), each warp leaves a note of what its rows object to and arrives; by the time the
notes are read, most are there. An entry then holds one voting tile of 128 keys, on which both
groups decide together, or two of 64, on which each group decides for itself. Whether a row objects
to the second of two depends on the fate of the first, so that a note answers for both.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from blockattn.impl.cute import softmax
from blockattn.impl.cute.shapes import BLOCK, GROUP, WARP, Shapes

# Bits of a note, which is a byte of each warp, in the four notes of a group at once.
FIRST, SECOND_IF_DROPPED, SECOND_IF_KEPT = (bit * 0x01010101 for bit in (1, 2, 4))
NOTES = GROUP // WARP
VOTE_BARRIER = 8  # and one more for the second group


@cute.jit
def decide(shapes: Shapes, work: Any, at: Any, own: Any, tile: Int32) -> Int32:
    """Whether a tile of 64 keys is kept.

    A tile that is kept raises the running maximum, another one is marked in the map.

    Args:
        own: largest score of both rows of a thread; a row with NaN objects, as its gain is below no
            threshold.
        tile: of the map.
    """
    rows, objects = softmax.coordinates(work.thr_qk, shapes.columns), Boolean(False)
    for r in cutlass.range_constexpr(2):
        alive = at.row + rows[r, 0][0] < work.call.queries
        objects = objects | (alive & _seen(own[r]) & _gains(work, own[r], work.peak[r]))
    kept = softmax.any_of_group(objects, VOTE_BARRIER + work.g)
    if kept != 0:
        softmax.rise(work.peak, own)
    else:
        _mark(shapes, work, at, tile)
    return kept


@cute.jit
def cast(shapes: Shapes, work: Any, at: Any, scores: Any, own: Any) -> Any:
    """Leaves a note on the voting tiles of an entry whose scores are there.

    Args:
        own: is set to the largest score of both rows in each voting tile.

    Returns:
        The running maxima, raised by tiles to which a row itself objects: those are kept.
    """
    parts, sure = shapes.voting_tiles, softmax.per_row()
    for part in cutlass.range_constexpr(parts):
        largest = softmax.largest_or_nan(part_of(scores, part, parts))
        for r in cutlass.range_constexpr(2):
            own[r, part] = largest[r]
    rows = softmax.coordinates(work.thr_qk, shapes.columns)
    first, if_dropped, if_kept = Boolean(False), Boolean(False), Boolean(False)
    for r in cutlass.range_constexpr(2):
        alive, peak = at.row + rows[r, 0][0] < work.call.queries, work.peak[r]
        objects, top = _gains(work, own[r, 0], peak), softmax.higher(peak, own[r, 0])
        first = first | (alive & _seen(own[r, 0]) & objects)
        sure[r] = top if objects else peak
        if const_expr(parts == 2):
            objects = _gains(work, own[r, 1], peak)
            if_dropped = if_dropped | (alive & _seen(own[r, 1]) & objects)
            objects = _gains(work, own[r, 1], top)
            if_kept = if_kept | (alive & _seen(own[r, 1]) & objects)
            top = softmax.higher(sure[r], own[r, 1])
            sure[r] = top if objects else sure[r]
    note = Int32(1) if cute.arch.vote_any_sync(first) else Int32(0)
    if const_expr(parts == 2):
        note += Int32(2) if cute.arch.vote_any_sync(if_dropped) else Int32(0)
        note += Int32(4) if cute.arch.vote_any_sync(if_kept) else Int32(0)
    notes, votes = work.call.notes, work.votes
    votes[0] = votes[0] + 1
    if work.lane == 0:
        notes[((votes[0] & 1) * 2 + work.g) * NOTES + work.thread // WARP] = cutlass.Int8(note)
        cute.arch.mbarrier_arrive(_ballot_box(shapes, work))
    return sure


@cute.jit
def verdict(shapes: Shapes, work: Any, at: Any, own: Any, tile: Int32) -> Any:
    """Which voting tiles are kept of the entry that was voted on last; ``tile`` is its key tile.

    Notes lie in two places in turn: a warp that goes on leaves its next one, and none after that
    before all have read these. Running maximum and map as in :func:`decide`.
    """
    votes, words = work.votes[0], cute.recast_tensor(work.call.notes, Int32)
    cute.arch.mbarrier_wait(_ballot_box(shapes, work), (votes - 1) & 1)
    place = (votes & 1) * 2
    notes = words[place + work.g]
    if const_expr(shapes.variant.skip != BLOCK):
        notes = words[place] | words[place + 1]
    kept = [Int32(1) if notes & FIRST != 0 else Int32(0)]
    if const_expr(shapes.voting_tiles == 2):
        question = Int32(SECOND_IF_KEPT) if kept[0] != 0 else Int32(SECOND_IF_DROPPED)
        kept.append(Int32(1) if notes & question != 0 else Int32(0))
    for part in cutlass.range_constexpr(len(kept)):
        for r in cutlass.range_constexpr(2):
            top = softmax.higher(work.peak[r], own[r, part])
            work.peak[r] = top if kept[part] != 0 else work.peak[r]
        if kept[part] == 0:
            _mark(shapes, work, at, tile * len(kept) + part)
    return tuple(kept)


def part_of(x: Any, part: int, parts: int) -> Any:
    """The registers of a voting tile of scores or of probabilities, as those of fewer columns."""
    size = cute.size(x) // parts
    layout = cute.make_layout(((2, 2, size // 4), 1, 1))
    return cute.make_tensor(x.iterator + part * size, layout)


def _ballot_box(shapes: Shapes, work: Any) -> Any:
    """The barrier of those who decide together."""
    return work.call.bars.vote + (work.g if shapes.variant.skip == BLOCK else 0)


def _gains(work: Any, own: Float32, peak: Float32) -> Any:
    """Whether a largest score is too much above the running maximum to drop its tile."""
    return ~(own < peak + work.limit)


def _seen(own: Float32) -> Any:
    """Whether a row sees a key of the tile."""
    return own != -Float32.inf


@cute.jit
def _mark(shapes: Shapes, work: Any, at: Any, tile: Int32):
    """Notes a dropped tile, unless it lies outside the map or in the future of every row."""
    dropped, skip = work.call.dropped, shapes.variant.skip
    inside = at.row < work.call.queries and tile < dropped.shape[3]
    if const_expr(shapes.variant.causal):
        inside = inside and tile * skip < at.row + skip
    if work.thread == 0 and inside:
        dropped[at.batch, at.head, at.row // skip, tile] = cutlass.Int8(1)
