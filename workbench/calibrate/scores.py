"""Sorted scores of many heads: the density at any level follows, exactly or to a stated bound.

A level is the knob as kernels compare it: tau for Sol-Attn, log2(lambda) for SkipSoftmax. A pair of
blocks is exact when its score lies above the level (Sol-Attn: z, strictly) or not below it
(SkipSoftmax: gap), so the scores in order are all that a density needs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from blockattn import BLOCK, checks, skip_gaps, sol_scores
from blockattn.layout import num_blocks
from blockattn.skip import TILE
from blockattn.sol import BAND

ALGORITHMS = ("sol_attn", "skip_softmax")
MIN_POINTS = 65  # fewer would place a density to no better than 0.8 points


@dataclass(frozen=True)
class Geometry:
    """How many block pairs a head of one sequence has, before anything is computed.

    Attributes:
        algorithm: ``sol_attn`` or ``skip_softmax``.
        tokens: length of the sequence.
        pairs: (query block, key block) pairs of a head.
        always: of them exact at every level, with no score to keep (Sol-Attn's band).
    """

    algorithm: str
    tokens: int

    def __post_init__(self) -> None:
        checks.one_of("algorithm", self.algorithm, ALGORITHMS)
        checks.integer("tokens", self.tokens, minimum=1)

    @property
    def block(self) -> tuple[int, int]:
        """Tokens of a query and of a key block: what the kernel routes or votes on together."""
        return (BLOCK, BLOCK) if self.algorithm == "sol_attn" else TILE

    @property
    def pairs(self) -> int:
        return num_blocks(self.tokens, self.block[0]) * num_blocks(self.tokens, self.block[1])

    @property
    def always(self) -> int:
        if self.algorithm != "sol_attn":
            return 0
        blocks = num_blocks(self.tokens, BLOCK)
        return sum(
            blocks - abs(offset) for offset in range(-BAND, BAND + 1) if abs(offset) < blocks
        )

    @property
    def scores(self) -> int:
        """Scores of a head that decide something."""
        return self.pairs - self.always


@dataclass(frozen=True)
class ScoreTable:
    """Kept order statistics of the scores of many heads.

    Attributes:
        points: float32 ``[..., m]``, ascending: of every head the scores of rank ``ranks``.
        ranks: int64 ``[m]``, ascending, first 0 and last n - 1 of n scores.
        geometry: what was scored.
    """

    points: Tensor
    ranks: Tensor
    geometry: Geometry

    @property
    def exact(self) -> bool:
        """Whether every score was kept, so that densities are exact."""
        return len(self.ranks) == self.geometry.scores

    @property
    def bound(self) -> float:
        """Largest error of a density of one head, in [0, 1]; 0 when exact."""
        if self.exact:
            return 0.0
        return (int(self.ranks.diff().max()) - 1) / 2 / self.geometry.pairs

    def density(self, level: Tensor | float) -> Tensor:
        """Density of every head, float64 ``[...]``, within ``bound`` of the true one.

        Args:
            level: broadcast to the heads; compared in float32 as kernels do.
        """
        heads = self.points.shape[:-1]
        value = torch.as_tensor(level, dtype=torch.float64).float().expand(heads)[..., None]
        # Sol-Attn leaves a tie approximate, SkipSoftmax computes it.
        right = self.geometry.algorithm == "sol_attn"
        kept = torch.searchsorted(self.points, value.contiguous(), right=right)[..., 0]
        below = self._below(kept)
        return (self.geometry.pairs - below) / self.geometry.pairs

    def _below(self, kept: Tensor) -> Tensor:
        """Scores below the level, from how many kept ones are: float64, mid of what is possible."""
        edges = torch.cat([torch.tensor([-1]), self.ranks, torch.tensor([self.geometry.scores])])
        low, high = edges[kept] + 1, edges[kept + 1]
        return (low + high).double() / 2


def kept_ranks(scores: int, points: int) -> Tensor:
    """Ranks to keep of that many sorted scores: all, or evenly spread with both ends."""
    if scores <= points:
        return torch.arange(scores)
    return torch.linspace(0, scores - 1, points, dtype=torch.float64).round().long()


def sorted_scores(
    q: Tensor, k: Tensor, algorithm: str, *, thresh_type: str = "diag"
) -> Iterator[tuple[slice, Tensor]]:
    """Ascending scores of the query heads of each key head in turn, so that memory stays bounded.

    Args:
        q: ``[B, T, Hq, D]``; k: ``[B, T, Hk, D]``.
        thresh_type: of Sol-Attn.

    Yields:
        The slice of query heads, and their float32 ``[B, Hq / Hk, n]``.
    """
    group = q.shape[2] // k.shape[2]
    for head in range(k.shape[2]):
        heads = slice(head * group, (head + 1) * group)
        ours = (q[:, :, heads], k[:, :, head : head + 1])
        scores = _sol(*ours, thresh_type) if algorithm == "sol_attn" else _skip(*ours)
        yield heads, scores.sort(dim=-1).values


def _sol(q: Tensor, k: Tensor, thresh_type: str) -> Tensor:
    scores = sol_scores(q, k, thresh_type=thresh_type)
    free = scores.z[:, :, ~scores.always.dense()[0, 0]]
    return free.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)  # NaN passes no tau


def _skip(q: Tensor, k: Tensor) -> Tensor:
    gaps = skip_gaps(q, k).gaps.flatten(2)
    return gaps.nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf)  # NaN never drops
