"""The skip vote on Hopper by warp groups, with a warp that brings keys and values (Gluon).

Plan. A program owns GROUPS x 64 queries of a head, 64 for each warp group of four warps, and one
warp more that brings keys and values. Tiles of keys go through a ring of STAGES places in shared
memory, each for K and V; Q lies there too, the state (acc, m, l) in registers. On 64 x 64 tiles
there are three groups, each with a vote of its own; on 128 x 128 two, which share one.
  bringing warp   waits until every group is done with a place, fetches the next tile into it (TMA)
  group           waits for K, multiplies, votes; where a row objects, it takes exponentials, waits
                  for V and multiplies again; then it gives the place back
A tile of K or V is read once for all queries of the program. V is fetched in any case: what the
votes will say is not known when it has to leave.
Each place has three barriers: ``k_full`` and ``v_full`` count the bytes of a tile, ``free`` the
groups that are done with it. A barrier tells a round of the ring from the next by one bit, so that
nobody may be a round ahead: K is fetched only when V of the round before has come and every group
is done with both. For a group that drops a tile does not wait for its V; the bringing warp does.
Triton lets the warps of a group meet before one thread gives a place back (a test counts that).
Within a group the vote is a barrier of its warps, which also reduces. A group with a vote of its
own waits for no other: they may be a ring apart, and one which drops a tile does not wait for one
which keeps it. Of two with a common vote, one that objects does not wait either, as the tile is
kept whatever the other says: it leaves word, arrives at a barrier and goes on. One that does not
object waits there until the other has come, and reads its word.
  Why the word is there    Every thread leaves a byte and then arrives or waits itself, so that the
                           barrier orders each byte before what those who waited read.
  Why it is of this tile   Barrier and words are those of the place. A group comes to them once a
                           round, and again only when both have given the place back, which each
                           does when all its warps have read.
  Why the other comes      Both see every tile in one order, the ragged one too. One that waits has
                           given back all tiles before, so that the other gets as far.
One past the sequence objects to nothing of a common vote, so that the other decides.
Products are waited for at once: with one in flight across the branch, ptxas 12.8 puts a wait behind
every instruction of every product. On 64 x 64 tiles two groups, with Q in registers, took a fifth
longer than three.
The LSE is written whether it is wanted or not: 4 bytes for each row, and one kernel serves calls
with a trace and without. Two that differ only behind their loop, ptxas makes up to 5 % apart.
The accumulator is multiplied only by a warp in which a maximum rises, and the maximum of a row is
taken over integers: that leaves out a quarter of the instructions of a tile that is kept.
The ragged last tile comes behind the loop, where scores of missing keys are set to -inf.
A row with NaN objects. Its maximum then goes on with the numbers, so that later tiles, which the
definition keeps for all of their rows, may be dropped by the others. A row with nothing but -inf
does not object, as the scale is positive.
"""

# Gluon's types are those of the host, where a constant of the kernel is what stands in it.
# pyright: reportArgumentType=false, reportAssignmentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from blockattn.impl.triton.vote import DROPPED, GROUP_ROWS
from blockattn.impl.triton.walk import LEAST

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
ROWS = gl.constexpr(GROUP_ROWS)  # queries of a group
LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
FLAGS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
MOST_GROUPS = 3
# Of the hardware's barriers Triton takes its own from 0 up. Each group's vote has one here, and of
# two groups (so that the third's is free) each place of the ring, which has 5 at most.
VOTE_BARRIER, PAIR_BARRIER, BARRIERS = 9, 11, 16
MOST_STAGES = gl.constexpr(BARRIERS - PAIR_BARRIER)


def _vote_text(group: int, note: str = "") -> str:
    """Whether a row of the group objects; ``note`` is done by threads that hear of none."""
    return f"""{{
        .reg .pred any;
        .reg .b32 said;
        or.b32 said, $2, $3;
        setp.ne.b32 any, said, 0;
        barrier.cta.red.or.pred any, {VOTE_BARRIER + group}, 128, any;
        selp.b32 said_{group}, 1, 0, any;
        mov.b32 $0, said_{group};
        mov.b32 $1, said_{group};
        {note}
        }}"""


def _other_text(group: int) -> str:
    """The outcome is what the other group said, where this one does not object."""
    return f"""{{
        .reg .pred drops;
        .reg .b32 said;
        mov.b32 said_{group}, $1;
        setp.eq.b32 drops, said_{group}, 0;
        mov.b32 said, {DROPPED.value};
        mov.b32 $0, said;
        @drops st.global.u8 [$2], said;
        }}"""


def _pair_text(how: str) -> str:
    """Arrives or waits at the barrier of two groups that a place of the ring has."""
    own = f"add.u32 bar, $1, {PAIR_BARRIER};"
    return f"{{ .reg .b32 bar; {own} barrier.cta.{how} bar, 256; mov.b32 $0, bar; }}"


NOTE = f"mov.b32 said, {DROPPED.value}; @!any st.global.u8 [$4], said;"
# One text for each group, as a register of PTX and a barrier belong to one of them.
DECLARE = gl.constexpr(tuple(f".reg .b32 said_{i}; mov.u32 $0, 0;" for i in range(MOST_GROUPS)))
VOTE = gl.constexpr(tuple(_vote_text(i, NOTE) for i in range(MOST_GROUPS)))
HALF_VOTE = gl.constexpr(tuple(_vote_text(i) for i in range(2)))
OTHER_VOTE = gl.constexpr(tuple(_other_text(i) for i in range(2)))
ARRIVE = gl.constexpr(_pair_text("arrive"))
MEET = gl.constexpr(_pair_text("sync"))
SIGNS = gl.constexpr(
    tuple(
        f"""{{
        .reg .pred any;
        .reg .b32 signs;
        or.b32 signs, $2, $3;
        setp.lt.s32 any, signs, 0;
        vote.sync.any.pred any, any, 0xffffffff;
        selp.b32 said_{i}, 1, 0, any;
        mov.b32 $0, said_{i};
        mov.b32 $1, said_{i};
        }}"""
        for i in range(MOST_GROUPS)
    )
)
SAID = gl.constexpr(tuple(f"mov.b32 $0, said_{i};" for i in range(MOST_GROUPS)))


@gluon.jit
def _declare(G: gl.constexpr):
    """Declares the register in which votes of group G leave their outcome; before any of them.

    As a result of a text the outcome would be a tensor, which Triton passes through shared memory
    to make it a scalar.
    """
    gl.inline_asm_elementwise(DECLARE[G], "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _kept(objects, place, G: gl.constexpr):
    """Whether a row of group G needs the tile; if none does, notes that.

    Args:
        objects: int32 ``[64]``, not 0 where a row needs the tile; two rows in each thread.
        place: int8 pointer, where the map has the tile.
    """
    place = place.to(gl.int64, bitcast=True)
    gl.inline_asm_elementwise(
        VOTE[G], "=r,=r,r,r,l,l", [objects, place], dtype=gl.int32, is_pure=False, pack=2
    )
    said = gl.inline_asm_elementwise(SAID[G], "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    return said != 0


@gluon.jit
def _kept_by_two(objects, place, flags, stage, G: gl.constexpr):
    """:func:`_kept` for two groups with a common vote; the plan says who waits for whom.

    Args:
        flags: for each group int8 ``[STAGES, 128]`` in shared memory, its words for the other one.
        stage: the tile's place in the ring.
    """
    place = place.to(gl.int64, bitcast=True)
    each: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    gl.inline_asm_elementwise(
        HALF_VOTE[G], "=r,=r,r,r", [objects], dtype=gl.int32, is_pure=False, pack=2
    )
    said = gl.inline_asm_elementwise(SAID[G], "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    flags[G].index(stage).store(gl.full([128], 0, gl.int8, each) + said.to(gl.int8))
    if said != 0:
        gl.inline_asm_elementwise(ARRIVE, "=r,r", [stage], dtype=gl.int32, is_pure=False, pack=1)
    else:
        gl.inline_asm_elementwise(MEET, "=r,r", [stage], dtype=gl.int32, is_pure=False, pack=1)
        other = flags[1 - G].index(stage).load(each).to(gl.int32)
        gl.inline_asm_elementwise(
            OTHER_VOTE[G], "=r,r,l", [other, place], dtype=gl.int32, is_pure=False, pack=1
        )
    said = gl.inline_asm_elementwise(SAID[G], "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    return said != 0


@gluon.jit
def _some_negative(x, G: gl.constexpr):
    """Whether one of the rows that a warp of group G holds has its sign set; x float32 ``[64]``.

    Warps may differ in that, so that what depends on it must be of one warp alone.
    """
    bits = x.to(gl.int32, bitcast=True)
    gl.inline_asm_elementwise(SIGNS[G], "=r,=r,r,r", [bits], dtype=gl.int32, is_pure=False, pack=2)
    said = gl.inline_asm_elementwise(SAID[G], "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    return said != 0


@gluon.jit
def _row_maximum(s, G: gl.constexpr):
    """Largest of each row of s ``[64, COLUMNS]``, NaN where a row has NaN.

    Taken over bits as integers, of which Hopper compares three at a time. They have the order of
    the numbers, with NaN as a product gives it (its sign is 0) last, unless all are negative: there
    the order is reversed.
    """
    bits = s.to(gl.int32, bitcast=True)
    top = gl.max(bits, axis=1)
    if _some_negative(top.to(gl.float32, bitcast=True), G):
        top = gl.where(top < 0, gl.min(bits, axis=1), top)
    return top.to(gl.float32, bitcast=True)


@gluon.jit
def _next(stage, phase, STAGES: gl.constexpr):
    """The following place of a ring, and the parity of its barriers there."""
    stage += 1
    if stage == STAGES:
        stage = 0
        phase ^= 1
    return stage, phase


@gluon.jit
def _bring(call, STAGES: gl.constexpr):
    """The warp that fetches tiles of K and V."""
    k_src, v_src, ring, batch, head, keys = call
    k_tiles, v_tiles, k_full, v_full, free = ring
    COLUMNS: gl.constexpr = k_src.block_shape[1]
    stage = 0
    phase = 1  # a wait for the phase before the first does not wait
    for n in range(gl.cdiv(keys, COLUMNS)):
        mbarrier.wait(free.index(stage), phase)
        mbarrier.wait(v_full.index(stage), phase)
        place = [batch, n * COLUMNS, head, 0]
        mbarrier.expect(k_full.index(stage), k_src.block_type.nbytes)
        tma.async_copy_global_to_shared(k_src, place, k_full.index(stage), k_tiles.index(stage))
        mbarrier.expect(v_full.index(stage), v_src.block_type.nbytes)
        tma.async_copy_global_to_shared(v_src, place, v_full.index(stage), v_tiles.index(stage))
        stage, phase = _next(stage, phase, STAGES)
    for _ in range(STAGES):
        mbarrier.wait(v_full.index(stage), phase)
        stage, phase = _next(stage, phase, STAGES)


@gluon.jit
def _tile(
    acc, m, l, q, ring, flags, stage, phase, place, alive, unit, limit, rest,
    G: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Scores of one tile, the vote, and the softmax update where it is kept.

    Args:
        acc: float32 ``[64, D]``; m, l: float32 ``[64]``, maximum in raw units and sum.
        alive: rows that vote; rest: keys of the tile, where MASKED.
        place: int8 pointer, where the map has the tile.
    """
    k_tiles, v_tiles, k_full, v_full, free = ring
    COLUMNS: gl.constexpr = k_tiles.shape[2]
    TILE_SHAPE: gl.constexpr = [COLUMNS, q.shape[1]]
    s_layout: gl.constexpr = m.type.layout.parent
    o_layout: gl.constexpr = acc.type.layout
    mbarrier.wait(k_full.index(stage), phase)
    k = k_tiles.index(stage).reshape(TILE_SHAPE)
    zero = gl.full([ROWS, COLUMNS], 0.0, gl.float32, s_layout)
    s = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    if MASKED:
        column = gl.arange(0, COLUMNS, gl.SliceLayout(0, s_layout))
        s = gl.where(gl.expand_dims(column < rest, 0), s, -float("inf"))
    top = _row_maximum(s, G)
    objects = ((top - m) * unit < limit) == 0  # as a row with NaN does
    objects = (alive & objects).to(gl.int32)
    if COLUMNS == ROWS:
        kept = _kept(objects, place, G)
    else:
        kept = _kept_by_two(objects, place, flags, stage, G)
    if kept:
        top = gl.maximum(m, top)
        p = gl.exp2(s * unit - gl.expand_dims(top * unit, 1))
        if _some_negative(m - top, G):  # the maximum of a row rises, which is rare after a while
            shrink = gl.exp2((m - top) * unit)
            l = l * shrink
            acc = acc * gl.expand_dims(_as_rows_of(shrink, o_layout), 1)
        l = l + gl.sum(p, axis=1)
        m = top
        p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, k_width=2)
        a = gl.convert_layout(p.to(k_tiles.dtype), p_layout)
        mbarrier.wait(v_full.index(stage), phase)
        v = v_tiles.index(stage).reshape(TILE_SHAPE)
        acc = warpgroup_mma(a, v, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(free.index(stage))
    return acc, m, l


@gluon.jit
def _as_rows_of(x, layout: gl.constexpr):
    """x ``[64]`` for products with a matrix of this layout; it lies there already."""
    return gl.convert_layout(x, gl.SliceLayout(1, layout), assert_trivial=True)


@gluon.jit
def _vote(
    call,
    G: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr, RAGGED: gl.constexpr,
):  # fmt: skip
    """One warp group: its 64 queries against every tile of keys."""
    (
        q_tiles, q_full, ring, flags, out_ptr, lse_ptr, drop_ptr,
        unit, scale_output, limit, shape,
    ) = call  # fmt: skip
    batch, head, heads, first, queries, keys = shape
    COLUMNS: gl.constexpr = ring[0].shape[2]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    _declare(G)
    start = first + G * ROWS
    row = start + gl.arange(0, ROWS, row_layout)
    alive = row < queries
    if COLUMNS == ROWS:
        # A group past the sequence has no line in the map: it objects to all, and notes nothing.
        alive = alive | (start >= queries)
        limit = gl.where(start < queries, limit, -float("inf"))
    m = gl.full([ROWS], LEAST, gl.float32, row_layout)
    l = gl.full([ROWS], 0.0, gl.float32, row_layout)
    acc = gl.full([ROWS, D], 0.0, gl.float32, o_layout)
    line = batch.to(gl.int64) * heads + head
    tile = start // COLUMNS  # a voting tile is as high as it is wide
    place = drop_ptr + (line * gl.cdiv(queries, COLUMNS) + tile) * gl.cdiv(keys, COLUMNS)
    mbarrier.wait(q_full, 0)
    q = q_tiles.index(G).reshape([ROWS, D])
    stage = 0
    phase = 0
    for _ in range(keys // COLUMNS):
        acc, m, l = _tile(
            acc, m, l, q, ring, flags, stage, phase, place, alive, unit, limit, 0, G, False
        )
        place += 1
        stage, phase = _next(stage, phase, STAGES)
    if RAGGED:
        acc, m, l = _tile(
            acc, m, l, q, ring, flags, stage, phase, place, alive, unit, limit, keys % COLUMNS,
            G, True,
        )  # fmt: skip
    empty = l == 0.0
    lse = gl.where(empty, -float("inf"), (m * unit + gl.log2(l)) * LN_2)
    gl.store(lse_ptr + line * queries + row, lse, mask=row < queries)
    factor = _as_rows_of(scale_output / gl.where(empty, 1.0, l), o_layout)
    row = start + gl.arange(0, ROWS, gl.SliceLayout(1, o_layout))
    column = gl.arange(0, D, gl.SliceLayout(0, o_layout))
    source = (batch.to(gl.int64) * queries + row) * heads + head
    target = out_ptr + gl.expand_dims(source * D, 1) + gl.expand_dims(column, 0)
    normal = (acc * gl.expand_dims(factor, 1)).to(out_ptr.dtype.element_ty)
    gl.store(target, normal, mask=gl.expand_dims(row < queries, 1))


@gluon.jit
def _ring(src, STAGES: gl.constexpr, GROUPS: gl.constexpr):
    """STAGES places for a tile of K and one of V, and their barriers."""
    COLUMNS: gl.constexpr = src.block_shape[1]
    D: gl.constexpr = src.block_shape[3]
    k_tiles = gl.allocate_shared_memory(src.dtype, [STAGES, 1, COLUMNS, 1, D], src.layout)
    v_tiles = gl.allocate_shared_memory(src.dtype, [STAGES, 1, COLUMNS, 1, D], src.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(free.index(i), count=GROUPS)
    return k_tiles, v_tiles, k_full, v_full, free


@gluon.jit(do_not_specialize=["queries", "keys", "heads", "key_heads"])
def vote_groups(
    q_src, k_src, v_src, out_ptr, lse_ptr, drop_ptr,
    scale_ptr, scale, scale_output_ptr, scale_output, limit, queries, keys, heads, key_heads,
    D: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, RAGGED: gl.constexpr,
    SCALE_PTR: gl.constexpr, SCALE_OUTPUT_PTR: gl.constexpr,
):  # fmt: skip
    """The kernel of the plan above; :mod:`blockattn.impl.triton.launch` calls it.

    Args:
        q_src: descriptor of ``[B, Tq, Hq, D]`` with tiles ``[1, 64, 1, D]``; k_src, v_src: of
            ``[B, Tk, Hk, D]`` with tiles ``[1, COLUMNS, 1, D]``, which tells 64 from 128.
        out_ptr: contiguous ``[B, Tq, Hq, D]``; lse_ptr: float32 ``[B, Hq, Tq]``.
        drop_ptr: int8 ``[B, Hq, Nq, Nk]``, zeros; DROPPED is noted there.
        limit: log2(lambda), compared with base-2 logits.
    """
    first, head, batch = gl.program_id(0) * (GROUPS * ROWS), gl.program_id(1), gl.program_id(2)
    q_tiles = gl.allocate_shared_memory(q_src.dtype, [GROUPS, 1, ROWS, 1, D], q_src.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    ring = _ring(k_src, STAGES, GROUPS)
    if GROUPS == 2:
        gl.static_assert(STAGES <= MOST_STAGES)
        flags_0 = gl.allocate_shared_memory(gl.int8, [STAGES, 128], FLAGS)
        flags_1 = gl.allocate_shared_memory(gl.int8, [STAGES, 128], FLAGS)
        flags = (flags_0, flags_1)
    else:
        flags = ()
    fence_async_shared()
    mbarrier.expect(q_full, GROUPS * q_src.block_type.nbytes)
    for i in gl.static_range(GROUPS):
        place = [batch, first + i * ROWS, head, 0]
        tma.async_copy_global_to_shared(q_src, place, q_full, q_tiles.index(i))
    if SCALE_PTR:
        scale = gl.load(scale_ptr)
    if SCALE_OUTPUT_PTR:
        scale_output = gl.load(scale_output_ptr)
    key_head = head // (heads // key_heads)
    call = (
        q_tiles, q_full, ring, flags, out_ptr, lse_ptr, drop_ptr,
        scale * LOG2_E, scale_output, limit, (batch, head, heads, first, queries, keys),
    )  # fmt: skip
    bring = (k_src, v_src, ring, batch, key_head, keys)
    if GROUPS == 3:
        gl.warp_specialize(
            [
                (_vote, (call, 0, STAGES, D, RAGGED)),
                (_vote, (call, 1, STAGES, D, RAGGED)),
                (_vote, (call, 2, STAGES, D, RAGGED)),
                (_bring, (bring, STAGES)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_vote, (call, 0, STAGES, D, RAGGED)),
                (_vote, (call, 1, STAGES, D, RAGGED)),
                (_bring, (bring, STAGES)),
            ],
            [4, 1],
            [232, 24],
        )
