"""The ThresholdTuner, driven without a browser, and the explanation of a single tile."""

from __future__ import annotations

import math

import pytest
import torch

from blockattn import SkipGaps, attend, skip_gaps, skip_softmax_attention
from blockattn.route import BlockRoute
from tests.panel_inputs import GRID, PNG, capture_of, load, turn
from workbench import decisions
from workbench.config import SkipSoftmaxConfig, load_config
from workbench.decisions import TileState
from workbench.probe import attention_error
from workbench.tiles import explain_tile
from workbench.widgets import ThresholdTuner, skip_session
from workbench.widgets.skip_session import SkipState, describe_threshold, log2_of_factor
from workbench.widgets.threshold_tuner import SkipPanel


@pytest.fixture
def tuner() -> ThresholdTuner:
    return ThresholdTuner(capture_of(), device="cpu")


@pytest.fixture
def blank(monkeypatch: pytest.MonkeyPatch) -> ThresholdTuner:
    """For what is not about the picture: each would take longer to draw than all the rest."""
    monkeypatch.setattr(SkipPanel, "draw", lambda *_: PNG)
    return ThresholdTuner(capture_of(), device="cpu")


def test_its_setting_leaves_as_a_configuration():
    tuner = ThresholdTuner(capture_of(), device="cpu")
    turn(tuner, log2_threshold=-3.0)
    sparse = load_config(tuner.config).attention_config.sparse_attention_config
    assert sparse == SkipSoftmaxConfig(threshold_scale_factor=GRID.tokens / 8)
    assert "save as config.yaml" in tuner._yaml.value


def test_it_starts_with_pictures_texts_and_a_measured_error(tuner: ThresholdTuner):
    assert tuner.picture.startswith(PNG)
    assert tuner.frames.startswith(PNG)
    assert tuner.problem == ""
    assert "skip_softmax on implementation" in tuner.what_ran
    assert tuner.state == SkipState(layer=1, step=3, log2_threshold=-0.25, query_block=1)
    assert len(tuner.picture) + len(tuner.frames) < 1_000_000


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("log2_threshold", -1.0),
        ("head", 1),
        ("step", 9),
        ("layer", 4),
        ("tile", 64),
        ("query_block", 2),
        ("key_block", 2),
    ],
)
def test_every_knob_changes_state_and_picture(tuner: ThresholdTuner, knob: str, value):
    before = tuner.picture
    getattr(tuner.controls, knob).value = value
    assert getattr(tuner.state, knob) == value
    assert tuner.picture != before
    assert tuner.problem == ""


@pytest.mark.parametrize("tile", [128, 64])
def test_its_numbers_are_those_of_the_plain_functions(blank: ThresholdTuner, tile: int):
    turn(blank, layer=4, head=0, tile=tile, log2_threshold=-0.75)
    call, threshold = load(4, 9), 2.0**-0.75
    gaps = skip_gaps(call.q, call.k, tile=(tile, tile))
    out, trace = skip_softmax_attention(
        call.q, call.k, call.v, threshold=threshold, tile=(tile, tile), return_trace=True
    )
    view, measured = blank.view, blank.measured
    assert measured is not None
    states = decisions.skip_states(trace.skipped, trace.reachable)
    assert int((states == TileState.SKIPPED).sum()) > 0
    assert torch.equal(view.states, states)
    assert torch.allclose(view.density, 1 - gaps.sparsity([threshold])[0, :, 0])
    assert float(view.density.mean()) == pytest.approx(trace.density)
    assert decisions.describe_skip(states) in blank.summary
    error = attention_error(out, attend(call.q, call.k, call.v)).relative_l2[0]
    assert torch.allclose(measured.relative_l2, error)
    assert f"delivered density <b>{trace.density:.4f}</b>" in blank.what_ran


def test_threshold_moves_ask_the_cached_gaps_again(
    blank: ThresholdTuner, monkeypatch: pytest.MonkeyPatch
):
    asked = []
    monkeypatch.setattr(
        skip_session, "skip_gaps", lambda *a, **k: asked.append(k["tile"]) or skip_gaps(*a, **k)
    )
    for value in (-8.0, -0.5):
        turn(blank, log2_threshold=value)
    assert asked == []
    turn(blank, tile=64)
    assert asked == [(64, 64)]


def test_slider_and_factor_are_two_handles_of_one_threshold(blank: ThresholdTuner):
    controls = blank.controls
    controls.log2_threshold.value = -3.0
    assert controls.factor.value == GRID.tokens / 8
    assert blank.state.log2_threshold == -3.0
    controls.factor.value = 100.0
    wanted = pytest.approx(math.log2(100 / GRID.tokens), abs=1e-6)
    assert blank.state.log2_threshold == wanted
    assert controls.log2_threshold.value == wanted
    controls.log2_threshold.value = -1.7  # a browser rounds the slider to its nearest step
    assert controls.factor.value == 100.0
    assert "threshold_scale_factor = lambda * 320 keys = 100." in blank.summary
    controls.log2_threshold.value = -1.65  # and the next step counts
    assert blank.state.log2_threshold == -1.65
    controls.factor.value = 0.0
    assert controls.log2_threshold.value == controls.log2_threshold.min


def test_another_tile_size_keeps_the_place_in_the_video(blank: ThresholdTuner):
    blank.controls.query_block.value = 2
    blank.controls.tile.value = 64
    assert (blank.controls.query_block.value, blank.controls.query_block.max) == (4, 4)
    blank.controls.tile.value = 128
    assert (blank.controls.query_block.value, blank.controls.query_block.max) == (2, 2)
    assert blank.problem == ""


def test_nothing_skipped_is_called_dense(blank: ThresholdTuner):
    blank.controls.log2_threshold.value = -24.0
    assert "this ran dense" in blank.summary
    assert "this ran dense" in blank.what_ran


def test_an_error_is_shown_and_goes_away(blank: ThresholdTuner, monkeypatch: pytest.MonkeyPatch):
    def broken(*_, **__):
        raise RuntimeError("kernel <lost>")

    with monkeypatch.context() as patch:
        patch.setattr(skip_session, "skip_softmax_attention", broken)
        with pytest.raises(RuntimeError, match="lost"):
            blank.controls.log2_threshold.value = -2.0
    assert "RuntimeError: kernel &lt;lost&gt;" in blank.problem
    assert "failed, see the error above" in blank.what_ran
    blank.controls.log2_threshold.value = -1.0
    assert blank.problem == ""


# -- one tile, in words ---------------------------------------------------------------------


def test_a_tile_is_explained_by_its_gap():
    gaps = SkipGaps(
        torch.tensor([[[[torch.inf, -3.0], [torch.inf, -5.0], [torch.inf, -4.0]]]]),
        BlockRoute.from_dense(
            torch.ones(1, 1, 3, 2, dtype=torch.bool), block=(128, 160), seqlens=(320, 320)
        ),
    )
    first = explain_tile(gaps, 2.0**-4, GRID, 1, 0)
    near = explain_tile(gaps, 2.0**-4, GRID, 0, 1)
    far = explain_tile(gaps, 2.0**-4, GRID, 1, 1)
    equal = explain_tile(gaps, 2.0**-4, GRID, 2, 1)
    states = [x.state for x in (first, near, far, equal)]
    assert states == [TileState.COMPUTED, TileState.COMPUTED, TileState.SKIPPED, TileState.COMPUTED]
    assert "first tile of a row" in first.reason
    assert "-5.00 against log2(lambda) = -4.00" in far.reason
    assert str(far).startswith("Query tile 1 (t 1-3, h 0-7, w 0-9) and key tile 1 (t 2-3,")


@pytest.mark.parametrize(("causal", "other"), [(False, "SKIPPED"), (True, "MASKED")])
def test_explanations_agree_with_the_map(causal: bool, other: str):
    call = load(1, 3)
    gaps = skip_gaps(call.q, call.k, tile=(64, 64), causal=causal)
    states = decisions.skip_states(gaps.skipped(0.5), gaps.reachable)
    said = [[explain_tile(gaps, 0.5, GRID, i, j).state for j in range(5)] for i in range(5)]
    assert torch.equal(torch.tensor(said, dtype=torch.uint8), states)
    assert {state.name for row in said for state in row} == {"COMPUTED", other}


def test_a_tile_that_is_not_there_is_named():
    call = load(1, 3)
    gaps = skip_gaps(call.q, call.k)
    with pytest.raises(ValueError, match="j=3"):
        explain_tile(gaps, 0.5, GRID, 0, 3)
    with pytest.raises(ValueError, match="head=2"):
        explain_tile(gaps, 0.5, GRID, 0, 0, head=2)


@pytest.mark.parametrize(
    ("factor", "log2"), [(0.0, -24.0), (40.0, -3.0), (320.0, 0.0), (1e6, 0.0), (1e-9, -24.0)]
)
def test_a_factor_becomes_a_threshold_that_the_tuner_shows(factor: float, log2: float):
    assert log2_of_factor(factor, 320) == log2


def test_the_three_units_of_a_threshold():
    assert describe_threshold(-3.0, 320) == (
        "lambda = 0.125, log2(lambda) = -3.00, threshold_scale_factor = lambda * 320 keys = 40."
    )
