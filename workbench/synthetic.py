"""Synthetic q, k, v for scale tests. Structured, but not attention of any model: always labelled.

What the structure is: :mod:`workbench.fields`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from blockattn import TokenGrid, checks
from workbench.capture import QKV, Capture, open_capture
from workbench.capture.format import CaptureSpec
from workbench.capture.writer import LIMIT_BYTES, CaptureWriter
from workbench.fields import fields_qkv

MAX_SEED = 2**63 - 1  # of a torch generator


def synthetic_qkv(
    grid: TokenGrid,
    *,
    heads: int = 2,
    head_dim: int = 128,
    seed: int = 0,
    smoothness: float = 3.0,
    noise: float = 0.5,
    batch: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
) -> QKV:
    """Smooth 3-D fields plus noise, equal on every device for a seed.

    Args:
        grid: where each token is; text tokens get independent normal values.
        heads, head_dim, batch: sizes; q, k and v are `[batch, grid.tokens, heads, head_dim]`.
        seed: of everything random.
        smoothness: correlation length in tokens, > 0. Heads stretch it along other axes.
        noise: standard deviation of the independent part of q, k and v; the field's is 1.
        dtype, device: of the result.

    Returns:
        q, k, v; `layer`, `step` and `time` are 0 and mean nothing, as no model was asked.

    Raises:
        TypeError, ValueError: an argument is not allowed.
    """
    _check_sizes(grid, heads, head_dim, batch)
    _check_content(seed, smoothness, noise)
    q, k, v = fields_qkv(
        grid,
        heads=heads,
        head_dim=head_dim,
        seed=seed,
        smoothness=smoothness,
        noise=noise,
        batch=batch,
        dtype=dtype,
    )
    return QKV(q.to(device), k.to(device), v.to(device), layer=0, step=0, time=0.0)


def random_qkv(
    grid: TokenGrid,
    *,
    heads: int = 2,
    head_dim: int = 128,
    seed: int = 0,
    batch: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
) -> QKV:
    """Independent standard normal q, k, v: no structure to find. Arguments as `synthetic_qkv`."""
    _check_sizes(grid, heads, head_dim, batch)
    generator = torch.Generator().manual_seed(checks.integer("seed", seed, maximum=MAX_SEED))
    shape = (batch, grid.tokens, heads, head_dim)
    q, k, v = (torch.randn(shape, generator=generator).to(device, dtype) for _ in range(3))
    return QKV(q, k, v, layer=0, step=0, time=0.0)


@dataclass(frozen=True)
class SyntheticPlan:
    """A synthetic capture with the one entry (layer 0, step 0); fields as for `synthetic_qkv`.

    Raises:
        TypeError, ValueError: a field that is not allowed, before any file is begun.
    """

    grid: TokenGrid
    heads: int = 2
    head_dim: int = 128
    seed: int = 0
    smoothness: float = 3.0
    noise: float = 0.5

    def __post_init__(self) -> None:
        _check_sizes(self.grid, self.heads, self.head_dim, batch=1)
        _check_content(self.seed, self.smoothness, self.noise)

    def spec(self) -> CaptureSpec:
        """What the file will hold, and so how large it will be."""
        return CaptureSpec(
            grid=self.grid,
            entries=((0, 0),),
            heads=self.heads,
            head_dim=self.head_dim,
            source="synthetic",
            title=f"synthetic fields, seed {self.seed}",
            details={
                "model": "none: smooth random fields plus noise, not attention of a model",
                "seed": str(self.seed),
                "smoothness": str(self.smoothness),
                "noise": str(self.noise),
            },
        )

    def make(self) -> QKV:
        """The tensors."""
        return synthetic_qkv(
            self.grid,
            heads=self.heads,
            head_dim=self.head_dim,
            seed=self.seed,
            smoothness=self.smoothness,
            noise=self.noise,
        )


def write_synthetic(
    path: str | Path, plan: SyntheticPlan, *, limit_bytes: int = LIMIT_BYTES
) -> Capture:
    """Writes a synthetic capture.

    Raises:
        TypeError, ValueError, OSError: a setting that is not allowed, or a file too large.
    """
    with CaptureWriter(path, plan.spec(), limit_bytes=limit_bytes) as writer:
        made = plan.make()
        writer.write(0, 0, time=made.time, q=made.q, k=made.k, v=made.v)
    return open_capture(path)


def _check_sizes(grid: TokenGrid, heads: int, head_dim: int, batch: int) -> None:
    if not isinstance(grid, TokenGrid):
        raise TypeError(f"grid={grid!r}: expected a blockattn.TokenGrid")
    for name, value in (("heads", heads), ("head_dim", head_dim), ("batch", batch)):
        checks.integer(name, value, minimum=1)
    checks.integer("head_dim", head_dim, maximum=checks.MAX_HEAD_DIM)  # what any kernel here takes


def _check_content(seed: int, smoothness: float, noise: float) -> None:
    checks.integer("seed", seed, maximum=MAX_SEED)
    if checks.finite_number("smoothness", smoothness) <= 0:
        raise ValueError(f"smoothness={smoothness!r}: must be greater than 0 (tokens)")
    checks.finite_number("noise", noise, minimum=0.0)
