"""Which heads and which query rows of an attention call a capture keeps.

Keys and values are kept whole for the heads chosen, because every row of a map depends on all of
them. Queries may be kept for some blocks alone: a row of a route depends on no other row.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from blockattn import BLOCK, checks
from blockattn.layout import num_blocks

PAIR = 2  # blocks of 64: SkipSoftmax decides for 128 queries together


@dataclass(frozen=True)
class Selection:
    """The part of a call that is kept.

    Attributes:
        heads: query heads of the model, ascending; None keeps all. The key heads they read come
            with them.
        query_blocks: blocks of 64 queries, ascending; None keeps all rows of q.

    Raises:
        TypeError, ValueError: an empty list, a repeat, or an index that is no integer from 0 on.
    """

    heads: tuple[int, ...] | None = None
    query_blocks: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("heads", "query_blocks"):
            given = getattr(self, name)
            if given is not None:
                object.__setattr__(self, name, _ascending(name, given))

    @property
    def whole(self) -> bool:
        """Whether everything is kept."""
        return self.heads is None and self.query_blocks is None

    def check(self, tokens: int, heads: int, kv_heads: int) -> None:
        """Refuses what a model of these sizes does not have.

        Raises:
            ValueError: a head or block out of range, or key heads that would be shared unevenly.
        """
        _check_last("heads", self.heads, heads, "the model's heads")
        count = num_blocks(tokens)
        _check_last("query_blocks", self.query_blocks, count, f"blocks of {tokens:,} tokens")
        if self.heads is None or heads % kv_heads:
            return
        readers = Counter(head * kv_heads // heads for head in self.heads)
        if len(set(readers.values())) > 1:
            raise ValueError(
                f"heads={list(self.heads)}: key heads {dict(readers)} (key head: query heads) "
                "would be shared by unequal numbers of query heads; choose as many of each"
            )

    def kept_heads(self, heads: int, kv_heads: int) -> tuple[list[int], list[int]]:
        """Query heads and key heads that are kept, of so many."""
        if self.heads is None:
            return list(range(heads)), list(range(kv_heads))
        return list(self.heads), sorted({head * kv_heads // heads for head in self.heads})

    def rows(self, tokens: int) -> Tensor:
        """int64: the query tokens that are kept."""
        return block_rows(self.query_blocks, tokens)

    def describe(self, tokens: int, heads: int) -> str:
        """What is kept, in words; empty when that is everything."""
        parts = []
        if self.heads is not None:
            parts.append(f"heads {', '.join(map(str, self.heads))} of {heads}")
        if self.query_blocks is not None:
            parts.append(f"{len(self.query_blocks)} of {num_blocks(tokens):,} query blocks")
        return "; ".join(parts)


class Picker:
    """Cuts a selection out of q, k, v; the index tensors are made once for each device.

    Args:
        selection: what to keep. tokens, heads, kv_heads: sizes of the calls.
    """

    def __init__(self, selection: Selection, tokens: int, heads: int, kv_heads: int) -> None:
        query_heads, key_heads = selection.kept_heads(heads, kv_heads)
        self._rows = None if selection.query_blocks is None else selection.rows(tokens)
        self._heads = None if selection.heads is None else torch.tensor(query_heads)
        self._key_heads = None if selection.heads is None else torch.tensor(key_heads)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The kept part of each, `[B, rows, heads, D]`; a tensor of which all is kept as it is."""
        self._move(q.device)
        k, v = (_cut(x, None, self._key_heads) for x in (k, v))
        return _cut(q, self._rows, self._heads), k, v

    def _move(self, device: torch.device) -> None:
        for name in ("_rows", "_heads", "_key_heads"):
            index = getattr(self, name)
            if index is not None and index.device != device:
                setattr(self, name, index.to(device))


def spread_blocks(tokens: int, count: int) -> tuple[int, ...]:
    """Query blocks spread evenly over a sequence, in pairs that make up a tile of 128 queries.

    Args:
        tokens: length of the sequence.
        count: how many blocks, even; a sequence of an odd number of blocks may give one less.

    Raises:
        TypeError, ValueError: a count that is odd, or not in 2..blocks of the sequence.
    """
    blocks = num_blocks(checks.integer("tokens", tokens, minimum=1))
    pairs_there = num_blocks(blocks, PAIR)
    checks.integer("query_blocks", count, minimum=PAIR, maximum=PAIR * pairs_there)
    if count % PAIR:
        raise ValueError(
            f"query_blocks={count}: must be even, since SkipSoftmax decides for two blocks "
            f"together; take {count + 1}"
        )
    pairs = count // PAIR
    firsts = [(2 * n + 1) * pairs_there // (2 * pairs) * PAIR for n in range(pairs)]
    return tuple(block for first in firsts for block in (first, first + 1) if block < blocks)


def block_rows(blocks: tuple[int, ...] | None, tokens: int) -> Tensor:
    """int64: tokens of the given blocks of 64; of all when None."""
    if blocks is None:
        return torch.arange(tokens)
    places = torch.tensor(blocks)[:, None] * BLOCK + torch.arange(BLOCK)
    return places[places < tokens]


def _cut(x: Tensor, rows: Tensor | None, heads: Tensor | None) -> Tensor:
    if rows is not None and heads is not None:
        return x[:, rows[:, None], heads]  # one gather, nothing in between
    if rows is not None:
        return x[:, rows]
    return x if heads is None else x[:, :, heads]


def _ascending(name: str, given: object) -> tuple[int, ...]:
    if not isinstance(given, (tuple, list, range)):
        raise TypeError(f"{name}={given!r}: expected a tuple of integers, or None for all")
    values = tuple(checks.integer(f"{name}[{n}]", value) for n, value in enumerate(given))
    if not values:
        raise ValueError(f"{name} is empty: name at least one, or None for all")
    if len(set(values)) != len(values):
        raise ValueError(f"{name}={list(values)}: one appears twice; name it once")
    return tuple(sorted(values))


def _check_last(name: str, values: tuple[int, ...] | None, count: int, what: str) -> None:
    if values is not None and values[-1] >= count:
        raise ValueError(f"{name} has {values[-1]}: {what} count from 0 to {count - 1}")
