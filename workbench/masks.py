"""Masks of any size to look at: bits of every head, windows pooled to the screen, coded scores.

A mask keeps one bit for each block pair: whether the pair passes by itself. Pairs that are exact
for their place alone (band and sink) follow from the geometry, so 100,000 tokens and 40 heads take
12.3 MB, and every pair still has its decision. Scores are coded in one byte each, such that the
decision at every stop of the tau slider is exact and only a tau between two stops is ambiguous.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm.auto import tqdm

from blockattn import BLOCK, BlockRoute, BlockScores, TokenGrid, checks, sol_scores
from blockattn.sol import BAND
from workbench.capture import QKV, Capture
from workbench.decisions import Decision
from workbench.mask_codes import ladder, stop_densities
from workbench.probe import probe_sol

PIXELS = 512  # a picture is at most this wide and high
Span = tuple[int, int]
Entry = tuple[int, int]
ScoresOf = Callable[[int, int, range], BlockScores]
"""(layer, step, heads) -> scores of those heads alone, tensors ``[1, len(heads), ...]``."""


@dataclass(frozen=True)
class Window:
    """A part of a mask as a picture.

    Attributes:
        rows, columns: block rows and columns shown, half open.
        factor: pairs (down, across) that one pixel stands for.
        density: float32, mean over the pairs of each pixel, at the edge over those that exist.
        classes: uint8 :class:`workbench.decisions.Decision` codes; None when pixels hold several
            pairs.
    """

    rows: Span
    columns: Span
    factor: Span
    density: NDArray[np.float32]
    classes: NDArray[np.uint8] | None

    @property
    def rule(self) -> str:
        """How the picture was made from pairs, in words."""
        if self.factor == (1, 1):
            return "1 cell = 1 block pair"
        return f"1 pixel = mean of {self.factor[0]} x {self.factor[1]} pairs (query x key)"


@dataclass(frozen=True)
class Mask:
    """Which block pairs every head attends exactly, and by which rule.

    Attributes:
        passing: pairs that are exact by themselves, on the CPU, ``[1, H, Nq, Nk]``.
        band: key blocks on either side of the diagonal that are always exact; -1 for none.
        sink: key blocks that are always exact, half open; (Nk, Nk) for none.
        tau: what the scores were compared with; None for a mask that no score made.
        rest: what became of the other pairs: approximate, or skipped.
        unscored: pairs of each head whose score is NaN, which passes no threshold; empty for none.
    """

    passing: BlockRoute
    band: int = -1
    sink: Span | None = None
    tau: float | None = None
    rest: str = "approximate"
    unscored: tuple[int, ...] = ()

    @classmethod
    def of_route(cls, route: BlockRoute, *, batch: int = 0, rest: str = "approximate") -> Mask:
        """A route that somebody made, e.g. ``trace.route``: every exact pair counts as its own."""
        first = checks.integer("batch", batch, maximum=route.shape[0] - 1)
        words = route.words[first : first + 1].cpu()
        return cls(BlockRoute(words, route.block, route.seqlens), rest=rest)

    @classmethod
    def of_scores(cls, scores: BlockScores, tau: float) -> Mask:
        """Sol-Attn at ``tau``, of the first sequence of a batch."""
        passing = scores.passing(tau)
        words = passing.words[:1].cpu()
        route = BlockRoute(words, passing.block, passing.seqlens)
        nan = scores.z[0].isnan().sum(dim=(1, 2)).tolist()
        unscored = tuple(nan) if any(nan) else ()
        return cls(route, BAND, scores.sink, float(tau), unscored=unscored)

    @property
    def heads(self) -> int:
        return self.passing.shape[1]

    @property
    def grid(self) -> Span:
        """Query blocks and key blocks (Nq, Nk)."""
        return self.passing.grid

    @property
    def sink_span(self) -> Span:
        """Key blocks of the sink, half open; empty without one."""
        return (self.grid[1], self.grid[1]) if self.sink is None else self.sink

    @cached_property
    def always(self) -> BlockRoute:
        """Pairs that are exact for their place, ``[1, 1, Nq, Nk]``."""
        query, key = (torch.arange(size) for size in self.grid)
        band = (query[:, None] - key[None, :]).abs() <= self.band
        sink = (key >= self.sink_span[0]) & (key < self.sink_span[1])
        shape = {"block": self.passing.block, "seqlens": self.passing.seqlens}
        return BlockRoute.from_dense((band | sink)[None, None], **shape)

    def exact(self, head: int) -> BlockRoute:
        """Every exact pair of one head, ``[1, 1, Nq, Nk]``."""
        return self._one(head) | self.always

    def density(self) -> Tensor:
        """Exact pairs / pairs of every head, float64 ``[H]``; it unpacks no mask."""
        query, key = self.always.dense()[0, 0].nonzero(as_tuple=True)
        words = self.passing.words[0, :, query, key // 32]
        already = ((words >> (key % 32)) & 1).sum(dim=1)
        exact = self.passing.counts()[0].sum(dim=1) + len(query) - already
        return exact.double() / max(1, self.grid[0] * self.grid[1])

    def classes(self, head: int) -> Tensor:
        """Decision of every pair of one head, uint8 ``[Nq, Nk]``; rules as in ``classify``."""
        key = torch.arange(self.grid[1])
        codes = torch.zeros(self.grid, dtype=torch.uint8)
        codes.masked_fill_(self.always.dense()[0, 0], int(Decision.DIAGONAL))
        sink = (key >= self.sink_span[0]) & (key < self.sink_span[1])
        beyond = (torch.arange(self.grid[0])[:, None] - key[None, :]).abs() > self.band
        codes.masked_fill_(sink & beyond, int(Decision.SINK))
        return codes.masked_fill_(self._one(head).dense()[0, 0], int(Decision.ROUTED))

    def window(
        self,
        head: int,
        rows: Span | None = None,
        columns: Span | None = None,
        size: int = PIXELS,
    ) -> Window:
        """A part of one head as a picture of at most ``size`` x ``size``, pooled by the mean."""
        density = self.exact(head).image(rows=rows, columns=columns, size=size).numpy()
        spans = (rows or (0, self.grid[0]), columns or (0, self.grid[1]))
        down, across = (-(-(high - low) // size) for low, high in spans)
        classes = None
        if (down, across) == (1, 1):
            (top, bottom), (left, right) = spans
            classes = self.classes(head)[top:bottom, left:right].numpy()
        return Window(*spans, (down, across), density, classes)

    def _one(self, head: int) -> BlockRoute:
        index = checks.integer("head", head, maximum=self.heads - 1)
        return self.passing.heads(slice(index, index + 1))


@dataclass(frozen=True)
class MaskSet:
    """Masks of many attention calls of one grid, with what is known about each.

    Attributes:
        grid: where the tokens of a sequence are.
        masks: (layer, step) -> :class:`Mask`; all of one geometry. It may load them lazily.
        title: what is looked at.
        scores: gives the scores of some heads, or None when there are none.
        errors: (layer, step) -> relative L2 error of every head against dense, where measured.
        densities: the same for densities, float64 ``[H]``; only what is given is in the index.
        curves: the same for densities at every stop, float64 ``[H, len(stops)]``, so that the index
            follows tau; of every call or of none.
        stops: taus of the curves.
        video: uint8 ``[frames, height, width, 3]`` or None.
    """

    grid: TokenGrid
    masks: Mapping[Entry, Mask]
    title: str
    scores: ScoresOf | None = None
    errors: Mapping[Entry, Tensor] = field(default_factory=dict)
    densities: Mapping[Entry, Tensor] = field(default_factory=dict)
    curves: Mapping[Entry, Tensor] = field(default_factory=dict)
    stops: tuple[float, ...] = ()
    video: Tensor | None = None

    def __post_init__(self) -> None:
        if not len(self.masks):
            raise ValueError("masks: it holds no (layer, step); give at least one mask")
        if self.curves and set(self.curves) != set(self.masks):
            raise ValueError(
                f"curves: of {len(self.curves)} calls, but there are {len(self.masks)} masks; give "
                "one for each call, or none"
            )

    @cached_property
    def entries(self) -> list[Entry]:
        return sorted(self.masks)

    @cached_property
    def layers(self) -> list[int]:
        return sorted({layer for layer, _ in self.masks})

    @cached_property
    def steps(self) -> list[int]:
        return sorted({step for _, step in self.masks})

    def load(self, layer: int, step: int) -> Mask:
        """The mask of one call.

        Raises:
            ValueError: there is none, or its geometry does not fit the grid.
        """
        if (layer, step) not in self.masks:
            raise ValueError(
                f"layer={layer!r}, step={step!r}: no mask; there are (layer, step) {self.entries}"
            )
        mask = self.masks[layer, step]
        lengths = mask.passing.seqlens
        if set(lengths) != {self.grid.tokens}:
            raise ValueError(
                f"layer={layer}, step={step}: the mask is of {lengths[0]} x {lengths[1]} tokens, "
                f"but grid {self.grid.shape} with its text has {self.grid.tokens}; pass the grid "
                "that q and k were made with"
            )
        return mask

    def table(self, values: Mapping[Entry, Tensor], heads: int) -> NDArray[np.float32]:
        """Figures of every head as ``[layers, steps, heads]``; NaN where there is none."""
        cells = np.full((len(self.layers), len(self.steps), heads), np.nan, np.float32)
        for entry, figures in values.items():
            if len(figures) != heads:
                raise ValueError(
                    f"layer={entry[0]}, step={entry[1]}: {len(figures)} heads, but the first mask "
                    f"has {heads}; view layers of different head counts apart"
                )
            cells[self.place(entry)] = figures.cpu().numpy()
        return cells

    def place(self, entry: Entry) -> tuple[int, int]:
        """Row and column of a call in a table."""
        rows, columns = self._places
        return rows[entry[0]], columns[entry[1]]

    @cached_property
    def _places(self) -> tuple[dict[int, int], dict[int, int]]:
        rows = {layer: row for row, layer in enumerate(self.layers)}
        return rows, {step: column for column, step in enumerate(self.steps)}

    def densities_at(self, tau: float) -> dict[Entry, Tensor]:
        """Density of every head of every call at the first stop from tau on; needs curves."""
        stop = min(bisect.bisect_left(self.stops, tau), len(self.stops) - 1)
        return {entry: curve[:, stop] for entry, curve in self.curves.items()}


def capture_masks(
    capture: Capture,
    tau: float = 1.0,
    *,
    thresh_type: str = "diag",
    sink_tokens: int = 0,
    errors: bool = False,
) -> MaskSet:
    """Sol-Attn masks of every call of a capture, of the first sequence of a batch.

    Args:
        capture: where q, k, v come from.
        tau, thresh_type, sink_tokens: as :func:`blockattn.sol_scores`.
        errors: also run every call sparse and dense, for the index of errors (slow).
    """
    settings = {"thresh_type": thresh_type, "sink_tokens": sink_tokens}

    def scores(layer: int, step: int, heads: range) -> BlockScores:
        call = capture.load(layer, step)
        # Several query heads may share a key head.
        shared = [head * call.k.shape[2] // call.q.shape[2] for head in heads]
        return sol_scores(call.q[:1, :, list(heads)], call.k[:1, :, shared], **settings)

    masks, densities, curves, measured = {}, {}, {}, {}
    stops = ladder(tau)
    for layer, step in tqdm(capture.entries, desc="masks", unit="call", disable=None):
        call = capture.load(layer, step)
        found = sol_scores(call.q[:1], call.k[:1], **settings)
        mask = Mask.of_scores(found, tau)
        masks[layer, step], densities[layer, step] = mask, mask.density()
        curves[layer, step] = stop_densities(found, stops)
        if errors:
            measured[layer, step] = _error(call, tau, settings)
    title = f"{capture.title}, Sol-Attn, {thresh_type} threshold"
    index = {"errors": measured, "densities": densities, "curves": curves, "stops": stops}
    return MaskSet(capture.grid, masks, title, scores, **index, video=capture.video)


def _error(call: QKV, tau: float, settings: Mapping[str, Any]) -> Tensor:
    """Relative L2 error of every head of a call against dense."""
    q, k, v = call.q[:1], call.k[:1], call.v[:1]
    try:
        return probe_sol(q, k, v, tau, **settings).error.relative_l2[0]
    except ValueError as error:
        raise ValueError(f"layer {call.layer}, step {call.step}: {error}") from error


def block_boxes(grid: TokenGrid, block: int = BLOCK) -> NDArray[np.int16]:
    """Half-open (t, h, w) box of every block, int16 ``[N, 6]`` as t0 t1 h0 h1 w0 w1; -1 = text."""
    places = grid.coordinates.numpy()
    starts = np.arange(0, len(places), block)
    high = np.maximum.reduceat(places, starts, axis=0) + 1
    low = np.minimum.reduceat(np.where(places < 0, 1 << 20, places), starts, axis=0)
    boxes = np.stack([low, high], axis=2).reshape(len(starts), 6)
    return np.where(high[:, :1] > 0, boxes, -1).astype(np.int16)


def token_blocks(grid: TokenGrid, block: int = BLOCK) -> NDArray[np.uint16]:
    """Block of every video token, uint16 ``[T * H * W]`` in raster order."""
    if grid.tokens > block << 16:
        raise ValueError(f"block={block}: {grid.tokens} tokens make more than 65,536 blocks")
    places = grid.inverse[grid.prefix : grid.prefix + grid.video_tokens] // block
    return places.numpy().astype(np.uint16)
