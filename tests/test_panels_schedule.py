"""ScheduleEditor: dense steps and layers by two handles of one cutoff, and a real trial."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.panel_inputs import PNG, assert_told_apart, press
from tests.policy_inputs import model
from workbench import views
from workbench.attention.phase import dense_steps
from workbench.config import load_config
from workbench.models import denoising_times
from workbench.sample.settings import SampleSettings
from workbench.schedule import CallKind, Schedule, describe
from workbench.views.schedule_map import KINDS
from workbench.widgets import ScheduleEditor, schedule_editor
from workbench.widgets.schedule_controls import ScheduleControls, round_cutoff
from workbench.widgets.schedule_editor import NAME, sample_schedule

GRID = (4, 8, 8)
TIMES = (1.0, 0.8, 0.5, 0.2)


# -- plain functions ------------------------------------------------------------------------


def test_calls_are_dense_by_step_by_layer_or_by_both():
    schedule = Schedule(TIMES, 3, cutoff=0.8, dense_layers=(2,))
    sparse, step, layer, both = CallKind
    assert schedule.kinds().tolist() == [
        [step, step, sparse, sparse],
        [step, step, sparse, sparse],
        [both, both, layer, layer],
    ]
    assert schedule.dense_steps == 2
    assert schedule.sparse_share == pytest.approx(4 / 12)
    assert describe(schedule) == (
        "4 of 12 attention calls are sparse (33%); layer 2 stays dense throughout. Any cutoff "
        "above 0.5 and up to 0.8 keeps the same steps dense."
    )


def test_without_a_cutoff_only_layers_are_dense():
    schedule = Schedule(TIMES, 2, dense_layers=(0, 1))
    assert schedule.dense_steps == 0
    assert schedule.sparse_share == 0
    assert "layers 0, 1 stay dense" in describe(schedule)


@pytest.mark.parametrize(
    ("density", "work"), [(0.0, 1 - 63 / 64 / 3), (1.0, 1.0), (0.5, 1 - (0.5 - 1 / 64) / 3)]
)
def test_work_counts_summaries_and_never_exceeds_dense(density: float, work: float):
    schedule = Schedule(TIMES, 3, cutoff=0.8, dense_layers=(2,))
    assert schedule.work(density) == pytest.approx(work)


@given(st.integers(1, 60), st.floats(0.2, 12), st.floats(0.01, 1))
def test_cutoffs_between_two_steps_mean_the_same(steps: int, shift: float, cutoff: float):
    times = tuple(denoising_times(steps, shift)[:-1])
    schedule = Schedule(times, 2, cutoff=cutoff)
    low, high = schedule.same_cutoffs()
    assert low < cutoff <= high
    assert Schedule(times, 2, cutoff=high).dense_steps == schedule.dense_steps
    if low > 0:
        assert Schedule(times, 2, cutoff=low).dense_steps == schedule.dense_steps + 1


@given(st.integers(1, 200), st.floats(0.2, 12), st.data())
def test_a_round_cutoff_keeps_as_many_steps_as_wanted(steps: int, shift: float, data):
    times = denoising_times(steps, shift)[:-1]
    wanted = data.draw(st.integers(1, steps))
    cutoff = round_cutoff(times, wanted)
    assert dense_steps(times, cutoff) == wanted
    low = times[wanted] if wanted < steps else 0.0
    if times[wanted - 1] - low > 0.001:
        assert round(1000 * cutoff) / 1000 == pytest.approx(cutoff, abs=1e-12)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"times": ()}, "times is empty"),
        ({"layers": 0}, "layers=0"),
        ({"cutoff": 0.0}, "cutoff=0.0: must be in"),
        ({"dense_layers": (1, 3)}, r"\[3\] is not among the layers 0 to 2"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(fields, message: str):
    with pytest.raises(ValueError, match=message):
        Schedule(**{"times": TIMES, "layers": 3, **fields})


def test_the_map_names_only_the_kinds_that_occur():
    ax = views.new_figure().subplots()
    views.draw_schedule_map(ax, Schedule(TIMES, 3, cutoff=0.8), title="t")
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == ["sparse  50.0%", "dense step  50.0%"]
    assert [text.get_text() for text in ax.texts] == ["1.00", "0.80", "0.50", "0.20"]


def test_kinds_differ_in_grey_or_by_hatch():
    assert_told_apart(KINDS.values())


# -- the panel ------------------------------------------------------------------------------


@pytest.fixture
def editor() -> ScheduleEditor:
    return ScheduleEditor(model(), SampleSettings(grid=GRID, steps=4))


def test_it_starts_with_a_map_a_text_and_a_configuration(editor: ScheduleEditor):
    assert editor.picture.startswith(PNG)
    assert len(editor.picture) < 1_000_000
    assert editor.problem == ""
    assert "2 of 4 steps are dense (50% of them)" in editor.summary
    assert "nothing yet" in editor.what_ran
    assert editor.schedule == Schedule(tuple(denoising_times(4, 3.0)[:-1]), 2, cutoff=0.9)


def test_cutoff_and_dense_steps_are_two_handles_of_one_thing(editor: ScheduleEditor):
    controls = editor.controls
    controls.dense_steps.value = 3
    assert controls.cutoff.value == 0.75  # 3 * 0.5 / (3 * 0.5 + 0.5)
    assert editor.schedule.dense_steps == 3
    controls.cutoff.value = 0.95
    assert controls.dense_steps.value == 1
    controls.steps.value = 40  # the cutoff stays, and means more steps
    assert controls.cutoff.value == 0.95
    assert controls.dense_steps.value == editor.schedule.dense_steps == 6
    assert "6 of 40 steps are dense (15% of them)" in editor.summary


@pytest.mark.parametrize("cutoff", [0.22, 0.5, 0.999])
def test_fewer_steps_and_back_leave_the_cutoff_as_it_was(editor: ScheduleEditor, cutoff: float):
    controls = editor.controls
    controls.steps.value = 20
    controls.cutoff.value = cutoff
    dense = controls.dense_steps.value
    for steps in (5, 1, 20):
        controls.steps.value = steps
        assert controls.cutoff.value == cutoff
        assert controls.dense_steps.value == editor.schedule.dense_steps
    assert controls.dense_steps.value == dense


@pytest.mark.parametrize("knob", ["shift", "tau", "density", "cutoff"])
def test_a_knob_that_is_no_number_is_named_and_mended(editor: ScheduleEditor, knob: str):
    good = getattr(editor.controls, knob).value
    with pytest.raises(ValueError, match=f"{knob}=nan"):
        getattr(editor.controls, knob).value = float("nan")
    assert f"{knob}=nan" in editor.problem
    assert "below are of the setting before" in editor.problem
    getattr(editor.controls, knob).value = good
    assert editor.problem == ""


def test_a_picture_of_a_thousand_steps_has_as_many_parts_as_one_of_two():
    one, other = (views.new_figure().subplots() for _ in range(2))
    views.draw_schedule(one, [1.0, 0.5], 0.9)
    views.draw_schedule(other, denoising_times(1000, 3.0)[:-1], 0.9)
    assert len(one.get_children()) == len(other.get_children())


@pytest.mark.parametrize("steps", [1, 7, 20, 50])
def test_every_number_of_dense_steps_can_be_chosen(steps: int):
    controls = ScheduleControls(2, 4, 3.0)  # without the panel, which would draw each of them
    controls.steps.value = steps
    for number in range(1, steps + 1):
        controls.dense_steps.value = number
        assert controls.schedule.dense_steps == number


def test_without_a_dense_phase_the_configuration_has_no_cutoff(editor: ScheduleEditor):
    editor.controls.phase.value = False
    assert editor.config.attention_config.sparse_attention_config.disabled_until_timestep is None
    assert editor.controls.cutoff.disabled
    assert "there is no cutoff" in editor.summary


def test_the_configuration_reads_back_and_says_what_the_controls_say(editor: ScheduleEditor):
    editor.controls.dense_layers.value = "0-1"
    editor.controls.tau.value = 1.5
    shown = editor._yaml.value.partition(">")[2].removesuffix("</pre>")
    sparse = load_config(shown).attention_config.sparse_attention_config
    assert sparse == editor.config.attention_config.sparse_attention_config
    assert (sparse.tau, sparse.dense_layers) == (1.5, (0, 1))


@pytest.mark.parametrize(
    ("layers", "message"), [("0,x", "dense layers &#x27;0,x&#x27;"), ("7", "[7] is not among")]
)
def test_layers_that_are_none_are_shown_as_an_error(
    editor: ScheduleEditor, layers: str, message: str
):
    with pytest.raises(ValueError, match="layers"):
        editor.controls.dense_layers.value = layers
    assert message in editor.problem
    editor.controls.dense_layers.value = "1"
    assert editor.problem == ""


def test_a_trial_samples_in_the_background_with_the_plain_functions_result(
    editor: ScheduleEditor,
):
    editor.controls.cutoff.value = 0.85
    editor.controls.dense_layers.value = "0"
    sparse = editor.controls.config

    press(editor)
    assert editor.problem == ""
    assert editor.result is not None
    settings = SampleSettings(grid=GRID, steps=4)
    expected = sample_schedule(model(), settings, sparse, lambda label: None)
    video = editor.result.of(NAME)[0].sampled.video
    assert torch.equal(video, expected.of(NAME)[0].sampled.video)
    share = editor.schedule.sparse_share
    records = editor.result.of(NAME)[0].sampled.records
    assert sum(record.kind == "sparse" for record in records) == share * len(records) > 0
    assert "sol_attn: eager" in editor.what_ran
    assert "dense_control" in editor.table
    assert "changed since" not in editor.what_ran
    editor.controls.tau.value = 2.0
    assert "The controls have changed since" in editor.what_ran


def test_a_trial_of_another_depth_is_refused_with_the_fix(editor: ScheduleEditor):
    editor.controls.layers.value = 40
    with pytest.raises(ValueError, match="set Layers to that"):
        editor.sample()
    assert "the model of the trial has 2" in editor.problem
    assert not editor.job.running


def test_an_error_of_a_trial_is_shown_and_logged(
    editor: ScheduleEditor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def broken(*_, **__):
        raise RuntimeError("out of <memory>")

    monkeypatch.setattr(schedule_editor, "run", broken)

    press(editor)
    assert "RuntimeError: out of &lt;memory&gt;" in editor.problem
    assert "failed while sampling" in caplog.text
    assert editor.result is None
