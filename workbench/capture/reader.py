"""Captures: recorded q, k, v of a model (or synthetic ones), read lazily from one file.

The file format is described in :mod:`workbench.capture.format`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from blockattn import BLOCK
from blockattn.layout import num_blocks
from workbench.capture.format import (
    HEADER_DIGEST,
    LENGTH_BYTES,
    PARTS,
    VIDEO,
    CaptureSpec,
    combined_digest,
    header_digest,
    tensor_name,
)
from workbench.capture.header import Shape, described
from workbench.paths import data_dir

BUNDLED_CAPTURE = "tiny_video_capture.safetensors"


@dataclass(frozen=True)
class QKV:
    """Inputs of one attention call.

    Attributes:
        q, k, v: `[B, T, H, D]`, bfloat16 when they come from a file, tokens in the grid's order.
        layer, step: where they were recorded.
        time: denoising time in [0, 1], 1 = noisiest.
        query_blocks: blocks of 64 queries that q holds, `[B, rows, H, D]`; None = every row.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    layer: int
    step: int
    time: float
    query_blocks: tuple[int, ...] | None = None

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> QKV:
        """The same call on another device or in another dtype."""
        q, k, v = (x.to(device=device, dtype=dtype) for x in (self.q, self.k, self.v))
        return replace(self, q=q, k=k, v=v)


class Capture:
    """Lazy reader of one capture file; made by :func:`open_capture`.

    Attributes:
        path: the file.
        grid: tokens along (t, h, w), text and token order.
        entries: (layer, step) present, sorted. layers, steps: those that occur, sorted.
        source: `model` or `synthetic`.
        title: a human label that says "synthetic" when the source is, and what was left out.
        metadata: every fact in the header, as strings.
        checksum: sha256 over all tensors, as the header states it; `verify()` compares.
        batch, heads, kv_heads, head_dim: sizes of q and of k, v, as the file holds them.
        head_indices: the model's index of every query head.
        query_blocks: blocks of 64 queries that q holds; None = every row.
    """

    def __init__(self, path: Path, metadata: Mapping[str, str], shapes: Mapping[str, Shape]):
        self.path = path
        self.metadata = metadata
        spec, times = described(path, metadata, shapes)
        self._check_tensors(spec, shapes)
        self._spec = spec
        self._times = times
        self.grid = spec.grid
        self.entries = list(spec.entries)
        self.layers = sorted({layer for layer, _ in self.entries})
        self.steps = sorted({step for _, step in self.entries})
        self.source = cast(Literal["model", "synthetic"], spec.source)
        self.title = spec.label
        self.checksum = metadata["sha256"]
        self.batch, self.heads, self.head_dim = spec.batch, spec.part_shape("q")[2], spec.head_dim
        self.kv_heads = spec.part_shape("k")[2]
        self.head_indices = spec.selection.kept_heads(spec.heads, spec.call_shape("k")[2])[0]
        self.query_blocks = spec.selection.query_blocks

    @property
    def summary(self) -> str:
        """What a command says of a file it made: size and title; contents and checksum."""
        pairs = ", ".join(f"({layer}, {step})" for layer, step in self.entries)
        size = f"wrote {self.path.stat().st_size:,} bytes"
        return f"{self.path}: {size}, {self.title}\n(layer, step): {pairs}; sha256 {self.checksum}"

    def load(self, layer: int, step: int) -> QKV:
        """Reads one entry with all its query rows into memory.

        Raises:
            ValueError: there is no such entry; the message lists those there are. Or the capture
                holds some query blocks alone, see :meth:`load_rows`.
        """
        if self.query_blocks is not None:
            raise ValueError(
                f"{self.path}: holds {len(self.query_blocks)} of {num_blocks(self.grid.tokens):,} "
                f"query blocks of {BLOCK}, and this needs every query row; use `workbench tune` or "
                "Capture.load_rows, or record again without query_blocks"
            )
        return self.load_rows(layer, step)

    def load_rows(self, layer: int, step: int) -> QKV:
        """Reads one entry into memory, with the query rows that are there (`query_blocks`)."""
        time = self.time(layer, step)
        with _opened(self.path) as file:
            q, k, v = (file.get_tensor(tensor_name(layer, step, part)) for part in PARTS)
        return QKV(q, k, v, layer, step, time, self.query_blocks)

    def time(self, layer: int, step: int) -> float:
        """Denoising time of an entry, 1 = noisiest."""
        if (layer, step) not in self._times:
            raise ValueError(
                f"layer={layer!r}, step={step!r}: not in {self.path}, which holds (layer, step) "
                f"{self.entries}"
            )
        return self._times[layer, step]

    @cached_property
    def video(self) -> Tensor | None:
        """The sampled video, uint8 `[frames, height, width, 3]`, or None."""
        if self._spec.video_shape is None:
            return None
        with _opened(self.path) as file:
            return file.get_tensor(VIDEO)

    def verify(self) -> None:
        """Reads everything and compares the checksums of tensors and header.

        Raises:
            ValueError: bytes changed since the file was written; the message names the tensors.
        """
        stated = _stated_digests(self.metadata["tensor_sha256"])
        found = {}
        with _opened(self.path) as file:
            for name in self._spec.tensors:
                data = file.get_tensor(name).contiguous().view(torch.uint8).numpy().data
                found[name] = hashlib.sha256(data).hexdigest()
        damaged = [name for name, digest in found.items() if stated.get(name) != digest]
        header = header_digest(self.metadata)
        changed = self.metadata.get(HEADER_DIGEST, header) != header
        if damaged or changed or combined_digest(found) != self.checksum:
            raise ValueError(
                f"{self.path}: checksum mismatch in {damaged or 'the header'}; the file changed "
                "after it was recorded: copy it or record it again"
            )

    def __repr__(self) -> str:
        return (
            f"Capture({str(self.path)!r}, {self.title!r}, grid {self.grid.shape}, "
            f"{self.heads} heads of {self.head_dim}, layers {self.layers}, steps {self.steps})"
        )

    def _check_tensors(self, spec: CaptureSpec, shapes: Mapping[str, Shape]) -> None:
        for name, wanted in spec.tensors.items():
            if name not in shapes:
                raise ValueError(
                    f"{self.path}: tensor {name!r} is missing, though the header lists its entry; "
                    "record it again"
                )
            dtype, shape = shapes[name]
            if (dtype, shape) != (wanted.dtype, wanted.shape):
                raise ValueError(
                    f"{self.path}: {name} is {dtype} {list(shape)}, but grid {spec.grid.shape} "
                    f"asks for {wanted.dtype} {list(wanted.shape)}; record it again"
                )


def open_capture(path: str | Path | None = None) -> Capture:
    """Opens a capture and checks its header; tensors are read when asked for.

    Args:
        path: a file made by `workbench capture` or `workbench synth`; None = the bundled one.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is truncated, no safetensors file, of another format or version, lacks a
            tensor, or has one of a wrong dtype or shape. Each names the file and the fix.
    """
    chosen = data_dir() / BUNDLED_CAPTURE if path is None else Path(path)
    if not chosen.is_file():
        raise FileNotFoundError(
            f"{chosen}: no such file; make one with `workbench capture --out FILE`, or leave the "
            "path out for the bundled capture"
        )
    with _opened(chosen) as file:
        metadata = dict(file.metadata() or {})
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        shapes = {name: (x.get_dtype(), tuple(x.get_shape())) for name, x in slices.items()}
    return Capture(chosen, metadata, shapes)


def _stated_digests(text: str) -> dict[str, str]:
    """Checksum of each tensor by the header; none where that entry itself is damaged."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _opened(path: Path) -> safe_open:
    try:
        return safe_open(str(path), framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path}: {_what_is_wrong(path)} ({error})") from error


def _what_is_wrong(path: Path) -> str:
    """Why safetensors refused a file, and the fix."""
    size = path.stat().st_size
    with path.open("rb") as file:
        room = int.from_bytes(file.read(LENGTH_BYTES), "little")
        text = file.read(min(room, size))
    try:
        header = json.loads(text)
        stop = max(x["data_offsets"][1] for key, x in header.items() if key != "__metadata__")
    except (ValueError, AttributeError, KeyError, TypeError):
        return "no capture: it is not a safetensors file; make one with `workbench capture`"
    wanted = LENGTH_BYTES + room + stop
    return f"truncated: {size:,} bytes of {wanted:,}; copy or record it again"
