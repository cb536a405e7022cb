"""Plans of sweeps: three ways to write settings, names, keys, the control, what is refused."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sweep_inputs import SAMPLING, plan, plan_fields, write_plan
from workbench.config import (
    AttentionConfig,
    SkipSoftmaxConfig,
    SolAttnConfig,
    VisualGenConfig,
    dump_config,
)
from workbench.sweep.cases import CONTROL, Case, Sampling, read_setting
from workbench.sweep.plan import check_unchanged, differences, load_plan, make_plan


def names(**fields: Any) -> list[str]:
    return [setting.name for setting in plan(**fields).settings]


# -- three ways to write settings ---------------------------------------------------------------


def test_a_grid_is_every_combination_after_the_control():
    assert names(grid={"tau": [0.5, 1], "thresh_type": ["diag", "exact"]}) == [
        CONTROL,
        "sol_attn tau=0.5",
        "sol_attn tau=0.5 thresh_type=exact",
        "sol_attn tau=1",
        "sol_attn tau=1 thresh_type=exact",
    ]


def test_one_at_a_time_is_the_base_and_each_value_alone():
    found = names(
        base={"algorithm": "sol_attn", "tau": 1.5},
        grid={},
        one_at_a_time={"tau": [0.5], "disabled_until_timestep": [0.9], "dense_layers": ["0,2-3"]},
    )
    assert found == [
        CONTROL,
        "sol_attn tau=1.5",
        "sol_attn tau=0.5",
        "sol_attn tau=1.5 disabled_until_timestep=0.9",
        "sol_attn tau=1.5 dense_layers=0,2,3",
    ]


def test_cases_are_written_out_and_stand_for_themselves():
    found = names(
        base={},
        grid={},
        cases=[
            {"algorithm": "skip_softmax", "threshold_scale_factor": 40, "qk_dtype": "mxfp8"},
            {"algorithm": "vsa", "vsa_sparsity": 0.5},
            {"algorithm": "quant", "qk_dtype": "nvfp4"},
            {"algorithm": "dense"},
        ],
    )
    assert found == [
        CONTROL,
        "skip_softmax threshold_scale_factor=40 qk_dtype=mxfp8",
        "vsa vsa_sparsity=0.5",
        "quant qk_dtype=nvfp4",
        "dense",
    ]


def test_a_configuration_file_is_a_setting_named_by_the_file(tmp_path: Path):
    config = AttentionConfig(sparse_attention_config=SolAttnConfig(tau=2.25))
    (tmp_path / "served.yaml").write_text(dump_config(VisualGenConfig(attention_config=config)))
    path = write_plan(tmp_path / "plan.yaml", cases=[{"config": "served.yaml", "steps": 3}])
    served = load_plan(path).settings[-1]
    assert (served.name, served.attention, served.sampling.steps) == ("served", config, 3)


def test_a_setting_that_several_ways_lead_to_runs_once():
    fields = {"grid": {"tau": [0.5, 1.0]}, "one_at_a_time": {"tau": [0.5, 1, 2]}}
    assert names(**fields, cases=[{"algorithm": "sol_attn", "tau": 2.0}]) == [
        CONTROL,
        "sol_attn tau=0.5",
        "sol_attn tau=1",
        "sol_attn tau=2",
    ]


def test_the_sampler_is_a_factor_too_and_each_sampler_has_its_control():
    assert names(grid={"tau": [1], "steps": [2, 3]}) == [
        f"{CONTROL} steps=2",
        f"{CONTROL} steps=3",
        "sol_attn tau=1 steps=2",
        "sol_attn tau=1 steps=3",
    ]


def test_every_setting_meets_every_seed_and_prompt_and_controls_come_first():
    cases = plan(seeds=[3, 4], prompts=["disc", "ring"]).cases()
    assert len(cases) == 3 * 2 * 2
    assert [(c.seed, c.prompt) for c in cases[::3]] == [
        (3, "disc"),
        (3, "ring"),
        (4, "disc"),
        (4, "ring"),
    ]
    assert all(case.control for case in cases[::3])
    assert sum(case.control for case in cases) == 4


def test_the_plan_of_the_documentation_is_one(tmp_path: Path):
    guide = Path(__file__).resolve().parent.parent / "docs" / "sweeps.md"
    path = tmp_path / "tau.yaml"
    path.write_text(guide.read_text().partition("```yaml\n")[2].partition("```")[0])
    config = AttentionConfig(sparse_attention_config=SolAttnConfig(tau=2.25))
    (tmp_path / "served.yaml").write_text(dump_config(VisualGenConfig(attention_config=config)))
    found = load_plan(path)
    assert len(found.cases()) == len(found.settings) * 3 * 2
    names = {setting.name.removesuffix(" steps=8 weights=base") for setting in found.settings}
    assert {"served", "sol_attn tau=1", "sol_attn tau=1 thresh_type=exact"} <= names
    assert "vsa vsa_sparsity=0.75 steps=8 weights=vsa" in names


# -- keys ---------------------------------------------------------------------------------------


def test_a_key_is_the_hash_of_everything_written_out():
    text = (
        '{"attention":null,"prompt":"ring","sampling":{"device":"auto","dtype":"float32",'
        '"grid":[8,16,16],"guidance":1.0,"impl":"auto","shift":3.0,"steps":8,"weights":"base"},'
        '"seed":7,"setting":null}'
    )
    case = Case("x", None, Sampling(), seed=7, prompt="ring")
    assert case.key == hashlib.sha256(text.encode()).hexdigest()[:16]


SOL = AttentionConfig(sparse_attention_config=SolAttnConfig(tau=1.5))


def test_a_key_follows_from_what_runs_and_not_from_its_name_or_way_of_writing():
    case = Case("a", SOL, Sampling(steps=4), 0, "disc")
    assert Case("b", SOL, Sampling(steps=4, shift=3), 0, "disc").key == case.key
    written = read_setting({"steps": 4, "tau": 1.5, "algorithm": "sol_attn"}, {})
    assert Case("c", *written, 0, "disc").key == case.key


@pytest.mark.parametrize(
    "other",
    [
        Case("a", None, Sampling(), 0, "disc"),
        Case("a", AttentionConfig(), Sampling(), 0, "disc"),
        Case("a", SOL, Sampling(guidance=2), 0, "disc"),
        Case("a", SOL, Sampling(weights="vsa"), 0, "disc"),
        Case("a", SOL, Sampling(), 1, "disc"),
        Case("a", SOL, Sampling(), 0, "ring"),
    ],
)
def test_whatever_changes_the_result_changes_the_key(other: Case):
    assert other.key != Case("a", SOL, Sampling(), 0, "disc").key


@given(
    tau=st.floats(-4, 4),
    layers=st.none() | st.lists(st.integers(0, 9), min_size=1),
    seed=st.integers(0, 2**40),
    steps=st.integers(1, 99),
)
def test_a_case_comes_back_from_json(tau: float, layers: list[int] | None, seed: int, steps: int):
    sparse = SolAttnConfig.model_validate({"tau": tau, "dense_layers": layers})
    attention = AttentionConfig(sparse_attention_config=sparse)
    case = Case("x", attention, Sampling(steps=steps), seed, "disc")
    back = Case.from_content(json.loads(json.dumps(case.content())))
    assert back == case
    assert back.key == case.key


# -- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields, text",
    [
        ({"seeds": [1, 1]}, "seeds=.*without repeats"),
        ({"seeds": []}, "seeds"),
        ({"seeds": ["1"]}, "seeds.*expected an integer, got str"),
        ({"prompts": ["dics"]}, "'dics'"),
        ({"name": "a/b"}, "name='a/b'"),
        ({"sweep": {}}, "unknown field 'sweep'"),
        ({"base": {}}, "base: is missing"),
        ({"base": {}, "grid": {}}, "needs base"),
        ({"grid": {"tau": []}}, "tau: has no values"),
        ({"grid": {"tua": [1]}}, "unknown field 'tua': did you mean 'tau'"),
        ({"grid": {"tau": ["1"]}}, "tau='1': expected a number"),
        ({"grid": {"steps": [0]}}, "steps=0: must be at least 1"),
        ({"sampling": {"grid": [4, 8]}}, "grid"),
        ({"sampling": {"shift": 0}}, "shift=0"),
        ({"sampling": {"device": "tpu"}}, "device='tpu'"),
        ({"sampling": {"impl": "nope"}}, "impl='nope': must be one of 'auto'"),
        ({"seeds": [0, -1]}, "seeds=-1: must be at least 0"),
        ({"seeds": [2**63]}, "seeds=9223372036854775808: must be .* at most 9223372036854775807"),
        ({"grid": {"tau": [1.0, 1.0 + 1e-14]}}, "two settings have this name; drop one"),
        ({"base": {"algorithm": "sol"}}, "algorithm='sol': must be one of dense, sol_attn"),
        ({"base": {"algorithm": "dense"}}, "tau=0.5: algorithm='dense' would not look at it"),
        ({"cases": [{"algorithm": "dense", "qk_dtype": "mxfp8"}]}, "use algorithm: quant"),
        ({"grid": {"qk_dtype": ["mxfp8"]}}, "the server refuses sol_attn together with"),
        ({"cases": [{"config": "x.yaml", "tau": 1}]}, "tau=1: the file x.yaml has the rest"),
    ],
)
def test_a_wrong_plan_is_refused_before_anything_runs(fields: dict[str, Any], text: str):
    with pytest.raises(ValueError, match=text):
        make_plan(plan_fields(**fields))


def test_files_that_are_missing_are_named(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"none\.yaml.*no such file"):
        load_plan(tmp_path / "none.yaml")
    lost = write_plan(tmp_path / "a.yaml", sampling={**SAMPLING, "weights": "lost.safetensors"})
    with pytest.raises(FileNotFoundError, match=r"lost\.safetensors"):
        load_plan(lost)
    lost = write_plan(tmp_path / "b.yaml", cases=[{"config": "lost.yaml"}])
    with pytest.raises(FileNotFoundError, match=r"lost\.yaml"):
        load_plan(lost)


@pytest.mark.parametrize(
    "text, told",
    [
        ("[1", "not YAML"),
        ("- 1", "expected a mapping"),
        ("name: a\nname: b", "'name' is given twice"),
        ("name: a\nbase: {algorithm: sol_attn, tau: .nan}", "tau=nan: must be finite"),
    ],
)
def test_errors_of_a_file_begin_with_its_path(tmp_path: Path, text: str, told: str):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"bad\.yaml.*{told}"):
        load_plan(path)


# -- changed settings ---------------------------------------------------------------------------


def test_equal_plans_have_no_differences_and_survive_json():
    record = plan().record()
    assert differences(json.loads(json.dumps(record)), plan().record()) == []


def test_every_difference_is_printed():
    old = plan(seeds=[0]).record()
    new = plan(seeds=[0, 1], grid={"tau": [0.5, 2]}).record()
    with pytest.raises(ValueError, match="holds a sweep with other settings") as caught:
        check_unchanged(Path("x.db"), old, new)
    lines = [line.strip() for line in str(caught.value).splitlines()[1:]]
    assert lines == [
        "seeds: [0] -> [0, 1]",
        "settings: sol_attn tau=1.5: is gone",
        "settings: sol_attn tau=2: is new",
    ]


def test_other_weights_of_the_same_name_are_a_difference(tmp_path: Path):
    weights = tmp_path / "w.safetensors"
    records = []
    for content in (b"one", b"two"):
        weights.write_bytes(content)
        records.append(plan(sampling={**SAMPLING, "weights": str(weights)}).record())
    (line,) = differences(*records)
    assert line.startswith(f"inputs: {weights} weights: sha256: ")


def test_target_sparsity_reaches_the_configuration():
    attention, _ = read_setting({"algorithm": "skip_softmax", "target_sparsity": 0.5}, {})
    assert attention.sparse_attention_config == SkipSoftmaxConfig(target_sparsity=0.5)
