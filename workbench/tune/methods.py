"""What `tune` turns: for each algorithm the knob, its one-pass densities, a real call, the export.

Both knobs grow towards sparser: tau of Sol-Attn and the threshold lambda of SkipSoftmax.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from blockattn import (
    BLOCK,
    BlockScores,
    SkipGaps,
    skip_gaps,
    skip_softmax_attention,
    sol_attention,
)
from workbench.config import SkipSoftmaxConfig, SolAttnConfig
from workbench.probe import Probe, probe_skip, probe_sol
from workbench.rows import Blocks, check_tiles, probe_rows, row_scores
from workbench.tune.choice import next_above

LADDER = 9
FALLBACK_LADDER = (1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.1, 0.3, 0.6, 0.99)
LARGEST = 0.99  # lambda of 1 and more drops a tile although it holds a new maximum


class Method(Protocol):
    """The questions that tuning asks of an algorithm; ``prepared`` is what its one pass found.

    ``blocks`` says which query blocks q holds where a capture keeps a sample, else it is ``None``.
    """

    algorithm: ClassVar[str]
    knob: ClassVar[str]
    word: ClassVar[str]
    """The quantity that the knob sets, for readers."""

    @property
    def sparsest(self) -> str:
        """What keeps every value of the knob from being sparser still, for messages."""
        ...

    def prepare(self, q: Tensor, k: Tensor, blocks: Blocks | None = None) -> Any:
        """One pass over q, k ``[B, T, H, D]`` that serves every value of the knob."""
        ...

    def density(self, prepared: Any, values: Sequence[float]) -> Tensor:
        """Density of every head at many values, float64 ``[B, H, n]``."""
        ...

    def alone(self, prepared: Any, value: float) -> Tensor | None:
        """Density that the knob alone causes, float64 ``[B, H]``; ``None`` where that is all."""
        ...

    def run(self, q: Tensor, k: Tensor, v: Tensor, value: float, impl: str) -> Tensor:
        """The real sparse call, routing included."""
        ...

    def probe(
        self, q: Tensor, k: Tensor, v: Tensor, value: float, impl: str, blocks: Blocks | None = None
    ) -> Probe:
        """The real sparse call with its trace, against dense by the implementation that ran."""
        ...

    def estimate(self, density: float) -> float:
        """Matrix-product work relative to dense."""
        ...

    def default_values(self, prepared: Sequence[Any]) -> tuple[float, ...]:
        """Values to try when none are given."""
        ...

    def span(self, prepared: Sequence[Any]) -> tuple[float, float]:
        """Positions between which every density is found; see :meth:`position`."""
        ...

    def position(self, value: float) -> float:
        """The value on the scale on which it is searched: itself, or its log2."""
        ...

    def value(self, position: float) -> float:
        """Inverse of :meth:`position`."""
        ...

    def config(self, value: float, keys: int, **common: Any) -> SolAttnConfig | SkipSoftmaxConfig:
        """The serving configuration for a sequence of ``keys`` tokens."""
        ...


@dataclass(frozen=True)
class SolAttn:
    """Sol-Attn: the knob is tau, in standard deviations."""

    algorithm: ClassVar[str] = "sol_attn"
    knob: ClassVar[str] = "tau"
    word: ClassVar[str] = "tau"

    thresh_type: str = "diag"
    sink_tokens: int = 0

    @property
    def sparsest(self) -> str:
        blocks = "band and sink blocks" if self.sink_tokens else "band blocks"
        return f"{blocks} are always exact"

    @property
    def routing(self) -> dict[str, Any]:
        return {"thresh_type": self.thresh_type, "sink_tokens": self.sink_tokens}

    def prepare(self, q: Tensor, k: Tensor, blocks: Blocks | None = None) -> BlockScores:
        return row_scores(q, k, blocks, **self.routing)

    def density(self, prepared: BlockScores, values: Sequence[float]) -> Tensor:
        return prepared.density(list(values)).cpu()

    def alone(self, prepared: BlockScores, value: float) -> Tensor:
        return prepared.passing(value).density_per_head().cpu()

    def run(self, q: Tensor, k: Tensor, v: Tensor, value: float, impl: str) -> Tensor:
        return sol_attention(q, k, v, tau=value, impl=impl, **self.routing)

    def probe(
        self, q: Tensor, k: Tensor, v: Tensor, value: float, impl: str, blocks: Blocks | None = None
    ) -> Probe:
        if blocks is not None:
            return probe_rows(q, k, v, blocks, value, impl=impl, **self.routing)
        return probe_sol(q, k, v, value, impl=impl, **self.routing)

    def estimate(self, density: float) -> float:
        """Exact keys plus one summary key for each block of 64 (sol_attn specification 10.6)."""
        return density + 1 / BLOCK

    def default_values(self, prepared: Sequence[BlockScores]) -> tuple[float, ...]:
        return tuple(3 * n / (LADDER - 1) for n in range(LADDER))

    def span(self, prepared: Sequence[BlockScores]) -> tuple[float, float]:
        low = min(float(item.z.min()) for item in prepared)
        high = max(float(item.z.max()) for item in prepared)
        return low - 0.01, high + 0.01

    def position(self, value: float) -> float:
        return value

    def value(self, position: float) -> float:
        return position

    def config(self, value: float, keys: int, **common: Any) -> SolAttnConfig:
        return SolAttnConfig(tau=value, thresh_type=self.thresh_type, **common)  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True)
class SkipSoftmax:
    """SkipSoftmax: the knob is lambda; ``threshold_scale_factor`` is lambda * Sk."""

    algorithm: ClassVar[str] = "skip_softmax"
    knob: ClassVar[str] = "threshold"
    word: ClassVar[str] = "lambda"

    @property
    def sparsest(self) -> str:
        return "lambda is at most 1"

    def prepare(self, q: Tensor, k: Tensor, blocks: Blocks | None = None) -> SkipGaps:
        check_tiles(blocks, k.shape[1])
        return skip_gaps(q, k)

    def density(self, prepared: SkipGaps, values: Sequence[float]) -> Tensor:
        return 1 - prepared.sparsity(list(values)).cpu()

    def alone(self, prepared: SkipGaps, value: float) -> None:
        return None

    def run(self, q: Tensor, k: Tensor, v: Tensor, value: float, impl: str) -> Tensor:
        return skip_softmax_attention(q, k, v, threshold=value, impl=impl)

    def probe(
        self, q: Tensor, k: Tensor, v: Tensor, value: float, impl: str, blocks: Blocks | None = None
    ) -> Probe:
        check_tiles(blocks, k.shape[1])
        return probe_skip(q, k, v, value, impl=impl)

    def estimate(self, density: float) -> float:
        """Every tile pays for q k^T, only kept ones for the product with v: half and half."""
        return (1 + density) / 2

    def default_values(self, prepared: Sequence[SkipGaps]) -> tuple[float, ...]:
        """Nine thresholds that drop evenly growing shares of the tiles, up to 0.99."""
        gaps = _finite_gaps(prepared)
        gaps = gaps[gaps < math.log2(LARGEST)].sort().values
        if not len(gaps):
            return FALLBACK_LADDER
        ranks = [round((n + 1) * (len(gaps) - 1) / LADDER) for n in range(LADDER)]
        # Rounded up: a tile is dropped only strictly below the threshold.
        steps = (next_above(2.0 ** float(gaps[rank])) for rank in ranks)
        return tuple(sorted({min(LARGEST, step) for step in steps}))

    def span(self, prepared: Sequence[SkipGaps]) -> tuple[float, float]:
        gaps = _finite_gaps(prepared)
        return (min(-1.0, float(gaps.min()) - 0.01) if len(gaps) else -1.0), 0.0

    def position(self, value: float) -> float:
        return math.log2(value) if value > 0 else -math.inf

    def value(self, position: float) -> float:
        return 2.0**position

    def config(self, value: float, keys: int, **common: Any) -> SkipSoftmaxConfig:
        common.pop("dense_layers", None)  # the schema has none for this algorithm
        return SkipSoftmaxConfig(threshold_scale_factor=value * keys, **common)


def _finite_gaps(prepared: Sequence[SkipGaps]) -> Tensor:
    """Gaps of the tiles that some threshold drops or keeps, float32, in base-2 logits."""
    every = torch.cat([item.gaps[item.reachable.dense()].flatten().cpu() for item in prepared])
    return every[every.isfinite()]
