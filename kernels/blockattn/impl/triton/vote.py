"""The vote of a tile's rows on whether they need the tile (Triton).

On Hopper by named barriers, for which Triton has no words. No warp waits without need: one with a
row that objects knows the outcome, notes it in the map of tiles, arrives at a barrier and goes on;
one without waits there for the others and then reads the map. Barriers take turns by the number of
the step. A warp may get ahead of others, but by less than the stages of the pipeline, which are
fewer than the barriers in turn: a step loads into shared memory what all warps have done with.
Four warps, which share their products, gain nothing by that where nothing branches; there all meet
at one barrier that also reduces. For a branch Triton would pass a result through shared memory to
make it a scalar: it stays in a predicate instead, which a second text reads.
All that takes two rows in every thread, that is 16 for every warp. Elsewhere rows are counted.

A row with NaN among its scores objects, to that tile and to all that follow, as its maximum is NaN
from then on.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

GROUP_ROWS = 64  # queries of a warp group, in ``vote_groups``
INTERPRETED = tl.constexpr(knobs.runtime.interpret)
DROPPED = tl.constexpr(1)  # in the map of tiles, which begins as zeros; 2: a row objected
ARRIVE = """{
    .reg .pred own, any;
    .reg .b32 rows, said;
    .reg .b64 place;
    or.b32 rows, $2, $3;
    setp.ne.b32 own, rows, 0;
    vote.sync.any.pred any, own, 0xffffffff;
    cvt.s64.s32 place, $6;
    add.s64 place, place, $4;
    mov.b32 said, 2;
    @any st.global.u8 [place], said;
    @any barrier.cta.arrive $8, THREADS;
    @!any barrier.cta.sync $8, THREADS;
    @!any ld.global.u8 said, [place];
    setp.ne.b32 tile_dropped, said, 2;
    selp.b32 $0, 1, 0, tile_dropped;
    selp.b32 $1, 1, 0, tile_dropped;
    mov.b32 said, 1;
    @tile_dropped st.global.u8 [place], said;
}"""
ARRIVE_4 = tl.constexpr(ARRIVE.replace("THREADS", "128"))
ARRIVE_8 = tl.constexpr(ARRIVE.replace("THREADS", "256"))


@triton.jit
def _higher_or_nan(a, b):
    """The higher of two numbers, NaN if one of them is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _largest_or_nan(s, MASKED: tl.constexpr):
    """Largest of each row of s ``[ROWS, N]``, NaN where a row has NaN.

    With a mask NaN is looked for apart: on 10.x registers spilled in 128 x 128 tiles (Triton 3.7).
    So it is in the interpreter, for which a reduction of one's own is a Python call for each score.
    """
    if MASKED or INTERPRETED:
        some = tl.max((s != s).to(tl.int32), axis=1) != 0
        return tl.where(some, float("nan"), tl.max(s, axis=1))
    else:
        return tl.reduce(s, 1, _higher_or_nan)


@triton.jit
def _vote(s, m, unit, limit, MASKED: tl.constexpr):
    """Largest score of each row of s ``[ROWS, N]``, or NaN, and whether the row needs the tile.

    Args:
        m: running maximum, NaN after a NaN; raw units, like s.
        unit, limit: scale and logarithm of the threshold in base 2.
    """
    top = _largest_or_nan(s, MASKED)
    # Where there is nothing but -inf, nothing is lost, not even after a NaN.
    gap = tl.where(top == -float("inf"), top, (top - m) * unit)
    return top, (gap < limit) == 0


@triton.jit
def _declare_votes():
    """Declares the predicate in which votes leave their outcome; once, before any of them."""
    tl.inline_asm_elementwise(
        ".reg .pred tile_dropped; mov.u32 $0, 0;", "=r", [],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _rows_dropped(objects, map_ptr, tile, step, VOTERS: tl.constexpr):
    """1 where the tile is dropped, else 0: int32 ``[ROWS]`` of one value, or a scalar.

    Args:
        objects: int32 ``[ROWS]``, not 0 where a row needs the tile.
        map_ptr: int8, this program's row of the map of tiles; DROPPED is noted there.
        tile: its index in that row.
        step: number of the step of the loop, the same in all warps.
        VOTERS: warps that vote by barriers, 4 or 8, of 16 rows each; 0: rows are counted.
    """
    if VOTERS == 8:
        return _arrive(objects, map_ptr, tile, step, VOTERS)
    elif VOTERS == 4:
        place = (map_ptr + tile).to(tl.int64, bitcast=True)
        return tl.inline_asm_elementwise(
            """{
            .reg .pred any, first;
            .reg .b32 own, thread;
            or.b32 own, $2, $3;
            setp.ne.b32 any, own, 0;
            bar.red.or.pred any, 0, any;
            selp.b32 $0, 0, 1, any;
            selp.b32 $1, 0, 1, any;
            mov.u32 thread, %tid.x;
            setp.eq.and.u32 first, thread, 0, !any;
            @first st.global.u8 [$4], 1;
            }""",
            "=r,=r,r,r,l,l", [objects, place], dtype=tl.int32, is_pure=False, pack=2,
        )  # fmt: skip
    else:
        return _counted(objects, map_ptr + tile)


@triton.jit
def _tile_dropped(objects, map_ptr, tile, step, VOTERS: tl.constexpr):
    """The same as a scalar to branch on."""
    if VOTERS:
        _arrive(objects, map_ptr, tile, step, VOTERS)
        return tl.inline_asm_elementwise(
            "selp.b32 $0, 1, 0, tile_dropped;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        return _counted(objects, map_ptr + tile)


@triton.jit
def _arrive(objects, map_ptr, tile, step, VOTERS: tl.constexpr):
    row = map_ptr.to(tl.int64, bitcast=True)
    barrier = 1 + (step & 7)  # Triton itself uses barrier 0
    return tl.inline_asm_elementwise(
        ARRIVE_4 if VOTERS == 4 else ARRIVE_8,  # pyright: ignore[reportArgumentType]
        "=&r,=&r,r,r,l,l,r,r,r,r", [objects, row, tile, barrier],
        dtype=tl.int32, is_pure=False, pack=2,
    )  # fmt: skip


@triton.jit
def _counted(objects, target):
    dropped = (tl.sum(objects) == 0).to(tl.int32)
    tl.store(target, DROPPED, mask=dropped != 0)
    return dropped
