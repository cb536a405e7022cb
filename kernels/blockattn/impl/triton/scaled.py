"""Host side of attention over quantised operands: what is native, buffers, one launch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import triton.language as tl
from torch import Tensor

from blockattn.impl.triton import launch, quantise, scaled_attention
from blockattn.impl.triton.words import map_words
from blockattn.layout import BLOCK, block_lengths, num_blocks
from blockattn.problem import BlockSummary, Problem, Result
from blockattn.quant_formats import BlockScaled
from blockattn.route import BlockRoute
from blockattn.scale_layout import SCALE_ROWS

if TYPE_CHECKING:
    from blockattn.quant import QuantOperands

TRITON_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True)
class Config:
    """Tile, pipeline and matrix units of one launch.

    Attributes:
        native_qk: q and k go to a block-scaled matrix unit; otherwise they are decoded first.
        fp8: e4m3 P and V go to a matrix unit that sums in float32 (``whole``), or one that may not,
            a tile at a time (``partial``); ``off``: float16 with the same values does.
    """

    rows: int
    columns: int
    warps: int
    stages: int
    native_qk: bool = False
    fp8: str = "off"


def configure(problem: Problem) -> Config:
    """The configuration of a call on the GPU its tensors are on."""
    return configuration(
        launch.capability_of(problem.q.device),
        plain=problem.plain,
        skip=problem.skip_threshold is not None,
        coded=_form(_operands(problem)) != "plain",
        round_p=problem.round_p,
    )


def configuration(
    capability: tuple[int, int], *, plain: bool, skip: bool, coded: bool, round_p: bool
) -> Config:
    """The configuration of an architecture, without spills.

    Args:
        plain: dense attention, without a skip vote.
        skip: with a skip vote, whose tiles are 64 x 64.
        coded: q and k are MXFP8 or NVFP4.
        round_p: P is rounded to e4m3.
    """
    major = capability[0]
    if major == 9:
        if not plain:
            return Config(64, 64, warps=4, stages=3)
        return Config(128, 64 if coded else 128, warps=8, stages=3)
    if major == 10:
        fp8 = "whole" if round_p else "off"
        if not plain:  # a block-scaled product takes 128 queries, more than a routed tile has
            return Config(
                64, 64, warps=8 if skip and coded and not round_p else 4, stages=3, fp8=fp8
            )
        return Config(128, 128, warps=8, stages=3, native_qk=coded, fp8=fp8)
    shape = (64, 64, 8, 2) if skip else (32, 64, 4, 2)
    fp8 = "partial" if round_p and major == 12 else "off"
    return Config(*shape, native_qk=coded and major == 12, fp8=fp8)


def run(problem: Problem, config: Config | None = None) -> Result:
    """Executes a call over ``problem.operands``; nothing is read back from the device.

    Returns:
        A result whose output, ``[B, T, Hq, D]``, has every scale of V applied; in q's dtype, or
        float32 where q is wider.
    """
    batch, queries, heads, _ = problem.q.shape
    config = config or configure(problem)
    if problem.tail_to_come:
        problem = replace(problem, tail=summary(_operands(problem)), tail_to_come=False)
    dtype = problem.q.dtype if problem.q.dtype in TRITON_TYPES else torch.float32
    out = torch.empty(problem.q.shape, dtype=dtype, device=problem.q.device)
    lse = None
    if problem.want_trace:
        lse = torch.empty(batch, heads, queries, dtype=torch.float32, device=out.device)
    tiles = num_blocks(queries, config.rows), num_blocks(problem.k.shape[1], config.columns)
    dropped = None
    if problem.skip_threshold is not None:
        dropped = torch.zeros(batch, heads, *tiles, dtype=torch.int8, device=out.device)
    if out.numel():
        with torch.cuda.device_of(out):
            _launch(problem, config, out, lse, dropped)
    skipped = None
    if dropped is not None and problem.want_trace:
        words = map_words(dropped)
        skipped = BlockRoute(words, (config.rows, config.columns), problem.seqlens)
    return Result(out, lse, skipped, emulated(problem, config))


def emulated(problem: Problem, config: Config) -> tuple[str, ...]:
    """Formats that no matrix unit took: decoded, or stood in for by float16."""
    operands = _operands(problem)
    names = []
    if _form(operands) != "plain" and not config.native_qk:
        names.append(f"{_form(operands)} QK")
    if config.fp8 == "off":
        names.append("fp8 V per channel" if operands.v.per_channel else "fp8 V")
        names.append("fp8 P" if problem.round_p else "P not rounded to fp8")
    return tuple(names)


def wide(operands: QuantOperands) -> torch.dtype:
    """A 16-bit dtype that holds q and k as they enter a product exactly, and block summaries.

    NVFP4: float16. MXFP8: bfloat16; the interpreter, which has none, takes float16, where numbers
    beyond 65504 or below 2**-24 are lost.
    """
    if not isinstance(operands.q, BlockScaled):
        return operands.q.dtype
    on_gpu = operands.q.data.device.type == "cuda"
    return torch.bfloat16 if operands.q.format == "mxfp8" and on_gpu else torch.float16


def summary(operands: QuantOperands) -> BlockSummary:
    """Summaries of the decoded keys and of the values without their scale, blocks of 64."""
    key, key_words, key_tiles = _codes(operands.k)
    value = operands.v.data
    batch, keys, heads, dim = value.shape
    blocks, dtype = num_blocks(keys, BLOCK), wide(operands)
    mean, total = (
        torch.empty(batch, blocks, heads, dim, dtype=dtype, device=value.device) for _ in range(2)
    )
    if mean.numel():
        kernel: Any = scaled_attention.summaries
        with torch.cuda.device_of(value):
            kernel[(heads, blocks, batch)](
                key, value, key_words, mean, total, *key.stride()[:3], *value.stride()[:3],
                keys, heads, blocks, key_tiles,
                L=BLOCK, D=dim, FORMAT=_form(operands), WIDE=TRITON_TYPES[dtype], num_warps=4,
            )  # fmt: skip
    return BlockSummary(mean, total, block_lengths(keys, BLOCK, value.device))


def decoded(x: BlockScaled, dtype: torch.dtype) -> Tensor:
    """element * block scale, ``[B, T, H, D]``: :meth:`BlockScaled.operand` in one pass."""
    batch, tokens, heads, dim = x.shape
    out = torch.empty(x.shape, dtype=dtype, device=x.data.device)
    codes, words, tiles = _codes(x)
    kernel: Any = scaled_attention.decode
    kernel[(num_blocks(tokens, BLOCK), heads, batch)](
        codes, words, out, *codes.stride()[:3], tokens, heads, tiles,
        ROWS=BLOCK, D=dim, FORMAT=x.format, WIDE=TRITON_TYPES[dtype], num_warps=4,
    )  # fmt: skip
    return out


def _launch(
    problem: Problem, config: Config, out: Tensor, lse: Tensor | None, dropped: Tensor | None
) -> None:
    operands = _operands(problem)
    batch, queries, heads, dim = problem.q.shape
    keys, key_heads = problem.k.shape[1], problem.k.shape[2]
    query, query_words, query_tiles = _codes(operands.q)
    key, key_words, key_tiles = _codes(operands.k)
    value = operands.v.data
    query_form = _form(operands)
    tma = launch.descriptors_fit(query, key, value)
    query_tma = tma
    if not config.native_qk and (problem.route is None or problem.skip_threshold is not None):
        # Read through a pointer, queries stay in shared memory; see the plan of ``attention``.
        if isinstance(operands.q, BlockScaled):
            query, query_form = decoded(operands.q, wide(operands)), "plain"
        query_tma = False
    tiles = num_blocks(queries, config.rows)
    route, none = problem.visited, out
    index, count = (none, none) if route is None else problem.lists or route.lists()
    scale, scale_ptr = launch._scale(problem.scale, none)
    scale_output, scale_output_ptr = launch._scale(problem.scale_output, none)
    kernel: Any = scaled_attention.scaled_attention
    kernel[(tiles, heads, batch)](
        launch._source(query, config.rows, query_tma), launch._source(key, config.columns, tma),
        launch._source(value, config.columns, tma), query_words, key_words, out,
        lse if lse is not None else none,
        index, count, route.words.contiguous() if route is not None else none,
        *launch._tail_sources(problem.tail, tma, none),
        dropped if dropped is not None else none,
        scale_ptr, scale, scale_output_ptr, scale_output, operands.v.scale, problem.skip_limit,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *out.stride()[:3],
        queries, keys, heads, key_heads,
        num_blocks(queries, BLOCK), num_blocks(keys, config.columns),
        route.words.shape[3] if route is not None else 0, query_tiles, key_tiles,
        ROWS=config.rows, COLUMNS=config.columns, D=dim, FORMAT=_form(operands),
        WIDE=TRITON_TYPES[wide(operands)], NATIVE=config.native_qk, ROUND=problem.round_p,
        FP8=config.fp8, CONVERT=quantise.converts(out.device), TMA=tma,
        QUERY_TMA=query_tma, QUERY_FORMAT=query_form,
        ROUTED=route is not None, TAIL=problem.tail is not None,
        CAUSAL=problem.causal,
        SKIP=problem.skip_threshold is not None, LSE=lse is not None,
        RAGGED=keys % config.columns != 0,
        SCALE_PTR=isinstance(problem.scale, Tensor),
        SCALE_OUTPUT_PTR=isinstance(problem.scale_output, Tensor),
        CHANNELS=operands.v.per_channel, STAGES=config.stages, num_warps=config.warps,
    )  # fmt: skip


def _operands(problem: Problem) -> QuantOperands:
    if problem.operands is None:
        raise RuntimeError("the kernel over codes was chosen for a call without quantised operands")
    return problem.operands


def _form(operands: QuantOperands) -> str:
    """``plain``, ``mxfp8`` or ``nvfp4``."""
    return operands.q.format if isinstance(operands.q, BlockScaled) else "plain"


def _codes(x: BlockScaled | Tensor) -> tuple[Tensor, Tensor, int]:
    """Stored elements ``[B, S, H, ...]``, scale bytes as int32 words, tiles down a matrix."""
    if isinstance(x, Tensor):
        return x, x, 0
    return x.data, x.scales.view(torch.int32), num_blocks(x.shape[1], SCALE_ROWS)
