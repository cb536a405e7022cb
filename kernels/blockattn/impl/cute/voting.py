"""The loop over the entries of an item in tiles of 128 keys whose rows vote (CuTe DSL).

A verdict is read while the scores of the next entry are multiplied, and the probabilities of kept
tiles are computed under that product; maxima and notes on the next entry under the product with the
values. So a group seldom waits for a vote, and a dropped tile costs its scores and their maxima.
Two sets of scores change roles; nothing is in flight when a step ends. The groups take no turns:
neither fills the matrix unit.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from blockattn.impl.cute import softmax, steps, votes
from blockattn.impl.cute.items import next_entry
from blockattn.impl.cute.shapes import ROWS, Shapes


@cute.jit
def walk_voting(shapes: Shapes, work: Any, at: Any, phases: Int32) -> Int32:
    """Folds every entry of an item into the softmax state and the accumulator.

    Args:
        phases: as of :func:`next_entry`, which gives those after the last entry, too.
    """
    total = at.total
    one, two = (
        cute.make_rmem_tensor(work.mma_qk.partition_shape_C((ROWS, shapes.columns)), Float32)
        for _ in range(2)
    )
    own = cute.make_rmem_tensor((2, shapes.voting_tiles), Float32)
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
    _fold_kept(shapes, work, kept, scores)
    _multiply_kept(shapes, work, now, kept)
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

    The reference follows what is kept for certain; what others keep exceeds it by the threshold at
    most.

    Returns:
        As :func:`softmax.follow`.
    """
    steps.release(work, work.call.bars.k_empty + entry[0])
    steps.mask(shapes, work, at, scores, n)
    return softmax.follow(work, votes.cast(shapes, work, at, scores, own), shrink)


@cute.jit
def _fold_kept(shapes: Shapes, work: Any, kept: Any, scores: Any):
    """Takes in the scores of the kept voting tiles."""
    work.p.fill(shapes.element(0.0))  # what it held would stay in registers beside the scores
    for part in cutlass.range_constexpr(len(kept)):
        if kept[part] != 0:
            own_scores, own_p = (votes.part_of(x, part, len(kept)) for x in (scores, work.p))
            softmax.fold(shapes, work, own_scores, own_p, None)


@cute.jit
def _multiply_kept(shapes: Shapes, work: Any, entry: Any, kept: Any):
    """Starts P V of the kept tiles of an entry and waits for the scores that were started before.

    Each way is whole, or ptxas serialises the products.
    """
    if sum(kept) == len(kept):
        _accumulate(work, entry, 0, shapes.columns)
    else:
        if const_expr(len(kept) == 2):
            _multiply_half(shapes, work, entry, kept)
        else:
            warpgroup.wait_group(0)


@cute.jit
def _multiply_half(shapes: Shapes, work: Any, entry: Any, kept: Any):
    """The ways of :func:`_multiply_kept` where not both of two tiles are kept."""
    whole, half = shapes.columns, shapes.columns // 2
    if kept[0] != 0:
        _accumulate(work, entry, 0, half)
    elif kept[1] != 0:
        _accumulate(work, entry, half, whole)
    else:
        warpgroup.wait_group(0)


@cute.jit
def _accumulate(work: Any, entry: Any, first: cutlass.Constexpr[int], last: cutlass.Constexpr[int]):
    """One way of :func:`_multiply_kept`: the keys ``first`` to ``last`` - 1."""
    steps.wait_for_values(work, entry)
    steps.accumulate(work, entry, work.p, first, last)
    warpgroup.wait_group(1)
