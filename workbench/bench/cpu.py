"""What the project claims about speed, measured on this machine: `workbench bench cpu`.

Every figure is a ratio of medians of interleaved repeats in one process, or a time on this machine,
next to what it must reach and what it aims at. Before anything is timed, the results are compared
with the float64 reference at a smaller size.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from blockattn import (
    TokenGrid,
    attend,
    checks,
    skip_gaps,
    skip_softmax_attention,
    sol_attention,
    sol_scores,
)
from workbench.bench.targets import verdict
from workbench.bench.timing import interleaved, ratio
from workbench.provenance import provenance
from workbench.synthetic import synthetic_qkv

CPU_ROWS = (10, 11, 12, 15)
GRID = (8, 32, 32)
HEADS, HEAD_DIM, POINTS = 2, 128, 200
DENSITY = 0.16  # what row 10 is stated at
QKV = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Row:
    """One figure against its target.

    Attributes:
        number: row of the table of targets.
        quantity: what was measured.
        measured, must, aim: in ``unit``; ``must`` is the requirement, ``aim`` the wish.
        unit: ``x`` (ratio of times), ``ms`` or ``s``.
        more_is_better: whether larger figures are better.
        setting: shape, dtype, delivered density and what was compared.
        samples: every repeat of what was timed, in seconds, by name.
    """

    number: int
    quantity: str
    measured: float
    must: float
    aim: float
    unit: str
    more_is_better: bool
    setting: str
    samples: Mapping[str, Sequence[float]]

    @property
    def verdict(self) -> str:
        """``aim``, ``must`` or ``missed``: the best level that the figure reaches."""
        return verdict(self.measured, self.must, self.aim, more_is_better=self.more_is_better)


def bench_cpu(
    rows: Sequence[int] = CPU_ROWS,
    *,
    grid: tuple[int, int, int] = GRID,
    repeats: int = 9,
    say: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """Measures rows of the table of targets on the CPU, after a check of the results.

    Args:
        rows: which of 10, 11, 12 and 15.
        grid: latent frames, rows and columns of the video; 8,192 tokens by default.
        repeats: interleaved repeats behind each median.
        say: called with a line before each step.

    Raises:
        TypeError, ValueError: a row that is not measured here, or repeats below 1.
        RuntimeError: a result differs from the reference; nothing is timed then.
    """
    unknown = sorted(set(rows) - set(CPU_ROWS))
    if unknown or not rows:
        raise ValueError(f"rows={list(rows)}: must be some of {', '.join(map(str, CPU_ROWS))}")
    checks.integer("repeats", repeats, minimum=1)
    say("comparing results with the reference")
    check_parity()
    parts = {10: speed_of_sol, 11: cost_of_curves, 12: time_of_slider, 15: time_of_imports}
    found: list[Row] = []
    for number in sorted(set(rows)):
        say(f"measuring row {number}")
        found += parts[number](TokenGrid(grid), repeats)
    return found


def check_parity(grid: tuple[int, int, int] = (4, 16, 16)) -> dict[str, float]:
    """Largest error of eager against the float64 reference for what is timed, by name.

    Raises:
        RuntimeError: an error above 1e-5 of the largest output, or another skip map.
    """
    data = _smooth(TokenGrid(grid))
    wide = (data[0].double(), data[1].double(), data[2].double())
    errors = {}
    for name, tau in (("every block exact", -1000.0), ("sol_attn", 1.0)):
        truth = sol_attention(*wide, tau=tau, impl="reference")
        out = sol_attention(*data, tau=tau, impl="eager").double()
        errors[name] = float((out - truth).abs().max() / truth.abs().max())
    for name, error in errors.items():
        if not error <= 1e-5:
            raise RuntimeError(f"{name}: error {error:.2e} of the largest output, above 1e-5")
    _, trace = skip_softmax_attention(*data, threshold=0.1, impl="eager", return_trace=True)
    differing = trace.skipped.differing(skip_gaps(data[0], data[1]).skipped(0.1))
    if differing:
        raise RuntimeError(f"skip_softmax: {differing} tiles differ from the one-pass skip map")
    return errors


def speed_of_sol(grid: TokenGrid, repeats: int) -> list[Row]:
    """Row 10: Sol-Attn with routing and summaries, over torch's attention."""
    found = []
    for kind, make in (("random", _random), ("smooth synthetic", _smooth)):
        data = make(grid)
        tau, density = _tau_for(data, DENSITY)
        samples = interleaved(
            {
                "sdpa": lambda data=data: _sdpa(*data),
                "sol_attn": lambda data=data, tau=tau: sol_attention(*data, tau=tau, impl="eager"),
            },
            repeats,
        )
        speed = ratio(samples, "sdpa", "sol_attn")
        bound = 1 / (density + 1 / 64)
        setting = f"{_shape(data)}, tau {tau:.2f}, density {density:.3f}, bound {bound:.1f} x"
        quantity = f"Sol-Attn over torch SDPA, {kind}"
        found.append(Row(10, quantity, speed, 1.8, 3.5, "x", True, setting, samples))
    return found


def cost_of_curves(grid: TokenGrid, repeats: int) -> list[Row]:
    """Row 11: a curve of 200 points from one pass, over a dense pass of eager, torch SDPA."""
    q, k, v = _smooth(grid)
    taus = torch.linspace(0.0, 3.0, POINTS).tolist()
    thresholds = torch.logspace(-4, 0, POINTS).clamp(max=1.0).tolist()
    samples = interleaved(
        {
            "dense": lambda: attend(q, k, v, impl="eager"),
            "taus": lambda: sol_scores(q, k).density(taus),
            "thresholds": lambda: skip_gaps(q, k).sparsity(thresholds),
        },
        repeats,
    )
    setting = f"{_shape((q, k, v))}, {POINTS} points, smooth synthetic"
    targets = {"taus": (0.1, 0.02), "thresholds": (0.8, 0.55)}
    return [
        Row(
            11,
            f"curve over all {name}, share of a dense pass (torch SDPA)",
            ratio(samples, name, "dense"),
            *targets[name],
            "x",
            False,
            setting,
            {part: samples[part] for part in (name, "dense")},
        )
        for name in targets
    ]


def time_of_slider(grid: TokenGrid, repeats: int) -> list[Row]:
    """Row 12: a new tau: the mask, its density and the curve, from scores that are there."""
    data = _smooth(grid)
    scores = sol_scores(data[0], data[1])
    taus = torch.linspace(0.0, 3.0, POINTS).tolist()

    def move() -> tuple[Tensor, Tensor, Tensor]:
        route = scores.route(1.0)
        return route.dense(), route.density_per_head(), scores.density(taus)

    samples = interleaved({"slider": move}, max(repeats, 20))
    measured = 1e3 * statistics.median(samples["slider"])
    setting = f"{_shape(data)}, mask, density and a curve of {POINTS} points"
    return [Row(12, "moving the tau slider", measured, 50, 16, "ms", False, setting, samples)]


def time_of_imports(grid: TokenGrid, repeats: int) -> list[Row]:
    """Row 15: importing the packages in new processes that have imported torch already."""
    found = []
    for module, must, aim in (("blockattn", 0.3, 0.1), ("workbench", 0.8, 0.4)):
        samples = {module: [_import_seconds(module) for _ in range(min(repeats, 5))]}
        measured = statistics.median(samples[module])
        quantity = f"import {module} after torch"
        setting = f"new process, median of {len(samples[module])}"
        found.append(Row(15, quantity, measured, must, aim, "s", False, setting, samples))
    return found


def report(rows: Sequence[Row], command: Sequence[str] | None = None) -> dict[str, Any]:
    """Rows with their verdicts and samples, the machine, versions and load, ready for JSON."""
    load = os.getloadavg() if hasattr(os, "getloadavg") else None
    return {
        "rows": [{**asdict(row), "verdict": row.verdict} for row in rows],
        "load_average": load,
        **provenance(command, {}),
    }


def show(rows: Sequence[Row], made: Mapping[str, Any]) -> None:
    """Prints the rows as a table, and below it where they were measured."""
    from rich.console import Console
    from rich.table import Table

    table = Table("row", "quantity and setting", "measured", "must", "aim", "reached")
    for row in rows:
        figures = (f"{value:.3g} {row.unit}" for value in (row.measured, row.must, row.aim))
        what = f"{row.quantity}\n[dim]{row.setting}[/dim]"
        table.add_row(str(row.number), what, *figures, row.verdict, end_section=True)
    console = Console()
    console.print(table)
    device, versions = made["device"], made["versions"]
    line = f"{device['name']}, {device['cores']} cores, {device['threads']} threads"
    line += f"; torch {versions['torch']}, Python {made['python']}"
    if made["load_average"] is not None:
        line += f"; load average {made['load_average'][0]:.1f}"
    console.print(line, highlight=False)


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v).transpose(1, 2)


def _random(grid: TokenGrid) -> QKV:
    generator = torch.Generator().manual_seed(0)
    shape = (1, grid.tokens, HEADS, HEAD_DIM)
    q, k, v = (torch.randn(shape, generator=generator) for _ in range(3))
    return q, k, v


def _smooth(grid: TokenGrid) -> QKV:
    """Synthetic fields in the order of 4 x 4 x 4 tiles, so that a block is a compact box."""
    ordered = TokenGrid(grid.shape, order="tile")
    made = synthetic_qkv(ordered, heads=HEADS, head_dim=HEAD_DIM, dtype=torch.float32)
    return made.q, made.k, made.v


def _tau_for(data: QKV, density: float) -> tuple[float, float]:
    """Smallest of 301 taus whose density is at most the given one, and its density."""
    scores = sol_scores(data[0], data[1])
    taus = torch.linspace(0.0, 3.0, 301).tolist()
    curve = scores.density(taus).mean(dim=(0, 1)).tolist()
    return next((pair for pair in zip(taus, curve) if pair[1] <= density), (taus[-1], curve[-1]))


def _shape(data: QKV) -> str:
    q = data[0]
    dtype = str(q.dtype).removeprefix("torch.")
    return f"B {q.shape[0]}, T {q.shape[1]:,}, H {q.shape[2]}, D {q.shape[3]}, {dtype}"


def _import_seconds(module: str) -> float:
    """Seconds that the import itself takes, in a process that has torch already."""
    code = (
        "import time, torch; start = time.perf_counter(); "
        f"import {module}; print(time.perf_counter() - start)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    return float(done.stdout)
