"""A panel opens whatever its first call does: the error is seen, logged, and mended by a choice."""

from __future__ import annotations

import asyncio

import pytest
import torch

from blockattn import TokenGrid
from tests.panel_inputs import GRID, PNG, capture_of, load
from workbench.capture import QKV
from workbench.synthetic import synthetic_qkv
from workbench.widgets import Compare, TauTuner, ThresholdTuner, TimeSplit

ON_MAPS = (TauTuner, ThresholdTuner, Compare)


def broken_first(layer: int, step: int) -> QKV:
    if layer == 1:
        raise OSError(f"layer {layer} cannot be read")
    return load(layer, step)


def with_few_heads(layer: int, step: int) -> QKV:
    """Layer 4 has one head, the others two."""
    call = synthetic_qkv(GRID, heads=2 - (layer == 4), head_dim=32, seed=layer)
    return QKV(call.q.float(), call.k.float(), call.v.float(), layer, step, 0.5)


def not_finite(layer: int, step: int) -> QKV:
    call = load(layer, step)
    call.q[0, 5] = torch.nan
    return call


@pytest.mark.parametrize("kind", ON_MAPS)
def test_a_panel_whose_first_call_fails_opens_and_recovers(kind, caplog: pytest.LogCaptureFixture):
    panel = kind(capture_of(load=broken_first), device="cpu")
    assert "layer 1 cannot be read" in panel.problem
    assert "failed while drawing: layer 1 cannot be read" in caplog.text
    assert panel.picture == b""
    assert panel._picture.layout.display == "none"
    assert "below are of the setting before" not in panel.problem  # nothing is below
    panel.controls.layer.value = 4
    assert panel.problem == ""
    assert panel.picture.startswith(PNG)
    assert panel._picture.layout.display is None


@pytest.mark.parametrize("kind", ON_MAPS)
def test_the_same_in_a_notebook_where_an_event_loop_runs(kind):
    async def cell():
        panel = kind(capture_of(load=broken_first), device="cpu")
        assert "layer 1 cannot be read" in panel.problem
        panel.controls.layer.value = 4
        panel.flush()
        assert panel.problem == ""
        assert panel.picture.startswith(PNG)

    asyncio.run(cell())


def test_a_time_split_opens_although_no_call_can_be_read():
    panel = TimeSplit(capture_of(load=broken_first), [], device="cpu")
    assert panel.problem == ""
    with pytest.raises(OSError, match="layer 1 cannot be read"):
        panel.measure()
    assert "layer 1 cannot be read" in panel.problem
    panel.entry.value, panel.repeats.value = (4, 9), 1
    panel.measure()
    assert panel.problem == ""
    assert panel.report is not None


@pytest.mark.parametrize("kind", ON_MAPS)
def test_what_stays_below_an_error_is_said_to_be_of_the_setting_before(kind):
    panel = kind(capture_of(((4, 9), (1, 3)), load=broken_first), device="cpu")
    picture = panel.picture
    with pytest.raises(OSError, match="cannot be read"):
        panel.controls.layer.value = 1
    assert panel.picture == picture
    assert "below are of the setting before" in panel.problem
    assert "wb-old" in panel._picture._dom_classes
    panel.controls.layer.value = 4
    assert "wb-old" not in panel._picture._dom_classes


@pytest.mark.parametrize("kind", ON_MAPS)
def test_layers_may_have_different_numbers_of_heads(kind):
    panel = kind(capture_of(load=with_few_heads), device="cpu")
    panel.controls.head.value = 1
    panel.controls.layer.value = 4
    assert panel.problem == ""
    assert (panel.controls.head.options, panel.state.head) == ((0,), 0)
    panel.controls.layer.value = 1
    assert panel.problem == ""
    assert panel.controls.head.options == (0, 1)


def test_a_tau_that_is_no_number_draws_nothing():
    panel = TauTuner(capture_of(), device="cpu")
    picture, summary = panel.picture, panel.summary
    with pytest.raises(ValueError, match="tau"):
        panel.controls.tau.value = float("nan")
    assert "tau=nan" in panel.problem
    assert (panel.picture, panel.summary) == (picture, summary)
    assert "below are of the setting before" in panel.problem


def test_a_threshold_tuner_opens_where_something_is_skipped():
    def graded(layer: int, step: int) -> QKV:
        """Later keys score lower, so that a lambda between 0 and 1 drops some tiles."""
        grid = TokenGrid((4, 8, 10))
        q, k = torch.zeros(1, grid.tokens, 2, 32), torch.zeros(1, grid.tokens, 2, 32)
        q[..., 0] = 4.0
        k[..., 0] = -torch.arange(grid.tokens)[None, :, None] // 128
        return QKV(q, k, torch.randn_like(k), layer, step, 0.5)

    panel = ThresholdTuner(capture_of(load=graded), device="cpu")
    density = float(panel.view.density[0])
    assert 0 < density <= 0.8
    assert panel.state.log2_threshold < 0
    assert panel.measured is not None
    panel.controls.log2_threshold.value = -9.0
    panel.controls.layer.value = 4
    assert panel.state.log2_threshold == -9.0  # another call does not take the choice back
