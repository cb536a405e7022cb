"""The warp groups that compute: products, masks, vote, softmax and output of an item (CuTe DSL).

The loop is staggered: an entry's scores are multiplied together with the values of the entry
before, whose product then runs under the softmax. With a vote it is left out where that entry was
dropped. Nothing is in flight at the end of a step: ptxas would serialise every product otherwise.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warp, warpgroup
from quack import layout_utils, sm90_utils

from blockattn.impl.cute import softmax
from blockattn.impl.cute.items import (
    entry_counts,
    item_place,
    own_entry,
    shared_entry,
    tail_tiles,
)
from blockattn.impl.cute.producer import tile_ways
from blockattn.impl.cute.shapes import BLOCK, GROUP, GROUPS, ROWS, WARP, Shapes

OUTPUT_BARRIER = 1  # and one more for the second group
VOTE_BARRIER = 3
VALUES_BARRIER = 5
TURN_BARRIER = 7
NONE = -1  # no entry


@cute.jit
def consume(
    shapes: Shapes, call: Any, s_q: Any, s_out: Any, s_k: Any, s_v: Any, store_o: Any, out: Any,
    unit: Float32, final: Float32,
):  # fmt: skip
    """The 64 query rows of a group of every item in turn."""
    bars = call.bars
    work = _new_work(shapes, call, s_q, s_k, s_v, unit)
    g = work.g
    item, step = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
    use, q_phase, phases = Int32(0), Int32(0), Int32(0)
    tail = tail_tiles(shapes, call)
    if const_expr(shapes.turns):
        if g == 1:
            _pass_turn(work)  # the first group begins
    pair, head, batch = item_place(shapes, call, item)
    both, first, second = entry_counts(shapes, call, pair, head, batch)
    while item < call.items:
        at = SimpleNamespace(
            head=head, batch=batch, row=(pair * GROUPS + g) * ROWS, group=g,
            use=use + tail, both=both, first=first, second=second,
        )  # fmt: skip
        own = both + (first if g == 0 else second)
        use += tail + both + first + second
        # Counts of the next item: they are on their way while this one is worked through.
        item += step
        following = cutlass.min(item, call.items - 1)
        pair, head, batch = item_place(shapes, call, following)
        both, first, second = entry_counts(shapes, call, pair, head, batch)
        softmax.clear(work.m, work.l, work.acc)
        if const_expr(shapes.variant.skip is not None):
            work.peak.fill(-Float32.inf)
        cute.arch.mbarrier_wait(bars.q_full + g, q_phase)
        if const_expr(shapes.query_rs):
            _read_query(shapes, work, s_q)
            _release(work, bars.q_empty + g)
        phases = _walk(shapes, work, at, own, tail, phases)
        if const_expr(not shapes.query_rs):
            _release(work, bars.q_empty + g)
        _write(shapes, work, at, s_out, store_o, out, final)
        q_phase ^= 1
    if work.thread < WARP:
        cute.arch.cp_async_bulk_wait_group(0, read=True)


@cute.jit
def _walk(shapes: Shapes, work: Any, at: Any, own: Int32, tail: Any, phases: Int32) -> Int32:
    """Folds every entry of an item into the softmax state and the accumulator."""
    start, before, void = Int32(0), Int32(NONE), Int32(0)
    if const_expr(shapes.variant.tail):
        before, phases = shared_entry(shapes, at.use - tail, phases)
        void = _first(shapes, work, at, before, True)
        for n in cutlass.range(1, tail, unroll=1):
            now, phases = shared_entry(shapes, at.use - tail + n, phases)
            void = _next(shapes, work, at, now, before, void, n, True)
            before = now
    elif const_expr(shapes.variant.skip is None):
        if own > 0:
            start = Int32(1)
            before, phases = own_entry(shapes, at, Int32(0), phases)
            void = _first(shapes, work, at, before, False)
    for i in cutlass.range(start, own, unroll=1):
        now, phases = own_entry(shapes, at, i, phases)
        if const_expr(shapes.variant.skip is None):
            turn = i < at.both + cutlass.min(at.first, at.second)
            void = _next(shapes, work, at, now, before, void, None, turn)
            before = now
        else:
            before, void = _next_voted(shapes, work, at, now, before, void)
    if before >= 0:
        _multiply_values(shapes, work, before, void)
        warpgroup.wait_group(0)
        _release(work, work.call.bars.v_empty + (before >> 3))
    return phases


def _new_work(shapes: Shapes, call: Any, s_q: Any, s_k: Any, s_v: Any, unit: Float32) -> Any:
    """What a thread works with: operands, accumulator, softmax state."""
    thread = cute.arch.thread_idx()[0] - GROUP
    g = cute.arch.make_warp_uniform(thread // GROUP)
    thread = thread % GROUP
    columns, dim = shapes.columns, shapes.variant.dim
    query = "RS" if shapes.query_rs else "SS"
    mma_qk = sm90_utils.make_tiled_mma(shapes.element, "K", "K", columns, query)
    mma_pv = sm90_utils.make_tiled_mma(shapes.element, "K", "MN", dim, "RS")
    # Operands in shared memory are the same for every thread of a group.
    _, q, k = sm90_utils.partition_fragment_ABC(
        mma_qk.get_slice(0), (ROWS, columns, dim), s_q[None, None, g], s_k
    )
    acc, p, v = sm90_utils.partition_fragment_ABC(
        mma_pv.get_slice(0), (ROWS, dim, columns), None, layout_utils.transpose_view(s_v)
    )
    return SimpleNamespace(
        call=call, g=g, thread=thread, lane=cute.arch.lane_idx(), unit=unit,
        mma_qk=mma_qk, mma_pv=mma_pv, thr_qk=mma_qk.get_slice(thread),
        q=q, k=k, v=v, s_v=s_v, p=p, acc=acc,
        m=softmax.per_row(), l=softmax.per_row(), peak=softmax.per_row(),
    )  # fmt: skip


@cute.jit
def _pass_turn(work: Any):
    """The other group may start its products."""
    cute.arch.barrier_arrive(barrier_id=TURN_BARRIER + 1 - work.g, number_of_threads=GROUPS * GROUP)


@cute.jit
def _release(work: Any, barrier: Any):
    """A warp is done reading what the barrier guards."""
    if work.lane == 0:
        cute.arch.mbarrier_arrive(barrier)


@cute.jit
def _read_query(shapes: Shapes, work: Any, s_q: Any):
    """Q of the group into registers, as an operand."""
    atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), shapes.element)
    tiled = cute.make_tiled_copy_A(atom, work.mma_qk)
    own = tiled.get_slice(work.thread)
    cute.copy(tiled, own.partition_S(s_q[None, None, work.g]), own.retile(work.q))


@cute.jit
def _multiply_keys(shapes: Shapes, work: Any, entry: Int32) -> Any:
    """Starts Q K of an entry and gives its scores, which are there after a wait."""
    cute.arch.mbarrier_wait(work.call.bars.k_full + (entry >> 1), entry & 1)
    return sm90_utils.gemm_zero_init(
        work.mma_qk, (ROWS, shapes.columns), work.q, work.k, B_idx=entry >> 3
    )


@cute.jit
def _take(work: Any, entry: Int32) -> Int32:
    """The key tile of an entry whose scores are there; its K is released."""
    tile = work.call.entry[entry >> 3]
    _release(work, work.call.bars.k_empty + (entry >> 3))
    return tile


@cute.jit
def _multiply_values(shapes: Shapes, work: Any, entry: Int32, void: Int32):
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
    values, half = work.s_v, shapes.variant.dim // 2
    if void != 0:
        for j in cutlass.range_constexpr(half):
            values[work.thread // 2, work.thread % 2 * half + j, stage] = shapes.element(0.0)
    cute.arch.fence_view_async_shared()
    cute.arch.barrier(barrier_id=VALUES_BARRIER + work.g, number_of_threads=GROUP)


@cute.jit
def _mask(shapes: Shapes, work: Any, at: Any, scores: Any, tile: Int32) -> Int32:
    """Hides what a query must not see; gives whether the thread's row of values is padding."""
    call = work.call
    start = tile * shapes.columns
    valid = call.keys - start
    if const_expr(shapes.variant.lengths):
        valid = cutlass.min(valid, call.block_lengths[tile])
    if valid < shapes.columns:
        softmax.keep_columns(scores, work.thr_qk, valid)
    if const_expr(shapes.variant.causal):
        if at.row - start < shapes.columns - 1:
            softmax.keep_past(scores, work.thr_qk, at.row - start)
    return Int32(1) if work.thread // 2 >= valid else Int32(0)


@cute.jit
def _softmax(shapes: Shapes, work: Any, at: Any, scores: Any, tile: Int32, tail: Any, shrink: Any):
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
        void = _mask(shapes, work, at, scores, tile)
    own = softmax.largest(scores)
    raised = softmax.follow(own, work.m, work.l, work.unit, shrink)
    softmax.fold(scores, work.m, work.l, work.unit, weights)
    if const_expr(shapes.variant.skip is not None):
        _rise(work, own)
    return raised, void


def _rise(work: Any, own: Any) -> None:
    """The exact running maximum, which a vote compares with."""
    for r in range(2):
        work.peak[r] = cute.arch.fmax(work.peak[r], own[r])


@cute.jit
def _first(shapes: Shapes, work: Any, at: Any, now: Int32, is_tail: bool) -> Int32:
    """The first entry of an item: scores and probabilities; gives whether a value is padding."""
    scores = _multiply_keys(shapes, work, now)
    tail = None
    if const_expr(is_tail):
        tail = _weights(shapes, work, at, Int32(0))
    warpgroup.wait_group(0)
    tile = _take(work, now)
    _, void = _softmax(shapes, work, at, scores, tile, tail, softmax.per_row())
    _round(shapes, work, scores)
    return void


@cute.jit
def _next(
    shapes: Shapes, work: Any, at: Any, now: Int32, before: Int32, void: Int32, n: Any, turn: Any
) -> Int32:
    """Any other entry, while the values of the one before are multiplied; ``n`` counts a tail.

    With ``turn`` the other group has an entry of the same number, and their products alternate.
    """
    if const_expr(shapes.turns):
        if turn:
            cute.arch.barrier(barrier_id=TURN_BARRIER + work.g, number_of_threads=GROUPS * GROUP)
    scores = _multiply_keys(shapes, work, now)
    _multiply_values(shapes, work, before, void)
    if const_expr(shapes.turns):
        if turn:
            _pass_turn(work)
    tail, shrink = None, softmax.per_row()
    if const_expr(n is not None):
        tail = _weights(shapes, work, at, n)
    warpgroup.wait_group(1)
    tile = _take(work, now)
    raised, void = _softmax(shapes, work, at, scores, tile, tail, shrink)
    warpgroup.wait_group(0)
    _release(work, work.call.bars.v_empty + (before >> 3))
    if raised != 0:
        softmax.rescale(work.acc, shrink)
    _round(shapes, work, scores)
    return void


@cute.jit
def _next_voted(shapes: Shapes, work: Any, at: Any, now: Int32, before: Int32, void: Int32):
    """An entry that a vote may drop.

    Returns:
        The entry whose values wait to be multiplied, if any, and whether a value is padding.
    """
    scores = _multiply_keys(shapes, work, now)
    if before >= 0:
        _multiply_values(shapes, work, before, void)
        warpgroup.wait_group(1)
    else:
        warpgroup.wait_group(0)
    tile, shrink, raised = _take(work, now), softmax.per_row(), Int32(0)
    void = _mask(shapes, work, at, scores, tile)
    own = softmax.largest(scores)
    keep = _keep(shapes, work, at, own)
    if keep != 0:
        _rise(work, own)
        raised = softmax.follow(own, work.m, work.l, work.unit, shrink)
        softmax.fold(scores, work.m, work.l, work.unit, None)
    warpgroup.wait_group(0)
    if before >= 0:
        _release(work, work.call.bars.v_empty + (before >> 3))
    before = now
    if keep != 0:
        if raised != 0:
            softmax.rescale(work.acc, shrink)
        _round(shapes, work, scores)
    else:
        before = Int32(NONE)
        _drop(shapes, work, at, now, tile)
    return before, void


@cute.jit
def _keep(shapes: Shapes, work: Any, at: Any, own: Any) -> Int32:
    """Whether a row of the voting tile gains too much, in base-2 units, to drop it."""
    places = softmax.coordinates(work.thr_qk, shapes.columns)
    objects = Int32(0)
    for r in cutlass.range_constexpr(2):
        gain = -Float32.inf if own[r] == -Float32.inf else (own[r] - work.peak[r]) * work.unit
        alive = at.row + places[r, 0][0] < work.call.queries
        if alive and not (gain < work.call.limit):
            objects = Int32(1)
    if const_expr(shapes.variant.skip == BLOCK):
        return softmax.vote(objects, VOTE_BARRIER + work.g, GROUP)
    return softmax.vote(objects, Int32(VOTE_BARRIER), GROUPS * GROUP)


@cute.jit
def _drop(shapes: Shapes, work: Any, at: Any, entry: Int32, tile: Int32):
    """Releases the values of a dropped entry and marks it in the map."""
    dropped = work.call.dropped
    cute.arch.mbarrier_wait(work.call.bars.v_full + (entry >> 1), entry & 1)
    _release(work, work.call.bars.v_empty + (entry >> 3))
    if work.thread == 0 and at.row < work.call.queries:
        dropped[at.batch, at.head, at.row // shapes.variant.skip, tile] = cutlass.Int8(1)


def _round(shapes: Shapes, work: Any, scores: Any) -> None:
    """Probabilities in the inputs' dtype, as an operand."""
    work.p.store(layout_utils.reshape_acc_to_frgA(scores).load().to(shapes.element))


@cute.jit
def _weights(shapes: Shapes, work: Any, at: Any, n: Int32):
    """Keys that each summary of tile ``n`` stands for, none where its block is exact; padding."""
    call, columns = work.call, shapes.columns
    blocks = cute.size(call.tail_lengths)
    places = softmax.coordinates(work.thr_qk, columns)
    each = columns // softmax.SHARERS
    weights = cute.make_rmem_tensor(each, Float32)
    line = cutlass.min(at.row // BLOCK, call.words.shape[2] - 1)
    for half in cutlass.range_constexpr(columns // 32):
        place, word = n * (columns // 32) + half, Int32(-1)
        if place < call.words.shape[3]:
            word = call.words[at.batch, at.head, line, place]
        for j in cutlass.range_constexpr(half * 8, half * 8 + 8):
            column, length = n * columns + places[0, j][1], Int32(0)
            if column < blocks:
                length = call.tail_lengths[column]
            weights[j] = Float32(0 if (word >> column % 32) & 1 else length)
    void = Int32(0)
    if const_expr(shapes.variant.lengths):
        mine = n * columns + work.thread // 2
        if mine < blocks:
            void = Int32(1) if call.tail_lengths[mine] == 0 else Int32(0)
    return weights, void


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
    own = tiled.get_slice(work.thread)
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
