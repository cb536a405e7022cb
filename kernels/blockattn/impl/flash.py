"""Adapter to flash-attn-4: dense and causal attention, and block masks in the blocks it serves.

Which blocks these are depends on its version and on the GPU. A route in smaller blocks is refused;
who can do with more pairs asks for them by ``route.coarsen(block)``, and the trace then reports the
density of the coarser route. Queries and keys of a causal call must be as many, because
flash-attn-4 lines its mask up at the last token of both, not at the first.
"""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor

from blockattn.impl.library import Library, gpu_obstacles, key_lists, tensor_obstacles
from blockattn.problem import Problem, Result

SUMMARY = "flash-attn-4: dense attention, and block masks in the blocks that it serves"
LIBRARY = Library("flash-attn-4", "flash_attn.cute.interface", "cute or cute-latest")
MAJORS = (9, 10)
HEAD_DIMS = (64, 96, 128)
MASK_HEAD_DIMS = (64, 128)
OLD, NEW = 19, 36  # betas of 4.0.0 that were tried; what lies between counts as the older one


def obstacles(problem: Problem | None) -> list[str]:
    """Every static reason why flash-attn-4 cannot serve a call, or run here at all."""
    found = LIBRARY.absent() + gpu_obstacles(problem, MAJORS)
    if problem is not None:
        found += _call_obstacles(problem)
        if not found and problem.route is not None:
            found = _block_obstacles(problem)
    return found or LIBRARY.unloadable() or _compiler_obstacles()


def run(problem: Problem) -> Result:
    """Executes a call without obstacles; nothing is read back from the device."""
    lists = None if problem.route is None else key_lists(problem)
    return Result(*forward(problem, lists))


def forward(
    problem: Problem, lists: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor | None]:
    """Output, and the LSE when the problem wants a trace.

    The function behind the public one, because that goes through autograd, which records nothing
    here, and does not let the tile be chosen.

    Args:
        problem: a call without obstacles.
        lists: index and count of the route's key blocks, ascending: the last one may be ragged.
    """
    settings: dict[str, Any] = {}
    if lists is not None and problem.route is not None:
        block = problem.route.block
        settings["block_sparse_tensors"] = _block_tensors(*lists, block)
        settings["tile_mn"] = tile(LIBRARY.version() or "", block)
    made = LIBRARY.load()._flash_attn_fwd(
        *(x.detach() for x in (problem.q, problem.k, problem.v)),
        softmax_scale=problem.scale,
        causal=problem.causal,
        return_lse=problem.want_trace,
        **settings,
    )
    return made[0], made[1]


def blocks_served(version: str, major: int) -> tuple[tuple[int, int], ...]:
    """Blocks (queries, keys) of the masks that a version serves, coarsest first.

    Args:
        version: of flash-attn-4.
        major: compute capability, 9 or 10.
    """
    if major == 10:  # two query tiles share one list
        return ((256, 128),)
    if _beta(version) < NEW:
        return ((128, 128), (128, 64))
    return ((128, 128), (128, 64), (64, 128), (64, 64))


def tile(version: str, block: tuple[int, int]) -> tuple[int, int] | None:
    """The tile to ask for; ``None`` where the version finds the one that fits the blocks itself."""
    return block if _beta(version) < NEW and block == (128, 64) else None


def _beta(version: str) -> int:
    """Number of a beta of 4.0.0; what is none counts as later than all of them."""
    found = re.match(r"4\.0\.0b(\d+)", version)
    return int(found[1]) if found else 1_000_000


def _block_tensors(index: Tensor, count: Tensor, block: tuple[int, int]) -> Any:
    """Every listed block is whole; the list of masked ones is empty, its entries are not read."""
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    return BlockSparseTensorsTorch(
        mask_block_cnt=count.new_zeros(count.shape),
        mask_block_idx=index,
        full_block_cnt=count,
        full_block_idx=index,
        block_size=block,
    )


def _call_obstacles(problem: Problem) -> list[str]:
    routed = problem.route is not None
    found = tensor_obstacles(problem, MASK_HEAD_DIMS if routed else HEAD_DIMS)
    if problem.tail is not None or problem.tail_to_come:
        found.append("block summaries (tail)")
    if problem.block_lengths is not None:
        found.append("padded blocks (block_lengths)")
    if problem.causal and routed:
        found.append("causal=True with a route")
    elif problem.causal and problem.seqlens[0] != problem.seqlens[1]:
        found.append(f"causal=True with (Tq, Tk) = {problem.seqlens}, serves equal lengths")
    return found


def _block_obstacles(problem: Problem) -> list[str]:
    from torch.cuda import get_device_capability

    block, version = problem.block, LIBRARY.version() or ""
    served = blocks_served(version, get_device_capability(problem.q.device)[0])
    if block in served:
        return []
    coarser = [f"route.coarsen({x})" for x in served if not (x[0] % block[0] or x[1] % block[1])]
    text = f"route blocks {block}, {version} serves {', '.join(map(str, served))}"
    return [text + (f"; {coarser[-1]} fits, with more pairs" if coarser else "")]


def _compiler_obstacles() -> list[str]:
    """The beta that takes CUDA 12.9 libraries for those of an older compiler."""
    version = LIBRARY.version() or ""
    if _beta(version) > OLD:
        return []
    from cutlass import CUDA_VERSION

    if (CUDA_VERSION.major, CUDA_VERSION.minor) != (12, 9):
        return []
    return [
        f"{version} does not compile with the CUDA 12.9 libraries that cutlass-dsl took: "
        "needs its extra cu13 and a driver for CUDA 13; `workbench doctor` says which is missing"
    ]
