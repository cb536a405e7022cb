"""The model that `workbench apply` runs: the small one, or a pipeline from a folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from blockattn import checks
from blockattn.impl import registry
from workbench.attention.lowering import GATES
from workbench.devices import choose_device
from workbench.diffusers.folder import CONFIG, INDEX, family_at, open_pipeline
from workbench.diffusers.wan import tiny_wan_pipeline
from workbench.models import load_model
from workbench.options import three_sizes, video_size
from workbench.paths import BUNDLED_WEIGHTS, data_dir
from workbench.profiles.pipeline import PipelineVideo, check_settings
from workbench.profiles.tiny import TinyVideo
from workbench.profiles.video import VideoModel

GRID, STEPS, PROMPT = "8,16,16", 8, "disc"  # of the small model
TINY_SIZE, TINY_STEPS = (21, 128, 256), 4  # 6 x 8 x 16 = 768 tokens


def pipeline(
    folder: str | Path | None = None,
    *,
    size: tuple[int, int, int] | None = None,
    steps: int | None = None,
    guidance: float | None = None,
    device: str = "auto",
) -> PipelineVideo:
    """A pipeline from a folder, or a tiny random Wan pipeline of two transformers.

    Args:
        folder: of a pipeline or Wan transformer on this machine; ``None`` is the tiny one.
        size, steps, guidance: as of :class:`PipelineVideo`; ``None`` is the pipeline's own default,
            and of the tiny one values for a CPU.
        device: ``auto``, ``cpu`` or ``cuda``. Weights are bfloat16 on a GPU, else float32.

    Raises:
        ValueError, TypeError: as of :func:`check_settings`, before weights are read.
        FileNotFoundError, ValueError, ModuleNotFoundError: as of
            :func:`workbench.diffusers.folder.open_pipeline`.
    """
    family = None if folder is None else family_at(folder)
    check_settings(family, size=size, steps=steps, guidance=guidance)
    place = choose_device(device)
    dtype = torch.bfloat16 if place.type == "cuda" else torch.float32
    if folder is not None:
        pipe = open_pipeline(folder, device=place, dtype=dtype)
        return PipelineVideo(pipe, Path(folder).name, size, steps, guidance)
    pipe = tiny_wan_pipeline(dtype=dtype).to(place)
    return PipelineVideo(
        pipe,
        "tiny random Wan",
        size or TINY_SIZE,
        TINY_STEPS if steps is None else steps,
        1.0 if guidance is None else guidance,
    )


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
        checks.one_of("gate", self.gate, GATES)
        registry.check_name(self.impl)

    def open(self) -> VideoModel:
        """The model, on its device.

        Raises:
            FileNotFoundError, ValueError, TypeError, ModuleNotFoundError: an option does not fit.
        """
        if self.folder is not None:
            size = None if self.size is None else video_size("--size", self.size)
            made = pipeline(
                self.folder,
                size=size,
                steps=self.steps,
                guidance=self.guidance,
                device=self.device,
            )
            return replace(made, gate=self.gate, impl=self.impl)
        return TinyVideo(
            load_model(self.weights, device=choose_device(self.device)),
            grid=three_sizes("--grid", self.grid or GRID),
            steps=STEPS if self.steps is None else self.steps,
            guidance=1.0 if self.guidance is None else self.guidance,
            gate=self.gate,
            impl=self.impl,
        )

    def prompts(self, given: Sequence[str] | None) -> tuple[str, ...]:
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
