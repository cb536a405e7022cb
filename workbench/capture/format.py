"""What a capture file looks like: its tensors, its header, and how large it will be.

One safetensors file. Tensors `layer{L}.step{S}.q|k|v` are bfloat16 [B, T, H, D] in the token order
of the grid; an optional tensor `video` is uint8 [frames, height, width, 3]. With a `selection` they
hold chosen heads, and q chosen query blocks, in ascending order. Everything else is a string in
the header's metadata. The header comes first in the file but times and checksums are
known last, so its room is reserved for the longest numbers and filled up with spaces.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from blockattn import BLOCK, TokenGrid, checks
from workbench.capture.selection import Selection

FORMAT = "workbench.capture"
VERSION = "1"
SOURCES = ("model", "synthetic")
PARTS = ("q", "k", "v")
VIDEO = "video"
SELECTION = "selection"
HEADER_DIGEST = "header_sha256"  # older files have none
ITEM_BYTES = {"BF16": 2, "U8": 1}
LENGTH_BYTES = 8  # a safetensors file starts with the length of its header, uint64

_LONGEST_FLOAT = -2.2250738585072014e-308  # 24 characters, no float64 is written with more
_NO_DIGEST = "0" * 64


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of the file: safetensors dtype, shape, and half-open bytes within the data."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class CaptureSpec:
    """Everything about a capture file except the numbers in it.

    Args:
        grid: tokens along (t, h, w), text and token order.
        entries: (layer, step) pairs; sorted, without repeats.
        heads: query heads of the model. kv_heads: key and value heads, `heads` when None.
        head_dim: channels of a head.
        batch: samples B.
        video_shape: (frames, height, width) of the sampled video in pixels, None without one.
        source: `model` or `synthetic`.
        title: a human label. It always says "synthetic" when the source is.
        selection: heads and query blocks that are kept of every call; all by default.
        details: further facts as strings (model, seed, label, ...).

    Raises:
        TypeError, ValueError: a size, entry, source or detail that is not allowed.
    """

    grid: TokenGrid
    entries: tuple[tuple[int, int], ...]
    heads: int
    head_dim: int
    kv_heads: int | None = None
    batch: int = 1
    video_shape: tuple[int, int, int] | None = None
    source: str = "model"
    title: str = ""
    details: Mapping[str, str] = field(default_factory=dict)
    selection: Selection = field(default_factory=Selection)

    def __post_init__(self) -> None:
        if not isinstance(self.grid, TokenGrid):
            raise TypeError(f"grid={self.grid!r}: expected a blockattn.TokenGrid")
        for name in ("heads", "head_dim", "batch"):
            checks.integer(name, getattr(self, name), minimum=1)
        kv_heads = self.heads if self.kv_heads is None else self.kv_heads
        object.__setattr__(self, "kv_heads", checks.integer("kv_heads", kv_heads, minimum=1))
        checks.one_of("source", self.source, SOURCES)
        object.__setattr__(self, "entries", _checked_entries(self.entries))
        object.__setattr__(self, "title", _honest_title(self.title, self.source))
        _check_details(self.details)
        for name, size in zip(("frames", "height", "width"), self.video_shape or ()):
            checks.integer(f"video_shape {name}", size, minimum=1)
        self.selection.check(self.grid.tokens, self.heads, kv_heads)

    @cached_property
    def tensors(self) -> dict[str, TensorSpec]:
        """Every tensor by name, in the order of the file. The bytes leave no hole."""
        shapes = {
            tensor_name(*entry, part): ("BF16", self.part_shape(part))
            for entry in self.entries
            for part in PARTS
        }
        if self.video_shape is not None:
            shapes[VIDEO] = ("U8", (*self.video_shape, 3))
        table, start = {}, 0
        for name, (dtype, shape) in shapes.items():
            stop = start + math.prod(shape) * ITEM_BYTES[dtype]
            table[name] = TensorSpec(dtype, shape, start, stop)
            start = stop
        return table

    def part_shape(self, part: str) -> tuple[int, int, int, int]:
        """[B, rows, H, D] of q, or [B, T, H, D] of k or v, as the file holds them."""
        queries, keys = self.selection.kept_heads(self.heads, self.kv_heads or self.heads)
        if part != "q":
            return self.batch, self.grid.tokens, len(keys), self.head_dim
        rows = len(self.selection.rows(self.grid.tokens))
        return self.batch, rows, len(queries), self.head_dim

    def call_shape(self, part: str) -> tuple[int, int, int, int]:
        """[B, T, H, D] of q, k or v of a whole call, before anything is selected."""
        heads = self.heads if part == "q" or self.kv_heads is None else self.kv_heads
        return self.batch, self.grid.tokens, heads, self.head_dim

    @property
    def label(self) -> str:
        """The title, and what was kept where that is not everything."""
        kept = self.selection.describe(self.grid.tokens, self.heads)
        return f"{self.title} ({kept})".lstrip() if kept else self.title

    @cached_property
    def entry_bytes(self) -> int:
        """Bytes of q, k and v of one entry."""
        return sum(math.prod(self.part_shape(part)) for part in PARTS) * ITEM_BYTES["BF16"]

    @property
    def data_bytes(self) -> int:
        return max((spec.stop for spec in self.tensors.values()), default=0)

    @cached_property
    def header_bytes(self) -> int:
        """Bytes before the tensors, whatever the times and checksums turn out to be."""
        times = dict.fromkeys(self.entries, _LONGEST_FLOAT)
        length = len(self._header_json(times, dict.fromkeys(self.tensors, _NO_DIGEST)))
        return LENGTH_BYTES + length + -length % 8

    @property
    def total_bytes(self) -> int:
        """Exact size of the finished file."""
        return self.header_bytes + self.data_bytes

    def header(self, times: Mapping[tuple[int, int], float], digests: Mapping[str, str]) -> bytes:
        """The first `header_bytes` of the file.

        Args:
            times: denoising time of every entry.
            digests: sha256 of the bytes of every tensor, as hex.
        """
        room = self.header_bytes - LENGTH_BYTES
        text = self._header_json(times, digests).ljust(room)
        return room.to_bytes(LENGTH_BYTES, "little") + text.encode("ascii")

    def _header_json(
        self, times: Mapping[tuple[int, int], float], digests: Mapping[str, str]
    ) -> str:
        header: dict[str, object] = {"__metadata__": self._metadata(times, digests)}
        for name, spec in self.tensors.items():
            offsets = [spec.start, spec.stop]
            header[name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": offsets}
        return json.dumps(header, separators=(",", ":"))

    def facts(self) -> dict[str, str]:
        """What the header says before anything is recorded."""
        return {**self._layout(), **self._selection(), **self.details}

    def _layout(self) -> dict[str, str]:
        grid = self.grid
        return {
            "format": FORMAT,
            "version": VERSION,
            "source": self.source,
            "title": self.title,
            "grid": json.dumps(grid.shape),
            "order": grid.order,
            "prefix": str(grid.prefix),
            "suffix": str(grid.suffix),
        }

    def _metadata(
        self, times: Mapping[tuple[int, int], float], digests: Mapping[str, str]
    ) -> dict[str, str]:
        facts = {
            **self._layout(),
            "entries": json.dumps([[*entry, times[entry]] for entry in self.entries]),
            **self._selection(),
            **self.details,
            "sha256": combined_digest(digests),
            "tensor_sha256": json.dumps(dict(digests), sort_keys=True),
        }
        return {**facts, HEADER_DIGEST: header_digest(facts)}

    def _selection(self) -> dict[str, str]:
        """Only where something is left out, so that whole captures stay as they are."""
        if self.selection.whole:
            return {}
        facts = {
            "model_heads": [self.heads, self.kv_heads],
            "heads": self.selection.heads,
            "query_blocks": self.selection.query_blocks,
            "block": BLOCK,
        }
        return {SELECTION: json.dumps(facts)}


RESERVED = (
    "format", "version", "source", "title", "grid", "order", "prefix", "suffix", "entries",
    "sha256", "tensor_sha256",
)  # fmt: skip
OWN = (*RESERVED, SELECTION, HEADER_DIGEST)  # what details must not be called


def tensor_name(layer: int, step: int, part: str) -> str:
    """Name of q, k or v of one attention call."""
    return f"layer{layer}.step{step}.{part}"


def combined_digest(digests: Mapping[str, str]) -> str:
    """sha256 over the sorted lines `name sha256`: one checksum that any arrival order gives."""
    lines = "".join(f"{name} {digests[name]}\n" for name in sorted(digests))
    return hashlib.sha256(lines.encode()).hexdigest()


def header_digest(metadata: Mapping[str, str]) -> str:
    """sha256 over the metadata, but for the entry that holds it."""
    facts = {name: text for name, text in metadata.items() if name != HEADER_DIGEST}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _checked_entries(entries: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    pairs = tuple(checks.integer_pair("entries", tuple(entry), minimum=0) for entry in entries)
    if not pairs:
        raise ValueError("entries is empty: name at least one (layer, step) to record")
    if len(set(pairs)) != len(pairs):
        raise ValueError(f"entries={list(pairs)}: a (layer, step) appears twice; name it once")
    return tuple(sorted(pairs))


def _honest_title(title: str, source: str) -> str:
    if source == "synthetic" and "synthetic" not in title.lower():
        return f"synthetic: {title}" if title else "synthetic"
    return title


def _check_details(details: Mapping[str, str]) -> None:
    for key, value in details.items():
        if key in OWN:
            raise ValueError(f"details has {key!r}, which the format itself uses; rename it")
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(f"details[{key!r}]={value!r}: keys and values must be strings")
