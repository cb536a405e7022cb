"""What is sampled: classes, seeds of the noise, grid, steps; checked before any work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from blockattn import checks
from blockattn.impl import registry
from workbench.models import denoising_times
from workbench.models.sampler import class_indices

MAX_SEED = 2**63 - 1  # of torch's generators


@dataclass(frozen=True)
class SampleSettings:
    """What is sampled; equal for every variant.

    Attributes:
        label: class of the video, name or index.
        seeds: of the noise; a video for each of them.
        grid: tokens along (t, h, w).
        steps: model calls per video.
        guidance: classifier-free guidance, 1 = none; another value doubles the batch.
        shift: of the schedule, see :func:`workbench.models.denoising_times`.
        impl: implementation of sparse calls.

    Raises:
        TypeError, ValueError: an argument is not allowed.
    """

    label: int | str = "disc"
    seeds: tuple[int, ...] = (4,)
    grid: tuple[int, int, int] = (8, 16, 16)
    steps: int = 8
    guidance: float = 1.0
    shift: float = 3.0
    impl: str = "auto"

    def __post_init__(self) -> None:
        registry.check_name(self.impl)
        check_sampling(
            [self.label],
            self.seeds,
            self.grid,
            self.steps,
            guidance=self.guidance,
            shift=self.shift,
        )

    @property
    def times(self) -> list[float]:
        """Denoising time of every step."""
        return denoising_times(self.steps, self.shift)[:-1]


def check_sampling(
    labels: Sequence[int | str],
    seeds: Sequence[int],
    grid: tuple[int, int, int],
    steps: int,
    *,
    guidance: float,
    shift: float,
    name: str = "labels",
) -> None:
    """Refuses videos that cannot be sampled.

    Args:
        labels, seeds: at least one of each, without repeats. name: of the first, in errors.
        grid, steps, guidance, shift: as of :class:`SampleSettings`.

    Raises:
        TypeError, ValueError: an argument is not allowed.
    """
    class_indices(labels, name=name)
    denoising_times(steps, shift)
    checks.finite_number("guidance", guidance)
    for axis, size in zip("thw", grid, strict=True):
        checks.integer(f"grid {axis}", size, minimum=1)
    check_videos(labels, seeds, name=name)


def check_videos(
    prompts: Sequence[int | str], seeds: Sequence[int], *, name: str = "prompts"
) -> None:
    """Refuses prompts and seeds that name no video, or one twice.

    Args:
        prompts, seeds: a video for every pair. name: of the first, in errors.

    Raises:
        TypeError, ValueError: none of them, a repeat, or no seed.
    """
    for seed in seeds:
        checks.integer("seeds", seed, maximum=MAX_SEED)
    for kind, items in ((name, prompts), ("seeds", seeds)):
        if not items or len(set(items)) != len(items):
            raise ValueError(f"{kind}={items!r}: must be at least one, without repeats")
