"""The order in which block-scaled matrix units read scale bytes: tiles of 128 rows x 4 blocks.

A matrix of scales is padded with zeros to whole tiles of 512 bytes, column tiles fastest. In a tile
row 32 a + b, column c lies at byte 16 b + 4 a + c. Order as in TensorRT-LLM and the NVIDIA PTX ISA
(scale-factor layout of block-scaled matrix instructions).
"""

from __future__ import annotations

import torch
from torch import Tensor

from blockattn import checks
from blockattn.layout import num_blocks

SCALE_ROWS = 128
SCALE_COLUMNS = 4


def swizzled_offset(row: int, column: int, columns: int) -> int:
    """Byte at which the scale of (row, block column) of a matrix with that many columns lies."""
    tile = row // SCALE_ROWS * num_blocks(columns, SCALE_COLUMNS) + column // SCALE_COLUMNS
    return tile * 512 + row % 32 * 16 + row % SCALE_ROWS // 32 * 4 + column % SCALE_COLUMNS


def swizzle_scales(plain: Tensor) -> Tensor:
    """Scale bytes ``[matrices, rows, columns]`` uint8 -> flat swizzled bytes, padding 0.

    Raises:
        TypeError, ValueError: another dtype or rank.
    """
    if not isinstance(plain, Tensor) or plain.dtype != torch.uint8:
        raise TypeError("plain: expected a uint8 tensor [matrices, rows, columns]")
    if plain.dim() != 3:
        raise ValueError(f"plain: shape {tuple(plain.shape)}, expected [matrices, rows, columns]")
    rows, columns = plain.shape[1:]
    padding = (0, -columns % SCALE_COLUMNS, 0, -rows % SCALE_ROWS)
    padded = torch.nn.functional.pad(plain, padding)
    # Row = 128 tile + 32 quarter + line; a tile is stored as [line, quarter, column].
    tiles = padded.unflatten(2, (-1, SCALE_COLUMNS)).unflatten(1, (-1, SCALE_ROWS // 32, 32))
    return tiles.permute(0, 1, 4, 3, 2, 5).flatten()


def unswizzle_scales(flat: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """The inverse of :func:`swizzle_scales` for ``shape`` = (matrices, rows, columns)."""
    matrices, rows, columns = (checks.integer(f"shape[{n}]", x) for n, x in enumerate(shape))
    row_tiles, column_tiles = num_blocks(rows, SCALE_ROWS), num_blocks(columns, SCALE_COLUMNS)
    expected = matrices * row_tiles * column_tiles * SCALE_ROWS * SCALE_COLUMNS
    if not isinstance(flat, Tensor) or flat.dtype != torch.uint8:
        raise TypeError("flat: expected a 1-D uint8 tensor of swizzled scale bytes")
    if flat.numel() != expected:
        raise ValueError(f"flat: {flat.numel()} bytes, but shape {shape} takes {expected}")
    tiles = flat.reshape(matrices, row_tiles, column_tiles, 32, SCALE_ROWS // 32, SCALE_COLUMNS)
    padded = tiles.permute(0, 1, 4, 3, 2, 5).reshape(
        matrices, row_tiles * SCALE_ROWS, column_tiles * SCALE_COLUMNS
    )
    return padded[:, :rows, :columns]
