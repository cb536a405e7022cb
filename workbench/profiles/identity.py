"""What tells one pipeline from another of the same name: its weights and its schedule."""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

import numpy
import torch
from torch import nn

SAMPLES = 64  # values of a tensor at most: other weights differ in them, and no file is read again


def weights_mark(pipe: Any) -> str:
    """sha256 over evenly spread values of every tensor that has a part in q, k and v.

    Args:
        pipe: of diffusers. Its decoder is left out: it runs after the last call.
    """
    digest = hashlib.sha256()
    for name, part in sorted(pipe.components.items()):
        if not isinstance(part, nn.Module) or name == "vae":
            continue
        for tensor_name, tensor in sorted(part.state_dict().items()):
            digest.update(f"{name}.{tensor_name} {tuple(tensor.shape)}\n".encode())
            if not tensor.is_meta:  # where its values are elsewhere until it runs
                digest.update(_spread(tensor).tobytes())
    return digest.hexdigest()


def schedule_mark(pipe: Any) -> str:
    """Class and settings of the scheduler, and of the boundary between two transformers."""
    scheduler = pipe.scheduler
    settings = {k: v for k, v in scheduler.config.items() if not k.startswith("_")}
    boundary = getattr(pipe.config, "boundary_ratio", None)
    found = {**settings, "class": type(scheduler).__name__, "boundary_ratio": boundary}
    return json.dumps(found, sort_keys=True, default=str)


def _spread(tensor: torch.Tensor) -> numpy.ndarray:
    """At most SAMPLES values in float32, evenly spread over the whole tensor."""
    flat = tensor.detach().flatten()
    step = max(1, math.ceil(flat.numel() / SAMPLES))
    return flat[::step].float().cpu().numpy()
