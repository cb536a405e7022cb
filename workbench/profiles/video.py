"""A model that samples videos with a profile, whatever library it comes from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from workbench.attention import SparseAttention
from workbench.attention.log import CallRecord, density_by_step, mean_density, what_ran
from workbench.export import Deployment
from workbench.profiles.profile import Profile
from workbench.sample.run import Quality
from workbench.sample.run import compare as compare_videos


@dataclass(frozen=True)
class Run:
    """One sampled video and what its attention calls did.

    Attributes:
        video: float32 on the CPU: [F, H, W, 3] in [0, 1], or the latents where no decoder is there.
        pixels: which of the two.
        records: one for every attention call, in order.
        seconds: of the sampling, densities read included.
        warnings: what attention warned of.
    """

    video: Tensor
    pixels: bool
    records: Sequence[CallRecord]
    seconds: float
    warnings: Sequence[str] = field(default_factory=tuple)

    @property
    def density(self) -> float:
        """Mean over all calls, dense ones included; NaN without a call."""
        return mean_density(self.records)

    @property
    def densities(self) -> list[float]:
        """Mean over the layers of each step."""
        return list(density_by_step(self.records).values())

    @property
    def ran(self) -> str:
        """Algorithms and implementations, such as ``sol_attn: eager``."""
        return ", ".join(what_ran(self.records))

    def count(self, kind: str) -> int:
        """Calls that were ``sparse``, ``dense`` (as meant) or ``ineligible``."""
        return sum(record.kind == kind for record in self.records)


class VideoModel(Protocol):
    """What :mod:`workbench.profiles.compare` asks of a model."""

    @property
    def title(self) -> str:
        """One line: model, size, steps, device."""
        ...

    @property
    def place(self) -> Deployment:
        """Times of the steps, keys of a self-attention call, layers."""
        ...

    @property
    def module_names(self) -> Sequence[str]:
        """Name of the self-attention of every layer."""
        ...

    def policies(self, profile: Profile) -> Mapping[str, SparseAttention]:
        """What the profile launches in each part; raises what the model cannot honour."""
        ...

    def check(self, prompts: Sequence[str], seeds: Sequence[int]) -> None:
        """Refuses prompts and seeds that the model cannot take."""
        ...

    def sample(self, prompt: str, seed: int, profile: Profile | None) -> Run:
        """One video; ``None`` is the model's own dense attention."""
        ...


def distance(run: Run, reference: Run) -> Quality:
    """How far a video is from another one; latents have a relative L2 alone."""
    if run.pixels and reference.pixels:
        return compare_videos(run.video, reference.video)
    a, b = run.video.double(), reference.video.double()
    size = float(torch.linalg.vector_norm(b))
    error = float(torch.linalg.vector_norm(a - b))
    finite = bool(torch.isfinite(a).all()) and size > 0
    return Quality(math.nan, math.nan, error / size if finite else math.nan)
