"""`workbench tune` as plain functions: what is measured, how a value is chosen, what is said."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch import Tensor

from blockattn import attend, sol_attention, sol_route
from tests.tune_inputs import BLOCKS, ENTRIES, HEADS, time_of, write_capture
from workbench.capture import Capture
from workbench.config import SkipSoftmaxConfig, SolAttnConfig
from workbench.curves import Curve
from workbench.devices import choose_device
from workbench.probe import attention_error
from workbench.tune import text as tune_text
from workbench.tune.choice import for_density, for_error, next_above, towards_dense
from workbench.tune.figures import FIGURES
from workbench.tune.methods import FALLBACK_LADDER, SkipSoftmax
from workbench.tune.run import TuneResult, run, units, warnings_of
from workbench.tune.settings import TuneSettings, knob_values, parse_numbers, parse_values

STEP = 1 / (BLOCKS**2 * HEADS * len(ENTRIES))  # what one block pair adds to the mean density
TAUS = (0.0, 1.5, 3.0)


@pytest.fixture(scope="module")
def capture(tmp_path_factory: pytest.TempPathFactory) -> Capture:
    return write_capture(tmp_path_factory.mktemp("tune") / "fields.safetensors")


@pytest.fixture(scope="module")
def falling(tmp_path_factory: pytest.TempPathFactory) -> Capture:
    """Key tile j scores e^-j of tile 0, so that thresholds drop known tiles."""
    path = tmp_path_factory.mktemp("tune") / "falling.safetensors"
    return write_capture(path, entries=((0, 3),), tile_gap=1.0)


@pytest.fixture(scope="module")
def result(capture: Capture) -> TuneResult:
    return run(capture, TuneSettings(values=TAUS, repeats=1))


def tuned(capture: Capture, **settings: object) -> TuneResult:
    return run(capture, TuneSettings(**{"repeats": 0, **settings}))  # pyright: ignore[reportArgumentType]


def printed(result: TuneResult) -> str:
    console = Console(record=True, width=120, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    tune_text.show(result, console)
    return console.export_text()


# -- what is measured ---------------------------------------------------------------------------


def test_there_is_a_row_for_every_entry_head_and_value(result: TuneResult):
    seen = {(row.layer, row.step, row.batch, row.head, row.value) for row in result.rows}
    wanted = {(*entry, 0, head, tau) for entry in ENTRIES for head in range(HEADS) for tau in TAUS}
    assert seen == wanted
    assert len(result.rows) == len(wanted)
    assert all(row.time == pytest.approx(time_of(row.step)) for row in result.rows)


def test_a_row_holds_the_density_and_the_true_error_of_its_head(
    capture: Capture, result: TuneResult
):
    row = result.rows[-1]
    data = capture.load(row.layer, row.step)
    q, k, v = data.q, data.k, data.v
    route = sol_route(q, k, tau=row.value)
    assert row.density == row.density_delivered
    assert row.density == float(route.density_per_head()[0, row.head])
    out = sol_attention(q, k, v, tau=row.value, impl=row.impl)
    error = attention_error(out, attend(q, k, v, impl=row.impl))
    assert row.relative_l2 == float(error.relative_l2[0, row.head])
    assert row.cosine == float(error.cosine[0, row.head])
    assert row.max_abs == float(error.max_abs[0, row.head])


def test_it_ran_sparse_and_not_dense(result: TuneResult):
    assert all(row.density_delivered < 1 for row in result.rows)
    assert all(row.relative_l2 > 0.01 for row in result.rows)
    # Whether it was faster depends on the machine.
    assert not [text for text in result.warnings if "was faster than dense" not in text]


def test_a_run_in_which_nothing_was_faster_says_so(result: TuneResult):
    slow = timed(result, listed=2.0, chosen=2.0)
    assert any("no tau tried was faster than dense" in text for text in warnings_of(slow))
    for fast in (timed(result, listed=0.5, chosen=2.0), timed(result, listed=2.0, chosen=0.5)):
        assert not any("faster" in text for text in warnings_of(fast))


def timed(result: TuneResult, *, listed: float, chosen: float) -> TuneResult:
    """With these ratios sparse / dense for the values listed and for the chosen one."""
    rows = [replace(row, sparse_ms=listed, dense_ms=1.0) for row in result.rows]
    verified = [replace(row, sparse_ms=chosen, dense_ms=1.0) for row in result.choice.rows]
    return replace(result, rows=rows, choice=replace(result.choice, rows=verified))


def test_density_falls_and_the_time_estimate_with_it(result: TuneResult):
    lines = result.lines()
    density = [line.density for line in lines]
    assert density == sorted(density, reverse=True)
    assert [line.ratio_estimated for line in lines] == pytest.approx([d + 1 / 64 for d in density])
    assert all(
        line.density_alone is not None and line.density_alone < line.density for line in lines
    )


def test_a_line_is_the_mean_over_heads_layers_and_steps(result: TuneResult):
    rows = [row for row in result.rows if row.value == 1.5]
    line = result.lines()[1]
    assert line.error == pytest.approx(np.mean([row.relative_l2 for row in rows]))
    assert line.error_max == max(row.relative_l2 for row in rows)
    assert (line.density_min, line.density_max) == (
        min(row.density for row in rows),
        max(row.density for row in rows),
    )


def test_time_is_measured_once_for_all_heads_of_a_call(result: TuneResult):
    pairs = {(row.layer, row.step, row.value, row.sparse_ms, row.dense_ms) for row in result.rows}
    assert len(pairs) == len(ENTRIES) * len(TAUS)
    assert all(sparse > 0 and dense > 0 for *_, sparse, dense in pairs)


def test_without_repeats_no_time_is_invented(capture: Capture):
    made = tuned(capture, values=(1.0,), layers=(0,))
    assert all(row.sparse_ms is None and row.dense_ms is None for row in made.rows)
    assert made.lines()[0].ratio_measured is None
    assert "not measured" in printed(made)


def test_progress_is_told_once_for_each_unit(capture: Capture):
    settings = TuneSettings(values=(0.0, 1.0), repeats=0)
    labels: list[str] = []
    run(capture, settings, tick=labels.append)
    assert len(labels) == units(capture, settings) == len(ENTRIES) * (1 + 2 + 1)


def test_the_curve_of_the_figures_passes_through_the_rows(result: TuneResult):
    at_ends = result.curve.per_head[..., [0, -1]].mean(dim=(0, 1)).tolist()
    assert at_ends == pytest.approx([result.lines()[0].density, result.lines()[-1].density])


# -- which entries ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "entries"),
    [
        ({"layers": (2,)}, {(2, 9)}),
        ({"steps": (9,)}, {(0, 9), (2, 9)}),
        ({"dense_layers": (0,)}, {(2, 9)}),
        ({"disabled_until_timestep": time_of(3)}, {(0, 9), (2, 9)}),  # equality is dense
    ],
)
def test_only_what_the_server_runs_sparse_is_measured(
    capture: Capture, settings: dict[str, object], entries: set[tuple[int, int]]
):
    made = tuned(capture, values=(1.0,), **settings)
    assert {(row.layer, row.step) for row in made.rows} == entries


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layers": (1,)}, r"layers=\[1\]: the capture has no \[1\]; it has \[0, 2\]"),
        ({"steps": (3, 4)}, r"steps=\[3, 4\]: the capture has no \[4\]"),
        ({"dense_layers": (0, 2)}, "nothing sparse is left"),
    ],
)
def test_entries_that_are_not_there_are_named(
    capture: Capture, settings: dict[str, object], message: str
):
    with pytest.raises(ValueError, match=message):
        tuned(capture, **settings)


# -- choosing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [0.35, 0.5, 0.75, 1.0])
def test_a_target_density_is_hit_within_a_block(capture: Capture, target: float):
    made = tuned(capture, values=(1.0,), target_density=target)
    delivered = made.choice.line.density
    assert target <= delivered + 1e-12
    # Equal scores fall together; two heads at most share one here.
    assert delivered - target < 2 * STEP
    assert f"{target:.4f} requested" in printed(made)


def test_the_chosen_value_is_written_with_few_digits(capture: Capture):
    made = tuned(capture, values=(1.0,), target_density=0.5)
    assert len(f"{made.choice.value!r}") <= 8


def test_a_density_out_of_reach_is_refused_with_the_range(capture: Capture):
    with pytest.raises(
        ValueError,
        match=r"target_density=0\.1: .* reaches 0\.2800 to 1\.0000 \(band blocks are always",
    ):
        tuned(capture, values=(1.0,), target_density=0.1)


def test_what_a_sink_adds_to_the_least_density_is_named(capture: Capture):
    with pytest.raises(ValueError, match=r"\(band and sink blocks are always exact\)"):
        tuned(capture, values=(1.0,), target_density=0.1, sink_tokens=100)


def test_a_density_below_that_of_the_largest_lambda_is_refused_with_the_reason(falling: Capture):
    with pytest.raises(ValueError, match=r"reaches 0\.2000 to .* \(lambda is at most 1\)") as seen:
        tuned(falling, algorithm="skip_softmax", values=(0.1,), target_density=0.1)
    assert "wider range" not in str(seen.value)


@pytest.mark.filterwarnings("ignore:threshold=1 ")
@pytest.mark.parametrize("algorithm", ["sol_attn", "skip_softmax"])
def test_the_least_density_that_is_named_can_be_had(falling: Capture, algorithm: str):
    asked = {"algorithm": algorithm, "values": (0.5,)}
    with pytest.raises(ValueError) as seen:
        tuned(falling, **asked, target_density=0.01)
    named = re.search(r"reaches (\S+) to", str(seen.value))
    assert named is not None
    least = float(named[1])
    made = tuned(falling, **asked, target_density=least)
    assert made.choice.line.density == pytest.approx(least, abs=0.00005)


def test_the_error_stays_below_its_target_in_a_real_run(capture: Capture, result: TuneResult):
    low, high = result.lines()[0].error, result.lines()[-1].error
    limit = (low + 2 * high) / 3
    made = tuned(capture, values=TAUS, target_error=limit)
    assert made.choice.line.error <= limit
    assert made.choice.line.error > low
    assert made.choice.value > TAUS[0]


def test_an_error_below_that_of_the_densest_setting_is_refused(capture: Capture):
    with pytest.raises(ValueError, match=r"target_error=0\.0001: the densest setting tried"):
        tuned(capture, values=TAUS, target_error=0.0001)


def test_an_error_above_that_of_the_sparsest_setting_takes_it_and_says_so(capture: Capture):
    made = tuned(capture, values=TAUS, target_error=9.0)
    assert made.choice.value == TAUS[-1]
    assert "the sparsest tried" in made.choice.why


def test_without_a_target_the_methods_default_is_exported_with_a_note(result: TuneResult):
    assert result.choice.value == 1.0
    assert "the method's default" in result.choice.why
    assert {(row.layer, row.step) for row in result.choice.rows} == set(ENTRIES)


def test_the_worst_heads_come_first(result: TuneResult):
    errors = [row.relative_l2 for row in result.worst()]
    assert errors == sorted(errors, reverse=True)
    assert len(errors) == len(ENTRIES) * HEADS


def stairs(values: list[float]) -> Tensor:
    """Density 1 - value in steps of 1/8, of one head: what a pass over 8 block pairs gives."""
    return torch.tensor([[[np.ceil(8 * (1 - v) - 1e-9) / 8 for v in values]]], dtype=torch.float64)


@given(st.floats(0, 1))
def test_inverting_a_staircase_delivers_the_target_or_the_next_step_above(target: float):
    value = for_density([stairs], target, (0.0, 1.0), float, name="tau", sparsest="")
    delivered = float(stairs([value]))
    assert target <= delivered < target + 1 / 8 + 1e-9


@given(st.lists(st.floats(0.01, 1), min_size=1, max_size=8), st.floats(0.01, 1))
def test_the_candidate_lies_between_the_last_good_probe_and_the_next(
    errors: list[float], limit: float
):
    positions = [float(n) for n in range(len(errors))]
    if errors[0] > limit:
        with pytest.raises(ValueError, match="target_error"):
            for_error(positions, errors, limit)
        return
    candidate, safe = for_error(positions, errors, limit)
    assert max(errors[: safe + 1]) <= limit
    assert safe == len(errors) - 1 or errors[safe + 1] > limit
    assert safe <= candidate <= safe + 1


@pytest.mark.parametrize(("value", "above"), [(0.012345, 0.0124), (0.5, 0.501), (1e-9, 1.01e-9)])
def test_a_ladder_threshold_lies_strictly_above_its_gap(value: float, above: float):
    assert next_above(value) == above


@given(st.floats(-50, 50, allow_subnormal=False))
def test_rounding_goes_towards_dense_and_not_far(value: float):
    rounded = towards_dense(value)
    assert rounded <= value
    assert rounded == pytest.approx(value, rel=2e-3)


# -- SkipSoftmax --------------------------------------------------------------------------------


def test_skip_softmax_drops_exactly_the_planted_tiles(falling: Capture):
    made = tuned(falling, algorithm="skip_softmax", values=(0.01, 0.1, 0.9))
    # e^-1, e^-2, e^-3, e^-4 = 0.37, 0.14, 0.05, 0.02 below tile 0, of 5 tiles in a row.
    assert [line.density for line in made.lines()] == pytest.approx([1.0, 0.6, 0.2])
    assert [line.ratio_estimated for line in made.lines()] == pytest.approx([1.0, 0.8, 0.6])
    assert made.lines()[1].error > 0.001
    delivered = [row.density_delivered for row in made.rows]
    assert delivered == pytest.approx([row.density for row in made.rows], abs=1e-12)


def test_the_default_ladder_spans_what_thresholds_can_do(falling: Capture):
    made = tuned(falling, algorithm="skip_softmax")
    densities = [line.density for line in made.lines()]
    assert densities[0] == pytest.approx(0.8)
    assert densities[-1] == pytest.approx(0.2)
    assert all(0 < value < 1 for value in made.values)


def test_the_exported_factor_is_lambda_times_the_keys(falling: Capture):
    made = tuned(falling, algorithm="skip_softmax", values=(0.1, 0.2), target_density=0.6)
    sparse = made.config().attention_config.sparse_attention_config
    assert isinstance(sparse, SkipSoftmaxConfig)
    assert sparse.threshold_scale_factor == made.choice.value * 600
    text = printed(made)
    assert f"threshold_scale_factor = {made.choice.value * 600:.4g}" in text
    assert "log2" in text
    assert f"Worst heads at lambda = {made.choice.value:.5g}" in text


def test_figures_name_lambda_in_their_titles(falling: Capture):
    made = tuned(falling, algorithm="skip_softmax", values=(0.1, 0.2))
    for name in ("route", "heatmap_error"):
        titles = [ax.get_title(loc="left") for ax in FIGURES[name](made).axes]
        assert [title for title in titles if re.search(r"lambda (= )?0\.[12]", title)]
        assert not [title for title in titles if "threshold" in title]


def test_thresholds_that_skip_nothing_are_reported_loudly(falling: Capture):
    made = tuned(falling, algorithm="skip_softmax", values=(1e-30,))
    text = printed(made)
    assert "1.000 [1.000..1.000]" in text
    assert "NOTHING WAS SKIPPED" in text
    assert "runs dense: nothing is gained" in text


def test_data_in_which_nothing_can_be_skipped_gets_a_fixed_ladder():
    gaps = SkipSoftmax().prepare(*(torch.ones(1, 256, 1, 16) for _ in range(2)))
    assert SkipSoftmax().default_values([gaps]) == FALLBACK_LADDER


# -- what is said -------------------------------------------------------------------------------


def test_taus_that_route_everything_are_called_dense(capture: Capture):
    made = tuned(capture, values=(-1000.0, 1.0))
    assert "ran dense (density 1.000) at tau -1000" in made.warnings
    dense = made.lines()[0]
    assert (dense.density, dense.density_min) == (1.0, 1.0)
    assert dense.error < 0.01


def test_a_chosen_value_that_skips_contradicts_no_warning(capture: Capture):
    made = tuned(capture, values=(-1000.0,))
    assert made.choice.line.density < 1  # the method's default, which the list did not hold
    assert "ran dense (density 1.000) at tau -1000" in made.warnings
    assert "NOTHING WAS SKIPPED" not in printed(made)
    assert not any("runs dense" in warning for warning in made.warnings)


def test_taus_that_leave_only_the_band_are_named(capture: Capture):
    made = tuned(capture, values=(1.0, 1000.0))
    assert "no block passes by itself (band and sink only) at tau 1000" in made.warnings


def test_dense_layers_that_the_capture_does_not_hold_are_named(capture: Capture):
    made = tuned(capture, values=(1.0,), dense_layers=(0, 1, 77))
    assert any("dense_layers 1, 77: exported, but" in warning for warning in made.warnings)
    assert not any("dense_layers" in w for w in tuned(capture, values=(1.0,)).warnings)


def test_a_sink_raises_the_density_and_its_loss_in_the_export_is_told(capture: Capture):
    plain, sink = (tuned(capture, values=(2.0,), sink_tokens=n) for n in (0, 100))
    assert sink.lines()[0].density > plain.lines()[0].density
    assert any("no field for sink_tokens" in warning for warning in sink.warnings)


def test_what_ran_and_why_nothing_faster_is_printed(result: TuneResult):
    text = printed(result)
    calls = len(ENTRIES) * (len(TAUS) + 1)
    assert sum(result.ran.calls.values()) == calls
    (name,) = result.ran.calls
    assert f"ran: {name} ({calls} calls)" in text
    told = replace(result, ran=replace(result.ran, reasons=["cute: needs a GPU"]))
    assert "not cute: needs a GPU" in printed(told)


def test_an_implementation_asked_for_is_the_one_that_runs(capture: Capture):
    made = tuned(capture, values=(1.0,), layers=(2,), impl="reference")
    assert set(made.ran.calls) == {"reference"}
    assert "as --impl reference asked for" in printed(made)


def test_the_export_carries_what_only_the_server_needs(capture: Capture):
    made = tuned(
        capture, values=(1.0,), thresh_type="exact", dense_layers=(0,), disabled_until_timestep=0.9
    )
    assert made.config().attention_config.sparse_attention_config == SolAttnConfig(
        tau=1.0, thresh_type="exact", dense_layers=(0,), disabled_until_timestep=0.9
    )


# -- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"algorithm": "vsa"}, "algorithm='vsa': must be one of 'sol_attn', 'skip_softmax'"),
        ({"impl": "cuda"}, "impl='cuda': must be one of"),
        ({"thresh_type": "mean"}, "thresh_type='mean': must be one of"),
        ({"values": ()}, "tau: no value given"),
        ({"values": (float("nan"),)}, "tau=nan: must be finite"),
        ({"sink_tokens": -1}, "sink_tokens=-1: must be at least 0"),
        ({"repeats": -1}, "repeats=-1: must be at least 0"),
        ({"target_density": 0.0}, r"target_density=0: must be in \(0, 1\]"),
        ({"target_density": 1.5}, r"target_density=1\.5: must be in \(0, 1\]"),
        ({"target_error": -0.1}, r"target_error=-0\.1: must be at least 0"),
        ({"target_density": 0.5, "target_error": 0.1}, "one of them decides"),
        ({"disabled_until_timestep": 0.0}, r"disabled_until_timestep=0\.0: must be in \(0, 1\]"),
        (
            {"algorithm": "skip_softmax", "values": (0.0,)},
            r"threshold=0: lambda must be in \(0, 1\]",
        ),
        ({"algorithm": "skip_softmax", "values": (2.0,)}, "above 1 a dropped tile"),
        ({"algorithm": "skip_softmax", "thresh_type": "diag"}, "skip_softmax has no such setting"),
        ({"algorithm": "skip_softmax", "sink_tokens": 3}, "sink_tokens=3: skip_softmax has no"),
        ({"algorithm": "skip_softmax", "dense_layers": (1,)}, "dense_layers=.*has no such setting"),
    ],
)
def test_settings_that_mean_nothing_are_refused_before_any_work(
    settings: dict[str, object], message: str
):
    with pytest.raises(ValueError, match=message):
        TuneSettings(**settings)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("settings", [{"values": (True,)}, {"repeats": True}, {"sink_tokens": 1.0}])
def test_a_bool_or_a_fraction_is_no_count(settings: dict[str, object]):
    with pytest.raises(TypeError, match="expected"):
        TuneSettings(**settings)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("0:3:4", (0.0, 1.0, 2.0, 3.0)),
        ("-1:1:3", (-1.0, 0.0, 1.0)),
        ("2:2:1", (2.0,)),
        ("0.5", (0.5,)),
        ("1,0.25, 3", (1.0, 0.25, 3.0)),
    ],
)
def test_values_are_a_range_or_a_list(text: str, values: tuple[float, ...]):
    assert parse_values("--taus", text) == values


@pytest.mark.parametrize("text", ["", "a", "0:3", "0:3:0", "0:3:1", "0:3:1.5", "0:inf:3", "1,,2"])
def test_values_that_cannot_be_read_are_shown(text: str):
    with pytest.raises(ValueError, match="--taus"):
        parse_values("--taus", text)


def test_a_falling_range_holds_the_same_values_as_the_rising_one():
    falling, rising = (parse_values("--taus", text) for text in ("3:0:5", "0:3:5"))
    assert TuneSettings(values=falling).values == TuneSettings(values=rising).values == rising


def test_the_other_algorithms_knob_is_refused():
    with pytest.raises(
        ValueError, match="--thresholds 1: sol_attn has no such setting; use --taus"
    ):
        knob_values("sol_attn", None, "1")
    with pytest.raises(ValueError, match=r"--taus 1: skip_softmax has no .* use --thresholds"):
        knob_values("skip_softmax", "1", None)


def test_layers_that_cannot_be_read_name_their_option():
    with pytest.raises(ValueError, match="--layers '1,,2': item 2 is empty"):
        parse_numbers("--layers", "1,,2")


@pytest.mark.parametrize("name", ["tpu", "cuda:99", "meta"])
def test_a_device_that_is_not_there_is_refused(name: str):
    with pytest.raises(ValueError, match=f"device='{name}'"):
        choose_device(name)


def test_curves_of_the_one_pass_are_real_curves(result: TuneResult):
    assert isinstance(result.curve, Curve)
    assert result.curve.per_head.shape == (len(ENTRIES), HEADS, len(result.curve.values))


def test_the_table_marks_the_chosen_value(result: TuneResult):
    marked = [line for line in printed(result).splitlines() if line.startswith("->")]
    assert len(marked) == 1
    assert marked[0].split()[1] == "1"


def test_a_capture_file_is_not_touched(capture: Capture, tmp_path: Path):
    before = capture.path.read_bytes()
    tuned(capture, values=(1.0,), layers=(2,))
    assert capture.path.read_bytes() == before
