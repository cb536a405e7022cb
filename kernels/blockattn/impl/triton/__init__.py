"""Portable GPU kernels in Triton: preparation, routing, attention, quantisation.

Nothing here imports triton before a call on a GPU asks for it.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from blockattn.problem import Problem, Result

SUMMARY = "portable GPU kernels in Triton"
DEVICES = ("cuda",)
HEAD_DIMS = (64, 128)
DTYPES = (torch.bfloat16, torch.float16)
BLOCK = (64, 64)
SKIP_TILES = ((64, 64), (128, 128))


def obstacles(problem: Problem | None) -> list[str]:
    """Every static reason why the Triton kernels cannot serve a call, or run here at all."""
    if find_spec("triton") is None:
        return ["the package triton is not installed"]
    if problem is None:
        return [] if torch.cuda.is_available() else ["needs a CUDA GPU"]
    check = _tensor_obstacles if problem.operands is None else _code_obstacles
    return check(problem) + _tile_obstacles(problem)


def run(problem: Problem) -> Result:
    """Executes a call without obstacles; nothing is read back from the device."""
    if problem.operands is not None:
        from blockattn.impl.triton import scaled

        return scaled.run(problem)
    from blockattn.impl.triton import launch

    return launch.run(problem)


def encodes(x: Tensor) -> bool:
    """The fused encoders of MXFP8, NVFP4 and FP8 V serve x; the plain ones give the same bits.

    A graph that ``torch.compile`` traces keeps the plain ones, which its compiler fuses.
    """
    return (
        not torch.compiler.is_compiling()
        and x.device.type in DEVICES
        and x.dtype in DTYPES
        and x.numel() > 0
        and find_spec("triton") is not None
        and not _too_old(x.device)
    )


def _code_obstacles(problem: Problem) -> list[str]:
    """Of a quantised call; the encoders write 16-bit or narrower operands, whatever q is."""
    found, device, dim = [], problem.q.device, problem.q.shape[3]
    if problem.block_lengths is not None:
        found.append("padded blocks (block_lengths) of quantised operands")
    if device.type not in DEVICES:
        found.append(f"q is on {device}, needs a CUDA GPU")
    elif device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        name = torch.cuda.get_device_name(device)
        found.append(f"{name} has no e4m3 numbers: needs compute capability 8.9 or newer")
    if dim not in HEAD_DIMS:
        found.append(f"head dim {dim}, serves {' and '.join(map(str, HEAD_DIMS))}")
    return found


def _too_old(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0)


def _tensor_obstacles(problem: Problem) -> list[str]:
    found = []
    device, dtype, dim = problem.q.device, problem.q.dtype, problem.q.shape[3]
    if device.type not in DEVICES:
        found.append(f"q is on {device}, needs a CUDA GPU")
    elif _too_old(device):
        found.append(f"{torch.cuda.get_device_name(device)} is older than compute capability 8.0")
    if problem.round_p:
        found.append("does not round probabilities to e4m3 (round_p=True) without FP8 values")
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
    found += _skip_tile_obstacles(problem)
    if problem.skip_reference != "exact":
        found.append(f"skip_reference={problem.skip_reference!r}, serves 'exact'")
    return found


def _skip_tile_obstacles(problem: Problem) -> list[str]:
    tile = problem.skip_tile
    if tile == BLOCK:
        return []
    if tile not in SKIP_TILES:
        return [f"skip_tile={tile}, serves {' and '.join(map(str, SKIP_TILES))}"]
    found = []
    if problem.operands is not None:
        found.append(f"skip_tile={tile} of quantised operands, serves {BLOCK}")
    if problem.route is not None or problem.block_lengths is not None:
        found.append(f"skip_tile={tile} with a route or padded blocks, serves {BLOCK}")
    device = problem.q.device
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] not in (9, 10):
        name = torch.cuda.get_device_name(device)
        found.append(f"skip_tile={tile} needs more shared memory than {name} has, serves {BLOCK}")
    return found
