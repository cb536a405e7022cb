"""A setting in real runs: free sparse sampling meets its density, real calls meet their error."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.calibrate_inputs import SAMPLES, small_calibration, small_model
from workbench.attention import SparseAttention
from workbench.calibrate.collect import calibrate, plan_for
from workbench.calibrate.error_solve import ErrorLadder, error_ladder, solve_error
from workbench.calibrate.free_run import ScheduledAttention, deliver, solve_free_run
from workbench.calibrate.samples import Samples
from workbench.calibrate.setting import Form, Setting
from workbench.config import SolAttnConfig
from workbench.models import AttentionCall, dense_attention, load_model

LAYERS = 2


def test_a_scheduled_run_uses_the_value_of_each_call_and_counts_what_it_delivered():
    form = Form(by="layer", shape="linear", span=1.0, cutoff=0.9)
    setting = Setting("sol_attn", form, (0.5, -0.25))
    attention = ScheduledAttention(setting, LAYERS)
    SAMPLES.run(small_model(), 0, attention)
    assert [(r.step, r.layer) for r in attention.records] == [
        (n, m) for n in range(3) for m in (0, 1)
    ]
    for record in attention.records:
        assert (record.kind == "dense") == ((record.time or 0.0) >= 0.9)
        assert (record.density == 1) == (record.kind == "dense")
        assert record.reason == ("dense phase" if record.kind == "dense" else "sparse")


def test_a_constant_setting_runs_as_its_configuration_does():
    ours = ScheduledAttention(Setting("sol_attn", Form(), (0.7,)), LAYERS)
    theirs = SparseAttention(SolAttnConfig(tau=0.7), num_layers=LAYERS)
    videos = [SAMPLES.run(small_model(), 0, attention) for attention in (ours, theirs)]
    assert torch.equal(*videos)
    assert not torch.equal(videos[0], SAMPLES.run(small_model(), 0, dense_attention))


@pytest.mark.parametrize("levels", [(), (1.0, 2.0), (math.nan,)])
def test_a_setting_has_a_level_for_each_group(levels: tuple[float, ...]):
    with pytest.raises(ValueError, match="must be 1 for 'global', not all NaN"):
        Setting("sol_attn", Form(), levels)


def test_a_call_without_its_time_is_an_error():
    q = torch.randn(1, 64, 2, 16)
    attention = ScheduledAttention(Setting("sol_attn", Form(), (0.7,)), LAYERS)
    with pytest.raises(ValueError, match="no denoising time"):
        attention(q, q, q, AttentionCall(0, 0, None, (1, 8, 8)))


def test_deliver_orders_calls_by_video_layer_and_step():
    setting = Setting("sol_attn", Form(by="layer"), (-1000.0, 1000.0))
    found = deliver(small_model(), setting, SAMPLES)
    assert found.density.shape == (2, 2, 3)
    assert bool((found.density[:, 0] == 1).all())
    assert bool((found.density[:, 1] < 0.5).all())
    assert found.by_group.tolist() == [1.0, float(found.density[:, 1].mean())]


def test_fifteen_percent_is_delivered_on_held_out_seeds():
    """On the trained model, where uncorrected free runs fall below what the pass predicts."""
    model, samples = load_model(), Samples(seeds=(0, 1), steps=2)
    calibration = calibrate(model, plan_for(model, "sol_attn", samples))
    found = solve_free_run(model, calibration, 0.15)
    held_out = deliver(model, found.solution.setting, replace(samples, seeds=(100, 101)))
    assert float(held_out.by_group) == pytest.approx(0.15, abs=0.005)
    first, last = (
        abs(float(run.by_group) - 0.15) for run in (found.delivered[0], found.delivered[-1])
    )
    assert last <= first
    assert last <= 0.001 or len(found.delivered) == 3


# -- errors --------------------------------------------------------------------------------------


def test_the_ladder_interpolates_between_its_levels_and_dense_has_no_error():
    ladder = ErrorLadder(
        torch.tensor([0.0, 1.0, 3.0], dtype=torch.float64),
        torch.tensor([[[0.1]], [[0.2]], [[0.6]]], dtype=torch.float64),
    )
    levels = [-5.0, 0.0, 0.5, 1.0, 2.0, 3.0, 9.0, -math.inf]
    found = [float(ladder.at(torch.tensor([[x]], dtype=torch.float64))) for x in levels]
    assert found == pytest.approx([0.1, 0.1, 0.15, 0.2, 0.4, 0.6, 0.6, 0.0])


@pytest.mark.parametrize(
    "form", [Form(), Form(by="layer"), Form(shape="linear", span=0.4)], ids=str
)
def test_an_error_is_met_by_real_calls(form: Form):
    calibration = small_calibration("sol_attn")
    ladder = error_ladder(small_model(), calibration, points=5)
    assert bool((ladder.errors.diff(dim=0) >= 0).all())
    target = float(ladder.errors[2].max())
    found = solve_error(small_model(), calibration, target, form, ladder=ladder)
    assert max(found.delivered) <= target
    assert max(found.delivered) > 0.5 * target
    assert found.density < 1


def test_an_error_that_no_level_meets_is_refused():
    calibration = small_calibration("sol_attn")
    with pytest.raises(ValueError, match="out of reach, the densest level tried has"):
        solve_error(small_model(), calibration, 1e-9)
    with pytest.raises(ValueError, match="must be above 0"):
        solve_error(small_model(), calibration, 0.0)
