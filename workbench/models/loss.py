"""Flow matching: the error of a predicted velocity."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from .dit import AttentionFn, VideoDiT, dense_attention


def flow_matching_loss(
    model: VideoDiT,
    video: Tensor,
    label: Tensor,
    generator: torch.Generator,
    *,
    time_shift: float = 5.0,
    time_spread: float = 1.5,
    attention: AttentionFn = dense_attention,
) -> Tensor:
    """Mean squared error of the velocity at random times.

    Args:
        model: predicts noise - video.
        video: [B, frames, H, W, C] in [-1, 1].
        label: int64 [B].
        generator: source of times and noise, on the video's device.
        time_shift: odds of the median time. The shapes of so redundant a video are decided while
            it is still mostly noise, so most times must be drawn there.
        time_spread: standard deviation of the logit of the time.
        attention: replaces attention in every layer.
    """
    count = video.shape[0]
    normal = torch.randn(count, generator=generator, device=video.device)
    # Logit-normal times (Esser et al. 2024), shifted as the sampler's are.
    time = torch.sigmoid(time_spread * normal + math.log(time_shift))
    noise = torch.randn(video.shape, generator=generator, device=video.device)
    noisy = torch.lerp(video, noise, time.view(-1, 1, 1, 1, 1))
    velocity = model(noisy, time, label, attention=attention)
    return F.mse_loss(velocity.float(), noise - video)
