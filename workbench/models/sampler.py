"""From noise to video: second-order integration of the velocity from t = 1 to t = 0.

Flow matching puts a video x0 and noise e on a straight line, x_t = (1 - t) x0 + t e, whose velocity
is e - x0 (Lipman et al. 2022, Liu et al. 2022). The model predicts that velocity; a two-step
Adams-Bashforth rule follows it with one model call per step, so step index and model call agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from blockattn import checks

from .dit import AttentionFn, VideoDiT, dense_attention
from .moving_shapes import CLASS_NAMES


def denoising_times(steps: int, shift: float = 3.0) -> list[float]:
    """Times from 1 (noise) to 0 (video) between which the sampler steps.

    Args:
        steps: number of model calls, at least 1.
        shift: above 1 spends more steps near the noise; 1 spaces them evenly
            (Esser et al. 2024, resolution-dependent shift).

    Returns:
        steps + 1 strictly falling values; step i goes from times[i] to times[i + 1].
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps={steps!r}: must be an int of at least 1")
    if not (math.isfinite(shift) and shift > 0):
        raise ValueError(f"shift={shift!r}: must be finite and above 0; 1 means even spacing")
    even = [1 - i / steps for i in range(steps + 1)]
    # The last division is exact at both ends: shift / shift and 0 / 1.
    return [shift * t / (shift * t + (1 - t)) for t in even]


def class_indices(
    labels: Sequence[int | str], classes: int = len(CLASS_NAMES), *, name: str = "labels"
) -> list[int]:
    """Classes given by index or by name, as indices; `name` is what errors call the list.

    Raises:
        ValueError: for an empty list, an unknown name or an index out of range.
    """
    if isinstance(labels, str) or len(labels) == 0:
        raise ValueError(f"{name}={labels!r}: must be a non-empty list of indices or names")
    return [_class_index(label, classes, name) for label in labels]


def _class_index(label: int | str, classes: int, name: str) -> int:
    if isinstance(label, str):
        if label not in CLASS_NAMES[:classes]:
            known = ", ".join(CLASS_NAMES[:classes])
            raise ValueError(f"{name} holds {label!r}: known names are {known}")
        return CLASS_NAMES.index(label)
    if isinstance(label, bool) or not 0 <= int(label) < classes:
        raise ValueError(f"{name} holds {label!r}: must be an index from 0 to {classes - 1}")
    return int(label)


def initial_noise(shape: Sequence[int], seed: int, device: torch.device | str | None) -> Tensor:
    """Standard normal noise that is equal on every device and for every batch size: float32."""
    checks.integer("seed", seed, minimum=-(2**63), maximum=2**63 - 1)
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randn(tuple(shape[1:]), generator=generator) for _ in range(shape[0])]
    return torch.stack(rows).to(device)


@torch.no_grad()
def sample(
    model: VideoDiT,
    *,
    labels: Sequence[int | str],
    grid: tuple[int, int, int] = (8, 16, 16),
    steps: int = 20,
    seed: int = 0,
    attention: AttentionFn = dense_attention,
    guidance: float = 2.0,
    shift: float = 3.0,
    order: str = "raster",
    progress: bool = False,
) -> Tensor:
    """Generate one video per label.

    Args:
        model: trained model; used as it is, on its device and in its dtype.
        labels: B classes, as indices or names of `moving_shapes.CLASS_NAMES`.
        grid: tokens along (t, h, w); times the patch gives frames and pixels.
        steps: number of model calls.
        seed: of the initial noise. Video i does not depend on how many labels follow it.
        attention: replaces attention in every layer; see `dit.AttentionFn`.
        guidance: classifier-free guidance (Ho & Salimans 2022). 1 asks the conditional model alone.
            Otherwise the conditional and unconditional halves run as one batch: attention sees
            2 B samples, the first B with their class, the last B without.
        shift: see `denoising_times`.
        order: token order in which the blocks run, see `VideoDiT.forward`.
        progress: show a progress bar.

    Returns:
        float32 [B, frames, height, width, 3] in [0, 1].
    """
    checks.finite_number("guidance", guidance)
    weight = model.embed.weight
    device, dtype = weight.device, weight.dtype
    classes = class_indices(labels, model.config.classes)
    label = torch.tensor(classes, device=device)
    if guidance != 1:
        label = torch.cat([label, torch.full_like(label, model.config.null_label)])
    size = [g * p for g, p in zip(grid, model.config.patch, strict=True)]
    x = initial_noise([len(classes), *size, model.config.channels], seed, device)

    def velocity(x: Tensor, time: float, step: int) -> Tensor:
        both = x if guidance == 1 else torch.cat([x, x])
        v = model(both.to(dtype), time, label, attention=attention, step=step, order=order).float()
        if guidance == 1:
            return v
        with_class, without = v.chunk(2)
        return without + guidance * (with_class - without)

    times = denoising_times(steps, shift)
    return integrate(velocity, x, times, progress=progress).mul(0.5).add(0.5).clamp(0, 1)


def integrate(
    velocity: Callable[[Tensor, float, int], Tensor],
    x: Tensor,
    times: Sequence[float],
    *,
    progress: bool = False,
) -> Tensor:
    """Follow velocity(x, time, step) along falling times (Adams-Bashforth 2, first step Euler).

    Exact for a velocity that changes linearly in time; a straight path is exact in one step.
    """
    previous: Tensor | None = None
    last_span = 0.0
    for step in _steps(len(times) - 1, progress):
        span = times[step + 1] - times[step]
        v = velocity(x, times[step], step)
        if previous is None:
            x = x + span * v
        else:
            # The average velocity over the step, extrapolated from this call and the last.
            x = x + span * (v + (v - previous) * (span / (2 * last_span)))
        previous, last_span = v, span
    return x


def _steps(count: int, progress: bool) -> Iterable[int]:
    if not progress:
        return range(count)
    from tqdm import tqdm  # only here: sampling itself needs torch alone

    return tqdm(range(count), desc="denoising", unit="step")
