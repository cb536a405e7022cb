"""Host side of the CuTe kernel: buffers, lists of block pairs, one launch on torch's stream.

Nothing is read back from the device and nothing depends on its contents, so a call can be captured
in a CUDA graph once its kernel is loaded, which the first call does.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from blockattn.impl.cute import ARCH, cache
from blockattn.impl.cute.lists import shared_lists
from blockattn.impl.cute.variant import Variant, variant_of
from blockattn.impl.masks import without_invalid
from blockattn.impl.triton.words import map_words
from blockattn.layout import num_blocks
from blockattn.problem import Problem, Result
from blockattn.route import BlockRoute


def run(problem: Problem, lists: tuple[Tensor, Tensor] | None = None) -> Result:
    """Executes a call without obstacles.

    Args:
        lists: of the route, where :func:`route_lists` already made them.
    """
    batch, queries, heads, _ = problem.q.shape
    out = torch.empty_like(problem.q, memory_format=torch.contiguous_format)
    lse = dropped = load = None
    if problem.want_trace:
        lse = torch.empty(batch, heads, queries, dtype=torch.float32, device=out.device)
    if problem.skip_threshold is not None:
        tiles = (num_blocks(tokens, problem.skip_tile[0]) for tokens in problem.seqlens)
        dropped = torch.zeros(batch, heads, *tiles, dtype=torch.int8, device=out.device)
    if problem.k.numel() == 0:
        out.zero_()
        lse = lse if lse is None else lse.fill_(-math.inf)
    elif out.numel():
        load = _launch(problem, lists, out, lse, dropped)
    skipped = None
    if dropped is not None and problem.want_trace:
        skipped = BlockRoute(map_words(dropped), problem.skip_tile, problem.seqlens)
        skipped = without_invalid(skipped, problem)
    return Result(out, lse, skipped, loaded=None if load is None else str(load))


def _launch(
    problem: Problem,
    lists: tuple[Tensor, Tensor] | None,
    out: Tensor,
    lse: Tensor | None,
    dropped: Tensor | None,
) -> cache.Load | None:
    variant = variant_of(problem)
    kernel, load = cache.kernel(variant, ARCH)
    route, tail = problem.route, problem.tail
    index, count, counter = _lists_and_counter(problem, lists)
    words = _packed(route.words) if route is not None and variant.tail else None
    summaries = (None, None, None)
    if tail is not None:
        summaries = tuple(_packed(x) for x in (tail.k_mean, tail.v_sum, tail.lengths))
    lengths = None if problem.block_lengths is None else _packed(problem.block_lengths)
    programs = processors(out.device)
    with torch.cuda.device(out.device):
        kernel(
            *(_regular(x) for x in (problem.q, problem.k, problem.v)), out, lse,
            index, count, words, *summaries, lengths, dropped, *_scales(problem, variant),
            problem.skip_limit, programs, counter,
        )  # fmt: skip
    return load


def _lists_and_counter(
    problem: Problem, lists: tuple[Tensor, Tensor] | None
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Lists of the route, if there is one, and the zero from which programs count their items."""
    if problem.route is not None and lists is None:
        counter = torch.empty(1, dtype=torch.int32, device=problem.q.device)
        return *route_lists(problem, counter), counter
    index, count = lists or (None, None)
    return index, count, _zero(problem.q.device)


def _zero(device: torch.device) -> Tensor:
    """int32 ``[1]`` that is 0 when a kernel launched now begins.

    A kernel leaves its counter zero, so that launches one after the other share one. Those of a
    graph may run beside others of their stream, and a stream that ends may leave its handle to
    another: only the default stream, which no graph captures and which never ends, has one.
    """
    if torch.cuda.current_stream(device).cuda_stream != 0:
        return torch.zeros(1, dtype=torch.int32, device=device)
    return _zero_of_device(device)


@functools.lru_cache(maxsize=16)  # devices
def _zero_of_device(device: torch.device) -> Tensor:
    """A plain tensor, whatever mode the first call runs under: later ones run under none."""
    with _disable_current_modes(), torch.inference_mode(False):
        return torch.zeros(1, dtype=torch.int32, device=device)


def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU: so many programs of the kernel run at once."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def route_lists(problem: Problem, counter: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Key blocks of every pair of query blocks, as the kernel walks them.

    What both attend comes first and is fetched once, except under a skip vote, whose tiles are
    visited in ascending order. A counter is zeroed on the way.
    """
    route = problem.visited
    if route is None:
        raise ValueError("problem: has no route, so that there are no lists to make")
    together = problem.skip_threshold is None
    return shared_lists(route.words, route.grid[1], together=together, counter=counter)


def _packed(x: Tensor) -> Tensor:
    """x, copied only where it has gaps or does not begin at whole 16 bytes."""
    packed = x.contiguous()
    return packed if packed.data_ptr() % 16 == 0 else packed.clone()


def _regular(x: Tensor) -> Tensor:
    """x, with legal strides for axes of one, whose strides are never used but looked at."""
    if all(size > 1 or stride % 8 == 0 for size, stride in zip(x.shape, x.stride())):
        return x
    strides = [stride if size > 1 else 8 for size, stride in zip(x.shape[:3], x.stride()[:3])]
    return x.as_strided(x.shape, (*strides, 1))


def _scales(problem: Problem, variant: Variant) -> tuple[float | Tensor, float | Tensor]:
    """Both scales as numbers, or both as one float32 element on the device."""
    scales = problem.scale, problem.scale_output
    if not variant.device_scales:
        return scales
    first, second = (
        x.reshape(1)
        if isinstance(x, Tensor)
        else torch.full((1,), x, dtype=torch.float32, device=problem.q.device)
        for x in scales
    )
    return first, second
