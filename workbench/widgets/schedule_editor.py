"""ScheduleEditor: which steps and layers stay dense, as a fraction of time and as counts."""

from __future__ import annotations

from html import escape

import ipywidgets as widgets
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from workbench import schedule as schedules
from workbench import views
from workbench.config import AttentionConfig, SolAttnConfig, VisualGenConfig, dump_config
from workbench.models import VideoDiT, load_model
from workbench.sample.run import SampleResult, run, units
from workbench.sample.settings import SampleSettings
from workbench.sample.variants import BASELINE, CONTROL, Variant
from workbench.schedule import Schedule
from workbench.views.table import Table
from workbench.widgets import texts
from workbench.widgets.job import Job, Tick
from workbench.widgets.panel import Panel
from workbench.widgets.panels import DPI, WIDTH
from workbench.widgets.schedule_controls import ScheduleControls

NAME = "schedule"  # of the variant
SAMPLING = "sampling"
HEIGHT = 4.0  # inches


class ScheduleEditor(Panel):
    """Steps x layers of one sampling with Sol-Attn, the cost, the configuration, and a trial.

    The server names the dense phase by a denoising time, so the same cutoff is another number of
    steps in another schedule; both are handles here. The trial samples a video with this schedule
    beside dense attention and an exact control, in the background.

    Args:
        model: that the trial samples; the bundled one by default.
        settings: of the trial: class, seeds, grid; its steps and shift are those of the controls.

    Attributes:
        controls: the input widgets.
        job: the trial under way.
        result: the last trial that came to its end, or None.
    """

    def __init__(self, model: VideoDiT | None = None, settings: SampleSettings | None = None):
        self._model = load_model() if model is None else model
        self._settings = settings or SampleSettings(steps=20)
        self.controls = ScheduleControls(
            self._model.config.depth, self._settings.steps, self._settings.shift
        )
        self.job = Job(self._sampled, self._failed)
        self.result: SampleResult | None = None
        self._tried: tuple[SolAttnConfig, SampleSettings] | None = None
        self._maps = SchedulePanel()
        self._yaml, self._table = widgets.HTML(), widgets.HTML()
        self._button = widgets.Button(
            description="Sample a video",
            icon="play",
            tooltip="dense, an exact control and this schedule from the same noise",
        )
        self._button.on_click(lambda _: self.sample())
        super().__init__(self.controls.knobs)

    @property
    def schedule(self) -> Schedule:
        """What the controls say.

        Raises:
            ValueError: dense layers that are no list of layers of the model.
        """
        return self.controls.schedule

    @property
    def config(self) -> VisualGenConfig:
        """The configuration that says the same to a server."""
        sparse = self.controls.config
        return VisualGenConfig(
            attention_config=AttentionConfig(backend="CUTEDSL", sparse_attention_config=sparse)
        )

    @property
    def table(self) -> str:
        """HTML of the last trial."""
        return self._table.value

    def sample(self) -> None:
        """Starts the trial; one that still runs is cancelled."""
        self._guard(SAMPLING, self._start)

    def _start(self) -> None:
        schedule, depth = self.schedule, self._model.config.depth
        if schedule.layers != depth:
            raise ValueError(
                f"layers={schedule.layers}: the model of the trial has {depth}; set Layers to that"
            )
        settings = SampleSettings(
            label=self._settings.label,
            seeds=self._settings.seeds,
            grid=self._settings.grid,
            steps=self.controls.steps.get_interact_value(),
            guidance=self._settings.guidance,
            shift=self.controls.shift.get_interact_value(),
        )
        sparse = self.controls.config
        self._tried = sparse, settings
        model = self._model
        self.job.start(
            lambda tick: sample_schedule(model, settings, sparse, tick),
            units(settings, _variants(sparse)),
        )

    def _sampled(self, result: SampleResult) -> None:
        self.result = result
        self._table.value = texts.table(trial_table(result))
        self._show_state()

    def _failed(self, error: Exception) -> None:
        self._report(SAMPLING, error)
        self._show_state()

    def _arrangement(self) -> list[widgets.Widget]:
        return [
            self.controls.top(),
            self._problem,
            self._picture,
            self._summary,
            widgets.HBox([self._button, self.job.box]),
            self._ran,
            self._table,
            self._yaml,
        ]

    def _redraw(self) -> None:
        schedule, density = self.schedule, self.controls.density.get_interact_value()
        lines = [
            views.describe_schedule(schedule.times, schedule.cutoff),
            schedules.describe(schedule),
            f"With density {density:g} in the sparse calls, attention does "
            f"{schedule.work(density):.1%} of the arithmetic of an all-dense sampling (estimated: "
            "density + 1/64 for the summaries, nothing for routing).",
        ]
        self._picture.show(self._maps.draw(schedule), " ".join(lines[:2]))
        self._summary.value = texts.lines(*lines)
        style = "font-size:12px;line-height:1.35;margin:4px 0"
        self._yaml.value = f'<pre style="{style}">{escape(dump_config(self.config))}</pre>'

    def _show_what_ran(self) -> None:
        if self.result is None:
            text = "<b>What ran:</b> nothing yet; the maps follow from the configuration alone"
        else:
            text = f"<b>What ran:</b> {what_ran(self.result)}"
            if self._is_old():
                text += " <b>The controls have changed since.</b>"
        self._ran.value = texts.status(text)

    def _is_old(self) -> bool:
        if self._tried is None or self.result is None:
            return False
        times = tuple(self.result.settings.times)
        try:
            return self._tried[0] != self.controls.config or times != self.controls.times
        except ValueError:  # dense layers that are no layers: shown as an error already
            return True


class SchedulePanel:
    """Map of the calls, and steps against denoising time, on one figure for life."""

    def __init__(self):
        self.figure = Figure(figsize=(WIDTH, HEIGHT), dpi=DPI, facecolor="white")
        FigureCanvasAgg(self.figure)
        self._map = self.figure.add_axes((0.05, 0.22, 0.48, 0.62))
        self._times = self.figure.add_axes((0.61, 0.22, 0.37, 0.62))

    def draw(self, schedule: Schedule) -> bytes:
        """PNG of a schedule."""
        for ax in (self._map, self._times):
            ax.clear()
        layers, steps = schedule.layers, len(schedule.times)
        views.draw_schedule_map(
            self._map, schedule, title=f"{layers} layers x {steps} steps, denoising time above"
        )
        views.draw_schedule(self._times, schedule.times, schedule.cutoff, title="The dense phase")
        return views.to_png(self.figure)


def sample_schedule(
    model: VideoDiT, settings: SampleSettings, sparse: SolAttnConfig, tick: Tick
) -> SampleResult:
    """A video with a schedule beside dense attention and an exact control, from the same noise."""
    return run({"base": model}, settings, _variants(sparse), tick=tick)


def trial_table(result: SampleResult) -> Table:
    """A row for each variant: quality against dense, density, dense steps, seconds, what ran."""
    rows = [
        (
            row.sampled.variant.name,
            "reference" if row.sampled.variant.name == BASELINE else f"{row.quality.psnr:.1f}",
            f"{row.sampled.density:.4f}",
            f"{row.sampled.seconds:.2f}",
            row.sampled.ran,
        )
        for row in result.rows
    ]
    columns = ("variant", "PSNR against dense (dB)", "density", "seconds", "what ran")
    return Table(columns, rows, f"Sampled on {result.device}, {result.settings.steps} steps")


def what_ran(result: SampleResult) -> str:
    """HTML: where the calls of the schedule went, why nothing faster ran, and what is odd."""
    row = result.of(NAME)[0]
    reasons = {str(reason) for record in row.sampled.records for reason in record.reasons}
    faster = f" Faster, but not here: {'; '.join(sorted(reasons))}." if reasons else ""
    flags = f" {'; '.join(row.flags)}." if row.flags else ""
    text = f"{row.sampled.counts}; {row.sampled.ran}; {row.dense_steps} dense steps.{faster}{flags}"
    return escape(text)


def _variants(sparse: SolAttnConfig) -> list[Variant]:
    config = AttentionConfig(sparse_attention_config=sparse)
    exact = [Variant(BASELINE, role="baseline"), Variant(CONTROL, role="control")]
    return [*exact, Variant(NAME, config)]
