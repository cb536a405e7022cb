"""The denoising phase: equality is dense, the largest time counts, NaN is an error."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workbench.attention.phase import DENSE, SPARSE, StepTime, dense_steps, phase, step_time
from workbench.models.sampler import denoising_times

CUTOFF = 0.9


@pytest.mark.parametrize(
    ("time", "expected"),
    [
        (1.0, DENSE),
        (math.nextafter(CUTOFF, 1), DENSE),
        (CUTOFF, DENSE),
        (math.nextafter(CUTOFF, 0), SPARSE),
        (0.0, SPARSE),
        (1, DENSE),
        (0, SPARSE),
    ],
)
def test_dense_at_and_above_the_cutoff_sparse_below(time: float, expected: int):
    assert phase(time, CUTOFF) == expected


@pytest.mark.parametrize("time", [None, torch.empty(0), torch.empty(0, 4)])
def test_no_time_has_no_phase(time: object):
    assert phase(time, CUTOFF) is None


def test_no_cutoff_has_no_phase():
    assert phase(0.5, None) is None


def test_a_cutoff_of_0_is_dense_for_ever_and_of_1_at_the_first_time_alone():
    assert [phase(t, 0.0) for t in (1.0, 0.5, 0.0)] == [DENSE] * 3
    assert [phase(t, 1.0) for t in (1.0, 0.999, 0.0)] == [DENSE, SPARSE, SPARSE]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@given(cutoff=st.floats(0.01, 1))
def test_equality_is_dense_in_the_times_own_dtype(dtype: torch.dtype, cutoff: float):
    time = torch.tensor(cutoff, dtype=dtype)
    assert phase(time, cutoff) == DENSE
    below = torch.nextafter(time.float(), torch.tensor(0.0)) if dtype == torch.float32 else None
    if below is not None:
        assert phase(below, cutoff) == SPARSE


def test_skip_weakness_37_of_per_token_times_the_largest_counts():
    # A conditioning frame is pinned to time 0 while the others are still noisy.
    times = torch.tensor([[0.0, 0.95, 0.95], [0.0, 0.2, 0.2]])
    assert phase(times, CUTOFF) == DENSE
    assert step_time(times) == StepTime(pytest.approx(0.95), torch.float32)
    assert phase(times.clamp(max=0.89), CUTOFF) == SPARSE


@pytest.mark.parametrize("time", [True, "0.5", [0.5], 1j, torch.tensor(True), torch.tensor(1j)])
def test_what_is_no_real_number_is_a_type_error(time: object):
    with pytest.raises(TypeError, match=r"time.*expected (a number|real numbers)"):
        step_time(time)


@pytest.mark.parametrize(
    "time", [math.nan, math.inf, -math.inf, torch.tensor([0.5, math.nan]), torch.tensor(math.inf)]
)
def test_nan_and_infinity_are_value_errors(time: object):
    with pytest.raises(ValueError, match="must be finite"):
        step_time(time)


@pytest.mark.parametrize("time", [999, -0.01, 1.001, torch.tensor([999])])
def test_a_time_that_is_not_normalised_says_how_to_normalise_it(time: object):
    with pytest.raises(ValueError, match="divide a scheduler's timestep by its number"):
        step_time(time)


def unipc_times(steps: int = 40, shift: float = 3.0) -> list[float]:
    """Times of a shifted schedule of 1000 training steps, before the scheduler's own rounding."""
    base = [1 - i * (1 - 1 / 1000) / steps for i in range(steps)]
    return [shift * s / (1 + (shift - 1) * s) for s in base]


@pytest.mark.parametrize(
    ("cutoff", "steps"),
    # The server's table has 0 and 10 at the cutoffs 1.00 and 0.90: there a time ties with the
    # cutoff, and the scheduler's rounding decides.
    [(1.00, 1), (0.97, 4), (0.94, 7), (0.93, 8), (0.90, 11), (0.86, 14), (None, 0), (0.0, 40)],
)
def test_dense_steps_of_a_shifted_schedule(cutoff: float | None, steps: int):
    assert dense_steps(unipc_times(), cutoff) == steps


def test_the_samplers_own_schedule_starts_dense_and_ends_sparse():
    times = denoising_times(20)[:-1]
    phases = [phase(time, 0.86) for time in times]
    assert phases == sorted(phases)
    assert set(phases) == {DENSE, SPARSE}
