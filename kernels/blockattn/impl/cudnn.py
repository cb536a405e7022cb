"""Adapter to cuDNN's block-sparse attention: block masks of 64 x 64 and 128 x 128, Hopper.

A tail is a second attention, over the block summaries, by the Triton kernel with an empty list of
exact blocks; the two results are merged by their LSE. What the library takes otherwise than this
project is evened out here: query sequences in whole blocks of 64, values of padded keys that must
be finite, lengths of padded blocks that must end with the sequence.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from blockattn.impl import triton
from blockattn.impl.library import Library, gpu_obstacles, key_lists, tensor_obstacles
from blockattn.impl.masks import valid_keys
from blockattn.layout import block_lengths
from blockattn.problem import Problem, Result

SUMMARY = "cuDNN's block-sparse attention: block masks on Hopper"
LIBRARY = Library("nvidia-cudnn-frontend", "cudnn.block_sparse_attention.api", "cute-latest")
MAJORS = (9,)
HEAD_DIMS = (64, 96, 128)
BLOCKS = ((64, 64), (128, 128))


def obstacles(problem: Problem | None) -> list[str]:
    """Every static reason why cuDNN cannot serve a call, or run here at all."""
    found = LIBRARY.absent() + gpu_obstacles(problem, MAJORS)
    if problem is not None:
        found += tensor_obstacles(problem, HEAD_DIMS) + _mask_obstacles(problem)
        if not found and problem.tail is not None:
            found = [f"a tail needs the Triton kernels: {x}" for x in triton.obstacles(problem)]
    return found or LIBRARY.unloadable()


def run(problem: Problem) -> Result:
    """Executes a call without obstacles; nothing is read back from the device."""
    index, count = key_lists(problem)
    out, lse = forward(problem, index, count)
    if problem.tail is not None:
        from blockattn.impl.triton.merge import merge

        out, lse = merge(out, lse, *_tail(problem, index, count))
    return Result(out, lse if problem.want_trace else None)


def forward(problem: Problem, index: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Output and LSE of the exact blocks.

    Args:
        problem: a call without obstacles.
        index, count: the route's key blocks, as :func:`key_lists` gives them.
    """
    size, queries = problem.block[0], problem.q.shape[1]
    q, v = problem.q.detach(), problem.v.detach()
    if size == 64 and queries % size:
        q = pad(q, (0, 0, 0, 0, 0, -queries % size))
    if problem.block_lengths is not None:  # weight 0 times NaN is NaN
        v = v.masked_fill(~valid_keys(problem)[None, :, None, None], 0)
    made: Any = LIBRARY.load().block_sparse_attention_forward(
        q,
        problem.k.detach(),
        v,
        index,
        block_sizes=_lengths(problem),
        q2k_block_nums=count,
        sparse_block_size=size,
        allow_empty_block_nums=True,
        softmax_scale=problem.scale,
        layout="bshd",
    )
    out, lse = made["o_tensor"], made["lse_tensor"]
    return out[:, :queries].contiguous(), lse[..., :queries].contiguous()


def _tail(problem: Problem, index: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Output and LSE of the block summaries alone: the Triton kernel with no exact block."""
    from blockattn.impl.triton import launch

    nothing = (index, torch.zeros_like(count))
    made = launch.run(replace(problem, lists=nothing, block_lengths=None, want_trace=True))
    if made.lse is None:
        raise RuntimeError("the Triton kernel returned no LSE for a traced call")
    return made.out, made.lse


def _lengths(problem: Problem) -> Tensor | None:
    """Valid keys of each block, no more than the sequence has."""
    if problem.block_lengths is None:
        return None
    keys, size = problem.k.shape[1], problem.block[1]
    return torch.minimum(problem.block_lengths, block_lengths(keys, size, problem.k.device))


def _mask_obstacles(problem: Problem) -> list[str]:
    found = []
    if problem.route is None:
        found.append("dense attention, serves block masks")
    elif problem.block not in BLOCKS:
        text = f"route blocks {problem.block}, serves {' and '.join(map(str, BLOCKS))}"
        fits = not any(128 % size for size in problem.block)
        found.append(text + ("; route.coarsen((128, 128)) fits, with more pairs" if fits else ""))
    if problem.causal:
        found.append("causal=True")
    return found
