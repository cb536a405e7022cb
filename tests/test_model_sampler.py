"""Sampling: from noise at t = 1 to video at t = 0."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.model_inputs import tiny_model
from workbench.models.dit import DiTConfig, VideoDiT, dense_attention
from workbench.models.sampler import denoising_times, initial_noise, integrate, sample

GRID = (2, 2, 3)


class Oracle(VideoDiT):
    """Knows the video at the end of the path, so it gives the true velocity (x_t - x0) / t."""

    def __init__(self, video: torch.Tensor) -> None:
        super().__init__(DiTConfig(depth=1, width=16, heads=1, head_dim=16))
        self.video = video

    def forward(self, x, time, label, *, attention=dense_attention, step=None, order="raster"):
        return (x - self.video) / time


@given(steps=st.integers(1, 60), shift=st.floats(0.2, 10))
def test_times_fall_from_one_to_zero(steps, shift):
    times = denoising_times(steps, shift)
    assert len(times) == steps + 1
    assert (times[0], times[-1]) == (1.0, 0.0)
    assert all(later < earlier for earlier, later in pairwise(times))


def test_shift_spends_more_steps_near_the_noise():
    assert denoising_times(4, 1.0) == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert denoising_times(4, 3.0) == pytest.approx([1.0, 0.9, 0.75, 0.5, 0.0])


@pytest.mark.parametrize("steps", [0, -1, 2.0, True])
def test_steps_that_are_no_count_are_refused(steps):
    with pytest.raises(ValueError, match="steps="):
        denoising_times(steps)


@pytest.mark.parametrize("shift", [0.0, -1.0, float("nan"), float("inf")])
def test_a_shift_that_is_no_factor_is_refused(shift):
    with pytest.raises(ValueError, match="shift="):
        denoising_times(4, shift)


@pytest.mark.parametrize("steps", [1, 2, 7])
@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_a_perfect_velocity_recovers_the_video(steps, guidance):
    wanted = torch.rand(1, 4, 8, 12, 3, generator=torch.Generator().manual_seed(0))
    model = Oracle(2 * wanted - 1)
    video = sample(model, labels=[0], grid=GRID, steps=steps, guidance=guidance)
    torch.testing.assert_close(video, wanted, atol=1e-5, rtol=0)


def test_the_integrator_is_exact_for_a_velocity_linear_in_time_after_its_first_step():
    times = denoising_times(5, 3.0)
    start = torch.zeros(3)
    got = integrate(lambda x, time, step: torch.full_like(x, 2 * time), start, times)
    # The integral of 2 t is t squared; only the first step, which has no past, errs.
    first_error = (times[1] - times[0]) * 2 * times[0] - (times[1] ** 2 - times[0] ** 2)
    torch.testing.assert_close(got, torch.full((3,), -1.0 + first_error))


def test_every_model_call_says_its_step_and_time():
    calls = []

    def record(q, k, v, call):
        calls.append((call.layer, call.step, call.time, call.grid, q.shape[0]))
        return dense_attention(q, k, v, call)

    sample(tiny_model(), labels=[0, 1], grid=GRID, steps=3, attention=record)
    times = denoising_times(3)
    # Guidance runs both halves as one batch: two labels make four samples.
    assert calls == [(layer, s, times[s], GRID, 4) for s in range(3) for layer in range(2)]


def test_without_guidance_the_batch_is_not_doubled():
    batches = []

    def record(q, k, v, call):
        batches.append(q.shape[0])
        return dense_attention(q, k, v, call)

    sample(tiny_model(), labels=[0, 1], grid=GRID, steps=2, guidance=1, attention=record)
    assert batches == [2] * 4


def test_a_video_depends_on_its_seed_and_label_alone():
    model = tiny_model()
    options = {"grid": GRID, "steps": 2}
    together = sample(model, labels=[1, 4], seed=5, **options)
    alone = sample(model, labels=["square"], seed=5, **options)
    assert together.shape == (2, 4, 8, 12, 3)
    assert together.dtype == torch.float32
    torch.testing.assert_close(together[:1], alone, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(sample(model, labels=[1], seed=6, **options), alone, atol=1e-3)


def test_noise_is_standard_normal():
    noise = initial_noise([2, 8, 32, 32, 3], seed=0, device=None)
    assert abs(noise.mean()) < 0.02
    assert abs(noise.std() - 1) < 0.02
    assert not torch.equal(noise[0], noise[1])


@pytest.mark.parametrize("labels", [[], "disc", ["blob"], [6], [-1], [True]])
def test_a_label_that_is_no_class_is_refused(labels):
    with pytest.raises(ValueError, match="labels"):
        sample(tiny_model(), labels=labels, grid=GRID, steps=1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"seed": 2**63}, "seed=9223372036854775808"), ({"guidance": math.inf}, "guidance=inf")],
)
def test_settings_that_make_no_video_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        sample(tiny_model(), labels=[0], grid=GRID, steps=1, **settings)
