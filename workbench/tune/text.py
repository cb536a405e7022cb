"""What `workbench tune` prints: the table, what ran, the choice, the worst heads, the warnings."""

from __future__ import annotations

import math

from rich.console import Console
from rich.table import Table
from rich.text import Text

from blockattn.layout import BLOCK, num_blocks
from workbench.terminal import plain_table
from workbench.tune.rows import Line
from workbench.tune.run import TuneResult

WORST = 8  # heads listed


def show(result: TuneResult, console: Console) -> None:
    """Prints everything a reader needs to judge the choice."""
    console.print(_input(result), soft_wrap=True)
    console.print(settings_table(result))
    for text in (*_meaning(result), *_what_ran(result)):
        console.print(text, style="dim", soft_wrap=True, highlight=False)
    console.print()
    console.print(_choice(result), soft_wrap=True)
    console.print(worst_table(result))
    for warning in result.warnings:
        line = Text("warning: ", style="bold yellow")
        console.print(line.append(warning, style="default"), soft_wrap=True)


def settings_table(result: TuneResult) -> Table:
    """A row for each value, the chosen one marked, or added where it lies."""
    knob = result.method.knob
    entries = sorted({(row.layer, row.step) for row in result.rows})
    heads = len({(row.batch, row.head) for row in result.rows})
    title = (
        f"{result.method.algorithm}: mean over {len(entries)} (layer, step) entries x {heads} heads"
    )
    table = plain_table(title)
    table.add_column("")
    for name in _knob_columns(result):
        table.add_column(name, justify="right")
    table.add_column("density\nmean \\[min..max]", justify="right")
    if knob == "tau":
        table.add_column("by tau\nalone", justify="right")
    for name in ("error\nmean", "error\nmax", "time ratio\nestimated", "time ratio\nmeasured"):
        table.add_column(name, justify="right")
    for line in result.table():
        chosen = line.value == result.choice.value
        cells = _cells(result, line)
        table.add_row("->" if chosen else "", *cells, style="bold" if chosen else None)
    return table


def _knob_columns(result: TuneResult) -> list[str]:
    if result.method.knob == "tau":
        return ["tau"]
    return ["lambda", "log2", "threshold_\nscale_factor"]


def knob_cells(result: TuneResult, value: float) -> list[str]:
    """The value in every unit in which it is used."""
    if result.method.knob == "tau":
        return [f"{value:.5g}"]
    return [f"{value:.4g}", f"{math.log2(value):.2f}", f"{value * result.keys:.4g}"]


def _cells(result: TuneResult, line: Line) -> list[str]:
    cells = knob_cells(result, line.value)
    cells.append(f"{line.density:.3f} [{line.density_min:.3f}..{line.density_max:.3f}]")
    if line.density_alone is not None:
        cells.append(f"{line.density_alone:.3f}")
    measured = "not measured" if line.ratio_measured is None else f"{line.ratio_measured:.2f}"
    return [
        *cells,
        f"{line.error:.4f}",
        f"{line.error_max:.4f}",
        f"{line.ratio_estimated:.2f}",
        measured,
    ]


def worst_table(result: TuneResult) -> Table:
    """Heads at the chosen value, largest error first."""
    table = plain_table(f"Worst heads at {result.method.word} = {result.choice.value:.5g}")
    for name in ("layer", "step", "time", "head", "density", "relative L2", "cosine", "max abs"):
        table.add_column(name, justify="right")
    for row in result.worst()[:WORST]:
        where = (str(row.layer), str(row.step), f"{row.time:.3f}", _head(row.batch, row.head))
        errors = (f"{row.relative_l2:.4f}", f"{row.cosine:.5f}", f"{row.max_abs:.3g}")
        table.add_row(*where, f"{row.density_delivered:.3f}", *errors)
    return table


def _head(batch: int, head: int) -> str:
    return str(head) if batch == 0 else f"{head} (sample {batch})"


def _input(result: TuneResult) -> Text:
    capture = result.capture
    shape = " x ".join(map(str, capture.grid.shape))
    text = Text(capture.title, style="bold")
    text.append(
        f"\n{result.keys:,} tokens (grid {shape}), {num_blocks(result.keys)} blocks of {BLOCK}, "
        f"{capture.heads} heads of {capture.head_dim}, {result.dtype} on {result.device}\n",
        style="default",
    )
    return text


def _meaning(result: TuneResult) -> list[str]:
    """One line for each quantity: what it is and in which unit."""
    exact = "128 x 128 tiles" if result.method.knob == "threshold" else "64 x 64 blocks"
    if result.method.knob == "tau":
        formula = "density + 1/64"
    else:
        formula = "(1 + density) / 2, as q k^T is computed everywhere"
    lines = [
        f"density: exact {exact} / all of them, as delivered. "
        "error: relative L2 of the real sparse call against dense.",
        f"time ratio: sparse / dense; estimated = {formula} (matrix products alone).",
    ]
    if result.settings.repeats and result.capture.query_blocks is None:
        lines.append(
            f"measured = medians of {result.settings.repeats} interleaved calls on this machine, "
            "routing included, dense by its fastest implementation here; that of eager is torch "
            "SDPA."
        )
    return lines


def _what_ran(result: TuneResult) -> list[str]:
    calls = ", ".join(f"{name} ({count} calls)" for name, count in result.ran.calls.items())
    asked = result.settings.impl
    lines = [f"ran: {calls}" + ("" if asked == "auto" else f", as --impl {asked} asked for")]
    return lines + [f"not {reason}" for reason in result.ran.reasons]


def _choice(result: TuneResult) -> Text:
    choice, line = result.choice, result.choice.line
    named = dict(zip(_knob_columns(result), knob_cells(result, choice.value)))
    value = ", ".join(f"{name} = {cell}".replace("\n", "") for name, cell in named.items())
    text = Text(f"Chosen: {value}", style="bold")
    text.append(f"\n{choice.why}\n", style="default")
    text.append(f"verified by a real run: {_requested(result, line)}", style="default")
    return text


def _requested(result: TuneResult, line: Line) -> str:
    density, error = f"density {line.density:.4f}", f"mean error {line.error:.4f}"
    if result.settings.target_density is not None:
        density += f" delivered, {result.settings.target_density:.4f} requested"
    if result.settings.target_error is not None:
        error += f" delivered, at most {result.settings.target_error:.4f} requested"
    return f"{density}; {error}"
