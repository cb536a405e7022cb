"""How a sequence is cut into blocks, and how video tokens are laid out in it.

A sequence of T tokens is cut from token 0 into blocks of L tokens; only the last may be shorter.
:class:`TokenGrid` says which (t, h, w) latent position each token of the sequence has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from blockattn import checks

BLOCK = 64
ORDERS = ("raster", "tile", "morton")
TILE_EDGE = 4


def num_blocks(tokens: int, block: int = BLOCK) -> int:
    """Blocks that cover ``tokens`` tokens: ceil(tokens / block)."""
    return -(-tokens // block)


def block_lengths(tokens: int, block: int = BLOCK, device: torch.device | None = None) -> Tensor:
    """True length of every block, int32 ``[N]``: ``block`` everywhere, the rest in the last one."""
    starts = torch.arange(num_blocks(tokens, block), device=device, dtype=torch.int32) * block
    return (tokens - starts).clamp(max=block)


def whole_16_bytes(x: Tensor) -> bool:
    """Base and strides in use of x ``[B, T, H, D]``, but for the channels, are whole 16 bytes."""
    strides = [stride for stride, size in zip(x.stride()[:3], x.shape[:3]) if size > 1]
    whole = all(stride > 0 and stride * x.element_size() % 16 == 0 for stride in strides)
    return whole and x.data_ptr() % 16 == 0


def pad_blocks(x: Tensor, block: int = BLOCK) -> Tensor:
    """``[B, T, H, D]`` -> ``[B, N, block, H, D]``, the last block filled up with zeros."""
    batch, tokens, heads, dim = x.shape
    count = num_blocks(tokens, block)
    missing = count * block - tokens
    if missing:
        x = torch.cat([x, x.new_zeros(batch, missing, heads, dim)], dim=1)
    return x.reshape(batch, count, block, heads, dim)


def block_sum(x: Tensor, block: int = BLOCK) -> Tensor:
    """Sum over each block of ``[B, T, H, D]`` in at least float32: ``[B, N, H, D]``."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return pad_blocks(x, block).sum(dim=2, dtype=wide)


def block_mean(x: Tensor, block: int = BLOCK) -> Tensor:
    """Mean over the true length of each block, in at least float32: ``[B, N, H, D]``."""
    lengths = block_lengths(x.shape[1], block, x.device)
    return block_sum(x, block) / lengths[None, :, None, None]


@dataclass(frozen=True)
class Box:
    """Half-open (t, h, w) box around the video tokens of a block."""

    t: tuple[int, int]
    h: tuple[int, int]
    w: tuple[int, int]

    def __str__(self) -> str:
        parts = (f"{name} {low}-{high - 1}" for name, (low, high) in zip("thw", self.axes))
        return ", ".join(parts)

    @property
    def axes(self) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
        return self.t, self.h, self.w


@dataclass(frozen=True)
class TokenGrid:
    """A latent video grid inside a token sequence.

    Args:
        shape: latent frames, rows, columns (T, H, W), each at least 1; ragged sizes are fine.
        prefix: text tokens before the video tokens.
        suffix: text tokens after them.
        order: ``raster`` (t, h, w nested loops), ``tile`` (4x4x4 cubes in t, h, w order, tokens of
            a cube together), or ``morton`` (3-D Z-curve, column in the lowest bit, frame in the
            highest; sol_attn specification section 12.1).

    Raises:
        TypeError, ValueError: an axis, count or order that is not allowed.
    """

    shape: tuple[int, int, int]
    prefix: int = 0
    suffix: int = 0
    order: str = "raster"

    def __post_init__(self) -> None:
        shape = self.shape
        if not isinstance(shape, Sequence) or isinstance(shape, str) or len(shape) != 3:
            raise TypeError(f"shape={shape!r}: expected three integers (frames, rows, columns)")
        axes = tuple(checks.integer(f"shape[{n}]", x, minimum=1) for n, x in enumerate(shape))
        object.__setattr__(self, "shape", axes)
        checks.integer("prefix", self.prefix)
        checks.integer("suffix", self.suffix)
        checks.one_of("order", self.order, ORDERS)

    @property
    def video_tokens(self) -> int:
        return self.shape[0] * self.shape[1] * self.shape[2]

    @property
    def tokens(self) -> int:
        """Tokens of the whole sequence, text included."""
        return self.prefix + self.video_tokens + self.suffix

    @cached_property
    def permutation(self) -> Tensor:
        """int64 ``[tokens]``: the raster-order position of the token at each sequence position."""
        video = torch.argsort(self._sort_key(), stable=True) + self.prefix
        before = torch.arange(self.prefix)
        after = torch.arange(self.prefix + self.video_tokens, self.tokens)
        return torch.cat([before, video, after])

    @cached_property
    def inverse(self) -> Tensor:
        """int64 ``[tokens]``: the sequence position of each raster-order token."""
        return torch.argsort(self.permutation)

    @cached_property
    def coordinates(self) -> Tensor:
        """int64 ``[tokens, 3]``: (t, h, w) at each sequence position, (-1, -1, -1) for text."""
        rows = torch.full((self.tokens, 3), -1, dtype=torch.int64)
        rows[self.prefix : self.prefix + self.video_tokens] = self._raster_coordinates()
        return rows[self.permutation]

    def position(self, t: int, h: int, w: int) -> int:
        """Sequence position of the video token at (t, h, w)."""
        for name, value, size in zip("thw", (t, h, w), self.shape):
            checks.integer(name, value, maximum=size - 1)
        raster = self.prefix + (t * self.shape[1] + h) * self.shape[2] + w
        return int(self.inverse[raster])

    def arrange(self, x: Tensor, dim: int = 1) -> Tensor:
        """Raster-order tokens along ``dim`` -> this order."""
        return self._gather(x, self.permutation, dim)

    def restore(self, x: Tensor, dim: int = 1) -> Tensor:
        """Tokens in this order along ``dim`` -> raster order."""
        return self._gather(x, self.inverse, dim)

    def block_coordinates(self, index: int, block: int = BLOCK) -> Tensor:
        """(t, h, w) of the video tokens of one block, int64 ``[n, 3]`` (n = 0 for text alone)."""
        checks.integer("index", index, maximum=num_blocks(self.tokens, block) - 1)
        rows = self.coordinates[index * block : (index + 1) * block]
        return rows[rows[:, 0] >= 0]

    def box(self, index: int, block: int = BLOCK) -> Box | None:
        """Smallest (t, h, w) box around a block's video tokens, ``None`` if it holds text alone."""
        rows = self.block_coordinates(index, block)
        if not len(rows):
            return None
        low, high = rows.min(dim=0).values.tolist(), (rows.max(dim=0).values + 1).tolist()
        return Box(*zip(low, high))

    def _gather(self, x: Tensor, index: Tensor, dim: int) -> Tensor:
        if x.shape[dim] != self.tokens:
            raise ValueError(
                f"x: axis {dim} of shape {tuple(x.shape)} has {x.shape[dim]} tokens, "
                f"but grid {self.shape} with its text has {self.tokens}"
            )
        return x.index_select(dim, index.to(x.device))

    def _raster_coordinates(self) -> Tensor:
        axes = (torch.arange(size) for size in self.shape)
        return torch.cartesian_prod(*axes).reshape(-1, 3)

    def _sort_key(self) -> Tensor:
        t, h, w = self._raster_coordinates().unbind(dim=1)
        if self.order == "morton":
            return _spread3(w) | _spread3(h) << 1 | _spread3(t) << 2
        if self.order == "tile":
            _, rows, columns = (num_blocks(size, TILE_EDGE) for size in self.shape)
            cube = (t // TILE_EDGE * rows + h // TILE_EDGE) * columns + w // TILE_EDGE
            inside = (t % TILE_EDGE * TILE_EDGE + h % TILE_EDGE) * TILE_EDGE + w % TILE_EDGE
            return cube * TILE_EDGE**3 + inside
        return torch.arange(self.video_tokens)


def _spread3(x: Tensor) -> Tensor:
    """Inserts two zero bits between the bits of ``x`` (up to 20 bits)."""
    out = torch.zeros_like(x)
    for bit in range(20):
        out |= ((x >> bit) & 1) << (3 * bit)
    return out
