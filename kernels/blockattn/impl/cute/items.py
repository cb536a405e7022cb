"""Which work a program does, and where in its pair's list a group finds its entries (CuTe DSL).

An item is a pair of neighbouring query blocks of one head, or three where groups vote alone. Its
list holds tiles of block summaries (with a tail), then key tiles of both groups, then those of one
alone, in turn while both have some. Without blocks every key tile is of all groups.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from blockattn.impl.cute.shapes import BLOCK, KINDS, ROWS, Shapes


@cute.jit
def item_place(shapes: Shapes, call: Any, item: Int32):
    """(pair, head, batch) of an item; programs that run together share a head."""
    pair, line = item % call.pairs, item // call.pairs
    if const_expr(shapes.variant.causal and not shapes.variant.routed):
        pair = call.pairs - 1 - pair  # the longest rows first
    return pair, line % call.heads, line // call.heads


@cute.jit
def entry_counts(shapes: Shapes, call: Any, place: Any):
    """Entries of both groups, of the first alone and of the second alone, of an item."""
    pair, head, batch = place
    both = cute.ceil_div(call.keys, shapes.columns)
    first, second = Int32(0), Int32(0)
    if const_expr(shapes.variant.routed):
        count = call.pair_count[batch, head, pair, None]
        both, first, second = count[0], count[1], count[2]
    elif const_expr(shapes.variant.causal):
        tiles = both
        seen = cute.ceil_div(shapes.groups * ROWS * (pair + 1), shapes.columns)
        if const_expr(shapes.columns == ROWS):  # the last tile is past every row of the first
            both = cutlass.min(tiles, seen - 1)
            second = cutlass.min(tiles, seen) - both
        else:
            both = cutlass.min(tiles, seen)
    return both, first, second


def tail_tiles(shapes: Shapes, call: Any) -> Any:
    """Tiles of block summaries."""
    if not shapes.variant.tail:
        return 0
    return cute.ceil_div(cute.ceil_div(call.keys, BLOCK), shapes.columns)


@cute.jit
def entry_kind(place: Int32, both: Int32, first: Int32, second: Int32) -> Int32:
    """Whose the entry at a place is: 0 of both groups, 1 of the first, 2 of the second."""
    alone = place - both
    kind = Int32(0)
    if alone >= 0:
        longer = 2 if second > first else 1
        kind = 1 + (alone & 1) if alone < 2 * cutlass.min(first, second) else longer
    return kind


@cute.jit
def next_entry(shapes: Shapes, at: Any, n: Int32, stage: Int32, phases: Int32):
    """The group's own entry number ``n``, which lies behind the one in ``stage``.

    Between the entries of one group alone lies one of the other, as long as both have some.

    Returns:
        The entry as (stage, place of its barrier, phase), and the phases after it. A group takes no
        part in the entries of the other, so it cannot know by counting which phase a stage is in:
        each kind of entry has its own barrier in a stage, and the group keeps the phase of those
        that it waits for. An entry past the last one leaves the phases alone.
    """
    if const_expr(not shapes.ahead):  # every entry is one of all groups
        stage = stage + 1 if stage + 1 < shapes.stages else Int32(0)
        phase = phases >> stage & 1
        if n < at.total:
            phases = phases ^ (1 << stage)
        return (stage, stage * KINDS, phase), phases
    alone = Int32(1) if n >= at.both else Int32(0)
    alternating = n - at.both - 1 + at.group
    stage += 1
    if alternating >= 0 and alternating < at.fewer:
        stage += 1
    if stage >= shapes.stages:
        stage -= shapes.stages
    bit = stage * 2 + alone
    phase = phases >> bit & 1
    if n < at.total:
        phases = phases ^ (1 << bit)
    return (stage, stage * KINDS + alone * (1 + at.group), phase), phases
