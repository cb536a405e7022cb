"""Online softmax on the accumulators of one warp group: masks, update, finish (CuTe DSL).

A thread of a warp group holds two rows of a 64-row tile; four neighbouring threads share a row. The
reference m is kept in raw units (q . k) and is the same in the four. It trails the running maximum
by a bounded amount, or is above it by the threshold of a vote at most. The sum l is a share of each
thread until :func:`finish` adds the shares up. Floating-point numbers lose nothing by a reference
that trails, so that probabilities are first computed with the one there is: only sums that come out
too large send a warp back to the maxima.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

LN_2 = 0.6931471805599453
LAG = 8.0  # base-2 units by which a row's reference may trail its maximum
# The same where sums or own scores are looked at: probabilities stay within their dtype.
LAGS = {"bf16": 32.0, "fp16": 15.0}
SHARERS = 4  # threads of a row
PAIRS = {"bf16": "bf16x2", "fp16": "f16x2"}


def rows_of(x: Any) -> Any:
    """An accumulator as the two rows of a thread."""
    columns = cute.size(x) // 4
    return cute.composition(x, cute.make_layout((2, (2, columns)), stride=(2, (1, 4))))


def per_row() -> Any:
    """A float32 number for each of the two rows."""
    return cute.make_rmem_tensor(2, Float32)


def clear(work: Any) -> None:
    """The state of rows that have seen no key, and the result if it stays so."""
    for x in (work.m, work.peak, work.lse):
        x.fill(-Float32.inf)
    for x in (work.l, work.acc, work.factor):
        x.fill(0.0)


def coordinates(thr_mma: Any, columns: int) -> Any:
    """(row, column) of every score of a thread, as its two rows."""
    return rows_of(thr_mma.partition_C(cute.make_identity_tensor((64, columns))))


@cute.jit
def keep_columns(scores: Any, thr_mma: Any, valid: Int32):
    """Scores of column ``valid`` and later become -inf."""
    s = rows_of(scores)
    columns = cute.size(s, mode=[1])
    own = valid - coordinates(thr_mma, columns * SHARERS)[0, 0][1]
    for j in cutlass.range_constexpr(columns):
        for r in cutlass.range_constexpr(2):
            s[r, j] = cutlass.select_(_offset(j) < own, s[r, j], -Float32.inf)


@cute.jit
def keep_past(scores: Any, thr_mma: Any, shift: Int32):
    """Scores with column > row + ``shift``, which a causal query must not see, become -inf."""
    s = rows_of(scores)
    columns = cute.size(s, mode=[1])
    at = coordinates(thr_mma, columns * SHARERS)
    for r in cutlass.range_constexpr(2):
        last = at[r, 0][0] + shift - at[r, 0][1]
        for j in cutlass.range_constexpr(columns):
            s[r, j] = cutlass.select_(_offset(j) <= last, s[r, j], -Float32.inf)


def _offset(j: int) -> int:
    """How far a thread's column number ``j`` is from its first: two of every eight are its own."""
    return j // 2 * 2 * SHARERS + j % 2


@cute.jit
def largest(scores: Any) -> Any:
    """Largest score of each row."""
    s, found = rows_of(scores), per_row()
    for r in cutlass.range_constexpr(2):
        row = [s[r, j] for j in range(cute.size(s, mode=[1]))]
        found[r] = across(_extreme(row, higher), higher)
    return found


@cute.jit
def largest_or_nan(scores: Any) -> Any:
    """Largest score of each row; not a number where one of them is not."""
    own = largest_shares(scores, 1)
    found = per_row()
    for r in cutlass.range_constexpr(2):
        found[r] = across(own[r, 0], higher_or_nan)
    return found


@cute.jit
def largest_shares(scores: Any, parts: cutlass.Constexpr[int]) -> Any:
    """Of each row in each of some equal parts of a tile, the largest score that the thread has.

    NaN where one of them is not a number. For votes, which need it of every entry: compared as
    integers, of which Hopper takes three at once. Bits have the order of the numbers while the
    largest is positive; of negative numbers the lowest bits are wanted. NaN as a product gives it
    has the highest.
    """
    bits = rows_of(cute.recast_tensor(scores, Int32))
    size = cute.size(bits, mode=[1]) // parts
    found = cute.make_rmem_tensor((2, parts), Float32)
    top, lowest = cute.recast_tensor(found, Int32), Int32(0)
    for part in cutlass.range_constexpr(parts):
        for r in cutlass.range_constexpr(2):
            top[r, part] = _extreme(_some(bits, r, part, size), cutlass.max)
            lowest = cutlass.min(lowest, top[r, part])
    if cute.arch.vote_any_sync(lowest < 0):
        for part in cutlass.range_constexpr(parts):
            for r in cutlass.range_constexpr(2):
                negative = _extreme(_some(bits, r, part, size), cutlass.min)
                top[r, part] = negative if top[r, part] < 0 else top[r, part]
    return found


def _some(x: Any, r: int, part: int, size: int) -> list[Any]:
    """Part number ``part`` of a thread's row, of ``size`` columns."""
    return [x[r, part * size + j] for j in range(size)]


def _extreme(row: Any, choose: Any) -> Any:
    """The largest or smallest of what a thread has of a row."""
    found = [row[0], row[1]]
    for j in range(2, len(row)):
        found[j % 2] = choose(found[j % 2], row[j])
    return choose(found[0], found[1])


def across(x: Any, choose: Any) -> Any:
    """The largest of what the four threads of a row have, as ``choose`` finds it of two."""
    for offset in (SHARERS // 2, SHARERS // 4):
        x = choose(x, cute.arch.shuffle_sync_bfly(x, offset=offset))
    return x


def higher(peak: Float32, own: Float32) -> Float32:
    """The larger of both, or the one that is a number."""
    return cute.arch.fmax(peak, own)


@dsl_user_op
def higher_or_nan(a: Float32, b: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """The larger of both; not a number where one is not."""
    values = [Float32(x).ir_value(loc=loc, ip=ip) for x in (a, b)]
    text = "max.NaN.f32 $0, $1, $2;"
    kind = llvm.AsmDialect.AD_ATT
    return Float32(
        llvm.inline_asm(T.f32(), values, text, "=f,f,f", has_side_effects=False, asm_dialect=kind)
    )


@cute.jit
def _sum(row: Any) -> Float32:
    """A thread's share of the sum of a row."""
    total = [Float32(0.0), Float32(0.0)]
    for j in cutlass.range_constexpr(cute.size(row)):
        total[j % 2] = total[j % 2] + row[j]
    return total[0] + total[1]


@cute.jit
def rise(peak: Any, own: Any):
    """A running maximum takes in the largest scores of a tile."""
    for r in cutlass.range_constexpr(2):
        peak[r] = higher(peak[r], own[r])


@cute.jit
def fold(shapes: Any, work: Any, scores: Any, p: Any, weight: Any):
    """Scores become probabilities p relative to m, and enter the sums l, ``weight`` times."""
    share = per_row()
    _exponentiate(shapes, work, scores, p, share)
    _add(work.l, share, weight)


@cute.jit
def follow(
    work: Any, peak: Any, shrink: Any, lag: cutlass.Constexpr[float] = LAG,
    shares: cutlass.Constexpr[bool] = False,
) -> Int32:  # fmt: skip
    """Raises the reference m of a warp's rows once one is outgrown by its maximum ``peak``.

    Args:
        lag: base-2 units by which m may trail.
        shares: ``peak`` is of what a thread has of its rows.

    Returns:
        1 if so: what was accumulated before must then be multiplied with ``shrink``.
    """
    outgrown, raised = False, Int32(0)
    for r in cutlass.range_constexpr(2):
        outgrown = outgrown or (peak[r] - work.m[r]) * work.unit > lag
    if cute.arch.vote_any_sync(outgrown):
        raised = Int32(1)
        if const_expr(shares):
            for r in cutlass.range_constexpr(2):
                peak[r] = across(peak[r], higher)
        _raise(work, peak, shrink)
    return raised


@cute.jit
def keep_up(shapes: Any, work: Any, own: Any, shrink: Any) -> Int32:
    """:func:`follow` before a vote, where tiles that are dropped raise m too, as it is no maximum.

    Args:
        own: as :func:`largest_shares` gives it.
    """
    top = per_row()
    for r in cutlass.range_constexpr(2):
        top[r] = own[r, 0]
        for part in cutlass.range_constexpr(1, cute.size(own, mode=[1])):
            top[r] = higher(top[r], own[r, part])
    return follow(work, top, shrink, LAGS[shapes.variant.dtype], True)


@cute.jit
def fold_unseen(shapes: Any, work: Any, scores: Any, p: Any, weight: Any, shrink: Any) -> Int32:
    """:func:`fold` where no maxima are known: the sums tell whether a row outgrew its reference.

    A thread's sum bounds each of its probabilities. Before a row's first key the reference is -inf,
    and the sum infinite or not a number.

    Returns:
        As :func:`follow`.
    """
    share, raised = per_row(), Int32(0)
    _exponentiate(shapes, work, scores, p, share, guard=False)
    if cute.arch.vote_any_sync(not (share[0] + share[1] <= 2.0 ** LAGS[shapes.variant.dtype])):
        raised = Int32(1)
        move(scores, scores)  # or the compiler shares products with what was computed above
        _raise(work, largest(scores), shrink)
        _exponentiate(shapes, work, scores, p, share)
    _add(work.l, share, weight)
    return raised


def _add(l: Any, share: Any, weight: Any) -> None:
    for r in range(2):
        l[r] = l[r] + (share[r] if weight is None else share[r] * weight)


@cute.jit
def _raise(work: Any, own: Any, shrink: Any):
    """The reference becomes the running maximum, and the sums relative to it.

    A warp does so for itself, and must not wait for products here: all warps of the group have to.
    """
    for r in cutlass.range_constexpr(2):
        top = higher(work.m[r], own[r])
        shrink[r] = cute.math.exp2((work.m[r] - finite(top)) * work.unit, fastmath=True)
        work.l[r] = work.l[r] * shrink[r]
        work.m[r] = top


@cute.jit
def _exponentiate(
    shapes: Any, work: Any, scores: Any, p: Any, share: Any,
    guard: cutlass.Constexpr[bool] = True,
):  # fmt: skip
    """Probabilities relative to m, rounded into the operand p, and a thread's share of their sums.

    ``guard``: those of a row without any key so far, whose m is -inf, are 0.
    """
    exact = cute.make_fragment_like(scores)
    s, e = rows_of(scores), rows_of(exact)
    for r in cutlass.range_constexpr(2):
        shift = (finite(work.m[r]) if const_expr(guard) else work.m[r]) * work.unit
        e[r, None].store(cute.math.exp2(s[r, None].load() * work.unit - shift, fastmath=True))
        share[r] = _sum(e[r, None])
    _round(shapes, exact, p)


@cute.jit
def _round(shapes: Any, exact: Any, p: Any):
    """Rounds to the inputs' dtype at this very point: later it would take twice the registers."""
    pairs = cute.recast_tensor(p, Int32)
    for i in cutlass.range_constexpr(cute.size(pairs)):
        pairs[i] = _pair(exact[2 * i + 1], exact[2 * i], shapes.variant.dtype)


@cute.jit
def finite(x: Float32) -> Float32:
    """x, or 0 for the -inf of a row without any key so far: -inf - -inf is not a number."""
    return Float32(0.0) if x == -Float32.inf else x


@cute.jit
def rescale(acc: Any, factor: Any):
    """Multiplies each of the two rows with its factor."""
    rows = rows_of(acc)
    for r in cutlass.range_constexpr(2):
        rows[r, None].store(rows[r, None].load() * factor[r])


@cute.jit
def finish(work: Any):
    """Factor of the accumulator, and LSE, of the two rows; a row without keys gives 0 and -inf."""
    for r in cutlass.range_constexpr(2):
        total = work.l[r] + cute.arch.shuffle_sync_bfly(work.l[r], offset=1)
        total = total + cute.arch.shuffle_sync_bfly(total, offset=2)
        empty = total == 0.0
        # At this very point: it would be computed behind the wait for the last product.
        work.factor[r] = pinned(work.final / (1.0 if empty else total))
        lse = (work.m[r] * work.unit + cute.math.log2(total)) * LN_2
        work.lse[r] = -Float32.inf if empty else lse


@cute.jit
def move(source: Any, target: Any):
    """Copies registers at this very point of the program.

    The compiler would otherwise read those of a product in flight, and ptxas then wait after every
    single one.
    """
    source, target = (cute.recast_tensor(x, Float32) for x in (source, target))
    for j in cutlass.range_constexpr(cute.size(source)):
        target[j] = pinned(source[j])


@dsl_user_op
def pinned(x: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """x in a register from here on, instead of computed again where it is used."""
    return Float32(
        _in_place(T.f32(), "mov.f32 $0, $1;", "=f,f", Float32(x).ir_value(loc=loc, ip=ip))
    )


@dsl_user_op
def pinned_pointer(x: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """A pointer in registers from here on, instead of computed again where it is used."""
    bits = _in_place(T.i64(), "mov.b64 $0, $1;", "=l,l", x.toint().ir_value(loc=loc, ip=ip))
    return cute.make_ptr(x.dtype, cutlass.Int64(bits), x.memspace, assumed_align=1)


@dsl_user_op
def fresh(x: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """x as if it were new: what follows from it is computed again instead of kept in registers."""
    return Int32(_in_place(T.i32(), "mov.b32 $0, $1;", "=r,r", Int32(x).ir_value(loc=loc, ip=ip)))


@dsl_user_op
def any_of_group(x: Boolean, barrier: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """1 where x is true in a thread of the warp group; its threads wait for each other."""
    text = """{
        .reg .pred p, q;
        setp.ne.u32 p, $1, 0;
        barrier.cta.red.or.pred q, $2, 128, p;
        selp.u32 $0, 1, 0, q;
    }"""
    values = [Int32(x).ir_value(loc=loc, ip=ip), Int32(barrier).ir_value(loc=loc, ip=ip)]
    return Int32(_in_place(T.i32(), text, "=r,r,r", *values))


@dsl_user_op
def _pair(high: Float32, low: Float32, dtype: str, *, loc: Any = None, ip: Any = None) -> Int32:
    values = [Float32(x).ir_value(loc=loc, ip=ip) for x in (high, low)]
    return Int32(_in_place(T.i32(), f"cvt.rn.{PAIRS[dtype]}.f32 $0, $1, $2;", "=r,f,f", *values))


def _in_place(result: Any, text: str, operands: str, *values: Any) -> Any:
    """An instruction that the compiler neither moves nor leaves out."""
    kind = llvm.AsmDialect.AD_ATT
    return llvm.inline_asm(
        result, list(values), text, operands, has_side_effects=True, asm_dialect=kind
    )
