"""A route is a value: which (query block, key block) pairs are exact, as bits.

It can be looked at, edited, saved, compared, and run by every implementation.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import pad

from blockattn import checks
from blockattn.layout import BLOCK, num_blocks

_POPCOUNT = torch.tensor([bin(byte).count("1") for byte in range(256)], dtype=torch.uint8)


@dataclass(frozen=True)
class BlockRoute:
    """Block pairs of ``[B, H]`` heads, packed 32 key blocks to a word.

    Attributes:
        words: int32 ``[B, H, Nq, ceil(Nk / 32)]``; bit r of word w is key block 32 w + r, pad bits 0.
        block: tokens of a query block and of a key block (Lq, Lk).
        seqlens: tokens of the query and of the key sequence (Tq, Tk).

    Raises:
        TypeError, ValueError: words of another dtype or shape than block and seqlens ask for.
    """

    words: Tensor
    block: tuple[int, int]
    seqlens: tuple[int, int]

    def __post_init__(self) -> None:
        object.__setattr__(self, "block", checks.integer_pair("block", self.block))
        object.__setattr__(self, "seqlens", checks.integer_pair("seqlens", self.seqlens, minimum=0))
        if not isinstance(self.words, Tensor) or self.words.dtype != torch.int32:
            raise TypeError("words: expected an int32 tensor [B, H, Nq, ceil(Nk / 32)]")
        expected = (self.grid[0], num_blocks(self.grid[1], 32))
        if self.words.dim() != 4 or tuple(self.words.shape[2:]) != expected:
            raise ValueError(
                f"words: shape {tuple(self.words.shape)} does not fit seqlens {self.seqlens} with "
                f"blocks {self.block}; expected [B, H, {expected[0]}, {expected[1]}]"
            )

    # -- making one ---------------------------------------------------------------------------

    @classmethod
    def from_dense(
        cls,
        mask: Tensor,
        *,
        block: tuple[int, int] = (BLOCK, BLOCK),
        seqlens: tuple[int, int] | None = None,
    ) -> BlockRoute:
        """Packs a bool mask ``[B, H, Nq, Nk]``; ``seqlens`` defaults to whole blocks."""
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            raise TypeError("mask: expected a bool tensor [B, H, Nq, Nk]")
        if mask.dim() != 4:
            raise ValueError(f"mask: shape {tuple(mask.shape)}, expected [B, H, Nq, Nk]")
        block = checks.integer_pair("block", block)
        if seqlens is None:
            seqlens = (mask.shape[2] * block[0], mask.shape[3] * block[1])
        seqlens = checks.integer_pair("seqlens", seqlens, minimum=0)
        grid = tuple(num_blocks(n, size) for n, size in zip(seqlens, block))
        if tuple(mask.shape[2:]) != grid:
            raise ValueError(
                f"mask: {tuple(mask.shape[2:])} block pairs, but seqlens {seqlens} with blocks "
                f"{block} make {grid}"
            )
        return cls(_pack(mask), block, seqlens)

    @classmethod
    def full(
        cls,
        shape: tuple[int, int],
        *,
        seqlens: tuple[int, int],
        block: tuple[int, int] = (BLOCK, BLOCK),
        device: torch.device | str | None = None,
    ) -> BlockRoute:
        """Every pair of ``shape`` = (B, H) heads."""
        grid = tuple(num_blocks(n, size) for n, size in zip(seqlens, block))
        mask = torch.ones(*shape, *grid, dtype=torch.bool, device=device)
        return cls.from_dense(mask, block=block, seqlens=seqlens)

    @classmethod
    def causal(
        cls,
        shape: tuple[int, int],
        *,
        seqlens: tuple[int, int],
        block: tuple[int, int] = (BLOCK, BLOCK),
        device: torch.device | str | None = None,
    ) -> BlockRoute:
        """Pairs with at least one key that a query of the block may see (key index <= query index)."""
        queries, keys = (num_blocks(n, size) for n, size in zip(seqlens, block))
        last_query = ((torch.arange(queries, device=device) + 1) * block[0]).clamp(max=seqlens[0])
        first_key = torch.arange(keys, device=device) * block[1]
        mask = (first_key[None, :] < last_query[:, None]).expand(*shape, queries, keys)
        return cls.from_dense(mask, block=block, seqlens=seqlens)

    # -- reading it ---------------------------------------------------------------------------

    @property
    def grid(self) -> tuple[int, int]:
        """Number of query blocks and of key blocks (Nq, Nk)."""
        queries, keys = (num_blocks(n, size) for n, size in zip(self.seqlens, self.block))
        return queries, keys

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, Nq, Nk)."""
        return (self.words.shape[0], self.words.shape[1], *self.grid)

    @property
    def device(self) -> torch.device:
        return self.words.device

    @property
    def nbytes(self) -> int:
        return self.words.numel() * 4

    def dense(self) -> Tensor:
        """bool ``[B, H, Nq, Nk]``."""
        return _unpack(self.words, self.grid[1])

    def counts(self) -> Tensor:
        """Exact key blocks of every query block, int64 ``[B, H, Nq]``."""
        table = _POPCOUNT.to(self.device)
        as_bytes = self.words.contiguous().view(torch.uint8)
        return table[as_bytes.int()].sum(dim=-1, dtype=torch.int64)

    def density(self) -> float:
        """Exact pairs / valid pairs over everything, in [0, 1]; 0 when there are no pairs."""
        pairs = self.shape[0] * self.shape[1] * self.grid[0] * self.grid[1]
        return int(self.counts().sum()) / pairs if pairs else 0.0

    def density_per_head(self) -> Tensor:
        """float64 ``[B, H]``."""
        pairs = max(1, self.grid[0] * self.grid[1])
        return self.counts().sum(dim=-1).double() / pairs

    def density_per_row(self) -> Tensor:
        """float64 ``[B, H, Nq]``: share of key blocks that each query block attends exactly."""
        return self.counts().double() / max(1, self.grid[1])

    def lists(self) -> tuple[Tensor, Tensor]:
        """Exact key blocks as lists, on the device and without a host synchronisation.

        Returns:
            index int32 ``[B, H, Nq, Nk]``: exact key blocks in ascending order, then the others;
            count int32 ``[B, H, Nq]``: how many of them are exact.
        """
        others = ~self.dense()
        index = torch.argsort(others.to(torch.uint8), dim=-1, stable=True)
        return index.int(), self.counts().int()

    def image(
        self,
        batch: int = 0,
        head: int = 0,
        *,
        rows: tuple[int, int] | None = None,
        columns: tuple[int, int] | None = None,
        size: int = 512,
    ) -> Tensor:
        """One head's window of block rows and columns as a picture of at most ``size`` x ``size``.

        A pixel covers f x f pairs, f the smallest whole factor that fits, and holds their mean
        (so it is a local density); the last row and column average the pairs that exist. float32.
        """
        checks.integer("batch", batch, maximum=self.shape[0] - 1)
        checks.integer("head", head, maximum=self.shape[1] - 1)
        top, bottom = _window("rows", rows, self.grid[0])
        left, right = _window("columns", columns, self.grid[1])
        pairs = _unpack(self.words[batch, head, top:bottom], self.grid[1])[:, left:right].float()
        for axis in (0, 1):
            pairs = _mean_pool(pairs, num_blocks(pairs.shape[axis], size), axis)
        return pairs

    # -- algebra ------------------------------------------------------------------------------

    def __or__(self, other: BlockRoute) -> BlockRoute:
        return replace(self, words=self.words | self._words_of(other))

    def __and__(self, other: BlockRoute) -> BlockRoute:
        return replace(self, words=self.words & self._words_of(other))

    def __sub__(self, other: BlockRoute) -> BlockRoute:
        return replace(self, words=self.words & ~self._words_of(other))

    def differing(self, other: BlockRoute) -> int:
        """Number of block pairs on which two routes disagree."""
        return int(replace(self, words=self.words ^ self._words_of(other)).counts().sum())

    def heads(self, index: slice) -> BlockRoute:
        """The route of a slice of the heads."""
        return replace(self, words=self.words[:, index])

    def to(self, device: torch.device | str) -> BlockRoute:
        return replace(self, words=self.words.to(device))

    def refine(self, block: tuple[int, int]) -> BlockRoute:
        """The same token pairs in smaller blocks; ``block`` must divide this route's blocks."""
        factors = []
        for own, wanted in zip(self.block, checks.integer_pair("block", block)):
            if own % wanted:
                raise ValueError(f"block={block}: must divide this route's blocks {self.block}")
            factors.append(own // wanted)
        if factors == [1, 1]:
            return self
        fine = self.dense().repeat_interleave(factors[0], 2).repeat_interleave(factors[1], 3)
        queries, keys = (num_blocks(n, size) for n, size in zip(self.seqlens, block))
        fine = fine[:, :, :queries, :keys]
        return BlockRoute.from_dense(fine, block=block, seqlens=self.seqlens)

    def _words_of(self, other: BlockRoute) -> Tensor:
        if not isinstance(other, BlockRoute):
            raise TypeError(f"expected a BlockRoute, got {type(other).__name__}")
        if (other.block, other.seqlens) != (self.block, self.seqlens):
            raise ValueError(
                f"routes differ in geometry: blocks {self.block} over tokens {self.seqlens} "
                f"against blocks {other.block} over {other.seqlens}"
            )
        return other.words

    # -- files --------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Writes a safetensors file with the words and the geometry."""
        metadata = {"format": "blockattn.route", "block": json.dumps(self.block)}
        metadata["seqlens"] = json.dumps(self.seqlens)
        save_file({"words": self.words.contiguous().cpu()}, str(path), metadata=metadata)

    @classmethod
    def load(cls, path: str | Path) -> BlockRoute:
        """Reads what :meth:`save` wrote; ``ValueError`` names a file that is not a route."""
        try:
            with safe_open(str(path), framework="pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != "blockattn.route":
                    raise ValueError(
                        f"{path}: not a saved route (format {metadata.get('format')!r})"
                    )
                words = file.get_tensor("words")
        except SafetensorError as error:
            raise ValueError(f"{path}: cannot be read as a saved route: {error}") from error
        geometry = {key: tuple(json.loads(metadata[key])) for key in ("block", "seqlens")}
        return cls(words, **geometry)

    @cached_property
    def _summary(self) -> str:
        batch, heads, queries, keys = self.shape
        return (
            f"BlockRoute({batch} x {heads} heads, {queries} x {keys} blocks of {self.block}, "
            f"density {self.density():.4f})"
        )

    def __repr__(self) -> str:
        return self._summary


def _window(name: str, given: tuple[int, int] | None, count: int) -> tuple[int, int]:
    if given is None:
        return 0, count
    low, high = given
    checks.integer(f"{name}[0]", low, maximum=count - 1)
    checks.integer(f"{name}[1]", high, minimum=low + 1, maximum=count)
    return low, high


def _mean_pool(x: Tensor, factor: int, axis: int) -> Tensor:
    """Means of ``factor`` neighbours along an axis of a matrix; the last one over what is there."""
    if factor <= 1:
        return x
    if axis == 0:
        return _mean_pool(x.T, factor, 1).T
    count = x.shape[1]
    bins = num_blocks(count, factor)
    sums = pad(x, (0, bins * factor - count)).unflatten(1, (bins, factor)).sum(dim=2)
    lengths = (count - torch.arange(bins, device=x.device) * factor).clamp(max=factor)
    return sums / lengths


def _pack(mask: Tensor) -> Tensor:
    """bool ``[..., N]`` -> int32 ``[..., ceil(N / 32)]``, lowest bit first."""
    width = num_blocks(mask.shape[-1], 32) * 32
    bits = pad(mask.to(torch.uint8), (0, width - mask.shape[-1])).unflatten(-1, (-1, 8))
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=mask.device)
    packed = (bits * weights).sum(dim=-1, dtype=torch.uint8)
    return packed.contiguous().view(torch.int32)


def _unpack(words: Tensor, count: int) -> Tensor:
    """int32 ``[..., W]`` -> bool ``[..., count]``."""
    as_bytes = words.contiguous().view(torch.uint8).unsqueeze(-1)
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=words.device)
    return ((as_bytes & weights) != 0).flatten(-2)[..., :count]
