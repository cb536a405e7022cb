"""What the tuner computes and remembers; no widget and no picture in here.

Scores are kept for each (layer, step, threshold type, sink), so that another tau only asks them
again; real attention calls are kept for each setting.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from blockattn import (
    AttentionTrace,
    BlockScores,
    TokenGrid,
    attend,
    sol_attention,
    sol_scores,
)
from workbench import decisions
from workbench.capture import QKV
from workbench.probe import attention_error

CURVE_TAUS = [round(-1 + 0.1 * n, 1) for n in range(51)]
# Above this many multiply-adds x 2 of dense attention, errors are measured on request only.
AUTOMATIC_FLOPS = {"cpu": 1e11, "cuda": 1e14}

Item = TypeVar("Item")


class CaptureLike(Protocol):
    """What the tuner needs of a capture; :class:`workbench.capture.reader.Capture` has it."""

    grid: TokenGrid
    entries: list[tuple[int, int]]
    title: str

    @property
    def video(self) -> Tensor | None:
        """uint8 ``[frames, height, width, 3]`` or None."""
        ...

    def load(self, layer: int, step: int) -> QKV:
        """q, k, v of one attention call."""
        ...


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


@dataclass(frozen=True)
class Measured:
    """A real sparse call next to the dense one.

    Attributes:
        trace: what ran, and why nothing faster did.
        relative_l2: float64 ``[H]``, error of each head against dense.
        seconds: wall time of the sparse call, routing included (one call, not a benchmark).
    """

    trace: AttentionTrace
    relative_l2: Tensor
    seconds: float


class Recent:
    """The newest few results by key."""

    def __init__(self, limit: int):
        self._limit = limit
        self._items: OrderedDict[Any, Any] = OrderedDict()

    def peek(self, key: Any) -> Any | None:
        """What is stored, or None."""
        return self._items.get(key)

    def get(self, key: Any, make: Callable[[], Item]) -> Item:
        """What is stored, or else made now and stored."""
        if key not in self._items:
            self._items[key] = make()
        self._items.move_to_end(key)
        while len(self._items) > self._limit:
            self._items.popitem(last=False)
        return self._items[key]


class TuneSession:
    """Answers of one capture on one device; the first sequence of a batch is used.

    Args:
        capture: where q, k, v come from.
        device: where to compute; by default CUDA when there is a GPU.
    """

    def __init__(self, capture: CaptureLike, device: torch.device | str | None = None):
        if not capture.entries:
            raise ValueError("capture: it holds no (layer, step); record at least one")
        default = "cuda" if torch.cuda.is_available() else "cpu"
        self.capture = capture
        self.device = torch.device(default if device is None else device)
        self._inputs, self._dense, self._scores, self._calls = (Recent(n) for n in (3, 3, 12, 200))
        self.heads, self.head_dim = self.inputs(*capture.entries[0]).q.shape[2:]

    @property
    def flops(self) -> float:
        """Operations of one dense call: 4 H D T^2."""
        return 4.0 * self.heads * self.head_dim * self.capture.grid.tokens**2

    @property
    def automatic(self) -> bool:
        """Whether an attention call is short enough to follow every setting."""
        return self.flops <= AUTOMATIC_FLOPS.get(self.device.type, AUTOMATIC_FLOPS["cpu"])

    def inputs(self, layer: int, step: int) -> QKV:
        """q, k, v on the device."""

        def make() -> QKV:
            loaded = self.capture.load(layer, step)
            q, k, v = (x[:1].to(self.device) for x in (loaded.q, loaded.k, loaded.v))
            return QKV(q, k, v, loaded.layer, loaded.step, loaded.time)

        return self._inputs.get((layer, step), make)

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
        x = self.inputs(state.layer, state.step)
        dense = self._dense.get((state.layer, state.step), lambda: attend(x.q, x.k, x.v))
        start = self._now()
        out, trace = sol_attention(
            x.q,
            x.k,
            x.v,
            tau=state.tau,
            thresh_type=state.thresh_type,
            sink_tokens=state.sink_tokens,
            return_trace=True,
        )
        seconds = self._now() - start
        return Measured(trace, attention_error(out, dense).relative_l2[0].cpu(), seconds)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()
