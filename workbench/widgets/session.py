"""What the tuner computes and remembers; no widget and no picture in here.

Scores are kept for each (layer, step, threshold type, sink), so that another tau only asks them
again; real attention calls are kept for each setting.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blockattn import AttentionTrace, BlockScores, sol_attention, sol_scores
from workbench import decisions
from workbench.capture import QKV
from workbench.widgets.capture_session import CaptureLike, Measured, Recent, TunerSession

CURVE_TAUS = [round(-1 + 0.1 * n, 1) for n in range(51)]


@dataclass(frozen=True)
class TunerState:
    """Every knob of the tuner. ``sink_tokens`` counts from the end of the sequence."""

    layer: int
    step: int
    head: int = 0
    tau: float = 1.0
    thresh_type: str = "diag"
    sink_tokens: int = 0
    query_block: int = 0
    key_block: int = 0

    @property
    def setting(self) -> tuple[Any, ...]:
        """The knobs that an attention call depends on."""
        return self.layer, self.step, self.tau, self.thresh_type, self.sink_tokens


@dataclass(frozen=True)
class TunerView:
    """Numbers behind the pictures for one state; none of them needs an attention call.

    Attributes:
        state: what they belong to.
        classes: uint8 ``[Nq, Nk]``, :class:`workbench.decisions.Decision` codes of the head.
        z: float32 ``[Nq, Nk]``, z-scores of the head.
        density: float64 ``[H]`` at the state's tau.
        curve: float64 ``[H, n]``, density at :data:`CURVE_TAUS`.
        selected, own: bool ``[T, H, W]``, tokens the query block attends exactly, and its own.
        explanation: why the chosen pair is exact or approximate.
    """

    state: TunerState
    classes: Tensor
    z: Tensor
    density: Tensor
    curve: Tensor
    selected: Tensor
    own: Tensor
    explanation: decisions.PairExplanation


class TuneSession(TunerSession):
    """Scores and calls of Sol-Attn on one capture."""

    def __init__(self, capture: CaptureLike, device: torch.device | str | None = None):
        super().__init__(capture, device)
        self._scores, self._calls = Recent(12), Recent(200)

    def scores(self, state: TunerState) -> tuple[BlockScores, Tensor]:
        """Scores of every block pair, and the density curve ``[H, n]`` that follows from them."""

        def make() -> tuple[BlockScores, Tensor]:
            x = self.inputs(state.layer, state.step)
            settings = {"thresh_type": state.thresh_type, "sink_tokens": state.sink_tokens}
            scores = sol_scores(x.q, x.k, **settings)
            return scores, scores.density(CURVE_TAUS)[0].cpu()

        key = (state.layer, state.step, state.thresh_type, state.sink_tokens)
        return self._scores.get(key, make)

    def view(self, state: TunerState) -> TunerView:
        """Everything that a picture needs at once."""
        scores, curve = self.scores(state)
        grid, block = self.capture.grid, scores.always.block[1]
        classes = decisions.classify(scores, state.tau, head=state.head).cpu()
        explanation = decisions.explain(
            scores, state.tau, grid, state.query_block, state.key_block, head=state.head
        )
        row = classes[state.query_block] != decisions.Decision.APPROXIMATE
        return TunerView(
            state=state,
            classes=classes,
            z=scores.z[0, state.head].cpu(),
            density=scores.route(state.tau).density_per_head()[0].cpu(),
            curve=curve,
            selected=decisions.selected_tokens(row, grid, block),
            own=decisions.own_tokens(state.query_block, grid, block),
            explanation=explanation,
        )

    def measured(self, state: TunerState) -> Measured | None:
        """The attention call of this setting if it has been made."""
        return self._calls.peek(state.setting)

    def measure(self, state: TunerState) -> Measured:
        """Makes the sparse call of this setting, and the dense one to compare with, if need be."""
        return self._calls.get(state.setting, lambda: self._measure(state))

    def _measure(self, state: TunerState) -> Measured:
        def call(x: QKV) -> tuple[Tensor, AttentionTrace]:
            settings = {"thresh_type": state.thresh_type, "sink_tokens": state.sink_tokens}
            return sol_attention(x.q, x.k, x.v, tau=state.tau, **settings, return_trace=True)

        return self.run(state.layer, state.step, call)
