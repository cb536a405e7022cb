"""Host side of the attention kernels: configuration, buffers, one launch (or two).

On Hopper large votes on tiles of the full range run on a kernel of their own,
:mod:`blockattn.impl.triton.vote_groups`; all else runs on :mod:`blockattn.impl.triton.attention`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from blockattn.impl.masks import without_invalid
from blockattn.impl.triton import attention as kernels
from blockattn.impl.triton.lists import row_lists
from blockattn.impl.triton.vote import GROUP_ROWS
from blockattn.impl.triton.words import map_words
from blockattn.layout import num_blocks, whole_16_bytes
from blockattn.problem import BlockSummary, Problem, Result
from blockattn.route import BlockRoute


@dataclass(frozen=True)
class Config:
    """Tile and pipeline of one launch; fixed per kind of call, never retuned per length.

    Attributes:
        rows, columns: queries and keys of a tile.
        warps, stages: of a program; tiles in flight.
        adaptive: a skip vote branches only once many tiles are dropped.
        groups: of a program of ``vote_groups``, which then runs; warps are those of one.
    """

    rows: int
    columns: int
    warps: int
    stages: int
    adaptive: bool = False
    groups: int = 0

    def __post_init__(self) -> None:
        if self.adaptive and (self.rows != 16 * self.warps or self.warps not in (4, 8)):
            raise ValueError(
                f"adaptive: rows={self.rows} with warps={self.warps}, but the vote takes 16 rows "
                "for each of 4 or 8 warps"
            )


GROUPED = {
    (64, 64): Config(rows=64, columns=64, warps=4, stages=4, groups=3),
    (128, 128): Config(rows=128, columns=128, warps=4, stages=3, groups=2),
}


def configure(problem: Problem) -> Config:
    """The configuration of a call on the GPU its tensors are on."""
    if votes_in_groups(problem):
        return GROUPED[problem.skip_tile]
    skip_tile = None if problem.skip_threshold is None else problem.skip_tile
    return configuration(
        capability_of(problem.q.device),
        plain=problem.plain,
        causal=problem.causal,
        skip_tile=skip_tile,
    )


def configuration(
    capability: tuple[int, int],
    *,
    plain: bool,
    causal: bool = False,
    skip_tile: tuple[int, int] | None = None,
) -> Config:
    """The configuration of an architecture.

    Args:
        capability: compute capability, major and minor.
        plain: dense attention, without a skip vote; causal: with the causal mask.
        skip_tile: of the vote, where there is one.
    """
    if capability[0] not in (9, 10):  # 99 kB of shared memory, products in registers
        return Config(rows=64, columns=64, warps=8, stages=2)
    if plain and (causal or capability[0] == 10):
        return Config(rows=128, columns=128, warps=8, stages=3)
    hopper_votes = capability[0] == 9 and skip_tile is not None
    if skip_tile == (128, 128):  # with more stages registers spill on 10.x
        stages = 3 if capability[0] == 9 else 1
        return Config(rows=128, columns=128, warps=8, stages=stages, adaptive=hopper_votes)
    return Config(rows=64, columns=64, warps=4, stages=3, adaptive=hopper_votes)


def votes_in_groups(problem: Problem) -> bool:
    """The kernel with groups serves the call and fills the GPU; else the other one does.

    It has one program on a processor, with 128 or 192 queries. Where the last round of them leaves
    many processors idle, smaller programs are faster.
    """
    if not groups_serve(problem):
        return False
    batch, queries, heads, _ = problem.q.shape
    programs = batch * heads * num_blocks(queries, GROUPED[problem.skip_tile].groups * GROUP_ROWS)
    processors = torch.cuda.get_device_properties(problem.q.device).multi_processor_count
    rounds = num_blocks(programs, processors)
    return rounds >= 2 and programs >= 0.9 * rounds * processors


def groups_serve(problem: Problem) -> bool:
    """A vote on tiles of the full range, on Hopper, read through descriptors.

    With 64 channels the kernel computes the same, but the other one is faster.
    """
    return (
        problem.algorithm == "skip_softmax"
        and problem.q.device.type == "cuda"
        and capability_of(problem.q.device)[0] == 9
        and problem.skip_tile in GROUPED
        and problem.q.shape[3] == 128
        and problem.block_lengths is None
        and not problem.causal
        and problem.k.shape[1] > 0
        and descriptors_fit(problem.q, problem.k, problem.v)
    )


def query_through_descriptor(capability: tuple[int, int], *, skip: bool, plain: bool) -> bool:
    """Q is loaded like K and V; see the kernel's plan for when it must or should not be.

    Args:
        capability: compute capability, major and minor.
        skip: with a vote.
        plain: dense attention, not causal (with the causal mask as well, registers would spill).
    """
    return not (skip or (plain and capability[0] == 9))


def capability_of(device: torch.device) -> tuple[int, int]:
    """Compute capability; the interpreter stands for a GPU with every feature used here."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


def run(problem: Problem, config: Config | None = None) -> Result:
    """Launches the kernels, by default as configured; nothing is read back from the device."""
    batch, queries, heads, _ = problem.q.shape
    out = torch.empty_like(problem.q, memory_format=torch.contiguous_format)
    lse = None
    if problem.want_trace:
        lse = torch.empty(batch, heads, queries, dtype=torch.float32, device=out.device)
    config = config or configure(problem)
    tiles = num_blocks(queries, config.rows), num_blocks(problem.k.shape[1], config.columns)
    dropped = None
    if problem.skip_threshold is not None:
        dropped = torch.zeros(batch, heads, *tiles, dtype=torch.int8, device=out.device)
    if out.numel():
        launch = _launch_groups if config.groups else _launch
        launch(problem, config, out, lse, dropped)
    if dropped is None or not problem.want_trace:
        return Result(out, lse)
    skipped = BlockRoute(map_words(dropped), (config.rows, config.columns), problem.seqlens)
    return Result(out, lse, without_invalid(skipped, problem))


def split_count(problem: Problem, tiles: int) -> int:
    """Shares of the keys per query tile: enough programs to fill the GPU, at most 8."""
    if problem.skip_threshold is not None or problem.q.device.type != "cuda":
        return 1
    programs = tiles * problem.q.shape[2] * problem.q.shape[0]
    wanted = torch.cuda.get_device_properties(problem.q.device).multi_processor_count * 2
    return max(1, min(8, wanted // programs, num_blocks(problem.k.shape[1], 1024)))


def _launch(
    problem: Problem, config: Config, out: Tensor, lse: Tensor | None, dropped: Tensor | None
) -> None:
    batch, queries, heads, dim = problem.q.shape
    keys, key_heads = problem.k.shape[1], problem.k.shape[2]
    tiles = num_blocks(queries, config.rows)
    splits = split_count(problem, tiles)
    lines = batch * heads * queries
    partial = partial_lse = None
    if splits > 1:
        partial = torch.empty(splits, lines, dim, dtype=torch.float32, device=out.device)
        partial_lse = torch.empty(splits, lines, dtype=torch.float32, device=out.device)
    skip = problem.skip_threshold is not None
    tma = descriptors_fit(problem.q, problem.k, problem.v)
    query_tma = tma and query_through_descriptor(
        capability_of(out.device),
        skip=skip,
        plain=problem.plain and not problem.causal,
    )
    route, tail, none = problem.visited, problem.tail, problem.q
    index, count = none, none
    if route is not None:
        index, count = problem.lists or row_lists(route.words, route.grid[1])
    scale, scale_ptr = _scale(problem.scale, none)
    scale_output, scale_output_ptr = _scale(problem.scale_output, none)
    adaptive = config.adaptive and skip
    kernel: Any = kernels.attention
    kernel[(tiles, heads, batch * splits)](
        _source(problem.q, config.rows, query_tma), _source(problem.k, config.columns, tma),
        _source(problem.v, config.columns, tma), out,
        partial_lse if partial_lse is not None else (lse if lse is not None else none),
        partial if partial is not None else none,
        index, count, route.words.contiguous() if route is not None else none,
        *_tail_sources(tail, tma, none),
        problem.block_lengths if problem.block_lengths is not None else none,
        dropped if dropped is not None else none,
        scale_ptr, scale, scale_output_ptr, scale_output, problem.skip_limit,
        *problem.q.stride()[:3], *problem.k.stride()[:3], *problem.v.stride()[:3],
        *out.stride()[:3],
        queries, keys, heads, key_heads, tiles, num_blocks(keys, config.columns),
        route.words.shape[3] if route is not None else 0, splits, lines,
        ROWS=config.rows, COLUMNS=config.columns, D=dim, TMA=tma, QUERY_TMA=query_tma,
        ROUTED=route is not None, TAIL=tail is not None,
        LENGTHS=problem.block_lengths is not None, CAUSAL=problem.causal,
        SKIP=skip, LSE=lse is not None, SPLIT=splits > 1,
        RAGGED=keys % config.columns != 0,
        SCALE_PTR=isinstance(problem.scale, Tensor),
        SCALE_OUTPUT_PTR=isinstance(problem.scale_output, Tensor),
        ADAPTIVE=adaptive, VOTERS=config.warps if adaptive and out.is_cuda else 0,
        STAGES=config.stages, num_warps=config.warps,
    )  # fmt: skip
    if partial is None:
        return
    kernel = kernels.combine
    kernel[(num_blocks(queries, 64), heads, batch)](
        partial, partial_lse, out, lse if lse is not None else none, scale_output_ptr, scale_output,
        *out.stride()[:3], queries, heads, lines, splits,
        ROWS=64, D=dim, LSE=lse is not None,
        SCALE_OUTPUT_PTR=isinstance(problem.scale_output, Tensor), num_warps=4,
    )  # fmt: skip


def _launch_groups(
    problem: Problem, config: Config, out: Tensor, lse: Tensor | None, dropped: Tensor | None
) -> None:
    # Imported here: the interpreter has no Gluon, and other GPUs do without it.
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as LaidOut

    from blockattn.impl.triton import vote_groups

    batch, queries, heads, dim = problem.q.shape
    keys, key_heads = problem.k.shape[1], problem.k.shape[2]
    if lse is None:  # written in any case, as the kernel's plan says
        lse = torch.empty(batch, heads, queries, dtype=torch.float32, device=out.device)
    scale, scale_ptr = _scale(problem.scale, problem.q)
    scale_output, scale_output_ptr = _scale(problem.scale_output, problem.q)
    heights = (problem.q, GROUP_ROWS), (problem.k, config.columns), (problem.v, config.columns)
    sources = (LaidOut(x, *_tiles(x, rows), vote_groups.LAYOUT) for x, rows in heights)
    kernel: Any = vote_groups.vote_groups
    kernel[(num_blocks(queries, config.groups * GROUP_ROWS), heads, batch)](
        *sources, out, lse, dropped,
        scale_ptr, scale, scale_output_ptr, scale_output, problem.skip_limit,
        queries, keys, heads, key_heads,
        D=dim, GROUPS=config.groups, STAGES=config.stages, RAGGED=keys % config.columns != 0,
        SCALE_PTR=isinstance(problem.scale, Tensor),
        SCALE_OUTPUT_PTR=isinstance(problem.scale_output, Tensor), num_warps=config.warps,
    )  # fmt: skip


def _tail_sources(tail: BlockSummary | None, tma: bool, unused: Tensor) -> tuple:
    if tail is None:
        return unused, unused, unused
    means, sums = tail.k_mean.contiguous(), tail.v_sum.contiguous()
    return _source(means, 64, tma), _source(sums, 64, tma), tail.lengths


def _scale(value: float | Tensor, unused: Tensor) -> tuple[float, Tensor]:
    """A scale as (number, pointer); the kernel reads the pointer only when there is a tensor."""
    return (1.0, value) if isinstance(value, Tensor) else (float(value), unused)


def descriptors_fit(*tensors: Tensor) -> bool:
    """All can be read through the tensor memory accelerator (or its interpreter)."""
    new_enough = capability_of(tensors[0].device) >= (9, 0)
    return new_enough and all(map(whole_16_bytes, tensors))


def _source(x: Tensor, rows: int, tma: bool) -> Tensor | TensorDescriptor:
    return TensorDescriptor(x, *_tiles(x, rows)) if tma else x


def _tiles(x: Tensor, rows: int) -> tuple[list[int], list[int], list[int]]:
    """Shape, strides and tile of a descriptor of x ``[B, T, H, D]``."""
    dense = (x.shape[1] * x.shape[2] * x.shape[3], x.shape[2] * x.shape[3], x.shape[3])
    # The stride of an axis of one is never used, but has to be a legal one.
    strides = [
        stride if size > 1 else usual for stride, size, usual in zip(x.stride(), x.shape, dense)
    ]
    return list(x.shape), [*strides, 1], [1, rows, 1, x.shape[3]]
