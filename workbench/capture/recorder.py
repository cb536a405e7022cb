"""Recording the attention calls of a model while it samples, without changing what it samples."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy
import torch
from torch import Tensor

from blockattn import TokenGrid, checks
from workbench import __version__
from workbench.capture import Capture, open_capture
from workbench.capture.format import CaptureSpec
from workbench.capture.writer import LIMIT_BYTES, CaptureWriter
from workbench.models.dit import AttentionCall, AttentionFn, VideoDiT, dense_attention
from workbench.models.sampler import class_indices, sample


class Recorder:
    """An attention function that also writes the q, k, v of chosen calls to disk.

    It hands the tensors it got to the attention inside, untouched, so the sampled video is equal
    bit for bit with and without it. Of a batch for classifier-free guidance, twice the spec's
    batch, it keeps the first half: the samples that know their class. When a sampler visits the
    same layer and step again, the first visit is kept.

        with Recorder("a.safetensors", spec) as recorder:
            video = sample(model, labels=["disc"], attention=recorder)
            recorder.write_video(video[0])

    Args:
        path: the capture to make; it appears when the `with` block ends without an error.
        spec: what to record. `spec.total_bytes` is the size of the file, known before it starts.
        attention: does the attention.
        limit_bytes: the largest file allowed.

    Raises:
        ValueError, OSError: the file would be too large, with the number and the way out.
    """

    def __init__(
        self,
        path: str | Path,
        spec: CaptureSpec,
        *,
        attention: AttentionFn = dense_attention,
        limit_bytes: int = LIMIT_BYTES,
    ) -> None:
        self.spec = spec
        self.attention = attention
        self.writer = CaptureWriter(path, spec, limit_bytes=limit_bytes)
        self._wanted = frozenset(spec.entries)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
        if (call.layer, call.step) in self._wanted and call.step is not None:
            self._record(q, k, v, call.step, call)
        return self.attention(q, k, v, call)

    def write_video(self, video: Tensor) -> None:
        """Keeps the sampled video, float `[frames, height, width, 3]` in [0, 1], as 8 bits."""
        self.writer.write_video(video.mul(255).round().clamp(0, 255).to(torch.uint8))

    def _record(self, q: Tensor, k: Tensor, v: Tensor, step: int, call: AttentionCall) -> None:
        if self.writer.has(call.layer, step):
            return
        if call.time is None:
            raise ValueError(
                f"layer {call.layer}, step {step}: the call has no denoising time, which a capture "
                "states; pass the model its time as a float"
            )
        batch = self.spec.batch
        if q.shape[0] not in (batch, 2 * batch):
            raise ValueError(
                f"q: batch {q.shape[0]}, but the capture keeps {batch}; it must be {batch}, or "
                f"{2 * batch} with guidance (class first)"
            )
        q, k, v = (x[:batch] for x in (q, k, v))
        self.writer.write(call.layer, step, time=call.time, q=q, k=k, v=v)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.writer.__exit__(kind, error, trace)


@dataclass(frozen=True)
class SamplingPlan:
    """One sampling run of the tiny model, and which of its attention calls to keep.

    Args:
        layers, at_steps: the calls to keep, all pairs of them.
        label: class of the sampled video, index or name.
        grid: tokens along (t, h, w).
        steps: model calls of the sampler. seed: of its noise. guidance: classifier-free.
    """

    layers: tuple[int, ...]
    at_steps: tuple[int, ...]
    label: int | str = 0
    grid: tuple[int, int, int] = (8, 16, 16)
    steps: int = 20
    seed: int = 0
    guidance: float = 2.0

    def spec(self, model: VideoDiT) -> CaptureSpec:
        """What the capture will hold, and so how large it will be.

        Raises:
            ValueError, TypeError: a layer or step that this run does not have.
        """
        config = model.config
        checks.integer("steps", self.steps, minimum=1)
        checks.integer("seed", self.seed, minimum=-(2**63), maximum=2**63 - 1)
        checks.finite_number("guidance", self.guidance)
        _check_within("layers", self.layers, config.depth, f"a model of {config.depth} layers")
        _check_within("at_steps", self.at_steps, self.steps, f"a run of {self.steps} steps")
        (label,) = class_indices([self.label], config.classes)
        grid = TokenGrid(self.grid)
        frames, height, width = (g * p for g, p in zip(grid.shape, config.patch))
        return CaptureSpec(
            grid=grid,
            entries=tuple((layer, step) for layer in self.layers for step in self.at_steps),
            heads=config.heads,
            head_dim=config.head_dim,
            video_shape=(frames, height, width),
            title=f"tiny video DiT, class {self.label}, seed {self.seed}",
            details=self._details(model, label),
        )

    def _details(self, model: VideoDiT, label: int) -> dict[str, str]:
        parameter = next(model.parameters())
        return {
            "model": f"tiny video DiT, {model.config.depth} layers of width {model.config.width}",
            "model_sha256": model_checksum(model),
            "model_dtype": str(parameter.dtype).removeprefix("torch."),
            "label": f"{label} ({self.label})",
            "seed": str(self.seed),
            "sampler_steps": str(self.steps),
            "guidance": str(self.guidance),
            "recorded": "conditional half of the guidance batch, rounded to bfloat16",
            "versions": f"workbench {__version__}, torch {torch.__version__}, "
            f"numpy {numpy.__version__}, python {platform.python_version()}",
            "device": parameter.device.type,
        }


def record_sampling(
    model: VideoDiT,
    plan: SamplingPlan,
    path: str | Path,
    *,
    attention: AttentionFn = dense_attention,
    limit_bytes: int = LIMIT_BYTES,
    progress: bool = False,
) -> Capture:
    """Samples one video and records the planned attention calls with it.

    Args:
        model: the model, on its device and in its dtype.
        plan: what to sample and what to keep.
        path: the capture to make.
        attention: what the model attends with while it is recorded.
        limit_bytes: the largest file allowed.
        progress: show a progress bar.

    Raises:
        ValueError, OSError: before anything is sampled, when the plan does not fit the model or the
            file would be too large.
    """
    with Recorder(path, plan.spec(model), attention=attention, limit_bytes=limit_bytes) as recorder:
        video = sample(
            model,
            labels=[plan.label],
            grid=plan.grid,
            steps=plan.steps,
            seed=plan.seed,
            guidance=plan.guidance,
            attention=recorder,
            progress=progress,
        )
        recorder.write_video(video[0])
    return open_capture(path)


def model_checksum(model: VideoDiT) -> str:
    """sha256 over the names and float32 values of all parameters, wherever they are."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.detach().to("cpu", torch.float32).contiguous().numpy().data)
    return digest.hexdigest()


def _check_within(name: str, values: Sequence[int], count: int, what: str) -> None:
    if not values:
        raise ValueError(f"{name} is empty: name at least one, from 0 to {count - 1}")
    for value in values:
        checks.integer(name, value)
        if value >= count:
            raise ValueError(f"{name} has {value}: {what} counts from 0 to {count - 1}")
