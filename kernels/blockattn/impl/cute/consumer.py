"""The warp groups that compute: Q, walk over the entries, and output of every item (CuTe DSL)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup

from blockattn.impl.cute import softmax, summaries, wgmma
from blockattn.impl.cute.ahead import new_scores, walk_ahead
from blockattn.impl.cute.alone import walk_alone
from blockattn.impl.cute.items import next_entry, tail_tiles
from blockattn.impl.cute.producer import announced, tile_ways
from blockattn.impl.cute.shapes import BLOCK, GROUP, OUTPUT_BARRIER, ROWS, WARP, Shapes
from blockattn.impl.cute.steps import free_rows, start_keys, wait_for_keys
from blockattn.impl.cute.together import walk_together
from blockattn.impl.cute.walk import pass_turn, walk


@cute.jit
def consume(
    shapes: Shapes, call: Any, s_q: Any, s_k: Any, s_v: Any, store_o: Any, out: Any, unit: Float32,
    final: Float32,
):  # fmt: skip
    """The 64 query rows of a group of every item in turn."""
    work = _new_work(shapes, call, s_q, s_k, s_v, unit, final)
    target = SimpleNamespace(shared=s_q, store=store_o, out=out)
    if const_expr(shapes.ahead):
        _consume_ahead(shapes, work, s_q, target)
    else:
        _consume(shapes, work, target)
    if work.thread < WARP:
        cute.arch.cp_async_bulk_wait_group(0, read=True)


@cute.jit
def _consume(shapes: Shapes, work: Any, target: Any):
    """One item after the other; the output lies where Q was."""
    call, g = work.call, work.g
    use, q_phase, phases, taken = Int32(0), Int32(0), Int32(0), Int32(0)
    work.votes[0] = Int32(0)
    skip = shapes.variant.skip
    if const_expr(skip is None):
        if g == 1:
            pass_turn(work)  # the first group begins
    is_item, place, counts = announced(call, work.lane, taken)
    while is_item != 0:
        at = _rows(shapes, work, place, counts, use)
        softmax.clear(work)
        cute.arch.mbarrier_wait(call.bars.q_full + g, q_phase)
        if const_expr(skip is None):
            phases = walk(shapes, work, at, phases)
        elif const_expr(skip == BLOCK):
            phases = walk_alone(shapes, work, at, phases)
        else:
            phases = walk_together(shapes, work, at, phases)
        softmax.finish(work)
        _write(shapes, work, at, target)
        free_rows(work)
        use = at.use_after
        q_phase ^= 1
        taken += 1
        is_item, place, counts = announced(call, work.lane, taken)


@cute.jit
def _consume_ahead(shapes: Shapes, work: Any, s_q: Any, target: Any):
    """The first scores of an item are multiplied while the item before is written."""
    call = work.call
    use, phases, taken = Int32(0), Int32(0), Int32(0)
    scores = new_scores(shapes, work)
    is_item, place, counts = announced(call, work.lane, taken)
    at = _rows(shapes, work, place, counts, use)
    entry, phases = _begin(shapes, work, s_q, at, is_item, taken, phases, scores[0])
    warpgroup.wait_group(0)
    while is_item != 0:
        at = _rows(shapes, work, place, counts, use)
        softmax.clear(work)
        phases = walk_ahead(shapes, work, at, entry, phases, scores)
        # From here on the group holds no stage: what it waits for may need every one of them.
        use = at.use_after
        taken += 1
        is_item, place, counts = announced(call, work.lane, taken)
        after = _rows(shapes, work, place, counts, use)
        entry, phases = _begin(shapes, work, s_q, after, is_item, taken, phases, scores[0])
        _write(shapes, work, at, target)
        warpgroup.wait_group(0)
        softmax.move(scores[0], scores[0])  # read from here on, behind the wait


def _rows(shapes: Shapes, work: Any, place: Any, counts: Any, use: Int32) -> Any:
    """The query rows of the group of an item, and its entries.

    Returns:
        batch, head, group; row: the first of the 64; marks: their row of the map of dropped tiles,
        or None. In entries of the ring: use, use_after: number of the first one of this item and of
        the next; tail: summaries; both: of both groups, summaries included; fewer: of one group
        alone, in the group that has fewer; total: its own.
    """
    (pair, head, batch), (both, first, second) = place, counts
    tail = tail_tiles(shapes, work.call)
    row, marks = (pair * shapes.groups + work.g) * ROWS, None
    if shapes.variant.skip is not None:
        marks = work.call.dropped[batch, head, row // shapes.variant.skip, None]
        marks = cute.make_tensor(softmax.pinned_pointer(marks.iterator), marks.layout)
    return SimpleNamespace(
        marks=marks, head=head, batch=batch, row=row, group=work.g, tail=tail,
        use=use, use_after=use + tail + both + first + second, both=tail + both,
        fewer=cutlass.min(first, second), total=tail + both + _own(work.g, first, second),
    )  # fmt: skip


@cute.jit
def _own(g: Int32, first: Int32, second: Int32) -> Int32:
    return first if g == 0 else second


@cute.jit
def _begin(
    shapes: Shapes, work: Any, s_q: Any, at: Any, is_item: Int32, taken: Int32, phases: Int32,
    scores: Any,
):  # fmt: skip
    """Reads Q of item number ``taken`` and starts its first scores, if there is such an item.

    The product is started in any case: ptxas would serialise one under a condition.

    Returns:
        The first entry; the phases after it.
    """
    if const_expr(shapes.variant.tail):
        summaries.begin(work, at)
    if is_item != 0:
        cute.arch.mbarrier_wait(work.call.bars.q_full + work.g, taken & 1)
    _read_query(shapes, work, s_q)
    entry, phases = next_entry(shapes, at, Int32(0), at.use % shapes.stages - 1, phases)
    if is_item != 0 and at.total > 0:
        wait_for_keys(work, entry)
    start_keys(work, entry, scores)
    return entry, phases


def _new_work(
    shapes: Shapes, call: Any, s_q: Any, s_k: Any, s_v: Any, unit: Float32, final: Float32
) -> Any:
    """What a thread works with: operands, accumulator, softmax state.

    Returns:
        g, thread, lane: group, and thread of it. unit: of base-2 logits a raw score; limit: of the
        vote, in raw scores. Of both rows of the thread: m, l: reference and its share of the sum;
        peak: running maximum of a vote; factor, lse: result. ragged: the key tile that is not full,
        or -1; whole: tiles of summaries in front of the first short block. bits: words of the route
        in use and on their way; votes: how many were cast. The rest are operands of products.
    """
    thread = cute.arch.thread_idx()[0] - GROUP
    g = cute.arch.make_warp_uniform(thread // GROUP)
    thread = thread % GROUP
    columns, dim = shapes.columns, shapes.variant.dim
    registers, major = warpgroup.OperandSource.RMEM, OperandMajorMode
    query = registers if shapes.ahead else warpgroup.OperandSource.SMEM
    mma_qk = wgmma.tiled_mma(shapes.element, columns, query, major.K)
    mma_pv = wgmma.tiled_mma(shapes.element, dim, registers, major.MN)
    # Operands in shared memory are the same for every thread of a group.
    qk, pv = mma_qk.get_slice(0), mma_pv.get_slice(0)
    rows = qk.partition_shape_A((ROWS, dim)) if shapes.ahead else qk.partition_A(s_q[None, None, g])
    q, k = qk.make_fragment_A(rows), qk.make_fragment_B(qk.partition_B(s_k))
    p = pv.make_fragment_A(pv.partition_shape_A((ROWS, columns)))
    v = pv.make_fragment_B(pv.partition_B(wgmma.reordered(s_v, 1, 0, 2)))
    acc = cute.make_rmem_tensor(pv.partition_shape_C((ROWS, dim)), Float32)
    lane, whole, limit = cute.arch.lane_idx(), 0, None
    if shapes.variant.tail:
        whole = summaries.whole_tiles(shapes, call, lane)
    if shapes.variant.skip is not None:
        limit = softmax.pinned(call.limit / unit)  # in units of scores
    return SimpleNamespace(
        call=call, g=g, thread=thread, lane=lane, unit=softmax.pinned(unit), final=final,
        ragged=_ragged_tile(call.keys, columns), whole=whole, bits=cute.make_rmem_tensor(2, Int32),
        limit=limit, votes=cute.make_rmem_tensor(1, Int32),
        mma_qk=mma_qk, mma_pv=mma_pv, thr_qk=mma_qk.get_slice(thread),
        q=q, k=k, v=v, s_v=s_v, p=p, acc=acc,
        **{name: softmax.per_row() for name in ("m", "l", "peak", "factor", "lse")},
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
def _write(shapes: Shapes, work: Any, at: Any, target: Any):
    """Output and LSE of an item."""
    call, g = work.call, work.g
    softmax.rescale(work.acc, work.factor)
    rounded = cute.make_fragment_like(work.acc, shapes.element)
    rounded.store(work.acc.load().to(shapes.element))
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), shapes.element)
    tiled = cute.make_tiled_copy_C(atom, work.mma_pv)
    own = tiled.get_slice(softmax.fresh(work.thread))
    # Products of other warps may still read Q, or the store before this one what it finds there.
    cute.arch.barrier(barrier_id=OUTPUT_BARRIER + g, number_of_threads=GROUP)
    cute.copy(tiled, own.retile(rounded), own.partition_D(target.shared[None, None, g]))
    cute.arch.fence_view_async_shared()
    cute.arch.barrier(barrier_id=OUTPUT_BARRIER + g, number_of_threads=GROUP)
    if work.thread < WARP:
        store, shared = target.store, target.shared
        to, source = tile_ways(shapes, store, target.out, shared, ROWS, at.head, at.batch)
        cute.copy(store, source[None, g], to[None, at.row // ROWS])
        cute.arch.cp_async_bulk_commit_group()
    if const_expr(shapes.variant.lse):
        places, lse_rows = softmax.coordinates(work.thr_qk, shapes.columns), call.lse
        for r in cutlass.range_constexpr(2):
            t = at.row + places[r, 0][0]
            if places[r, 0][1] == 0 and t < call.queries:
                lse_rows[at.batch, at.head, t] = work.lse[r]
