"""Small video models with random weights, also where training starts from zero."""

from __future__ import annotations

import torch

from workbench.models import DiTConfig, VideoDiT

TINY = DiTConfig(depth=2, width=32, heads=2, head_dim=16)


def tiny_model(seed: int = 0) -> VideoDiT:
    """Every parameter is noise, so that every path matters."""
    torch.manual_seed(seed)
    model = VideoDiT(TINY).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model


def fresh_model(depth: int) -> VideoDiT:
    """As training starts, but for the parameters that start from zero."""
    torch.manual_seed(0)
    made = VideoDiT(DiTConfig(depth=depth, width=32, head_dim=16)).eval().requires_grad_(False)
    for parameter in made.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.05)
    return made
