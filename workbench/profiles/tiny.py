"""The small video model of the project as a model that runs profiles."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from workbench.attention import SparseAttention
from workbench.export import Deployment
from workbench.models import VideoDiT, denoising_times, sample
from workbench.profiles.profile import Profile
from workbench.profiles.video import Run
from workbench.sample.exact import Baseline
from workbench.sample.settings import check_sampling


@dataclass(frozen=True)
class TinyVideo:
    """Samples classes of moving shapes.

    Attributes:
        model: the small DiT.
        grid: tokens along (t, h, w). steps: model calls. guidance: 1 = none. shift: of the times.
        gate: of VSA: ``model``, or ``zero`` without its coarse branch.
        impl: implementation of the sparse calls.
    """

    model: VideoDiT
    grid: tuple[int, int, int] = (8, 16, 16)
    steps: int = 8
    guidance: float = 1.0
    shift: float = 3.0
    gate: str = "model"
    impl: str = "auto"

    @property
    def title(self) -> str:
        """Model, size, steps and device."""
        weight, grid = self.model.embed.weight, " x ".join(map(str, self.grid))
        return (
            f"tiny video DiT, {math.prod(self.grid):,} tokens (grid {grid}), {self.steps} steps, "
            f"guidance {self.guidance:g}, {str(weight.dtype).split('.')[-1]} on {weight.device}"
        )

    @property
    def place(self) -> Deployment:
        """What files that count in steps, keys or blocks need."""
        return Deployment(
            times=tuple(denoising_times(self.steps, self.shift)[:-1]),
            keys=math.prod(self.grid),
            layers=self.model.config.depth,
        )

    @property
    def module_names(self) -> Sequence[str]:
        """The model has no module of attention alone; a layer is named by its block."""
        return [f"blocks.{layer}" for layer in range(self.model.config.depth)]

    def policies(self, profile: Profile) -> Mapping[str, SparseAttention]:
        """What the profile launches.

        Raises:
            ValueError: VSA with the model's gate, when the weights have none, and other things that
                this model cannot honour.
            UnsupportedError: a recipe that exists only on a server.
        """
        if profile.vsa and self.gate == "model" and not self.model.config.gate:
            raise ValueError(
                f"{profile.name}: VSA needs the gate that a model learns, and these weights have "
                "none; give weights trained with VSA, or --gate zero for top-k cubes alone"
            )
        names = self.module_names
        options = {"impl": self.impl, "record": True, **profile.options(self.gate)}
        made = SparseAttention(profile.config, num_layers=len(names), module_names=names, **options)
        return {"model": made}

    def check(self, prompts: Sequence[str], seeds: Sequence[int]) -> None:
        """Refuses what the sampler would.

        Raises:
            TypeError, ValueError: no class of that name, a repeat, or another wrong argument.
        """
        check_sampling(
            prompts,
            tuple(seeds),
            self.grid,
            self.steps,
            guidance=self.guidance,
            shift=self.shift,
            name="prompts",
        )

    def sample(self, prompt: str, seed: int, profile: Profile | None) -> Run:
        """One video of a class; ``None`` is torch's attention without any policy."""
        attention = Baseline() if profile is None else self.policies(profile)["model"]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            began = time.perf_counter()
            videos = sample(
                self.model,
                labels=[prompt],
                grid=self.grid,
                steps=self.steps,
                seed=seed,
                attention=attention,
                guidance=self.guidance,
                shift=self.shift,
            )
            video = videos[0].float().cpu()  # which waits for a GPU
            seconds = time.perf_counter() - began
        told = tuple(dict.fromkeys(str(warning.message) for warning in caught))
        return Run(video, True, tuple(attention.records), seconds, told)
