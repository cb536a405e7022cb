"""Masks for the route viewer's tests: scores of blocks from smooth fields, any size, no q and k."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from blockattn import BlockRoute, BlockScores, TokenGrid
from blockattn.layout import num_blocks
from workbench.masks import Mask, MaskSet

SMALL = TokenGrid((8, 32, 32))  # 8,192 tokens, 128 x 128 blocks
LARGE = TokenGrid((25, 50, 80))  # 100,000 tokens, 1,563 x 1,563 blocks
BLOCK = 64


def field_scores(grid: TokenGrid, heads: range, seed: int, sink_blocks: int = 0) -> BlockScores:
    """Scores that fall with the distance in (t, h, w), plus noise; another scale a head."""
    count = num_blocks(grid.tokens, BLOCK)
    starts = torch.arange(count) * BLOCK
    place = grid.coordinates[starts].float() / torch.tensor(grid.shape)
    z, means = [], []
    for head in heads:
        generator = torch.Generator().manual_seed(1000 * seed + head)
        scale = 2 + 10 * torch.rand(3, generator=generator)
        noise = torch.randn(count, 8, generator=generator)
        wave = torch.cat([torch.cos(place * scale), torch.sin(place * scale), 0.4 * noise], dim=1)
        scores = wave @ wave.T
        means.append(scores.mean(dim=1))
        z.append((scores - means[-1][:, None]) / scores.std(dim=1, correction=0)[:, None])
    index = torch.arange(count)
    always = (index[:, None] - index[None, :]).abs() <= 1
    sink = (count - sink_blocks, count)
    always = (always | (index >= sink[0])[None, :]).expand(1, len(heads), count, count)
    route = BlockRoute.from_dense(always, seqlens=(grid.tokens, grid.tokens))
    mean = torch.stack(means)[None]
    return BlockScores(torch.stack(z)[None], mean, torch.ones_like(mean), route, sink, "exact")


def field_mask(grid: TokenGrid, heads: int, seed: int, tau: float, sink_blocks: int = 0) -> Mask:
    """The mask at tau, made head by head: the scores of all heads would not fit in memory."""
    ones = (
        Mask.of_scores(field_scores(grid, range(h, h + 1), seed, sink_blocks), tau)
        for h in range(heads)
    )
    first, *others = ones
    words = torch.cat([first.passing.words, *(one.passing.words for one in others)], dim=1)
    passing = BlockRoute(words, first.passing.block, first.passing.seqlens)
    return Mask(passing, first.band, first.sink, tau)


class Calls(Mapping[tuple[int, int], Mask]):
    """Masks made when they are asked for; a call whose layer is in `broken` cannot be read."""

    def __init__(self, entries, make, broken=()):
        self._entries, self._make, self._broken, self._kept = entries, make, broken, {}

    def __getitem__(self, entry: tuple[int, int]) -> Mask:
        if entry[0] in self._broken:
            raise OSError(f"capture file of layer {entry[0]} is gone")
        if entry not in self._kept:
            self._kept[entry] = self._make(*entry)
        return self._kept[entry]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def field_masks(
    grid: TokenGrid = SMALL,
    heads: int = 2,
    *,
    tau: float = 1.0,
    sink_blocks: int = 0,
    entries=((0, 0), (0, 8), (2, 0), (2, 8), (5, 8)),
    broken=(),
) -> MaskSet:
    """A set of calls, each of its own seed."""

    def seed(layer: int, step: int) -> int:
        return 100 * layer + step

    def scores(layer: int, step: int, chosen: range) -> BlockScores:
        return field_scores(grid, chosen, seed(layer, step), sink_blocks)

    def make(layer: int, step: int) -> Mask:
        return field_mask(grid, heads, seed(layer, step), tau, sink_blocks)

    masks = Calls(list(entries), make, broken)
    frames = torch.arange(2 * grid.shape[0] * 36 * 64 * 3) * 7 % 251
    video = frames.to(torch.uint8).reshape(2 * grid.shape[0], 36, 64, 3)
    # Any numbers: what counts is where the index shows them.
    errors = {(0, 0): torch.full((heads,), 0.25), (2, 8): torch.full((heads,), 0.75)}
    errors = {entry: error for entry, error in errors.items() if entry in entries}
    return MaskSet(grid, masks, "smooth fields of a test", scores, errors, video=video)


def skip_map() -> MaskSet:
    """A map without scores: 64 queries x 128 keys a block, text on both sides, tokens in cubes."""
    grid = TokenGrid((9, 20, 30), prefix=100, suffix=77, order="tile")
    shape = (1, 1, num_blocks(grid.tokens, 64), num_blocks(grid.tokens, 128))
    kept = torch.rand(shape, generator=torch.Generator().manual_seed(5)) < 0.3
    route = BlockRoute.from_dense(kept, block=(64, 128), seqlens=(grid.tokens, grid.tokens))
    return MaskSet(grid, {(0, 0): Mask.of_route(route, rest="skipped")}, "a skip map of a test")
