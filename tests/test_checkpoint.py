"""SkipSoftmax calibration in a checkpoint: shapes, formula vectors, ignore patterns, resolvers."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from workbench.config import SkipSoftmaxConfig, SkipSoftmaxParams
from workbench.config.checkpoint import candidate_names, read_calibration

FORMULA = "a * exp(b * target_sparsity)"
LOG_FORMULA = "exp(log_a + b * target_sparsity)"
WAN = (1443.4853294366435, 4.303654042880227)


def group(formula: str = FORMULA, a: float = 10.0, b: float = 2.0, **fields: Any) -> dict[str, Any]:
    scale = {"formula": formula, "coefficients": {"a": a, "b": b, "log_a": a}}
    return {"algorithm": "skip_softmax", "threshold_scale_factor": scale, **fields}


def component(*groups: dict[str, Any], **fields: Any) -> dict[str, Any]:
    named = {f"group_{n}": item for n, item in enumerate(groups)}
    return {"sparse_attention_config": {"config_groups": named, **fields}, "num_layers": 40}


def resolved(target: float, checkpoint: dict[str, Any]) -> float | None:
    config = SkipSoftmaxConfig(target_sparsity=target)
    return config.resolve_threshold_scale_factor(checkpoint_config=checkpoint)


def test_the_documented_wan_calibration_gives_its_factor_and_threshold():
    factor = resolved(0.5, component(group(FORMULA, *WAN)))
    assert factor == pytest.approx(12414.78, abs=0.01)
    assert factor / 75600 == pytest.approx(0.1642, abs=1e-4)
    assert math.log2(factor / 75600) == pytest.approx(-2.606, abs=1e-3)


@pytest.mark.parametrize(
    ("a", "b", "table"),
    [
        (
            7.93,
            8.61,
            [18.76, 44.37, 104.97, 248.40, 587.18, 1390.63, 3293.04, 7799.91, 18471.56],
        ),
        (0.12, 9.85, [0.32, 0.86, 2.30, 6.17, 16.52, 44.26, 118.62, 317.99, 852.20]),
    ],
)
def test_published_tables_follow_from_their_coefficients(a: float, b: float, table: list[float]):
    factors = [resolved(n / 10, component(group(FORMULA, a, b))) for n in range(1, 10)]
    assert factors == pytest.approx(table, rel=0.012)  # a and b are printed with three digits


def test_the_log_form_is_the_same_formula():
    factor = resolved(0.4, component(group(LOG_FORMULA, 7e-5, 7.929109)))
    assert factor == pytest.approx(math.exp(7e-5 + 7.929109 * 0.4))


@pytest.mark.parametrize("name", ["skip_softmax", "softmax_skip"])
@pytest.mark.parametrize("key", ["algorithm", "sparse_algo"])
def test_both_names_and_both_keys_of_the_algorithm_count(name: str, key: str):
    entry = group()
    del entry["algorithm"]
    assert resolved(0.5, component({**entry, key: name})) == pytest.approx(10 * math.e)


def test_coefficients_may_stand_next_to_the_formula():
    entry = {"threshold_scale_factor": {"formula": FORMULA, "a": 10.0, "b": 2.0}}
    assert resolved(0.5, entry) == pytest.approx(10 * math.e)


@pytest.mark.parametrize(
    "flat",
    [
        {"algorithm": "skip_softmax"},
        {"threshold_scale_factor": {}},
        {"target_sparsity": 0.5},
        {"ignore": []},
        {"disabled_until_timestep": 0.5},
    ],
)
def test_a_flat_dict_counts_when_it_names_the_algorithm_or_has_a_field(flat: dict[str, Any]):
    assert read_calibration(checkpoint_config=flat) is not None
    assert read_calibration(checkpoint_config={"sparse_attention_config": flat}) is not None


@pytest.mark.parametrize(
    "config",
    [
        None,
        {},
        {"num_layers": 40},
        {"algorithm": "vsa", "target_sparsity": 0.5},
        component(),
        component({"algorithm": "vsa", "ignore": ["*"]}),
    ],
)
def test_a_checkpoint_without_a_skip_group_has_no_calibration(config: dict[str, Any] | None):
    assert read_calibration(checkpoint_config=config) is None


def test_groups_of_other_algorithms_are_passed_over():
    assert resolved(0.5, component({"algorithm": "sol_attn"}, group())) == pytest.approx(
        10 * math.e
    )


def test_two_skip_groups_are_refused():
    with pytest.raises(ValueError, match="group_0, group_1 are all for skip_softmax"):
        read_calibration(checkpoint_config=component(group(), group()))


@pytest.mark.parametrize(
    "config",
    [
        component(group()),
        SimpleNamespace(**component(group())),
        component(group())["sparse_attention_config"],
    ],
)
def test_a_pretrained_config_is_a_dict_or_has_the_attribute(config: object):
    found = SkipSoftmaxConfig(target_sparsity=0.5).resolve_threshold_scale_factor(
        pretrained_config=config
    )
    assert found == pytest.approx(10 * math.e)


@pytest.mark.parametrize(
    "config", [SimpleNamespace(), SimpleNamespace(sparse_attention_config=3), 3]
)
def test_any_other_pretrained_config_has_no_calibration(config: object):
    assert read_calibration(pretrained_config=config) is None


def test_a_checkpoint_config_that_is_no_dict_is_refused():
    with pytest.raises(TypeError, match="checkpoint_config: expected a dict"):
        read_calibration(checkpoint_config=[1])


def test_both_configs_at_once_are_refused():
    with pytest.raises(ValueError, match="both given; give one"):
        read_calibration(checkpoint_config={}, pretrained_config={})


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (None, "no threshold_scale_factor, so there is no calibration formula"),
        (5000.0, r"expected \{formula, coefficients\}"),
        ({"coefficients": {"a": 1}}, "no calibration formula; it holds coefficients"),
        ({"formula": 3}, "formula=3: expected text"),
        ({"formula": "a *"}, "cannot be parsed"),
        ({"formula": "a + b", "a": 1, "b": 2}, "does not mention target_sparsity"),
        ({"formula": FORMULA, "a": 1}, "names the coefficient b, which"),
        ({"formula": FORMULA, "coefficients": {"a": 1}, "b": 2}, "names the coefficient b, which"),
        ({"formula": FORMULA, "coefficients": 3}, "coefficients=3: expected a mapping"),
        ({"formula": FORMULA, "a": 1, "b": True}, "coefficient b=True: expected a finite number"),
        ({"formula": FORMULA, "a": math.nan, "b": 1}, "coefficient a=nan: expected a finite"),
        ({"formula": FORMULA, "a": -1.0, "b": 1.0}, "a factor must be at least 0"),
        ({"formula": FORMULA, "a": 1.0, "b": 1e6}, "has no finite value"),
    ],
)
def test_a_calibration_that_cannot_be_used_says_why(scale: object, message: str):
    with pytest.raises(ValueError, match=message):
        resolved(0.5, {"algorithm": "skip_softmax", "threshold_scale_factor": scale})


@pytest.mark.parametrize(
    "scale",
    [
        {"formula": FORMULA, "prefill": {"a": 7.93, "b": 8.61}, "decode": {"a": 0.12, "b": 9.85}},
        {"formula": FORMULA, "coefficients": {"prefill": {"a": 1, "b": 1}}},
    ],
)
def test_skip_weakness_39_a_phase_dict_is_explained_instead_of_a_type_error(scale: dict[str, Any]):
    with pytest.raises(ValueError, match=r"prefill.*are for LLMs.*with the values under prefill"):
        resolved(0.5, {"algorithm": "skip_softmax", "threshold_scale_factor": scale})


def test_skip_weakness_39_a_target_per_phase_is_explained_too():
    config = component(group(target_sparsity={"prefill": 0.5, "decode": 0.2}))
    with pytest.raises(ValueError, match="per-phase values"):
        SkipSoftmaxConfig().resolve_threshold_scale_factor(checkpoint_config=config)
    # With a target of the user's own it is not asked for.
    assert resolved(0.5, config) == pytest.approx(10 * math.e)


def test_the_users_factor_wins_over_every_target():
    config = SkipSoftmaxConfig(threshold_scale_factor=3.0, target_sparsity=0.9)
    broken = component({"algorithm": "skip_softmax", "threshold_scale_factor": {"prefill": {}}})
    assert config.resolve_threshold_scale_factor(checkpoint_config=broken) == 3.0


def test_the_users_target_wins_over_the_checkpoints():
    config = component(group(target_sparsity=0.1))
    assert resolved(0.5, config) == pytest.approx(10 * math.e)
    default = SkipSoftmaxConfig().resolve_threshold_scale_factor(checkpoint_config=config)
    assert default == pytest.approx(10 * math.exp(0.2))


@pytest.mark.parametrize("target", [1.5, -0.1, True, math.nan, "half"])
def test_a_default_target_that_is_no_share_is_refused(target: object):
    with pytest.raises(ValueError, match="checkpoint target_sparsity="):
        SkipSoftmaxConfig().resolve_threshold_scale_factor(
            checkpoint_config=component(group(target_sparsity=target))
        )


def test_without_any_target_nothing_asks_for_skipping():
    assert SkipSoftmaxConfig().resolve_threshold_scale_factor() is None
    lowered = SkipSoftmaxConfig().to_sparse_params(checkpoint_config=component(group()))
    assert lowered is None


@pytest.mark.parametrize("checkpoint", [None, component(group())])
def test_skip_weakness_38_a_target_of_0_switches_off(checkpoint: dict[str, Any] | None):
    config = SkipSoftmaxConfig(target_sparsity=0.0)
    assert config.resolve_threshold_scale_factor(checkpoint_config=checkpoint) == 0
    assert config.to_sparse_params(checkpoint_config=checkpoint) is None


def test_a_target_without_a_checkpoint_names_the_missing_formula():
    with pytest.raises(ValueError, match="no calibration formula"):
        SkipSoftmaxConfig(target_sparsity=0.5).resolve_threshold_scale_factor()


def test_the_cutoff_is_the_users_else_the_checkpoints():
    checkpoint = component(group(disabled_until_timestep=0.8))
    resolve = SkipSoftmaxConfig(disabled_until_timestep=0.9).resolve_disabled_until_timestep
    assert resolve(checkpoint_config=checkpoint) == 0.9
    resolve = SkipSoftmaxConfig().resolve_disabled_until_timestep
    assert resolve(checkpoint_config=checkpoint) == 0.8
    assert resolve(pretrained_config=SimpleNamespace(**checkpoint)) == 0.8
    assert resolve() is None
    assert resolve(checkpoint_config=component(group())) is None


@pytest.mark.parametrize("cutoff", [1.1, -0.1, True, math.nan, "late"])
def test_a_cutoff_of_the_checkpoint_that_is_no_time_is_refused(cutoff: object):
    checkpoint = component(group(disabled_until_timestep=cutoff))
    with pytest.raises(ValueError, match="checkpoint disabled_until_timestep="):
        SkipSoftmaxConfig().resolve_disabled_until_timestep(checkpoint_config=checkpoint)


def test_an_exported_count_of_steps_is_not_taken_for_a_time():
    checkpoint = component(group(initial_disabled_steps=10))
    with pytest.raises(ValueError, match="initial_disabled_steps=10 counts steps"):
        SkipSoftmaxConfig().resolve_disabled_until_timestep(checkpoint_config=checkpoint)
    own = SkipSoftmaxConfig(disabled_until_timestep=0.9)
    assert own.resolve_disabled_until_timestep(checkpoint_config=checkpoint) == 0.9


@pytest.mark.parametrize(
    "name",
    ["resolve_disabled_until_timestep", "resolve_threshold_scale_factor", "to_sparse_params"],
)
def test_skip_weakness_3_a_misspelt_keyword_of_a_resolver_is_a_type_error(name: str):
    resolve = getattr(SkipSoftmaxConfig(), name)
    with pytest.raises(TypeError, match="checkpoint_confg"):
        resolve(checkpoint_confg={})
    with pytest.raises(TypeError, match="positional"):
        resolve({})


def test_lowering_gives_the_factor_and_the_end_of_the_dense_phase():
    checkpoint = component(group(disabled_until_timestep=0.8, target_sparsity=0.5))
    params = SkipSoftmaxConfig().to_sparse_params(checkpoint_config=checkpoint)
    assert params == SkipSoftmaxParams(pytest.approx(10 * math.e), 0.8)


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("blocks.0.attn1", ("blocks.0.attn1",)),
        (
            "transformer._orig_mod.blocks.0.attn1",
            (
                "transformer._orig_mod.blocks.0.attn1",
                "transformer.blocks.0.attn1",
                "_orig_mod.blocks.0.attn1",
                "blocks.0.attn1",
            ),
        ),
        (
            "transformer_2.blocks.0.attn1",
            ("transformer_2.blocks.0.attn1", "blocks.0.attn1"),
        ),
    ],
)
def test_candidate_names_of_a_module(name: str, names: tuple[str, ...]):
    assert candidate_names(name) == names


@pytest.mark.parametrize(
    ("name", "dense"),
    [
        ("blocks.0.attn1", True),
        ("transformer.blocks.0.attn1", True),
        ("transformer_2._orig_mod.blocks.0.attn1", True),
        ("blocks.7.attn2", True),
        ("blocks.10.attn1", False),
        ("blocks.1.attn1", False),
    ],
)
def test_ignored_modules_stay_dense_under_any_candidate_name(name: str, dense: bool):
    entry = group(ignore=["blocks.0.*", "*.attn2"], target_sparsity=0.5)
    params = SkipSoftmaxConfig().to_sparse_params(
        module_name=name, checkpoint_config=component(entry)
    )
    assert (params is None) == dense


def test_patterns_of_file_and_group_are_joined_without_repeats():
    calibration = read_calibration(
        checkpoint_config=component(group(ignore=["b", "a"]), ignore=["a", "c"])
    )
    assert calibration is not None
    assert calibration.ignore == ("a", "c", "b")


def test_patterns_need_the_name_of_the_module():
    checkpoint = component(group(ignore=["*.attn2"], target_sparsity=0.5))
    with pytest.raises(ValueError, match=r"ignore=\['\*\.attn2'\].*this module has no name"):
        SkipSoftmaxConfig().to_sparse_params(checkpoint_config=checkpoint)


@pytest.mark.parametrize(
    "config",
    [
        component(group(ignore="*.attn2")),
        component(group(ignore=[1])),
        component(group(), ignore={}),
        {"config_groups": []},
        {"config_groups": {"x": 3}},
    ],
)
def test_a_malformed_file_is_refused(config: dict[str, Any]):
    with pytest.raises(ValueError, match=r"checkpoint (ignore|config_groups)"):
        read_calibration(checkpoint_config=config)
