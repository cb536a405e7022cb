"""What is timed on: sizes, q, k, v of two kinds, random block masks; all of it reproducible."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from blockattn import BlockRoute, TokenGrid
from blockattn.layout import num_blocks
from workbench.bench.timing import (
    Timer,
    count_syncs,
    gpu_clocks,
    host_seconds,
    interleaved_on_gpu,
)
from workbench.fields import fields_qkv

QKV = tuple[Tensor, Tensor, Tensor]
KINDS = ("random", "video-like")


@dataclass(frozen=True)
class Sizes:
    """How large the timed and the checked problems are.

    Attributes:
        long: grid of the video that most rows time; short: the second length of row 3.
        check: grid of the parity check; its last block of 64 tokens may be ragged.
        heads, check_heads, head_dim: sizes.
        densities: of the random block masks (row 3).
        taus: of the ladder from sparse to dense, for the break-even density.
        repeats: rounds behind each median.
        matrix, copy_bytes: of the two ceilings.
    """

    long: tuple[int, int, int] = (8, 64, 64)
    short: tuple[int, int, int] = (8, 32, 64)
    check: tuple[int, int, int] = (9, 15, 15)
    heads: int = 24
    check_heads: int = 4
    head_dim: int = 128
    densities: tuple[float, ...] = (0.05, 0.10, 0.164, 0.25)
    taus: tuple[float, ...] = (2.5, 2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -1000.0)
    repeats: int = 21
    matrix: int = 8192
    copy_bytes: int = 2**31


QUICK = Sizes(
    long=(8, 32, 32),
    short=(8, 16, 32),
    check=(5, 11, 13),
    densities=(0.10, 0.25),
    taus=(2.0, 1.0, 0.0, -1000.0),
    repeats=5,
    matrix=4096,
    copy_bytes=2**29,
)


@dataclass
class Bench:
    """Where and how a run measures; the three functions are what a test replaces."""

    sizes: Sizes = field(default_factory=Sizes)
    device: torch.device = field(default_factory=lambda: torch.device("cuda"))
    dtype: torch.dtype = torch.bfloat16
    timer: Timer = interleaved_on_gpu
    count_syncs: Callable[[Callable[[], object]], int] = count_syncs
    host_seconds: Callable[[Callable[[], object], int], float] = host_seconds
    clocks: Callable[[], dict[str, float] | None] = gpu_clocks
    say: Callable[[str], None] = lambda text: None
    made: dict[tuple, QKV] = field(default_factory=dict)

    def qkv(self, kind: str, grid: tuple[int, int, int], heads: int | None = None) -> QKV:
        """q, k, v ``[1, T, H, D]`` of a kind, made once. Blocks of a video are 4 x 4 x 4 boxes."""
        key = (kind, grid, heads)
        if key not in self.made:
            self.made[key] = self._make(kind, grid, heads or self.sizes.heads)
        return self.made[key]

    def keep_only(self, grids: Iterable[tuple[int, int, int]]) -> None:
        """Frees tensors of other grids."""
        self.made = {key: data for key, data in self.made.items() if key[1] in set(grids)}

    def _make(self, kind: str, shape: tuple[int, int, int], heads: int) -> QKV:
        grid, dim = TokenGrid(shape, order="tile"), self.sizes.head_dim
        if kind == "video-like":
            q, k, v = fields_qkv(grid, heads=heads, head_dim=dim, dtype=self.dtype)
            return q.to(self.device), k.to(self.device), v.to(self.device)
        generator = torch.Generator(self.device).manual_seed(0)
        size = (1, grid.tokens, heads, dim)
        q, k, v = (
            torch.randn(size, generator=generator, device=self.device).to(self.dtype)
            for _ in range(3)
        )
        return q, k, v


def random_mask(q: Tensor, density: float, *, block: int = 64, seed: int = 1) -> BlockRoute:
    """A route of ``block`` x ``block`` with a random subset of each row's key blocks.

    Every row keeps the same number of blocks, at least one, as the masks of the table do.
    """
    count = num_blocks(q.shape[1], block)
    kept = max(1, round(density * count))
    generator = torch.Generator(q.device).manual_seed(seed)
    shape = (q.shape[0], q.shape[2], count, count)
    order = torch.rand(shape, generator=generator, device=q.device).argsort(dim=-1)
    mask = torch.zeros(shape, dtype=torch.bool, device=q.device)
    mask.scatter_(-1, order[..., :kept], True)
    return BlockRoute.from_dense(mask, block=(block, block), seqlens=(q.shape[1], q.shape[1]))


def describe(q: Tensor) -> str:
    """Shape and dtype of q in words."""
    dtype = str(q.dtype).removeprefix("torch.")
    return f"B {q.shape[0]}, T {q.shape[1]:,}, H {q.shape[2]}, D {q.shape[3]}, {dtype}"
