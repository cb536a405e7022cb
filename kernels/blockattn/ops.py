"""The public operations as ``torch.library`` operators: ``torch.ops.blockattn.attend`` and so on.

The body of each is the public function itself. The fake implementation says that the output is a
new contiguous tensor like q, and checks nothing: a wrong argument then raises at run time, in the
words it has outside compiled code. Numbers are one-element CPU tensors, a route is its words with
block sizes and lengths, a grid its shape, text tokens and order (:mod:`blockattn.compiled`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from blockattn.attend import attend
from blockattn.layout import TokenGrid
from blockattn.problem import BlockSummary
from blockattn.quant import quantised_attention
from blockattn.route import BlockRoute
from blockattn.skip import skip_softmax_attention
from blockattn.sol import sol_attention
from blockattn.vsa import video_sparse_attention

# The body reads its settings on the host at every call, which the replay of a graph would not.
# Inductor therefore leaves these nodes out of the CUDA graphs it makes; a graph that the caller
# captures keeps the settings of the capture.
TAGS = (torch.Tag.cudagraph_unsafe,)


@torch.library.custom_op("blockattn::attend", mutates_args=(), tags=TAGS)
def attend_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    route_words: Tensor | None,
    route_block: Sequence[int],
    route_seqlens: Sequence[int],
    tail_k_mean: Tensor | None,
    tail_v_sum: Tensor | None,
    tail_lengths: Tensor | None,
    tail_block: int,
    skip_threshold: Tensor | None,
    skip_tile: Sequence[int],
    skip_reference: str,
    block_lengths: Tensor | None,
    scale: Tensor | None,
    scale_output: Tensor | None,
    causal: bool,
    impl: str,
) -> Tensor:
    """:func:`blockattn.attend` without the trace."""
    out = attend(
        q,
        k,
        v,
        _route(route_words, route_block, route_seqlens),
        tail=_tail(tail_k_mean, tail_v_sum, tail_lengths, tail_block),
        skip_threshold=_any(skip_threshold),
        skip_tile=_pair(skip_tile),
        skip_reference=skip_reference,
        block_lengths=block_lengths,
        scale=scale,
        scale_output=scale_output,
        causal=causal,
        impl=impl,
    )
    return out.contiguous()


@torch.library.custom_op("blockattn::sol_attention", mutates_args=(), tags=TAGS)
def sol_attention_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tau: Tensor | None,
    thresh_type: str,
    sink_start: Tensor | None,
    sink_tokens: Tensor | None,
    scale: Tensor | None,
    impl: str,
) -> Tensor:
    """:func:`blockattn.sol_attention` without the trace."""
    out = sol_attention(
        q,
        k,
        v,
        tau=_any(tau),
        thresh_type=thresh_type,
        sink_start=_any(sink_start),
        sink_tokens=_any(sink_tokens),
        scale=_any(scale),
        impl=impl,
    )
    return out.contiguous()


@torch.library.custom_op("blockattn::skip_softmax_attention", mutates_args=(), tags=TAGS)
def skip_softmax_attention_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    threshold_scale_factor: Tensor | None,
    threshold: Tensor | None,
    causal: bool,
    scale: Tensor | None,
    tile: Sequence[int],
    skip_reference: str,
    impl: str,
) -> Tensor:
    """:func:`blockattn.skip_softmax_attention` without the trace."""
    out = skip_softmax_attention(
        q,
        k,
        v,
        threshold_scale_factor=_any(threshold_scale_factor),
        threshold=_any(threshold),
        causal=causal,
        scale=scale,
        tile=_pair(tile),
        skip_reference=skip_reference,
        impl=impl,
    )
    return out.contiguous()


@torch.library.custom_op("blockattn::video_sparse_attention", mutates_args=(), tags=TAGS)
def video_sparse_attention_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grid_shape: Sequence[int],
    grid_text: Sequence[int],
    grid_order: str,
    gate_compress: Tensor | None,
    gate_fine: Tensor | None,
    sparsity: Tensor | None,
    scale: Tensor | None,
    select_dtype: str,
    impl: str,
) -> Tensor:
    """:func:`blockattn.video_sparse_attention` without the trace."""
    shape: Any = tuple(grid_shape)
    out = video_sparse_attention(
        q,
        k,
        v,
        grid=TokenGrid(shape, prefix=grid_text[0], suffix=grid_text[1], order=grid_order),
        gate_compress=_any(gate_compress),
        gate_fine=gate_fine,
        sparsity=_any(sparsity),
        scale=_any(scale),
        select_dtype=select_dtype,
        impl=impl,
    )
    return out.contiguous()


@torch.library.custom_op("blockattn::quantised_attention", mutates_args=(), tags=TAGS)
def quantised_attention_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qk_dtype: str,
    v_dtype: str,
    v_scale: str,
    smooth: bool | None,
    route_words: Tensor | None,
    route_block: Sequence[int],
    route_seqlens: Sequence[int],
    with_tail: bool,
    skip_threshold: Tensor | None,
    skip_tile: Sequence[int],
    skip_reference: str,
    scale: Tensor | None,
    scale_output: Tensor | None,
    causal: bool,
    round_p: bool,
    impl: str,
) -> Tensor:
    """:func:`blockattn.quant.quantised_attention` without the trace."""
    out = quantised_attention(
        q,
        k,
        v,
        qk_dtype=qk_dtype,
        v_dtype=v_dtype,
        v_scale=v_scale,
        smooth=smooth,
        route=_route(route_words, route_block, route_seqlens),
        with_tail=with_tail,
        skip_threshold=_any(skip_threshold),
        skip_tile=_pair(skip_tile),
        skip_reference=skip_reference,
        scale=scale,
        scale_output=scale_output,
        causal=causal,
        round_p=round_p,
        impl=impl,
    )
    return out.contiguous()


def _like_queries(q: Tensor, *_: Any, **__: Any) -> Tensor:
    return q.new_empty(q.shape)


for _operator in (
    attend_op,
    sol_attention_op,
    skip_softmax_attention_op,
    video_sparse_attention_op,
    quantised_attention_op,
):
    _operator.register_fake(_like_queries)


def _any(value: Tensor | None) -> Any:
    """A setting tensor for a parameter whose annotation says number: the checks unwrap it."""
    return value


def _pair(values: Sequence[int]) -> tuple[int, int]:
    first, second = values
    return first, second


def _route(words: Tensor | None, block: Sequence[int], seqlens: Sequence[int]) -> BlockRoute | None:
    return None if words is None else BlockRoute(words, _pair(block), _pair(seqlens))


def _tail(
    k_mean: Tensor | None, v_sum: Tensor | None, lengths: Tensor | None, block: int
) -> BlockSummary | None:
    if k_mean is None or v_sum is None or lengths is None:
        return None
    return BlockSummary(k_mean, v_sum, lengths, block)
