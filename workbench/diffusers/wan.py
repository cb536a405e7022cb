"""Wan pipelines without their large parts: around given transformers, or tiny and random."""

from __future__ import annotations

from typing import Any

import torch

from workbench.diffusers.package import diffusers_package

SHIFT = 3.0  # of the schedule, as in the checkpoints for 480 lines
BOUNDARY = 0.875  # of Wan 2.2: above this denoising time the first transformer runs


def wan_pipeline(transformer: Any, transformer_2: Any = None) -> Any:
    """A pipeline of one transformer or two: no text encoder and no decoder, so latents come out.

    The scheduler is that of the Wan checkpoints.
    """
    diffusers = diffusers_package()
    scheduler = diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=SHIFT
    )
    pipe = diffusers.WanPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=None,
        scheduler=scheduler,
        transformer=transformer,
        transformer_2=transformer_2,
        boundary_ratio=None if transformer_2 is None else BOUNDARY,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def tiny_wan(
    *,
    layers: int = 3,
    heads: int = 2,
    head_dim: int = 64,
    text_dim: int = 32,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Any:
    """A random transformer of the architecture of Wan, small enough for a CPU.

    Queries and keys are scaled up: with fresh weights attention is nearly uniform, and no block
    stands out.

    Args:
        layers, heads, head_dim, text_dim: its size. seed: of the weights. dtype: of all of them.
    """
    diffusers = diffusers_package()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = diffusers.WanTransformer3DModel(
            num_attention_heads=heads,
            attention_head_dim=head_dim,
            in_channels=16,
            out_channels=16,
            text_dim=text_dim,
            freq_dim=32,
            ffn_dim=2 * heads * head_dim,
            num_layers=layers,
        )
    with torch.no_grad():
        for block in model.blocks:
            for norm in (block.attn1.norm_q, block.attn1.norm_k):
                norm.weight.mul_(2)
    model.eval().requires_grad_(False)
    # Its own `to` warns of what keeps float32 in a checkpoint.
    return torch.nn.Module.to(model, dtype)


def tiny_wan_pipeline(**options: Any) -> Any:
    """A tiny random pipeline of two transformers, as Wan 2.2 has them.

    Args:
        options: of :func:`tiny_wan`, but the seed.
    """
    first, second = (tiny_wan(**options, seed=seed) for seed in (0, 1))
    return wan_pipeline(first, second)
