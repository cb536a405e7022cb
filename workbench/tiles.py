"""Why a tile of a SkipSoftmax run was computed or skipped, in numbers and words."""

from __future__ import annotations

from dataclasses import dataclass

from blockattn import Box, SkipGaps, TokenGrid, checks
from blockattn.skip import threshold_log2
from workbench.decisions import TileState, check_grid, check_head


@dataclass(frozen=True)
class TileExplanation:
    """What decided about one tile.

    Attributes:
        query_tile, key_tile: indices (i, j).
        query_box, key_box: their (t, h, w) boxes, ``None`` for a tile of text alone.
        gap: largest (tile maximum - running maximum) of its rows, base-2 logits; +inf for the
            first tile of a row.
        limit: log2(lambda).
        state, reason: what was decided, and the rule that decided.
    """

    query_tile: int
    key_tile: int
    query_box: Box | None
    key_box: Box | None
    gap: float
    limit: float
    state: TileState
    reason: str

    def __str__(self) -> str:
        return (
            f"Query tile {self.query_tile} ({_place(self.query_box)}) and key tile "
            f"{self.key_tile} ({_place(self.key_box)}): {self.state.name.lower()}, because "
            f"{self.reason}."
        )


def explain_tile(
    gaps: SkipGaps, threshold: float, grid: TokenGrid, i: int, j: int, batch: int = 0, head: int = 0
) -> TileExplanation:
    """What decided about query tile ``i`` and key tile ``j`` at a threshold (lambda in [0, 1]).

    Raises:
        TypeError, ValueError: no such tile or head, or a grid of another length than the gaps.
    """
    check_grid(grid, gaps.reachable)
    check_head(gaps.gaps.shape, batch, head)
    block = gaps.reachable.block
    rows, columns = gaps.reachable.grid
    checks.integer("i", i, maximum=rows - 1)
    checks.integer("j", j, maximum=columns - 1)
    gap, limit = float(gaps.gaps[batch, head, i, j]), threshold_log2(threshold)
    reachable = bool(gaps.reachable.heads(slice(head, head + 1)).dense()[batch, 0, i, j])
    state, reason = _decide(gap, limit, reachable)
    boxes = grid.box(i, block[0]), grid.box(j, block[1])
    return TileExplanation(i, j, *boxes, gap, limit, state, reason)


def _decide(gap: float, limit: float, reachable: bool) -> tuple[TileState, str]:
    if not reachable:
        return TileState.MASKED, "the causal mask hides all of it"
    if gap == float("inf"):
        return TileState.COMPUTED, "the first tile of a row is always computed"
    side = f"{gap:.2f} against log2(lambda) = {limit:.2f}"
    if gap < limit:
        return TileState.SKIPPED, (
            f"every row's largest score lies too far below the running maximum: {side}"
        )
    return TileState.COMPUTED, (f"some row's largest score comes near the running maximum: {side}")


def _place(box: Box | None) -> str:
    return "text" if box is None else str(box)
