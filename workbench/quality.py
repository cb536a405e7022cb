"""How far a video is from another one, and what that is worth over several seeds.

A sparse run is compared with the dense run of the same seed. Two exact dense implementations differ
too (rounding grows along the sampling), so every table shows that control beside the verdict.
Videos are [F, H, W, 3] in [0, 1].
"""

from __future__ import annotations

import importlib.util
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv2d

from blockattn import UnsupportedError

WINDOW, SIGMA = 11, 1.5  # pixels
K1, K2 = 0.01, 0.03
LPIPS_BACKBONE = "alexnet-owt-7be5be79.pth"  # torchvision's name of AlexNet's weights


def psnr(video: Tensor, reference: Tensor) -> float:
    """Peak signal-to-noise ratio over the whole video, dB for a peak of 1; `inf` when equal.

    Args:
        video, reference: floating point [F, H, W, 3] in [0, 1].

    Raises:
        TypeError, ValueError: no such videos, or of two shapes.
    """
    a, b = _pair(video, reference)
    error = float((a - b).square().mean())
    return math.inf if error == 0 else -10 * math.log10(error)


def relative_l2(video: Tensor, reference: Tensor) -> float:
    """|video - reference| / |reference|; `inf` when the reference alone is black.

    Args and errors as of :func:`psnr`.
    """
    a, b = _pair(video, reference)
    error, size = float((a - b).norm()), float(b.norm())
    if size == 0:
        return 0.0 if error == 0 else math.inf
    return error / size


def ssim(video: Tensor, reference: Tensor) -> float:
    """Structural similarity, the mean over frames, channels and whole windows; 1 when equal.

    With a Gaussian window of 11 x 11 pixels and deviation 1.5, K1 = 0.01, K2 = 0.03 (Wang, Bovik,
    Sheikh, Simoncelli 2004). Against the same model's dense run it measures how far the trajectory
    moved, not whether the video is worse.

    Raises:
        TypeError, ValueError: as of :func:`psnr`, or frames smaller than the window.
    """
    a, b = _pair(video, reference)
    if min(a.shape[1:3]) < WINDOW:
        raise ValueError(
            f"video: frames of {a.shape[1]} x {a.shape[2]} pixels, but the window of SSIM has "
            f"{WINDOW} x {WINDOW}; use a larger grid, or psnr"
        )
    return float(_ssim_map(_planes(a), _planes(b)).mean())


def _ssim_map(x: Tensor, y: Tensor) -> Tensor:
    mean_x, mean_y = _blur(x), _blur(y)
    var_x = _blur(x * x) - mean_x.square()
    var_y = _blur(y * y) - mean_y.square()
    covariance = _blur(x * y) - mean_x * mean_y
    c1, c2 = K1**2, K2**2
    luminance = (2 * mean_x * mean_y + c1) / (mean_x.square() + mean_y.square() + c1)
    return luminance * (2 * covariance + c2) / (var_x + var_y + c2)


def _planes(video: Tensor) -> Tensor:
    """[F, H, W, 3] -> [3 F, 1, H, W]."""
    return video.permute(0, 3, 1, 2).flatten(0, 1)[:, None]


def _blur(planes: Tensor) -> Tensor:
    """Weighted means over whole windows."""
    offsets = torch.arange(WINDOW, dtype=planes.dtype, device=planes.device) - WINDOW // 2
    weights = torch.exp(-0.5 * (offsets / SIGMA).square())
    weights /= weights.sum()
    return conv2d(conv2d(planes, weights.view(1, 1, 1, -1)), weights.view(1, 1, -1, 1))


def lpips_obstacle() -> str | None:
    """What LPIPS lacks on this machine, ``None`` when it can run. Nothing is ever downloaded."""
    for package in ("lpips", "torchvision"):
        if importlib.util.find_spec(package) is None:
            return f"the package {package} is not installed"
    weights = Path(torch.hub.get_dir()) / "checkpoints" / LPIPS_BACKBONE
    if not weights.is_file():
        return f"the weights {LPIPS_BACKBONE} are not in {weights.parent.name}/ of torch.hub"
    try:
        import lpips  # noqa: F401  # pyright: ignore[reportMissingImports]
    except (ImportError, OSError) as error:  # OSError: a shared library of torchvision
        return f"the package lpips does not load ({error})"
    return None


class Lpips:
    """Learned perceptual distance of AlexNet's features (Zhang et al. 2018), mean over frames.

    Raises:
        UnsupportedError: the optional package or its weights are not here.
    """

    def __init__(self) -> None:
        obstacle = lpips_obstacle()
        if obstacle is not None:
            raise UnsupportedError(f"LPIPS: {obstacle}; install both by hand, or use ssim")
        self._net = _lpips_net()

    def __call__(self, video: Tensor, reference: Tensor) -> float:
        """Args and errors as of :func:`psnr`."""
        a, b = (x.float().permute(0, 3, 1, 2) * 2 - 1 for x in _pair(video, reference))
        with torch.no_grad():
            return float(self._net(a.cpu(), b.cpu()).mean())


def _lpips_net() -> Any:
    import lpips  # pyright: ignore[reportMissingImports]

    return lpips.LPIPS(net="alex", verbose=False).eval()


@dataclass(frozen=True)
class Statistics:
    """A quantity over seeds or prompts.

    Attributes:
        count: values.
        mean, median, low, high: of the values.
        standard_error: of the mean, ``None`` for a single value.
    """

    count: int
    mean: float
    standard_error: float | None
    median: float
    low: float
    high: float


def over_seeds(values: Sequence[float]) -> Statistics:
    """Mean with standard error, median and range of finite values.

    Raises:
        ValueError: no values, or one that is not finite (PSNR of equal videos is infinite: compare
            `relative_l2` there).
    """
    if len(values) == 0:
        raise ValueError("values: is empty; give one value for each seed")
    odd = [value for value in values if not math.isfinite(value)]
    if odd:
        raise ValueError(f"values has {odd[0]!r}: must be finite; use relative_l2 instead of psnr")
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return Statistics(
        count=len(values),
        mean=statistics.fmean(values),
        standard_error=error,
        median=statistics.median(values),
        low=min(values),
        high=max(values),
    )


def paired(values: Sequence[float], others: Sequence[float]) -> Statistics:
    """Statistics of values - others, seed by seed: what differs between seeds drops out.

    Raises:
        ValueError: of two lengths, or as of :func:`over_seeds`.
    """
    if len(values) != len(others):
        raise ValueError(
            f"values has {len(values)} entries and others {len(others)}: must be the same seeds"
        )
    return over_seeds([a - b for a, b in zip(values, others)])


def _pair(video: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """Both as float64 on the reference's device."""
    for name, value in (("video", video), ("reference", reference)):
        _check(name, value)
    if video.shape != reference.shape:
        raise ValueError(
            f"video {tuple(video.shape)} and reference {tuple(reference.shape)}: must be one shape"
        )
    return video.to(reference.device, torch.float64), reference.double()


def _check(name: str, value: object) -> None:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        found = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{name}: {found}, expected a floating-point tensor")
    if value.ndim != 4 or value.shape[3] != 3 or value.numel() == 0:
        raise ValueError(f"{name}: shape {tuple(value.shape)}, expected [F, H, W, 3], not empty")
    low, high = float(value.min()), float(value.max())
    if not (low >= 0 and high <= 1):  # also False for NaN
        raise ValueError(f"{name}: values from {low:g} to {high:g}, expected [0, 1]")
