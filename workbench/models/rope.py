"""Rotary position embedding over the (t, h, w) grid of a video (Su et al. 2021, per axis).

The head dimension is split over the three axes; inside each part, channel pairs turn by
position x frequency. A score q.k then depends only on the offset between two tokens in (t, h, w).
"""

from __future__ import annotations

import torch
from torch import Tensor


def axis_channels(head_dim: int) -> tuple[int, int, int]:
    """Channels for (t, h, w): a quarter for time, the rest shared by height and width.

    Raises:
        ValueError: if head_dim is no positive multiple of 16.
    """
    if head_dim < 16 or head_dim % 16:
        raise ValueError(
            f"head_dim={head_dim}: 3-D rotary embedding needs a positive multiple of 16 "
            "(a quarter for t, three eighths each for h and w, in pairs); use 64 or 128"
        )
    return head_dim // 4, 3 * head_dim // 8, 3 * head_dim // 8


def rotation_table(
    grid: tuple[int, int, int],
    head_dim: int,
    *,
    theta: float = 100.0,
    origin: tuple[int, int, int] = (0, 0, 0),
    device: torch.device | str | None = None,
) -> Tensor:
    """Cosine and sine of every token's rotation, tokens in raster order (t slowest, w fastest).

    Args:
        grid: tokens along (t, h, w).
        head_dim: channels of a head, a multiple of 16.
        theta: the slowest pair turns by about 1 / theta per token. Grids are short here, so the
            default is far below the 10,000 that is usual for text.
        origin: position of the first token.

    Returns:
        float32 [2, t * h * w, head_dim / 2].
    """
    parts = []
    for axis, (size, channels) in enumerate(zip(grid, axis_channels(head_dim), strict=True)):
        pairs = torch.arange(channels // 2, device=device, dtype=torch.float32)
        frequency = theta ** (-2 * pairs / channels)
        position = torch.arange(size, device=device, dtype=torch.float32) + origin[axis]
        shape = [1, 1, 1, channels // 2]
        shape[axis] = size
        parts.append((position[:, None] * frequency).view(shape).expand(*grid, -1))
    angle = torch.cat(parts, -1).flatten(0, 2)
    return torch.stack([angle.cos(), angle.sin()])


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Turn channel pairs (2i, 2i + 1) of x by the table.

    Args:
        x: [B, T, H, D].
        table: [2, T, D / 2] from `rotation_table`.

    Returns:
        float32 [B, T, H, D].
    """
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = table[:, :, None, :].unbind(0)
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)
