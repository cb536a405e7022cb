"""Seeded attention inputs for tests."""

from __future__ import annotations

import torch
from torch import Tensor


def gaussian(
    tokens: int,
    *,
    batch: int = 1,
    heads: int = 2,
    kv_heads: int | None = None,
    keys: int | None = None,
    dim: int = 32,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    """Unstructured q ``[B, tokens, heads, dim]`` and k, v ``[B, keys, kv_heads, dim]``."""
    generator = torch.Generator().manual_seed(seed)
    keys = tokens if keys is None else keys
    kv_heads = heads if kv_heads is None else kv_heads
    shapes = ((tokens, heads), (keys, kv_heads), (keys, kv_heads))
    q, k, v = (torch.randn(batch, *shape, dim, generator=generator) for shape in shapes)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def drifting(tokens: int, *, strength: float = 1.5, **settings) -> tuple[Tensor, Tensor, Tensor]:
    """Gaussian inputs plus a slow random walk in q and k: blocks differ as in a smooth video."""
    q, k, v = gaussian(tokens, **settings)
    generator = torch.Generator().manual_seed(settings.get("seed", 0) + 1)
    steps = torch.randn(tokens, q.shape[-1], generator=generator) / max(1, tokens) ** 0.5
    walk = strength * steps.cumsum(dim=0)[None, :, None]
    return (q + walk).to(q.dtype), (k + walk).to(k.dtype), v


def uneven(
    tokens: int, *, strength: float = 8.0, chunk: int = 32, **settings
) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs whose scores lie on a level per ``chunk`` keys, ``strength`` (natural units) apart at
    most and highest at the start: many tiles then lie far below the running maximum.
    """
    q, k, v = gaussian(tokens, **settings)
    dim = q.shape[-1]
    generator = torch.Generator().manual_seed(settings.get("seed", 0) + 2)
    level = torch.rand(-(-k.shape[1] // chunk), generator=generator)
    level[0] = 1
    level = (strength * dim**0.5 * level.repeat_interleave(chunk))[: k.shape[1], None, None]
    along = torch.zeros(dim)
    along[0] = 1
    return (0.3 * q + along).to(q.dtype), (k + along * level).to(k.dtype), v
