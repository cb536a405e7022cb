"""What a warp group does for one entry: waits, products, masks (CuTe DSL)."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from blockattn.impl.cute import softmax, wgmma
from blockattn.impl.cute.shapes import GROUP, VALUES_BARRIER, WARP, Shapes


@cute.jit
def release(work: Any, barrier: Any):
    """A warp is done reading what the barrier guards."""
    if work.lane == 0:
        cute.arch.mbarrier_arrive(barrier)


@cute.jit
def free_rows(work: Any):
    """The place of Q is free, once the output that took it has been read."""
    if work.thread < WARP:
        cute.arch.cp_async_bulk_wait_group(0, read=True)
    release(work, work.call.bars.q_empty + work.g)


def wait_for_keys(work: Any, entry: Any) -> None:
    """K of an entry is in shared memory."""
    _, place, phase = entry
    cute.arch.mbarrier_wait(work.call.bars.k_full + place, phase)


@cute.jit
def keys_there(shapes: Shapes, work: Any, entry: Any) -> Int32:
    """1 where K of an entry is known to be in shared memory by now.

    Asked for early, the answer is no wait later. It is right of the entry behind one whose K has
    been waited for: a barrier tells only two uses apart, and the group has waited for all before.
    With summaries, whose loop is longer, it made the kernel 3 to 5 % slower and is not asked for.
    """
    _, place, phase = entry
    there = False
    if const_expr(not shapes.variant.tail):
        there = cute.arch.mbarrier_test_wait(work.call.bars.k_full + place, phase)
    return Int32(1) if there else Int32(0)


def wait_for_values(work: Any, entry: Any) -> None:
    """V of an entry is in shared memory."""
    _, place, phase = entry
    cute.arch.mbarrier_wait(work.call.bars.v_full + place, phase)


def tile_of(work: Any, entry: Any) -> Int32:
    """The key tile of an entry whose K is there."""
    return work.call.entry[entry[0]]


def start_keys(work: Any, entry: Any, scores: Any) -> None:
    """Starts Q K of an entry whose K is there; its scores are right after a wait."""
    keys, depths = work.k[None, None, None, entry[0]], range(cute.size(work.q, mode=[2]))
    operands = ((work.q[None, None, i], keys[None, None, i]) for i in depths)
    wgmma.start(work.mma_qk, scores, operands, add=False)


@cute.jit
def multiply_values(shapes: Shapes, work: Any, entry: Any, void: Int32, p: Any):
    """Starts the accumulation of P V of an entry."""
    wait_for_values(work, entry)
    if const_expr(shapes.variant.lengths):
        _blank(shapes, work, entry[0], void)
    accumulate(work, entry, p, 0, shapes.columns)


def accumulate(work: Any, entry: Any, p: Any, first: int, last: int) -> None:
    """Starts P V of the keys ``first`` to ``last`` - 1 of an entry; both are multiples of 16."""
    depths = range(first // wgmma.DEPTH, last // wgmma.DEPTH)
    values = work.v[None, None, None, entry[0]]  # first, or its address is computed for each depth
    operands = ((p[None, None, i], values[None, None, i]) for i in depths)
    wgmma.start(work.mma_pv, work.acc, operands, add=True)


@cute.jit
def free(shapes: Shapes, work: Any, entry: Any):
    """The values of an entry have been multiplied, or are not wanted."""
    if const_expr(shapes.variant.skip is not None):  # they may not even have come
        wait_for_values(work, entry)
    release(work, work.call.bars.v_empty + entry[0])


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
    call, padding = work.call, Int32(0)
    start = tile * shapes.columns
    if const_expr(shapes.variant.lengths):
        valid = cutlass.min(call.keys - start, call.block_lengths[tile])
        padding = Int32(1) if work.thread // 2 >= valid else Int32(0)
        if valid < shapes.columns:
            softmax.keep_columns(scores, work.thr_qk, valid)
    elif tile == work.ragged:
        softmax.keep_columns(scores, work.thr_qk, call.keys - start)
    if const_expr(shapes.variant.causal):
        if at.row - start < shapes.columns - 1:
            softmax.keep_past(scores, work.thr_qk, at.row - start)
    return padding
