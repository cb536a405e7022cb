"""The TauTuner, driven without a browser, and the debouncer that paces it."""

from __future__ import annotations

import asyncio
import base64
import logging
import re

import pytest
import torch

from blockattn import attend, sol_attention, sol_route, sol_scores
from tests.panel_inputs import GRID, PNG, capture_of, load, turn
from workbench import decisions
from workbench.config import SolAttnConfig, load_config
from workbench.probe import attention_error
from workbench.widgets import TauTuner, TunerState, capture_session, session
from workbench.widgets.debounce import Debouncer


@pytest.fixture
def tuner() -> TauTuner:
    return TauTuner(capture_of(), device="cpu")


def test_it_starts_with_pictures_texts_and_a_measured_error(tuner: TauTuner):
    assert tuner.picture.startswith(PNG)
    assert tuner.frames.startswith(PNG)
    assert tuner.problem == ""
    assert "sol_attn on implementation" in tuner.what_ran
    assert "Relative L2 error against dense" in tuner.what_ran
    assert tuner.state == TunerState(layer=1, step=3, query_block=2, key_block=1)


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("tau", 2.0),
        ("head", 1),
        ("step", 9),
        ("layer", 4),
        ("thresh_type", "exact"),
        ("sink_tokens", 64),
        ("query_block", 4),
        ("key_block", 3),
    ],
)
def test_every_knob_changes_state_and_picture(tuner: TauTuner, knob: str, value):
    before = tuner.picture
    getattr(tuner.controls, knob).value = value
    tuner.flush()
    assert getattr(tuner.state, knob) == value
    assert tuner.picture != before
    assert tuner.problem == ""


def test_its_setting_leaves_as_a_configuration(tuner: TauTuner):
    turn(tuner, tau=0.6, thresh_type="exact")
    sparse = load_config(tuner.config).attention_config.sparse_attention_config
    assert sparse == SolAttnConfig(tau=0.6, thresh_type="exact")
    turn(tuner, sink_tokens=64)
    assert "# Without the sink of 64 tokens" in tuner.config
    link = re.search(
        r' download="config.yaml" href="data:application/yaml;base64,([^"]+)"', page(tuner)
    )
    assert link is not None
    assert base64.b64decode(link[1]).decode() == tuner.config


def page(tuner: TauTuner) -> str:
    texts = (getattr(child, "value", "") for child in tuner.children)
    return "".join(text for text in texts if isinstance(text, str))


def test_its_numbers_are_those_of_the_plain_functions(tuner: TauTuner):
    turn(tuner, layer=4, head=1, tau=0.6, thresh_type="exact", sink_tokens=70)
    call = load(4, 9)
    settings = {"thresh_type": "exact", "sink_tokens": 70}
    scores = sol_scores(call.q, call.k, **settings)
    classes = decisions.classify(scores, 0.6, head=1)
    view, measured = tuner.view, tuner.measured
    assert view is not None
    assert measured is not None
    route = sol_route(call.q, call.k, tau=0.6, **settings)
    assert torch.equal(view.classes, classes)
    assert torch.equal(view.density, route.density_per_head()[0])
    assert torch.equal(view.curve, scores.density(session.CURVE_TAUS)[0])
    assert decisions.describe(classes) in tuner.summary
    sparse = sol_attention(call.q, call.k, call.v, tau=0.6, **settings)
    error = attention_error(sparse, attend(call.q, call.k, call.v)).relative_l2[0]
    assert torch.allclose(measured.relative_l2, error)
    assert measured.trace.density == pytest.approx(route.density())
    assert f"delivered density <b>{route.density():.4f}</b>" in tuner.what_ran


def test_tau_moves_ask_the_cached_scores_again(tuner: TauTuner, monkeypatch: pytest.MonkeyPatch):
    asked = []
    monkeypatch.setattr(
        session, "sol_scores", lambda *a, **k: asked.append(k) or sol_scores(*a, **k)
    )
    for tau in (0.0, 1.5):
        turn(tuner, tau=tau)
    assert asked == []
    turn(tuner, thresh_type="exact")
    assert [settings["thresh_type"] for settings in asked] == ["exact"]


def test_a_layer_offers_the_steps_that_were_recorded_for_it(tuner: TauTuner):
    assert tuple(tuner.controls.step.options) == (3, 9)
    tuner.controls.layer.value = 4
    assert tuple(tuner.controls.step.options) == (9,)
    assert tuner.state.step == 9
    assert tuner.problem == ""


def test_an_error_in_a_callback_is_shown_and_logged_and_goes_away(
    tuner: TauTuner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def broken(*_, **__):
        raise RuntimeError("scores <lost>")

    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        patch.setattr(session.decisions, "classify", broken)
        with pytest.raises(RuntimeError, match="lost"):
            turn(tuner, tau=3.0)
    assert "⚠" in tuner.problem
    assert "RuntimeError: scores &lt;lost&gt;" in tuner.problem
    assert "failed while drawing" in caplog.text
    tuner.controls.tau.value = 2.0
    assert tuner.problem == ""


def test_a_failing_attention_call_keeps_the_pictures_and_names_the_error(
    tuner: TauTuner, monkeypatch: pytest.MonkeyPatch
):
    def broken(*_, **__):
        raise RuntimeError("kernel lost")

    before = tuner.picture
    with monkeypatch.context() as patch:
        patch.setattr(session, "sol_attention", broken)
        with pytest.raises(RuntimeError, match="lost"):
            tuner.controls.tau.value = 3.0
    assert "Error while measuring" in tuner.problem
    assert "failed, see the error above" in tuner.what_ran
    assert tuner.picture != before
    assert tuner.measured is None


def test_what_is_faster_elsewhere_is_named_and_its_reasons_unfold(tuner: TauTuner):
    assert tuner.measured is not None
    names = list(dict.fromkeys(reason.impl for reason in tuner.measured.trace.reasons))
    assert "triton" in names
    head, _, rest = tuner.what_ran.partition("<summary>Faster, but not here: ")
    summary, _, why = rest.partition("</summary>")
    assert summary == ", ".join(names)
    assert "needs a CUDA GPU" in why
    assert "needs a CUDA GPU" not in head


def test_a_run_that_was_dense_is_called_dense(tuner: TauTuner):
    tuner.controls.sink_tokens.value = GRID.tokens
    assert "this ran dense" in tuner.what_ran


def test_a_call_that_is_too_long_waits_for_the_button(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(capture_session.AUTOMATIC_FLOPS, "cpu", 1.0)
    tuner = TauTuner(capture_of(), device="cpu")
    assert tuner.measured is None
    assert "press the button" in tuner.what_ran
    before = tuner.picture
    (button,) = [child for child in tuner.children if type(child).__name__ == "Button"]
    button.click()
    assert tuner.measured is not None
    assert tuner.picture != before


def test_a_capture_without_entries_is_refused():
    with pytest.raises(ValueError, match="capture: it holds no"):
        TauTuner(capture_of(entries=()))


def test_pictures_have_texts_for_those_who_do_not_see_them(tuner: TauTuner):
    assert "block pairs are exact" in tuner._picture.tooltip
    assert "video tokens are attended exactly" in tuner._frames.tooltip
    assert "synthetic &lt;test&gt;" in tuner.children[0].value


def test_updates_are_small_and_a_reader_without_kernel_gets_the_picture(tuner: TauTuner):
    assert len(tuner.picture) + len(tuner.frames) < 1_000_000
    bundle = tuner._repr_mimebundle_()
    data = bundle[0] if isinstance(bundle, tuple) else bundle
    assert data["image/png"].startswith("iVBOR")
    assert "application/vnd.jupyter.widget-view+json" in data


def test_a_burst_of_slider_events_makes_one_picture_on_the_same_figure(tuner: TauTuner):
    drawn = []
    figure = tuner._map_panel.figure
    tuner._measure._wait = 60  # the call waits for the flush, however slow this machine is
    tuner._picture.observe(lambda change: drawn.append(change["new"]), names="value")

    async def drag():
        for step in range(50):
            tuner.controls.tau.value = step * 0.05
        assert drawn == []
        await asyncio.sleep(0.15)
        assert len(drawn) == 1
        assert tuner.measured is None
        tuner.flush()

    asyncio.run(drag())
    assert len(drawn) == 2  # with ellipses, then with errors
    assert tuner.measured is not None
    assert tuner.view is not None
    assert tuner.view.state.tau == pytest.approx(2.45)
    assert tuner._map_panel.figure is figure
    assert len(figure.axes) == 4


def test_a_slider_moves_by_its_step_from_the_keyboard(tuner: TauTuner):
    tau = tuner.controls.tau
    assert (tau.min, tau.max, tau.step) == (-1, 4, 0.05)
    assert "standard deviations" in tau.description


# -- debouncer ------------------------------------------------------------------------------


def test_without_an_event_loop_work_runs_at_once():
    done = []
    debouncer = Debouncer(lambda: done.append(1), wait=60)
    debouncer()
    debouncer()
    assert done == [1, 1]
    assert not debouncer.pending


def test_in_an_event_loop_a_burst_runs_once_and_earlier_requests_are_dropped():
    done = []
    newest = {"value": 0}
    debouncer = Debouncer(lambda: done.append(newest["value"]), wait=0.02)

    async def burst():
        for value in range(20):
            newest["value"] = value
            debouncer()
        assert debouncer.pending
        await asyncio.sleep(0.1)

    asyncio.run(burst())
    assert done == [19]


def test_a_burst_that_goes_on_is_served_after_the_longest_wait():
    done = []
    debouncer = Debouncer(lambda: done.append(1), wait=5, max_wait=5)

    async def burst():
        debouncer._limit = 0.05
        for _ in range(30):
            debouncer()
            await asyncio.sleep(0.01)

    asyncio.run(burst())
    assert len(done) >= 2


def test_flush_runs_pending_work_once_and_cancel_forgets_it():
    done = []
    debouncer = Debouncer(lambda: done.append(1), wait=60)

    async def use():
        debouncer()
        assert debouncer.flush()
        assert not debouncer.flush()
        debouncer()
        debouncer.cancel()
        assert not debouncer.flush()

    asyncio.run(use())
    assert done == [1]


@pytest.mark.parametrize(
    ("wait", "max_wait", "message"),
    [(-1, None, "wait=-1: must be at least 0"), (1.0, 0.5, "max_wait=0.5: must be at least 1")],
)
def test_waits_that_cannot_be_are_refused(wait, max_wait, message):
    with pytest.raises(ValueError, match=message):
        Debouncer(lambda: None, wait, max_wait)
