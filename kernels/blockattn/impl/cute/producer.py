"""The warp that fetches Q, block summaries and key tiles through the TMA (CuTe DSL)."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from blockattn.impl.cute.items import entry_counts, entry_kind, item_place, tail_tiles
from blockattn.impl.cute.shapes import GROUPS, KINDS, READERS, ROWS, SLOTS, WARP, Shapes


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
def produce(shapes: Shapes, call: Any, s_q: Any, s_k: Any, s_v: Any, sources: Any):
    """Every item in turn, as its stages come free."""
    (load_q, q), (load_k, k), (load_v, v), (load_mean, mean), (load_sum, v_sum) = sources
    variant, columns = shapes.variant, shapes.columns
    lane = cute.arch.lane_idx()
    item, taken = cute.arch.block_idx()[0], Int32(0)
    following = cute.arch.shuffle_sync(_next_item(call, lane), 0)
    pair, head, batch = item_place(shapes, call, item)
    both, first, second = entry_counts(shapes, call, pair, head, batch)
    use, q_phase = Int32(0), Int32(1)
    while item < call.items:
        _announce(call, lane, taken, 1, pair, head, batch, both, first, second)
        # On their way while this item is fetched: the item after the next, the counts of the next.
        later = _next_item(call, lane)
        last = cutlass.min(following, call.items - 1)
        pair_next, head_next, batch_next = item_place(shapes, call, last)
        both_next, first_next, second_next = entry_counts(
            shapes, call, pair_next, head_next, batch_next
        )
        key_head = head // call.group
        from_q, to_q = tile_ways(shapes, load_q, q, s_q, ROWS, head, batch)
        from_k, to_k = tile_ways(shapes, load_k, k, s_k, columns, key_head, batch)
        from_v, to_v = tile_ways(shapes, load_v, v, s_v, columns, key_head, batch)
        for g in cutlass.range_constexpr(GROUPS):
            _fetch_query(shapes, call, lane, g, q_phase, load_q, from_q, to_q, pair)
        q_phase ^= 1
        if const_expr(variant.tail):
            from_mean, _ = tile_ways(shapes, load_mean, mean, s_k, columns, key_head, batch)
            from_sum, _ = tile_ways(shapes, load_sum, v_sum, s_v, columns, key_head, batch)
            for n in cutlass.range(tail_tiles(shapes, call), unroll=1):
                _fetch(
                    shapes, call, lane, use, n, Int32(0),
                    load_mean, from_mean, to_k, load_sum, from_sum, to_v,
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
            _fetch(
                shapes, call, lane, use, tile, kind,
                load_k, from_k, to_k, load_v, from_v, to_v,
            )  # fmt: skip
            use += 1
        taken += 1
        item = following
        following = cute.arch.shuffle_sync(later, 0)
        pair, head, batch = pair_next, head_next, batch_next
        both, first, second = both_next, first_next, second_next
    _announce(call, lane, taken, 0, pair, head, batch, both, first, second)


@cute.jit
def _next_item(call: Any, lane: Int32) -> Int32:
    """The next item that nobody has taken, in lane 0: lists differ in length."""
    item = Int32(0)
    if lane == 0:
        item = cute.arch.grid_dim()[0] + cute.arch.atomic_add(call.counter.iterator, Int32(1))
    return item


@cute.jit
def _announce(
    call: Any, lane: Int32, taken: Int32, is_item: int, pair: Int32, head: Int32, batch: Int32,
    both: Int32, first: Int32, second: Int32,
):  # fmt: skip
    """Tells the groups which item is fetched now, or that there is none any more."""
    items, slot = call.item, taken % SLOTS
    cute.arch.mbarrier_wait(call.bars.item_empty + slot, taken // SLOTS & 1 ^ 1)
    if lane == 0:
        items[0, slot] = is_item
        items[1, slot], items[2, slot], items[3, slot] = pair, head, batch
        items[4, slot], items[5, slot], items[6, slot] = both, first, second
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
    cute.copy(load, source[None, pair * GROUPS + g], target[None, g], tma_bar_ptr=full)


@cute.jit
def _fetch(
    shapes: Shapes, call: Any, lane: Int32, use: Int32, tile: Int32, kind: Int32,
    load_k: Any, from_k: Any, to_k: Any, load_v: Any, from_v: Any, to_v: Any,
):  # fmt: skip
    """K and V of a use; of an entry of one group it releases the other's share."""
    bars, entry = call.bars, call.entry
    stage, phase = use % shapes.stages, use // shapes.stages & 1 ^ 1
    size = shapes.columns * shapes.variant.dim * 2
    for of_stage, of_entry, load, source, target in (
        (bars.k_empty, bars.k_full, load_k, from_k, to_k),
        (bars.v_empty, bars.v_full, load_v, from_v, to_v),
    ):
        empty, full = of_stage + stage, of_entry + stage * KINDS + kind
        cute.arch.mbarrier_wait(empty, phase)
        if lane == 0:
            if const_expr(load is load_k):
                entry[stage] = tile
            cute.arch.mbarrier_arrive_and_expect_tx(full, size)
            if kind != 0:
                cute.arch.mbarrier_arrive(empty, arrive_count=READERS // GROUPS)
        cute.copy(load, source[None, tile], target[None, stage], tma_bar_ptr=full)
