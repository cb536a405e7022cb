"""A tiny video diffusion transformer: data generator, model, sampler, training, weights.

Needs torch, numpy and safetensors alone, so that it also trains on a bare GPU machine.
"""

from .dit import AttentionCall, AttentionFn, DiTConfig, VideoDiT, dense_attention
from .moving_shapes import CLASS_NAMES, make_videos
from .sampler import denoising_times, sample
from .weights import load_model, save_model, training_record

__all__ = [
    "CLASS_NAMES",
    "AttentionCall",
    "AttentionFn",
    "DiTConfig",
    "VideoDiT",
    "dense_attention",
    "denoising_times",
    "load_model",
    "make_videos",
    "sample",
    "save_model",
    "training_record",
]
