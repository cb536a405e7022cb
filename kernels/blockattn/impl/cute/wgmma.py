"""Products of one warp group: operands in shared memory, the instruction, its start (CuTe DSL)."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

ROWS = 64  # of a product
DEPTH = 16  # channels, or keys, of one instruction


def shared_layout(element: Any, rows: int, dim: int, count: int) -> Any:
    """(rows, dim, count) tiles of 16-bit numbers with whole 128 bytes a row, swizzled for both."""
    kind = warpgroup.SmemLayoutAtomKind.K_SW128
    atom = warpgroup.make_smem_layout_atom(kind, element)
    return cute.tile_to_shape(atom, (rows, dim, count), order=(0, 1, 2))


def reordered(x: cute.Tensor, *modes: int) -> cute.Tensor:
    """x with its axes in another order."""
    return cute.make_tensor(x.iterator, cute.select(x.layout, mode=list(modes)))


def tiled_mma(element: Any, columns: int, first: Any, second: Any) -> Any:
    """Products of 64 rows and ``columns``, with float32 sums.

    Args:
        first: where the first operand lies, an ``OperandSource``.
        second: which axis of the second is contiguous, an ``OperandMajorMode``.
    """
    shape = ROWS, columns, DEPTH
    op = warpgroup.MmaF16BF16Op(element, Float32, shape, first, OperandMajorMode.K, second)
    return cute.make_tiled_mma(op)


def start(mma: Any, acc: Any, operands: Any, add: bool) -> None:
    """Starts a product; ``acc`` is right after a wait.

    Args:
        operands: pairs of fragments, one for each ``DEPTH``.
        add: to ``acc``, instead of overwriting it.
    """
    warpgroup.fence()
    atom = cute.make_mma_atom(mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, add)
    for first, second in operands:
        cute.gemm(atom, acc, first, second, acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()
