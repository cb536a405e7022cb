"""Online softmax on the accumulators of one warp group: masks, update, finish (CuTe DSL).

A thread of a warp group holds two rows of a 64-row tile; four neighbouring threads share a row. The
reference m, which trails the running maximum by a bounded amount, is kept in raw units (q . k) and
is the same in the four; the sum l is a share of each thread until :func:`finish` adds the shares
up. Floating-point numbers lose nothing by a reference that trails, so that probabilities are first
computed with the one there is: only sums that come out too large send a warp back to the maxima.
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
# The same where only sums are looked at: probabilities stay within the numbers of their dtype.
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
    at = coordinates(thr_mma, columns * SHARERS)
    for j in cutlass.range_constexpr(columns):
        inside = at[0, j][1] < valid
        for r in cutlass.range_constexpr(2):
            s[r, j] = cutlass.select_(inside, s[r, j], -Float32.inf)


@cute.jit
def keep_past(scores: Any, thr_mma: Any, shift: Int32):
    """Scores with column > row + ``shift``, which a causal query must not see, become -inf."""
    s = rows_of(scores)
    columns = cute.size(s, mode=[1])
    at = coordinates(thr_mma, columns * SHARERS)
    for r in cutlass.range_constexpr(2):
        last = at[r, 0][0] + shift
        for j in cutlass.range_constexpr(columns):
            s[r, j] = cutlass.select_(at[0, j][1] <= last, s[r, j], -Float32.inf)


@cute.jit
def largest(scores: Any) -> Any:
    """Largest score of each row."""
    s, found = rows_of(scores), per_row()
    for r in cutlass.range_constexpr(2):
        found[r] = _extreme(s[r, None], higher)
    return found


@cute.jit
def largest_or_nan(scores: Any) -> Any:
    """Largest score of each row; not a number where one of them is not.

    For votes, which need it of every entry: compared as integers, of which Hopper takes three at
    once. Bits have the order of the numbers while the largest is positive; of negative numbers the
    lowest bits are wanted. NaN as a product gives it has the highest.
    """
    bits, found = rows_of(cute.recast_tensor(scores, Int32)), per_row()
    top = cute.recast_tensor(found, Int32)
    for r in cutlass.range_constexpr(2):
        top[r] = _extreme(bits[r, None], cutlass.max)
    if cute.arch.vote_any_sync(cutlass.min(top[0], top[1]) < 0):
        for r in cutlass.range_constexpr(2):
            lowest = _extreme(bits[r, None], cutlass.min)
            top[r] = lowest if top[r] < 0 else top[r]
    return found


def _extreme(row: Any, choose: Any) -> Any:
    """The largest or smallest of a row, which four threads share."""
    found = [row[0], row[1]]
    for j in range(2, cute.size(row)):
        found[j % 2] = choose(found[j % 2], row[j])
    total = choose(found[0], found[1])
    for offset in (SHARERS // 2, SHARERS // 4):
        total = choose(total, cute.arch.shuffle_sync_bfly(total, offset=offset))
    return total


def higher(peak: Float32, own: Float32) -> Float32:
    """The larger of both, or the one that is a number."""
    return cute.arch.fmax(peak, own)


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
def follow(work: Any, peak: Any, shrink: Any) -> Int32:
    """Raises the reference m of a warp's rows once one is outgrown by its maximum ``peak``.

    Returns:
        1 if so: what was accumulated before must then be multiplied with ``shrink``.
    """
    outgrown, raised = False, Int32(0)
    for r in cutlass.range_constexpr(2):
        outgrown = outgrown or (peak[r] - work.m[r]) * work.unit > LAG
    if cute.arch.vote_any_sync(outgrown):
        raised = Int32(1)
        _raise(work, peak, shrink)
    return raised


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
