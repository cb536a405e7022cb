"""The knobs of ScheduleEditor; the cutoff has two handles, a fraction of time and a step count."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress

import ipywidgets as widgets

from blockattn import checks
from blockattn.sol import THRESHOLD_TYPES
from workbench.attention.phase import dense_steps
from workbench.config import SolAttnConfig
from workbench.config.fields import parse_layers
from workbench.models import denoising_times
from workbench.sample.schedules import cutoff_of
from workbench.schedule import Schedule
from workbench.widgets.entry import ROW

WIDE = {"layout": {"width": "98%"}, "style": {"description_width": "250px"}}
STEP = 0.001  # of the cutoff's slider
SMALL = {"layout": {"width": "190px"}, "style": {"description_width": "96px"}}


class ScheduleControls:
    """Widgets for the sampler's times, the dense phase, the dense layers and Sol-Attn's knobs."""

    def __init__(self, layers: int, steps: int, shift: float):
        self.layers = widgets.BoundedIntText(
            value=layers, min=1, max=512, description="Layers", **SMALL
        )
        self.steps = widgets.BoundedIntText(
            value=steps, min=1, max=1000, description="Steps", **SMALL
        )
        self.shift = widgets.BoundedFloatText(
            value=shift,
            min=0.05,
            max=100.0,
            step=0.5,
            description="Shift",
            tooltip="1 spaces the steps evenly in time; more puts more of them near the noise",
            **SMALL,
        )
        self.phase = widgets.Checkbox(
            value=True, description="dense phase at the start", indent=False
        )
        self.cutoff = widgets.FloatSlider(
            value=0.9,
            min=STEP,
            max=1.0,
            step=STEP,
            description="Cutoff (denoising time, 1 = noisiest)",
            readout_format=".3f",
            **WIDE,
        )
        self.dense_steps = widgets.IntSlider(
            value=1, min=1, max=steps, description="Dense steps (number)", **WIDE
        )
        self.dense_layers = widgets.Text(
            placeholder="none; such as 0,2-4",
            description="Dense layers",
            continuous_update=False,
            layout={"width": "300px"},
            style={"description_width": "96px"},
        )
        self.tau = widgets.BoundedFloatText(
            value=1.0, min=-1.0, max=1000.0, step=0.05, description="tau (std)", **SMALL
        )
        self.thresh_type = widgets.Dropdown(
            options=THRESHOLD_TYPES, description="Threshold", **SMALL
        )
        self.density = widgets.BoundedFloatText(
            value=0.3,
            min=0.0,
            max=1.0,
            step=0.05,
            description="Density of sparse calls",
            tooltip="measure it with a tuner or by sampling; it only enters the estimate",
            layout={"width": "260px"},
            style={"description_width": "160px"},
        )
        self._following = False
        self._link()

    @property
    def knobs(self) -> list[widgets.ValueWidget]:
        """All controls but the second handle of the cutoff, which follows the first."""
        first = [self.layers, self.steps, self.shift, self.phase, self.cutoff]
        return [*first, self.dense_layers, self.tau, self.thresh_type, self.density]

    @property
    def times(self) -> tuple[float, ...]:
        """Denoising time of every step."""
        steps, shift = self.steps.get_interact_value(), self.shift.get_interact_value()
        return tuple(denoising_times(steps, shift)[:-1])

    @property
    def schedule(self) -> Schedule:
        """What the controls say.

        Raises:
            ValueError: dense layers that are no list of layers, or that the model lacks.
        """
        return Schedule(self.times, self.layers.get_interact_value(), *self._dense())

    @property
    def config(self) -> SolAttnConfig:
        """The same as a configuration.

        Raises:
            ValueError: as for :attr:`schedule`, or tau is not finite.
        """
        cutoff, layers = self._dense()
        return SolAttnConfig(
            tau=checks.finite_number("tau", self.tau.get_interact_value()),
            thresh_type=self.thresh_type.get_interact_value(),
            disabled_until_timestep=cutoff,
            dense_layers=layers or None,
        )

    def top(self) -> widgets.Widget:
        """All of them."""
        sampler = [self.layers, self.steps, self.shift, self.phase]
        method = [self.dense_layers, self.tau, self.thresh_type, self.density]
        rows = [widgets.HBox(row, layout=ROW) for row in (sampler, method)]
        return widgets.VBox([rows[0], self.cutoff, self.dense_steps, rows[1]])

    def _dense(self) -> tuple[float | None, tuple[int, ...]]:
        text = self.dense_layers.get_interact_value().strip()
        try:
            layers = parse_layers(text) if text else ()
        except ValueError as error:
            raise ValueError(f"dense layers {text!r}: {error}") from error
        cutoff = round(self.cutoff.get_interact_value(), 6)
        return cutoff if self.phase.value else None, layers

    def _link(self) -> None:
        for knob in (self.steps, self.shift, self.cutoff):
            knob.observe(lambda _: self._follow_cutoff(), names="value")
        self.dense_steps.observe(lambda change: self._follow_steps(change["new"]), names="value")
        self.phase.observe(lambda change: self._follow_phase(change["new"]), names="value")
        self._follow_cutoff()

    def _follow_cutoff(self) -> None:
        """The number of steps shows the cutoff, and so it never moves it, however short its range.

        A value that gives no steps is left to the panel, which shows what is wrong with it.
        """
        with suppress(ValueError):
            number = dense_steps(self.times, round(self.cutoff.value, 6))
            self._following = True
            self.dense_steps.max = self.steps.get_interact_value()
            self.dense_steps.value = number
        self._following = False

    def _follow_steps(self, number: int) -> None:
        if not self._following:
            with suppress(ValueError):
                self.cutoff.value = round_cutoff(self.times, number)

    def _follow_phase(self, wanted: bool) -> None:
        for knob in (self.cutoff, self.dense_steps):
            knob.disabled = not wanted


def round_cutoff(times: Sequence[float], dense: int) -> float:
    """A cutoff that keeps the first ``dense`` steps: a whole multiple of the slider's step.

    Where two steps lie nearer together than that, it is the time itself, rounded down.

    Args:
        times: falling denoising times.
        dense: at least 1, at most all.
    """
    high = cutoff_of(times, dense) or 1.0
    low = times[dense] if dense < len(times) else 0.0
    whole = round(math.floor(high / STEP + 1e-9) * STEP, 6)
    return whole if low < whole <= high else math.floor(high * 1e6) / 1e6
