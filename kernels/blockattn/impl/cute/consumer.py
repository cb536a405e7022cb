"""The warp groups that compute: Q, walk over the entries, and output of every item (CuTe DSL)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warp
from quack import layout_utils, sm90_utils

from blockattn.impl.cute import softmax, summaries
from blockattn.impl.cute.ahead import walk_ahead
from blockattn.impl.cute.items import tail_tiles
from blockattn.impl.cute.producer import announced, tile_ways
from blockattn.impl.cute.shapes import GROUP, GROUPS, ROWS, WARP, Shapes
from blockattn.impl.cute.steps import release
from blockattn.impl.cute.walk import pass_turn, walk

OUTPUT_BARRIER = 1  # and one more for the second group


@cute.jit
def consume(
    shapes: Shapes, call: Any, s_q: Any, s_out: Any, s_k: Any, s_v: Any, store_o: Any, out: Any,
    unit: Float32, final: Float32,
):  # fmt: skip
    """The 64 query rows of a group of every item in turn."""
    bars = call.bars
    work = _new_work(shapes, call, s_q, s_k, s_v, unit)
    g = work.g
    use, q_phase, phases, taken = Int32(0), Int32(0), Int32(0), Int32(0)
    tail = tail_tiles(shapes, call)
    if const_expr(not shapes.ahead) and g == 1:
        pass_turn(work)  # the first group begins
    is_item, place, counts = announced(call, work.lane, taken)
    while is_item != 0:
        pair, head, batch = place
        both, first, second = counts
        total = tail + both + (first if g == 0 else second)
        at = SimpleNamespace(
            head=head, batch=batch, row=(pair * GROUPS + g) * ROWS, group=g,
            use=use, tail=tail, both=tail + both, fewer=cutlass.min(first, second), total=total,
        )  # fmt: skip
        if const_expr(shapes.variant.tail):
            summaries.begin(work, at)
        softmax.clear(work.m, work.l, work.acc)
        if const_expr(shapes.variant.skip is not None):
            work.peak.fill(-Float32.inf)
        cute.arch.mbarrier_wait(bars.q_full + g, q_phase)
        if const_expr(shapes.ahead):
            _read_query(shapes, work, s_q)
            release(work, bars.q_empty + g)
            phases = walk_ahead(shapes, work, at, total, phases)
        else:
            phases = walk(shapes, work, at, total, phases)
            release(work, bars.q_empty + g)
        _write(shapes, work, at, s_out, store_o, out, final)
        use += tail + both + first + second
        q_phase ^= 1
        taken += 1
        is_item, place, counts = announced(call, work.lane, taken)
    if work.thread < WARP:
        cute.arch.cp_async_bulk_wait_group(0, read=True)


def _new_work(shapes: Shapes, call: Any, s_q: Any, s_k: Any, s_v: Any, unit: Float32) -> Any:
    """What a thread works with: operands, accumulator, softmax state."""
    thread = cute.arch.thread_idx()[0] - GROUP
    g = cute.arch.make_warp_uniform(thread // GROUP)
    thread = thread % GROUP
    columns, dim = shapes.columns, shapes.variant.dim
    query = "RS" if shapes.ahead else "SS"
    mma_qk = sm90_utils.make_tiled_mma(shapes.element, "K", "K", columns, query)
    mma_pv = sm90_utils.make_tiled_mma(shapes.element, "K", "MN", dim, "RS")
    # Operands in shared memory are the same for every thread of a group.
    _, q, k = sm90_utils.partition_fragment_ABC(
        mma_qk.get_slice(0), (ROWS, columns, dim), s_q[None, None, g], s_k
    )
    acc, p, v = sm90_utils.partition_fragment_ABC(
        mma_pv.get_slice(0), (ROWS, dim, columns), None, layout_utils.transpose_view(s_v)
    )
    lane, whole = cute.arch.lane_idx(), 0
    if shapes.variant.tail:
        whole = summaries.whole_tiles(shapes, call, lane)
    return SimpleNamespace(
        call=call, g=g, thread=thread, lane=lane, unit=softmax.pinned(unit),
        ragged=_ragged_tile(call.keys, columns), whole=whole, bits=cute.make_rmem_tensor(2, Int32),
        mma_qk=mma_qk, mma_pv=mma_pv, thr_qk=mma_qk.get_slice(thread),
        q=q, k=k, v=v, s_v=s_v, p=p, acc=acc,
        m=softmax.per_row(), l=softmax.per_row(), peak=softmax.per_row(),
    )  # fmt: skip


@cute.jit
def _ragged_tile(keys: Int32, columns: int) -> Int32:
    """The key tile that is not full, or -1."""
    return keys // columns if keys % columns != 0 else Int32(-1)


@cute.jit
def _read_query(shapes: Shapes, work: Any, s_q: Any):
    """Q of the group into registers, as an operand."""
    atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), shapes.element)
    tiled = cute.make_tiled_copy_A(atom, work.mma_qk)
    own = tiled.get_slice(softmax.fresh(work.thread))  # its addresses would be spilled
    cute.copy(tiled, own.partition_S(s_q[None, None, work.g]), own.retile(work.q))


@cute.jit
def _write(shapes: Shapes, work: Any, at: Any, s_out: Any, store_o: Any, out: Any, final: Float32):
    """Output and LSE of an item."""
    call, g = work.call, work.g
    factor, lse = softmax.finish(work.m, work.l, work.unit, final)
    softmax.rescale(work.acc, factor)
    rounded = cute.make_fragment_like(work.acc, shapes.element)
    rounded.store(work.acc.load().to(shapes.element))
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), shapes.element)
    tiled = cute.make_tiled_copy_C(atom, work.mma_pv)
    own = tiled.get_slice(softmax.fresh(work.thread))
    if work.thread < WARP:  # the store before this one has read the shared tile
        cute.arch.cp_async_bulk_wait_group(0, read=True)
    cute.arch.barrier(barrier_id=OUTPUT_BARRIER + g, number_of_threads=GROUP)
    cute.copy(tiled, own.retile(rounded), own.partition_D(s_out[None, None, g]))
    cute.arch.fence_view_async_shared()
    cute.arch.barrier(barrier_id=OUTPUT_BARRIER + g, number_of_threads=GROUP)
    if work.thread < WARP:
        to, source = tile_ways(shapes, store_o, out, s_out, ROWS, at.head, at.batch)
        cute.copy(store_o, source[None, g], to[None, at.row // ROWS])
        cute.arch.cp_async_bulk_commit_group()
    if const_expr(shapes.variant.lse):
        places, lse_rows = softmax.coordinates(work.thr_qk, shapes.columns), call.lse
        for r in cutlass.range_constexpr(2):
            t = at.row + places[r, 0][0]
            if places[r, 0][1] == 0 and t < call.queries:
                lse_rows[at.batch, at.head, t] = lse[r]
