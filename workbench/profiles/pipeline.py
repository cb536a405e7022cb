"""A text-to-video pipeline of diffusers as a model that runs profiles.

What the pipeline would do (times of the steps, tokens of a call, heads) is not computed again here:
its own code is run up to the first attention call and looked at.
"""

from __future__ import annotations

import contextlib
import inspect
import time
import warnings
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockattn import TokenGrid, checks
from workbench.attention import SparseAttention
from workbench.diffusers import attach
from workbench.diffusers.attach import COMPONENTS
from workbench.diffusers.families import Family, family_of
from workbench.diffusers.model import plain
from workbench.export import Deployment
from workbench.models import AttentionCall
from workbench.profiles.first_step import FirstStep
from workbench.profiles.profile import Profile
from workbench.profiles.video import Run
from workbench.sample.settings import check_videos

TEXT_TOKENS = 512  # of random text embeddings, as many as Wan's text encoder gives
OURS = {"workbench", "blockattn"}  # whose warnings belong to a run; libraries warn of other things


@dataclass(frozen=True)
class Seen:
    """The first self-attention call of a sampling.

    Attributes:
        times: denoising time of every step of the run, falling.
        grid: its tokens, with the text among them.
        batch, heads, head_dim: of its queries.
    """

    times: tuple[float, ...]
    grid: TokenGrid
    batch: int
    heads: int
    head_dim: int


@dataclass(frozen=True)
class PipelineVideo:
    """Samples videos with a pipeline; what is ``None`` is the pipeline's own default.

    Attributes:
        pipe: with one transformer or two; a profile goes to both.
        name: for titles.
        size: (frames, height, width) in pixels. steps: of the scheduler. guidance: of the text.
        gate: of VSA: the models of diffusers learn none, so ``zero``.
        impl: implementation of the sparse calls.
    """

    pipe: Any
    name: str = "pipeline"
    size: tuple[int, int, int] | None = None
    steps: int | None = None
    guidance: float | None = None
    gate: str = "model"
    impl: str = "auto"

    def __post_init__(self) -> None:
        if not self._transformers:
            raise TypeError(f"pipe: {type(self.pipe).__name__} has none of {COMPONENTS}")
        family = family_of(plain(self._part))
        check_settings(family, size=self.size, steps=self.steps, guidance=self.guidance)
        known = inspect.signature(self.pipe.__call__).parameters
        unknown = [name for name in self._settings if name not in known]
        if unknown:
            raise ValueError(
                f"{type(self.pipe).__name__} takes no {', '.join(unknown)}; leave it out"
            )

    @property
    def title(self) -> str:
        """Model, size, steps, device, and what is missing of the pipeline."""
        grid = " x ".join(map(str, self.seen.grid.shape))
        part = self._part
        text = (
            f"{self.name}: {type(self.pipe).__name__}, {' and '.join(self._transformers)} of "
            f"{len(self.module_names)} layers, {self.seen.grid.tokens:,} tokens (grid {grid}), "
            f"{len(self.seen.times)} steps, {str(part.dtype).split('.')[-1]} on {part.device}"
        )
        if not self._has("text_encoder"):
            text += "; no text encoder, so a prompt stands for random text embeddings"
        return text if self._has("vae") else f"{text}; no decoder, so videos are latents"

    @cached_property
    def seen(self) -> Seen:
        """The first attention call of a sampling, with an empty text."""
        return self.look("")

    def look(self, prompt: str) -> Seen:
        """The first attention call of a sampling that sees the text; it is stopped there."""
        found: list[tuple[torch.Size, AttentionCall]] = []

        def look(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> None:
            del k, v
            if call.half != "first":  # of a guidance batch these pipelines put the text last
                found.append((q.shape, call))
                raise _Enough

        with attach(self.pipe, None, observe=look) as attached:
            falling = attached.models[0].family.falling
            with contextlib.suppress(_Enough):
                self.run(prompt, 0)
        ((shape, call),) = found
        train = self.pipe.scheduler.config.num_train_timesteps
        times = [t / train if falling else 1 - t / train for t in self._timesteps()]
        grid = TokenGrid(call.grid, call.prefix, call.suffix, call.order)
        return Seen(tuple(times), grid, shape[0], shape[2], shape[3])

    def step_seconds(self, prompt: str) -> float:
        """How long one denoising step takes, from the first one, after which sampling is stopped.

        Where it is the only one, what is decoded after it counts too.
        """
        first = FirstStep()

        def watch(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> None:
            del q, k, v
            if first.ends_at(call):
                raise _Enough

        with attach(self.pipe, None, observe=watch), contextlib.suppress(_Enough):
            self.run(prompt, 0)
        return first.seconds

    @property
    def place(self) -> Deployment:
        """What files that count in steps, keys or blocks need."""
        return Deployment(
            times=self.seen.times, keys=self.seen.grid.tokens, layers=len(self.module_names)
        )

    @property
    def module_names(self) -> Sequence[str]:
        """Self-attention modules, the same in both transformers."""
        models = [plain(getattr(self.pipe, name)) for name in self._transformers]
        names = [family_of(model).attention_modules(model) for model in models]
        if any(other != names[0] for other in names):
            raise ValueError(
                f"{self.name}: the two transformers have {' and '.join(map(str, map(len, names)))} "
                "layers, and a profile is for one number of layers; call workbench.attach with one "
                "configuration each"
            )
        return names[0]

    def policies(self, profile: Profile) -> Mapping[str, SparseAttention]:
        """What the profile launches in each transformer; a calibration may differ between them.

        Raises:
            ValueError, UnsupportedError: what the model or the kernels cannot honour.
        """
        with attach(self.pipe, profile.config, **self._options(profile)) as attached:
            return {model.name: model.attention for model in attached.models}

    def check(self, prompts: Sequence[str], seeds: Sequence[int]) -> None:
        """Refuses seeds and prompts that cannot be sampled.

        Raises:
            TypeError, ValueError: none, a repeat, or a seed out of range.
        """
        check_videos(prompts, seeds)
        self._text_arguments("")

    def sample(self, prompt: str, seed: int, profile: Profile | None) -> Run:
        """One video; ``None`` is the model's own attention, counted and otherwise untouched."""
        config = None if profile is None else profile.config
        options = {} if profile is None else self._options(profile)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            began = time.perf_counter()
            with attach(self.pipe, config, record=True, **options) as attached:
                video = self.run(prompt, seed)
            seconds = time.perf_counter() - began
        told = dict.fromkeys(str(w.message) for w in caught if OURS & set(Path(w.filename).parts))
        return Run(video, self._has("vae"), tuple(attached.records), seconds, tuple(told))

    @torch.no_grad()
    def run(self, prompt: str, seed: int) -> Tensor:
        """One video with whatever attention is attached; as :attr:`Run.video`."""
        pixels = self._has("vae")
        frames = self.pipe(
            **self._text_arguments(prompt),
            **self._settings,
            generator=torch.Generator().manual_seed(seed),
            output_type="np" if pixels else "latent",
        ).frames
        return torch.as_tensor(frames[0]).float().cpu()

    @property
    def _settings(self) -> dict[str, Any]:
        """What is given, by the names of the pipeline's arguments."""
        sizes = zip(("num_frames", "height", "width"), self.size or (None, None, None))
        given = {**dict(sizes), "num_inference_steps": self.steps, "guidance_scale": self.guidance}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def _transformers(self) -> list[str]:
        return [name for name in COMPONENTS if getattr(self.pipe, name, None) is not None]

    @property
    def _part(self) -> Any:
        return getattr(self.pipe, self._transformers[0])

    def _has(self, part: str) -> bool:
        return getattr(self.pipe, part, None) is not None

    def _options(self, profile: Profile) -> dict[str, Any]:
        return {"impl": self.impl, **profile.options(self.gate)}

    def _timesteps(self) -> list[float]:
        return [float(t) for t in self.pipe.scheduler.timesteps]

    def _text_arguments(self, prompt: str) -> dict[str, Any]:
        """The prompt, or without a text encoder embeddings that follow from it."""
        if self._has("text_encoder"):
            return {"prompt": prompt}
        width = getattr(self._part.config, "text_dim", None)
        if width is None:
            raise ValueError(
                f"{self.name}: {type(self.pipe).__name__} has no text encoder, and random text "
                "embeddings are made for Wan only; give the folder of the whole pipeline"
            )
        texts = {"prompt_embeds": prompt, "negative_prompt_embeds": f"not {prompt}"}
        return {name: self._random_text(text, width) for name, text in texts.items()}

    def _random_text(self, text: str, width: int) -> Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(text.encode()))
        made = torch.randn(1, TEXT_TOKENS, width, generator=generator)
        return made.to(self._part.device, self._part.dtype)


def check_settings(
    family: Family | None,
    *,
    size: tuple[int, int, int] | None,
    steps: int | None,
    guidance: float | None,
) -> None:
    """Refuses settings of :class:`PipelineVideo`, which can be known before weights are read.

    Raises:
        TypeError, ValueError: no positive integer, no finite number, or a size that the family does
            not make.
    """
    for name, value in (*zip(("frames", "height", "width"), size or ()), ("steps", steps)):
        if value is not None:
            checks.integer(name, value, minimum=1)
    if size is not None and family is not None:
        family.check_size(size)
    if guidance is not None:
        checks.finite_number("guidance", guidance)


class _Enough(Exception):
    """Ends a sampling once enough of it has been seen."""
