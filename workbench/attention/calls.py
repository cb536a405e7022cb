"""How each configured mechanism launches: its knobs, the layers it leaves alone, the call itself.

A mechanism here is a value: it holds what one configuration asks for, resolved once, and no state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from blockattn import (
    AttentionTrace,
    QuantRecipe,
    TokenGrid,
    UnsupportedError,
    quantised_attention,
    skip_softmax_attention,
    sol_attention,
    video_sparse_attention,
)
from blockattn.checks import FLOAT_DTYPES, MAX_HEAD_DIM
from blockattn.quant_formats import BLOCK_SIZES
from blockattn.skip import threshold_from_factor
from workbench.attention.text import Delivered, Dense, beside_text, text_tokens, with_dense_rows

Knobs = tuple[tuple[str, Any], ...]
Outcome = tuple[Tensor, AttentionTrace | Delivered | None]


class Mechanism(Protocol):
    """What the policy asks of a mechanism."""

    @property
    def cutoff(self) -> float | None:
        """End of the dense phase, ``None`` without one."""
        ...

    def keeps_dense(self, layer: int) -> bool:
        """Whether the configuration keeps that layer dense."""
        ...

    def run(self, q: Tensor, k: Tensor, v: Tensor, call: Any, *, trace: bool) -> Outcome:
        """The sparse call."""
        ...

    def knobs(self) -> Knobs:
        """Every setting that changes a launch."""
        ...


@dataclass(frozen=True)
class Sol:
    """Sol-Attn. The query rows of the sink are computed again by the dense baseline.

    A sink holds text or conditioning: its keys are exact for every query, and its own rows, few and
    sensitive, must not be sparse either. Text tokens that a call names are its sink.
    """

    tau: float
    thresh_type: str
    cutoff: float | None
    dense_layers: frozenset[int]
    sink_start: int | None
    sink_tokens: int
    impl: str
    dense: Dense = field(compare=False)
    taus: tuple[float, ...] | None = None

    def keeps_dense(self, layer: int) -> bool:
        return layer in self.dense_layers

    def run(self, q: Tensor, k: Tensor, v: Tensor, call: Any, *, trace: bool) -> Outcome:
        tau = self.tau if self.taus is None else self.taus[call.layer]
        settings = {"tau": tau, "thresh_type": self.thresh_type, "impl": self.impl}
        start, count = self._sink(q.shape[1], call)
        sink = {"sink_start": start, "sink_tokens": count}
        result = sol_attention(q, k, v, **settings, **sink, return_trace=trace)  # pyright: ignore[reportArgumentType]
        out, found = result if trace else (result, None)
        if count:
            first = start or 0
            rows = slice(first, first + count)
            out[:, rows] = self.dense(q[:, rows], k, v, call)
            found = None if found is None else with_dense_rows(found, first, count)
        return out, found

    def _sink(self, tokens: int, call: Any) -> tuple[int | None, int]:
        """First token and length of the sink of a call; a sink of 0 tokens is none."""
        prefix, suffix = text_tokens(call)
        if not prefix and not suffix:
            whole = self.sink_start is None and self.sink_tokens
            return (tokens - self.sink_tokens if whole else self.sink_start), self.sink_tokens
        if self.sink_tokens or (prefix and suffix):
            raise UnsupportedError(
                f"layer {call.layer}: one sink is served, but the call has {prefix} text tokens in "
                f"front, {suffix} behind, and sink_tokens={self.sink_tokens}; leave sink_tokens out"
            )
        return (0, prefix) if prefix else (tokens - suffix, suffix)

    def knobs(self) -> Knobs:
        return (
            ("tau", self.tau if self.taus is None else self.taus),
            ("thresh_type", self.thresh_type),
            ("disabled_until_timestep", self.cutoff),
            ("dense_layers", tuple(sorted(self.dense_layers))),
            ("sink_start", self.sink_start),
            ("sink_tokens", self.sink_tokens),
            ("impl", self.impl),
        )


@dataclass(frozen=True)
class Skip:
    """SkipSoftmax, alone or over quantised operands.

    ``key_tokens`` is the length of the whole key sequence where a rank holds only a part of it: the
    threshold is factor / length, and the part would make it too large. Text tokens that a call
    names are exact keys, and their rows dense.
    """

    factor: float
    cutoff: float | None
    ignored: frozenset[int]
    key_tokens: int | None
    recipe: QuantRecipe | None
    impl: str
    warn: Callable[[str, str], None] = field(compare=False)
    dense: Dense = field(compare=False)

    def keeps_dense(self, layer: int) -> bool:
        return layer in self.ignored

    def run(self, q: Tensor, k: Tensor, v: Tensor, call: Any, *, trace: bool) -> Outcome:
        keys = k.shape[1] if self.key_tokens is None else self.key_tokens
        threshold = threshold_from_factor(self.factor, keys)
        if self.recipe is not None:
            self._warn_if_large(threshold, keys)
        if not any(text_tokens(call)):
            return self._attend(q, k, v, threshold, trace=trace)

        def video(q: Tensor, k: Tensor, v: Tensor) -> Any:
            return self._attend(q, k, v, threshold, trace=True)

        return beside_text(video, self.dense, q, k, v, call, trace=trace)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, threshold: float, *, trace: bool) -> Outcome:
        if self.recipe is not None:
            quantised = Quantised(self.recipe, self.impl)
            return quantised.run(q, k, v, trace=trace, skip_threshold=threshold)
        result = skip_softmax_attention(
            q, k, v, threshold=threshold, impl=self.impl, return_trace=trace
        )
        return result if trace else (result, None)

    def knobs(self) -> Knobs:
        return (
            ("threshold_scale_factor", self.factor),
            ("disabled_until_timestep", self.cutoff),
            ("ignored_layers", tuple(sorted(self.ignored))),
            ("key_tokens", self.key_tokens),
            ("impl", self.impl),
        )

    def _warn_if_large(self, threshold: float, keys: int) -> None:
        """As skip_softmax_attention does by itself."""
        if threshold >= 1:
            self.warn(
                f"lambda {self.factor} {keys}",
                f"threshold={threshold:.3g} (threshold_scale_factor={self.factor:g} over {keys} "
                "keys) is at least 1: tiles are dropped even where they hold a row's largest "
                f"score. Use a factor below the number of keys, {keys}",
            )


@dataclass(frozen=True)
class Vsa:
    """VSA with the model's learned gate, or without the coarse branch (``gate="zero"``)."""

    sparsity: float
    gate: str
    impl: str

    cutoff = None

    def keeps_dense(self, layer: int) -> bool:
        del layer
        return False

    def run(self, q: Tensor, k: Tensor, v: Tensor, call: Any, *, trace: bool) -> Outcome:
        gate = torch.zeros_like(q) if self.gate == "zero" else getattr(call, "gate", None)
        if gate is None:
            raise ValueError(
                f"layer {call.layer}: the call has no gate, which VSA learns; wire the model's "
                'to_gate_compress projection into call.gate, or choose gate="zero" for top-k '
                "attention without the coarse branch"
            )
        result = video_sparse_attention(
            q,
            k,
            v,
            grid=_grid_of(call),
            gate_compress=gate,
            sparsity=self.sparsity,
            impl=self.impl,
            return_trace=trace,
        )
        return result if trace else (result, None)

    def knobs(self) -> Knobs:
        return (("vsa_sparsity", self.sparsity), ("gate", self.gate), ("impl", self.impl))


def _grid_of(call: Any) -> Any:
    """Where the tokens of a call are: its grid in the order in which its model runs."""
    order = getattr(call, "order", "raster")
    return call.grid if order == "raster" else TokenGrid(tuple(call.grid), order=order)


@dataclass(frozen=True)
class Quantised:
    """Quantised attention, dense or with a skip threshold."""

    recipe: QuantRecipe
    impl: str

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        trace: bool,
        skip_threshold: float | None = None,
    ) -> Outcome:
        result = quantised_attention(
            q,
            k,
            v,
            qk_dtype=self.recipe.qk_dtype,
            v_dtype=self.recipe.v_dtype,
            v_scale=self.recipe.v_scale,
            skip_threshold=skip_threshold,
            impl=self.impl,
            return_trace=trace,
        )
        return result if trace else (result, None)

    def knobs(self) -> Knobs:
        recipe = (self.recipe.qk_dtype, self.recipe.v_dtype, self.recipe.v_scale)
        return (("recipe", recipe),)


# Reasons of :func:`obstacle`, in its order.
OBSTACLES = (
    "rank",
    "dtype",
    "head dim",
    "empty",
    "device",
    "mixed dtypes",
    "shapes",
    "gradient",
    "head dim of the format",
)


def obstacle(
    q: Tensor, k: Tensor, v: Tensor, recipe: QuantRecipe | None = None
) -> tuple[str, str] | None:
    """First fact for which the sparse path cannot serve a call: (fixed reason, what was found)."""
    for reason, found in _facts(q, k, v, recipe):
        if found is not None:
            return reason, found
    return None


def _facts(q: Tensor, k: Tensor, v: Tensor, recipe: QuantRecipe | None):
    """Lazily, because a later fact only makes sense when the earlier ones found nothing."""
    tensors = {"q": q, "k": k, "v": v}
    yield "rank", _first(tensors, lambda x: x.ndim != 4, lambda x: f"shape {tuple(x.shape)}")
    yield "dtype", _first(tensors, lambda x: x.dtype not in FLOAT_DTYPES, lambda x: str(x.dtype))
    dim = q.shape[3]
    yield "head dim", f"{dim}, at most {MAX_HEAD_DIM}" if not 1 <= dim <= MAX_HEAD_DIM else None
    yield "empty", f"q has shape {tuple(q.shape)}" if q.numel() == 0 else None
    yield "device", _first(tensors, lambda x: x.device != q.device, lambda x: f"on {x.device}")
    yield "mixed dtypes", _first(tensors, lambda x: x.dtype != q.dtype, lambda x: str(x.dtype))
    yield "shapes", _shape_conflict(q, k, v)
    wants_grad = torch.is_grad_enabled()
    yield (
        "gradient",
        _first(tensors, lambda x: wants_grad and x.requires_grad, lambda x: "wants a gradient"),
    )
    block = BLOCK_SIZES.get(recipe.qk_dtype, 1) if recipe is not None else 1
    yield "head dim of the format", f"{dim} is no multiple of {block}" if dim % block else None


def _first(
    tensors: dict[str, Tensor], wrong: Callable[[Tensor], bool], tell: Callable[[Tensor], str]
) -> str | None:
    return next((f"{name}: {tell(x)}" for name, x in tensors.items() if wrong(x)), None)


def _shape_conflict(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    fits = k.shape == v.shape and k.shape[:2] == q.shape[:2] and k.shape[3] == q.shape[3]
    if fits and k.shape[2] and q.shape[2] % k.shape[2] == 0:
        return None
    return f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
