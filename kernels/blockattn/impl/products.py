"""The two matrix products of attention; float32 on the CPU goes to the faster of two libraries.

torch.matmul in float32 calls MKL, which uses half of the vector width on processors that are not
Intel's. oneDNN reaches the full rate there, in the same float32 arithmetic; on Intel processors
MKL is the faster one (docs/log.md, 2026-11-30). The oneDNN operator is the one that compiled models
use for a linear layer; where a build lacks it, torch.matmul does the same.
"""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

import torch
from torch import Tensor


def has_onednn() -> bool:
    """Whether this build of torch offers float32 products through oneDNN."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


@cache
def prefers_onednn() -> bool:
    """oneDNN is here and MKL is not at its best; depends on the processor only."""
    cpu = Path("/proc/cpuinfo")
    maker = cpu.read_text() if cpu.is_file() else platform.processor()
    return has_onednn() and "GenuineIntel" not in maker


def _onednn(x: Tensor) -> bool:
    on_cpu = x.device.type == "cpu" and x.dtype == torch.float32
    return on_cpu and x.dim() == 2 and prefers_onednn()


def scores(q: Tensor, k: Tensor, bias: Tensor | None = None) -> Tensor:
    """q ``[..., R, D]`` times k ``[..., K, D]`` transposed, plus bias ``[..., K]`` on every row."""
    if _onednn(q):
        return torch.ops.mkldnn._linear_pointwise(q, k, bias, "none", [], "")
    product = q @ k.transpose(-2, -1)
    return product if bias is None else product.add_(bias[..., None, :])


def weighted(p: Tensor, v: Tensor) -> Tensor:
    """p ``[..., R, K]`` times v ``[..., K, D]``."""
    if _onednn(p):
        return torch.ops.mkldnn._linear_pointwise(p, v.T, None, "none", [], "")
    return p @ v
