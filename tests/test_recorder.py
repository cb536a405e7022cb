"""Recording changes nothing in the sampled video and keeps the calls that were asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from blockattn import TokenGrid
from tests.model_inputs import fresh_model
from workbench import cli
from workbench.capture import CaptureSpec, open_capture
from workbench.capture.recorder import (
    Recorder,
    SamplingPlan,
    model_checksum,
    record_sampling,
)
from workbench.curves import sol_curve
from workbench.models import (
    AttentionCall,
    VideoDiT,
    dense_attention,
    load_model,
    sample,
    save_model,
)

GRID = (2, 3, 4)
PLAN = SamplingPlan(layers=(0, 1), at_steps=(0, 2), label="ring", grid=GRID, steps=3, seed=5)


@pytest.fixture(scope="module")
def model() -> VideoDiT:
    return fresh_model(2)


def sampled(model: VideoDiT, plan: SamplingPlan = PLAN, **settings) -> torch.Tensor:
    options = {"grid": plan.grid, "steps": plan.steps, "seed": plan.seed}
    return sample(model, labels=[plan.label], guidance=plan.guidance, **{**options, **settings})


def test_sampling_is_equal_bit_for_bit_with_a_recorder(model: VideoDiT, tmp_path: Path):
    with Recorder(tmp_path / "a.safetensors", PLAN.spec(model)) as recorder:
        recorded = sampled(model, attention=recorder)
        recorder.write_video(recorded[0])
    assert torch.equal(recorded, sampled(model))


def test_the_recorded_tensors_are_those_of_the_conditional_half(model: VideoDiT, tmp_path: Path):
    seen: dict[tuple[int, int | None], list[torch.Tensor]] = {}

    def spy(q, k, v, call: AttentionCall):
        seen[call.layer, call.step] = [x.clone() for x in (q, k, v)]
        return dense_attention(q, k, v, call)

    capture = record_sampling(model, PLAN, tmp_path / "a.safetensors", attention=spy)
    assert capture.entries == [(0, 0), (0, 2), (1, 0), (1, 2)]
    for place in capture.entries:
        found = capture.load(*place)
        for value, whole in zip((found.q, found.k, found.v), seen[place]):
            assert whole.shape[0] == 2  # class first, then without
            assert not torch.equal(whole[0], whole[1])
            assert torch.equal(value, whole[:1].bfloat16())


def test_without_guidance_the_whole_batch_is_recorded(model: VideoDiT, tmp_path: Path):
    plan = SamplingPlan(layers=(0,), at_steps=(1,), grid=GRID, steps=2, guidance=1.0)
    assert record_sampling(model, plan, tmp_path / "a.safetensors").load(0, 1).q.shape[0] == 1


def test_the_capture_says_how_it_was_made(model: VideoDiT, tmp_path: Path):
    capture = record_sampling(model, PLAN, tmp_path / "a.safetensors")
    facts = capture.metadata
    assert capture.source == "model"
    assert "ring" in capture.title
    assert "synthetic" not in capture.title
    assert (facts["seed"], facts["sampler_steps"], facts["guidance"]) == ("5", "3", "2.0")
    assert facts["label"].endswith("(ring)")
    assert facts["model_sha256"] == model_checksum(model)
    assert "torch" in facts["versions"]
    assert capture.time(0, 0) == 1.0
    assert 0 < capture.time(1, 2) < 1
    assert capture.grid == TokenGrid(GRID)
    capture.verify()


def test_the_sampled_video_travels_with_the_capture(model: VideoDiT, tmp_path: Path):
    capture = record_sampling(model, PLAN, tmp_path / "a.safetensors")
    assert capture.video is not None
    assert torch.equal(capture.video, sampled(model)[0].mul(255).round().to(torch.uint8))


def test_the_same_plan_gives_the_same_file(model: VideoDiT, tmp_path: Path):
    paths = [tmp_path / name for name in ("a.safetensors", "b.safetensors")]
    for path in paths:
        record_sampling(model, PLAN, path)
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_the_prediction_is_the_size_of_the_file(model: VideoDiT, tmp_path: Path):
    wanted = PLAN.spec(model)
    capture = record_sampling(model, PLAN, tmp_path / "a.safetensors")
    assert capture.path.stat().st_size == wanted.total_bytes


def test_a_recording_above_the_limit_is_refused_before_anything_is_sampled(
    model: VideoDiT, tmp_path: Path
):
    calls = []
    with pytest.raises(ValueError, match="above limit_bytes=1,000"):
        record_sampling(
            model, PLAN, tmp_path / "a.safetensors", attention=calls.append, limit_bytes=1000
        )
    assert calls == []


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"layers": (0, 2)}, ValueError, "layers has 2: a model of 2 layers counts from 0 to 1"),
        ({"at_steps": (3,)}, ValueError, "at_steps has 3: a run of 3 steps counts from 0 to 2"),
        ({"layers": ()}, ValueError, "layers is empty"),
        ({"layers": (True,)}, TypeError, "layers=True"),
        ({"layers": (1, 1)}, ValueError, "appears twice"),
        ({"label": "dragon"}, ValueError, "'dragon'"),
        ({"grid": (0, 1, 1)}, ValueError, r"shape\[0\]=0"),
        ({"steps": 0}, ValueError, "steps=0"),
        ({"seed": 2**63}, ValueError, "seed=9223372036854775808: must be .* at most"),
        ({"guidance": float("nan")}, ValueError, "guidance=nan: must be finite"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(model, changes: dict, error, message: str):
    plan = SamplingPlan(**{**PLAN.__dict__, **changes})
    with pytest.raises(error, match=message):
        plan.spec(model)


def recorder_for(tmp_path: Path) -> Recorder:
    spec = CaptureSpec(TokenGrid((1, 2, 2)), ((0, 0),), heads=1, head_dim=8)
    return Recorder(tmp_path / "a.safetensors", spec)


def test_only_the_first_visit_of_a_step_is_kept(tmp_path: Path):
    first, second = torch.ones(1, 4, 1, 8), torch.zeros(1, 4, 1, 8)
    with recorder_for(tmp_path) as recorder:
        for x in (first, second):
            recorder(x, x, x, AttentionCall(0, 0, 0.5, (1, 2, 2)))
    assert torch.equal(open_capture(tmp_path / "a.safetensors").load(0, 0).q, first.bfloat16())


@pytest.mark.parametrize(
    ("batch", "time", "message"),
    [(1, None, "has no denoising time"), (3, 0.5, "batch 3, but the capture keeps 1")],
)
def test_a_call_that_cannot_be_recorded_is_an_error(tmp_path: Path, batch, time, message: str):
    recorder = recorder_for(tmp_path)
    x = torch.ones(batch, 4, 1, 8)
    with pytest.raises(ValueError, match=message):
        recorder(x, x, x, AttentionCall(0, 0, time, (1, 2, 2)))
    recorder.writer.close()


def test_calls_outside_sampling_are_passed_on_unrecorded(tmp_path: Path):
    recorder = recorder_for(tmp_path)
    x = torch.randn(1, 4, 1, 8)
    for call in (AttentionCall(0, None, None, (1, 2, 2)), AttentionCall(1, 0, 0.5, (1, 2, 2))):
        assert torch.equal(recorder(x, x, x, call), dense_attention(x, x, x, call))
    assert not recorder.writer.has(0, 0)
    recorder.writer.close()


def test_the_model_checksum_follows_the_weights(model: VideoDiT):
    other = VideoDiT(model.config)
    other.load_state_dict(model.state_dict())
    assert model_checksum(other) == model_checksum(model)
    with torch.no_grad():
        other.embed.bias[0] += 1
    assert model_checksum(other) != model_checksum(model)


# -- the command -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def weights(model: VideoDiT, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "w.safetensors"
    save_model(model, path)
    return path


def run(*arguments: object):
    return CliRunner().invoke(cli.app, [str(x) for x in arguments])


def test_the_capture_command_prints_predicted_and_real_bytes(weights: Path, tmp_path: Path):
    out = tmp_path / "c.safetensors"
    options = ["--layers", "0,1", "--at-steps", "1", "--steps", 2, "--grid", "2,3,4"]
    done = run("capture", "--out", out, "--weights", weights, "--label", "ring", *options)
    assert done.exit_code == 0, done.output
    size = f"{out.stat().st_size:,} bytes"
    assert f"will take {size}" in done.output
    assert f"wrote {size}" in done.output
    assert open_capture(out).entries == [(0, 1), (1, 1)]
    assert open_capture(out).checksum in done.output


@pytest.mark.parametrize(
    ("steps", "kept"), [(1, [0]), (2, [1]), (3, [2]), (16, [2]), (17, [2, 16])]
)
def test_the_capture_command_keeps_what_its_defaults_have_in_common_with_the_run(
    weights: Path, tmp_path: Path, steps: int, kept: list[int]
):
    out = tmp_path / "c.safetensors"
    done = run("capture", "--out", out, "--weights", weights, "--steps", steps, "--grid", "1,2,2")
    assert done.exit_code == 0, done.output
    assert open_capture(out).entries == [(1, step) for step in kept]  # the model has layers 0, 1
    assert f"keeps layers 1 at steps {','.join(map(str, kept))} of 0 to {steps - 1}" in done.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--at-steps", "2,16", "--steps", "4"], "a run of 4 steps counts from 0 to 3"),
        (["--steps", "0"], "steps=0: must be at least 1"),
        (["--layers", "0,x"], "--layers 0,x: expected integers from 0 on, such as 0,2,4"),
        (["--at-steps", ""], "--at-steps : expected integers"),
        (["--grid", "8,16"], "--grid 8,16: expected three sizes"),
        (["--grid", "0,16,16"], "--grid 0,16,16: expected three sizes t,h,w such as 8,16,16, each"),
        (["--device", "toaster"], "device='toaster': must be auto, cpu, cuda"),
        (
            ["--limit-mb", "0", "--steps", "3", "--layers", "0", "--at-steps", "0"],
            "above limit_bytes=0",
        ),
    ],
)
def test_the_capture_command_says_what_is_wrong(weights, tmp_path, options, message: str):
    done = run("capture", "--out", tmp_path / "c.safetensors", "--weights", weights, *options)
    assert isinstance(done.exception, ValueError)
    assert message in str(done.exception)
    assert list(tmp_path.iterdir()) == []


# -- the bundled capture ---------------------------------------------------------------------------


def test_the_bundled_capture_is_whole_small_and_of_the_bundled_weights():
    capture = open_capture()
    capture.verify()
    assert capture.source == "model"
    assert capture.path.stat().st_size <= 16_000_000
    assert capture.grid == TokenGrid((8, 16, 16))
    assert len(capture.layers) == len(capture.steps) == 2
    assert capture.metadata["model_sha256"] == model_checksum(load_model())
    assert capture.video is not None
    assert capture.video.shape == (16, 64, 64, 3)


def test_the_bundled_heads_differ_and_are_neither_dense_nor_empty():
    capture = open_capture()
    density = []
    for place in capture.entries:
        call = capture.load(*place)
        density += sol_curve(call.q, call.k, [1.0]).per_head.flatten().tolist()
    assert len(set(density)) == len(density)
    assert 0.15 < min(density) < max(density) < 0.7
