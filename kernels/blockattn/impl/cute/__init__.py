"""Attention for Hopper in CuTe DSL: one kernel, compiled per variant and kept on disk.

Nothing here imports the compiler or the loader before a call on such a GPU asks for a kernel.
"""

from __future__ import annotations

import math
from importlib.util import find_spec

import torch

from blockattn.impl.cute import cache
from blockattn.impl.cute.variant import DTYPES, HEAD_DIMS, variant_of
from blockattn.impl.library import Library, gpu_obstacles
from blockattn.layout import whole_16_bytes
from blockattn.problem import Problem, Result

SUMMARY = "attention for Hopper in CuTe DSL"
BLOCK = (64, 64)
SKIP_TILES = ((64, 64), (128, 128))
# With a route a tile that is kept for another row may exceed a row's maximum by the square of the
# threshold; with the lag of its reference, by 2^14 in float16 and 2^88 in bfloat16. On the full
# range a dropped tile may raise the reference above what is kept by the threshold, and
# probabilities lose as many of their small exponents: 3 in float16, 40 in bfloat16.
MOST_THRESHOLD = {torch.bfloat16: 2.0**40, torch.float16: 8.0}
MAJORS = (9,)
ARCH = "sm_90a"
EXTRAS = "cute or cute-latest"
LOADER = Library("apache-tvm-ffi", "tvm_ffi", EXTRAS)
COMPILER = Library("nvidia-cutlass-dsl", "cutlass.cute", EXTRAS)


def obstacles(problem: Problem | None) -> list[str]:
    """Every static reason why the kernel cannot serve a call, or run here at all."""
    if problem is None:
        return gpu_obstacles(None, MAJORS) or _package_obstacles(None)
    place = gpu_obstacles(problem, MAJORS) or _alignment_obstacles(problem)
    found = place + _tensor_obstacles(problem) + _tile_obstacles(problem)
    return found or _package_obstacles(problem)


def run(problem: Problem) -> Result:
    """Executes a call without obstacles; nothing is read back from the device."""
    from blockattn.impl.cute import launch

    return launch.run(problem)


def cause() -> Exception | None:
    """The exception with which the loader or the compiler failed to import, once tried."""
    return next((x.cause() for x in (LOADER, COMPILER) if x.cause() is not None), None)


def _package_obstacles(problem: Problem | None) -> list[str]:
    """What is missing to load a kernel, and to compile it unless it is kept already."""
    found = [] if find_spec("triton") else ["the package triton is not installed"]
    found += LOADER.absent() or LOADER.unloadable()
    if found or (problem is not None and cache.kept(variant_of(problem), ARCH)):
        return found
    return COMPILER.absent() or COMPILER.unloadable()


def _tensor_obstacles(problem: Problem) -> list[str]:
    found = []
    dtype, dim = problem.q.dtype, problem.q.shape[3]
    if problem.operands is not None:
        found.append("quantised operands")
    if problem.round_p:
        found.append("does not round probabilities to e4m3 (round_p=True)")
    if dtype not in DTYPES:
        found.append(f"dtype {dtype}, serves bfloat16 and float16")
    if dim not in HEAD_DIMS:
        found.append(f"head dim {dim}, serves {' and '.join(map(str, HEAD_DIMS))}")
    return found


def _alignment_obstacles(problem: Problem) -> list[str]:
    """Why the tensor memory accelerator of a GPU cannot read q, k or v."""
    if all(x.stride(3) == 1 and whole_16_bytes(x) for x in (problem.q, problem.k, problem.v)):
        return []
    return ["q, k or v does not lie at whole 16 bytes in memory, or repeats an axis"]


def _tile_obstacles(problem: Problem) -> list[str]:
    found = []
    if problem.route is not None and problem.route.block != BLOCK:
        found.append(f"route blocks {problem.route.block}, serves {BLOCK}")
    if problem.skip_threshold is None:
        return found
    tile = problem.skip_tile
    if tile not in SKIP_TILES:
        found.append(f"skip_tile={tile}, serves {' and '.join(map(str, SKIP_TILES))}")
    elif tile != BLOCK and (problem.route is not None or problem.block_lengths is not None):
        found.append(f"skip_tile={tile} with a route or padded blocks, serves {BLOCK}")
    most = MOST_THRESHOLD.get(problem.q.dtype, math.inf)
    if problem.skip_threshold > most:
        threshold, dtype = problem.skip_threshold, problem.q.dtype
        found.append(f"skip_threshold={threshold:g}, serves at most {most:g} in {dtype}")
    if problem.skip_reference != "exact":
        found.append(f"skip_reference={problem.skip_reference!r}, serves 'exact'")
    return found
