"""Denoising time from the actual forward calls: schedules, guidance, two transformers, steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("diffusers", reason="needs diffusers: pip install 'diffusers>=0.35.2'")
pytest.importorskip("transformers", reason="needs transformers, for the pipelines of diffusers")

import diffusers
from diffusers.pipelines.mochi.pipeline_mochi import linear_quadratic_schedule

import workbench
from tests.attach_inputs import CASES, CUTOFF, GRID, Case
from workbench.attention.phase import dense_steps
from workbench.config import SkipSoftmaxConfig, SolAttnConfig
from workbench.diffusers.forward import Clock

WAN = CASES[0]
LATE = SolAttnConfig(tau=1.0, disabled_until_timestep=CUTOFF)
BOUNDARY = 0.875
STEPS = 6


def wan_pipeline(scheduler: Any, *, two: bool = True) -> Any:
    """A real pipeline around tiny transformers; prompts are given as embeddings."""
    torch.manual_seed(0)
    width = {"num_attention_heads": 2, "attention_head_dim": 64}
    parts = [
        diffusers.WanTransformer3DModel(
            **width, in_channels=16, out_channels=16, text_dim=16, freq_dim=16, ffn_dim=32,
            num_layers=1,
        ).eval()
        for _ in range(2 if two else 1)
    ]  # fmt: skip
    pipe = diffusers.WanPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=None,
        scheduler=scheduler,
        transformer=parts[0],
        transformer_2=parts[1] if two else None,
        boundary_ratio=BOUNDARY if two else None,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def unipc(**settings: Any) -> Any:
    return diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0, **settings
    )


def video(pipe: Any) -> Tensor:
    return pipe(
        prompt_embeds=torch.ones(1, 8, 16),
        negative_prompt_embeds=torch.zeros(1, 8, 16),
        height=128,
        width=128,
        num_frames=13,
        num_inference_steps=STEPS,
        output_type="latent",
        generator=torch.Generator().manual_seed(0),
    ).frames


# --- one transformer


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize(
    ("time", "sparse"), [(1.0, False), (0.95, False), (0.9, False), (0.85, True)]
)
def test_the_phase_follows_the_time_of_the_forward_call(case: Case, time: float, sparse: bool):
    """Mochi counts its time upwards, the others downwards."""
    model = case.model()
    with workbench.attach(model, LATE, strict=True, record=True) as attached:
        case.run(model, time=time)
    assert {record.kind for record in attached.records} == {"sparse" if sparse else "dense"}
    assert attached.records[0].time == pytest.approx(time)


def test_of_times_per_token_the_largest_decides():
    model = WAN.model()
    inputs = WAN.inputs()
    tokens = GRID[0] * GRID[1] * GRID[2]
    times = torch.zeros(2, tokens)
    times[1, -1] = 950.0
    with workbench.attach(model, LATE) as attached, torch.no_grad():
        model(**{**inputs, "timestep": times})
    assert attached.counts().dense["dense phase"] == 2


def test_a_whole_number_of_a_discrete_schedule_is_understood():
    case = next(case for case in CASES if case.name == "cogvideox")
    model = case.model()
    inputs = {**case.inputs(), "timestep": torch.tensor([900, 900])}
    with workbench.attach(model, LATE) as attached, torch.no_grad():
        model(**inputs)
    assert attached.counts().dense == {"dense phase": 2}  # equality is dense


@pytest.mark.parametrize("case", [WAN, CASES[-1]], ids=lambda case: case.name)
def test_steps_are_told_apart_as_finely_as_the_model_is_told_its_times(case: Case):
    """Mochi gets bfloat16: near full noise one minus the time is the same for several steps."""
    model, steps = case.model(), []
    with workbench.attach(model, None, observe=lambda q, k, v, call: steps.append(call.step)):
        for moved in (0.0, 0.78125, 1.5625, 2.34375):
            noise = moved if case.name == "mochi" else 10 - moved
            given = {**case.inputs(), "timestep": torch.full((2,), noise, dtype=torch.bfloat16)}
            with torch.no_grad():
                model(**given)
    assert sorted(set(steps)) == [0, 1, 2, 3]


def test_the_time_may_be_positional_and_the_scale_another():
    model = WAN.model()
    inputs = WAN.inputs()
    with workbench.attach(model, LATE, train_timesteps=100) as attached, torch.no_grad():
        model(inputs["hidden_states"], torch.tensor([95.0, 95.0]), inputs["encoder_hidden_states"])
        with pytest.raises(ValueError, match=r"time=5\.0: must be in \[0, 1\]"):
            model(**inputs)
    assert attached.counts().dense["dense phase"] == 2


def test_a_configuration_without_a_dense_phase_does_not_read_the_time(
    monkeypatch: pytest.MonkeyPatch,
):
    model = WAN.model()
    inputs = WAN.inputs()
    inputs["timestep"] = Unreadable(inputs["timestep"])
    with workbench.attach(model, SolAttnConfig(tau=1.0)) as attached, torch.no_grad():
        model(**inputs)
    assert attached.counts().sparse == 2


class Unreadable(Tensor):
    """A tensor whose value must not reach the host, as on a GPU."""

    @staticmethod
    def __new__(cls, x: Tensor) -> Unreadable:
        return Tensor._make_subclass(cls, x)

    def item(self) -> Any:
        raise AssertionError("read")


@pytest.mark.parametrize(
    ("times", "steps"),
    [
        ([1.0, 0.9, 0.5], [0, 1, 2]),
        ([1.0, 1.0, 0.9, 0.9], [0, 0, 1, 1]),  # guidance in separate calls
        ([1.0, 0.5, 1.0, 0.5], [0, 1, 0, 1]),  # a second video
    ],
)
def test_steps_are_counted_by_falling_times(times: list[float], steps: list[int]):
    clock = Clock()
    assert [clock.tick(time) for time in times] == steps


# --- pipelines


@pytest.mark.parametrize(
    "scheduler",
    [unipc, lambda: diffusers.FlowMatchEulerDiscreteScheduler(shift=5.0)],
    ids=["unipc", "euler"],
)
def test_as_many_steps_are_dense_as_the_schedule_has_times_at_or_above_the_cutoff(scheduler: Any):
    pipe = wan_pipeline(scheduler(), two=False)
    with workbench.attach(pipe, LATE, strict=True, record=True) as attached:
        video(pipe)
    times = [float(t) / 1000 for t in pipe.scheduler.timesteps]
    dense = {record.step for record in attached.records if record.kind == "dense"}
    assert dense == set(range(dense_steps(times, CUTOFF)))
    assert 0 < len(dense) < STEPS
    assert [record.step for record in attached.records] == [s for s in range(STEPS) for _ in "ab"]
    assert [r.time for r in attached.records[::2]] == pytest.approx(times)


def test_both_transformers_of_a_pipeline_are_attached_and_count_steps_together():
    pipe = wan_pipeline(unipc())
    seen: list[tuple[str, int | None]] = []
    with workbench.attach(
        pipe, LATE, strict=True, observe=lambda q, k, v, call: seen.append((call.model, call.step))
    ) as attached:
        video(pipe)
    high = sum(float(t) >= 1000 * BOUNDARY for t in pipe.scheduler.timesteps)
    assert 0 < high < STEPS
    names = ["transformer"] * high + ["transformer_2"] * (STEPS - high)
    assert seen == [(name, step) for step, name in enumerate(names) for _ in "ab"]
    assert [model.name for model in attached.models] == ["transformer", "transformer_2"]
    assert attached.counts().total == 4 * STEPS


def test_a_pipeline_attached_dense_makes_the_same_video_bit_for_bit():
    pipe = wan_pipeline(unipc())
    bare = video(pipe)
    with workbench.attach(pipe, None):
        assert torch.equal(video(pipe), bare)
    with workbench.attach(pipe, SolAttnConfig(tau=1.0)) as attached:
        assert not torch.equal(video(pipe), bare)
    assert attached.counts().sparse == 2 * STEPS
    assert torch.equal(video(pipe), bare)


def test_each_transformer_may_have_a_configuration_of_its_own():
    pipe = wan_pipeline(unipc())
    configs = {"transformer": None, "transformer_2": SkipSoftmaxConfig(threshold_scale_factor=1.0)}
    with workbench.attach(pipe, configs) as attached:
        video(pipe)
    first, second = (model.attention.counts() for model in attached.models)
    assert first.sparse == 0
    assert first.dense["sparse off"] > 0
    assert second.sparse > 0
    with pytest.raises(ValueError, match="there are transformer, transformer_2: name each"):
        workbench.attach(pipe, {"transformer": None})


def test_two_transformers_that_are_one_module_are_refused():
    """The second would take the place of the first, whose configuration would do nothing."""
    pipe = wan_pipeline(unipc())
    pipe.transformer_2 = pipe.transformer
    with pytest.raises(ValueError, match="transformer and transformer_2 are one module"):
        workbench.attach(pipe, {"transformer": LATE, "transformer_2": None})


def test_the_scheduler_says_how_long_the_time_is():
    pipe = wan_pipeline(unipc(num_train_timesteps=500), two=False)
    with workbench.attach(pipe, LATE, record=True) as attached:
        video(pipe)
    assert attached.records[0].time == pytest.approx(499 / 500)


def test_a_compiled_part_of_a_pipeline_is_attached_too():
    pipe = wan_pipeline(unipc(), two=False)
    pipe.transformer = torch.compile(pipe.transformer, backend="eager")
    with workbench.attach(pipe, LATE, strict=True) as attached:
        video(pipe)
    dense = dense_steps([float(t) / 1000 for t in pipe.scheduler.timesteps], CUTOFF)
    assert attached.counts().dense["dense phase"] == 2 * dense
    assert attached.counts().sparse == 2 * (STEPS - dense)


@pytest.mark.parametrize("steps", [8, 64])
def test_times_that_the_pipeline_of_mochi_rounds_to_16_bits_are_those_of_its_schedule(steps: int):
    """One minus the time is the same in bfloat16 for several of 64 steps, and 275 becomes 276."""
    case = next(case for case in CASES if case.name == "mochi")
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(invert_sigmas=True)
    sigmas = linear_quadratic_schedule(steps, 0.025)
    scheduler.set_timesteps(sigmas=sigmas)
    times = [1 - float(t) / 1000 for t in scheduler.timesteps]
    pipe = SimpleNamespace(transformer=case.model(), scheduler=scheduler)
    for step in (3, 5):
        config = SolAttnConfig(tau=1.0, disabled_until_timestep=times[step])
        scheduler.set_timesteps(sigmas=sigmas)
        latents = torch.zeros(1)
        with workbench.attach(pipe, config, record=True) as attached, torch.no_grad():
            for t in scheduler.timesteps[:8]:
                rounded = t.expand(2).to(torch.bfloat16)
                pipe.transformer(**{**case.inputs(), "timestep": rounded})
                latents = scheduler.step(latents, t, latents)[0]
        kinds = {record.step: (record.kind, record.time) for record in attached.records}
        assert [kind for kind, _ in kinds.values()] == ["dense"] * (step + 1) + ["sparse"] * (
            7 - step
        )
        assert [time for _, time in kinds.values()] == pytest.approx(times[:8], abs=1e-7)


def test_a_rounded_time_without_a_schedule_is_taken_as_it_is():
    case = next(case for case in CASES if case.name == "mochi")
    model = case.model()
    with workbench.attach(model, LATE, record=True) as attached, torch.no_grad():
        model(**{**case.inputs(), "timestep": torch.full((2,), 100.5, dtype=torch.bfloat16)})
    assert {record.kind for record in attached.records} == {"sparse"}
    assert attached.records[0].time == pytest.approx(0.8995)
