"""Shared by the tests of the attention policy: configurations, tensors, a baseline, a model."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from workbench.attention import SparseAttention
from workbench.config import (
    AttentionConfig,
    QuantAttentionConfig,
    SkipSoftmaxConfig,
    SolAttnConfig,
    VideoSparseAttentionConfig,
)
from workbench.models.dit import AttentionCall, DiTConfig, VideoDiT, dense_attention
from workbench.models.sampler import sample

GRID = (4, 8, 8)
TOKENS = 256
CUTOFF = 0.9
CALL = AttentionCall(layer=1, step=3, time=0.5, grid=GRID)
DENSE_TIME = AttentionCall(layer=1, step=0, time=1.0, grid=GRID)
SOL = SolAttnConfig(tau=1.0, disabled_until_timestep=CUTOFF, dense_layers=(0,))
SKIP = SkipSoftmaxConfig(threshold_scale_factor=0.5 * TOKENS, disabled_until_timestep=CUTOFF)
VSA = VideoSparseAttentionConfig(vsa_sparsity=0.75)
MXFP8 = QuantAttentionConfig(qk_dtype="mxfp8")
SKIP_MXFP8 = AttentionConfig(sparse_attention_config=SKIP, quant_attention_config=MXFP8)


def tokens(count: int = TOKENS, *, heads: int = 2, dim: int = 64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, count, heads, dim, generator=generator)


def qkv(count: int = TOKENS, **settings: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys that agree by neighbourhood, so that every mechanism drops something."""
    centres = (
        3 * tokens(count // 32 + 1, seed=3, **settings).repeat_interleave(32, dim=1)[:, :count]
    )
    q, k = (centres + 0.3 * tokens(count, seed=n, **settings) for n in (0, 1))
    return q, k, tokens(count, seed=2, **settings)


class Dense:
    """The baseline, with a count of its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
        self.calls += 1
        return dense_attention(q, k, v, call)


@contextmanager
def quiet() -> Iterator[None]:
    """Every warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@cache
def model(*, gate: bool = False) -> VideoDiT:
    """Random weights in every layer, adaLN's zeros included: attention reaches the video."""
    torch.manual_seed(0)
    net = VideoDiT(DiTConfig(depth=2, width=32, heads=2, head_dim=32, gate=gate)).eval()
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return net


def video(attention: Any, *, gate: bool = False) -> Tensor:
    return sample(model(gate=gate), labels=[0, 1], grid=GRID, steps=3, attention=attention)


def key_of(attention: SparseAttention, time: float | None = None) -> dict[str, Any]:
    return dict(attention.graph_key(time))


def checkpoint(**fields: Any) -> dict[str, Any]:
    scale = {"formula": "a * exp(b * target_sparsity)", "a": 10.0, "b": 2.0}
    entry = {"algorithm": "skip_softmax", "threshold_scale_factor": scale, **fields}
    return {"sparse_attention_config": {"config_groups": {"x": entry}}}


def changed(config: Any, **fields: Any) -> Any:
    return type(config).model_validate({**config.model_dump(), **fields})
