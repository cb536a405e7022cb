"""Online softmax on the accumulators of one warp group: masks, update, finish (CuTe DSL).

A thread of a warp group holds two rows of a 64-row tile; four neighbouring threads share a row. The
maximum m is kept in raw units (q . k) and is the same in the four; the sum l is a share of each
thread until :func:`finish` adds the shares up.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from quack import layout_utils

LN_2 = 0.6931471805599453
SHARERS = 4  # threads of a row


def new_state() -> tuple[cute.Tensor, cute.Tensor]:
    """(m, l) of the two rows of a thread."""
    return cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)


def clear(m: cute.Tensor, l: cute.Tensor, acc: cute.Tensor) -> None:
    """The state of rows that have seen no key."""
    m.fill(-Float32.inf)
    l.fill(0.0)
    acc.fill(0.0)


def coordinates(thr_mma: cute.ThrMma, columns: int) -> cute.Tensor:
    """(row, column) of every score of a thread, as its two rows."""
    identity = cute.make_identity_tensor((64, columns))
    return layout_utils.reshape_acc_to_mn(thr_mma.partition_C(identity))


@cute.jit
def keep_columns(scores: cute.Tensor, thr_mma: cute.ThrMma, valid: Int32):
    """Scores of column ``valid`` and later become -inf."""
    s = layout_utils.reshape_acc_to_mn(scores)
    columns = cute.size(s, mode=[1])
    at = coordinates(thr_mma, columns * SHARERS)
    for j in cutlass.range_constexpr(columns):
        inside = at[0, j][1] < valid
        for r in cutlass.range_constexpr(2):
            s[r, j] = s[r, j] if inside else -Float32.inf


@cute.jit
def keep_past(scores: cute.Tensor, thr_mma: cute.ThrMma, shift: Int32):
    """Scores with column > row + ``shift``, which a causal query must not see, become -inf."""
    s = layout_utils.reshape_acc_to_mn(scores)
    columns = cute.size(s, mode=[1])
    at = coordinates(thr_mma, columns * SHARERS)
    for r in cutlass.range_constexpr(2):
        last = at[r, 0][0] + shift
        for j in cutlass.range_constexpr(columns):
            s[r, j] = s[r, j] if at[0, j][1] <= last else -Float32.inf


@cute.jit
def keep_weighted(scores: cute.Tensor, weights: cute.Tensor):
    """Scores of columns with weight zero become -inf."""
    s = layout_utils.reshape_acc_to_mn(scores)
    for j in cutlass.range_constexpr(cute.size(s, mode=[1])):
        inside = weights[j] > 0.0
        for r in cutlass.range_constexpr(2):
            s[r, j] = s[r, j] if inside else -Float32.inf


@cute.jit
def row_max(row: cute.Tensor, start: Float32) -> Float32:
    """Largest score of a row and ``start``, over the threads that share the row."""
    tops = [start, row[0]]
    for j in cutlass.range_constexpr(1, cute.size(row)):
        tops[j % 2] = cute.arch.fmax(tops[j % 2], row[j])
    return cute.arch.warp_reduction_max(cute.arch.fmax(tops[0], tops[1]), threads_in_group=SHARERS)


@cute.jit
def row_sum(row: cute.Tensor, weights: cute.Tensor | None, start: Float32) -> Float32:
    """``start`` plus the sum of a thread's share of a row, each element times its weight."""
    sums = [start, Float32(0.0)]
    for j in cutlass.range_constexpr(cute.size(row)):
        if const_expr(weights is None):
            sums[j % 2] = sums[j % 2] + row[j]
        else:
            sums[j % 2] = sums[j % 2] + row[j] * weights[j]
    return sums[0] + sums[1]


@cute.jit
def fold(
    scores: cute.Tensor,
    m: cute.Tensor,
    l: cute.Tensor,
    unit: Float32,
    weights: cute.Tensor | None,
) -> cute.Tensor:
    """Takes a tile into (m, l); its scores become probabilities.

    Returns:
        What the accumulator of each row must be multiplied with before the tile enters it.
    """
    s = layout_utils.reshape_acc_to_mn(scores)
    shrink = cute.make_rmem_tensor(2, Float32)
    for r in cutlass.range_constexpr(2):
        top = row_max(s[r, None], m[r])
        # Only a row without any key so far is at -inf, and -inf - -inf is not a number.
        base = 0.0 if top == -Float32.inf else top
        shrink[r] = cute.math.exp2((m[r] - base) * unit, fastmath=True)
        p = cute.math.exp2(s[r, None].load() * unit - base * unit, fastmath=True)
        s[r, None].store(p)
        l[r] = row_sum(s[r, None], weights, l[r] * shrink[r])
        m[r] = top
    return shrink


@cute.jit
def rescale(acc: cute.Tensor, factor: cute.Tensor):
    """Multiplies each of the two rows with its factor."""
    rows = layout_utils.reshape_acc_to_mn(acc)
    for r in cutlass.range_constexpr(2):
        rows[r, None].store(rows[r, None].load() * factor[r])


@cute.jit
def finish(
    m: cute.Tensor, l: cute.Tensor, unit: Float32, scale_output: Float32
) -> tuple[cute.Tensor, cute.Tensor]:
    """(factor of the accumulator, LSE) of the two rows; a row without keys gives 0 and -inf."""
    factor, lse = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
    for r in cutlass.range_constexpr(2):
        total = l[r] + cute.arch.shuffle_sync_bfly(l[r], offset=1)
        total = total + cute.arch.shuffle_sync_bfly(total, offset=2)
        empty = total == 0.0
        factor[r] = scale_output / (1.0 if empty else total)
        lse[r] = -Float32.inf if empty else (m[r] * unit + cute.math.log2(total)) * LN_2
    return factor, lse
