"""Videos as files: an animated GIF, and a contact sheet of evenly spaced frames.

Pillow writes the GIF; it is there because matplotlib needs it. A GIF holds 256 colours per frame,
so it is for looking; figures are computed from the video itself.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from blockattn import checks
from workbench.models.contact_sheet import contact_sheet, write_png

MAX_FPS = 50  # viewers slow down what is shorter than two hundredths of a second


def write_gif(path: str | Path, video: Tensor, *, fps: int = 8, zoom: int = 4) -> Path:
    """Writes an endless animation; folders are made.

    Args:
        path: a .gif file, which is replaced.
        video: [F, H, W, 3] in [0, 1].
        fps: frames per second, 1 to 50.
        zoom: whole-number magnification.

    Raises:
        TypeError, ValueError: an argument is not allowed.
    """
    checks.integer("fps", fps, minimum=1, maximum=MAX_FPS)
    checks.integer("zoom", zoom, minimum=1)
    target = Path(path)
    if target.suffix.lower() != ".gif":
        raise ValueError(f"path={str(path)!r}: must end in .gif")
    frames = [Image.fromarray(frame).quantize(256) for frame in pixels(video, zoom)]
    target.parent.mkdir(parents=True, exist_ok=True)
    # Times are whole hundredths of a second in this format.
    duration = 10 * round(100 / fps)
    frames[0].save(
        target, save_all=True, append_images=frames[1:], duration=duration, loop=0, optimize=False
    )
    return target


def write_sheet(path: str | Path, video: Tensor, *, columns: int = 8, zoom: int = 2) -> Path:
    """Writes a PNG with a row of evenly spaced frames of the video [F, H, W, 3]."""
    target = Path(path)
    write_png(target, contact_sheet(_checked(video)[None], columns=columns, zoom=zoom))
    return target


def pixels(video: Tensor, zoom: int = 1) -> np.ndarray:
    """uint8 [F, zoom H, zoom W, 3] of a video [F, H, W, 3] in [0, 1]."""
    small = _checked(video).detach().float().cpu().clamp(0, 1).mul(255).round()
    return small.byte().numpy().repeat(zoom, axis=1).repeat(zoom, axis=2)


def _checked(video: Tensor) -> Tensor:
    if not isinstance(video, Tensor) or not video.is_floating_point():
        raise TypeError("video: expected a floating-point tensor [F, H, W, 3] in [0, 1]")
    if video.ndim != 4 or video.shape[3] != 3 or video.numel() == 0:
        raise ValueError(f"video: shape {tuple(video.shape)}, expected [F, H, W, 3], not empty")
    if not bool(torch.isfinite(video).all()):
        raise ValueError("video: holds NaN or infinite values, which have no colour")
    return video
