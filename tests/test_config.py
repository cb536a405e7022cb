"""The serving configuration: strict fields, rules of each algorithm, YAML that reads back equal."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from blockattn.sol import THRESHOLD_TYPES
from workbench.config import (
    AttentionConfig,
    SkipSoftmaxConfig,
    SolAttnConfig,
    VisualGenConfig,
    dump_config,
    load_config,
    parse_layers,
)


def visual_gen(sparse: str, backend: str = "CUTEDSL") -> str:
    return f"attention_config:\n  backend: {backend}\n  sparse_attention_config: {{{sparse}}}\n"


def wrapped(sparse: SolAttnConfig | SkipSoftmaxConfig) -> VisualGenConfig:
    attention = AttentionConfig(backend="CUTEDSL", sparse_attention_config=sparse)
    return VisualGenConfig(attention_config=attention)


def test_the_file_of_the_servers_own_documentation_is_read():
    text = """
attention_config:
  backend: CUTEDSL
  sparse_attention_config:
    algorithm: sol_attn
    tau: 2.0
    thresh_type: diag
    disabled_until_timestep: 0.9090
    dense_layers: "0"
"""
    sparse = load_config(text).attention_config.sparse_attention_config
    assert sparse == SolAttnConfig(tau=2.0, disabled_until_timestep=0.909, dense_layers=(0,))


def test_the_written_file_has_exactly_the_fields_of_the_schema():
    text = dump_config(wrapped(SolAttnConfig(tau=1.5, dense_layers=(3, 1))))
    assert text == (
        "# Whole if its last line is ...\n"
        "attention_config:\n  backend: CUTEDSL\n  sparse_attention_config:\n"
        "    algorithm: sol_attn\n    tau: 1.5\n    thresh_type: diag\n"
        "    disabled_until_timestep: null\n    dense_layers:\n    - 1\n    - 3\n...\n"
    )


sol_configs = st.builds(
    SolAttnConfig,
    tau=st.floats(-1e4, 1e4),
    thresh_type=st.sampled_from(["diag", "exact"]),
    disabled_until_timestep=st.none() | st.floats(0, 1, exclude_min=True),
    dense_layers=st.none() | st.lists(st.integers(0, 99)).map(tuple),
)
skip_configs = st.builds(
    SkipSoftmaxConfig,
    threshold_scale_factor=st.none() | st.floats(0, 1e6),
    target_sparsity=st.none() | st.floats(0, 1),
    disabled_until_timestep=st.none() | st.floats(0.001, 1),
)


@given(sol_configs | skip_configs)
def test_every_configuration_reads_back_equal(sparse: SolAttnConfig | SkipSoftmaxConfig):
    assert load_config(dump_config(wrapped(sparse))) == wrapped(sparse)


def test_what_is_not_attention_is_kept(tmp_path: Path):
    path = tmp_path / "server.yaml"
    path.write_text("model: wan\nparallel: {size: 2}\n" + visual_gen("algorithm: sol_attn"))
    config = load_config(path)
    again = load_config(dump_config(config))
    assert again == config
    assert again.model_dump()["parallel"] == {"size": 2}


@pytest.mark.parametrize(
    "text", ["limit: .inf", "day: 2026-01-02", "sizes: {1: a, 2: b}", "raw: !!binary aGk="]
)
def test_what_yaml_has_and_json_has_not_is_kept(text: str):
    config = load_config(f"{text}\n{visual_gen('algorithm: sol_attn')}")
    assert load_config(dump_config(config)) == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("attention_config: {sparse_attention_config: {tau: 1, tau: 2}}", "'tau' is given twice"),
        ("attention_config: {}\nattention_config: {}", "'attention_config' is given twice"),
    ],
)
def test_a_key_given_twice_is_refused_because_one_would_be_ignored(text: str, message: str):
    with pytest.raises(ValueError, match=message):
        load_config(text)


BOMB = "\n".join(
    f"{name}: &{name} [{', '.join(9 * [item])}]"
    for name, item in zip("abcdefg", ("x", "*a", "*b", "*c", "*d", "*e", "*f"), strict=True)
)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (f"{BOMB}\nattention_config: {{}}".encode(), "holds over 100,000 values"),
        (b"a: &a [*a]\nattention_config: {}", "holds over 100,000 values"),
        (b"a: " + b"[" * 5000 + b"]" * 5000, "nested too deeply"),
        (b"a: 2026-99-99", "month must be in 1..12"),
        (b"a: 1" + b"0" * 5000, "limit"),
        (b"attention_config: {} # \xff", "is no text in UTF-8"),
    ],
)
def test_a_file_that_would_end_the_reader_is_refused_with_its_name(
    content: bytes, message: str, tmp_path: Path
):
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        load_config(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_a_long_value_is_cut_in_the_message():
    with pytest.raises(ValueError, match="9999") as caught:
        load_config(visual_gen(f"algorithm: sol_attn, dense_layers: '{'9' * 3000}'"))
    assert len(str(caught.value)) < 4000


def test_a_merge_may_be_overridden():
    text = "base: &base {algorithm: sol_attn, tau: 1}\nattention_config:\n"
    merged = "  sparse_attention_config: {<<: *base, tau: 2}"
    assert load_config(text + merged).attention_config.sparse_attention_config.tau == 2  # pyright: ignore


@pytest.mark.parametrize("name", ["sparse_attention_config", "quant_attention_config"])
def test_a_part_beside_attention_config_is_refused_because_it_would_do_nothing(name: str):
    with pytest.raises(ValueError, match=f"'{name}' belongs inside attention_config"):
        load_config(f"attention_config: {{}}\n{name}: {{}}")


def test_threshold_types_are_those_of_the_kernels():
    for name in THRESHOLD_TYPES:
        assert SolAttnConfig.model_validate({"thresh_type": name}).thresh_type == name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("algorithm: sol_attn, disabled_untill: 1", "did you mean 'disabled_until_timestep'"),
        ("algorithm: sol_attn, dense_steps: 10", "use disabled_until_timestep"),
        ("algorithm: sol_attn, kv_splits: 2", "kernel's own choice"),
        ("algorithm: sol_attn, tau: true", r"tau=True: expected a number, got bool"),
        ("algorithm: sol_attn, tau: 1e-3", r"tau='1e-3': expected a number, got str.*1\.0e-3"),
        ("algorithm: sol_attn, tau: .nan", "tau=nan: must be finite"),
        ("algorithm: sol_attn, tau: .inf", "tau=inf: must be finite"),
        ("algorithm: sol_attn, tau: 1.0e+39", "must be a float32 number"),
        ("algorithm: sol_attn, thresh_type: mean", "thresh_type='mean'.*'diag' or 'exact'"),
        ("algorithm: sol_attn, disabled_until_timestep: 0", r"must be in \(0, 1\]"),
        ("algorithm: sol_attn, disabled_until_timestep: 1.01", r"must be in \(0, 1\]"),
        ("algorithm: sol_attn, dense_layers: [1, -2]", "item 2 is -2"),
        ("algorithm: sol_attn, dense_layers: [true]", "item 1 is True"),
        ("algorithm: sol_attn, dense_layers: [1.5]", r"item 1 is 1\.5"),
        ("algorithm: sol_attn, dense_layers: 3", "expected a list of layer numbers"),
        ("algorithm: skip_softmax, threshold_scale_factor: -1", "must be at least 0"),
        ("algorithm: skip_softmax, threshold_scale_factor: .nan", "must be finite"),
        ("algorithm: skip_softmax, target_sparsity: 1.2", r"must be in \[0, 1\]"),
        ("algorithm: skip_softmax, target_sparsity: true", "got bool"),
        ("algorithm: skip_softmax, target_sparsity: {prefill: 1}", "got a mapping"),
        ("algorithm: skip_softmax, disabled_until_timestep: 2", r"must be in \[0, 1\]"),
        ("algorithm: skip_softmax, coefficients: {a: 1}", "belongs to the checkpoint"),
        ("algorithm: skip_softmax, formula: a", "belongs to the checkpoint"),
        ("algorithm: skip_softmax, ignore: []", "belongs to the checkpoint"),
        ("algorithm: skip_softmax, config_groups: {}", "belongs to the checkpoint"),
        ("algorithm: skip_softmax, tau: 1", "unknown field 'tau'"),
        ("algorithm: sol", "algorithm='sol': must be one of sol_attn, skip_softmax"),
        ("tau: 1", "algorithm=None: must be one of"),
    ],
)
def test_a_fault_names_its_field_and_what_is_allowed(text: str, message: str):
    with pytest.raises(ValueError, match=message) as caught:
        load_config(visual_gen(text))
    assert "attention_config.sparse_attention_config" in str(caught.value)


def test_every_fault_has_its_own_line():
    with pytest.raises(ValueError) as caught:
        load_config(visual_gen("algorithm: sol_attn, tau: .nan, thresh_type: mean"))
    assert len(str(caught.value).splitlines()) == 2


def test_a_backend_that_cannot_serve_the_algorithm_is_refused():
    with pytest.raises(ValueError, match=r"'VANILLA' does not serve.*use CUTEDSL or TRTLLM"):
        load_config(visual_gen("algorithm: sol_attn", backend="VANILLA"))


@pytest.mark.parametrize("text", ["", "- 1", "attention: {}", "a: [", "attention_config: 3"])
def test_what_is_no_configuration_is_refused(text: str):
    with pytest.raises(ValueError, match="configuration: "):
        load_config(text)


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"none\.yaml"):
        load_config(tmp_path / "none.yaml")


def test_dense_for_ever_is_accepted_by_skip_softmax_with_a_warning():
    with pytest.warns(UserWarning, match="keeps every step dense"):
        assert SkipSoftmaxConfig(disabled_until_timestep=0).disabled_until_timestep == 0


def test_a_configuration_cannot_be_changed():
    with pytest.raises(ValidationError):
        SolAttnConfig().tau = 2.0  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("value", "layers"),
    [
        ("0", (0,)),
        (" 3, 1 ,0-2", (0, 1, 2, 3)),
        ("5-5", (5,)),
        ([4, 4, 1], (1, 4)),
        ([2.0], (2,)),
        ([], ()),
    ],
)
def test_layers_are_sorted_and_unique(value: object, layers: tuple[int, ...]):
    assert parse_layers(value) == layers


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (",", "item 1 is empty"),
        ("0,,2", "item 2 is empty"),
        (" ", "item 1 is empty"),
        ("0,-1", "item 2 is '-1'"),
        ("4-2", "item 1 is '4-2': a range must ascend, write 2-4"),
        ("a", "item 1 is 'a'"),
        ("1.5", r"item 1 is '1\.5'"),
    ],
)
def test_a_bad_list_of_layers_names_the_position(text: str, message: str):
    with pytest.raises(ValueError, match=message):
        parse_layers(text)


@given(st.lists(st.integers(0, 60), min_size=1))
def test_a_list_and_its_text_mean_the_same(layers: list[int]):
    assert parse_layers(layers) == parse_layers(",".join(map(str, layers)))


def test_reading_a_good_file_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_config(visual_gen("algorithm: skip_softmax, threshold_scale_factor: 12"))


@pytest.mark.parametrize("line", ["\n", "\r\n"], ids=["lf", "crlf"])
@pytest.mark.parametrize("start", ["", "# chosen by workbench tune\n", "\ufeff"])
def test_a_written_file_that_was_cut_off_is_refused_wherever(start: str, line: str):
    """Without its last field, dense_layers, it would be a valid file for every layer."""
    config = wrapped(SolAttnConfig(tau=1.5, dense_layers=(0, 1)))
    text = (start + dump_config(config)).replace("\n", line)
    assert load_config(text) == config
    assert load_config(text.rstrip()) == config
    for end in range(len(text.rstrip())):
        with pytest.raises(ValueError, match=r"was cut off|attention_config|not YAML"):
            load_config(text[:end])


@pytest.mark.parametrize("comment", ["# seen by the team\n", "\n  # seen\n\n# twice"])
def test_a_comment_behind_the_end_of_a_written_file_cuts_nothing_off(comment: str):
    config = wrapped(SolAttnConfig(tau=1.5, dense_layers=(0, 1)))
    assert load_config(dump_config(config) + comment) == config
    assert load_config(dump_config(config).rstrip() + "  # end") == config
    with pytest.raises(ValueError, match="was cut off"):
        load_config(dump_config(config).removesuffix("...\n") + comment)


def test_a_file_written_by_hand_needs_no_end():
    algorithm = "    algorithm: sol_attn\n"
    text = f"attention_config:\n  sparse_attention_config:\n{algorithm}    tau: 1.5\n"
    assert load_config(text).attention_config.sparse_attention_config == SolAttnConfig(tau=1.5)
    assert load_config(text + "...\n") == load_config(text)
