"""One pass over a sampling predicts the density of real calls, in memory known beforehand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from blockattn import skip_gaps, skip_softmax_attention, sol_attention, sol_scores
from tests.calibrate_inputs import SAMPLES, small_calibration, small_model
from workbench.calibrate.collect import Collector, calibrate, plan_for
from workbench.calibrate.file import open_calibration, save_calibration
from workbench.calibrate.samples import Samples
from workbench.calibrate.scores import Geometry, ScoreTable, kept_ranks
from workbench.models import AttentionCall, VideoDiT, dense_attention, load_model
from workbench.probe import density_per_head

RANDOM_VALUES = 50
CHECKED_LAYERS = (1, 4)


def real_densities(
    model: VideoDiT, samples: Samples, algorithm: str, values: list[float]
) -> dict[tuple[int, int], Tensor]:
    """(layer, step) -> density of a real call per value and head; dense output goes on.

    A head with a score within 1e-4 relative of the value is NaN: rounding may decide there.
    """
    found: dict[tuple[int, int], Tensor] = {}

    def attention(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
        if call.layer in CHECKED_LAYERS:
            scores = sol_scores(q, k).z if algorithm == "sol_attn" else skip_gaps(q, k).gaps
            rows = [real_density(algorithm, q, k, v, value, scores) for value in values]
            found[call.layer, call.step or 0] = torch.stack(rows)
        return dense_attention(q, k, v, call)

    samples.run(model, 0, attention)
    return found


def real_density(
    algorithm: str, q: Tensor, k: Tensor, v: Tensor, value: float, scores: Tensor
) -> Tensor:
    if algorithm == "sol_attn":
        trace, level = sol_attention(q, k, v, tau=value, return_trace=True)[1], value
    else:
        trace = skip_softmax_attention(q, k, v, threshold=value, return_trace=True)[1]
        level = math.log2(value)
    near = (scores - level).abs() <= 1e-4 * max(1.0, abs(level))
    return density_per_head(trace).masked_fill(near.flatten(2).any(dim=-1), torch.nan)


@pytest.mark.parametrize("algorithm", ["sol_attn", "skip_softmax"])
def test_the_one_pass_predicts_real_calls_exactly_for_fifty_random_values(algorithm: str):
    numbers = torch.rand(RANDOM_VALUES, generator=torch.Generator().manual_seed(1)).double()
    levels = (4 * numbers - 1 if algorithm == "sol_attn" else -8 * numbers).tolist()
    values = levels if algorithm == "sol_attn" else [2.0**level for level in levels]
    model, samples = load_model(), Samples(("disc",), (3,), grid=(4, 16, 16), steps=1)
    calibration = calibrate(model, plan_for(model, algorithm, samples))
    predicted = torch.stack([calibration.density(level) for level in levels])
    compared, seen = 0, set()
    for (layer, step), real in real_densities(model, samples, algorithm, values).items():
        ours = predicted[:, 0, layer, step]
        clear = real.isfinite()
        assert torch.equal(ours[clear], real[clear])
        compared += int(clear.sum())
        seen |= set(real[clear].tolist())
    checked = len(CHECKED_LAYERS) * samples.steps * calibration.heads
    assert compared > 0.8 * RANDOM_VALUES * checked
    assert len(seen) > 10  # the values really make different densities


def test_collecting_changes_no_bit_of_the_sampled_video():
    collector = Collector(plan_for(small_model(), "sol_attn", SAMPLES))
    collected = SAMPLES.run(small_model(), 0, collector)
    assert torch.equal(collected, SAMPLES.run(small_model(), 0, dense_attention))


def test_guidance_keeps_both_halves_of_the_batch():
    samples = Samples(("ring",), (5,), grid=(2, 8, 16), steps=1, guidance=2.0)
    calibration = calibrate(small_model(), plan_for(small_model(), "sol_attn", samples))
    assert calibration.density(0.5).shape == (1, 2, 1, 2, 2)


def test_a_call_that_never_came_is_named():
    collector = Collector(plan_for(small_model(), "sol_attn", SAMPLES))
    SAMPLES.run(small_model(), 0, collector)
    with pytest.raises(ValueError, match="video 1, layer 0, step 0: no call came"):
        collector.table()


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 128, 129, 200, 1000])
def test_pairs_and_always_exact_pairs_are_those_of_the_kernels(tokens: int):
    q = torch.randn(1, tokens, 1, 8)
    sol, skip = Geometry("sol_attn", tokens), Geometry("skip_softmax", tokens)
    always = sol_scores(q, q).always.dense()
    assert (sol.pairs, sol.always) == (always.numel(), int(always.sum()))
    assert (skip.pairs, skip.always) == (skip_gaps(q, q).gaps.numel(), 0)


def counted(table: ScoreTable, scores: Tensor, level: float) -> Tensor:
    """Density by counting, without sorting."""
    value = torch.tensor(level, dtype=torch.float64).float()
    exact = scores > value if table.geometry.algorithm == "sol_attn" else scores >= value
    return (exact.sum(dim=-1) + table.geometry.always).double() / table.geometry.pairs


@given(
    algorithm=st.sampled_from(["sol_attn", "skip_softmax"]),
    seed=st.integers(0, 1000),
    points=st.integers(2, 400),
    digits=st.integers(0, 3),
    level=st.floats(-3, 3),
)
def test_a_table_is_exact_or_within_its_bound(
    algorithm: str, seed: int, points: int, digits: int, level: float
):
    geometry = Geometry(algorithm, 1000 if algorithm == "sol_attn" else 2000)
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(2, geometry.scores, generator=generator).round(decimals=digits)
    ranks = kept_ranks(geometry.scores, points)
    table = ScoreTable(scores.sort(dim=-1).values[:, ranks], ranks, geometry)
    levels = [round(level, digits), level, -math.inf, 100.0]
    for value in levels:
        off = (table.density(value) - counted(table, scores, value)).abs().max()
        assert float(off) <= table.bound + 1e-12
    assert table.exact == (points >= geometry.scores)
    assert (table.bound == 0) == (table.exact or int(ranks.diff().max()) == 1)


def test_a_table_never_gets_denser_as_the_level_rises():
    density = torch.stack(
        [small_calibration("sol_attn").density(level) for level in torch.linspace(-3, 5, 40)]
    )
    assert bool((density.diff(dim=0) <= 0).all())
    assert bool((density >= 0).all() and (density <= 1).all())


def test_the_size_is_known_before_and_equal_after():
    plan = plan_for(small_model(), "sol_attn", SAMPLES)
    points = small_calibration("sol_attn").table.points
    assert plan.table_bytes == points.numel() * points.element_size()
    assert plan.bound == 0.0
    assert f"{plan.table_bytes:,} bytes" in str(plan)


def test_a_small_limit_coarsens_and_states_its_bound():
    samples = Samples(("ring",), (5,), grid=(4, 16, 16), steps=1)
    exact = calibrate(small_model(), plan_for(small_model(), "sol_attn", samples))
    limit = 4 * 4 * 70  # 70 of 210 scores of 2 layers x 2 heads
    plan = plan_for(small_model(), "sol_attn", samples, limit_bytes=limit)
    coarse = calibrate(small_model(), plan)
    assert plan.table_bytes == coarse.table.points.numel() * 4 <= limit
    assert 0 < plan.bound == coarse.table.bound < 0.01
    for level in torch.linspace(-2, 4, 25).tolist():
        assert float((coarse.density(level) - exact.density(level)).abs().max()) <= plan.bound


def test_a_limit_below_sixty_five_scores_a_head_is_refused():
    samples = Samples(("ring",), (5,), grid=(4, 16, 16), steps=1)
    with pytest.raises(ValueError, match=r"limit_bytes=1,000: .* need at least 1,040 bytes"):
        plan_for(small_model(), "sol_attn", samples, limit_bytes=1000)


def test_one_block_of_tokens_is_always_exact():
    samples = Samples(("ring",), (5,), grid=(2, 4, 8), steps=1)
    calibration = calibrate(small_model(), plan_for(small_model(), "sol_attn", samples))
    assert calibration.density(1000.0).unique().tolist() == [1.0]


def test_a_file_reads_back_equal(tmp_path: Path):
    made = small_calibration("skip_softmax")
    path = save_calibration(made, tmp_path / "a.safetensors")
    again = open_calibration(path)
    assert torch.equal(again.table.points, made.table.points)
    assert (again.samples, again.thresh_type) == (made.samples, made.thresh_type)
    assert torch.equal(again.density(-1.5), made.density(-1.5))
    with pytest.raises(FileExistsError, match="exists already"):
        save_calibration(made, path)


def test_other_files_are_refused_by_name(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="no such file"):
        open_calibration(tmp_path / "none.safetensors")
    other, damaged = tmp_path / "other.safetensors", tmp_path / "damaged.safetensors"
    save_file({"points": torch.zeros(1)}, other)
    with pytest.raises(ValueError, match="metadata format is None"):
        open_calibration(other)
    whole = save_calibration(small_calibration("sol_attn"), tmp_path / "whole.safetensors")
    damaged.write_bytes(whole.read_bytes()[:-100])
    with pytest.raises(ValueError, match="no readable safetensors file"):
        open_calibration(damaged)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seeds": ()}, "must be at least one"),
        ({"seeds": (1, 1)}, "without repeats"),
        ({"labels": ("house",)}, "known names"),
        ({"steps": 0}, "steps=0"),
        ({"grid": (0, 4, 4)}, "grid t=0"),
    ],
)
def test_samples_refuse_what_cannot_be_sampled(settings: dict, message: str):
    with pytest.raises(ValueError, match=message):
        Samples(**settings)


def test_a_plan_refuses_what_its_algorithm_would_not_look_at():
    with pytest.raises(ValueError, match="skip_softmax would not look at it"):
        plan_for(small_model(), "skip_softmax", SAMPLES, thresh_type="exact")
    with pytest.raises(ValueError, match="algorithm='vsa'"):
        plan_for(small_model(), "vsa", SAMPLES)


def test_both_types_of_deviation_are_calibrated():
    plan = plan_for(small_model(), "sol_attn", SAMPLES, thresh_type="exact")
    exact = calibrate(small_model(), plan)
    assert exact.thresh_type == "exact"
    assert not torch.equal(exact.density(1.0), small_calibration("sol_attn").density(1.0))
