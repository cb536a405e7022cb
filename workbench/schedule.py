"""Which attention calls of a sampling are dense: by the denoising phase, the layer, or both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from blockattn import BLOCK, checks
from workbench.attention.phase import DENSE, dense_steps, phase


class CallKind(IntEnum):
    """What a call of one layer in one step does; the value is the code in a map."""

    SPARSE = 0
    DENSE_STEP = 1
    DENSE_LAYER = 2
    DENSE_BOTH = 3


@dataclass(frozen=True)
class Schedule:
    """A dense phase and dense layers over the calls of one sampling.

    Attributes:
        times: falling denoising times of the steps, 1 = noisiest.
        layers: of the model.
        cutoff: ``disabled_until_timestep``: dense at or above it; None = no dense phase.
        dense_layers: layers that stay dense, sorted.

    Raises:
        ValueError: no step or layer, a cutoff outside (0, 1], or a layer that the model lacks.
    """

    times: tuple[float, ...]
    layers: int
    cutoff: float | None = None
    dense_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        checks.integer("layers", self.layers, minimum=1)
        if not self.times:
            raise ValueError("times is empty: a schedule needs a step")
        if self.cutoff is not None and not 0 < self.cutoff <= 1:
            raise ValueError(f"cutoff={self.cutoff!r}: must be in (0, 1], or None for none")
        beyond = [layer for layer in self.dense_layers if not 0 <= layer < self.layers]
        if beyond:
            raise ValueError(
                f"dense_layers={list(self.dense_layers)}: {beyond} is not among the layers 0 to "
                f"{self.layers - 1}"
            )

    @property
    def dense_steps(self) -> int:
        """How many steps lie in the dense phase."""
        return dense_steps(self.times, self.cutoff)

    def kinds(self) -> Tensor:
        """uint8 ``[layers, steps]`` of :class:`CallKind`."""
        steps = torch.tensor([phase(time, self.cutoff) == DENSE for time in self.times])
        layers = torch.tensor([layer in self.dense_layers for layer in range(self.layers)])
        return (steps * CallKind.DENSE_STEP + layers[:, None] * CallKind.DENSE_LAYER).byte()

    @property
    def sparse_share(self) -> float:
        """Sparse calls / calls."""
        return float((self.kinds() == CallKind.SPARSE).double().mean())

    def work(self, density: float) -> float:
        """Attention arithmetic / that of an all-dense sampling, with Sol-Attn in the sparse calls.

        Args:
            density: mean of the sparse calls; each also pays 1/64 for the block summaries.
        """
        share = checks.finite_number("density", density, minimum=0.0)
        return 1 - self.sparse_share * (1 - min(1.0, share + 1 / BLOCK))

    def same_cutoffs(self) -> tuple[float, float]:
        """Cutoffs that keep the same steps dense: above the first number, up to the second."""
        ahead = self.dense_steps
        low = self.times[ahead] if ahead < len(self.times) else 0.0
        return low, self.times[ahead - 1] if ahead else 1.0


def describe(schedule: Schedule) -> str:
    """Calls by kind, and the range of cutoffs that mean the same."""
    total = len(schedule.times) * schedule.layers
    sparse = round(schedule.sparse_share * total)
    kept = _names(schedule.dense_layers)
    text = f"{sparse:,} of {total:,} attention calls are sparse ({sparse / total:.0%}); {kept}."
    if schedule.cutoff is None:
        return text
    low, high = schedule.same_cutoffs()
    return f"{text} Any cutoff above {low:.4g} and up to {high:.4g} keeps the same steps dense."


def _names(layers: Sequence[int]) -> str:
    if not layers:
        return "no layer stays dense throughout"
    word = "layer" if len(layers) == 1 else "layers"
    stay = "stays" if len(layers) == 1 else "stay"
    return f"{word} {', '.join(map(str, layers))} {stay} dense throughout"
