"""The loop over the entries of an item whose groups vote on tiles of 64 x 64 each alone (CuTe DSL).

Three groups share the matrix unit. An entry holds two tiles. A group multiplies its scores, votes,
computes the probabilities of what is kept in the place of the scores, and multiplies the values; it
waits for each product, while the other groups fill the unit. One set of scores is all that 160
registers of a thread have room for.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from blockattn.impl.cute import softmax, steps, votes
from blockattn.impl.cute.items import next_entry
from blockattn.impl.cute.shapes import BLOCK, ROWS, Shapes


@cute.jit
def walk_alone(shapes: Shapes, work: Any, at: Any, phases: Int32) -> Int32:
    """Folds every entry of an item into the softmax state and the accumulator.

    Args:
        phases: as of :func:`next_entry`, which gives those after the last entry, too.
    """
    scores = cute.make_rmem_tensor(work.mma_qk.partition_shape_C((ROWS, shapes.columns)), Float32)
    stage = at.use % shapes.stages - 1
    for n in cutlass.range(at.total, unroll=1):
        entry, phases = next_entry(shapes, at, n, stage, phases)
        _step(shapes, work, at, n, entry, scores)
        stage = entry[0]
    return phases


@cute.jit
def _step(shapes: Shapes, work: Any, at: Any, n: Int32, entry: Any, scores: Any):
    """Scores, vote, softmax and values of entry ``n``."""
    steps.wait_for_keys(work, entry)
    steps.start_keys(work, entry, scores)
    warpgroup.wait_group(0)
    steps.release(work, work.call.bars.k_empty + entry[0])
    steps.mask(shapes, work, at, scores, n)
    own, shrink = softmax.largest_shares(scores, 2), softmax.per_row()
    if softmax.keep_up(shapes, work, own, shrink) != 0:
        softmax.rescale(work.acc, shrink)
    first, second = votes.decide_each(shapes, work, at, own, n)
    # Each way is whole, or what a half held stays in registers and ptxas serialises the products.
    if first + second == 2:
        _take(shapes, work, entry, scores, work.p, 0, shapes.columns)
    elif first != 0:
        _take(shapes, work, entry, _half(scores, 0), _half(work.p, 0), 0, BLOCK)
    elif second != 0:
        _take(shapes, work, entry, _half(scores, 1), _half(work.p, 1), BLOCK, shapes.columns)
    steps.free(shapes, work, entry)


@cute.jit
def _take(
    shapes: Shapes, work: Any, entry: Any, scores: Any, p: Any,
    start: cutlass.Constexpr[int], end: cutlass.Constexpr[int],
):  # fmt: skip
    """Softmax and values of the keys ``start`` to ``end`` - 1 of an entry."""
    softmax.fold(shapes, work, scores, p, None)
    steps.wait_for_values(work, entry)
    steps.accumulate(work, entry, work.p, start, end)
    warpgroup.wait_group(0)


def _half(x: Any, number: int) -> Any:
    """The registers of one of two tiles of scores or of probabilities, as those of 64 columns."""
    size = cute.size(x) // 2
    layout = cute.make_layout(((2, 2, size // 4), 1, 1))
    return cute.make_tensor(x.iterator + number * size, layout)
