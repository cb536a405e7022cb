"""The warps that fetch Q and K, and V, or their block summaries, through the TMA (CuTe DSL)."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import cpasync
from cutlass.cutlass_dsl import T, dsl_user_op

from blockattn.impl.cute.items import entry_counts, entry_kind, item_place, tail_tiles
from blockattn.impl.cute.shapes import KINDS, ROWS, SLOTS, WARP, WARPS, WORDS, Shapes


def tile_ways(
    shapes: Shapes, atom: Any, x: Any, shared: Any, rows: int, head: Int32, batch: Int32
) -> tuple[Any, Any]:
    """Tiles of ``rows`` tokens of a head, in global and in shared memory, for the copy ``atom``."""
    tiles = cute.local_tile(x[None, None, head, batch], (rows, shapes.variant.dim), (None, 0))
    inner, outer = cpasync.tma_partition(
        atom,
        0,
        cute.make_layout(1),
        cute.group_modes(shared, 0, 2),
        cute.group_modes(tiles, 0, 2),
    )
    return outer, inner


@cute.jit
def produce_keys(shapes: Shapes, call: Any, s_q: Any, s_k: Any, sources: Any):
    """Q and K of every item in turn, as their stages come free; announces the items."""
    (load_q, q), (load_k, k), (load_mean, mean) = sources
    lane = cute.arch.lane_idx()
    item, taken = cute.arch.block_idx()[0], Int32(0)
    following = cute.arch.shuffle_sync(_next_item(call, lane), 0)
    place = item_place(shapes, call, item)
    counts = entry_counts(shapes, call, place)
    use, q_phase = Int32(0), Int32(1)
    while item < call.items:
        _announce(call, lane, taken, 1, place, counts)
        # On their way while this item is fetched: the item after the next, the counts of the next.
        later = _next_item(call, lane)
        place_next = item_place(shapes, call, cutlass.min(following, call.items - 1))
        counts_next = entry_counts(shapes, call, place_next)
        pair, head, batch = place
        from_q, to_q = tile_ways(shapes, load_q, q, s_q, ROWS, head, batch)
        for g in cutlass.range_constexpr(shapes.groups):
            _fetch_query(shapes, call, lane, g, q_phase, load_q, from_q, to_q, pair)
        q_phase ^= 1
        use = _fetch_entries(
            shapes, call, lane, use, place, counts,
            call.bars.k_empty, call.bars.k_full, s_k, (load_k, k), (load_mean, mean), call.entry,
        )  # fmt: skip
        taken += 1
        item = following
        following = cute.arch.shuffle_sync(later, 0)
        place, counts = place_next, counts_next
    _announce(call, lane, taken, 0, place, counts)


@cute.jit
def produce_values(shapes: Shapes, call: Any, s_v: Any, sources: Any):
    """V of every announced item; in a warp of its own, as V stays longer in its ring than K."""
    tiles, summaries = sources
    lane, use, taken = cute.arch.lane_idx(), Int32(0), Int32(0)
    is_item, place, counts = announced(call, lane, taken)
    while is_item != 0:
        use = _fetch_entries(
            shapes, call, lane, use, place, counts,
            call.bars.v_empty, call.bars.v_full, s_v, tiles, summaries, None,
        )  # fmt: skip
        taken += 1
        is_item, place, counts = announced(call, lane, taken)


@cute.jit
def announced(call: Any, lane: Int32, taken: Int32):
    """Item number ``taken`` of this program, to be called by a warp.

    Returns:
        1, or 0 past the last item; its (pair, head, batch); its counts of entries.
    """
    slot, items = taken % SLOTS, call.item
    cute.arch.mbarrier_wait(call.bars.item_full + slot, taken // SLOTS & 1)
    found = [items[i, slot] for i in range(WORDS - 1)]
    if lane == 0:
        cute.arch.mbarrier_arrive(call.bars.item_empty + slot)
    return found[0], tuple(found[1:4]), tuple(found[4:])


@cute.jit
def _fetch_entries(
    shapes: Shapes, call: Any, lane: Int32, use: Int32, place: Any, counts: Any,
    empty: Any, full: Any, shared: Any, tiles: Any, summaries: Any, numbers: Any,
) -> Int32:  # fmt: skip
    """K, or V, of every entry of an item; gives the number of the use after them.

    ``numbers``: where the key tile of each stage is noted, or None.
    """
    pair, head, batch = place
    both, first, second = counts
    variant, columns, key_head = shapes.variant, shapes.columns, head // call.group
    load, x = tiles
    source, target = tile_ways(shapes, load, x, shared, columns, key_head, batch)
    if const_expr(variant.tail):
        load_mean, means = summaries
        mean, _ = tile_ways(shapes, load_mean, means, shared, columns, key_head, batch)
        for n in cutlass.range(tail_tiles(shapes, call), unroll=1):
            _fetch(
                shapes, lane, use, n, Int32(0), empty, full, load_mean, mean, target, numbers
            )  # fmt: skip
            use += 1
    total = both + first + second
    chunk, ahead = Int32(0), Int32(0)  # entries of 32 lanes: these and the ones after them
    if const_expr(variant.routed):
        ahead = _entries(call, batch, head, pair, lane, total)
    for n in cutlass.range(total, unroll=1):
        tile = n
        if const_expr(variant.routed):
            if n % WARP == 0:
                chunk = ahead
                ahead = _entries(call, batch, head, pair, n + WARP + lane, total)
            tile = cute.arch.shuffle_sync(chunk, n % WARP)
        kind = entry_kind(n, both, first, second)
        _fetch(shapes, lane, use, tile, kind, empty, full, load, source, target, numbers)
        use += 1
    return use


@cute.jit
def _next_item(call: Any, lane: Int32) -> Int32:
    """The next item that nobody has taken, in lane 0: lists differ in length.

    A program asks once for each of its items and once more, so that the last number of a launch is
    ``items`` + programs - 1.
    """
    item = Int32(0)
    if lane == 0:
        programs = cute.arch.grid_dim()[0]
        last = call.items + programs - 1
        item = programs + _ticket(call.counter.iterator, last)
    return item


@dsl_user_op
def _ticket(counter: Any, last: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """The next of the numbers 0 to ``last``; who takes the last one leaves the counter zero."""
    values = [counter.toint().ir_value(loc=loc, ip=ip), Int32(last).ir_value(loc=loc, ip=ip)]
    text, kind = "atom.global.inc.u32 $0, [$1], $2;", llvm.AsmDialect.AD_ATT
    return Int32(
        llvm.inline_asm(T.i32(), values, text, "=r,l,r", has_side_effects=True, asm_dialect=kind)
    )


@cute.jit
def _announce(
    call: Any, lane: Int32, taken: Int32, is_item: int, place: Any, counts: Any,
):  # fmt: skip
    """Tells the groups which item is fetched now, or that there is none any more."""
    items, slot = call.item, taken % SLOTS
    cute.arch.mbarrier_wait(call.bars.item_empty + slot, taken // SLOTS & 1 ^ 1)
    if lane == 0:
        items[0, slot] = is_item
        items[1, slot], items[2, slot], items[3, slot] = place
        items[4, slot], items[5, slot], items[6, slot] = counts
        cute.arch.mbarrier_arrive(call.bars.item_full + slot)


@cute.jit
def _entries(call: Any, batch: Int32, head: Int32, pair: Int32, place: Int32, total: Int32):
    """The key block at a lane's place of a list; 0 past its end."""
    entry = Int32(0)
    if place < total:
        entry = call.pair_index[batch, head, pair, place]
    return entry


@cute.jit
def _fetch_query(
    shapes: Shapes, call: Any, lane: Int32, g: int, phase: Int32,
    load: Any, source: Any, target: Any, pair: Int32,
):  # fmt: skip
    """The query rows of a group, once it has read those before."""
    full, empty = call.bars.q_full + g, call.bars.q_empty + g
    cute.arch.mbarrier_wait(empty, phase)
    if lane == 0:
        cute.arch.mbarrier_arrive_and_expect_tx(full, ROWS * shapes.variant.dim * 2)
    cute.copy(load, source[None, pair * shapes.groups + g], target[None, g], tma_bar_ptr=full)


@cute.jit
def _fetch(
    shapes: Shapes, lane: Int32, use: Int32, tile: Int32, kind: Int32,
    empty: Any, full: Any, load: Any, source: Any, target: Any, numbers: Any,
):  # fmt: skip
    """One tile of a ring; of an entry of one group it releases the other's share."""
    stage = use % shapes.stages
    arrived = full + stage * KINDS + kind
    cute.arch.mbarrier_wait(empty + stage, use // shapes.stages & 1 ^ 1)
    if lane == 0:
        if const_expr(numbers is not None):
            numbers[stage] = tile
        cute.arch.mbarrier_arrive_and_expect_tx(arrived, shapes.columns * shapes.variant.dim * 2)
        if kind != 0:
            cute.arch.mbarrier_arrive(empty + stage, arrive_count=WARPS)
    cute.copy(load, source[None, tile], target[None, stage], tma_bar_ptr=arrived)
