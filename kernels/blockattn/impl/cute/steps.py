"""What a warp group does for one entry: waits, products, masks, softmax (CuTe DSL)."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from quack import layout_utils, sm90_utils

from blockattn.impl.cute import softmax
from blockattn.impl.cute.shapes import BLOCK, GROUP, ROWS, Shapes

VALUES_BARRIER = 5  # and one more for the second group


@cute.jit
def release(work: Any, barrier: Any):
    """A warp is done reading what the barrier guards."""
    if work.lane == 0:
        cute.arch.mbarrier_arrive(barrier)


@cute.jit
def multiply_keys(shapes: Shapes, work: Any, entry: Int32) -> Any:
    """Starts Q K of an entry and gives its scores, which are there after a wait."""
    wait_for_keys(work, entry)
    return start_keys(shapes, work, entry)


def wait_for_keys(work: Any, entry: Int32) -> None:
    """K of an entry is in shared memory."""
    cute.arch.mbarrier_wait(work.call.bars.k_full + (entry >> 1), entry & 1)


def start_keys(shapes: Shapes, work: Any, entry: Int32) -> Any:
    """The scores of an entry whose K is there, in new registers."""
    return sm90_utils.gemm_zero_init(
        work.mma_qk, (ROWS, shapes.columns), work.q, work.k, B_idx=entry >> 3
    )


@cute.jit
def take(work: Any, entry: Int32) -> Int32:
    """The key tile of an entry whose scores are there; its K is released."""
    tile = work.call.entry[entry >> 3]
    release(work, work.call.bars.k_empty + (entry >> 3))
    return tile


@cute.jit
def multiply_values(shapes: Shapes, work: Any, entry: Int32, void: Int32):
    """Starts the accumulation of P V of an entry."""
    stage = entry >> 3
    cute.arch.mbarrier_wait(work.call.bars.v_full + (entry >> 1), entry & 1)
    if const_expr(shapes.variant.lengths):
        _blank(shapes, work, stage, void)
    sm90_utils.gemm_w_idx(work.mma_pv, work.acc, work.p, work.v, False, B_idx=stage)


@cute.jit
def _blank(shapes: Shapes, work: Any, stage: Int32, void: Int32):
    """Values of padding become zero: they may be anything, and 0 * NaN is NaN.

    Both groups write the same zeros; two threads share a row.
    """
    if void != 0:
        zeros = cute.make_rmem_tensor(8, shapes.element)
        zeros.fill(shapes.element(0.0))
        row, chunks = work.thread // 2, shapes.variant.dim // 16  # of 16 bytes; two threads a row
        parts = cute.local_tile(work.s_v[row, None, stage], (8,), (None,))
        for j in cutlass.range(chunks, unroll=1):
            cute.autovec_copy(zeros, parts[None, work.thread % 2 * chunks + j])
    cute.arch.fence_view_async_shared()
    cute.arch.barrier(barrier_id=VALUES_BARRIER + work.g, number_of_threads=GROUP)


@cute.jit
def mask(shapes: Shapes, work: Any, at: Any, scores: Any, tile: Int32) -> Int32:
    """Hides what a query must not see; gives whether the thread's row of values is padding."""
    call = work.call
    start = tile * shapes.columns
    valid = call.keys - start
    if const_expr(shapes.variant.lengths):
        valid = cutlass.min(valid, call.block_lengths[tile])
    if valid < shapes.columns:
        softmax.keep_columns(scores, work.thr_qk, valid)
    if const_expr(shapes.variant.causal) and at.row - start < shapes.columns - 1:
        softmax.keep_past(scores, work.thr_qk, at.row - start)
    return Int32(1) if work.thread // 2 >= valid else Int32(0)


@cute.jit
def take_in(shapes: Shapes, work: Any, at: Any, scores: Any, tile: Int32, tail: Any, shrink: Any):
    """Takes the scores of a tile into the softmax state.

    Returns:
        Whether the accumulator must be multiplied with ``shrink``, and whether this thread's row of
        the tile's values is padding.
    """
    weights, void = None, Int32(0)
    if const_expr(tail is not None):
        weights, void = tail
        softmax.keep_weighted(scores, weights)
    else:
        void = mask(shapes, work, at, scores, tile)
    own = softmax.largest(scores)
    raised = softmax.follow(own, work.m, work.l, work.unit, shrink)
    softmax.fold(scores, work.m, work.l, work.unit, weights)
    if const_expr(shapes.variant.skip is not None):
        rise(work, own)
    return raised, void


def rise(work: Any, own: Any) -> None:
    """The exact running maximum, which a vote compares with."""
    for r in range(2):
        work.peak[r] = cute.arch.fmax(work.peak[r], own[r])


def round_scores(shapes: Shapes, work: Any, scores: Any) -> None:
    """Probabilities in the inputs' dtype, as an operand."""
    work.p.store(layout_utils.reshape_acc_to_frgA(scores).load().to(shapes.element))


@cute.jit
def fetch_tail(shapes: Shapes, work: Any, at: Any, n: Int32, found: Any):
    """Starts to read what :func:`tail_weights` needs of summary tile ``n`` into ``found``."""
    call, columns = work.call, shapes.columns
    last = cute.size(call.tail_lengths) - 1
    places = softmax.coordinates(work.thr_qk, columns)
    line = cutlass.min(at.row // BLOCK, call.words.shape[2] - 1)
    for j in cutlass.range_constexpr(columns // softmax.SHARERS):
        column = cutlass.min(n * columns + places[0, j][1], last)
        found[j] = call.tail_lengths[column]
    each = columns // softmax.SHARERS
    for i in cutlass.range_constexpr(columns // 32):
        place = cutlass.min(n * (columns // 32) + i, call.words.shape[3] - 1)
        found[each + i] = call.words[at.batch, at.head, line, place]
    found[each + columns // 32] = call.tail_lengths[
        cutlass.min(n * columns + work.thread // 2, last)
    ]


def new_tail(shapes: Shapes) -> Any:
    """Room for what :func:`fetch_tail` reads."""
    columns = shapes.columns
    return cute.make_rmem_tensor(columns // softmax.SHARERS + columns // 32 + 1, Int32)


@cute.jit
def tail_weights(shapes: Shapes, work: Any, n: Int32, found: Any):
    """Keys that each summary of tile ``n`` stands for, none where its block is exact; padding.

    Four lengths share a register.
    """
    columns, blocks = shapes.columns, cute.size(work.call.tail_lengths)
    places = softmax.coordinates(work.thr_qk, columns)
    each = columns // softmax.SHARERS
    weights = cute.make_rmem_tensor(each // 4, Int32)
    weights.fill(0)
    for j in cutlass.range_constexpr(each):
        column = places[0, j][1]
        word = found[each + j // 8]
        absent = (word >> column % 32 & 1) == 0 and n * columns + column < blocks
        length = found[j] if absent else 0
        weights[j // 4] = weights[j // 4] | length << j % 4 * 8
    inside = n * columns + work.thread // 2 < blocks
    void = Int32(1) if inside and found[each + columns // 32] == 0 else Int32(0)
    return weights, void
