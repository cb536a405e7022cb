"""Quantised operands under a sparse mechanism: which of the two errors dominates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blockattn import attend, sol_route
from workbench.mechanisms.formats import Format, stacked
from workbench.mechanisms.probes import probe_quantised
from workbench.probe import Probe, make_probe, probe_skip, probe_sol

PLAIN = "not quantised"


@dataclass(frozen=True)
class Combination:
    """Errors of mechanisms x formats on one call.

    Attributes:
        mechanisms, formats: names of the rows and columns; the first format is "not quantised".
        relative_l2: float64 ``[mechanisms, formats]`` over all heads, against dense attention over
            the unquantised operands.
        density: float64 ``[mechanisms, formats]``, exact / valid pairs delivered.
    """

    mechanisms: tuple[str, ...]
    formats: tuple[str, ...]
    relative_l2: Tensor
    density: Tensor

    @property
    def rows(self) -> list[str]:
        """The mechanisms with the density that they deliver without quantisation."""
        plain = self.density[:, 0].tolist()
        return [f"{name}\ndensity {value:.3f}" for name, value in zip(self.mechanisms, plain)]

    @property
    def columns(self) -> list[str]:
        """The formats' names with a line for each part."""
        return [stacked(name) for name in self.formats]


def combination_errors(
    q: Tensor, k: Tensor, v: Tensor, formats: Sequence[Format], *, tau: float, threshold: float
) -> Combination:
    """Dense, Sol-Attn and SkipSoftmax, each without quantisation and in every format.

    Sol-Attn routes on the original q and k; its summaries and SkipSoftmax's vote see the quantised
    operands, as in a block-scaled kernel.

    Args:
        q, k, v: ``[B, T, H, D]``, equal lengths.
        formats: of the operands.
        tau: of Sol-Attn.
        threshold: lambda of SkipSoftmax, in [0, 1).
    """
    dense, trace = attend(q, k, v, return_trace=True)
    route = sol_route(q, k, tau=tau)
    ways: dict[str, tuple[Probe, dict[str, Any]]] = {
        "dense": (make_probe(dense, trace, dense, lambda impl: dense), {}),
        f"Sol-Attn, tau {tau:g}": (
            probe_sol(q, k, v, tau, dense=dense),
            {"route": route, "with_tail": True},
        ),
        f"SkipSoftmax, lambda {threshold:g}": (
            probe_skip(q, k, v, threshold, dense=dense),
            {"skip_threshold": threshold},
        ),
    }
    table = [
        [
            plain,
            *(probe_quantised(q, k, v, dense=dense, **f.arguments(), **how) for f in formats),
        ]
        for plain, how in ways.values()
    ]
    error, density = (
        torch.tensor([[pick(probe) for probe in row] for row in table], dtype=torch.float64)
        for pick in (lambda p: p.error.total.relative_l2, lambda p: p.density)
    )
    names = (PLAIN, *(f.name for f in formats))
    return Combination(tuple(ways), names, error, density)
