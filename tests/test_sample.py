"""`workbench sample`: variants, controls, counters, flags, the run folder, bad options."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner, Result

from tests.policy_inputs import model
from workbench import cli
from workbench.config import (
    AttentionConfig,
    SolAttnConfig,
    VisualGenConfig,
    dump_config,
    load_config,
)
from workbench.models import dense_attention, load_model, sample, save_model
from workbench.sample import report as sample_report
from workbench.sample import text as sample_text
from workbench.sample.run import Sampled, compare, flags, run, sample_variant, units
from workbench.sample.schedules import cutoff_of, schedule_grid
from workbench.sample.settings import SampleSettings
from workbench.sample.variants import BASELINE, CONTROL, VSA_BASELINE, Knobs, Variant, variants

GRID = (4, 8, 8)  # 256 tokens: four blocks of 64, four cubes, two tiles a side
SETTINGS = SampleSettings(grid=GRID, steps=4)
CALLS = 2 * 4  # layers x steps
FACTOR = 100.0
MODELS = {"base": model(), "vsa": model(gate=True)}
KNOBS = Knobs(tau=0.5, sparsity=0.5, threshold_scale_factor=FACTOR)
IDLE = ("skip_softmax", "skip_softmax_mxfp8")  # queries of a random model agree on nothing to skip


@pytest.fixture(scope="module")
def everything():
    """All mechanisms on both models."""
    return run(MODELS, SETTINGS, variants(KNOBS, fine_tuned=True))


def names(found: list[Variant]) -> list[str]:
    return [variant.name for variant in found]


# -- which variants -----------------------------------------------------------------------------


def test_by_default_all_mechanisms_and_what_composes():
    assert names(variants(Knobs())) == [
        "dense",
        "dense_control",
        "sol_attn",
        "sol_attn_dense_start",
        "skip_softmax",
        "quant_mxfp8",
        "quant_nvfp4",
        "skip_softmax_mxfp8",
        "vsa",
    ]


@pytest.mark.parametrize(
    "algorithm, found",
    [
        ("dense", []),
        ("sol_attn", ["sol_attn"]),
        ("skip_softmax", ["skip_softmax"]),
        ("quant", ["quant_mxfp8", "quant_nvfp4"]),
        ("vsa", ["vsa"]),
    ],
)
def test_baseline_and_control_always_come_first(algorithm: str, found: list[str]):
    assert names(variants(Knobs(algorithm))) == [BASELINE, CONTROL, *found]


def test_without_a_gate_vsa_is_training_free_and_says_so():
    found = variants(Knobs("vsa"))[-1]
    assert (found.gate, found.weights) == ("zero", "base")
    assert "training-free" in found.note
    assert "training-free" in found.config_text()


def test_fine_tuned_weights_are_compared_with_their_own_dense_run():
    found = {item.name: item for item in variants(Knobs("vsa"), fine_tuned=True)}
    assert list(found)[2:] == ["vsa_training_free", VSA_BASELINE, "vsa_fine_tuned"]
    assert found["vsa_fine_tuned"].compared_with == VSA_BASELINE
    assert found["vsa_fine_tuned"].gate == "model"
    assert found["vsa_training_free"].compared_with == BASELINE


def test_options_reach_the_configurations():
    knobs = Knobs("sol_attn", tau=2.5, cutoff=0.75, dense_layers=(0, 1))
    config = variants(knobs)[-1].config
    assert config is not None
    assert config.sparse_attention_config == SolAttnConfig(
        tau=2.5, disabled_until_timestep=0.75, dense_layers=(0, 1)
    )
    both = variants(Knobs("skip_softmax", qk_dtype="nvfp4"))[-1]
    assert both.name == "skip_softmax_nvfp4"
    assert both.config is not None
    assert both.config.quant_attention_config is not None


@pytest.mark.parametrize(
    "knobs, text",
    [
        (Knobs("sol"), "must be one of dense, sol_attn"),
        (Knobs("vsa", tau=1.0), "tau=1.0: algorithm='vsa' would not look at it.*sol_attn"),
        (Knobs("vsa", cutoff=0.5), "cutoff=0.5.*choose --algorithm sol_attn or skip_softmax"),
        (Knobs("dense", qk_dtype="mxfp8"), "qk_dtype='mxfp8'"),
        (Knobs("sol_attn", qk_dtype="mxfp8"), "the server refuses sol_attn together with"),
        (Knobs("vsa", qk_dtype="mxfp8"), "vsa replaces the dense kernel"),
        (Knobs("quant", qk_dtype="int4"), "qk_dtype='int4'"),
        (Knobs("sol_attn", tau=math.nan), "tau=nan: must be finite"),
        (Knobs("sol_attn", cutoff=0.0), "disabled_until_timestep"),
        (Knobs("vsa", sparsity=1.5), r"vsa_sparsity=1.5: must be in \[0, 1\]"),
    ],
)
def test_an_option_that_does_nothing_or_is_wrong_is_refused(knobs: Knobs, text: str):
    with pytest.raises(ValueError, match=text):
        variants(knobs)


def test_configuration_files_are_variants_of_their_own():
    sol = VisualGenConfig(
        attention_config=AttentionConfig(sparse_attention_config=SolAttnConfig(tau=2.0))
    )
    assert names(variants(Knobs(), {"mine": sol})) == [BASELINE, CONTROL, "mine"]
    assert names(variants(Knobs("vsa"), {"mine": sol}))[2:] == ["mine", "vsa"]
    with pytest.raises(ValueError, match=r"tau=1.0: the configuration files would not look at it"):
        variants(Knobs(tau=1.0), {"mine": sol})
    with pytest.raises(ValueError, match="dense: two variants have this name"):
        variants(Knobs(), {"dense": sol})


def test_the_configuration_of_a_variant_reads_back():
    for variant in variants(Knobs(dense_layers=(0, 3))):
        read = load_config(variant.config_text()).attention_config
        assert read == (variant.config or AttentionConfig())


# -- sampling -----------------------------------------------------------------------------------


def test_the_baseline_is_the_plain_sampler_bit_for_bit():
    plain = sample(model(), labels=["disc"], grid=GRID, steps=4, seed=4, guidance=1)
    found = sample_variant(model(), Variant(BASELINE, role="baseline"), SETTINGS, 4)
    assert torch.equal(found.video, plain[0])


def test_sparse_off_is_byte_identical_to_plain_dense_over_a_whole_video():
    dense = sample_variant(model(), Variant(BASELINE, role="baseline"), SETTINGS, 4)
    off = sample_variant(model(), Variant("off", AttentionConfig()), SETTINGS, 4)
    assert torch.equal(off.video, dense.video)
    assert off.counts is not None
    assert off.counts.dense == {"sparse off": CALLS}


def test_recording_changes_no_bit_of_any_variant(everything):
    from workbench.attention import SparseAttention

    for row in everything.rows:
        variant = row.sampled.variant
        if variant.role == "policy":
            net = MODELS[variant.weights]
            unrecorded = SparseAttention(variant.config, gate=variant.gate, record=False)
            video = sample(
                net, labels=["disc"], grid=GRID, steps=4, seed=4, guidance=1, attention=unrecorded
            )
            assert torch.equal(video[0], row.sampled.video), variant.name


def test_the_control_is_exact_but_other_code(everything):
    row = everything.of(CONTROL)[0]
    assert row.sampled.density == 1
    assert 0 < row.quality.relative_l2 < 1e-4
    assert {record.impl for record in row.sampled.records} != {"torch"}


def check_sparse(row, floor: float, calls: int) -> None:
    name, counts = row.sampled.variant.name, row.sampled.counts
    assert 0 < row.sampled.density < 1, name
    assert counts.sparse > 0, name
    assert counts.total == calls, name
    assert row.quality.relative_l2 > floor, name
    assert row.flags == [], name


def test_every_sparse_variant_is_sparse_counted_and_farther_than_the_control(everything):
    floor = everything.of(CONTROL)[0].quality.relative_l2
    sparse = [row for row in everything.rows if row.sampled.variant.sparse]
    named = {row.sampled.variant.name: row for row in sparse}
    assert len(named) == 6
    for name in named.keys() - set(IDLE):
        check_sparse(named[name], floor, CALLS)


def test_skip_softmax_skips_tiles_of_the_trained_model():
    trained = load_model()
    settings = SampleSettings(grid=(4, 16, 16), steps=2)
    plain, quantised = (
        run({"base": trained}, settings, variants(Knobs("skip_softmax", qk_dtype=dtype)))
        for dtype in (None, "mxfp8")
    )
    floor = plain.of(CONTROL)[0].quality.relative_l2
    for row in (plain.rows[-1], quantised.rows[-1]):
        check_sparse(row, floor, trained.config.depth * 2)
    assert "mxfp8 QK" in quantised.rows[-1].sampled.emulated


def test_quantised_variants_say_what_was_emulated(everything):
    (row,) = everything.of("quant_mxfp8")
    assert row.sampled.density == 1
    assert "mxfp8 QK" in row.sampled.emulated
    assert row.quality.relative_l2 > everything.of(CONTROL)[0].quality.relative_l2


def test_a_denoising_cutoff_is_counted_in_steps_and_seen_in_the_densities(everything):
    (row,) = everything.of("sol_attn_dense_start")
    # Of 4 steps with shift 3 the times are 1, 0.9, 0.75 and 0.5.
    assert row.dense_steps == 2
    densities = row.sampled.densities()
    assert densities[:2] == [1.0, 1.0]
    assert max(densities[2:]) < 1
    assert row.sampled.counts.dense == {"dense phase": 2 * 2}
    text = "\n".join(sample_text.notes(everything))
    assert "dense while t >= 0.9" in text
    assert "2 of the 4 steps" in text


def test_fine_tuned_vsa_has_both_comparisons(everything):
    (row,) = everything.of("vsa_fine_tuned")
    (own,) = everything.of(VSA_BASELINE)
    (base,) = everything.of(BASELINE)
    assert row.quality == compare(row.sampled.video, own.sampled.video)
    assert row.to_base == compare(row.sampled.video, base.sampled.video)
    assert row.quality != row.to_base


def test_every_seed_starts_from_its_own_noise_and_pairs_with_its_own_dense_run():
    settings = replace(SETTINGS, seeds=(1, 2), steps=2)
    result = run(MODELS, settings, variants(Knobs("sol_attn", tau=0.5)))
    assert len(result.rows) == 3 * 2 == units(settings, result.variants) / 2
    first, second = result.of(BASELINE)
    assert not torch.equal(first.sampled.video, second.sampled.video)
    assert all(row.quality.psnr == math.inf for row in (first, second))
    text = printed(result)
    assert "relative L2 above the control" in text
    assert "median [min..max]" in text  # not swallowed as markup
    assert "±" in text


def test_progress_ticks_once_for_each_model_step():
    seen: list[str] = []
    chosen = variants(Knobs("sol_attn"))
    run(MODELS, SETTINGS, chosen, tick=seen.append)
    assert len(seen) == units(SETTINGS, chosen)
    assert set(seen) == set(names(chosen))


def test_everything_that_can_be_refused_is_refused_before_sampling():
    seen: list[str] = []
    with pytest.raises(ValueError, match="dense_layers has 5"):
        run(MODELS, SETTINGS, variants(Knobs("sol_attn", dense_layers=(5,))), tick=seen.append)
    assert seen == []


@pytest.mark.parametrize(
    "settings, kind, text",
    [
        ({"label": "cube"}, ValueError, "cube"),
        ({"steps": 0}, ValueError, "steps=0"),
        ({"steps": True}, ValueError, "steps=True"),
        ({"seeds": ()}, ValueError, r"seeds=\(\): must be at least one"),
        ({"seeds": (1, 1)}, ValueError, "without repeats"),
        ({"seeds": (-1,)}, ValueError, "seeds=-1"),
        ({"grid": (0, 8, 8)}, ValueError, "grid t=0"),
        ({"guidance": math.nan}, ValueError, "guidance=nan"),
    ],
)
def test_bad_settings_are_refused(settings: dict, kind: type[Exception], text: str):
    with pytest.raises(kind, match=text):
        replace(SETTINGS, **settings)


# -- flags --------------------------------------------------------------------------------------


def flagged(knobs: Knobs) -> list[str]:
    return run(MODELS, SETTINGS, variants(knobs)).rows[-1].flags


def test_a_variant_that_skipped_nothing_is_flagged():
    found = "\n".join(flagged(Knobs("sol_attn", tau=-1000.0)))
    assert f"SKIPPED NOTHING: all {CALLS} sparse calls have density 1" in found


def test_a_variant_that_ran_dense_everywhere_is_flagged():
    found = "\n".join(flagged(Knobs("sol_attn", dense_layers=(0, 1))))
    assert f"RAN DENSE EVERYWHERE: 0 sparse, {CALLS} dense (dense layer)" in found
    assert "EQUALS DENSE bit for bit" in found


def test_a_threshold_of_zero_is_flagged():
    found = "\n".join(flagged(Knobs("skip_softmax", threshold_scale_factor=0.0)))
    assert "RAN DENSE EVERYWHERE" in found


def test_a_video_that_is_not_finite_is_flagged_and_has_no_figures(everything):
    row = everything.of("sol_attn")[0]
    broken: Sampled = replace(row.sampled, video=torch.full_like(row.sampled.video, math.nan))
    assert flags(broken, row.sampled.video)[0].startswith("NOT FINITE")
    assert math.isnan(compare(broken.video, row.sampled.video).psnr)


def test_what_the_policy_warns_of_is_in_the_flags():
    (row,) = run(
        MODELS, SETTINGS, variants(Knobs("skip_softmax", threshold_scale_factor=300.0))
    ).of("skip_softmax")
    assert any("at least 1" in flag for flag in row.flags)


# -- printing and files -------------------------------------------------------------------------


def printed(result) -> str:
    console = Console(record=True, width=132)
    sample_text.show(result, console)
    return console.export_text()


def test_the_table_has_every_variant_and_explains_its_columns(everything):
    text = printed(everything)
    for variant in everything.variants:
        assert text.count(variant.name) >= 2
    for word in ("PSNR", "SSIM", "LPIPS", "density", "emulated", "the floor, rounding alone"):
        assert word in text
    assert "training-free top-k" in text
    warned = [line for line in text.splitlines() if line.startswith("warning: ")]
    assert {line.split(": ")[1] for line in warned} == set(IDLE)


def test_flags_are_printed_loudly():
    result = run(MODELS, SETTINGS, variants(Knobs("sol_attn", tau=-1000.0)))
    assert "warning: sol_attn: SKIPPED NOTHING" in printed(result)


@pytest.fixture(scope="module")
def folder(everything, tmp_path_factory: pytest.TempPathFactory) -> Path:
    weights = tmp_path_factory.mktemp("weights") / "base.safetensors"
    save_model(model(), weights)
    result = replace(everything, inputs={"base weights": weights})
    target = tmp_path_factory.mktemp("runs") / "run"
    return sample_report.write(result, target, command=["workbench", "sample"], summary="text")


def test_the_folder_has_a_folder_for_each_variant(folder: Path, everything):
    for variant in everything.variants:
        inside = {path.name for path in (folder / variant.name).iterdir()}
        assert inside == {"video.gif", "frames.png", "config.yaml"}
        load_config(folder / variant.name / "config.yaml")
    files = {path.name for path in folder.iterdir() if path.is_file()}
    assert files == {
        "comparison.png", "density.png", "results.csv", "summary.txt", "provenance.json",
    }  # fmt: skip


def test_results_have_a_row_for_each_variant_with_the_documented_columns(folder: Path, everything):
    with (folder / "results.csv").open(newline="") as file:
        rows = {row["variant"]: row for row in csv.DictReader(file)}
    assert list(rows) == names(everything.variants)
    assert list(rows["dense"]) == list(sample_report.COLUMNS)
    assert rows["sol_attn"]["sparse_calls"] == str(CALLS)
    assert len(rows["sol_attn"]["density_by_step"].split()) == SETTINGS.steps
    assert rows["sol_attn"]["lpips"] == ""
    assert float(rows["sol_attn"]["psnr"]) == everything.of("sol_attn")[0].quality.psnr
    assert rows["dense"]["psnr"] == "inf"


def test_the_provenance_names_weights_settings_and_schedule(folder: Path):
    record = json.loads((folder / "provenance.json").read_text())
    assert record["command"] == ["workbench", "sample"]
    assert len(record["inputs"]["base weights"]["sha256"]) == 64
    assert record["settings"]["steps"] == SETTINGS.steps
    assert record["times"] == SETTINGS.times
    assert record["seeds"] == {"noise 0": 4}
    assert {item["name"]: item["gate"] for item in record["variants"]}[
        "vsa_training_free"
    ] == "zero"


# -- the command --------------------------------------------------------------------------------


def command(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, ["sample", *map(str, arguments)])


def test_the_command_samples_a_configuration_file(tmp_path: Path):
    save_model(model(), tmp_path / "base.safetensors")
    sol = SolAttnConfig(tau=0.5, disabled_until_timestep=0.8)
    config = VisualGenConfig(attention_config=AttentionConfig(sparse_attention_config=sol))
    (tmp_path / "mine.yaml").write_text(dump_config(config))
    common = ("--weights", tmp_path / "base.safetensors", "--grid", "4,8,8", "--steps", 3)
    files = ("--config", tmp_path / "mine.yaml", "--out", tmp_path / "run")
    done = command(*common, *files, "--device", "cpu")
    assert done.exit_code == 0, done.output
    with (tmp_path / "run" / "results.csv").open(newline="") as file:
        rows = {row["variant"]: row for row in csv.DictReader(file)}
    assert list(rows) == [BASELINE, CONTROL, "mine"]
    assert (rows["mine"]["cutoff"], rows["mine"]["dense_steps"]) == ("0.8", "2")
    assert (tmp_path / "run" / "summary.txt").read_text().startswith("tiny video DiT, class disc")


def test_weights_with_a_gate_bring_both_vsa_variants(tmp_path: Path):
    save_model(model(), tmp_path / "base.safetensors")
    save_model(model(gate=True), tmp_path / "vsa.safetensors")
    models = (
        "--weights",
        tmp_path / "base.safetensors",
        "--vsa-weights",
        tmp_path / "vsa.safetensors",
    )
    small = ("--grid", "4,8,8", "--steps", 2, "--algorithm", "vsa", "--sparsity", 0.5)
    done = command(*models, *small, "--dtype", "bfloat16", "--out", tmp_path / "run")
    assert done.exit_code == 0, done.output
    assert "vsa_fine_tuned: against dense of the base weights" in done.output
    assert "bfloat16" in done.output


@pytest.mark.parametrize(
    "arguments, text",
    [
        (("--algorithm", "vsa", "--tau", 1), "would not look at it"),
        (("--grid", "8,16"), "expected three sizes"),
        (("--seed", "a"), "expected integers"),
        (("--label", "cube"), "cube"),
        (("--dtype", "float8"), "dtype='float8'"),
        (("--device", "tpu"), "device='tpu'"),
        (("--weights", "no.safetensors"), "no such file"),
        (("--dense-layers", "2-1", "--algorithm", "sol_attn"), "must ascend"),
        (("--impl", "fast", "--algorithm", "sol_attn"), "impl='fast'"),
    ],
)
def test_a_bad_option_is_an_error_and_leaves_nothing(arguments, text: str, tmp_path: Path):
    done = command(*arguments, "--out", tmp_path / "run")
    assert done.exit_code != 0
    assert text in str(done.exception)
    assert not list(tmp_path.iterdir())


def test_vsa_weights_without_a_gate_are_refused(tmp_path: Path):
    save_model(model(), tmp_path / "a.safetensors")
    both = ("--weights", tmp_path / "a.safetensors", "--vsa-weights", tmp_path / "a.safetensors")
    done = command(*both, "--algorithm", "vsa", "--out", tmp_path / "run")
    assert "the model has no gate" in str(done.exception)


def test_a_folder_that_exists_is_never_touched(tmp_path: Path):
    done = command("--out", tmp_path)
    assert isinstance(done.exception, FileExistsError)


# -- schedules ----------------------------------------------------------------------------------


@pytest.mark.parametrize("count", range(5))
def test_a_cutoff_keeps_exactly_that_many_steps_dense(count: int):
    from workbench.attention.phase import dense_steps

    assert dense_steps(SETTINGS.times, cutoff_of(SETTINGS.times, count)) == count


def test_a_grid_of_schedules_is_denser_with_more_dense_layers_and_steps():
    grid = schedule_grid(model(), SETTINGS, dense_layers=[0, 1], dense_steps=[0, 2], tau=0.5)
    density = torch.tensor(grid.density())
    assert bool((density.diff(dim=0) > 0).all())
    assert bool((density.diff(dim=1) > 0).all())
    assert all(row.sampled.density < 1 and not row.flags for row in grid.sparse)
    assert grid.control.quality.relative_l2 < min(row.quality.relative_l2 for row in grid.sparse)
    assert grid.row(1, 2).sampled.counts.dense == {"dense layer": 4, "dense phase": 2}
    assert grid.psnr()[1][1] == grid.row(1, 2).quality.psnr


@pytest.mark.parametrize(
    "dense_layers, dense_steps, text",
    [([2], [0], "dense_layers=2"), ([0], [4], "dense_steps=4"), ([], [0], "at least one")],
)
def test_a_schedule_without_anything_sparse_is_refused(dense_layers, dense_steps, text: str):
    with pytest.raises(ValueError, match=text):
        schedule_grid(model(), SETTINGS, dense_layers=dense_layers, dense_steps=dense_steps)


def test_dense_attention_is_what_the_baseline_calls():
    seen = []

    def spy(q, k, v, call):
        seen.append(call.layer)
        return dense_attention(q, k, v, call)

    video = sample(model(), labels=["disc"], grid=GRID, steps=4, seed=4, guidance=1, attention=spy)
    found = sample_variant(model(), Variant(BASELINE, role="baseline"), SETTINGS, 4)
    assert len(seen) == len(found.records) == CALLS
    assert torch.equal(video[0], found.video)


def test_vsa_weights_that_no_variant_uses_are_an_error(tmp_path: Path):
    done = command("--algorithm", "sol_attn", "--vsa-weights", tmp_path / "unused.safetensors")
    assert isinstance(done.exception, ValueError)
    assert "unused.safetensors" in str(done.exception)
    assert "choose the algorithm vsa" in str(done.exception)


def test_a_missing_configuration_file_is_named(tmp_path: Path):
    done = command("--config", tmp_path / "none.yaml")
    assert isinstance(done.exception, FileNotFoundError)
    assert "no such configuration file" in str(done.exception)
