"""The loop over the entries of an item in tiles of 128 keys on which nobody votes (CuTe DSL).

An entry's scores are multiplied together with the values of the entry before, whose product then
runs under the softmax; two sets of probabilities change roles from step to step. The products of
the two groups alternate, so that one multiplies while the other does its softmax.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from blockattn.impl.cute import softmax, steps
from blockattn.impl.cute.items import next_entry
from blockattn.impl.cute.shapes import GROUP, ROWS, TURN_BARRIER, Shapes

BOTH = 2 * GROUP  # threads


@cute.jit
def walk(shapes: Shapes, work: Any, at: Any, phases: Int32) -> Int32:
    """Folds every entry of an item into the softmax state and the accumulator.

    Args:
        phases: as of :func:`next_entry`, which gives those after the last entry, too.
    """
    total = at.total
    scores = cute.make_rmem_tensor(work.mma_qk.partition_shape_C((ROWS, shapes.columns)), Float32)
    first, second = work.p, cute.make_fragment_like(work.p)
    if total > 0:
        before, phases = next_entry(shapes, at, Int32(0), at.use % shapes.stages - 1, phases)
        _first(shapes, work, at, before, scores)
        for n in cutlass.range(1, total - 1, 2, unroll=1):
            now, phases = next_entry(shapes, at, n, before[0], phases)
            _next(shapes, work, at, n, now, before, scores, first, second)
            before, phases = next_entry(shapes, at, n + 1, now[0], phases)
            _next(shapes, work, at, n + 1, before, now, scores, second, first)
        if total % 2 == 0:
            now, phases = next_entry(shapes, at, total - 1, before[0], phases)
            _next(shapes, work, at, total - 1, now, before, scores, first, second)
            before = now
            softmax.move(second, first)
        steps.wait_for_values(work, before)
        steps.accumulate(work, before, first, 0, shapes.columns)
        warpgroup.wait_group(0)
        steps.free(shapes, work, before)
    return phases


@cute.jit
def pass_turn(work: Any):
    """The other group may start its products."""
    cute.arch.barrier_arrive(barrier_id=TURN_BARRIER + 1 - work.g, number_of_threads=BOTH)


@cute.jit
def _take_turn(work: Any):
    cute.arch.barrier(barrier_id=TURN_BARRIER + work.g, number_of_threads=BOTH)


@cute.jit
def _first(shapes: Shapes, work: Any, at: Any, now: Any, scores: Any):
    """The first entry of an item: it gives the reference and raises nothing.

    The accumulator is zero and stays untouched: ptxas would serialise every product.
    """
    _take_turn(work)
    steps.wait_for_keys(work, now)
    steps.start_keys(work, now, scores)
    pass_turn(work)
    warpgroup.wait_group(0)
    _mask(shapes, work, at, Int32(0), now, scores)
    softmax.rise(work.m, softmax.largest(scores))
    softmax.fold(shapes, work, scores, work.p, None)


@cute.jit
def _next(
    shapes: Shapes, work: Any, at: Any, n: Int32, now: Any, before: Any, scores: Any, pending: Any,
    p: Any,
):  # fmt: skip
    """Any other entry, while the values of the one before are multiplied.

    Args:
        pending: probabilities of the entry before; p: of this one.
    """
    _take_turn(work)
    steps.wait_for_keys(work, now)
    steps.start_keys(work, now, scores)
    steps.wait_for_values(work, before)
    steps.accumulate(work, before, pending, 0, shapes.columns)
    pass_turn(work)
    warpgroup.wait_group(1)
    _mask(shapes, work, at, n, now, scores)
    shrink = softmax.per_row()
    raised = softmax.fold_unseen(shapes, work, scores, p, None, shrink)
    warpgroup.wait_group(0)
    if raised != 0:
        softmax.rescale(work.acc, shrink)
    steps.free(shapes, work, before)


@cute.jit
def _mask(shapes: Shapes, work: Any, at: Any, n: Int32, entry: Any, scores: Any):
    """Hides what a query must not see in scores that are there."""
    steps.release(work, work.call.bars.k_empty + entry[0])
    steps.mask(shapes, work, at, scores, n)
