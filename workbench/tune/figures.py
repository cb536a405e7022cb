"""The figures of a run folder, from the functions of :mod:`workbench.views`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure, SubFigure
from matplotlib.image import imread, imsave

from blockattn import BlockRoute
from workbench import decisions
from workbench.rows import query_places
from workbench.tune.rows import Row
from workbench.tune.run import TuneResult
from workbench.views import (
    draw_curve,
    draw_frames,
    draw_route,
    draw_rows,
    draw_skip,
    frames_size,
    heatmap,
    new_figure,
    save,
    to_png,
)
from workbench.views.style import DPI

XLABEL = {
    "tau": "tau (standard deviations above the mean score)",
    "threshold": "log2(lambda), lambda = threshold_scale_factor / Sk",
}


def write_figures(result: TuneResult, folder: Path) -> None:
    """Every figure of the run as PNG, and `overview.png`, the most telling ones on a page."""
    for name, draw in FIGURES.items():
        save(draw(result), folder / f"{name}.png")
    imsave(folder / "overview.png", stack([summary(result), frames(result)]))


def summary(result: TuneResult) -> Figure:
    """Curve, error and the worst head's map side by side, as wide as the frames picture."""
    figure = Figure(figsize=(frames_size((1, 1, 1))[0], 6.6), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subfigures(1, 2, squeeze=False, width_ratios=(1.0, 1.15))[0]
    upper, lower = left.subplots(2, 1)
    draw_density(upper, result)
    draw_error(lower, result)
    draw_map(right, result)
    return figure


def stack(figures: Sequence[Figure]) -> np.ndarray:
    """Pictures below each other on white, uint8 ``[height, width, 3]``."""
    pictures = [imread(BytesIO(to_png(figure)))[..., :3] for figure in figures]
    width = max(picture.shape[1] for picture in pictures)
    padded = [
        np.pad(picture, ((0, 0), (0, width - picture.shape[1]), (0, 0)), constant_values=1.0)
        for picture in pictures
    ]
    return (255 * np.concatenate(padded)).round().astype(np.uint8)


def curve(result: TuneResult) -> Figure:
    """Density of every head at every value of the knob, from the one pass."""
    figure = new_figure(6.6, 4.2)
    draw_density(figure.subplots(), result)
    return figure


def error(result: TuneResult) -> Figure:
    """Measured error of every head at the values tried."""
    figure = new_figure(6.6, 4.2)
    draw_error(figure.subplots(), result)
    return figure


def route(result: TuneResult) -> Figure:
    """Map of the head with the largest error at the chosen value."""
    figure = new_figure(6.2, 6.4)
    draw_map(figure, result)
    return figure


def frames(result: TuneResult) -> Figure:
    """What the query block in the middle of the video attends exactly, in the worst head."""
    row, grid = result.worst()[0], result.capture.grid
    prepared = _prepared(result, row)
    routed = result.method.knob == "tau"
    if routed:
        exact = prepared.route(row.value)
    else:
        exact = prepared.reachable - prepared.skipped(row.value)
    block = exact.block[0]
    places = _places(result, exact)
    wanted = (grid.prefix + grid.video_tokens // 2) // block
    at = min(range(len(places)), key=lambda n: abs(places[n] - wanted))
    middle = places[at]
    selected = decisions.selected_tokens(
        exact.dense()[row.batch, _held(result, row), at], grid, block
    )
    figure = new_figure(*frames_size(grid.shape))
    draw_frames(
        figure,
        selected,
        decisions.own_tokens(middle, grid, block),
        result.capture.video,
        title=f"{_title(result, row)}, query {'block' if routed else 'tile'} {middle}",
        rest="approximate" if routed else "skipped",
    )
    return figure


def draw_density(ax: Axes, result: TuneResult) -> None:
    """The one-pass curve with the chosen point."""
    place, line = result.method.position, result.choice.line
    draw_curve(
        ax,
        [place(value) for value in result.curve.values],
        result.curve.per_head.flatten(0, -2),
        (place(line.value), line.density),
        xlabel=XLABEL[result.method.knob],
        title=f"{_origin(result)}{result.method.algorithm}: density of every head, from one pass",
    )


def draw_error(ax: Axes, result: TuneResult) -> None:
    """Errors of the real calls with the chosen point."""
    place, line = result.method.position, result.choice.line
    values = sorted({*result.values, line.value})
    rows = [row for row in result.rows if row.value != line.value] + result.choice.rows
    heads = sorted({_where(row) for row in rows})
    found = {(_where(row), row.value): row.relative_l2 for row in rows}
    draw_curve(
        ax,
        [place(value) for value in values],
        np.array([[found[head, value] for value in values] for head in heads]),
        (place(line.value), line.error),
        xlabel=XLABEL[result.method.knob],
        ylabel="relative L2 error against dense",
        ylim=None,
        title=f"{_origin(result)}{result.method.algorithm}: error of every head, from real calls",
    )
    ax.set_ylim(bottom=0)


def draw_map(figure: Figure | SubFigure, result: TuneResult) -> None:
    """Routing or skip map of the worst head with its line of text."""
    row, blocks = result.worst()[0], result.capture.query_blocks
    prepared, head = _prepared(result, row), _held(result, row)
    ax = figure.subplots()
    if result.method.knob == "tau":
        states = decisions.classify(prepared, row.value, row.batch, head, blocks)
        edges = decisions.frame_edges(result.capture.grid)
        if blocks is not None:
            exact = states != decisions.Decision.APPROXIMATE
            draw_rows(ax, exact, blocks, _title(result, row))
        else:
            draw_route(ax, states, _title(result, row), frame_edges=edges)
        text = decisions.describe(states)
    else:
        dropped = prepared.skipped(row.value)
        states = decisions.skip_states(dropped, prepared.reachable, row.batch, head)
        if blocks is not None:
            exact, places = states == decisions.TileState.COMPUTED, _places(result, dropped)
            draw_rows(ax, exact, places, _title(result, row), what="tile", rest="skipped")
        else:
            draw_skip(ax, states, _title(result, row))
        text = decisions.describe_skip(states)
    figure.supxlabel("\n".join(wrap(text, 92)), x=0.02, ha="left", fontsize=8)


def heat(quantity: Callable[[Row], float], label: str) -> Callable[[TuneResult], Figure]:
    """A quantity at the chosen value over layer x step, and over (layer, step) x head."""

    def draw(result: TuneResult) -> Figure:
        rows = result.choice.rows
        layers, steps = (sorted({pick(row) for row in rows}) for pick in (_layer, _step))
        heads = sorted({(row.batch, row.head) for row in rows})
        entries = sorted({(row.layer, row.step) for row in rows})
        means = _means(rows, quantity, lambda r: (r.layer, r.step))
        single = _means(rows, quantity, lambda r: (r.layer, r.step, r.batch, r.head))
        by_step = [[means.get((a, b), np.nan) for b in steps] for a in layers]
        by_head = [[single[(*entry, *head)] for head in heads] for entry in entries]
        figure = new_figure(10.0, max(2.9, 1.6 + 0.42 * len(entries)))
        left, right = figure.subplots(1, 2)
        flat = [value for line in by_head for value in line]
        limits = (min(flat), max(flat))
        heatmap(left, by_step, layers, steps, label, limits=limits, title="mean over heads")
        names = [f"{layer}, {step}" for layer, step in entries]
        columns = [str(head) if not batch else f"{head}/{batch}" for batch, head in heads]
        heatmap(
            right,
            by_head,
            names,
            columns,
            label,
            limits=limits,
            row_label="layer, step",
            column_label="head",
            title=f"every head at {result.method.word} = {result.choice.value:.4g}",
        )
        return figure

    return draw


FIGURES: dict[str, Callable[[TuneResult], Figure]] = {
    "curve": curve,
    "error": error,
    "route": route,
    "frames": frames,
    "heatmap_density": heat(lambda row: row.density_delivered, "density"),
    "heatmap_error": heat(lambda row: row.relative_l2, "relative L2 error"),
}


def _prepared(result: TuneResult, row: Row) -> Any:
    data = result.capture.load_rows(row.layer, row.step).to(result.device)
    return result.method.prepare(data.q, data.k, data.query_blocks)


def _held(result: TuneResult, row: Row) -> int:
    """Where the capture holds the head of a row."""
    return result.capture.head_indices.index(row.head)


def _places(result: TuneResult, route: BlockRoute) -> list[int]:
    """Index in the whole map of every row of a route."""
    blocks = result.capture.query_blocks
    return list(range(route.grid[0])) if blocks is None else query_places(blocks, route.block[0])


def _means(rows: list[Row], quantity: Callable[[Row], float], key: Callable[[Row], tuple]) -> dict:
    groups: dict[tuple, list[float]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(quantity(row))
    return {name: float(np.mean(values)) for name, values in groups.items()}


def _origin(result: TuneResult) -> str:
    """Made-up inputs are called so on every picture."""
    return "synthetic, " if result.capture.source == "synthetic" else ""


def _title(result: TuneResult, row: Row) -> str:
    return (
        f"{_origin(result)}layer {row.layer}, step {row.step}, head {row.head} (largest error), "
        f"{result.method.word} {row.value:.4g}"
    )


def _where(row: Row) -> tuple[int, int, int, int]:
    return row.layer, row.step, row.batch, row.head


def _layer(row: Row) -> int:
    return row.layer


def _step(row: Row) -> int:
    return row.step
