"""A small random model and short samplings for the tests of calibration."""

from __future__ import annotations

from functools import lru_cache

import torch

from tests.model_inputs import fresh_model
from workbench.calibrate.collect import Calibration, calibrate, plan_for
from workbench.calibrate.samples import Samples
from workbench.calibrate.scores import Geometry, ScoreTable, kept_ranks
from workbench.models import VideoDiT

SAMPLES = Samples(("ring",), (5, 6), grid=(3, 8, 25), steps=3)  # 600 tokens: a ragged last block


@lru_cache
def small_model() -> VideoDiT:
    """Two layers."""
    made = fresh_model(2)
    for name, parameter in made.named_parameters():
        if "_norm" in name:
            parameter.mul_(3)  # sharper attention than that of fresh weights
    return made


@lru_cache
def small_calibration(algorithm: str, samples: Samples = SAMPLES) -> Calibration:
    """Of the small model."""
    return calibrate(small_model(), plan_for(small_model(), algorithm, samples))


def made_calibration(points: torch.Tensor, samples: Samples) -> Calibration:
    """A SkipSoftmax calibration of given gaps, float32 ``[videos, layers, steps, 1, heads, n]``."""
    geometry = Geometry("skip_softmax", samples.tokens)
    ranks = kept_ranks(geometry.scores, points.shape[-1])
    return Calibration(ScoreTable(points.sort(dim=-1).values, ranks, geometry), samples)
