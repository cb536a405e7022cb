"""Profiles on pipelines of diffusers: tiny random ones, also saved to disk and read back."""

from __future__ import annotations

import copy
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("diffusers", reason="needs diffusers: pip install -e '.[diffusers]'")
pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[diffusers]'")
pytest.importorskip("accelerate", reason="needs accelerate: pip install -e '.[diffusers]'")

from tests.pipeline_inputs import encoder as encoder_of
from tests.pipeline_inputs import tokenizer
from tests.test_apply import GROUP, SOL, config
from workbench import cli
from workbench.capture import open_capture
from workbench.capture.recorder import Recorder
from workbench.config import SkipSoftmaxConfig, SolAttnConfig, VideoSparseAttentionConfig
from workbench.diffusers import attach, package
from workbench.diffusers.folder import open_pipeline, outline
from workbench.diffusers.package import diffusers_package
from workbench.diffusers.wan import tiny_wan, tiny_wan_pipeline, wan_pipeline
from workbench.export import export_config
from workbench.paths import notebooks_dir
from workbench.profiles.compare import compare
from workbench.profiles.models import pipeline
from workbench.profiles.pipeline import PipelineVideo
from workbench.profiles.profile import Profile, read_text
from workbench.profiles.record import spread, spread_plan
from workbench.profiles.understood import understand, understood_table
from workbench.profiles.verdict import verdict

SIZE, STEPS = (9, 64, 64), 4  # 3 x 4 x 4 latents after the patches: 48 tokens, so one block alone
LARGE = (13, 96, 128)  # 4 x 6 x 8 = 192 tokens: three blocks
SMALL: dict[str, Any] = {"layers": 2, "heads": 2, "head_dim": 32}


@pytest.fixture(scope="module")
def wan() -> PipelineVideo:
    """Two transformers, as Wan 2.2 has them."""
    return PipelineVideo(tiny_wan_pipeline(**SMALL), "tiny", LARGE, STEPS, guidance=1.0)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wan") / "tiny-wan"
    tiny_wan_pipeline(**SMALL).save_pretrained(folder)
    return folder


def test_times_tokens_and_layers_are_those_of_the_pipelines_own_run(wan: PipelineVideo):
    records = wan.sample("a", 0, None).records
    times = [float(t) / 1000 for t in wan.pipe.scheduler.timesteps]
    assert wan.place.times == tuple(times)
    assert wan.place.keys == wan.seen.grid.tokens == 4 * 6 * 8
    assert wan.seen.grid.shape == (4, 6, 8)
    assert wan.module_names == ["blocks.0.attn1", "blocks.1.attn1"]
    assert sorted({(r.step, r.time) for r in records}) == [
        (n, pytest.approx(time)) for n, time in enumerate(times)
    ]


def test_dense_is_the_bare_pipeline_byte_for_byte(wan: PipelineVideo):
    assert torch.equal(wan.sample("a", 0, None).video, wan.run("a", 0))
    assert not torch.equal(wan.run("a", 0), wan.run("b", 0))
    assert not torch.equal(wan.run("a", 0), wan.run("a", 1))


@pytest.mark.parametrize("target", ["vllm_omni", "sglang", "tensorrt_llm"])
def test_an_exported_file_runs_in_both_transformers_as_attach_runs_its_source(
    wan: PipelineVideo, target: str
):
    source = config(SOL, backend="CUTEDSL")
    back = read_text(export_config(source, target, wan.place).text, wan.place)
    run = wan.sample("a", 0, back)
    with attach(wan.pipe, source, record=True) as attached:
        video = wan.run("a", 0)
    assert torch.equal(run.video, video)
    both = [model.attention.counts().sparse for model in attached.models]
    assert min(both) > 0
    assert run.count("sparse") == sum(both) == (STEPS - 1) * 1  # one layer and the first step dense
    assert run.density < 1
    assert not torch.equal(run.video, wan.run("a", 0))


def test_a_tau_profile_gives_every_layer_of_both_transformers_its_tau(wan: PipelineVideo):
    made = read_text("0=2.0; 1=-1e6", wan.place)
    records = wan.sample("a", 0, made).records
    assert all(r.density < 1 for r in records if r.layer == 0)
    assert all(r.density == 1 for r in records if r.layer == 1)
    assert len(records) == 2 * STEPS


def test_two_profiles_are_compared_in_latents_where_no_decoder_is(wan: PipelineVideo):
    tight, loose = (read_text(f"0-1={tau}", wan.place, name=f"tau{tau}") for tau in (0.0, 2.0))
    found = compare(wan, [tight, loose], ["a", "b"], [0, 1])
    assert verdict(found).startswith("tau0.0 stays closer to dense than tau2.0, at higher density")
    assert all(math.isnan(value) for value in found.values("tau2.0", "psnr"))
    assert found.values("dense_control", "density") == [1.0] * 4
    assert not found.pairs[0].runs["dense"].pixels


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that a checkpoint of Wan 2.2 has, tiny and random."""
    torch.manual_seed(0)
    pipe = tiny_wan_pipeline(**SMALL)
    sizes = {"base_dim": 8, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
    vae = diffusers_package().AutoencoderKLWan(z_dim=16, **sizes).eval()
    words, encoder = tokenizer(), encoder_of(32, "UMT5")
    pipe.register_modules(vae=vae, tokenizer=words, text_encoder=encoder)
    folder = tmp_path_factory.mktemp("complete") / "Wan2.2-tiny"
    pipe.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_complete_checkpoint_is_compared_in_pixels(complete: Path, dtype: torch.dtype):
    pipe = open_pipeline(complete, dtype=dtype)
    assert pipe.transformer.dtype == pipe.transformer_2.dtype == pipe.text_encoder.dtype == dtype
    assert pipe.vae.dtype == torch.float32  # as its makers run it
    model = PipelineVideo(pipe, "tiny", SIZE, 2, guidance=1.0)
    assert "latents" not in model.title
    assert "random" not in model.title
    video = model.sample("red ball", 0, None).video
    assert tuple(video.shape) == (9, 64, 64, 3)
    assert 0 <= float(video.min()) < float(video.max()) <= 1
    found = compare(model, [read_text("0-1=1.0", model.place)], ["red ball"], [0])
    assert math.isfinite(found.values("profile", "ssim")[0])
    assert found.pairs[0].runs["profile"].count("sparse") == 2 * 2


def test_the_command_writes_videos_of_a_complete_checkpoint(complete: Path, tmp_path: Path):
    (tmp_path / "mine.txt").write_text("0-1=1.0")
    out = tmp_path / "run"
    done = invoke(tmp_path / "mine.txt", "--model", complete, "--prompt", "red ball", "--seeds", 0,
                  "--size", "9,64,64", "--steps", 2, "--guidance", 1, "--out", out)  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "PSNR" in done.stdout
    assert {"comparison.png", "mine.gif", "dense.gif"} <= {path.name for path in out.iterdir()}


def test_a_pipeline_with_a_time_for_every_token_has_the_same_steps():
    """As the model of Wan 2.2 with 5 billion parameters is called."""
    pipe = wan_pipeline(tiny_wan(**SMALL))
    pipe.register_to_config(expand_timesteps=True)
    model = PipelineVideo(pipe, "tiny", LARGE, STEPS, guidance=1.0)
    times = model.place.times
    assert times is not None
    late = config(SolAttnConfig(disabled_until_timestep=times[1]), backend="CUTEDSL")
    made = read_text(export_config(late, "sglang", model.place).text, model.place)
    records = model.sample("a", 0, made).records
    assert {r.step for r in records if r.kind == "sparse"} == {2, 3}
    assert [r.time for r in records if r.layer == 0] == pytest.approx(list(times))


def test_vsa_and_other_things_that_the_model_cannot_honour_are_refused(wan: PipelineVideo):
    vsa = Profile("mine", "own", config(VideoSparseAttentionConfig()).attention_config)
    with pytest.raises(ValueError, match='choose gate="zero"'):
        understand(vsa, wan)
    assert understand(vsa, replace(wan, gate="zero"))[0].does.endswith("no coarse branch")
    beyond = Profile("mine", "own", config(SolAttnConfig(dense_layers=(2,))).attention_config)
    with pytest.raises(ValueError, match="dense_layers has 2"):
        understand(beyond, wan)


def test_each_transformer_takes_its_own_calibration(saved: Path, tmp_path: Path):
    folder = tmp_path / "calibrated"
    shutil.copytree(saved, folder)
    second = copy.deepcopy(GROUP)
    group = second["sparse_attention_config"]["config_groups"]["group_0"]
    group["threshold_scale_factor"]["coefficients"]["a"] = 600.0
    for part, fields in (("transformer", GROUP), ("transformer_2", second)):
        path = folder / part / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    model = PipelineVideo(open_pipeline(folder), "tiny", LARGE, STEPS, guidance=1.0)
    target = config(SkipSoftmaxConfig(target_sparsity=0.5), backend="TRTLLM")
    made = read_text(export_config(target, "tensorrt_llm").text, model.place)
    assert [(p.part, p.does.split(",")[1]) for p in understand(made, model)] == [
        ("transformer", " factor 494.616"),
        ("transformer", " factor 494.616"),
        ("transformer_2", " factor 989.233"),
        ("transformer_2", " factor 989.233"),
    ]
    assert understood_table(made, model).columns[0] == "part"
    assert model.sample("a", 0, made).count("sparse") == 2 * STEPS
    given = read_text(export_config(target, "tensorrt_llm").text, model.place, calibration=GROUP)
    assert {p.does.split(",")[1] for p in understand(given, model)} == {" factor 494.616"}
    sol = read_text("0-1=1.0", model.place)  # which has no use for a calibration
    assert understand(sol, model)[0].does == "sol_attn, tau 1 diag"


def test_transformers_of_different_depth_are_refused():
    pipe = wan_pipeline(tiny_wan(layers=1), tiny_wan(layers=2))
    with pytest.raises(ValueError, match="the two transformers have 1 and 2 layers"):
        _ = PipelineVideo(pipe).module_names


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"steps": 0}, "steps=0"),
        ({"size": (9, 0, 64)}, "height=0"),
        ({"size": (9, 64, 72)}, "width=72: must be a multiple of 16 .*, such as 80"),
        ({"guidance": math.nan}, "guidance=nan"),
    ],
)
def test_settings_are_refused_before_anything_runs(
    wan: PipelineVideo, settings: dict[str, Any], message: str
):
    with pytest.raises(ValueError, match=message):
        PipelineVideo(wan.pipe, **settings)


def test_a_plan_of_evenly_spread_calls_records_the_dense_run(wan: PipelineVideo, tmp_path: Path):
    plan = spread_plan(wan, layers=2, steps=2, heads=1, prompt="a")
    with Recorder(tmp_path / "c.safetensors", plan.spec(wan)) as recorder:
        with attach(wan.pipe, None, observe=recorder.observe):
            video = wan.run("a", 0)
    assert torch.equal(video, wan.run("a", 0))
    capture = open_capture(tmp_path / "c.safetensors")
    assert capture.entries == [(0, 0), (0, 3), (1, 0), (1, 3)]
    assert capture.time(1, 3) == pytest.approx(wan.seen.times[3])
    assert capture.load(0, 3).q.shape == (1, 192, 1, 32)


@pytest.mark.parametrize("name", ["layers", "steps", "heads"])
def test_a_plan_of_no_calls_is_refused_by_the_name_of_what_is_missing(
    wan: PipelineVideo, name: str
):
    wanted = {"layers": 2, "steps": 2, "heads": 1, name: 0}
    with pytest.raises(ValueError, match=f"{name}=0: must be at least 1"):
        spread_plan(wan, **wanted, prompt="a")


@pytest.mark.parametrize("part", ["scheduler", "transformer"])
@pytest.mark.parametrize("opened", [open_pipeline, outline], ids=lambda x: x.__name__)
def test_a_folder_with_a_class_that_this_diffusers_lacks_is_refused(
    tmp_path: Path, opened: Callable[[Path], Any], part: str
):
    tiny_wan_pipeline().save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    index[part] = ["diffusers", "NotYet"]
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"diffusers \S+ has no NotYet; install the version .*\d"):
        opened(tmp_path)


def test_indices_are_spread_evenly_over_what_there_is():
    assert spread(40, 4) == (0, 13, 26, 39)
    assert spread(3, 9) == (0, 1, 2)
    assert spread(5, 1) == (2,)
    with pytest.raises(ValueError, match="wanted=0"):
        spread(3, 0)


@pytest.mark.gpu
def test_on_a_gpu_a_profile_runs_on_the_gpu_kernels():
    model = pipeline(device="cuda")
    assert "bfloat16 on cuda" in model.title
    dense = model.sample("a", 0, None)
    assert torch.equal(dense.video, model.run("a", 0))
    run = model.sample("a", 0, read_text("0-2=1.0", model.place))
    assert run.ran == "sol_attn: triton"
    assert run.density < 1
    assert torch.isfinite(run.video).all()
    assert not torch.equal(run.video, dense.video)


# -- folders ------------------------------------------------------------------------------------


def test_a_saved_pipeline_is_read_back_with_both_transformers(saved: Path):
    pipe, same = open_pipeline(saved), tiny_wan_pipeline(**SMALL)
    assert pipe.config.boundary_ratio == same.config.boundary_ratio
    assert pipe.scheduler.config.flow_shift == same.scheduler.config.flow_shift
    for part in ("transformer", "transformer_2"):
        state, own = getattr(pipe, part).state_dict(), getattr(same, part).state_dict()
        assert all(torch.equal(state[name], own[name]) for name in own)


@pytest.mark.parametrize("place", ["transformer", "."])
def test_a_transformer_alone_gets_a_pipeline_around_it(saved: Path, tmp_path: Path, place: str):
    alone = tmp_path / "alone"
    shutil.copytree(saved / "transformer", alone / place)
    model = PipelineVideo(open_pipeline(alone), "alone", SIZE, 2, guidance=1.0)
    assert "transformer of 2 layers" in model.title
    assert "random text embeddings" in model.title
    assert torch.isfinite(model.run("a", 0)).all()


def test_a_folder_that_holds_no_model_is_refused(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"nowhere.*no such folder"):
        open_pipeline(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"neither model_index\.json nor config\.json"):
        open_pipeline(tmp_path)
    (tmp_path / "config.json").write_text('{"_class_name": "MochiTransformer3DModel"}')
    with pytest.raises(ValueError, match="MochiTransformer3DModel alone cannot sample here"):
        open_pipeline(tmp_path)
    (tmp_path / "model_index.json").write_text("{")
    with pytest.raises(ValueError, match=r"model_index\.json: not JSON"):
        open_pipeline(tmp_path)


def test_a_missing_package_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch):
    def missing(name: str) -> object:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(package, "import_module", missing)
    with pytest.raises(ModuleNotFoundError, match="pip install diffusers transformers accelerate"):
        tiny_wan_pipeline()


# -- the command --------------------------------------------------------------------------------


def invoke(*arguments: object):
    return CliRunner().invoke(cli.app, ["apply", *map(str, arguments)])


def test_the_command_changes_one_path_to_run_a_checkpoint(saved: Path, tmp_path: Path):
    (tmp_path / "tight.txt").write_text("0-1=0.0")
    (tmp_path / "loose.txt").write_text("0-1=2.0")
    out = tmp_path / "run"
    done = invoke(tmp_path / "tight.txt", tmp_path / "loose.txt", "--model", saved,
                  "--prompt", "a red ball", "--size", "13,96,128", "--steps", 2, "--guidance", 1,
                  "--out", out)  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "tiny-wan: WanPipeline, transformer and transformer_2 of 2 layers" in done.stdout
    assert "Distances are of latents" in done.stdout
    assert "tight stays closer to dense than loose" in done.stdout
    record = json.loads((out / "provenance.json").read_text())
    assert "transformer_2/config.json" in record["inputs"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--grid", "1,1,1", "--prompt", "a"), "--grid 1,1,1: is for the small model alone"),
        ((), "--prompt is missing"),
        (
            ("--size", "1,2", "--prompt", "a"),
            "--size 1,2: expected three sizes frames,height,width",
        ),
    ],
)
def test_options_of_the_other_model_are_refused(
    saved: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
):
    (tmp_path / "mine.txt").write_text("0-1=0.0")
    done = invoke(tmp_path / "mine.txt", "--model", saved, *arguments)
    assert isinstance(done.exception, ValueError)
    assert message in str(done.exception)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--size", "13,96,100"), "width=100: must be a multiple of 16"),
        (("--steps", "0"), "steps=0: must be at least 1"),
        (("--seeds", "1,1"), "must be at least one, without repeats"),
        (("--gate", "open"), "gate='open': must be one of"),
        (("--impl", "fast"), "impl='fast': must be one of"),
    ],
)
def test_settings_are_refused_before_weights_are_read(
    saved: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
):
    folder = tmp_path / "wan"
    shutil.copytree(saved, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    (tmp_path / "mine.txt").write_text("0-1=0.0")
    done = invoke(tmp_path / "mine.txt", "--model", folder, "--prompt", "a", *arguments)
    assert isinstance(done.exception, ValueError)
    assert message in str(done.exception)


def test_size_is_for_a_pipeline_alone(tmp_path: Path):
    (tmp_path / "mine.txt").write_text("0-1=0.0")
    done = invoke(tmp_path / "mine.txt", "--size", "1,2,3")
    assert "is for a --model FOLDER alone" in str(done.exception)


# -- the notebook -------------------------------------------------------------------------------


def test_sizes_that_are_not_given_are_the_pipelines_own(saved: Path):
    model = PipelineVideo(open_pipeline(saved))
    assert model.seen.grid.shape == (21, 30, 52)  # 81 frames of 480 x 832 pixels
    assert len(model.seen.times) == 50


def test_the_notebook_needs_one_path_for_a_checkpoint(saved: Path, tmp_path: Path):
    papermill = pytest.importorskip("papermill", reason="needs papermill")
    given = {"MODEL": str(saved), "OUT": str(tmp_path), "SIZE": [21, 128, 256], "STEPS": 2}
    made = papermill.execute_notebook(
        str(notebooks_dir() / "10_your_own_model.ipynb"),
        str(tmp_path / "out.ipynb"),
        given,
        progress_bar=False,
    )
    printed = "".join(out.get("text", "") for cell in made.cells for out in cell.get("outputs", ()))
    assert "tiny-wan: WanPipeline, transformer and transformer_2 of 2 layers" in printed
    assert "than flat" in printed or "than late" in printed
    assert len(list(tmp_path.glob("run-*/mine.safetensors"))) == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"STEPS": 1}, "STEPS=1: must be at least 2, because the first step of the profile `late`"),
        (
            {"SIZE": [13, 96, 128]},
            r"SIZE=\[13, 96, 128\]: 192 tokens make 3 .*TARGET_DENSITY is 0.4",
        ),
    ],
)
def test_the_notebook_refuses_what_cannot_be_shown(
    tmp_path: Path, given: dict[str, Any], message: str
):
    papermill = pytest.importorskip("papermill", reason="needs papermill")
    with pytest.raises(papermill.exceptions.PapermillExecutionError, match=message):
        papermill.execute_notebook(
            str(notebooks_dir() / "10_your_own_model.ipynb"),
            str(tmp_path / "out.ipynb"),
            {"OUT": str(tmp_path), **given},
            progress_bar=False,
        )
