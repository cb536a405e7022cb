"""Which steps and layers stay dense, against quality: a grid of Sol-Attn schedules on one video.

A schedule keeps the first steps (the noisiest) and the first layers dense. The server names the
first by a denoising time, so the same number of steps is another cutoff for another schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from blockattn import checks
from workbench.config import AttentionConfig, SolAttnConfig
from workbench.models import VideoDiT
from workbench.sample.run import Row, SampleResult, Tick, run
from workbench.sample.settings import SampleSettings
from workbench.sample.variants import BASELINE, CONTROL, Variant

Cell = tuple[int, int]  # dense layers, dense steps


@dataclass(frozen=True)
class ScheduleGrid:
    """Every schedule of the grid, sampled and compared with dense.

    Attributes:
        dense_layers, dense_steps: rows and columns.
        result: all runs, with the baseline and the control.
    """

    dense_layers: tuple[int, ...]
    dense_steps: tuple[int, ...]
    result: SampleResult

    def row(self, layers: int, steps: int) -> Row:
        """The run of one cell (of the first seed)."""
        return self.result.of(name_of(layers, steps))[0]

    @property
    def control(self) -> Row:
        """The second exact implementation."""
        return self.result.of(CONTROL)[0]

    @property
    def sparse(self) -> list[Row]:
        """All cells, row by row."""
        return [self.row(*cell) for cell in cells(self.dense_layers, self.dense_steps)]

    def psnr(self) -> list[list[float]]:
        """dB, a list for each number of dense layers."""
        return self._table(lambda row: row.quality.psnr)

    def density(self) -> list[list[float]]:
        """Mean delivered density, dense calls included."""
        return self._table(lambda row: row.sampled.density)

    def _table(self, value: Callable[[Row], float]) -> list[list[float]]:
        return [
            [value(self.row(layers, steps)) for steps in self.dense_steps]
            for layers in self.dense_layers
        ]


def schedule_grid(
    model: VideoDiT,
    settings: SampleSettings,
    *,
    dense_layers: Sequence[int],
    dense_steps: Sequence[int],
    tau: float = 1.0,
    tick: Tick = lambda label: None,
) -> ScheduleGrid:
    """Samples Sol-Attn with every pair of numbers of dense layers and dense steps.

    Args:
        model: the video model.
        settings: what to sample.
        dense_layers: how many of the first layers stay dense, below the model's depth.
        dense_steps: how many of the first steps stay dense, below the number of steps.
        tau: of all of them.
        tick: as of :func:`workbench.sample.run.run`.

    Raises:
        TypeError, ValueError: a number that leaves nothing sparse, or is given twice.
    """
    _check("dense_layers", dense_layers, model.config.depth - 1)
    _check("dense_steps", dense_steps, settings.steps - 1)
    first = [Variant(BASELINE, role="baseline"), Variant(CONTROL, role="control")]
    schedules = [
        Variant(name_of(*cell), _config(cell, settings.times, tau))
        for cell in cells(dense_layers, dense_steps)
    ]
    result = run({"base": model}, settings, [*first, *schedules], tick=tick)
    return ScheduleGrid(tuple(dense_layers), tuple(dense_steps), result)


def cells(dense_layers: Sequence[int], dense_steps: Sequence[int]) -> list[Cell]:
    """All pairs, row by row."""
    return [(layers, steps) for layers in dense_layers for steps in dense_steps]


def name_of(layers: int, steps: int) -> str:
    """Name of the variant of a cell."""
    return f"layers_{layers}_steps_{steps}"


def cutoff_of(times: Sequence[float], dense_steps: int) -> float | None:
    """The ``disabled_until_timestep`` that keeps the first steps dense; ``None`` for none.

    Args:
        times: falling denoising times of the steps.
        dense_steps: how many, at most all.
    """
    checks.integer("dense_steps", dense_steps, maximum=len(times))
    return times[dense_steps - 1] if dense_steps else None


def _config(cell: Cell, times: Sequence[float], tau: float) -> AttentionConfig:
    layers, steps = cell
    sparse = SolAttnConfig(
        tau=tau,
        disabled_until_timestep=cutoff_of(times, steps),
        dense_layers=tuple(range(layers)) or None,
    )
    return AttentionConfig(sparse_attention_config=sparse)


def _check(name: str, counts: Sequence[int], maximum: int) -> None:
    for count in counts:
        checks.integer(name, count, maximum=maximum)
    if not counts or len(set(counts)) != len(counts):
        raise ValueError(f"{name}={list(counts)!r}: must be at least one number, without repeats")
