"""One attached layer: takes the model's attention call, crops padding, hands it to the policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from blockattn import UnsupportedError
from workbench.attention import SparseAttention
from workbench.diffusers.forward import ENDS_GRAPH, Forward
from workbench.diffusers.parallel import ulysses_group
from workbench.diffusers.splice import OwnAttention
from workbench.models.dit import AttentionCall
from workbench.ulysses import to_heads, to_tokens

Observe = Callable[[Tensor, Tensor, Tensor, AttentionCall], None]
# Arguments of the model's attention function that a sparse call has too, at these values.
PLAIN = {"dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}
ELSEWHERE = ("backend", "parallel_config")  # how the model attends, not what


@dataclass(frozen=True)
class ModelCall(AttentionCall):
    """A call of a model of diffusers.

    Attributes:
        model: name of the transformer in its pipeline.
        own: what the model itself would have called.
    """

    model: str = field(kw_only=True)
    own: OwnAttention = field(kw_only=True, compare=False, repr=False)


def model_dense(q: Tensor, k: Tensor, v: Tensor, call: Any) -> Tensor:
    """The dense baseline: the model's own attention function, with its backend."""
    return call.own(q, k, v)


@dataclass(frozen=True)
class Piece:
    """Neighbouring samples of a batch with equally many valid tokens, which are attended together.

    Attributes:
        samples: which of the batch.
        tokens: valid ones, at the start of the sequence.
    """

    samples: slice
    tokens: int

    def cut(self, x: Tensor) -> Tensor:
        """The piece of x [B, T, H, D], a view."""
        return x[self.samples, : self.tokens]


class Layer:
    """The attention of one module of the model.

    Args:
        index: number of the layer.
        attention: decides and runs.
        forward: what the forward call is about.
        observe: sees q, k, v of every call, without padding, before it is attended.
    """

    def __init__(
        self,
        index: int,
        attention: SparseAttention,
        forward: Forward,
        observe: Observe | None = None,
    ) -> None:
        self.index, self.attention, self.forward = index, attention, forward
        self.observe = observe
        # Outside of graphs, which know neither step nor time. Not bound to this layer: that would
        # be a cycle, and what an observer holds would stay until the next garbage collection.
        self._show: Any = torch.compiler.disable(Layer._show_all, reason=ENDS_GRAPH)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, own: OwnAttention) -> Tensor:
        """Attention of a self-attention call: q, k, v and output [B, T, H, D]."""
        group = ulysses_group(own.options.get("parallel_config"))
        if group is None:
            return self._attend(q, k, v, own)
        alone = replace(own, options={**own.options, "parallel_config": None})
        q, k, v = (to_heads(x, group) for x in (q, k, v))
        return to_tokens(self._attend(q, k, v, alone), group)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, own: OwnAttention) -> Tensor:
        whole = self._call(q.shape[1], own)
        refused = self._refusal(q, own)
        if refused is not None:
            self._not_observed(refused)
            return self.attention(q, k, v, whole, refused=refused)
        pieces = self._pieces(q, own)
        cropped = replace(own, mask=None)
        parts = [
            (piece.cut(q), piece.cut(k), piece.cut(v), self._call(piece.tokens, cropped))
            for piece in pieces
        ]
        if self.observe is not None:
            self._show(self, parts)
        if self.attention.goes_dense(q, k, v, whole):
            return self.attention(q, k, v, whole)
        if pieces == [Piece(slice(None), q.shape[1])]:
            return self.attention(*parts[0])
        out = torch.zeros_like(q)  # of padding
        for piece, part in zip(pieces, parts):
            out[piece.samples, : piece.tokens] = self.attention(*part)
        return out

    def _show_all(self, parts: Sequence[tuple[Tensor, Tensor, Tensor, ModelCall]]) -> None:
        """To whoever observes."""
        now = self.forward
        for q, k, v, call in parts:
            known = replace(call, step=now.step, time=now.time, half=self._half(len(q)))
            if self.observe is not None:
                self.observe(q, k, v, known)

    def _half(self, rows: int) -> str | None:
        """Which half of the batch the next samples of this layer are; Mochi takes one by one."""
        start, half = self.forward.attended[self.index], self.forward.batch // 2
        end = self.forward.attended[self.index] = start + rows
        if end <= half:
            return "first"
        return "last" if half and start >= self.forward.batch - half else None

    def _call(self, tokens: int, own: OwnAttention) -> ModelCall:
        """Where the call comes from. Graphs do not depend on step and time: the policy has them."""
        now, inside = self.forward, torch.compiler.is_compiling()
        grid = now.grid or (tokens, 1, 1)
        text = tokens - prod(grid)
        return ModelCall(
            self.index,
            None if inside else now.step,
            None if inside else now.time,
            grid,
            prefix=text if now.family.text == "before" else 0,
            suffix=text if now.family.text == "after" else 0,
            order=now.order,
            model=now.name,
            own=own,
        )

    def _refusal(self, q: Tensor, own: OwnAttention) -> tuple[str, str] | None:
        """Why the call cannot be sparse, as far as the model is concerned."""
        grid, family = self.forward.grid, self.forward.family
        if grid is None:
            return "token grid", "the forward call does not say how its tokens lie in (t, h, w)"
        text = q.shape[1] - prod(grid)
        if text < 0 or (text and family.text == "nowhere"):
            return "token grid", f"{q.shape[1]} tokens for a grid of {grid}"
        odd = {name: own.options.get(name, plain) for name, plain in PLAIN.items()}
        odd = {name: value for name, value in odd.items() if value != PLAIN[name]}
        odd |= {n: x for n, x in own.options.items() if x and n not in (*PLAIN, *ELSEWHERE)}
        if odd:
            return "attention options", ", ".join(f"{n}={x!r}" for n, x in odd.items())
        if own.mask is not None and not self._understands(q, own.mask):
            return "attention mask", f"shape {tuple(own.mask.shape)}"
        return None

    def _understands(self, q: Tensor, mask: Tensor) -> bool:
        """Whether the mask hides padded text, whose lengths the forward call gave."""
        lengths = self.forward.text_lengths
        over_keys = (q.shape[0], 1, 1, q.shape[1])
        return lengths is not None and len(lengths) == q.shape[0] and mask.shape == over_keys

    def _pieces(self, q: Tensor, own: OwnAttention) -> list[Piece]:
        lengths, grid = self.forward.text_lengths, self.forward.grid
        if own.mask is None or lengths is None or grid is None:
            return [Piece(slice(None), q.shape[1])]
        if len(set(lengths)) == 1:
            return [Piece(slice(None), prod(grid) + lengths[0])]
        starts = [n for n, x in enumerate(lengths) if n == 0 or x != lengths[n - 1]]
        return [
            Piece(slice(start, stop), prod(grid) + lengths[start])
            for start, stop in zip(starts, [*starts[1:], len(lengths)])
        ]

    def _not_observed(self, refused: tuple[str, str]) -> None:
        if self.observe is not None:
            raise UnsupportedError(
                f"layer {self.index}: its attention cannot be observed ({': '.join(refused)})"
            )
