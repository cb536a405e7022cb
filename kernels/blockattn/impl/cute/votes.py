"""The vote of a tile's rows whether to drop it (CuTe DSL); skip_vsa_quant specification 2.

A warp with a row that objects has decided: it notes so and goes on. Only a warp without one waits
for the others, so that a call that drops little seldom waits. Votes in turn use two barriers, as a
warp that goes on may reach the next one while another still waits at this one. It gets no further
in ``walk``, where the turns of the groups hold it; in ``ahead`` nothing does, so that every warp
waits there.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from blockattn.impl.cute import softmax
from blockattn.impl.cute.shapes import BLOCK, GROUP, GROUPS, VOTE_BARRIER, Shapes


@cute.jit
def keep(
    shapes: Shapes, work: Any, at: Any, own: Any, tile: Int32, number: Int32, part: int = 0
) -> Int32:
    """Whether a row of the voting tile gains too much, in base-2 units, to drop it.

    A tile that is kept raises the running maximum, another one is marked in the map.

    Args:
        own: largest score of each row; a row with NaN, whose gain no threshold exceeds, objects.
        tile: of the map.
        number: of the entry, from 1 on; each number of a program belongs to one entry. Within an
            item it grows by one; between items the barriers around the output keep a group together
            (with tiles of 128, which both groups vote on, it grows by one there too).
        part: which tile of the entry.
    """
    places = softmax.coordinates(work.thr_qk, shapes.columns)
    objects = False
    for r in cutlass.range_constexpr(2):
        gain = -Float32.inf if own[r] == -Float32.inf else (own[r] - work.peak[r]) * work.unit
        alive = at.row + places[r, 0][0] < work.call.queries
        objects = objects or (alive and not (gain < work.call.limit))
    slot, threads = part * 2 + (number & 1), GROUPS * GROUP
    if const_expr(shapes.variant.skip == BLOCK):
        slot, threads = slot + work.g * 4, GROUP
    notes, kept = work.call.notes, Int32(1)
    decided = Int32(1) if cute.arch.vote_any_sync(objects) else Int32(0)
    if decided != 0 and work.lane == 0:
        notes[slot] = number
    goes_on = False if const_expr(shapes.ahead) else decided != 0
    if goes_on:
        cute.arch.barrier_arrive(barrier_id=VOTE_BARRIER + slot, number_of_threads=threads)
    else:
        cute.arch.barrier(barrier_id=VOTE_BARRIER + slot, number_of_threads=threads)
        if notes[slot] != number:
            kept = Int32(0)
    if kept != 0:
        softmax.rise(work.peak, own)
    else:
        _mark(shapes, work, at, tile)
    return kept


@cute.jit
def _mark(shapes: Shapes, work: Any, at: Any, tile: Int32):
    """Notes a dropped tile, unless it lies outside the map or in the future of every row."""
    dropped, skip = work.call.dropped, shapes.variant.skip
    inside = at.row < work.call.queries and tile < dropped.shape[3]
    if const_expr(shapes.variant.causal):
        inside = inside and tile * skip < at.row + skip
    if work.thread == 0 and inside:
        dropped[at.batch, at.head, at.row // skip, tile] = cutlass.Int8(1)
