"""One pass over sampled videos: the scores of every (video, layer, step, head) become a table.

The output stays dense, so every call is one of the dense trajectory, and a call is reduced at once:
what is held is the table alone, whose size is known before anything runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from blockattn import checks
from workbench.calibrate.samples import Samples, Tick
from workbench.calibrate.scores import MIN_POINTS, Geometry, ScoreTable, kept_ranks, sorted_scores
from workbench.models import AttentionCall, AttentionFn, VideoDiT, dense_attention

LIMIT_BYTES = 2**28
# What scoring holds besides q and k, per block pair of a head: of Sol-Attn the scores and their
# sort with its index, of SkipSoftmax the maximum of every row in every key tile, several times.
WORK_BYTES_PER_PAIR = {"sol_attn": 48, "skip_softmax": 4096}


@dataclass(frozen=True)
class CalibrationPlan:
    """What a calibration will do, and how much memory it takes; nothing runs yet.

    Attributes:
        algorithm: ``sol_attn`` or ``skip_softmax``.
        samples: the videos.
        layers, heads, head_dim, kv_heads: of the model; as many key heads by default.
        thresh_type: of Sol-Attn.
        limit_bytes: largest table allowed. A larger one is coarsened to quantiles with a bound on
            the density; below 65 of them for a head it is refused.

    Raises:
        TypeError, ValueError: an argument is not allowed, or the limit is too small.
    """

    algorithm: str
    samples: Samples
    layers: int
    heads: int
    head_dim: int = 128
    kv_heads: int | None = None
    thresh_type: str = "diag"
    limit_bytes: int = LIMIT_BYTES

    def __post_init__(self) -> None:
        checks.one_of("thresh_type", self.thresh_type, ("diag", "exact"))
        if self.algorithm == "skip_softmax" and self.thresh_type != "diag":
            raise ValueError(
                f"thresh_type={self.thresh_type!r}: skip_softmax would not look at it; leave it out"
            )
        checks.integer("limit_bytes", self.limit_bytes, minimum=1)
        least = min(MIN_POINTS, self.geometry.scores)
        if self.points < least:
            raise ValueError(
                f"limit_bytes={self.limit_bytes:,}: {self.rows:,} heads of all videos, layers and "
                f"steps need at least {4 * self.rows * least:,} bytes with {least} scores each; "
                "allow that, or sample fewer videos or steps"
            )

    @property
    def geometry(self) -> Geometry:
        return Geometry(self.algorithm, self.samples.tokens)

    @property
    def shape(self) -> tuple[int, ...]:
        """(videos, layers, steps, batch, heads)."""
        videos, samples = len(self.samples.videos), self.samples
        return (videos, self.layers, samples.steps, samples.batch, self.heads)

    @property
    def rows(self) -> int:
        """Heads of all calls."""
        return int(torch.tensor(self.shape).prod())

    @property
    def points(self) -> int:
        """Scores kept of each head."""
        return min(self.geometry.scores, self.limit_bytes // (4 * self.rows))

    @property
    def table_bytes(self) -> int:
        """Size of the table, exactly: float32 scores."""
        return 4 * self.rows * self.points

    @property
    def work_bytes(self) -> int:
        """Estimate from above of what scoring one call holds besides: one key head at a time.

        Resident memory measured on a CPU at 8k to 64k tokens stayed below it.
        """
        group = self.heads // (self.kv_heads or self.heads)
        pairs = WORK_BYTES_PER_PAIR[self.algorithm] * group * self.geometry.pairs
        copies = 8 * (group + 1) * self.samples.tokens * self.head_dim
        return self.samples.batch * (pairs + copies)

    @property
    def bound(self) -> float:
        """Largest error of a density of one head; 0 when all scores are kept."""
        return self.empty().bound

    def empty(self) -> ScoreTable:
        """A table without memory behind it."""
        ranks = kept_ranks(self.geometry.scores, self.points)
        points = torch.zeros(1).expand(*self.shape, len(ranks))
        return ScoreTable(points, ranks, self.geometry)

    def __str__(self) -> str:
        videos, layers, steps, batch, heads = self.shape
        kept = "all" if self.bound == 0 else f"{self.points:,} of"
        return (
            f"{self.algorithm}: {videos} videos x {layers} layers x {steps} steps x "
            f"{batch * heads} heads; {kept} {self.geometry.scores:,} scores of each in "
            f"{self.table_bytes:,} bytes, densities "
            + ("exact" if self.bound == 0 else f"within {self.bound:.2g}")
            + f"; scoring a call takes up to about {self.work_bytes:,} bytes more"
        )


class Collector:
    """An attention function that also keeps the scores of every call; what it returns is dense.

    Args:
        plan: of the calibration.
        attention: does the attention.
    """

    def __init__(self, plan: CalibrationPlan, attention: AttentionFn = dense_attention) -> None:
        self.plan, self.attention = plan, attention
        self.ranks = kept_ranks(plan.geometry.scores, plan.points)
        self.points = torch.full((*plan.shape, len(self.ranks)), torch.nan)
        self.video = 0

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
        self._keep(q, k, call)
        return self.attention(q, k, v, call)

    def table(self) -> ScoreTable:
        """Everything that was kept.

        Raises:
            ValueError: a call of the plan never came.
        """
        missing = self.points[..., :1].isnan().nonzero()
        if len(missing):
            video, layer, step = missing[0, :3].tolist()
            raise ValueError(f"video {video}, layer {layer}, step {step}: no call came; run it")
        return ScoreTable(self.points, self.ranks, self.plan.geometry)

    def _keep(self, q: Tensor, k: Tensor, call: AttentionCall) -> None:
        wanted = (*self.plan.shape[3:], self.plan.samples.tokens)
        if (q.shape[0], q.shape[2], q.shape[1]) != wanted or call.step is None:
            raise ValueError(
                f"q: shape {tuple(q.shape)} at step {call.step}, but the plan has batch, heads and "
                f"tokens {wanted}; make the plan of this model and these samples"
            )
        place = self.points[self.video, call.layer, call.step]
        ranks = self.ranks.to(q.device)
        settings = {"thresh_type": self.plan.thresh_type}
        for heads, scores in sorted_scores(q, k, self.plan.algorithm, **settings):
            place[:, heads] = scores[..., ranks].cpu()


@dataclass(frozen=True)
class Calibration:
    """Scores of every call of some dense samplings.

    Attributes:
        table: ``[videos, layers, steps, batch, heads, points]``.
        samples: the videos. thresh_type: of Sol-Attn.
        record: how it was made (:func:`workbench.provenance.provenance`).
    """

    table: ScoreTable
    samples: Samples
    thresh_type: str = "diag"
    record: dict[str, object] = field(default_factory=dict, repr=False)

    @property
    def algorithm(self) -> str:
        return self.table.geometry.algorithm

    @property
    def layers(self) -> int:
        return self.table.points.shape[1]

    @property
    def heads(self) -> int:
        return self.table.points.shape[4]

    def density(self, level: Tensor | float) -> Tensor:
        """Density of every head, float64 ``[videos, layers, steps, batch, heads]``.

        Args:
            level: tau or log2(lambda): one for all, or ``[layers, steps]``.
        """
        levels = torch.as_tensor(level, dtype=torch.float64)
        if levels.ndim not in (0, 2):
            raise ValueError(
                f"level: shape {tuple(levels.shape)}, expected one number or [layers, steps]"
            )
        return self.table.density(levels if levels.ndim == 0 else levels[..., None, None])


def plan_for(
    model: VideoDiT, algorithm: str, samples: Samples, **settings: object
) -> CalibrationPlan:
    """The plan for a model; `settings` as of :class:`CalibrationPlan`."""
    config = model.config
    shape = {"layers": config.depth, "heads": config.heads, "head_dim": config.head_dim}
    return CalibrationPlan(algorithm, samples, **shape, **settings)  # pyright: ignore[reportArgumentType]


def calibrate(
    model: VideoDiT,
    plan: CalibrationPlan,
    *,
    record: dict[str, object] | None = None,
    tick: Tick = lambda label: None,
) -> Calibration:
    """Samples every video densely and keeps the scores of all its calls.

    Args:
        model: on its device and in its dtype.
        plan: of :func:`plan_for`.
        record: how it is made, to be kept with the result.
        tick: called when a video begins.
    """
    collector = Collector(plan)
    for index, (label, seed) in enumerate(plan.samples.videos):
        tick(f"{label}, seed {seed}")
        collector.video = index
        plan.samples.run(model, index, collector)
    return Calibration(collector.table(), plan.samples, plan.thresh_type, dict(record or {}))
