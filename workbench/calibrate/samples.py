"""Which videos a calibration samples, and attention functions run through them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from workbench.models import AttentionFn, VideoDiT, denoising_times, sample
from workbench.sample.settings import check_sampling

Tick = Callable[[str], None]
"""Called with a label when a video begins."""


@dataclass(frozen=True)
class Samples:
    """Videos to sample: every label with every seed.

    Attributes:
        labels: classes, names or indices. seeds: of the noise.
        grid: tokens along (t, h, w). steps: model calls. guidance: 1 = none. shift: of the times.

    Raises:
        TypeError, ValueError: an argument is not allowed.
    """

    labels: tuple[int | str, ...] = ("disc",)
    seeds: tuple[int, ...] = (0,)
    grid: tuple[int, int, int] = (8, 16, 16)
    steps: int = 8
    guidance: float = 1.0
    shift: float = 3.0

    def __post_init__(self) -> None:
        check_sampling(
            self.labels, self.seeds, self.grid, self.steps, guidance=self.guidance, shift=self.shift
        )

    @property
    def videos(self) -> list[tuple[int | str, int]]:
        """(label, seed) of every video, in the order in which they are sampled."""
        return [(label, seed) for label in self.labels for seed in self.seeds]

    @property
    def times(self) -> list[float]:
        """Denoising time of every step."""
        return denoising_times(self.steps, self.shift)[:-1]

    @property
    def tokens(self) -> int:
        return math.prod(self.grid)

    @property
    def batch(self) -> int:
        """Rows of an attention call: guidance adds one without the class."""
        return 1 if self.guidance == 1 else 2

    def run(self, model: VideoDiT, index: int, attention: AttentionFn) -> Tensor:
        """Samples video `index`, float32 [F, H, W, 3] in [0, 1]."""
        label, seed = self.videos[index]
        videos = sample(
            model,
            labels=[label],
            grid=self.grid,
            steps=self.steps,
            seed=seed,
            attention=attention,
            guidance=self.guidance,
            shift=self.shift,
        )
        return videos[0]
