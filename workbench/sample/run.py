"""One video sampled with every variant of attention from the same noise, and what became of it.

Plain functions: :func:`run` samples and compares, :mod:`workbench.sample.text` prints,
:mod:`workbench.sample.report` writes the run folder.
"""

from __future__ import annotations

import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from workbench.attention import SparseAttention
from workbench.attention.log import (
    CallCounts,
    CallRecord,
    density_by_step,
    mean_density,
    what_ran,
)
from workbench.attention.phase import dense_steps
from workbench.models import AttentionCall, AttentionFn, VideoDiT, dense_attention, sample
from workbench.quality import WINDOW, psnr, relative_l2, ssim
from workbench.sample.exact import Baseline, BlockByBlock
from workbench.sample.settings import SampleSettings
from workbench.sample.variants import BASELINE, Variant

Tick = Callable[[str], None]
Score = Callable[[Tensor, Tensor], float]


@dataclass(frozen=True)
class Sampled:
    """One video and how it came about.

    Attributes:
        video: float32 [F, H, W, 3] in [0, 1], on the CPU.
        records: one for every attention call, in order.
        counts: where the policy sent the calls; ``None`` without a policy.
        seconds: of the whole sampling, densities read included.
        warnings: what the policy warned of.
        attention_seconds: of that, spent in attention; NaN when nobody measured it.
    """

    variant: Variant
    seed: int
    video: Tensor
    records: list[CallRecord]
    counts: CallCounts | None
    seconds: float
    warnings: list[str] = field(default_factory=list)
    attention_seconds: float = math.nan

    @property
    def density(self) -> float:
        """Mean over all calls, dense ones included."""
        return mean_density(self.records)

    def densities(self) -> list[float]:
        """Mean over the layers of each step."""
        return list(density_by_step(self.records).values())

    @property
    def ran(self) -> str:
        """Algorithms and implementations that ran, such as ``sol_attn: eager``."""
        return ", ".join(what_ran(self.records))

    @property
    def emulated(self) -> tuple[str, ...]:
        """Formats that no matrix unit of this machine takes."""
        return tuple(sorted({name for r in self.records for name in r.emulated}))


@dataclass(frozen=True)
class Quality:
    """How far a video is from a reference; NaN when it is not finite.

    Attributes:
        psnr: dB. ssim: at most 1, NaN below 11 pixels. relative_l2: ratio of norms.
        lpips: ``None`` when it cannot run here.
    """

    psnr: float
    ssim: float
    relative_l2: float
    lpips: float | None = None


@dataclass(frozen=True)
class Row:
    """One variant and seed: what ran, against its own baseline and against the base model's."""

    sampled: Sampled
    quality: Quality
    to_base: Quality
    dense_steps: int
    flags: list[str]


@dataclass(frozen=True)
class SampleResult:
    """Everything that was sampled, variant by variant in the order asked for.

    Attributes:
        inputs: files that went in, by role, for the provenance.
    """

    settings: SampleSettings
    variants: list[Variant]
    rows: list[Row]
    device: str
    dtype: str
    inputs: dict[str, Path] = field(default_factory=dict)

    def of(self, name: str) -> list[Row]:
        """The rows of a variant, one per seed."""
        return [row for row in self.rows if row.sampled.variant.name == name]


Runner = BlockByBlock | Baseline | SparseAttention


def run(
    models: Mapping[str, VideoDiT],
    settings: SampleSettings,
    variants: Sequence[Variant],
    *,
    lpips: Score | None = None,
    tick: Tick = lambda label: None,
) -> SampleResult:
    """Samples every variant from the same noise and compares it with its baseline.

    Args:
        models: by the `weights` of the variants.
        settings: what to sample.
        variants: of :func:`workbench.sample.variants.variants`; baselines come before what is
            compared with them.
        lpips: a :class:`workbench.quality.Lpips`, where it can run.
        tick: called with a label before each model step; there are :func:`units` of them.

    Raises:
        KeyError: no model, or no baseline, of a name. Other errors are those of the arguments, and
        come before any sampling.
    """
    for variant in variants:  # everything that can be refused is refused before the work
        _runner(variant, models[variant.weights], settings)
    for model in models.values():  # the first calls of a process are slow
        _video(model, settings, dense_attention, settings.seeds[0], steps=1)
    rows: list[Row] = []
    for seed in settings.seeds:
        done: dict[str, Sampled] = {}
        for variant in variants:
            sampled = sample_variant(models[variant.weights], variant, settings, seed, tick=tick)
            done[variant.name] = sampled
            rows.append(_row(sampled, done, settings, lpips))
    weight = models["base"].embed.weight
    return SampleResult(
        settings, list(variants), rows, str(weight.device), str(weight.dtype).split(".")[-1]
    )


def units(settings: SampleSettings, variants: Sequence[Variant]) -> int:
    """Model steps of :func:`run`."""
    return len(variants) * len(settings.seeds) * settings.steps


def sample_variant(
    model: VideoDiT,
    variant: Variant,
    settings: SampleSettings,
    seed: int,
    *,
    tick: Tick = lambda label: None,
) -> Sampled:
    """Samples one video with one variant."""
    runner = _runner(variant, model, settings)
    in_attention = 0.0

    def attention(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
        nonlocal in_attention
        if call.layer == 0:
            tick(variant.name)
        began = _clock(q)
        out = runner(q, k, v, call)
        in_attention += _clock(out) - began
        return out

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        began = time.perf_counter()
        video = _video(model, settings, attention, seed)
        seconds = time.perf_counter() - began
    counts = runner.counts() if isinstance(runner, SparseAttention) else None
    told = [str(warning.message) for warning in caught]
    records = list(runner.records)
    return Sampled(variant, seed, video, records, counts, seconds, told, in_attention)


def _clock(tensor: Tensor) -> float:
    """Seconds, once everything that was asked of a GPU is done."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    return time.perf_counter()


def _runner(variant: Variant, model: VideoDiT, settings: SampleSettings) -> Runner:
    if variant.role == "baseline":
        return Baseline()
    if variant.role == "control":
        return BlockByBlock()
    return SparseAttention(
        variant.config,
        num_layers=model.config.depth,
        gate=variant.gate,
        impl=settings.impl,
        record=True,
    )


def _video(
    model: VideoDiT,
    settings: SampleSettings,
    attention: AttentionFn,
    seed: int,
    steps: int | None = None,
) -> Tensor:
    """[F, H, W, 3] on the CPU, which also waits for a GPU."""
    videos = sample(
        model,
        labels=[settings.label],
        grid=settings.grid,
        steps=steps or settings.steps,
        seed=seed,
        attention=attention,
        guidance=settings.guidance,
        shift=settings.shift,
    )
    return videos[0].cpu()


def _row(
    sampled: Sampled, done: Mapping[str, Sampled], settings: SampleSettings, lpips: Score | None
) -> Row:
    own, base = done[sampled.variant.compared_with], done[BASELINE]
    quality = compare(sampled.video, own.video, lpips)
    to_base = quality if own is base else compare(sampled.video, base.video, lpips)
    steps = dense_steps(settings.times, sampled.variant.cutoff)
    return Row(sampled, quality, to_base, steps, flags(sampled, own.video))


def compare(video: Tensor, reference: Tensor, lpips: Score | None = None) -> Quality:
    """All measures at once."""
    if not bool(torch.isfinite(video).all()):
        return Quality(math.nan, math.nan, math.nan, None if lpips is None else math.nan)
    large = min(video.shape[1:3]) >= WINDOW
    return Quality(
        psnr=psnr(video, reference),
        ssim=ssim(video, reference) if large else math.nan,
        relative_l2=relative_l2(video, reference),
        lpips=None if lpips is None else lpips(video, reference),
    )


def flags(sampled: Sampled, reference: Tensor) -> list[str]:
    """What makes a row worthless or misleading, in words; empty when there is nothing."""
    found = flags_of(sampled.video, sampled.records, reference, sparse=sampled.variant.sparse)
    return found + sampled.warnings


def flags_of(
    video: Tensor, records: Sequence[CallRecord], reference: Tensor, *, sparse: bool
) -> list[str]:
    """The same for any sampled video, warnings aside.

    Args:
        video, reference: of one shape; the dense video to compare with.
        records: of its attention calls.
        sparse: whether sparsity was asked for.
    """
    found: list[str] = []
    if not bool(torch.isfinite(video).all()):
        found.append("NOT FINITE: the video holds NaN or infinite values")
    counts = counted(records)
    if sparse:
        if not counts.sparse:
            found.append(f"RAN DENSE EVERYWHERE: {counts}")
        elif all(record.density == 1.0 for record in records if record.kind == "sparse"):
            found.append(f"SKIPPED NOTHING: all {counts.sparse} sparse calls have density 1")
        if torch.equal(video, reference):
            found.append("EQUALS DENSE bit for bit: this is no test of sparsity")
    if counts.ineligible:
        found.append(f"WENT DENSE UNASKED: {counts}")
    return found


def counted(records: Sequence[CallRecord]) -> CallCounts:
    """Where the recorded calls went."""
    kinds = Counter((record.kind, record.reason) for record in records)

    def of(kind: str) -> dict[str, int]:
        return {reason: n for (k, reason), n in kinds.items() if k == kind}

    return CallCounts(sum(of("sparse").values()), of("dense"), of("ineligible"))
