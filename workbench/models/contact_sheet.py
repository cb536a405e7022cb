"""Contact sheets: a row per video, a column per frame; PNG written without an image library."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .moving_shapes import signed_distance

GAP = 4


def contact_sheet(
    video: Tensor, *, labels: Sequence[int] | None = None, columns: int = 8, zoom: int = 2
) -> np.ndarray:
    """Lay videos out as rows of evenly spaced frames.

    Args:
        video: [B, frames, H, W, 3] in [0, 1].
        labels: class of every row; when given, its outline is drawn in front of the row.
        columns: frames shown per row, at most those there are.
        zoom: whole-number magnification.

    Returns:
        uint8 [rows, columns, 3] image.
    """
    columns = min(columns, video.shape[1])
    chosen = torch.linspace(0, video.shape[1] - 1, columns).round().long()
    cells = video.detach().float().cpu()[:, chosen]
    if labels is not None:
        cells = torch.cat([_glyphs(labels, *cells.shape[2:4])[:, None], cells], 1)
    pixels = cells.clamp(0, 1).mul(255).round().byte().numpy()
    pixels = pixels.repeat(zoom, axis=2).repeat(zoom, axis=3)
    rows, count, height, width, _ = pixels.shape
    sheet = np.full((rows * (height + GAP) + GAP, count * (width + GAP) + GAP, 3), 255, np.uint8)
    for r in range(rows):
        for c in range(count):
            top, left = GAP + r * (height + GAP), GAP + c * (width + GAP)
            sheet[top : top + height, left : left + width] = pixels[r, c]
    return sheet


def write_png(path: str | Path, image: np.ndarray) -> None:
    """Write a uint8 [H, W, 3] image as an 8-bit RGB PNG (ISO/IEC 15948)."""
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        raise ValueError(f"image is {image.dtype} {image.shape}: must be uint8 [H, W, 3]")
    height, width, _ = image.shape
    # Every scan line starts with its filter type; 0 is "none".
    lines = np.concatenate([np.zeros((height, 1), np.uint8), image.reshape(height, -1)], axis=1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + _chunk(b"IHDR", header)
        + _chunk(b"IDAT", zlib.compress(lines.tobytes(), 9))
        + _chunk(b"IEND", b"")
    )


def _chunk(kind: bytes, body: bytes) -> bytes:
    checksum = zlib.crc32(kind + body)
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", checksum)


def _glyphs(labels: Sequence[int], height: int, width: int) -> Tensor:
    """Black silhouettes of the classes on white: [B, height, width, 3]."""
    radius = 0.32 * min(height, width)
    y = (torch.arange(height) + 0.5 - height / 2).view(-1, 1) / radius
    x = (torch.arange(width) + 0.5 - width / 2).view(1, -1) / radius
    inside = [(0.5 - radius * signed_distance(label, x, -y)).clamp(0, 1) for label in labels]
    return (1 - torch.stack(inside))[..., None].expand(-1, -1, -1, 3)
