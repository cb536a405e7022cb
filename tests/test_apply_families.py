"""Profiles on the real pipeline class of every family, with text encoders; tiny and random."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("diffusers", reason="needs diffusers: pip install -e '.[diffusers]'")
pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[diffusers]'")

from blockattn import UnsupportedError
from tests.pipeline_inputs import PIPELINES
from tests.test_apply import config
from workbench.config import AttentionConfig, SkipSoftmaxConfig, VideoSparseAttentionConfig
from workbench.diffusers import attach
from workbench.diffusers.families import family_of
from workbench.diffusers.folder import Outline, outline
from workbench.diffusers.model import plain
from workbench.export import export_config
from workbench.models import AttentionCall
from workbench.profiles.pipeline import PipelineVideo
from workbench.profiles.profile import Profile, read_text
from workbench.profiles.record import RecordPlan, record_pipeline, spread_plan

STEPS, PROMPT = 3, "red ball"


@pytest.fixture(scope="module", params=list(PIPELINES))
def model(request: pytest.FixtureRequest) -> PipelineVideo:
    make, size = PIPELINES[request.param]
    pipe = make()
    pipe.set_progress_bar_config(disable=True)
    return PipelineVideo(pipe, request.param, size, STEPS)


def test_dense_is_the_bare_pipeline_byte_for_byte(model: PipelineVideo):
    dense = model.sample(PROMPT, 0, None)
    assert torch.equal(dense.video, model.run(PROMPT, 0))
    assert dense.count("sparse") == dense.count("ineligible") == 0
    assert dense.warnings == ()


def test_the_times_of_a_run_are_known_before_it(model: PipelineVideo):
    known = model.place.times
    assert known is not None
    assert len(known) == STEPS
    times = {(r.step, r.time) for r in model.sample(PROMPT, 0, None).records}
    assert sorted(times) == [(step, pytest.approx(time)) for step, time in enumerate(known)]


def test_a_profile_runs_sparse_in_every_layer(model: PipelineVideo):
    layers = len(model.module_names)
    made = read_text(f"0-{layers - 1}=1.0", model.place)
    run = model.sample(PROMPT, 0, made)
    assert {r.layer for r in run.records if r.kind == "sparse"} == set(range(layers))
    assert run.count("ineligible") == 0
    assert run.density < 1
    assert torch.isfinite(run.video).all()
    assert not torch.equal(run.video, model.run(PROMPT, 0))


@pytest.mark.parametrize("axis", [1, 2], ids=["height", "width"])
def test_a_size_that_is_refused_is_one_that_the_pipeline_cannot_make(
    model: PipelineVideo, axis: int
):
    assert model.size is not None
    family, size = family_of(plain(model.pipe.transformer)), list(model.size)
    size[axis] += family.multiple
    replace(model, size=tuple(size), steps=2).run(PROMPT, 0)
    size[axis] -= family.multiple // 2
    with pytest.raises(ValueError, match=f"must be a multiple of {family.multiple}"):
        replace(model, size=tuple(size))
    bare = {"num_frames": size[0], "height": size[1], "width": size[2], "output_type": "latent"}
    with pytest.raises((ValueError, RuntimeError), match=r"divisible by|size of tensor|shape"):
        model.pipe(PROMPT, num_inference_steps=2, **bare)


@pytest.mark.gpu
@pytest.mark.parametrize("name", PIPELINES)
def test_on_a_gpu_the_pipeline_of_every_family_runs_on_the_gpu_kernels(name: str):
    make, size = PIPELINES[name]
    pipe = make().to("cuda", torch.bfloat16)
    pipe.set_progress_bar_config(disable=True)
    model = PipelineVideo(pipe, name, size, STEPS)
    dense = model.sample(PROMPT, 0, None)
    assert torch.equal(dense.video, model.run(PROMPT, 0))
    run = model.sample(PROMPT, 0, read_text(f"0-{len(model.module_names) - 1}=1.0", model.place))
    assert run.ran == "sol_attn: triton"
    assert run.count("sparse") == len(run.records) > 0
    assert run.density < 1
    assert torch.isfinite(run.video).all()
    assert not torch.equal(run.video, dense.video)


def test_layers_and_heads_are_known_from_the_configuration_alone(model: PipelineVideo, tmp_path):
    model.pipe.transformer.save_config(tmp_path / "transformer")
    found = outline(tmp_path)
    assert found == Outline(len(model.module_names), model.seen.heads, one_call_a_step=True)
    (tmp_path / "transformer/config.json").write_text('{"_class_name": "Another"}')
    assert outline(tmp_path) is None


def test_a_prompt_reaches_the_text_encoder(model: PipelineVideo):
    assert "random text" not in model.title
    assert not torch.equal(model.run(PROMPT, 0), model.run("ball", 0))


def test_dense_steps_of_a_file_are_those_of_this_schedule(model: PipelineVideo):
    first = model.seen.times[0]
    skip = SkipSoftmaxConfig(threshold_scale_factor=9.0, disabled_until_timestep=first)
    made = read_text(export_config(config(skip), "sglang", model.place).text, model.place)
    sparse = {r.step for r in model.sample(PROMPT, 0, made).records if r.kind == "sparse"}
    assert sparse == {1, 2}


def test_vsa_is_refused_where_text_attends_with_the_video(model: PipelineVideo):
    vsa = Profile("v", "own", AttentionConfig(sparse_attention_config=VideoSparseAttentionConfig()))
    joint = model.seen.grid.prefix + model.seen.grid.suffix > 0 or model.name == "mochi"
    with pytest.raises(
        (ValueError, UnsupportedError), match="text tokens" if joint else 'gate="zero"'
    ):
        model.policies(vsa)


def test_a_capture_of_a_call_with_the_text_is_as_large_as_the_call(model: PipelineVideo):
    shapes = []
    plan = spread_plan(model, layers=1, steps=1, heads=9, prompt=PROMPT)
    with attach(model.pipe, None, observe=lambda q, k, v, call: shapes.append(q.shape)):
        model.run(PROMPT, 0)
    assert tuple(shapes[-1][1:]) == plan.spec(model).call_shape("q")[1:]


def test_the_calls_with_the_text_are_recorded_also_where_guidance_is_in_one_batch(model, tmp_path):
    """Mochi attends to the samples of a batch one by one, and to those without the text first."""
    plan = RecordPlan((0,), (0,), "red ball red ball")
    guided = replace(model, guidance=3.0)
    seen: list[torch.Tensor] = []

    def observe(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: AttentionCall) -> None:
        if (call.layer, call.step) == (0, 0):
            seen.append(k.clone())

    with attach(guided.pipe, None, observe=observe):
        guided.run(plan.prompt, plan.seed)
    capture = record_pipeline(guided, plan, plan.spec(guided), tmp_path / "a")
    with_text = seen[0 if model.name == "wan" else -1]  # Wan calls its model twice, with it first
    assert torch.equal(capture.load(0, 0).k, with_text[-1:].to(torch.bfloat16))
