"""`workbench apply`: files read back for a model, what runs, controls, statistics, the verdict."""

from __future__ import annotations

import copy
import csv
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from blockattn import UnsupportedError
from tests.calibrate_inputs import small_model
from tests.export_inputs import FORMULA
from tests.policy_inputs import model as model_with_gate
from workbench import cli
from workbench.attention.log import CallRecord
from workbench.config import (
    AttentionConfig,
    QuantAttentionConfig,
    SkipSoftmaxConfig,
    SolAttnConfig,
    SparseConfig,
    VideoSparseAttentionConfig,
    VisualGenConfig,
)
from workbench.config.checkpoint import read_calibration
from workbench.export import Deployment, export_config
from workbench.models import save_model
from workbench.profiles.compare import (
    CONTROL,
    DENSE,
    OTHER_SEED,
    Comparison,
    Pair,
    compare,
    videos,
)
from workbench.profiles.models import Choice
from workbench.profiles.profile import FORMATS, Profile, read_file, read_text, recognise
from workbench.profiles.session import apply_files
from workbench.profiles.tiny import TinyVideo
from workbench.profiles.understood import remarks, understand, understood_table
from workbench.profiles.verdict import verdict
from workbench.profiles.video import Run
from workbench.sample.run import Quality

GRID, STEPS = (3, 8, 25), 4  # 600 tokens: ten blocks, the last one ragged
TINY = TinyVideo(small_model(), grid=GRID, steps=STEPS)
PLACE = TINY.place
GROUP: dict[str, Any] = {
    "sparse_attention_config": {
        "config_groups": {
            "group_0": {
                "algorithm": "skip_softmax",
                "threshold_scale_factor": {
                    "formula": "a * exp(b * target_sparsity)",
                    "coefficients": {"a": 300.0, "b": 1.0},
                },
                "target_sparsity": 0.5,
                "ignore": ["blocks.1"],
            }
        }
    }
}


def config(sparse: SparseConfig | None, **others: object) -> VisualGenConfig:
    attention = {"sparse_attention_config": sparse, **others}
    return VisualGenConfig(attention_config=AttentionConfig(**attention))  # pyright: ignore


def profile(text: str, model: TinyVideo = TINY, **options: object) -> Profile:
    return read_text(text, model.place, **options)  # pyright: ignore


def said(made: Profile, model: TinyVideo = TINY) -> list[tuple[str, int]]:
    return [(plan.does, plan.dense_steps) for plan in understand(made, model)]


# -- reading back -------------------------------------------------------------------------------

SOL = SolAttnConfig(tau=0.5, dense_layers=(1,), disabled_until_timestep=0.95)
PLAIN_SOL = SolAttnConfig(tau=0.5, dense_layers=(1,))
# lambda 1000: queries of a random model agree on nothing to skip below 1.
SKIP = SkipSoftmaxConfig(threshold_scale_factor=6e5, disabled_until_timestep=0.95)


@pytest.mark.parametrize(
    "target, sparse",
    [
        ("tensorrt_llm", SOL),
        ("tensorrt_llm", SKIP),
        ("vllm_omni", SOL),
        ("vllm_omni", SKIP),
        ("sglang", SOL),
        ("sglang", SKIP),
        ("comfyui", PLAIN_SOL),
    ],
)
def test_what_export_wrote_samples_the_same_video_bit_for_bit(target: str, sparse: SparseConfig):
    source = config(sparse, backend="CUTEDSL")
    text = export_config(source, target, PLACE).text
    assert recognise(text) == target
    back, own = profile(text), Profile("own", "own", source.attention_config)
    exported, direct = (TINY.sample("disc", 3, made) for made in (back, own))
    assert torch.equal(exported.video, direct.video)
    assert exported.count("sparse") == direct.count("sparse") > 0
    assert exported.density == direct.density < 1
    assert not torch.equal(exported.video, TINY.sample("disc", 3, None).video)


def test_a_model_optimizer_file_brings_its_own_formula_and_ignored_layers():
    calibration = read_calibration(checkpoint_config=GROUP)
    place = Deployment(calibration=calibration)
    text = export_config(config(SkipSoftmaxConfig(target_sparsity=0.5)), "model_optimizer", place)
    made = profile(text.text)
    factor = 300 * math.exp(0.5)
    assert said(made) == [
        (f"skip_softmax, factor {factor:g}, lambda {factor / 600:.3g}", 0),
        ("dense (ignored by the calibration)", 0),
    ]
    assert {r.layer for r in TINY.sample("disc", 3, made).records if r.kind == "sparse"} == {0}


def test_a_name_that_a_calibration_ignores_in_vain_is_told():
    group = copy.deepcopy(GROUP)
    group["sparse_attention_config"]["config_groups"]["group_0"]["ignore"] += ["*attn2*"]
    made = profile(json.dumps(group))
    assert remarks(made, TINY)[-1] == "ignore '*attn2*' names no self-attention of this model"
    assert len(remarks(made, TINY)) == len(made.notes) + 1


def test_a_target_takes_the_formula_of_the_model_or_the_option():
    source = config(SkipSoftmaxConfig(target_sparsity=0.5), backend="TRTLLM")
    text = export_config(source, "tensorrt_llm").text
    assert said(profile(text, calibration=GROUP))[0][0].startswith("skip_softmax, factor 494.6")
    with pytest.raises(ValueError, match="no calibration formula to turn it into a factor"):
        understand(profile(text), TINY)


def test_vsa_needs_the_models_gate_or_the_word_that_there_is_none():
    text = export_config(config(VideoSparseAttentionConfig(vsa_sparsity=0.5)), "sglang").text
    with pytest.raises(ValueError, match=r"needs the gate.*--gate zero"):
        understand(profile(text), TINY)
    free = TinyVideo(small_model(), grid=GRID, steps=STEPS, gate="zero")
    assert said(profile(text), free)[0] == ("vsa, sparsity 0.5, no coarse branch", 0)
    gated = TinyVideo(model_with_gate(gate=True), grid=(4, 8, 8), steps=STEPS)
    assert said(profile(text, gated), gated)[0] == ("vsa, sparsity 0.5", 0)
    assert gated.sample("disc", 3, profile(text, gated)).density < 1


def test_every_block_of_a_tau_profile_runs_with_its_own_tau():
    made = profile("0=2.0; 1=-1e6")
    assert said(made) == [("sol_attn, tau 2 diag", 0), ("sol_attn, tau -1e+06 diag", 0)]
    found = TINY.sample("disc", 3, made).records
    assert all(r.density < 0.9 for r in found if r.layer == 0)
    assert all(r.density == 1 for r in found if r.layer == 1)


def test_a_comfyui_node_gives_each_block_the_tau_of_its_profile_or_its_own():
    inputs = json.loads(export_config(config(PLAIN_SOL), "comfyui", PLACE).text)
    inputs["inputs"] |= {"tau": 1.25, "tau_profile": "0=2.0", "dense_blocks": ""}
    assert said(profile(json.dumps(inputs))) == [
        ("sol_attn, tau 2 diag", 0),
        ("sol_attn, tau 1.25 diag", 0),
    ]


@pytest.mark.parametrize("tau", ["x", None, ["5", 0], True])
def test_a_tau_that_a_full_profile_leaves_idle_is_still_a_number(tau: Any):
    inputs = json.loads(export_config(config(PLAIN_SOL), "comfyui", PLACE).text)
    inputs["inputs"] |= {"tau": tau, "tau_profile": "0-1=2.0"}
    with pytest.raises(ValueError, match=r"inputs\.tau=.*: expected a number"):
        profile(json.dumps(inputs))


def test_quantised_attention_is_told_with_its_formats():
    quant = QuantAttentionConfig.model_validate({"qk_dtype": "mxfp8"})
    made = profile(export_config(config(None, quant_attention_config=quant, backend="CUTEDSL"),
                                 "tensorrt_llm").text)  # fmt: skip
    assert said(made)[0] == ("dense, qk mxfp8, v fp8", 0)


@pytest.mark.parametrize(
    "text, message",
    [
        ("hello", "neither attention_config"),
        ('{"tau": 1.0}', "holds tau: no format of workbench export; name it with --from"),
        ("0=1.0", "blocks 1 are not named and keep the tau of the node"),
        ("0-2=1.0", "leaves the 2 blocks of the model"),
        ("attention_config: {}\nparallel_config: {ulysses: 2}", "parallel_config: only attention_"),
        ('{"attention_backend": "sol_attn", "attention_backend_config": {"sink_tokens": 9}}',
         "a configuration here has no sink"),
        ('{"attention_backend": "sol_attn", "attention_backend_config": {"tua": 1}}',
         "Did you mean 'tau'"),
        ('{"attention_backend": "sol_attn"}', "10 dense steps: the schedule has 4 steps"),
    ],
)  # fmt: skip
def test_what_cannot_be_applied_is_refused_with_the_path(text: str, message: str, tmp_path: Path):
    path = tmp_path / "mine.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"mine\.txt: ") as refused:
        read_file(path, PLACE)
    assert message in str(refused.value)


def test_a_layer_that_the_model_lacks_and_a_recipe_of_the_server_are_refused():
    beyond = profile(export_config(config(SolAttnConfig(dense_layers=(7,)), backend="CUTEDSL"),
                                   "tensorrt_llm").text)  # fmt: skip
    with pytest.raises(ValueError, match="dense_layers has 7"):
        understand(beyond, TINY)
    sage = {"backend": "TRTLLM_ATTN", "quant": {"dtype_qk": "int8"}}
    with pytest.raises(UnsupportedError, match="no SageAttention"):
        understand(profile(json.dumps({"default": sage})), TINY)


def test_an_unknown_format_and_a_missing_file_are_refused():
    with pytest.raises(ValueError, match="format='onnx': must be one of tensorrt_llm"):
        profile("0=1", format="onnx")
    with pytest.raises(FileNotFoundError, match=r"nowhere\.json: no such file"):
        read_file(Path("nowhere.json"), PLACE)
    assert "tau_profile" in FORMATS


def test_the_table_joins_layers_that_do_the_same_and_counts_dense_steps():
    made = profile(export_config(config(SOL), "sglang", PLACE).text, name="mine")
    table = understood_table(made, TINY)
    assert table.caption == "mine (sglang) on 2 layers"
    assert list(table.rows) == [
        ("0", "blocks.0", "sol_attn, tau 0.5 diag", "1 of 4 steps"),
        ("1", "blocks.1", "dense (dense_layers)", "never"),
    ]
    same = understood_table(profile("0-1=1.5"), TINY)
    assert list(same.rows) == [("0-1", "blocks.0 to blocks.1", "sol_attn, tau 1.5 diag", "never")]


# -- comparing ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compared() -> Comparison:
    tight, loose = profile("0-1=0.0", name="tight"), profile("0-1=2.0", name="loose")
    return compare(TINY, [tight, loose], ["disc", "ring"], [0, 1])


def test_every_pair_has_dense_both_controls_and_each_profile(compared: Comparison):
    assert [(pair.prompt, pair.seed) for pair in compared.pairs] == [
        ("disc", 0), ("disc", 1), ("ring", 0), ("ring", 1)
    ]  # fmt: skip
    assert all(
        list(pair.runs) == [DENSE, CONTROL, "tight", "loose", OTHER_SEED] for pair in compared.pairs
    )


def test_the_control_is_exact_and_its_distance_is_rounding(compared: Comparison):
    assert compared.values(CONTROL, "density") == [1.0] * 4
    assert all(0 < value < 1e-4 for value in compared.values(CONTROL, "relative_l2"))
    assert [pair.flags[CONTROL] for pair in compared.pairs] == [[]] * 4


def test_the_scale_is_the_dense_video_of_the_next_seed(compared: Comparison):
    scale = compared.values(OTHER_SEED, "relative_l2")
    assert all(value > 0.1 for value in scale)
    first, second = (TINY.sample("disc", seed, None).video for seed in (0, 1))
    expected = float((second - first).norm() / first.norm())
    assert scale[0] == pytest.approx(expected, rel=1e-5)


def test_a_single_seed_takes_the_next_one_for_the_scale(compared: Comparison):
    one = compare(TINY, [profile("0-1=2.0", name="loose")], ["disc"], [0])
    assert one.values(OTHER_SEED, "relative_l2") == compared.values(OTHER_SEED, "relative_l2")[:1]
    assert videos(one.profiles, ["disc"], [0]) == 2 + 2


def test_the_sparser_profile_is_farther_from_dense_and_the_verdict_says_so(compared: Comparison):
    assert max(compared.values("loose", "density")) < min(compared.values("tight", "density")) < 1
    gap = compared.difference("tight", "loose", "relative_l2")
    assert gap is not None
    assert gap.differs
    assert gap.values.mean < 0
    sentence = verdict(compared)
    assert sentence.startswith("tight stays closer to dense than loose, at higher density (0.")
    assert "of what another seed changes." in sentence


def test_the_number_of_videos_is_known_beforehand():
    seen: list[str] = []
    both = [profile("0-1=0.0", name="a"), profile("0-1=2.0", name="b")]
    compare(TINY, both, ["disc"], [0, 1, 2], tick=seen.append)
    assert len(seen) == videos(both, ["disc"], [0, 1, 2])


@pytest.mark.parametrize(
    "profiles, prompts, seeds, message",
    [
        ((), ("disc",), (0,), "must be one, or two"),
        (("dense",), ("disc",), (0,), "none of dense, dense_control"),
        (("a", "a"), ("disc",), (0,), "must be two names"),
        (("a",), ("cat",), (0,), "prompts holds 'cat': known names are disc, square"),
        (("a",), ("disc",), (0, 0), "without repeats"),
    ],
)
def test_arguments_are_refused_before_anything_is_sampled(
    profiles: Sequence[str], prompts: Sequence[str], seeds: Sequence[int], message: str
):
    seen: list[str] = []
    made = [profile("0-1=1.0", name=name) for name in profiles]
    with pytest.raises(ValueError, match=message):
        compare(TINY, made, prompts, seeds, tick=seen.append)
    assert seen == []


def test_a_profile_of_another_model_is_refused():
    other = read_text("0-5=1.0", Deployment(layers=6))
    with pytest.raises(
        ValueError, match="taus has 6 values: must be one for each of the model's 2"
    ):
        compare(TINY, [other], ["disc"], [0])


def test_a_model_whose_own_video_is_not_finite_is_refused_at_once():
    seen: list[str] = []
    broken = copy.deepcopy(small_model())
    broken.final.bias.fill_(math.nan)
    model = TinyVideo(broken, grid=GRID, steps=STEPS)
    with pytest.raises(ValueError, match=r"'disc', seed 0: the model's own video holds NaN"):
        compare(model, [profile("0-1=1.0")], ["disc"], [0, 1], tick=seen.append)
    assert seen == ["dense: disc, seed 0"]


def test_a_profile_that_skips_nothing_is_flagged():
    found = compare(TINY, [profile("0-1=-1e6", name="all")], ["disc"], [0])
    assert found.pairs[0].flags["all"] == ["SKIPPED NOTHING: all 8 sparse calls have density 1"]


# -- the verdict, on made figures ---------------------------------------------------------------


def made(
    distances: dict[str, Sequence[float]], densities: dict[str, float], flag: str = ""
) -> Comparison:
    """Pairs with given relative L2 distances and one sparse call each."""
    names = list(densities)
    count = len(distances[names[0]])
    all_names = [*names, CONTROL, OTHER_SEED]
    full = {CONTROL: [1e-6] * count, OTHER_SEED: [0.5] * count, **distances}
    call = ("sparse", "sparse", "", "sol_attn", "eager")
    runs = {
        name: Run(
            torch.zeros(1), False, [CallRecord(0, 0, 1.0, *call, densities.get(name, 1.0))], 0
        )
        for name in (DENSE, *all_names)
    }  # pyright: ignore
    pairs = [
        Pair(
            "p",
            n,
            runs,
            {name: Quality(math.nan, math.nan, full[name][n]) for name in all_names},
            {name: [flag] if flag else [] for name in names},
        )
        for n in range(count)
    ]
    asked = AttentionConfig(sparse_attention_config=SolAttnConfig())
    return Comparison("made", [Profile(name, "made", asked) for name in names], pairs)


def test_a_difference_whose_interval_holds_zero_is_none():
    noisy = made({"a": [0.1, 0.3, 0.2], "b": [0.2, 0.2, 0.21]}, {"a": 0.3, "b": 0.3})
    sentence = verdict(noisy)
    assert sentence.startswith("No difference between a and b is shown, at the same density (0.3")


def test_the_closer_profile_is_named_first_with_its_density():
    clear = made({"a": [0.2, 0.22, 0.21], "b": [0.1, 0.12, 0.11]}, {"a": 0.5, "b": 0.25})
    assert verdict(clear) == (
        "b stays closer to dense than a, at lower density (0.250 against 0.500): relative L2 lower "
        "by 0.1 (95% interval 0.1 to 0.1, 3 pairs), 20.00% of what another seed changes."
    )


def test_two_pairs_are_too_few():
    few = made({"a": [0.2, 0.2], "b": [0.1, 0.1]}, {"a": 0.5, "b": 0.25})
    assert "2 pairs are too few for a verdict (3 are needed)" in verdict(few)
    one = made({"a": [0.2], "b": [0.1]}, {"a": 0.5, "b": 0.25})
    assert "1 pair is too few for a verdict (3 are needed)" in verdict(one)


def test_profiles_that_compute_the_same_are_called_equal():
    same = made({"a": [0.2, 0.1, 0.3], "b": [0.2, 0.1, 0.3]}, {"a": 0.5, "b": 0.5})
    assert verdict(same).startswith("a and b are equally far from dense in every pair")


def test_one_profile_is_held_against_rounding_and_another_seed():
    alone = made({"a": [0.2, 0.22, 0.21]}, {"a": 0.5})
    assert verdict(alone).startswith(
        "a moves the video by a relative L2 of 0.21 from dense at density 0.500, above rounding by"
    )
    exact = made({"a": [1e-6, 2e-6, 0.5e-6]}, {"a": 1.0})
    assert "no farther from dense than a second exact implementation" in verdict(exact)


@pytest.mark.parametrize("flag", ["NOT FINITE: x", "RAN DENSE EVERYWHERE: y"])
def test_a_spoilt_run_has_no_verdict(flag: str):
    assert verdict(made({"a": [0.2] * 3}, {"a": 1.0}, flag)) == f"No verdict: a, p, seed 0: {flag}."


# -- the command --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "small.safetensors"
    save_model(small_model(), path, dtype=torch.float32)
    return path


def invoke(*arguments: object):
    return CliRunner().invoke(cli.app, ["apply", *map(str, arguments)])


def test_the_command_says_what_it_understood_and_stops(weights: Path, tmp_path: Path):
    (tmp_path / "mine.txt").write_text("0=0.5; 1=2.0")
    done = invoke(tmp_path / "mine.txt", "--weights", weights, "--check", "--grid", "3,8,25")
    assert done.exit_code == 0, done.output
    assert "mine (tau_profile) on 2 layers" in done.stdout
    assert "sol_attn, tau 2 diag" in done.stdout
    assert "Distance from dense" not in done.stdout


def test_the_command_compares_two_files_and_writes_a_run_folder(weights: Path, tmp_path: Path):
    files = [tmp_path / "tight.txt", tmp_path / "loose.json"]
    files[0].write_text("0-1=0.0")
    files[1].write_text(export_config(config(SolAttnConfig(tau=2.0)), "sglang", PLACE).text)
    out = tmp_path / "run"
    done = invoke(*files, "--weights", weights, "--grid", "3,8,25", "--steps", STEPS, "--out", out)
    assert done.exit_code == 0, done.output
    assert "tight stays closer to dense than loose" in done.stdout
    rows = list(csv.DictReader((out / "results.csv").open()))
    assert len(rows) == 3 * 5
    sparse = [row for row in rows if row["name"] in ("tight", "loose")]
    assert all(float(row["density"]) < 1 and int(row["sparse_calls"]) == 8 for row in sparse)
    assert (out / "tight.txt").read_text() == "0-1=0.0"
    assert {path.name for path in out.iterdir()} >= {"comparison.png", "tight.gif", "summary.txt"}
    record = json.loads((out / "provenance.json").read_text())
    assert set(record["inputs"]) == {"profile tight", "profile loose", "weights"}
    assert "tight stays closer" in (out / "summary.txt").read_text()


def test_files_of_one_name_are_told_apart_by_their_folders(weights: Path, tmp_path: Path):
    for name in ("tight", "loose"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.txt").write_text("0-1=1.0")
    files = [tmp_path / name / "config.txt" for name in ("tight", "loose")]
    done = invoke(*files, "--weights", weights, "--check")
    assert done.exit_code == 0, done.output
    assert "tight-config (tau_profile)" in done.stdout
    assert "loose-config (tau_profile)" in done.stdout


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ("tight/a.txt", r"a\.txt is given twice; give another file"),
        ("./tight/../tight/a.txt", "is given twice"),
        ("more/tight/a.txt", "both would be called tight-a; rename one"),
    ],
)
def test_two_files_that_are_one_are_refused_before_a_model_is_loaded(
    tmp_path: Path, second: str, message: str
):
    for name in ("tight", "more/tight"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "a.txt").write_text("0-1=1.0")
    done = invoke(tmp_path / "tight/a.txt", tmp_path / second, "--weights", tmp_path / "none")
    assert isinstance(done.exception, ValueError)
    assert re.search(message, str(done.exception))


def test_a_calibration_that_nothing_looks_at_is_refused(weights: Path, tmp_path: Path):
    (tmp_path / "mine.txt").write_text("0-1=1.0")
    (tmp_path / "config.json").write_text(json.dumps(GROUP))
    done = invoke(tmp_path / "mine.txt", "--weights", weights,
                  "--calibration", tmp_path / "config.json", "--check")  # fmt: skip
    assert isinstance(done.exception, ValueError)
    path = tmp_path / "config.json"
    assert f"--calibration {path}: no profile looks at it" in str(done.exception)


def test_formula_of_a_checkpoint_is_what_the_option_takes(weights: Path, tmp_path: Path):
    source = config(SkipSoftmaxConfig(target_sparsity=0.5), backend="TRTLLM")
    text = export_config(source, "tensorrt_llm").text
    (tmp_path / "mine.yaml").write_text(text)
    (tmp_path / "config.json").write_text(
        json.dumps({"sparse_attention_config": {"threshold_scale_factor": FORMULA}})
    )
    done = invoke(tmp_path / "mine.yaml", "--weights", weights,
                  "--calibration", tmp_path / "config.json", "--check")  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "skip_softmax, factor 12414" in done.stdout


def test_files_and_folders_are_looked_at_before_a_model_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def opened(choice: Choice) -> None:
        raise AssertionError("the model was opened")

    monkeypatch.setattr(Choice, "open", opened)
    (tmp_path / "mine.txt").write_text("0-1=1.0")
    done = invoke(tmp_path / "nowhere.txt", "--check")
    assert isinstance(done.exception, FileNotFoundError)
    done = invoke(tmp_path / "mine.txt", "--weights", tmp_path / "nowhere.safetensors")
    assert isinstance(done.exception, FileNotFoundError)
    done = invoke(tmp_path / "mine.txt", "--out", tmp_path)
    assert isinstance(done.exception, FileExistsError)
    (tmp_path / "config.json").write_text("{}")
    done = invoke(tmp_path / "mine.txt", "--calibration", tmp_path / "config.json")
    assert str(done.exception).startswith(f"{tmp_path / 'config.json'}: no SkipSoftmax group")
    three = [tmp_path / f"{name}.txt" for name in "abc"]
    with pytest.raises(ValueError, match="files has 3: must be one, or two to compare"):
        apply_files(Choice(), three, None, [0], check=True)
