"""The loop over the entries of an item in tiles of 128 keys on which two groups vote (CuTe DSL).

A verdict is read while the scores of the next entry are multiplied, and the probabilities of a kept
tile are computed under that product; maxima and notes on the next entry under the product with the
values. So a group seldom waits for a vote, and a dropped tile costs its scores and their maxima.
Two sets of scores change roles; nothing is in flight when a step ends. The groups take no turns:
neither fills the matrix unit.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from blockattn.impl.cute import softmax, steps, votes
from blockattn.impl.cute.items import next_entry
from blockattn.impl.cute.shapes import ROWS, Shapes


@cute.jit
def walk_together(shapes: Shapes, work: Any, at: Any, phases: Int32) -> Int32:
    """Folds every entry of an item into the softmax state and the accumulator.

    Args:
        phases: as of :func:`next_entry`, which gives those after the last entry, too.
    """
    total = at.total
    one, two = (
        cute.make_rmem_tensor(work.mma_qk.partition_shape_C((ROWS, shapes.columns)), Float32)
        for _ in range(2)
    )
    own = softmax.per_row()
    if total > 0:
        now, phases = next_entry(shapes, at, Int32(0), at.use % shapes.stages - 1, phases)
        steps.wait_for_keys(work, now)
        steps.start_keys(work, now, one)
        warpgroup.wait_group(0)
        _vote(shapes, work, at, Int32(0), now, one, own, softmax.per_row())
        for n in cutlass.range(0, total - 1, 2, unroll=1):
            after, phases = next_entry(shapes, at, n + 1, now[0], phases)
            _step(shapes, work, at, n, now, after, True, one, two, own)
            now, phases = next_entry(shapes, at, n + 2, after[0], phases)
            _step(shapes, work, at, n + 1, after, now, n + 2 < total, two, one, own)
        if total % 2 == 1:
            _step(shapes, work, at, total - 1, now, now, False, one, two, own)
    return phases


@cute.jit
def _step(
    shapes: Shapes, work: Any, at: Any, n: Int32, now: Any, after: Any, more: Any, scores: Any,
    coming: Any, own: Any,
):  # fmt: skip
    """Verdict, softmax and values of entry ``n``, and the scores and the vote on the next.

    Args:
        now, after: the entry and the next; more: whether there is a next.
        scores, coming: of both; own: largest scores of the one whose verdict is awaited.
    """
    if more:
        steps.wait_for_keys(work, after)
    # Products under a condition are serialised by ptxas; one too many is to be ignored.
    steps.start_keys(work, after, coming)
    kept = votes.verdict(shapes, work, at, own, n)
    work.p.fill(shapes.element(0.0))  # what it held would stay in registers beside the scores
    if kept != 0:
        softmax.fold(shapes, work, scores, work.p, None)
    # Each way is whole, and asked for in other words than above: one branch with both softmax and
    # products would be serialised by ptxas.
    if kept == 1:
        steps.wait_for_values(work, now)
        steps.accumulate(work, now, work.p, 0, shapes.columns)
        warpgroup.wait_group(1)
    else:
        warpgroup.wait_group(0)
    raised, shrink = Int32(0), softmax.per_row()
    if more:
        raised = _vote(shapes, work, at, n + 1, after, coming, own, shrink)
    warpgroup.wait_group(0)
    if raised != 0:
        softmax.rescale(work.acc, shrink)
    steps.free(shapes, work, now)


@cute.jit
def _vote(
    shapes: Shapes, work: Any, at: Any, n: Int32, entry: Any, scores: Any, own: Any, shrink: Any
) -> Int32:
    """Votes on entry ``n``, whose scores are there.

    Returns:
        As :func:`softmax.follow`.
    """
    steps.release(work, work.call.bars.k_empty + entry[0])
    steps.mask(shapes, work, at, scores, n)
    shares = softmax.largest_shares(scores, 1)
    for r in cutlass.range_constexpr(2):
        own[r] = shares[r]
    votes.cast(shapes, work, at, own)
    return softmax.keep_up(shapes, work, shares, shrink)
