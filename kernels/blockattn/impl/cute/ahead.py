"""The loop over the entries of an item with both products of a step under a softmax (CuTe DSL).

The scores of the next entry are multiplied while the softmax of this one runs, as is the product
with the values of the entry before. It takes two sets of score registers, so it serves tiles of 64
keys. Entries go in pairs, because ptxas accepts products in flight inside an iteration only: every
second product with values is waited for. Scores that the next iteration reads are copied by an
instruction that the compiler cannot move in front of the wait; otherwise it reads registers of a
product in flight, and ptxas then waits after every single one.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from blockattn.impl.cute import softmax, steps
from blockattn.impl.cute.items import own_entry, shared_entry
from blockattn.impl.cute.shapes import ROWS, Shapes

NONE = -1  # no entry


@cute.jit
def walk_ahead(shapes: Shapes, work: Any, at: Any, own: Int32, tail: Any, phases: Int32) -> Int32:
    """Folds every entry of an item into the softmax state and the accumulator."""
    scores = cute.make_rmem_tensor(work.mma_qk.partition_shape_C((ROWS, shapes.columns)), Float32)
    now, tile = Int32(NONE), Int32(0)
    if const_expr(shapes.variant.tail):
        now, phases = shared_entry(shapes, at.use - tail, phases)
        found = steps.new_tail(shapes)
        steps.fetch_tail(shapes, work, at, Int32(0), found)
        tile = _begin(shapes, work, now, scores)
        for n in cutlass.range(tail, unroll=1):
            after, later = Int32(NONE), phases
            if n + 1 < tail:
                after, later = shared_entry(shapes, at.use - tail + n + 1, phases)
            elif own > 0:
                after, later = own_entry(shapes, at, Int32(0), phases)
            phases = later
            weights = steps.tail_weights(shapes, work, n, found)
            steps.fetch_tail(shapes, work, at, n + 1, found)  # on its way during this step
            tile = _single(shapes, work, at, now, tile, after, scores, weights)
            now = after
    else:
        if own > 0:
            now, phases = own_entry(shapes, at, Int32(0), phases)
            tile = _begin(shapes, work, now, scores)
    if own > 0:
        for j in cutlass.range((own - 1) // 2, unroll=1):
            after, phases = own_entry(shapes, at, 2 * j + 1, phases)
            other = _multiply_after(shapes, work, after)
            _fold(shapes, work, at, now, tile, scores, None, None)
            warpgroup.wait_group(1)
            tile = steps.take(work, after)
            last, phases = own_entry(shapes, at, 2 * j + 2, phases)
            coming = _multiply_after(shapes, work, last)
            _fold(shapes, work, at, after, tile, other, None, now)
            warpgroup.wait_group(0)
            _free(work, after)
            tile = steps.take(work, last)
            _copy(coming, scores)
            now = last
        if own % 2 == 0:
            after, phases = own_entry(shapes, at, own - 1, phases)
            tile = _single(shapes, work, at, now, tile, after, scores, None)
            now = after
        _fold(shapes, work, at, now, tile, scores, None, None)
        warpgroup.wait_group(0)
        _free(work, now)
    return phases


@cute.jit
def _single(
    shapes: Shapes, work: Any, at: Any, now: Int32, tile: Int32, after: Int32, scores: Any,
    tail: Any,
) -> Int32:  # fmt: skip
    """One entry, with the scores of the next under its softmax; gives the tile of the next."""
    coming = _multiply_after(shapes, work, after)
    _fold(shapes, work, at, now, tile, scores, tail, None)
    warpgroup.wait_group(0)
    _free(work, now)
    tile = _arrived(work, after)
    _copy(coming, scores)
    return tile


@cute.jit
def _begin(shapes: Shapes, work: Any, entry: Int32, scores: Any) -> Int32:
    """The scores of the first entry of an item; gives its tile."""
    found = steps.multiply_keys(shapes, work, entry)
    warpgroup.wait_group(0)
    _copy(found, scores)
    return steps.take(work, entry)


@cute.jit
def _multiply_after(shapes: Shapes, work: Any, entry: Int32) -> Any:
    """Starts Q K of the next entry; without one it multiplies what there is, to be ignored."""
    if entry >= 0:
        steps.wait_for_keys(work, entry)
    return steps.start_keys(shapes, work, cutlass.max(entry, 0))


@cute.jit
def _arrived(work: Any, entry: Int32) -> Int32:
    """The tile of an entry whose scores are there, if there is one; its K is released."""
    tile = Int32(0)
    if entry >= 0:
        tile = steps.take(work, entry)
    return tile


@cute.jit
def _free(work: Any, entry: Int32):
    """The values of an entry have been multiplied."""
    steps.release(work, work.call.bars.v_empty + (entry >> 3))


def _copy(found: Any, scores: Any) -> None:
    """Scores that are there, after everything before this."""
    softmax.pin(found)
    scores.store(found.load())


@cute.jit
def _fold(
    shapes: Shapes, work: Any, at: Any, now: Int32, tile: Int32, scores: Any, tail: Any,
    before: Any,
):  # fmt: skip
    """Softmax of an entry, and the start of its product with its values.

    ``tail`` are the weights of a tile of summaries; ``before`` is the entry whose values are still
    being multiplied. Both may be None.
    """
    shrink = softmax.per_row()
    raised, void = steps.take_in(shapes, work, at, scores, tile, tail, shrink)
    if const_expr(before is not None):
        warpgroup.wait_group(1)
        _free(work, before)
    if raised != 0:
        softmax.rescale(work.acc, shrink)
    steps.round_scores(shapes, work, scores)
    steps.multiply_values(shapes, work, now, void)
