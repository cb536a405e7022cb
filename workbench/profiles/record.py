"""`workbench record`: q, k, v of chosen calls of a pipeline of diffusers, into a capture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from torch import Tensor

from blockattn import TokenGrid, checks
from blockattn.layout import ORDERS
from workbench.capture import Capture, CaptureSpec, Selection, open_capture, spread_blocks
from workbench.capture.recorder import Recorder
from workbench.capture.writer import LIMIT_BYTES
from workbench.diffusers import attach
from workbench.diffusers.folder import outline
from workbench.diffusers.order import token_order
from workbench.models import AttentionCall
from workbench.profiles.first_step import FirstStep
from workbench.profiles.identity import schedule_mark, weights_mark
from workbench.profiles.pipeline import PipelineVideo
from workbench.sample.settings import MAX_SEED


@dataclass(frozen=True)
class RecordPlan:
    """One sampling of a pipeline, and which of its self-attention calls to keep.

    Attributes:
        layers, at_steps: the calls to keep, all pairs of them.
        prompt: of the video. seed: of its noise.
        heads: query heads to keep; None keeps all.
        query_blocks: how many blocks of 64 query rows to keep, spread evenly; None keeps all.
        order: token order in which the blocks run: raster, tile or morton.
    """

    layers: tuple[int, ...]
    at_steps: tuple[int, ...]
    prompt: str
    seed: int = 0
    heads: tuple[int, ...] | None = None
    query_blocks: int | None = None
    order: str = "raster"

    def check(self, folder: str | Path, steps: int | None) -> None:
        """Refuses what is wrong in itself or for the folder's model, before weights are read.

        Args:
            folder: of a pipeline or transformer. steps: of the scheduler, if they are given.

        Raises:
            ValueError, TypeError: a layer, head or step that there is not or that is named twice,
                no order of tokens, no number of rows, or no seed.
        """
        checks.one_of("order", self.order, ORDERS)
        checks.integer("seed", self.seed, maximum=MAX_SEED)
        if self.query_blocks is not None:
            checks.integer("query_blocks", self.query_blocks, minimum=2)
        chosen = {"layers": self.layers, "at_steps": self.at_steps, "heads": self.heads or ()}
        for name, values in chosen.items():
            if len(set(values)) < len(values):
                raise ValueError(f"{name}={values}: must be without repeats")
        found = outline(folder)
        if found is None:
            return
        _check_below("layers", self.layers, found.layers)
        _check_below("heads", self.heads or (), found.heads)
        if steps is not None and found.one_call_a_step:
            _check_below("at_steps", self.at_steps, checks.integer("steps", steps, minimum=1))

    def spec(self, video: PipelineVideo) -> CaptureSpec:
        """What the capture will hold, and so how large it will be; looks at one attention call.

        Raises:
            ValueError, TypeError: a layer, step, head or number of rows that there is not.
        """
        video.check([self.prompt], [self.seed])
        seen = video.look(self.prompt)
        places = seen.grid
        grid = TokenGrid(places.shape, places.prefix, places.suffix, self.order)
        _check_below("layers", self.layers, len(video.module_names))
        _check_below("at_steps", self.at_steps, len(seen.times))
        blocks = self.query_blocks
        chosen = None if blocks is None else spread_blocks(grid.tokens, blocks)
        return CaptureSpec(
            grid=grid,
            entries=tuple((layer, step) for layer in self.layers for step in self.at_steps),
            heads=seen.heads,
            head_dim=seen.head_dim,
            title=f"{video.name}, {self.prompt}",
            selection=Selection(self.heads, chosen),
            details=self._details(video),
        )

    def _details(self, video: PipelineVideo) -> dict[str, str]:
        """Everything that decides what is sampled: two runs that differ in it are two captures."""
        own = "the pipeline's own"
        return {
            "model": video.title,
            "prompt": self.prompt,
            "seed": str(self.seed),
            "guidance": own if video.guidance is None else str(video.guidance),
            "size": own if video.size is None else ",".join(map(str, video.size)),
            "weights": weights_mark(video.pipe),
            "scheduler": schedule_mark(video.pipe),
        }


def _check_below(name: str, values: tuple[int, ...], count: int) -> None:
    for value in values:
        checks.integer(name, value, maximum=count - 1)


def spread_plan(
    video: PipelineVideo, *, layers: int, steps: int, heads: int, prompt: str, seed: int = 0
) -> RecordPlan:
    """A plan of evenly spread calls and heads, so that one setting fits every model.

    Args:
        video: the pipeline.
        layers, steps, heads: how many of each; all where the model has no more.
        prompt, seed: of the sampling.

    Raises:
        TypeError, ValueError: fewer than one of them.
    """
    for name, number in (("layers", layers), ("steps", steps), ("heads", heads)):
        checks.integer(name, number, minimum=1)
    seen = video.look(prompt)
    return RecordPlan(
        layers=spread(len(video.module_names), layers),
        at_steps=spread(len(seen.times), steps),
        prompt=prompt,
        seed=seed,
        heads=None if heads >= seen.heads else spread(seen.heads, heads),
    )


def spread(count: int, wanted: int) -> tuple[int, ...]:
    """Indices below count, evenly spread, the first and the last among them.

    Raises:
        ValueError: fewer than one is wanted.
    """
    checks.integer("wanted", wanted, minimum=1)
    if wanted == 1:
        return (count // 2,)
    number = min(count, wanted)
    return tuple(round(n * (count - 1) / max(1, number - 1)) for n in range(number))


def record_pipeline(
    video: PipelineVideo,
    plan: RecordPlan,
    spec: CaptureSpec,
    path: str | Path,
    *,
    limit_bytes: int = LIMIT_BYTES,
    resume: bool = False,
    tell: Callable[[str], None] = lambda text: None,
) -> Capture:
    """Samples with the model's own attention until every planned call has been recorded.

    Of a guidance batch the half with the text is kept, which these pipelines put last.

    Args:
        video: the pipeline with its settings. plan: what to sample and keep. spec: `plan.spec`.
        path, limit_bytes, resume: as of :class:`workbench.capture.recorder.Recorder`.
        tell: called once, after the first step, with :func:`forecast`.

    Raises:
        ValueError, OSError: the file would be too large; nothing is sampled then.
        UnsupportedError: a model that cannot run in the order.
    """
    limits = {"limit_bytes": limit_bytes, "resume": resume, "conditional": "last"}
    first = FirstStep()
    with Recorder(path, spec, **limits) as recorder:

        def observe(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> None:
            if first.ends_at(call):
                tell(forecast(plan, first.seconds))
            recorder.observe(q, k, v, call)
            # Pipelines leave out the steps after that; what they return then is not finished.
            video.pipe._interrupt = recorder.complete

        with (
            attach(video.pipe, None, observe=observe) as attached,
            token_order(attached, plan.order),
        ):
            video.run(plan.prompt, plan.seed)
    return open_capture(path)


def forecast(plan: RecordPlan, seconds: float) -> str:
    """How long a recording takes, from the seconds of one step."""
    steps = max(plan.at_steps) + 1
    whole = timedelta(seconds=round(seconds * steps))
    return f"a step takes about {seconds:.1f} s; {steps} steps, to the last call to keep: {whole}"
