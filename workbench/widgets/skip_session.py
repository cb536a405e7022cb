"""What the threshold tuner computes and remembers; no widget and no picture in here.

The gaps of a (layer, step, tile) are kept, so that another threshold only asks them again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blockattn import AttentionTrace, SkipGaps, skip_gaps, skip_softmax_attention
from workbench import decisions
from workbench.capture import QKV
from workbench.tiles import TileExplanation, explain_tile
from workbench.widgets.capture_session import CaptureLike, Measured, Recent, TunerSession

LOWEST = -24.0  # log2(lambda): below it float32 weights round to nothing
START = 0.8  # density at which a tuner opens: most tiles are computed, and some are skipped
CURVE_LOG2 = [0.25 * n for n in range(int(4 * LOWEST), 1)]


@dataclass(frozen=True)
class SkipState:
    """Every knob of the threshold tuner.

    Attributes:
        log2_threshold: log2(lambda), at most 0.
        tile: tokens a side of the tiles that vote.
        query_block, key_block: the tile to explain.
    """

    layer: int
    step: int
    head: int = 0
    log2_threshold: float = -4.0
    tile: int = 128
    query_block: int = 0
    key_block: int = 0

    @property
    def setting(self) -> tuple[Any, ...]:
        """The knobs that an attention call depends on."""
        return self.layer, self.step, self.log2_threshold, self.tile

    @property
    def threshold(self) -> float:
        """lambda."""
        return 2.0**self.log2_threshold


@dataclass(frozen=True)
class SkipView:
    """Numbers behind the pictures for one state; none of them needs an attention call.

    Attributes:
        state: what they belong to.
        states: uint8 ``[Nq, Nk]``, :class:`workbench.decisions.TileState` codes of the head.
        gaps: float32 ``[Nq, Nk]``, base-2 logits, of the head.
        density: float64 ``[H]``, computed / valid tiles at the state's threshold.
        curve: float64 ``[H, n]``, density at :data:`CURVE_LOG2`.
        selected, own: bool ``[T, H, W]``, tokens the query tile computes, and its own.
        explanation: why the chosen tile is computed or skipped.
    """

    state: SkipState
    states: Tensor
    gaps: Tensor
    density: Tensor
    curve: Tensor
    selected: Tensor
    own: Tensor
    explanation: TileExplanation


class SkipSession(TunerSession):
    """Gaps and calls of SkipSoftmax on one capture."""

    def __init__(self, capture: CaptureLike, device: torch.device | str | None = None):
        super().__init__(capture, device)
        self._gaps, self._calls = Recent(12), Recent(200)

    def gaps(self, state: SkipState) -> tuple[SkipGaps, Tensor]:
        """Gaps of every tile, and the density curve ``[H, n]`` that follows from them."""

        def make() -> tuple[SkipGaps, Tensor]:
            x = self.inputs(state.layer, state.step)
            gaps = skip_gaps(x.q, x.k, tile=(state.tile, state.tile))
            return gaps, 1 - gaps.sparsity([2.0**n for n in CURVE_LOG2])[0].cpu()

        return self._gaps.get((state.layer, state.step, state.tile), make)

    def start(self, state: SkipState) -> float:
        """log2 of the smallest lambda at which the state's head skips enough to be seen.

        Data differ by many powers of two, so no one number shows something on all of them. Where
        none does it is the largest below lambda = 1, which would drop a row's largest score.
        """
        density = self.gaps(state)[1][state.head].tolist()
        below = list(zip(CURVE_LOG2, density))[:-1]
        return next((n for n, there in below if there <= START), below[-1][0])

    def view(self, state: SkipState) -> SkipView:
        """Everything that a picture needs at once."""
        gaps, curve = self.gaps(state)
        grid, threshold = self.capture.grid, state.threshold
        skipped = gaps.skipped(threshold)
        states = decisions.skip_states(skipped, gaps.reachable, head=state.head).cpu()
        row = states[state.query_block] == decisions.TileState.COMPUTED
        return SkipView(
            state=state,
            states=states,
            gaps=gaps.gaps[0, state.head].cpu(),
            density=1 - gaps.sparsity([threshold])[0, :, 0].cpu(),
            curve=curve,
            selected=decisions.selected_tokens(row, grid, state.tile),
            own=decisions.own_tokens(state.query_block, grid, state.tile),
            explanation=explain_tile(
                gaps, threshold, grid, state.query_block, state.key_block, head=state.head
            ),
        )

    def measured(self, state: SkipState) -> Measured | None:
        """The attention call of this setting if it has been made."""
        return self._calls.peek(state.setting)

    def measure(self, state: SkipState) -> Measured:
        """Makes the call of this setting, and the dense one to compare with, if need be."""

        def call(x: QKV) -> tuple[Tensor, AttentionTrace]:
            tile = (state.tile, state.tile)
            return skip_softmax_attention(
                x.q, x.k, x.v, threshold=state.threshold, tile=tile, return_trace=True
            )

        return self._calls.get(state.setting, lambda: self.run(state.layer, state.step, call))


def describe_threshold(log2_threshold: float, keys: int) -> str:
    """One threshold in its three units."""
    ratio = 2.0**log2_threshold
    return (
        f"lambda = {ratio:.3g}, log2(lambda) = {log2_threshold:.2f}, "
        f"threshold_scale_factor = lambda * {keys:,} keys = {ratio * keys:.4g}."
    )


def log2_of_factor(factor: float, keys: int) -> float:
    """log2(lambda) of a ``threshold_scale_factor``, kept within what the tuner shows."""
    ratio = factor / keys
    return LOWEST if ratio <= 2.0**LOWEST else min(0.0, math.log2(ratio))
