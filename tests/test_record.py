"""`workbench record`: a pipeline of diffusers into a capture, no more steps than needed."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

pytest.importorskip("diffusers", reason="diffusers is not installed")

from blockattn import TokenGrid
from workbench import cli
from workbench.capture import open_capture
from workbench.diffusers.wan import tiny_wan, wan_pipeline
from workbench.profiles.identity import weights_mark
from workbench.profiles.models import pipeline
from workbench.profiles.pipeline import PipelineVideo
from workbench.profiles.record import RecordPlan, forecast, record_pipeline

SIZE = (13, 128, 128)  # 4 x 8 x 8 tokens
GRID = (4, 8, 8)
PLAN = RecordPlan((0, 2), (0, 1), "a disc", heads=(1,), query_blocks=2)


@pytest.fixture(scope="module")
def video() -> PipelineVideo:
    return pipeline(size=SIZE, steps=4, device="cpu")


def recorded(video: PipelineVideo, plan: RecordPlan, path: Path, **settings):
    return record_pipeline(video, plan, plan.spec(video), path, **settings)


def test_the_planned_calls_are_recorded_and_the_file_is_as_large_as_predicted(video, tmp_path):
    capture = recorded(video, PLAN, tmp_path / "a")
    assert capture.entries == [(0, 0), (0, 1), (2, 0), (2, 1)]
    assert capture.path.stat().st_size == PLAN.spec(video).total_bytes
    assert capture.grid == TokenGrid(GRID)
    assert capture.head_indices == [1]
    assert capture.query_blocks == (2, 3)
    assert "a disc (heads 1 of 2; 2 of 4 query blocks)" in capture.title
    capture.verify()


def test_steps_after_the_last_call_are_left_out_and_the_next_sampling_is_whole(video, tmp_path):
    seen: list[int] = []
    hook = video.pipe.transformer.register_forward_pre_hook(lambda *a: seen.append(1))
    other = video.pipe.transformer_2.register_forward_pre_hook(lambda *a: seen.append(2))
    recorded(video, PLAN, tmp_path / "a")
    looked, seen[:] = len(seen), []
    video.run("a disc", 0)
    hook.remove()
    other.remove()
    assert looked == 1 + 2  # the look at the first call, and two steps of four
    assert len(seen) == 4


def test_the_capture_is_that_of_the_order_asked_for(video, tmp_path: Path):
    raster = recorded(video, RecordPlan((1,), (1,), "a disc"), tmp_path / "a")
    tile = recorded(video, RecordPlan((1,), (1,), "a disc", order="tile"), tmp_path / "b")
    restored = tile.grid.restore(tile.load(1, 1).k)
    assert tile.grid.order == "tile"
    assert torch.allclose(restored.float(), raster.load(1, 1).k.float(), atol=5e-2)


def test_with_guidance_the_half_with_the_text_is_kept(video, tmp_path: Path):
    """Wan calls its model once for each half, and first with the text."""
    plan = RecordPlan((1,), (0,), "a disc", seed=3)
    alone = recorded(video, plan, tmp_path / "a")
    guided = PipelineVideo(video.pipe, video.name, SIZE, 4, guidance=5.0)
    both = recorded(guided, plan, tmp_path / "b")
    assert torch.equal(both.load(1, 0).q, alone.load(1, 0).q)


def test_a_recording_goes_on_only_with_the_guidance_that_it_began_with(video, tmp_path: Path):
    """Another guidance leads to another video, whose calls would stand beside the first ones."""
    killer = video.pipe.transformer.blocks[1].register_forward_pre_hook(_fails)
    with pytest.raises(RuntimeError, match="killed"):
        recorded(video, PLAN, tmp_path / "a")
    killer.remove()
    guided = PipelineVideo(video.pipe, video.name, SIZE, 4, guidance=2.0)
    with pytest.raises(ValueError, match=r"guidance: '1\.0' there, '2\.0' now"):
        recorded(guided, PLAN, tmp_path / "a", resume=True)
    assert len(recorded(video, PLAN, tmp_path / "a", resume=True).entries) == 4


def test_a_recording_goes_on_only_with_the_weights_and_the_schedule_it_began_with(tmp_path: Path):
    """A folder of the same name may hold another checkpoint."""

    def opened(seed: int, shift: float) -> PipelineVideo:
        pipe = wan_pipeline(tiny_wan(seed=seed))
        pipe.scheduler.register_to_config(flow_shift=shift)
        return PipelineVideo(pipe, "wan", SIZE, 4, guidance=1.0)

    first = opened(0, 3.0)
    killer = first.pipe.transformer.blocks[1].register_forward_pre_hook(_fails)
    with pytest.raises(RuntimeError, match="killed"):
        recorded(first, PLAN, tmp_path / "a")
    killer.remove()
    with pytest.raises(ValueError, match=r"weights: '\w+' there, '\w+' now"):
        recorded(opened(1, 3.0), PLAN, tmp_path / "a", resume=True)
    with pytest.raises(ValueError, match=r'scheduler: .*"flow_shift": 3.0.* now'):
        recorded(opened(0, 5.0), PLAN, tmp_path / "a", resume=True)
    assert len(recorded(opened(0, 3.0), PLAN, tmp_path / "a", resume=True).entries) == 4


def test_a_changed_bias_is_other_weights():
    model = tiny_wan()
    pipe = wan_pipeline(model)
    before = weights_mark(pipe)
    assert weights_mark(pipe) == before == weights_mark(wan_pipeline(tiny_wan()))
    model.blocks[1].ffn.net[2].bias.data[0] += 1
    assert weights_mark(pipe) != before


@pytest.mark.parametrize("count", [1, 64, 65, 100, 127, 1000])
def test_values_of_every_part_of_a_tensor_tell_weights_apart(count: int):
    model = nn.Linear(count, 1, bias=False)
    pipe = SimpleNamespace(components={"transformer": model})
    before = weights_mark(pipe)
    with torch.no_grad():
        model.weight[0, count * 3 // 4 :] += 1
    assert weights_mark(pipe) != before


def _fails(*_: object) -> None:
    raise RuntimeError("killed")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": (3,)}, "layers=3: must be at least 0 and at most 2"),
        ({"at_steps": (4,)}, "at_steps=4: must be at least 0 and at most 3"),
        ({"heads": (2,)}, "heads has 2"),
        ({"query_blocks": 3}, "must be even"),
        ({"order": "hilbert"}, "order='hilbert'"),
        ({"layers": ()}, "entries is empty"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_before_anything_is_sampled(video, changes, message):
    with pytest.raises(ValueError, match=message):
        RecordPlan(**{**PLAN.__dict__, **changes}).spec(video)


def test_a_forecast_runs_one_step_and_names_the_steps_to_the_last_call(video):
    calls: list[int] = []
    parts = (video.pipe.transformer, video.pipe.transformer_2)
    hooks = [part.register_forward_hook(lambda *a: calls.append(1)) for part in parts]
    seconds = video.step_seconds("a disc")
    for hook in hooks:
        hook.remove()
    assert len(calls) == 1
    assert 0 < seconds < 60
    assert forecast(PLAN, 90.04) == (
        "a step takes about 90.0 s; 2 steps, to the last call to keep: 0:03:00"
    )


def test_a_recording_tells_how_long_it_will_take_after_its_first_step(video, tmp_path: Path):
    said: list[str] = []
    recorded(video, PLAN, tmp_path / "a", tell=said.append)
    assert len(said) == 1
    assert re.fullmatch(
        r"a step takes about \d+\.\d s; 2 steps, to the last .*: 0:00:\d\d", said[0]
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--layers": "0,3"}, "layers=3: must be at least 0 and at most 2"),
        ({"--at-steps": "3"}, "at_steps=3: must be at least 0 and at most 2"),
        ({"--heads": "2"}, "heads=2: must be at least 0 and at most 1"),
        ({"--size": "13,100,128"}, "height=100: must be a multiple of 16 .* such as 112"),
        ({"--size": "13,128,8"}, "width=8: must be a multiple of 16 .* such as 16"),
        ({"--guidance": "nan"}, "guidance=nan"),
    ],
)
@pytest.mark.parametrize("whole", [False, True], ids=["transformer", "pipeline"])
def test_what_the_model_lacks_or_cannot_make_is_refused_before_weights_are_read(
    tmp_path: Path, whole: bool, changes: dict[str, str], message: str
):
    folder = tmp_path / "wan"
    (wan_pipeline(tiny_wan()) if whole else tiny_wan()).save_pretrained(folder)
    for weights in folder.rglob("*.safetensors"):
        weights.unlink()
    given = {"--out": "a", "--prompt": "a", "--layers": "0", "--at-steps": "1", "--steps": "3"}
    options = [word for pair in {**given, **changes}.items() for word in pair]
    done = CliRunner().invoke(cli.app, ["record", str(folder), *options, "--device", "cpu"])
    assert isinstance(done.exception, ValueError)
    assert re.search(message, str(done.exception))


def test_a_file_that_exists_is_refused_before_weights_are_read(tmp_path: Path):
    folder, out = tmp_path / "wan", tmp_path / "a.safetensors"
    tiny_wan().save_pretrained(folder)
    for weights in folder.rglob("*.safetensors"):
        weights.unlink()
    out.write_bytes(b"kept")
    options = ["--out", str(out), "--prompt", "a", "--layers", "0", "--at-steps", "1"]
    done = CliRunner().invoke(cli.app, ["record", str(folder), *options, "--device", "cpu"])
    assert isinstance(done.exception, FileExistsError)
    assert "a capture replaces nothing" in str(done.exception)
    assert out.read_bytes() == b"kept"


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """Of the command, for a transformer in a folder; the capture's own folder is not there yet."""
    tiny_wan().save_pretrained(tmp_path / "wan")
    return [
        *("record", str(tmp_path / "wan"), "--out", str(tmp_path / "new" / "a.safetensors")),
        *("--prompt", "a disc", "--layers", "0", "--at-steps", "1", "--size", "13,128,128"),
        *("--steps", "3", "--guidance", "1", "--device", "cpu"),
    ]


@pytest.mark.parametrize("check", [["--check"], []], ids=["check", "record"])
def test_a_capture_above_the_limit_is_refused_also_by_a_check(
    arguments: list[str], check: list[str], tmp_path: Path
):
    done = CliRunner().invoke(cli.app, [*arguments, "--limit-mb", "0", *check])
    assert isinstance(done.exception, ValueError)
    assert "above limit_bytes=0" in str(done.exception)
    assert "a step takes about" not in done.output
    assert not (tmp_path / "new").exists()


def test_the_record_command_takes_a_folder_and_predicts(arguments: list[str], tmp_path: Path):
    out = tmp_path / "new" / "a.safetensors"
    checked = CliRunner().invoke(cli.app, [*arguments, "--check"])
    assert checked.exit_code == 0, checked.output
    assert not out.exists()
    done = CliRunner().invoke(cli.app, arguments)
    assert done.exit_code == 0, done.output
    assert "a step takes about" in checked.output
    assert f"will take {out.stat().st_size:,} bytes" in checked.output
    assert open_capture(out).entries == [(0, 1)]
