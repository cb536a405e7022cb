"""What became of every block pair, in words and numbers: the computation behind the pictures.

Plain functions of scores, routes and a token grid; nothing here draws. A block pair has exactly one
decision. The rules are those of Sol-Attn (arXiv:2607.24027): a pair passes the threshold by itself,
or it is exact because it lies in the diagonal band or in the sink, or it is approximate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from blockattn import BLOCK, BlockRoute, BlockScores, Box, TokenGrid, checks
from blockattn.layout import num_blocks
from blockattn.sol import BAND


class Decision(IntEnum):
    """Decision about a (query block, key block) pair; the value is the code in a class map."""

    APPROXIMATE = 0  # enters through its summary
    ROUTED = 1  # above the threshold by itself
    DIAGONAL = 2  # exact for its place in the band alone
    SINK = 3  # exact for its place in the sink alone


class TileState(IntEnum):
    """State of a (query tile, key tile) pair in a SkipSoftmax run."""

    COMPUTED = 0
    SKIPPED = 1  # dropped by the threshold at run time
    MASKED = 2  # not reachable under the causal mask


def classify(
    scores: BlockScores,
    tau: float,
    batch: int = 0,
    head: int = 0,
    blocks: Sequence[int] | None = None,
) -> Tensor:
    """Decision of every block pair of one head, uint8 ``[Nq, Nk]`` with :class:`Decision` codes.

    A pair that passes by itself counts as routed also inside the band or the sink, so the other
    two classes show what those rules add. The exact pairs equal ``scores.route(tau)``.

    Args:
        blocks: query block of every row, where the scores are of some rows alone.

    Raises:
        TypeError, ValueError: tau is not finite, or there is no such batch or head.
    """
    z = _head(scores, scores.z, batch, head)
    routed = z > checks.finite_number("tau", tau)
    query, key = (torch.arange(size, device=z.device) for size in z.shape)
    if blocks is not None:
        query = torch.tensor(list(blocks), device=z.device)
    band = (query[:, None] - key[None, :]).abs() <= BAND
    sink = (key >= scores.sink[0]) & (key < scores.sink[1])
    classes = torch.zeros_like(z, dtype=torch.uint8)
    # Later lines win: routed before diagonal before sink.
    classes.masked_fill_(sink, Decision.SINK)
    classes.masked_fill_(band, Decision.DIAGONAL)
    classes.masked_fill_(routed, Decision.ROUTED)
    return classes


def count(classes: Tensor) -> dict[Decision, int]:
    """Pairs of each decision, in the order of :class:`Decision`."""
    numbers = torch.bincount(classes.flatten().long(), minlength=len(Decision)).tolist()
    return {decision: numbers[decision] for decision in Decision}


def density(classes: Tensor) -> float:
    """Exact pairs / pairs of a class map, in [0, 1]; 0 when it is empty."""
    exact = int((classes != Decision.APPROXIMATE).sum())
    return exact / classes.numel() if classes.numel() else 0.0


def describe(classes: Tensor) -> str:
    """The line under a routing map: density, what made pairs exact, and the extreme rows."""
    numbers = count(classes)
    rows = (classes != Decision.APPROXIMATE).sum(dim=1)
    parts = [f"{numbers[d]:,} {d.name.lower()}" for d in Decision if d and numbers[d]]
    total = classes.numel()
    exact = total - numbers[Decision.APPROXIMATE]
    return (
        f"Density {density(classes):.4f}: {exact:,} of {total:,} block pairs are exact "
        f"({', '.join(parts)}), {numbers[Decision.APPROXIMATE]:,} approximate. A query block "
        f"attends {int(rows.min())} to {int(rows.max())} of {classes.shape[1]} key blocks exactly."
    )


def skip_states(
    skipped: BlockRoute, reachable: BlockRoute, batch: int = 0, head: int = 0
) -> Tensor:
    """State of every tile of one head, uint8 ``[Nq, Nk]`` with :class:`TileState` codes."""
    if (skipped.block, skipped.seqlens) != (reachable.block, reachable.seqlens):
        raise ValueError(
            f"skipped and reachable differ in geometry: blocks {skipped.block} over "
            f"{skipped.seqlens} against blocks {reachable.block} over {reachable.seqlens}"
        )
    check_head(skipped.shape, batch, head)
    states = torch.full(skipped.grid, int(TileState.MASKED), dtype=torch.uint8)
    states = states.to(skipped.device)
    states.masked_fill_(reachable.dense()[batch, head], TileState.COMPUTED)
    return states.masked_fill_((skipped & reachable).dense()[batch, head], TileState.SKIPPED)


def describe_skip(states: Tensor) -> str:
    """The line under a skip map: density, skipped tiles, and the extreme rows."""
    valid = states != TileState.MASKED
    dropped = states == TileState.SKIPPED
    number, total = int(dropped.sum()), int(valid.sum())
    rows = (valid & ~dropped).sum(dim=1)
    line = (
        f"Density {1 - number / max(1, total):.4f}: {number:,} of {total:,} tiles skipped. A query "
        f"tile computes {int(rows.min())} to {int(rows.max())} of {states.shape[1]} key tiles."
    )
    return line if number else f"{line} Nothing was skipped: this ran dense."


@dataclass(frozen=True)
class PairExplanation:
    """Why one block pair is exact or approximate.

    Attributes:
        query_block, key_block: block indices (i, j).
        query_box, key_box: their (t, h, w) boxes, ``None`` for a block of text alone.
        score, threshold: mean score and the row's threshold, base-2 logits.
        z, tau: the same two in standard deviations above the row's mean.
        decision, reason: what was decided, and the rule that decided.
    """

    query_block: int
    key_block: int
    query_box: Box | None
    key_box: Box | None
    score: float
    threshold: float
    z: float
    tau: float
    decision: Decision
    reason: str

    def __str__(self) -> str:
        return (
            f"Query block {self.query_block} ({_place(self.query_box)}) and key block "
            f"{self.key_block} ({_place(self.key_box)}): {self.decision.name.lower()}, because "
            f"{self.reason}. Score {self.score:.2f}, threshold {self.threshold:.2f} in base-2 "
            "logits."
        )


def explain(
    scores: BlockScores, tau: float, grid: TokenGrid, i: int, j: int, batch: int = 0, head: int = 0
) -> PairExplanation:
    """What decided about query block ``i`` and key block ``j``.

    Raises:
        TypeError, ValueError: no such block or head, or a grid of another length than the scores.
    """
    check_grid(grid, scores.always)
    z_head = _head(scores, scores.z, batch, head)
    row = checks.integer("i", i, maximum=z_head.shape[0] - 1)
    column = checks.integer("j", j, maximum=z_head.shape[1] - 1)
    z, limit = float(z_head[row, column]), checks.finite_number("tau", tau)
    mean, std = (float(x[batch, head, row]) for x in (scores.mean, scores.std))
    decision = _decide(z, limit, row, column, scores.sink)
    block = scores.always.block
    return PairExplanation(
        query_block=row,
        key_block=column,
        query_box=grid.box(row, block[0]),
        key_box=grid.box(column, block[1]),
        score=mean + z * std,
        threshold=mean + limit * std,
        z=z,
        tau=limit,
        decision=decision,
        reason=_reason(decision, z, limit),
    )


def selected_tokens(row: Tensor, grid: TokenGrid, block: int = BLOCK) -> Tensor:
    """Video positions that one query block attends exactly, bool ``[T, H, W]``.

    Args:
        row: bool ``[Nk]``, the exact key blocks, e.g. ``route.dense()[batch, head, i]``.
        grid: where the tokens lie; text tokens have no place in the picture.
        block: tokens of a key block.
    """
    blocks = num_blocks(grid.tokens, block)
    if row.dtype != torch.bool or tuple(row.shape) != (blocks,):
        raise ValueError(
            f"row: {row.dtype} {tuple(row.shape)}, expected bool ({blocks},): one entry for each "
            f"key block of {block} tokens of a sequence of {grid.tokens}"
        )
    tokens = row.cpu().repeat_interleave(block)[: grid.tokens]
    raster = grid.restore(tokens, dim=0)
    return raster[grid.prefix : grid.prefix + grid.video_tokens].reshape(grid.shape)


def own_tokens(index: int, grid: TokenGrid, block: int = BLOCK) -> Tensor:
    """Video positions of the query block itself, bool ``[T, H, W]``."""
    blocks = num_blocks(grid.tokens, block)
    row = torch.zeros(blocks, dtype=torch.bool)
    row[checks.integer("index", index, maximum=blocks - 1)] = True
    return selected_tokens(row, grid, block)


def describe_selection(selected: Tensor, own: Tensor) -> str:
    """The line under the frames picture: how much of the video is attended exactly, and where."""
    frames = selected.flatten(1).float().mean(dim=1)
    touched = [t for t, share in enumerate(frames.tolist()) if share > 0]
    home = sorted(set(own.nonzero()[:, 0].tolist()))
    return (
        f"{int(selected.sum()):,} of {selected.numel():,} video tokens are attended exactly, in "
        f"{_frames(touched) or 'no frame'}; the query block lies in {_frames(home) or 'the text'}."
    )


def frame_edges(grid: TokenGrid, block: int = BLOCK) -> list[float]:
    """Where latent frames begin, in blocks, for raster order; empty for orders that mix frames."""
    if grid.order != "raster":
        return []
    area = grid.shape[1] * grid.shape[2]
    return [(grid.prefix + t * area) / block for t in range(grid.shape[0] + 1)]


def pooled_density(classes: Tensor, size: int = 512) -> tuple[Tensor, int]:
    """A class map as a picture of local densities, at most ``size`` x ``size``, float32.

    Every pixel is the mean over factor x factor pairs, at the edges over the pairs that exist.
    The largest pair would hide sparsity, and every n-th pair would alias.

    Returns:
        The picture and the factor.
    """
    exact = (classes != Decision.APPROXIMATE)[None, None]
    route = BlockRoute.from_dense(exact, block=(1, 1))
    factor = max(num_blocks(edge, checks.integer("size", size, minimum=1)) for edge in route.grid)
    return route.image(size=size), factor


def check_head(shape: Sequence[int], batch: int, head: int) -> None:
    """Refuses a sample or head that values ``[B, H, ...]`` do not have, by ValueError."""
    checks.integer("batch", batch, maximum=shape[0] - 1)
    checks.integer("head", head, maximum=shape[1] - 1)


def check_grid(grid: TokenGrid, route: BlockRoute) -> None:
    """Refuses a grid of another length than the queries of a route, by ValueError."""
    if grid.tokens != route.seqlens[0]:
        raise ValueError(
            f"grid: {grid.shape} with its text has {grid.tokens} tokens, but q has "
            f"{route.seqlens[0]}; pass the grid that q and k were made with"
        )


# -- details ------------------------------------------------------------------------------------


def _head(scores: BlockScores, values: Tensor, batch: int, head: int) -> Tensor:
    check_head(scores.z.shape, batch, head)
    return values[batch, head]


def _decide(z: float, tau: float, i: int, j: int, sink: tuple[int, int]) -> Decision:
    # The comparison is made in float32, like that of a whole map.
    if torch.tensor(z, dtype=torch.float32) > tau:
        return Decision.ROUTED
    if abs(i - j) <= BAND:
        return Decision.DIAGONAL
    return Decision.SINK if sink[0] <= j < sink[1] else Decision.APPROXIMATE


def _reason(decision: Decision, z: float, tau: float) -> str:
    z_text = f"z = {z:.2f}" if math.isfinite(z) else f"z = {z}"
    if decision is Decision.ROUTED:
        return f"{z_text} is above tau = {tau:g}"
    below = f"although {z_text} is not above tau = {tau:g}"
    if decision is Decision.DIAGONAL:
        return f"it lies within {BAND} block of the diagonal, {below}"
    if decision is Decision.SINK:
        return f"the key block is in the sink, {below}"
    return f"{z_text} is not above tau = {tau:g}"


def _place(box: Box | None) -> str:
    if box is None:
        return "text"
    spans = (_spans(list(range(low, high))) for low, high in box.axes)
    return ", ".join(f"{name} {span}" for name, span in zip("thw", spans))


def _frames(numbers: list[int]) -> str:
    if not numbers:
        return ""
    return f"frame{'s' if len(numbers) > 1 else ''} {_spans(numbers)}"


def _spans(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2, 5"."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], number]
        else:
            spans.append([number])
    return ", ".join("-".join(map(str, span)) for span in spans)
