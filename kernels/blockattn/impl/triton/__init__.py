"""Portable GPU kernels in Triton: preparation, routing, attention.

Nothing here imports triton before a call on a GPU asks for it.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch

from blockattn.problem import Problem, Result

SUMMARY = "portable GPU kernels in Triton"
DEVICES = ("cuda",)
HEAD_DIMS = (64, 128)
DTYPES = (torch.bfloat16, torch.float16)
BLOCK = (64, 64)


def obstacles(problem: Problem | None) -> list[str]:
    """Every static reason why the Triton kernels cannot serve a call, or run here at all."""
    if find_spec("triton") is None:
        return ["the package triton is not installed"]
    if problem is None:
        return [] if torch.cuda.is_available() else ["needs a CUDA GPU"]
    return _tensor_obstacles(problem) + _tile_obstacles(problem)


def run(problem: Problem) -> Result:
    """Executes a call without obstacles; nothing is read back from the device."""
    from blockattn.impl.triton import launch

    return launch.run(problem)


def _tensor_obstacles(problem: Problem) -> list[str]:
    found = []
    device, dtype, dim = problem.q.device, problem.q.dtype, problem.q.shape[3]
    if device.type not in DEVICES:
        found.append(f"q is on {device}, needs a CUDA GPU")
    elif device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        found.append(f"{torch.cuda.get_device_name(device)} is older than compute capability 8.0")
    if dtype not in DTYPES:
        found.append(f"dtype {dtype}, serves bfloat16 and float16")
    if dim not in HEAD_DIMS:
        found.append(f"head dim {dim}, serves {' and '.join(map(str, HEAD_DIMS))}")
    if any(x.stride(3) != 1 for x in (problem.q, problem.k, problem.v)):
        found.append("the channels of q, k or v are not contiguous")
    return found


def _tile_obstacles(problem: Problem) -> list[str]:
    found = []
    if problem.route is not None and problem.route.block != BLOCK:
        found.append(f"route blocks {problem.route.block}, serves {BLOCK}")
    if problem.skip_threshold is None:
        return found
    if problem.skip_tile != BLOCK:
        found.append(f"skip_tile={problem.skip_tile}, serves {BLOCK}")
    if problem.skip_reference != "exact":
        found.append(f"skip_reference={problem.skip_reference!r}, serves 'exact'")
    return found
