"""The loop over the entries of an item whose keys go by blocks of 64 (CuTe DSL).

A step multiplies the scores of the next entry and the values of the entry before, both under the
softmax of its own entry, and ends when all of it is there: ptxas serialises products that are in
flight at a loop's back edge. Two sets of scores and of probabilities change roles from step to
step. An instruction of a product whose first operand lies in registers holds its warp until the
matrix unit takes it. Scores therefore start behind the mask, in one block with the exponentials,
among which ptxas spreads them; with a vote, whose exponentials lie behind a branch, before the mask
(but for the first step). Whether the next keys have come is asked one step ahead.
With a vote the values of a dropped entry are not multiplied.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from blockattn.impl.cute import softmax, steps, summaries, votes
from blockattn.impl.cute.items import next_entry
from blockattn.impl.cute.shapes import ROWS, Shapes


def new_scores(shapes: Shapes, work: Any) -> Any:
    """Two sets of scores; the first scores of an item are multiplied into the first."""
    shape = work.mma_qk.partition_shape_C((ROWS, shapes.columns))
    return tuple(cute.make_rmem_tensor(shape, Float32) for _ in range(2))


@cute.jit
def walk_ahead(
    shapes: Shapes, work: Any, at: Any, before: Any, phases: Int32, scores: Any
) -> Int32:
    """Folds all entries of an item into the softmax state and the accumulator, and finishes them.

    Args:
        before: the first entry, whose scores are there, in the first of ``scores``.
        phases: as of :func:`next_entry`.

    Returns:
        The phases after the last entry.
    """
    (two, one), total = scores, at.total
    first, second = work.p, cute.make_fragment_like(work.p)
    if total > 0:
        tile = cute.arch.shuffle_sync(_noted_tile(work, before), 0)
        steps.release(work, work.call.bars.k_empty + before[0])
        now, phases = next_entry(shapes, at, Int32(1), before[0], phases)
        kept, void, tile, after, phases, there = _first(
            shapes, work, at, tile, now, phases, total > 1, two, second, one
        )
        steps.free_rows(work)  # by now the output before has been read
        left = total - 1  # entries whose probabilities are not computed yet
        for _ in cutlass.range((left - 1) // 2, unroll=1):
            number = total - left
            kept, void, tile, following, phases, there = _step(
                shapes, work, at, number, tile, before, kept, void, after, phases, there,
                one, first, two, second,
            )  # fmt: skip
            kept, void, tile, last, phases, there = _step(
                shapes, work, at, number + 1, tile, now, kept, void, following, phases, there,
                two, second, one, first,
            )  # fmt: skip
            before, now, after = after, following, last
            left -= 2
        if left == 2:
            kept, void, tile, _, _, there = _step(
                shapes, work, at, total - 2, tile, before, kept, void, after, phases, there,
                one, first, two, second,
            )  # fmt: skip
            before, now = now, after
            softmax.move(two, one)
            softmax.move(first, second)
        if left > 0:
            kept, void, *_ = _step(
                shapes, work, at, total - 1, tile, before, kept, void, None, phases, there,
                one, first, two, second,
            )  # fmt: skip
            _finish(shapes, work, now, kept, void, first)
        else:
            _finish(shapes, work, before, kept, void, second)
    else:
        steps.free_rows(work)
    return phases


@cute.jit
def _noted_tile(work: Any, entry: Any) -> Int32:
    """The key tile of an entry, in lane 0: the one that gives its place away at once."""
    tile = Int32(0)
    if work.lane == 0:
        tile = steps.tile_of(work, entry)
    return tile


@cute.jit
def _finish(shapes: Shapes, work: Any, entry: Any, kept: Int32, void: Int32, p: Any):
    """The values of the last entry of an item; what they are divided by is computed meanwhile."""
    if kept != 0:
        steps.multiply_values(shapes, work, entry, void, p)
    softmax.finish(work)
    warpgroup.wait_group(0)
    steps.free(shapes, work, entry)


@cute.jit
def _first(
    shapes: Shapes, work: Any, at: Any, tile: Int32, after: Any, phases: Int32, more: Any,
    scores: Any, p: Any, coming: Any,
):  # fmt: skip
    """Softmax of the first entry of an item, under the scores of the next; like :func:`_step`."""
    # Products under a condition are serialised by ptxas; one too many is to be ignored.
    if more:
        steps.wait_for_keys(work, after)
    n, kept = Int32(0), Int32(1)
    tile_after = steps.tile_of(work, after)
    then, phases = next_entry(shapes, at, n + 2, after[0], phases)
    void, weight = _mask(shapes, work, at, n, tile, scores)
    there = steps.keys_there(shapes, work, then)
    steps.start_keys(work, after, coming)
    own = _largest(shapes, scores)
    if const_expr(shapes.variant.skip is not None):
        kept = _vote(shapes, work, at, own, n, tile)
    if kept != 0:
        softmax.rise(work.m, own)
        softmax.fold(shapes, work, scores, p, weight)
        _weigh(shapes, work, at, n, scores)
    warpgroup.wait_group(0)
    if more:
        steps.release(work, work.call.bars.k_empty + after[0])
    return kept, void, tile_after, then, phases, there


@cute.jit
def _step(
    shapes: Shapes, work: Any, at: Any, n: Int32, tile: Int32, before: Any, kept: Int32,
    void: Int32, after: Any, phases: Int32, there: Int32, scores: Any, p: Any, coming: Any,
    pending: Any,
):  # fmt: skip
    """Softmax of an entry, under the scores of the next and the values of the one before.

    Args:
        n, tile: number and key tile of the entry.
        before: the entry before; kept: there are probabilities of it, in ``pending``; void: this
            thread's row of its values is padding.
        after: the next entry, or None; phases: as of :func:`next_entry`, after it; there: its K is
            known to have come.
        scores, p: of the entry; coming: scores of ``after``.

    Returns:
        Whether the entry is kept, whether its values have padding, the tile of ``after``, the entry
        behind that with the phases after it, and whether its K is known to have come.
    """
    if kept != 0:
        steps.multiply_values(shapes, work, before, void, pending)
    tile_after, then, voting = Int32(0), None, shapes.variant.skip is not None
    if const_expr(after is not None):
        if there == 0:
            steps.wait_for_keys(work, after)
        tile_after = steps.tile_of(work, after)
        then, phases = next_entry(shapes, at, n + 2, after[0], phases)
        if const_expr(voting):  # the exponentials lie behind a branch on the verdict
            steps.start_keys(work, after, coming)
    kept, raised, shrink = Int32(1), Int32(0), softmax.per_row()
    void, weight = _mask(shapes, work, at, n, tile, scores)
    if const_expr(after is not None):
        there = steps.keys_there(shapes, work, then)
        if const_expr(not voting):
            steps.start_keys(work, after, coming)
    if const_expr(not voting):
        raised = softmax.fold_unseen(shapes, work, scores, p, weight, shrink)
        _weigh(shapes, work, at, n, scores)
    else:
        own = _largest(shapes, scores)
        kept = _vote(shapes, work, at, own, n, tile)
        if kept != 0:
            raised = softmax.follow(work, work.peak, shrink)
            softmax.fold(shapes, work, scores, p, weight)
            _weigh(shapes, work, at, n, scores)
    warpgroup.wait_group(0)
    if raised != 0:
        softmax.rescale(work.acc, shrink)
    steps.free(shapes, work, before)
    if const_expr(after is not None):
        steps.release(work, work.call.bars.k_empty + after[0])
    return kept, void, tile_after, then, phases, there


@cute.jit
def _mask(shapes: Shapes, work: Any, at: Any, n: Int32, tile: Int32, scores: Any):
    """Hides what a query must not see.

    Returns:
        Whether the thread's row of values is padding; how often the sums count, or None for once.
    """
    if const_expr(not shapes.variant.tail):
        return steps.mask(shapes, work, at, scores, tile), None
    void, weight = Int32(0), Float32(1.0)
    if n < at.tail:
        void, weight = summaries.hide(shapes, work, at, n, scores)
    else:
        void = steps.mask(shapes, work, at, scores, tile)
    return void, weight


@cute.jit
def _weigh(shapes: Shapes, work: Any, at: Any, n: Int32, scores: Any):
    """Sums that :func:`softmax.fold` left out."""
    if const_expr(shapes.variant.tail):
        if n >= work.whole and n < at.tail:
            summaries.weigh(shapes, work, n, scores)


def _largest(shapes: Shapes, scores: Any) -> Any:
    """Largest score of each row, as the vote wants it where there is one."""
    if shapes.variant.skip is None:
        return softmax.largest(scores)
    return softmax.largest_or_nan(scores)


@cute.jit
def _vote(shapes: Shapes, work: Any, at: Any, own: Any, n: Int32, tile: Int32) -> Int32:
    """Whether a tile is kept; one of summaries always is."""
    if const_expr(not shapes.variant.tail):
        return votes.decide(shapes, work, at, own, tile)
    kept = Int32(1)
    if n < at.tail:
        softmax.rise(work.peak, own)
    else:
        kept = votes.decide(shapes, work, at, own, tile)
    return kept
