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


@dataclass(frozen=True, eq=False)
class BlockRoute:
    """Block pairs of ``[B, H]`` heads, packed 32 key blocks to a word.

    Attributes:
        words: int32 ``[B, H, Nq, ceil(Nk / 32)]``; bit r of word w is key block 32 w + r; pad
            bits are 0.
        block: tokens of a query block and of a key block (Lq, Lk).
        seqlens: tokens of the query and of the key sequence (Tq, Tk).

    Two routes are equal when heads, geometry and every bit are (on a GPU this reads the device).

    Raises:
        TypeError, ValueError: words of another dtype or shape than block and seqlens ask for, or
            with a pad bit set (checked on the CPU alone, where it costs no synchronisation).
    """

    words: Tensor
    block: tuple[int, int]
    seqlens: tuple[int, int]

    def __post_init__(self) -> None:
        object.__setattr__(self, "block", checks.integer_pair("block", self.block))
        object.__setattr__(self, "seqlens", checks.integer_pair("seqlens", self.seqlens, minimum=0))
        if not isinstance(self.words, Tensor) or self.words.dtype != torch.int32:
            kind = getattr(self.words, "dtype", type(self.words).__name__)
            raise TypeError(f"words: {kind}, expected an int32 tensor [B, H, Nq, ceil(Nk / 32)]")
        expected = (self.grid[0], num_blocks(self.grid[1], 32))
        if self.words.dim() != 4 or tuple(self.words.shape[2:]) != expected:
            raise ValueError(
                f"words: shape {tuple(self.words.shape)} does not fit seqlens {self.seqlens} with "
                f"blocks {self.block}; expected [B, H, {expected[0]}, {expected[1]}]"
            )
        used = self.grid[1] % 32
        if used and self.words.device.type == "cpu" and (self.words[..., -1] >> used).any():
            raise ValueError(
                f"words: a bit past key block {self.grid[1] - 1} is set; the last word uses its "
                f"low {used} bits, clear the others"
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
        grid = _grid(seqlens, block)
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
        queries, keys = _grid(seqlens, block)
        counts = torch.full((1,), keys, device=device)
        words = _leading(counts, keys).expand(*_heads(shape), queries, -1).contiguous()
        return cls(words, block, seqlens)

    @classmethod
    def causal(
        cls,
        shape: tuple[int, int],
        *,
        seqlens: tuple[int, int],
        block: tuple[int, int] = (BLOCK, BLOCK),
        device: torch.device | str | None = None,
    ) -> BlockRoute:
        """Pairs with at least one key that a query of the block may see (key <= query)."""
        queries, keys = _grid(seqlens, block)
        seen = ((torch.arange(queries, device=device) + 1) * block[0]).clamp(max=seqlens[0])
        counts = ((seen + block[1] - 1) // block[1]).clamp(max=keys)
        words = _leading(counts, keys).expand(*_heads(shape), -1, -1).contiguous()
        return cls(words, block, seqlens)

    # -- reading it ---------------------------------------------------------------------------

    @property
    def grid(self) -> tuple[int, int]:
        """Number of query blocks and of key blocks (Nq, Nk)."""
        return _grid(self.seqlens, self.block)

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
        # Bits of every byte by pairs, then fours, then eights: no table to copy to the device.
        x = _bytes(self.words)
        x = x - ((x >> 1) & 0x55)
        x = (x & 0x33) + ((x >> 2) & 0x33)
        return ((x + (x >> 4)) & 0x0F).sum(dim=-1, dtype=torch.int64)

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

        A pixel covers fr x fc pairs, each the smallest whole factor that fits, and holds their mean
        (so it is a local density); the last row and column average the pairs that exist. float32.
        """
        checks.integer("size", size, minimum=1)
        checks.integer("batch", batch, maximum=self.shape[0] - 1)
        checks.integer("head", head, maximum=self.shape[1] - 1)
        top, bottom = _window("rows", rows, self.grid[0])
        left, right = _window("columns", columns, self.grid[1])
        pairs = _unpack(self.words[batch, head, top:bottom], self.grid[1])[:, left:right].float()
        for axis in (0, 1):
            pairs = _mean_pool(pairs, num_blocks(pairs.shape[axis], size), axis)
        return pairs

    # -- algebra ------------------------------------------------------------------------------

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BlockRoute):
            return NotImplemented
        same_geometry = (self.block, self.seqlens) == (other.block, other.seqlens)
        return same_geometry and self._comparable(other) and torch.equal(self.words, other.words)

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
        queries, keys = _grid(self.seqlens, block)
        fine = fine[:, :, :queries, :keys]
        return BlockRoute.from_dense(fine, block=block, seqlens=self.seqlens)

    def coarsen(self, block: tuple[int, int]) -> BlockRoute:
        """The smallest route in larger blocks that holds every pair of this one.

        For implementations that serve larger blocks only. A coarse block is exact where any of its
        blocks is, so the density grows: compare :meth:`density` before and after. No host
        synchronisation. ``block`` must be whole blocks of this route.
        """
        factors = []
        for own, wanted in zip(self.block, checks.integer_pair("block", block)):
            if wanted % own:
                raise ValueError(f"block={block}: must be whole blocks of this route, {self.block}")
            factors.append(wanted // own)
        if factors == [1, 1]:
            return self
        height, width = _grid(self.seqlens, block)
        fine = self.dense()
        missing = height * factors[0] - fine.shape[2], width * factors[1] - fine.shape[3]
        fine = pad(fine, (0, missing[1], 0, missing[0])).unflatten(3, (width, factors[1]))
        coarse = fine.unflatten(2, (height, factors[0])).any(dim=5).any(dim=3)
        return BlockRoute.from_dense(coarse, block=block, seqlens=self.seqlens)

    def _words_of(self, other: BlockRoute) -> Tensor:
        if not isinstance(other, BlockRoute):
            raise TypeError(f"expected a BlockRoute, got {type(other).__name__}")
        if (other.block, other.seqlens) != (self.block, self.seqlens):
            raise ValueError(
                f"routes differ in geometry: blocks {self.block} over tokens {self.seqlens} "
                f"against blocks {other.block} over {other.seqlens}; route the same tensors"
            )
        if not self._comparable(other):
            raise ValueError(
                f"routes differ: {self.shape[:2]} (B, H) heads on {self.device} against "
                f"{other.shape[:2]} on {other.device}; take the same heads(), or use to()"
            )
        return other.words

    def _comparable(self, other: BlockRoute) -> bool:
        return self.shape == other.shape and self.device == other.device

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
                    raise ValueError(f"format is {metadata.get('format')!r}")
                block, seqlens = (json.loads(metadata[key]) for key in ("block", "seqlens"))
                return cls(file.get_tensor("words"), block, seqlens)
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path}: not a route that BlockRoute.save wrote ({error}); save it again"
            ) from error

    @cached_property
    def _summary(self) -> str:
        batch, heads, queries, keys = self.shape
        return (
            f"BlockRoute({batch} x {heads} heads, {queries} x {keys} blocks of {self.block}, "
            f"density {self.density():.4f})"
        )

    def __repr__(self) -> str:
        return self._summary


def _grid(seqlens: object, block: object) -> tuple[int, int]:
    """Query and key blocks (Nq, Nk) of checked lengths and block sizes."""
    lengths = checks.integer_pair("seqlens", seqlens, minimum=0)
    sizes = checks.integer_pair("block", block)
    return num_blocks(lengths[0], sizes[0]), num_blocks(lengths[1], sizes[1])


def _heads(shape: object) -> tuple[int, int]:
    return checks.integer_pair("shape", shape)


def _bytes(words: Tensor) -> Tensor:
    """int32 ``[..., W]`` -> uint8 ``[..., 4 W]``, lowest byte first."""
    # A single word per row may lie at any stride and still count as contiguous; bytes may not.
    packed = words.contiguous()
    if packed.stride(-1) != 1:
        packed = packed.clone(memory_format=torch.contiguous_format)
    return packed.view(torch.uint8)


def _window(name: str, given: object, count: int) -> tuple[int, int]:
    if given is None:
        return 0, count
    low, high = checks.integer_pair(name, given, minimum=0)
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


def _leading(counts: Tensor, width: int) -> Tensor:
    """Words with only the first bits set: int64 ``[N]`` -> int32 ``[N, ceil(width / 32)]``."""
    start = torch.arange(0, width, 32, device=counts.device)
    bits = (counts[:, None] - start).clamp(0, 32)
    return ~(-1 << bits).int()


def _pack(mask: Tensor) -> Tensor:
    """bool ``[..., N]`` -> int32 ``[..., ceil(N / 32)]``, lowest bit first."""
    words = num_blocks(mask.shape[-1], 32)
    if not words:
        return torch.zeros(mask.shape, dtype=torch.int32, device=mask.device)
    padded = mask.new_zeros(*mask.shape[:-1], words * 32)
    padded[..., : mask.shape[-1]] = mask
    # Eight bools are one integer; the product lines their bits up in its highest byte.
    eights = padded.view(torch.int64) * 0x0102040810204080
    return (eights >> 56).to(torch.uint8).view(torch.int32)


def _unpack(words: Tensor, count: int) -> Tensor:
    """int32 ``[..., W]`` -> bool ``[..., count]``."""
    as_bytes = _bytes(words).unsqueeze(-1)
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=words.device)
    return ((as_bytes & weights) != 0).flatten(-2)[..., :count]
