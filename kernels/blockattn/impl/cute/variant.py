"""What is compiled into a CuTe kernel; everything else is an argument of its launch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from blockattn.problem import Problem

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
HEAD_DIMS = (64, 128)
SKIP_TILES = (64, 128)


@dataclass(frozen=True)
class Variant:
    """One compiled kernel. Lengths, heads, strides, scales and thresholds are not part of it.

    Attributes:
        dtype: of q, k, v and the output, ``bf16`` or ``fp16``.
        dim: channels of a head, 64 or 128.
        routed: walks pair lists of key blocks instead of the full range.
        tail: block summaries stand for the blocks that the route leaves out.
        lengths: padded blocks; only the first keys of each are valid.
        causal: query t sees keys 0..t.
        skip: edge of the tiles that vote, 64 or 128; ``None`` without a threshold.
        lse: also writes the LSE.
        device_scales: both scales are read from the device instead of being numbers.

    Raises:
        ValueError: a combination that no call can ask for or that the kernel does not serve.
    """

    dtype: str = "bf16"
    dim: int = 128
    routed: bool = False
    tail: bool = False
    lengths: bool = False
    causal: bool = False
    skip: int | None = None
    lse: bool = False
    device_scales: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES.values():
            raise ValueError(f"dtype={self.dtype!r}: must be bf16 or fp16")
        if self.dim not in HEAD_DIMS:
            raise ValueError(f"dim={self.dim}: must be 64 or 128")
        if self.skip not in (None, *SKIP_TILES):
            raise ValueError(f"skip={self.skip}: must be None, 64 or 128")
        if self.tail and (not self.routed or self.causal):
            raise ValueError("tail=True: needs routed=True and causal=False")
        if self.skip == 128 and (self.routed or self.lengths):
            raise ValueError("skip=128: needs routed=False and lengths=False; use skip=64")

    def __str__(self) -> str:
        words = [f"{self.dtype} D={self.dim}", "routed" if self.routed else "full range"]
        names = ("tail", "lengths", "causal", "lse", "device_scales")
        words += [name.replace("_", " ") for name in names if getattr(self, name)]
        return ", ".join(words if self.skip is None else [*words, f"skip {self.skip}"])


def variant_of(problem: Problem) -> Variant:
    """The kernel that a call without obstacles needs."""
    return Variant(
        dtype=DTYPES[problem.q.dtype],
        dim=problem.q.shape[3],
        routed=problem.route is not None,
        tail=problem.tail is not None,
        lengths=problem.block_lengths is not None,
        causal=problem.causal,
        skip=None if problem.skip_threshold is None else problem.skip_tile[0],
        lse=problem.want_trace,
        device_scales=any(isinstance(x, Tensor) for x in (problem.scale, problem.scale_output)),
    )
