"""A small video diffusion transformer whose attention can be replaced from outside.

A DiT (Peebles & Xie 2023) over space-time patches with what today's large video models use: 3-D
rotary positions, RMS-normalised queries and keys, one modulation shared by all blocks plus a small
table per block (Chen et al. 2023, PixArt-alpha), full self-attention over all frames, head
dimension 128. It predicts the velocity of a straight path between noise and video.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from blockattn import TokenGrid

from .moving_shapes import CLASS_NAMES
from .rope import axis_channels, rotate, rotation_table


@dataclass(frozen=True)
class AttentionCall:
    """Where an attention call comes from."""

    layer: int
    step: int | None  # sampler step index, None outside sampling (training)
    time: float | None  # normalised denoising time in [0, 1], 1 = noisiest; None when unknown
    grid: tuple[int, int, int]  # tokens along (t, h, w)
    # VSA's gate of the coarse branch, [B, T, H, D] like q; None in a model that has none. It is
    # data of the call, not part of where it comes from, so comparisons leave it out.
    gate: Tensor | None = field(default=None, compare=False, repr=False)
    order: str = "raster"  # of the tokens in q, k, v: raster, tile or morton (TokenGrid)
    # Text tokens before and after those of the grid, in models where text and video attend jointly.
    prefix: int = 0
    suffix: int = 0
    # Of a guidance batch that is not attended in one call, which half q, k, v are: first or last.
    half: str | None = None


AttentionFn = Callable[[Tensor, Tensor, Tensor, AttentionCall], Tensor]
"""(q, k, v, call) -> output, all [B, T, H, D]; any implementation or recorder fits."""


def dense_attention(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
    """PyTorch's scaled_dot_product_attention: the default and the baseline.

    Args:
        q, k, v: [B, T, H, D]; GQA allowed.
        call: ignored, its gate too; dense attention is the same everywhere.
    """
    del call
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped).transpose(1, 2)


@dataclass(frozen=True)
class DiTConfig:
    """Size of a `VideoDiT`. The defaults are those of the bundled weights."""

    depth: int = 6
    width: int = 256
    heads: int = 2
    head_dim: int = 128
    patch: tuple[int, int, int] = (2, 4, 4)  # frames, rows, columns of pixels per token
    channels: int = 3
    classes: int = len(CLASS_NAMES)
    mlp_ratio: int = 4
    rope_theta: float = 100.0
    gate: bool = False  # a gate for VSA's coarse branch in every block

    def __post_init__(self) -> None:
        for name in ("depth", "width", "heads", "head_dim", "channels", "classes", "mlp_ratio"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r}: must be an int of at least 1")
        if len(self.patch) != 3 or min(self.patch) < 1:
            raise ValueError(f"patch={self.patch}: must be three sizes of at least 1 (t, h, w)")
        if not isinstance(self.gate, bool):
            raise ValueError(f"gate={self.gate!r}: must be True or False")
        axis_channels(self.head_dim)

    @property
    def null_label(self) -> int:
        """The label that stands for "no class", used by classifier-free guidance."""
        return self.classes


class RMSNorm(nn.Module):
    """Root-mean-square normalisation of the last dimension, in float32."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight.float()


class Block(nn.Module):
    """Self-attention and MLP, split in two around the attention call.

    The call itself is made by `VideoDiT`, so that the two halves hold nothing but tensor arithmetic
    (they can be compiled) and attention stays an ordinary Python call.
    """

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        inner = config.heads * config.head_dim
        self.heads = config.heads
        self.modulation = nn.Parameter(0.02 * torch.randn(6, config.width))
        self.qkv = nn.Linear(config.width, 3 * inner)
        self.query_norm = RMSNorm(config.head_dim)
        self.key_norm = RMSNorm(config.head_dim)
        self.out = nn.Linear(inner, config.width)
        self.mlp_in = nn.Linear(config.width, config.mlp_ratio * config.width)
        self.mlp_out = nn.Linear(config.mlp_ratio * config.width, config.width)
        self.to_gate_compress: nn.Linear | None = None
        if config.gate:
            self.to_gate_compress = nn.Linear(config.width, inner)
            # A fresh gate is shut: the model starts as the one without it.
            nn.init.zeros_(self.to_gate_compress.weight)
            nn.init.zeros_(self.to_gate_compress.bias)

    def project(self, x: Tensor, shared: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [B, T, H, D] of the tokens x [B, T, width]."""
        shift, scale = (shared + self.modulation)[:, 0:2].unbind(1)
        fused = self.qkv(modulate(x, shift, scale)).unflatten(-1, (3, self.heads, -1))
        q, k, v = fused.unbind(2)
        q = rotate(self.query_norm(q), table).to(v.dtype)
        k = rotate(self.key_norm(k), table).to(v.dtype)
        return q, k, v

    def gate(self, x: Tensor, shared: Tensor) -> Tensor | None:
        """VSA's gate [B, T, H, D]: a linear map of what also feeds q, k, v; None without one."""
        if self.to_gate_compress is None:
            return None
        shift, scale = (shared + self.modulation)[:, 0:2].unbind(1)
        return self.to_gate_compress(modulate(x, shift, scale)).unflatten(-1, (self.heads, -1))

    def finish(self, x: Tensor, mixed: Tensor, shared: Tensor) -> Tensor:
        """Add attention's output [B, T, H, D] and the MLP to the tokens x [B, T, width]."""
        gate, shift, scale, gate_mlp = (shared + self.modulation)[:, 2:6].unbind(1)
        x = x + gate[:, None] * self.out(mixed.flatten(2))
        hidden = self.mlp_in(modulate(x, shift, scale))
        return x + gate_mlp[:, None] * self.mlp_out(F.gelu(hidden, approximate="tanh"))


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Adaptive layer norm: x [B, T, C] with one shift and scale [B, C] per sample."""
    return F.layer_norm(x, x.shape[-1:]) * (1 + scale[:, None]) + shift[:, None]


class VideoDiT(nn.Module):
    """Velocity of a noisy video, given the denoising time and the class."""

    def __init__(self, config: DiTConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or DiTConfig()
        width, pixels = config.width, math.prod(config.patch) * config.channels
        self.embed = nn.Linear(pixels, width)
        self.time_in = nn.Linear(width, width)
        self.time_out = nn.Linear(width, width)
        self.label = nn.Embedding(config.classes + 1, width)
        self.shared = nn.Linear(width, 6 * width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.final_modulation = nn.Parameter(0.02 * torch.randn(2, width))
        self.final = nn.Linear(width, pixels)
        # Every block starts as the identity and the velocity at zero (adaLN-zero).
        for layer in (self.shared, self.final):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(
        self,
        x: Tensor,
        time: float | Tensor,
        label: Tensor,
        *,
        attention: AttentionFn = dense_attention,
        step: int | None = None,
        order: str = "raster",
    ) -> Tensor:
        """Predict velocity = noise - video.

        Args:
            x: noisy video [B, frames, height, width, channels]; sizes are multiples of the patch.
            time: denoising time in [0, 1], 1 = noisiest: one float for the whole batch, which
                attention calls then carry, or a float tensor [B].
            label: int64 [B], class or `config.null_label`.
            attention: called `depth` times with q, k, v [B, T, H, D] and an `AttentionCall`.
            step: sampler step index for `AttentionCall`; None outside sampling.
            order: token order in which the blocks run, of `TokenGrid`: raster, tile or morton.
                Tokens and rotations are put in it once before the blocks and back after them, so
                the velocity is the same but for rounding.

        Returns:
            Velocity, shape and dtype of x.
        """
        grid = self.token_grid(x)
        host_time = float(time) if isinstance(time, (int, float)) else None
        condition = self._condition(time, label, x)
        shared = self.shared(F.silu(condition)).unflatten(-1, (6, -1))
        table = rotation_table(
            grid, self.config.head_dim, theta=self.config.rope_theta, device=x.device
        )
        tokens = self.embed(self._patchify(x, grid))
        places = TokenGrid(grid, order=order)
        if order != "raster":
            tokens, table = places.arrange(tokens), places.arrange(table)
        for layer, block in enumerate(self.layers()):
            q, k, v = block.project(tokens, shared, table)
            gate = block.gate(tokens, shared)
            mixed = attention(q, k, v, AttentionCall(layer, step, host_time, grid, gate, order))
            tokens = block.finish(tokens, mixed, shared)
        if order != "raster":
            tokens = places.restore(tokens)
        shift, scale = (condition[:, None] + self.final_modulation).unbind(1)
        return self._unpatchify(self.final(modulate(tokens, shift, scale)), grid).to(x.dtype)

    def layers(self) -> Iterator[Block]:
        """The blocks in order, with their type."""
        return (cast(Block, block) for block in self.blocks)

    def token_grid(self, x: Tensor) -> tuple[int, int, int]:
        """Tokens along (t, h, w) of a video [B, frames, height, width, channels].

        Raises:
            ValueError: for another rank or channel count, or a size the patch does not divide.
        """
        patch, channels = self.config.patch, self.config.channels
        if x.ndim != 5 or x.shape[-1] != channels:
            raise ValueError(
                f"x has shape {tuple(x.shape)}: must be [B, frames, height, width, {channels}]"
            )
        size = tuple(x.shape[1:4])
        if any(s == 0 or s % p for s, p in zip(size, patch, strict=True)):
            raise ValueError(
                f"x is {size} frames x rows x columns: each must be a positive multiple of "
                f"patch={patch}; crop or pad the video"
            )
        return size[0] // patch[0], size[1] // patch[1], size[2] // patch[2]

    def _condition(self, time: float | Tensor, label: Tensor, x: Tensor) -> Tensor:
        """Time and class as one vector: [B, width]."""
        times = torch.as_tensor(time, device=x.device, dtype=torch.float32).expand(x.shape[0])
        waves = timestep_embedding(times, self.config.width).to(self.time_in.weight.dtype)
        return self.time_out(F.silu(self.time_in(waves))) + self.label(label)

    def _patchify(self, x: Tensor, grid: tuple[int, int, int]) -> Tensor:
        (t, h, w), (pt, ph, pw) = grid, self.config.patch
        x = x.reshape(x.shape[0], t, pt, h, ph, w, pw, -1)
        return x.permute(0, 1, 3, 5, 2, 4, 6, 7).flatten(4).flatten(1, 3)

    def _unpatchify(self, tokens: Tensor, grid: tuple[int, int, int]) -> Tensor:
        (t, h, w), (pt, ph, pw) = grid, self.config.patch
        x = tokens.reshape(tokens.shape[0], t, h, w, pt, ph, pw, -1)
        return x.permute(0, 1, 4, 2, 5, 3, 6, 7).reshape(x.shape[0], t * pt, h * ph, w * pw, -1)


def timestep_embedding(time: Tensor, size: int) -> Tensor:
    """Sinusoidal features of time [B] in [0, 1]: float32 [B, size]."""
    half = size // 2
    frequency = torch.exp(-math.log(10_000) * torch.arange(half, device=time.device) / half)
    angle = 1000.0 * time[:, None] * frequency
    return torch.cat([angle.cos(), angle.sin()], -1)
