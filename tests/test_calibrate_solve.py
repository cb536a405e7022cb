"""Solving: the level of every group meets its target on the calibrated calls."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.calibrate_inputs import SAMPLES, small_calibration
from workbench.calibrate.setting import Form, Setting
from workbench.calibrate.solve import solve_density, target_density

LAYERS, TIMES = 2, SAMPLES.times
FORMS = [
    Form(),
    Form(by="layer"),
    Form(by="window", edges=(0.9,)),
    Form(shape="linear", span=0.5),
    Form(shape="cosine", span=-0.7),
    Form(shape="step", span=1.0, at=0.8),
    Form(by="layer", shape="linear", span=-0.3, cutoff=0.95),
    Form(dense_layers=(1,)),
]
# (shape, time, share of the span), computed by hand.
SHAPES = [
    ("constant", 0.4, 0.0),
    ("linear", 0.0, 0.0),
    ("linear", 0.25, 0.25),
    ("linear", 1.0, 1.0),
    ("cosine", 0.0, 0.0),
    ("cosine", 0.25, 0.1464466094067262),
    ("cosine", 0.5, 0.5),
    ("cosine", 1.0, 1.0),
    ("step", 0.69, 0.0),
    ("step", 0.7, 1.0),
]


@pytest.mark.parametrize(("shape", "time", "share"), SHAPES)
def test_shapes_of_a_schedule(shape: str, time: float, share: float):
    form = Form(
        shape=shape, span=0.0 if shape == "constant" else -2.0, at=0.7 if shape == "step" else None
    )
    setting = Setting("sol_attn", form, (1.25,))
    assert setting.level(0, time) == pytest.approx(1.25 - 2.0 * share, abs=1e-12)


def test_the_knob_is_tau_or_lambda():
    assert Setting("sol_attn", Form(), (-3.0,)).value(0, 0.5) == -3.0
    assert Setting("skip_softmax", Form(), (-3.0,)).value(0, 0.5) == 0.125


def test_an_edge_belongs_to_the_noisier_window():
    form = Form(by="window", edges=(0.9, 0.5))
    groups = [form.group(0, time) for time in (1.0, 0.9, 0.8999, 0.5, 0.4999, 0.0)]
    assert groups == [0, 0, 1, 1, 2, 2]
    assert [form.group_name(n) for n in range(3)] == ["0.9 <= t", "0.5 <= t < 0.9", "t < 0.5"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"by": "head"}, "by='head'"),
        ({"shape": "cubic"}, "shape='cubic'"),
        ({"shape": "linear"}, "need one"),
        ({"span": 1.0}, "a constant has no span"),
        ({"shape": "step", "span": 1.0}, "a step has a time"),
        ({"by": "window"}, "windows, and they alone, have edges"),
        ({"edges": (0.5,)}, "windows, and they alone, have edges"),
        ({"by": "window", "edges": (0.5, 0.9)}, "must fall strictly"),
        ({"by": "window", "edges": (1.0,)}, "must fall strictly"),
        ({"cutoff": 5.0}, r"cutoff=5\.0: must be a denoising time in \(0, 1\]"),
        ({"cutoff": math.nan}, "cutoff=nan: must be finite"),
        ({"shape": "step", "span": 1.0, "at": 1.5}, r"at=1\.5: must be a denoising time"),
    ],
)
def test_a_form_refuses_what_means_nothing(values: dict, message: str):
    with pytest.raises(ValueError, match=message):
        Form(**values)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_setting_survives_json(form: Form):
    levels = (0.5, -1.25, math.nan)[: form.groups(LAYERS)]
    setting = Setting("sol_attn", form, levels, "exact")
    again = Setting.from_json(json.loads(json.dumps(setting.to_json())))
    assert str(again) == str(setting)  # NaN equals nothing
    assert again.form == form


@pytest.mark.parametrize("form", FORMS, ids=str)
@settings(max_examples=8)
@given(target=st.floats(0.3, 0.95))
def test_every_group_meets_its_target_to_within_one_step(form: Form, target: float):
    calibration = small_calibration("sol_attn")
    found = solve_density(calibration, target, form)
    groups = form.group_map(LAYERS, TIMES)
    levels = found.setting.level_map(LAYERS, TIMES).nan_to_num(neginf=0)

    def density(group: int, rise: float) -> float:
        return float(calibration.density(levels + rise).mean((0, 3, 4))[groups == group].mean())

    for group in range(form.groups(LAYERS)):
        now = density(group, 0.0)
        sparser = [density(group, rise) for rise in (0.01, 0.02, 0.05, 0.1, 0.3, 1.0)]
        below = [x for x in sparser if x < now - 1e-12]
        assert now >= target - 1e-12  # sums in another order
        assert not below or below[0] < target
        assert found.predicted[group] == pytest.approx(now, abs=1e-12)


def test_dense_calls_count_in_the_overall_density_alone():
    form = Form(dense_layers=(1,))
    found = solve_density(small_calibration("sol_attn"), 0.5, form)
    assert found.predicted[0] == pytest.approx(0.5, abs=0.01)
    assert found.overall == pytest.approx((found.predicted[0] + 1) / 2)


def test_skip_softmax_stays_within_what_one_pass_can_tell():
    calibration = small_calibration("skip_softmax")
    for form in (Form(), Form(shape="linear", span=3.0)):
        found = solve_density(calibration, 1.0, form)
        assert float(found.setting.level_map(LAYERS, TIMES).max()) <= 0


@pytest.mark.parametrize(("algorithm", "why"), [("sol_attn", "band"), ("skip_softmax", "lambda")])
def test_a_target_out_of_reach_names_the_reach(algorithm: str, why: str):
    calibration = small_calibration(algorithm)
    with pytest.raises(
        ValueError, match=rf"target_density=0\.01.* reaches [01]\.\d+ to 1\.0.*{why}"
    ):
        solve_density(calibration, 0.01)


def test_a_drift_that_puts_the_target_out_of_reach_is_named():
    with pytest.raises(ValueError, match=r"target_density=0\.9500 .* takes 1\.0500 on dense calls"):
        solve_density(small_calibration("sol_attn"), 0.95, drift=-0.1)


def test_a_form_without_a_sparse_call_is_refused():
    with pytest.raises(ValueError, match="leave no call sparse"):
        solve_density(small_calibration("sol_attn"), 0.5, Form(dense_layers=(0, 1)))
    with pytest.raises(ValueError, match=r"dense_layers has \[2\]"):
        solve_density(small_calibration("sol_attn"), 0.5, Form(dense_layers=(2,)))
    with pytest.raises(ValueError, match="only sol_attn has this field"):
        solve_density(small_calibration("skip_softmax"), 1.0, Form(dense_layers=(1,)))


@pytest.mark.parametrize(
    ("given", "message"),
    [({}, "exactly one"), ({"density": 0.1, "sparsity": 0.9}, "exactly one"),
     ({"density": 1.5}, r"must be in \[0, 1\]")],
)  # fmt: skip
def test_a_target_is_one_share(given: dict, message: str):
    with pytest.raises(ValueError, match=message):
        target_density(**given)


def test_a_sparsity_is_one_minus_the_density():
    assert target_density(sparsity=0.85) == pytest.approx(0.15)
