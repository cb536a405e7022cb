"""The loop over the entries of an item in tiles of 128 keys (CuTe DSL).

An entry's scores are multiplied together with the values of the entry before, whose product then
runs under the softmax. With a vote the values of dropped tiles are left out; an entry holds one
voting tile of 128 keys or two of 64.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from blockattn.impl.cute import softmax, steps, votes
from blockattn.impl.cute.items import next_entry
from blockattn.impl.cute.shapes import GROUP, GROUPS, ROWS, Shapes

TURN_BARRIER = 3


@cute.jit
def walk(shapes: Shapes, work: Any, at: Any, total: Int32, phases: Int32) -> Int32:
    """Folds every entry of an item into the softmax state and the accumulator."""
    scores = cute.make_rmem_tensor(work.mma_qk.partition_shape_C((ROWS, shapes.columns)), Float32)
    spare = cute.make_fragment_like(work.p)  # probabilities, while those before are multiplied
    if total > 0:
        before, phases = next_entry(shapes, at, Int32(0), at.use % shapes.stages - 1, phases)
        kept = _first(shapes, work, at, before, scores)
        for n in cutlass.range(1, total, unroll=1):
            now, phases = next_entry(shapes, at, n, before[0], phases)
            kept = _next(shapes, work, at, n, now, before, kept, scores, spare)
            before = now
        steps.wait_for_values(work, before)
        _multiply_kept(shapes, work, before, kept, 0)
        steps.free(shapes, work, before)
    return phases


@cute.jit
def pass_turn(work: Any):
    """The other group may start its products."""
    cute.arch.barrier_arrive(barrier_id=TURN_BARRIER + 1 - work.g, number_of_threads=GROUPS * GROUP)


@cute.jit
def _take_turn(work: Any):
    cute.arch.barrier(barrier_id=TURN_BARRIER + work.g, number_of_threads=GROUPS * GROUP)


@cute.jit
def _first(shapes: Shapes, work: Any, at: Any, now: Any, scores: Any) -> Any:
    """The first entry of an item; gives which of its voting tiles are kept."""
    _take_turn(work)
    steps.wait_for_keys(work, now)
    steps.start_keys(work, now, scores)
    pass_turn(work)
    warpgroup.wait_group(0)
    return _soften_first(shapes, work, at, now, scores)


@cute.jit
def _next(
    shapes: Shapes, work: Any, at: Any, n: Int32, now: Any, before: Any, kept: Any, scores: Any,
    spare: Any,
) -> Any:  # fmt: skip
    """Any other entry, while the values of the one before, if kept, are multiplied."""
    _take_turn(work)
    steps.wait_for_keys(work, now)
    steps.start_keys(work, now, scores)
    steps.wait_for_values(work, before)
    _multiply_kept(shapes, work, before, kept, 1)
    shrink = softmax.per_row()
    kept, raised = _soften(shapes, work, at, n, now, scores, spare, shrink)
    warpgroup.wait_group(0)
    if raised != 0:
        softmax.rescale(work.acc, shrink)
    steps.free(shapes, work, before)
    softmax.move(spare, work.p)
    return kept


@cute.jit
def _multiply_kept(
    shapes: Shapes, work: Any, entry: Any, kept: Any, following: cutlass.Constexpr[int]
):
    """P V of the kept tiles of an entry whose V is there, after the scores of another, if any.

    Waits for those scores, or for all. Each way is whole, or ptxas serialises the products.

    Args:
        following: 1 with the scores of another entry on their way, whose turn then ends; else 0.
    """
    if sum(kept) == len(kept):
        _accumulate(work, entry, 0, shapes.columns, following)
    else:
        if const_expr(len(kept) == 2):
            _multiply_half(shapes, work, entry, kept, following)
        else:
            _accumulate(work, entry, 0, 0, following)


@cute.jit
def _multiply_half(
    shapes: Shapes, work: Any, entry: Any, kept: Any, following: cutlass.Constexpr[int]
):
    """The ways of :func:`_multiply_kept` where not both of two tiles are kept."""
    whole, half = shapes.columns, shapes.columns // 2
    if kept[0] != 0:
        _accumulate(work, entry, 0, half, following)
    elif kept[1] != 0:
        _accumulate(work, entry, half, whole, following)
    else:
        _accumulate(work, entry, 0, 0, following)


@cute.jit
def _accumulate(
    work: Any, entry: Any, first: cutlass.Constexpr[int], last: cutlass.Constexpr[int],
    following: cutlass.Constexpr[int],
):  # fmt: skip
    """One way of :func:`_multiply_kept`: the keys ``first`` to ``last`` - 1."""
    if const_expr(last > first):
        steps.accumulate(work, entry, work.p, first, last)
    if const_expr(following == 1):
        pass_turn(work)
    warpgroup.wait_group(following if const_expr(last > first) else 0)


@cute.jit
def _soften(
    shapes: Shapes, work: Any, at: Any, n: Int32, now: Any, scores: Any, p: Any, shrink: Any
) -> Any:
    """Scores that are there become probabilities.

    Returns:
        Which voting tiles are kept, and whether the accumulator must be multiplied with ``shrink``.
    """
    tile = _mask(shapes, work, at, now, scores)
    if const_expr(shapes.variant.skip is None):
        return (Int32(1),), softmax.fold_unseen(shapes, work, scores, p, None, shrink)
    kept, raised = _vote(shapes, work, at, n, tile, scores), Int32(0)
    if sum(kept) != 0:
        raised = softmax.follow(work, shrink)
    _fold_kept(shapes, work, kept, scores, p)
    return kept, raised


@cute.jit
def _soften_first(shapes: Shapes, work: Any, at: Any, now: Any, scores: Any) -> Any:
    """The same for the first entry of an item: it gives the reference and raises nothing.

    The accumulator is zero and stays untouched: ptxas would serialise every product.
    """
    tile = _mask(shapes, work, at, now, scores)
    if const_expr(shapes.variant.skip is None):
        softmax.rise(work.m, softmax.largest(scores))
        softmax.fold(shapes, work, scores, work.p, None)
        return (Int32(1),)
    kept = _vote(shapes, work, at, Int32(0), tile, scores)
    softmax.rise(work.m, work.peak)
    _fold_kept(shapes, work, kept, scores, work.p)
    return kept


@cute.jit
def _vote(shapes: Shapes, work: Any, at: Any, n: Int32, tile: Int32, scores: Any) -> Any:
    """Which voting tiles of an entry are kept."""
    parts, kept = shapes.voting_tiles, []
    for part in cutlass.range_constexpr(parts):
        own = softmax.largest(_part(scores, part, parts), nan=True)
        number = at.use + n + 1
        kept.append(votes.keep(shapes, work, at, own, tile * parts + part, number, part))
    return tuple(kept)


@cute.jit
def _fold_kept(shapes: Shapes, work: Any, kept: Any, scores: Any, p: Any):
    """Takes in the scores of the kept voting tiles."""
    for part in cutlass.range_constexpr(len(kept)):
        if kept[part] != 0:
            own_scores, own_p = (_part(x, part, len(kept)) for x in (scores, p))
            softmax.fold(shapes, work, own_scores, own_p, None)


@cute.jit
def _mask(shapes: Shapes, work: Any, at: Any, entry: Any, scores: Any) -> Int32:
    """Hides what a query must not see in scores that are there; gives their tile."""
    tile = steps.tile_of(work, entry)
    steps.release(work, work.call.bars.k_empty + entry[0])
    steps.mask(shapes, work, at, scores, tile)
    return tile


def _part(x: Any, part: int, parts: int) -> Any:
    """The registers of a voting tile of scores or of probabilities, as those of fewer columns."""
    size = cute.size(x) // parts
    layout = cute.make_layout(((2, 2, size // 4), 1, 1))
    return cute.make_tensor(x.iterator + part * size, layout)
