"""`workbench tune`: density, true error and time of every setting on a capture, and a choice.

Plain functions: :func:`run` measures and chooses, :mod:`workbench.tune.text` prints,
:mod:`workbench.tune.report` writes the run folder. Nothing here knows a terminal or a file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from blockattn.layout import num_blocks
from workbench.capture import Capture
from workbench.config import AttentionConfig, VisualGenConfig
from workbench.curves import Curve
from workbench.tune.choice import for_density, for_error, towards_dense
from workbench.tune.methods import LADDER, Method
from workbench.tune.rows import Line, Row, errors_of, summarise
from workbench.tune.settings import TuneSettings
from workbench.tune.sweep import Ran, Sweep, Tick, entries_of

DEFAULT_TAU = 1.0  # the method's own default (sol_attn specification section 9)
DEFAULT_SKIP_ERROR = 0.05  # SkipSoftmax has no default of its own; this is this command's
TRIES = 4  # settings run on the way to a target error
CLOSE = 0.98  # share of the allowed error that is close enough


@dataclass(frozen=True)
class Choice:
    """The value taken: what was asked for, in words, and the rows of the run that verified it."""

    value: float
    why: str
    rows: list[Row]

    @property
    def line(self) -> Line:
        return summarise(self.rows)


@dataclass(frozen=True)
class TuneResult:
    """Everything that was measured.

    Attributes:
        curve: density of every head at many values over the range tried, from the one pass.
        rows: one for each entry, head and value tried; the verifying run is in ``choice``.
        ran, warnings: what served the calls, and what a reader must not miss.
    """

    settings: TuneSettings
    method: Method
    capture: Capture
    device: str
    dtype: str
    values: tuple[float, ...]
    curve: Curve
    rows: list[Row]
    choice: Choice
    ran: Ran
    warnings: list[str]

    @property
    def keys(self) -> int:
        """Sk, tokens of the key sequence."""
        return self.capture.grid.tokens

    def lines(self) -> list[Line]:
        """One for each value, in ascending order."""
        return [summarise([r for r in self.rows if r.value == value]) for value in self.values]

    def table(self) -> list[Line]:
        """As :meth:`lines`, and the chosen value by its verifying run, listed or not."""
        found = {line.value: line for line in (*self.lines(), self.choice.line)}
        return [found[value] for value in sorted(found)]

    def config(self) -> VisualGenConfig:
        """The serving configuration of the chosen value."""
        sparse = self.method.config(self.choice.value, self.keys, **self.settings.serving())
        attention = AttentionConfig(backend="CUTEDSL", sparse_attention_config=sparse)
        return VisualGenConfig(attention_config=attention)

    def worst(self) -> list[Row]:
        """Heads at the chosen value, largest relative error first."""
        return sorted(self.choice.rows, key=lambda row: row.relative_l2, reverse=True)


def run(capture: Capture, settings: TuneSettings, *, tick: Tick = lambda label: None) -> TuneResult:
    """Measures every value on every (layer, step) of the capture, chooses one and verifies it.

    Args:
        capture: recorded or synthetic q, k, v.
        settings: what to try.
        tick: called with a label before each unit of work; there are :func:`units` of them, and a
            few more for a target error.

    Raises:
        ValueError, TypeError, UnsupportedError: settings that do not fit the capture or machine.
    """
    sweep = Sweep(capture, settings, tick)
    values = settings.values or sweep.method.default_values(list(sweep.prepared.values()))
    rows = [row for value in values for row in sweep.measure(value)]
    choice = _choose(sweep, values, rows)
    result = TuneResult(
        settings=settings,
        method=sweep.method,
        capture=capture,
        device=str(sweep.device),
        dtype=sweep.dtype,
        values=tuple(values),
        curve=sweep.curve([*values, choice.value]),
        rows=rows,
        choice=choice,
        ran=sweep.ran,
        warnings=[],
    )
    return replace(result, warnings=warnings_of(result))


def units(capture: Capture, settings: TuneSettings) -> int:
    """Units of work of :func:`run`: for each entry one pass, every value, one verification."""
    values = LADDER if settings.values is None else len(settings.values)
    return len(entries_of(capture, settings)) * (values + 2)


def warnings_of(result: TuneResult) -> list[str]:
    """What a reader must not miss: settings that ran dense, or that left nothing to the knob."""
    knob, chosen = result.method.word, result.choice.line
    found = []
    lines = result.table()
    dense = [line.value for line in lines if line.density_min == 1.0]
    if dense:
        found.append(f"ran dense (density 1.000) at {knob} {_listing(dense)}")
    if len(dense) == len(lines):
        found.append(f"NOTHING WAS SKIPPED at any {knob} tried: the error and times are of dense")
    alone = [line.value for line in lines if line.density_alone == 0.0]
    if alone:
        found.append(f"no block passes by itself (band and sink only) at {knob} {_listing(alone)}")
    if chosen.density_min == 1.0:
        found.append(f"the chosen {knob} = {chosen.value:g} runs dense: nothing is gained by it")
    idle = sum(row.density_delivered == 1.0 for row in result.choice.rows)
    if 0 < idle < len(result.choice.rows):
        total = len(result.choice.rows)
        found.append(f"{idle} of {total} heads run dense at the chosen {knob}")
    absent = sorted(set(result.settings.dense_layers or ()) - set(result.capture.layers))
    if absent:
        found.append(
            f"dense_layers {', '.join(map(str, absent))}: exported, but the capture holds only "
            f"layers {', '.join(map(str, result.capture.layers))}, so nothing here depends on them"
        )
    if result.capture.query_blocks is not None:
        count, total = len(result.capture.query_blocks), num_blocks(result.keys)
        found.append(
            f"density and error are of {count} of {total:,} query blocks, all that the capture "
            "holds; times are not measured, since a few rows would give wrong ones"
        )
    ratios = [line.ratio_measured for line in lines if line.ratio_measured is not None]
    if ratios and min(ratios) >= 1:
        found.append(
            f"no {knob} tried was faster than dense here ({result.keys:,} tokens on "
            f"{result.device}; other work on this machine counts too)"
        )
    if result.settings.sink_tokens:
        found.append(
            "the exported configuration has no field for sink_tokens; the server ignores it"
        )
    return found


def _choose(sweep: Sweep, values: Sequence[float], rows: list[Row]) -> Choice:
    settings, method = sweep.settings, sweep.method
    if settings.target_density is not None:
        span = method.span(list(sweep.prepared.values()))
        target = settings.target_density
        value = for_density(
            sweep.passes(), target, span, method.value, name=method.knob, sparsest=method.sparsest
        )
        why = f"sparsest setting with mean density at least the requested {target:g}"
        return Choice(value, why, sweep.measure(value))
    if settings.target_error is not None:
        why = f"sparsest setting with mean error at most {settings.target_error:g}"
        return _within_error(sweep, values, rows, settings.target_error, why)
    if method.algorithm == "sol_attn":
        why = "the method's default; --target-density or --target-error choose another"
        return Choice(DEFAULT_TAU, why, sweep.measure(DEFAULT_TAU))
    why = (
        f"sparsest setting with mean error at most {DEFAULT_SKIP_ERROR:g} (this command's default, "
        "the method has none); --target-density or --target-error choose another"
    )
    if errors_of(rows, values)[0] > DEFAULT_SKIP_ERROR:
        why = f"densest setting tried: none has a mean error below {DEFAULT_SKIP_ERROR:g}"
        return Choice(values[0], why, sweep.measure(values[0]))
    return _within_error(sweep, values, rows, DEFAULT_SKIP_ERROR, why)


def _within_error(
    sweep: Sweep, values: Sequence[float], rows: list[Row], limit: float, why: str
) -> Choice:
    """Interpolates between the last good probe and the next, then bisects by real runs."""
    method = sweep.method
    positions = [method.position(value) for value in values]
    candidate, safe = for_error(positions, errors_of(rows, values), limit)
    if safe == len(values) - 1:
        why += f" (the sparsest tried; larger {method.word} may do as well)"
        return Choice(values[safe], why, sweep.measure(values[safe]))
    low, high, best = positions[safe], positions[safe + 1], None
    for _ in range(TRIES):
        value = max(towards_dense(method.value(candidate)), values[safe])
        measured = sweep.measure(value)
        reached = summarise(measured).error
        if reached <= limit:
            low, best = candidate, Choice(value, why, measured)
        else:
            high = candidate
        if CLOSE * limit <= reached <= limit:
            break
        candidate = (low + high) / 2
    return best or Choice(values[safe], why, sweep.measure(values[safe]))


def _listing(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.4g}" for value in values)
