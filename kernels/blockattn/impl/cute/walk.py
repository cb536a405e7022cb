"""The loop over the entries of an item, where a step leaves no product in flight (CuTe DSL).

An entry's scores are multiplied together with the values of the entry before, whose product then
runs under the softmax. With a vote it is left out where that entry was dropped.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from blockattn.impl.cute import softmax, steps, votes
from blockattn.impl.cute.items import own_entry, shared_entry
from blockattn.impl.cute.shapes import GROUP, GROUPS, Shapes

TURN_BARRIER = 7
NONE = -1  # no entry


@cute.jit
def walk(shapes: Shapes, work: Any, at: Any, own: Int32, tail: Any, phases: Int32) -> Int32:
    """Folds every entry of an item into the softmax state and the accumulator."""
    start, before, void = Int32(0), Int32(NONE), Int32(0)
    if const_expr(shapes.variant.tail):
        before, phases = shared_entry(shapes, at.use - tail, phases)
        found = steps.new_tail(shapes)
        steps.fetch_tail(shapes, work, at, Int32(0), found)
        void = _first(shapes, work, at, before, found)
        for n in cutlass.range(1, tail, unroll=1):
            now, phases = shared_entry(shapes, at.use - tail + n, phases)
            steps.fetch_tail(shapes, work, at, n, found)
            weights = steps.tail_weights(shapes, work, n, found)
            void = _next(shapes, work, at, now, before, void, weights, False)
            before = now
    elif const_expr(shapes.variant.skip is None) and own > 0:
        start = Int32(1)
        before, phases = own_entry(shapes, at, Int32(0), phases)
        void = _first(shapes, work, at, before, None)
    for i in cutlass.range(start, own, unroll=1):
        now, phases = own_entry(shapes, at, i, phases)
        if const_expr(shapes.variant.skip is None):
            turn = i < at.both + cutlass.min(at.first, at.second)
            void = _next(shapes, work, at, now, before, void, None, turn)
            before = now
        else:
            before, void = _next_voted(shapes, work, at, now, before, void)
    if before >= 0:
        steps.multiply_values(shapes, work, before, void)
        warpgroup.wait_group(0)
        steps.release(work, work.call.bars.v_empty + (before >> 3))
    return phases


@cute.jit
def pass_turn(work: Any):
    """The other group may start its products."""
    cute.arch.barrier_arrive(barrier_id=TURN_BARRIER + 1 - work.g, number_of_threads=GROUPS * GROUP)


@cute.jit
def _first(shapes: Shapes, work: Any, at: Any, now: Int32, found: Any) -> Int32:
    """The first entry of an item: scores and probabilities; gives whether a value is padding."""
    scores = steps.multiply_keys(shapes, work, now)
    tail = None
    if const_expr(found is not None):
        tail = steps.tail_weights(shapes, work, Int32(0), found)
    warpgroup.wait_group(0)
    tile = steps.take(work, now)
    _, void = steps.take_in(shapes, work, at, scores, tile, tail, softmax.per_row())
    steps.round_scores(shapes, work, scores)
    return void


@cute.jit
def _next(
    shapes: Shapes, work: Any, at: Any, now: Int32, before: Int32, void: Int32, tail: Any, turn: Any
) -> Int32:
    """Any other entry, while the values of the one before are multiplied.

    ``tail`` are the weights of a tile of summaries, or None.

    With ``turn`` the other group has an entry of the same number, and their products alternate.
    """
    if const_expr(shapes.turns) and turn:
        cute.arch.barrier(barrier_id=TURN_BARRIER + work.g, number_of_threads=GROUPS * GROUP)
    scores = steps.multiply_keys(shapes, work, now)
    steps.multiply_values(shapes, work, before, void)
    if const_expr(shapes.turns) and turn:
        pass_turn(work)
    shrink = softmax.per_row()
    warpgroup.wait_group(1)
    tile = steps.take(work, now)
    raised, void = steps.take_in(shapes, work, at, scores, tile, tail, shrink)
    warpgroup.wait_group(0)
    steps.release(work, work.call.bars.v_empty + (before >> 3))
    if raised != 0:
        softmax.rescale(work.acc, shrink)
    steps.round_scores(shapes, work, scores)
    return void


@cute.jit
def _next_voted(shapes: Shapes, work: Any, at: Any, now: Int32, before: Int32, void: Int32):
    """An entry that a vote may drop.

    Returns:
        The entry whose values wait to be multiplied, if any, and whether a value is padding.
    """
    scores = steps.multiply_keys(shapes, work, now)
    if before >= 0:
        steps.multiply_values(shapes, work, before, void)
        warpgroup.wait_group(1)
    else:
        warpgroup.wait_group(0)
    tile, shrink, raised = steps.take(work, now), softmax.per_row(), Int32(0)
    void = steps.mask(shapes, work, at, scores, tile)
    own = softmax.largest(scores)
    keep = votes.keep(shapes, work, at, own)
    if keep != 0:
        steps.rise(work, own)
        raised = softmax.follow(own, work.m, work.l, work.unit, shrink)
        softmax.fold(scores, work.m, work.l, work.unit, None)
    warpgroup.wait_group(0)
    if before >= 0:
        steps.release(work, work.call.bars.v_empty + (before >> 3))
    before = now
    if keep != 0:
        if raised != 0:
            softmax.rescale(work.acc, shrink)
        steps.round_scores(shapes, work, scores)
    else:
        before = Int32(NONE)
        votes.drop(shapes, work, at, now, tile)
    return before, void
