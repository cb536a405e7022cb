"""Online softmax on the accumulators of one warp group: masks, vote, update, finish (CuTe DSL).

A thread of a warp group holds two rows of a 64-row tile; four neighbouring threads share a row. The
reference m, a maximum or up to LAG below it, is kept in raw units (q . k) and is the same in the
four; the sum l is a share of each thread until :func:`finish` adds the shares up.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op
from quack import layout_utils

LN_2 = 0.6931471805599453
LAG = 8.0  # base-2 units by which a row's reference may trail its maximum
SHARERS = 4  # threads of a row


def rows_of(x: Any) -> Any:
    """An accumulator as the two rows of a thread."""
    return layout_utils.reshape_acc_to_mn(x)


def per_row() -> Any:
    """A float32 number for each of the two rows."""
    return cute.make_rmem_tensor(2, Float32)


def clear(m: Any, l: Any, acc: Any) -> None:
    """The state of rows that have seen no key."""
    m.fill(-Float32.inf)
    l.fill(0.0)
    acc.fill(0.0)


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
            s[r, j] = s[r, j] if inside else -Float32.inf


@cute.jit
def keep_past(scores: Any, thr_mma: Any, shift: Int32):
    """Scores with column > row + ``shift``, which a causal query must not see, become -inf."""
    s = rows_of(scores)
    columns = cute.size(s, mode=[1])
    at = coordinates(thr_mma, columns * SHARERS)
    for r in cutlass.range_constexpr(2):
        last = at[r, 0][0] + shift
        for j in cutlass.range_constexpr(columns):
            s[r, j] = s[r, j] if at[0, j][1] <= last else -Float32.inf


def weight_of(weights: Any, j: int) -> Int32:
    """The weight of a thread's column ``j``: a byte."""
    return weights[j // 4] >> j % 4 * 8 & 255


@cute.jit
def keep_weighted(scores: Any, weights: Any):
    """Scores of columns with weight zero become -inf."""
    s = rows_of(scores)
    for j in cutlass.range_constexpr(cute.size(s, mode=[1])):
        inside = weight_of(weights, j) > 0
        for r in cutlass.range_constexpr(2):
            s[r, j] = s[r, j] if inside else -Float32.inf


@cute.jit
def largest(scores: Any) -> Any:
    """Largest score of each row."""
    s, found = rows_of(scores), per_row()
    for r in cutlass.range_constexpr(2):
        top = [s[r, 0], s[r, 1]]
        for j in cutlass.range_constexpr(2, cute.size(s, mode=[1])):
            top[j % 2] = cute.arch.fmax(top[j % 2], s[r, j])
        found[r] = cute.arch.warp_reduction_max(
            cute.arch.fmax(top[0], top[1]), threads_in_group=SHARERS
        )
    return found


@cute.jit
def _sum(row: Any, weights: Any, start: Float32) -> Float32:
    """``start`` plus a thread's share of a row, each element times its weight."""
    total = [start, Float32(0.0)]
    for j in cutlass.range_constexpr(cute.size(row)):
        if const_expr(weights is None):
            total[j % 2] = total[j % 2] + row[j]
        else:
            total[j % 2] = total[j % 2] + row[j] * Float32(weight_of(weights, j))
    return total[0] + total[1]


@cute.jit
def follow(own: Any, m: Any, l: Any, unit: Float32, shrink: Any) -> Int32:
    """Raises the reference m of a warp's rows once one of them is outgrown by a tile's maxima.

    A reference may trail by ``LAG``: probabilities then reach 2^LAG, which costs no precision in
    floating point, and the accumulator seldom has to be multiplied.

    Returns:
        1 if so: the accumulator must then be multiplied with ``shrink``.
    """
    outgrown = False
    for r in cutlass.range_constexpr(2):
        outgrown = outgrown or (own[r] - m[r]) * unit > LAG
    raised = Int32(0)
    if cute.arch.vote_any_sync(outgrown):
        raised = Int32(1)
        for r in cutlass.range_constexpr(2):
            top = cute.arch.fmax(m[r], own[r])
            shrink[r] = cute.math.exp2((m[r] - _finite(top)) * unit, fastmath=True)
            l[r] = l[r] * shrink[r]
            m[r] = top
    return raised


@cute.jit
def fold(scores: Any, m: Any, l: Any, unit: Float32, weights: Any):
    """Scores become probabilities relative to m, and enter the sums l."""
    s = rows_of(scores)
    for r in cutlass.range_constexpr(2):
        shift = _finite(m[r]) * unit
        s[r, None].store(cute.math.exp2(s[r, None].load() * unit - shift, fastmath=True))
        l[r] = _sum(s[r, None], weights, l[r])


@cute.jit
def _finite(x: Float32) -> Float32:
    """x, or 0 for the -inf of a row without any key so far: -inf - -inf is not a number."""
    return Float32(0.0) if x == -Float32.inf else x


@cute.jit
def rescale(acc: Any, factor: Any):
    """Multiplies each of the two rows with its factor."""
    rows = rows_of(acc)
    for r in cutlass.range_constexpr(2):
        rows[r, None].store(rows[r, None].load() * factor[r])


@cute.jit
def finish(m: Any, l: Any, unit: Float32, scale_output: Float32) -> tuple[Any, Any]:
    """(factor of the accumulator, LSE) of the two rows; a row without keys gives 0 and -inf."""
    factor, lse = per_row(), per_row()
    for r in cutlass.range_constexpr(2):
        total = l[r] + cute.arch.shuffle_sync_bfly(l[r], offset=1)
        total = total + cute.arch.shuffle_sync_bfly(total, offset=2)
        empty = total == 0.0
        factor[r] = scale_output / (1.0 if empty else total)
        lse[r] = -Float32.inf if empty else (m[r] * unit + cute.math.log2(total)) * LN_2
    return factor, lse


@cute.jit
def vote(objects: Int32, barrier: Int32, threads: int) -> Int32:
    """1 if any of the ``threads`` threads that meet at a named barrier objects, else 0."""
    return cute.arch.inline_ptx(
        "{ .reg .pred mine, any; setp.ne.s32 mine, {$r0}, 0; "
        "barrier.cta.red.or.pred any, {$r1}, {$r2}, mine; selp.s32 {$w0}, 1, 0, any; }",
        write_only_types=[Int32],
        read_only_args=[objects, barrier, Int32(threads)],
    )


@dsl_user_op
def _pinned(x: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    kind = llvm.AsmDialect.AD_ATT
    value = Float32(x).ir_value(loc=loc, ip=ip)
    return Float32(
        llvm.inline_asm(
            T.f32(), [value], "mov.f32 $0, $1;", "=f,f", has_side_effects=True, asm_dialect=kind
        )
    )


@cute.jit
def pin(x: Any):
    """Copies registers onto themselves at this very point of the program."""
    for j in cutlass.range_constexpr(cute.size(x)):
        x[j] = _pinned(x[j])
