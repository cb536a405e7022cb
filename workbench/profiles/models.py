"""The model that `workbench apply` runs: the small one, or a pipeline from a folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from workbench.calibrate.options import parse_seeds
from workbench.devices import choose_device
from workbench.diffusers.folder import CONFIG, INDEX, open_pipeline
from workbench.models import load_model
from workbench.paths import BUNDLED_WEIGHTS, data_dir
from workbench.profiles.pipeline import PipelineVideo
from workbench.profiles.tiny import TinyVideo
from workbench.profiles.video import VideoModel

GRID, STEPS, PROMPT = "8,16,16", 8, "disc"  # of the small model


@dataclass(frozen=True)
class Choice:
    """Options that describe a model; ``None`` is the default of the model that is chosen.

    Attributes:
        folder: of a diffusers pipeline; ``None`` is the small model.
        weights, grid: of the small model alone. size: frames,height,width of a pipeline alone.
        steps, guidance, gate, impl, device: of either.
    """

    folder: Path | None = None
    weights: Path | None = None
    grid: str | None = None
    size: str | None = None
    steps: int | None = None
    guidance: float | None = None
    gate: str = "model"
    impl: str = "auto"
    device: str = "auto"

    def __post_init__(self) -> None:
        small = {"--weights": self.weights, "--grid": self.grid}
        wrong = {"--size": self.size} if self.folder is None else small
        for name, value in wrong.items():
            if value is not None:
                only = "a --model FOLDER" if self.folder is None else "the small model"
                raise ValueError(f"{name} {value}: is for {only} alone; leave it out")

    def open(self) -> VideoModel:
        """The model, on its device.

        Raises:
            FileNotFoundError, ValueError, TypeError, ModuleNotFoundError: an option does not fit.
        """
        place = choose_device(self.device)
        if self.folder is not None:
            return self._pipeline(self.folder, place)
        return TinyVideo(
            load_model(self.weights, device=place),
            grid=_three("--grid", self.grid or GRID),
            steps=STEPS if self.steps is None else self.steps,
            guidance=1.0 if self.guidance is None else self.guidance,
            gate=self.gate,
            impl=self.impl,
        )

    def prompts(self, given: list[str] | None) -> tuple[str, ...]:
        """What to sample.

        Raises:
            ValueError: a pipeline without a prompt.
        """
        if given:
            return tuple(given)
        if self.folder is not None:
            raise ValueError("--prompt is missing: a pipeline needs a text; give --prompt TEXT")
        return (PROMPT,)

    @property
    def inputs(self) -> dict[str, Path]:
        """Files for the provenance; of a pipeline those that say what its weights are."""
        if self.folder is None:
            return {"weights": self.weights or data_dir() / BUNDLED_WEIGHTS}
        names = (INDEX, CONFIG, f"transformer/{CONFIG}", f"transformer_2/{CONFIG}")
        return {name: self.folder / name for name in names if (self.folder / name).is_file()}

    def _pipeline(self, folder: Path, place: torch.device) -> PipelineVideo:
        dtype = torch.bfloat16 if place.type == "cuda" else torch.float32
        pipe = open_pipeline(folder, device=place, dtype=dtype)
        size = None if self.size is None else _three("--size", self.size)
        return PipelineVideo(
            pipe, folder.name, size, self.steps, self.guidance, self.gate, self.impl
        )


def _three(name: str, text: str) -> tuple[int, int, int]:
    sizes = parse_seeds(name, text)
    if len(sizes) != 3:
        raise ValueError(f"{name} {text}: expected three sizes such as {GRID}")
    return sizes[0], sizes[1], sizes[2]
