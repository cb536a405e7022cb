"""Quantised attention: MXFP8 or NVFP4 queries and keys, FP8 values; any route, tail, threshold.

The operands are encoded as a block-scaled kernel takes them (:mod:`blockattn.quant_formats`). The
Triton kernels read the codes; for other implementations they are decoded to a dtype that holds
element * block scale exactly, so the product equals the one of a block-scaled matrix unit up to the
order of summation. The remaining scales are folded: those of q
and k into the softmax scale, that of v into the output scale or, per (head, channel), into the
epilogue. (An implementation that multiplies a device scale into bfloat16 q rounds q once more.)
Recipes and formulas as in TensorRT-LLM VisualGen (its pull request 18750).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from blockattn import checks
from blockattn.compiled import one_node
from blockattn.impl import registry
from blockattn.problem import BlockSummary, Problem, Result, make_problem
from blockattn.quant_formats import (
    BLOCK_SIZES,
    BlockScaled,
    Fp8Values,
    quantise_fp8_values,
    quantise_mxfp8,
    quantise_nvfp4,
    sixteen_bit,
)
from blockattn.route import BlockRoute
from blockattn.smoothing import smooth_qk, smoothing_lse_shift
from blockattn.trace import make_trace

RECIPES = (
    ("bf16", "fp8", "tensor"),
    ("mxfp8", "fp8", "tensor"),
    ("mxfp8", "fp8", "channel"),
    ("nvfp4", "fp8", "tensor"),
    ("nvfp4", "fp8", "channel"),
)


@dataclass(frozen=True)
class QuantRecipe:
    """Which formats one call uses; only these combinations exist in block-scaled kernels.

    Attributes:
        qk_dtype: ``bf16`` (q and k stay as they are), ``mxfp8`` or ``nvfp4``.
        v_dtype: ``fp8``.
        v_scale: one scale for V (``tensor``, v_block_size 0) or one per (head, channel)
            (``channel``, v_block_size 1; not with bf16 q and k).

    Raises:
        TypeError, ValueError: another combination; the message lists the supported ones.
    """

    qk_dtype: str = "bf16"
    v_dtype: str = "fp8"
    v_scale: str = "tensor"

    def __post_init__(self) -> None:
        given = (self.qk_dtype, self.v_dtype, self.v_scale)
        for name, value in zip(("qk_dtype", "v_dtype", "v_scale"), given):
            if not isinstance(value, str):
                raise TypeError(f"{name}={value!r}: expected a string, got {type(value).__name__}")
        if given not in RECIPES:
            listed = ", ".join(map(str, RECIPES))
            raise ValueError(
                f"(qk_dtype, v_dtype, v_scale)={given}: not a supported recipe; use one of {listed}"
            )

    @property
    def block_scaled(self) -> bool:
        return self.qk_dtype in BLOCK_SIZES

    @property
    def parts(self) -> tuple[str, ...]:
        """What is quantised, in words."""
        values = "fp8 V" if self.v_scale == "tensor" else "fp8 V per channel"
        return (f"{self.qk_dtype} QK", values) if self.block_scaled else (values,)


@dataclass(frozen=True)
class QuantOperands:
    """Encoded q, k, v of one call; q and k are plain tensors with the recipe's ``bf16``.

    ``k_mean`` is the mean key that smoothing took off, ``None`` without smoothing.
    """

    q: BlockScaled | Tensor
    k: BlockScaled | Tensor
    v: Fp8Values
    k_mean: Tensor | None

    def softmax_scale(self, scale: float | Tensor) -> float | Tensor:
        """``scale`` * (1 / g_q) * (1 / g_k), on the device where there are global scales."""
        for side in (self.q, self.k):
            if isinstance(side, BlockScaled):
                scale = scale * side.global_scale
        return scale


def quantise_operands(
    q: Tensor, k: Tensor, v: Tensor, recipe: QuantRecipe, *, smooth: bool | None = None
) -> QuantOperands:
    """Encodes q, k, v on their device; nothing is read on the host.

    Args:
        q: ``[B, Tq, Hq, D]``; k, v: ``[B, Tk, Hk, D]``; float32 and float64 are cast to bfloat16.
        smooth: as for :func:`quantised_attention`.

    Raises:
        TypeError, ValueError: before any work is done.
    """
    if not isinstance(recipe, QuantRecipe):
        raise TypeError(f"recipe: expected a QuantRecipe, got {type(recipe).__name__}")
    query, key, value = (sixteen_bit(x) for x in checks.query_key_value(q, k, v))
    _check_head_dim(query, recipe)
    smooth = recipe.block_scaled if smooth is None else checks.flag("smooth", smooth)
    k_mean = None
    if smooth:
        smoothed = smooth_qk(query, key)
        query, key, k_mean = smoothed.q, smoothed.k, smoothed.k_mean
    values = quantise_fp8_values(value, scale=recipe.v_scale)
    if not recipe.block_scaled:
        return QuantOperands(query, key, values, k_mean)
    encode = quantise_mxfp8 if recipe.qk_dtype == "mxfp8" else quantise_nvfp4
    return QuantOperands(encode(query), encode(key), values, k_mean)


@one_node
def quantised_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    qk_dtype: str = "mxfp8",
    v_dtype: str = "fp8",
    v_scale: str = "tensor",
    smooth: bool | None = None,
    route: BlockRoute | None = None,
    with_tail: bool = False,
    skip_threshold: float | None = None,
    skip_tile: tuple[int, int] = (128, 128),
    skip_reference: str = "exact",
    scale: float | Tensor | None = None,
    scale_output: float | Tensor | None = None,
    causal: bool = False,
    round_p: bool = False,
    impl: str = "auto",
    return_trace: bool = False,
) -> Any:
    """Attention over quantised q, k, v; the trace says which formats were emulated.

    Args:
        q: ``[B, Tq, Hq, D]``; k, v: ``[B, Tk, Hk, D]``, any float dtype and strides; float32 and
            float64 are cast to bfloat16 first. D a multiple of the scale block (32, NVFP4: 16).
        qk_dtype, v_dtype, v_scale: the recipe, see :class:`QuantRecipe`.
        smooth: smooth q and k first (:func:`smooth_qk`); default: unless ``qk_dtype`` is bf16.
        route: exact block pairs, computed by the caller from the original q and k.
        with_tail: blocks outside the route enter through the summary of the quantised k and v.
        skip_threshold, skip_tile, skip_reference, causal: as for :func:`blockattn.attend`; the
            vote sees the quantised scores.
        scale: softmax scale of the unquantised q and k, default D ** -0.5; a float > 0 or one
            float32 element on q's device (never read on the host).
        scale_output: factor on the output, likewise.
        round_p: round the probabilities of exact blocks to e4m3 before they meet V, as kernels
            with FP8 values do (relative to a running maximum that lags by up to 2**8; the
            denominator keeps them unrounded). The Triton kernels and the reference do it. By
            default they are not rounded, and the trace says so.
        impl, return_trace: as for :func:`blockattn.attend`.

    Returns:
        The output ``[B, Tq, Hq, D]`` in q's dtype, or ``(output, AttentionTrace)``, whose LSE is
        that of the unsmoothed scores and contains neither V's scales nor ``scale_output``.

    Raises:
        TypeError, ValueError: an argument is not allowed, before any work is done.
        UnsupportedError: the named ``impl`` cannot serve the call.
    """
    recipe = QuantRecipe(qk_dtype, v_dtype, v_scale)
    asked = make_problem(
        q,
        k,
        v,
        route=route,
        skip_threshold=skip_threshold,
        skip_tile=skip_tile,
        skip_reference=skip_reference,
        scale=scale,
        scale_output=scale_output,
        causal=causal,
        want_trace=return_trace,
    )
    _check_tail(checks.flag("with_tail", with_tail), asked)
    checks.flag("round_p", round_p)
    registry.check_name(impl)
    operands = quantise_operands(q, k, v, recipe, smooth=smooth)
    problem = _folded(asked, operands, with_tail, round_p)
    chosen, reasons = registry.choose(problem, impl)
    if chosen.takes_codes:
        result = chosen.run(problem)
    else:
        result = _finished(chosen.run(_decoded(problem, operands)), problem, operands, recipe)
    out = result.out.to(q.dtype)
    if not return_trace:
        return out
    trace = make_trace(problem, result, chosen.name, reasons)
    return out, replace(
        trace, lse=_unsmoothed(trace.lse, asked, operands), emulated=result.emulated or ()
    )


def _check_head_dim(q: Tensor, recipe: QuantRecipe) -> None:
    block = BLOCK_SIZES.get(recipe.qk_dtype, 1)
    if q.shape[3] % block:
        raise ValueError(
            f"q: head dim {q.shape[3]} must be a multiple of {block}, the scale block of "
            f"{recipe.qk_dtype}; pad q and k with zeros and keep the scale"
        )


def _check_tail(with_tail: bool, asked: Problem) -> None:
    if with_tail and asked.route is None:
        raise ValueError(
            "with_tail=True: summaries need a route that says which blocks they stand for"
        )
    if with_tail and asked.causal:
        raise ValueError(
            "with_tail=True: a block summary mixes past and future keys; causal=True has no tail"
        )


def _compute_dtype(q: Tensor, operands: QuantOperands) -> torch.dtype:
    """bfloat16 on a GPU, whose matrix units then take the operands as they are; else float32.

    float16 inputs that are not block-scaled hold more bits than bfloat16, so they take float32 too.
    """
    exact = isinstance(operands.q, BlockScaled) or operands.q.dtype == torch.bfloat16
    return torch.bfloat16 if exact and q.device.type != "cpu" else torch.float32


def _folded(asked: Problem, operands: QuantOperands, with_tail: bool, round_p: bool) -> Problem:
    """The call over codes, all scales but V's per-channel ones folded in."""
    scale_output = asked.scale_output
    if not operands.v.per_channel:
        scale_output = operands.v.scale * scale_output
    return replace(
        asked,
        scale=operands.softmax_scale(asked.scale),
        scale_output=scale_output,
        round_p=round_p,
        operands=operands,
        tail_to_come=with_tail,
    )


def _decoded(problem: Problem, operands: QuantOperands) -> Problem:
    """The same call over decoded operands, for an implementation that does not take codes."""
    dtype = _compute_dtype(problem.q, operands)
    query, key = (
        x.operand(dtype) if isinstance(x, BlockScaled) else x.to(dtype)
        for x in (operands.q, operands.k)
    )
    value = operands.v.operand(dtype)
    tail = None
    if problem.tail_to_come:
        tail = BlockSummary.of(key, value, problem.block[1])
    return replace(problem, q=query, k=key, v=value, tail=tail, operands=None, tail_to_come=False)


def _finished(
    result: Result, problem: Problem, operands: QuantOperands, recipe: QuantRecipe
) -> Result:
    """V's per-channel scale on an output over decoded operands, and what that emulated."""
    out = result.out
    if operands.v.per_channel:
        out = out * operands.v.scale.repeat_interleave(problem.group, dim=0)
    rounding = "fp8 P" if problem.round_p else "P not rounded to fp8"
    return replace(result, out=out, emulated=(*recipe.parts, rounding))


def _unsmoothed(lse: Tensor, asked: Problem, operands: QuantOperands) -> Tensor:
    """Undoes the shift that smoothing caused, so that shards with other means can be merged."""
    if operands.k_mean is None:
        return lse
    return lse + smoothing_lse_shift(sixteen_bit(asked.q), operands.k_mean, asked.scale)
