"""The vote of a tile's rows whether to drop it (CuTe DSL); skip_vsa_quant specification 2.

Where a group decides alone, on tiles of 64 x 64, a barrier of the group brings the answer. Where
two decide together, on tiles of 128 x 128, each warp leaves a note whether its rows object and
arrives; the notes are read later (``together``), when most are there. Whether one of a row's
threads objects is all that counts, so that on the full range nobody waits for the largest score of
the whole row; the running maximum needs it, of kept tiles. After a NaN it goes on with the numbers:
a later tile, which the definition keeps for all of its rows, may be dropped by the others.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from blockattn.impl.cute import softmax
from blockattn.impl.cute.shapes import BLOCK, VOTE_BARRIER, WARP, WARPS, Shapes


@cute.jit
def decide(shapes: Shapes, work: Any, at: Any, own: Any, tile: Int32) -> Int32:
    """Whether a tile of 64 keys is kept.

    A tile that is kept raises the running maximum, another one is marked in the map.

    Args:
        own: largest score of both rows of a thread; a row with NaN objects, as its gain is below no
            threshold.
        tile: of the map.
    """
    kept = softmax.any_of_group(_objects(work, at, own), VOTE_BARRIER + work.g)
    if kept != 0:
        softmax.rise(work.peak, own)
    else:
        _mark(shapes, work, at, tile)
    return kept


@cute.jit
def decide_each(shapes: Shapes, work: Any, at: Any, own: Any, tile: Int32) -> Any:
    """Which of the two tiles of 64 keys of an entry are kept, one after the other.

    Args:
        own: as :func:`softmax.largest_shares` gives it.
        tile: of 128 keys.
    """
    parts = [[own[r, part] for r in range(2)] for part in range(2)]
    rows = [[softmax.across(x, softmax.higher_or_nan) for x in part] for part in parts]
    kept = []
    for part in cutlass.range_constexpr(2):
        found = softmax.any_of_group(_objects(work, at, parts[part]), VOTE_BARRIER + work.g)
        # Equal in all lanes, which ptxas does not know of a barrier's answer.
        answer = Int32(1) if cute.arch.vote_any_sync(found != 0) else Int32(0)
        _conclude(shapes, work, at, answer, rows[part], tile * 2 + part)
        kept.append(answer)
    return tuple(kept)


@cute.jit
def cast(shapes: Shapes, work: Any, at: Any, own: Any):
    """Leaves a note on a tile of 128 x 128, which is a byte of each warp.

    Args:
        own: of both rows the largest score that the thread has; becomes the largest of the row.
    """
    note = Int32(1) if cute.arch.vote_any_sync(_objects(work, at, own)) else Int32(0)
    notes, votes = work.call.notes, work.votes
    votes[0] = votes[0] + 1
    if work.lane == 0:
        place = ((votes[0] & 1) * shapes.groups + work.g) * WARPS + work.thread // WARP
        notes[place] = cutlass.Int8(note)
        cute.arch.mbarrier_arrive(work.call.bars.vote)
    for r in cutlass.range_constexpr(2):  # behind the note, for which others wait
        own[r] = softmax.across(own[r], softmax.higher_or_nan)


@cute.jit
def verdict(shapes: Shapes, work: Any, at: Any, own: Any, tile: Int32) -> Int32:
    """Whether the tile is kept that was voted on last; ``own`` as :func:`cast` left it.

    Notes lie in two places in turn: a warp that goes on leaves its next one, and none after that
    before all have read these.
    """
    votes, words = work.votes[0], cute.recast_tensor(work.call.notes, Int32)
    cute.arch.mbarrier_wait(work.call.bars.vote, (votes - 1) & 1)
    place = (votes & 1) * shapes.groups
    kept = Int32(1) if (words[place] | words[place + 1]) != 0 else Int32(0)
    _conclude(shapes, work, at, kept, own, tile)
    return kept


@cute.jit
def _conclude(shapes: Shapes, work: Any, at: Any, kept: Int32, rows: Any, tile: Int32):
    """Running maximum and map as in :func:`decide`, without a branch where a tile is kept."""
    for r in cutlass.range_constexpr(2):
        top = softmax.higher(work.peak[r], rows[r])
        work.peak[r] = top if kept != 0 else work.peak[r]
    if kept == 0:
        _mark(shapes, work, at, tile)


def _objects(work: Any, at: Any, own: Any) -> Boolean:
    """Whether a thread objects, whose largest scores in its two rows are ``own``."""
    rows, objects = softmax.coordinates(work.thr_qk, BLOCK), Boolean(False)  # columns do not matter
    for r in range(2):
        alive = at.row + rows[r, 0][0] < work.call.queries
        objects = objects | (alive & _seen(own[r]) & _gains(work, own[r], work.peak[r]))
    return objects


def _gains(work: Any, own: Float32, peak: Float32) -> Any:
    """Whether a largest score is too much above the running maximum to drop its tile."""
    return ~(own < peak + work.limit)


def _seen(own: Float32) -> Any:
    """Whether a row sees a key of the tile."""
    return own != -Float32.inf


@cute.jit
def _mark(shapes: Shapes, work: Any, at: Any, tile: Int32):
    """Notes a dropped tile, unless it lies outside the map or in the future of every row."""
    marks, skip = at.marks, shapes.variant.skip
    inside = at.row < work.call.queries and tile < cute.size(marks)
    if const_expr(shapes.variant.causal):
        inside = inside and tile * skip < at.row + skip
    if work.thread == 0 and inside:
        marks[tile] = cutlass.Int8(1)
