"""Tiles, stages and shared memory of the Hopper kernel of a variant (CuTe DSL)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute

from blockattn.impl.cute import wgmma
from blockattn.impl.cute.variant import Variant

ROWS = 64  # query rows of a group
GROUP = 128  # threads
WARP = 32
WARPS = GROUP // WARP  # of a group
BLOCK = 64  # tokens of a block of a route
SHARED = 227 * 1024  # bytes of shared memory of a program
MOST_STAGES = 8
SLOTS = 4  # items that the producer may have announced ahead
WORDS = 8  # of an announcement: is it an item, pair, head, batch, its three counts; and one unused
KINDS = 4  # of entries: of both groups, of the first, of the second; and one unused
BARRIERS = (
    "q_full", "q_empty", "k_full", "k_empty", "v_full", "v_empty", "item_full", "item_empty", "vote"
)  # fmt: skip
# Named barriers of the first group; those of the others follow.
OUTPUT_BARRIER = 1  # the output tile is written
TURN_BARRIER = 4  # a group may multiply
VALUES_BARRIER = 6  # padding of V is blanked
VOTE_BARRIER = 8  # all threads have voted
ELEMENTS = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}


@dataclass(frozen=True)
class Shapes:
    """What follows from a variant.

    Attributes:
        columns: keys of a tile: 64 for routes and padded blocks, else 128.
        ahead: scores of the next entry are multiplied under the softmax too, and Q is an operand
            from registers: read from shared memory for every product of 64 x 64, it would take all
            of its bandwidth. Otherwise, where nothing votes, the products of the two groups
            alternate, so that one multiplies while the other does its softmax.
        groups: that compute, each 64 query rows of an item.
        stages: tiles of K, and of V, in flight.
    """

    variant: Variant
    columns: int
    ahead: bool
    groups: int
    stages: int

    @classmethod
    def of(cls, variant: Variant) -> Shapes:
        """Tiles as measured to be best on an H200, and as many stages as shared memory holds."""
        by_blocks = variant.routed or variant.lengths
        columns = BLOCK if by_blocks else 2 * BLOCK
        groups = 3 if variant.skip == BLOCK and not by_blocks else 2
        rows = groups * ROWS * variant.dim * 2  # bytes of Q, whose place the output takes
        ring = 2 * columns * variant.dim * 2
        stages = min(MOST_STAGES, (SHARED - rows - 1024) // ring)
        return cls(variant, columns, by_blocks, groups, stages)

    @property
    def readers(self) -> int:
        """Warps that release a stage."""
        return self.groups * WARPS

    @property
    def element(self) -> Any:
        """Of q, k, v and the output."""
        return ELEMENTS[self.variant.dtype]

    def query_layout(self) -> Any:
        """Q, and the output: (rows, D, group)."""
        return wgmma.shared_layout(self.element, ROWS, self.variant.dim, self.groups)

    def key_layout(self) -> Any:
        """K, and V: (columns, D, stage)."""
        return wgmma.shared_layout(self.element, self.columns, self.variant.dim, self.stages)

    def arrivals(self, name: str) -> int:
        """Arrivals that end a phase of a barrier: one thread that fetches, or one for each warp."""
        if name.endswith("full"):
            return 1
        if name == "item_empty":
            return self.readers + 1  # and the warp that fetches V
        return WARPS if name == "q_empty" else self.readers

    def barriers(self, name: str) -> int:
        """How many of the barriers ``name`` there are."""
        if name.startswith("q"):
            return self.groups
        if name == "vote":
            return 1
        if name.startswith("item"):
            return SLOTS
        return self.stages * (KINDS if name.endswith("full") else 1)

    def storage(self) -> Any:
        """The structure in shared memory."""

        def tiles(layout: Any) -> Any:
            size = cute.cosize(layout)
            return cute.struct.Align[cute.struct.MemRange[self.element, size], 1024]

        words = cute.struct.MemRange
        query, keys = tiles(self.query_layout()), tiles(self.key_layout())
        # A class statement would give the fields' types as text, which cute.struct does not read.
        fields = {
            **{name: words[cutlass.Int64, self.barriers(name)] for name in BARRIERS},
            "entry": words[cutlass.Int32, self.stages],
            "notes": cute.struct.Align[words[cutlass.Int8, 2 * self.readers], 4],
            # Whole 16 bytes, or what is read at once has something else in front.
            "item": cute.struct.Align[words[cutlass.Int32, SLOTS * WORDS], 16],
            "q": query, "k": keys, "v": keys,
        }  # fmt: skip
        return cute.struct(type("Storage", (), {"__annotations__": fields}))
