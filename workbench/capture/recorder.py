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
from workbench.capture.background import BackgroundWriter
from workbench.capture.format import PARTS, CaptureSpec
from workbench.capture.selection import Picker, Selection
from workbench.capture.writer import LIMIT_BYTES, CaptureWriter
from workbench.models.dit import AttentionCall, AttentionFn, VideoDiT, dense_attention
from workbench.models.sampler import class_indices, sample


class Recorder:
    """An attention function that also writes the q, k, v of chosen calls to disk.

    It hands the tensors it got to the attention inside, untouched, so the sampled video is equal
    bit for bit with and without it. Of a batch for classifier-free guidance, twice the spec's
    batch, it keeps the half that knows its class. When a sampler visits the same layer and step
    again, the first visit is kept. Nothing of tokens x tokens is ever made. On a GPU the model's
    stream waits for nothing but a copy on the device, see `workbench.capture.background`.

        with Recorder("a.safetensors", spec) as recorder:
            video = sample(model, labels=["disc"], attention=recorder)
            recorder.write_video(video[0])

    Args:
        path: the capture to make; it appears when the `with` block ends without an error.
        spec: what to record. `spec.total_bytes` is the size of the file, known before it starts;
            `workbench.capture.memory` says what recording takes beside the model.
        attention: does the attention.
        limit_bytes: the largest file allowed.
        resume: go on with an interrupted recording of the same spec, if there is one; the model
            has to be run again from the start, what is there is not written again.
        conditional: which half of a guidance batch knows its class, `first` or `last`.

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
        resume: bool = False,
        conditional: str = "first",
    ) -> None:
        self.spec = spec
        self.attention = attention
        self.conditional = checks.one_of("conditional", conditional, ("first", "last"))
        self.writer = CaptureWriter(path, spec, limit_bytes=limit_bytes, resume=resume)
        self._background = BackgroundWriter(self.writer)
        heads, kv_heads = (spec.call_shape(part)[2] for part in ("q", "k"))
        self._pick = Picker(spec.selection, spec.grid.tokens, heads, kv_heads)
        self._missing = {entry for entry in spec.entries if not self.writer.has(*entry)}

    @property
    def waited(self) -> float:
        """Seconds that the model was held up by a slow disk; only with a GPU."""
        return self._background.waited

    @property
    def complete(self) -> bool:
        """Whether every call has been seen, so that the rest of a sampling is not needed."""
        return not self._missing

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
        self.observe(q, k, v, call)
        return self.attention(q, k, v, call)

    def observe(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> None:
        """Records the call if it is one of those to keep; for `workbench.attach(..., observe=)`."""
        if call.half not in (None, self.conditional):
            return
        if call.step is not None and (call.layer, call.step) in self._missing:
            self._record(q, k, v, call.step, call)

    def write_video(self, video: Tensor) -> None:
        """Keeps the sampled video, float `[frames, height, width, 3]` in [0, 1], as 8 bits."""
        self._background.finish()
        self.writer.write_video(video.mul(255).round().clamp(0, 255).to(torch.uint8))

    def _record(self, q: Tensor, k: Tensor, v: Tensor, step: int, call: AttentionCall) -> None:
        if call.time is None:
            raise ValueError(
                f"layer {call.layer}, step {step}: the call has no denoising time, which a capture "
                "states; pass the model its time as a float"
            )
        if q.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"layer {call.layer}, step {step}: a CUDA graph is being captured, and replaying "
                "it would record nothing; record without CUDA graphs"
            )
        self._check_order(call)
        parts = [self._conditional(part, x) for part, x in zip(PARTS, (q, k, v))]
        q, k, v = self._pick(*parts)
        write = self._background.put if q.is_cuda else self.writer.write
        write(call.layer, step, time=call.time, q=q, k=k, v=v)
        self._missing.remove((call.layer, step))

    def _conditional(self, part: str, x: Tensor) -> Tensor:
        """The samples to keep, `[B, T, H, D]` as the spec says."""
        expected = self.spec.call_shape(part)
        batch = self.spec.batch
        if x.shape[0] not in (batch, 2 * batch):
            raise ValueError(
                f"{part}: batch {x.shape[0]}, but the capture keeps {batch}; it must be {batch}, "
                f"or {2 * batch} with guidance (conditional={self.conditional!r} half)"
            )
        if tuple(x.shape[1:]) != expected[1:]:
            raise ValueError(
                f"{part}: shape {tuple(x.shape)}, but the spec is of {expected} (grid "
                f"{self.spec.grid.shape} with its text); make the spec for the calls of this model"
            )
        return x[:batch] if self.conditional == "first" else x[-batch:]

    def _check_order(self, call: AttentionCall) -> None:
        if call.order != self.spec.grid.order:
            raise ValueError(
                f"layer {call.layer}: tokens in order {call.order!r}, but the capture says "
                f"{self.spec.grid.order!r}; give the spec TokenGrid(..., order={call.order!r})"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._background.close()
        except (ValueError, OSError) as failure:
            self.writer.close()
            if error is None:
                raise
            error.add_note(f"the recording failed as well: {failure}")
        else:
            self.writer.__exit__(kind, error, trace)


@dataclass(frozen=True)
class SamplingPlan:
    """One sampling run of the tiny model, and which of its attention calls to keep.

    Args:
        layers, at_steps: the calls to keep, all pairs of them.
        label: class of the sampled video, index or name.
        grid: tokens along (t, h, w).
        steps: model calls of the sampler. seed: of its noise. guidance: classifier-free.
        heads, query_blocks: the part of a call to keep, see `Selection`; all by default.
        order: token order in which the blocks run: raster, tile or morton.
    """

    layers: tuple[int, ...]
    at_steps: tuple[int, ...]
    label: int | str = 0
    grid: tuple[int, int, int] = (8, 16, 16)
    steps: int = 20
    seed: int = 0
    guidance: float = 2.0
    heads: tuple[int, ...] | None = None
    query_blocks: tuple[int, ...] | None = None
    order: str = "raster"

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
        grid = TokenGrid(self.grid, order=self.order)
        frames, height, width = (g * p for g, p in zip(grid.shape, config.patch))
        return CaptureSpec(
            grid=grid,
            entries=tuple((layer, step) for layer in self.layers for step in self.at_steps),
            heads=config.heads,
            head_dim=config.head_dim,
            video_shape=(frames, height, width),
            title=f"tiny video DiT, class {self.label}, seed {self.seed}",
            details=self._details(model, label),
            selection=Selection(self.heads, self.query_blocks),
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
    resume: bool = False,
    progress: bool = False,
) -> Capture:
    """Samples one video and records the planned attention calls with it.

    Args:
        model: the model, on its device and in its dtype.
        plan: what to sample and what to keep.
        path: the capture to make.
        attention: what the model attends with while it is recorded.
        limit_bytes: the largest file allowed.
        resume: go on with an interrupted recording of the same plan, if there is one.
        progress: show a progress bar.

    Raises:
        ValueError, OSError: before anything is sampled, when the plan does not fit the model or the
            file would be too large.
    """
    limits = {"limit_bytes": limit_bytes, "resume": resume}
    with Recorder(path, plan.spec(model), attention=attention, **limits) as recorder:
        video = sample(
            model,
            labels=[plan.label],
            grid=plan.grid,
            steps=plan.steps,
            seed=plan.seed,
            guidance=plan.guidance,
            attention=recorder,
            order=plan.order,
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
