"""The vote of a tile's rows whether to drop it (CuTe DSL); skip_vsa_quant specification 2."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from blockattn.impl.cute import softmax, steps
from blockattn.impl.cute.shapes import BLOCK, GROUP, GROUPS, Shapes

VOTE_BARRIER = 3  # and one more for the second group


@cute.jit
def keep(shapes: Shapes, work: Any, at: Any, own: Any) -> Int32:
    """Whether a row of the voting tile gains too much, in base-2 units, to drop it."""
    places = softmax.coordinates(work.thr_qk, shapes.columns)
    objects = Int32(0)
    for r in cutlass.range_constexpr(2):
        gain = -Float32.inf if own[r] == -Float32.inf else (own[r] - work.peak[r]) * work.unit
        alive = at.row + places[r, 0][0] < work.call.queries
        if alive and not (gain < work.call.limit):
            objects = Int32(1)
    if const_expr(shapes.variant.skip == BLOCK):
        return softmax.vote(objects, VOTE_BARRIER + work.g, GROUP)
    return softmax.vote(objects, Int32(VOTE_BARRIER), GROUPS * GROUP)


@cute.jit
def drop(shapes: Shapes, work: Any, at: Any, entry: Int32, tile: Int32):
    """Releases the values of a dropped entry and marks it in the map."""
    dropped = work.call.dropped
    cute.arch.mbarrier_wait(work.call.bars.v_full + (entry >> 1), entry & 1)
    steps.release(work, work.call.bars.v_empty + (entry >> 3))
    if work.thread == 0 and at.row < work.call.queries:
        dropped[at.batch, at.head, at.row // shapes.variant.skip, tile] = cutlass.Int8(1)
