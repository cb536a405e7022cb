"""What the configuration accepts and refuses: VSA, quantisation, what composes and where."""

from __future__ import annotations

import math
import subprocess
import sys
import warnings
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from workbench.config import (
    AttentionConfig,
    QuantAttentionConfig,
    SkipSoftmaxConfig,
    SolAttnConfig,
    VideoSparseAttentionConfig,
    VisualGenConfig,
    dump_config,
    load_config,
    parse_layers,
)
from workbench.config.quant import RECIPES

CUTEDSL = [
    {"qk_dtype": "bf16"},
    {"qk_dtype": "mxfp8"},
    {"qk_dtype": "mxfp8", "v_block_size": 1},
    {"qk_dtype": "nvfp4"},
    {"qk_dtype": "nvfp4", "v_block_size": 1},
]
TRTLLM = [
    {"qk_dtype": qk, "q_block_size": 1, "k_block_size": k, "v_block_size": 1}
    for qk, k in (("int8", 1), ("int8", 4), ("int8", 16), ("fp8", 1), ("fp8", 4))
]
SPARSE = {
    "skip_softmax": {"algorithm": "skip_softmax", "threshold_scale_factor": 5.0},
    "sol_attn": {"algorithm": "sol_attn"},
    "vsa": {"algorithm": "vsa"},
}


def attention(**fields: object) -> AttentionConfig:
    return AttentionConfig.model_validate(fields)


def visual_gen(part: str, text: str, backend: str = "CUTEDSL") -> str:
    return f"attention_config:\n  backend: {backend}\n  {part}: {{{text}}}\n"


# --- VSA


def test_vsa_is_read_with_its_default():
    sparse = load_config(visual_gen("sparse_attention_config", "algorithm: vsa"))
    assert sparse.attention_config.sparse_attention_config == VideoSparseAttentionConfig()
    assert VideoSparseAttentionConfig().vsa_sparsity == 0.9


@pytest.mark.parametrize("sparsity", [0, 0.0, 1, 1.0, 0.875])
def test_vsa_sparsity_is_a_share_with_both_ends(sparsity: float):
    assert VideoSparseAttentionConfig(vsa_sparsity=sparsity).vsa_sparsity == sparsity


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("vsa_sparsity: 1.01", r"vsa_sparsity=1\.01: must be in \[0, 1\]"),
        ("vsa_sparsity: -0.1", r"must be in \[0, 1\]"),
        ("vsa_sparsity: true", "got bool"),
        ("vsa_sparsity: .nan", "must be finite"),
        ("vsa_sparsity: null", "vsa_sparsity"),
        ("sparsity: 0.9", "VisualGen calls it vsa_sparsity"),
        ("vsa_sparcity: 0.9", "did you mean 'vsa_sparsity'"),
        ("dense_layers: [0]", "has no dense phase or layers"),
        ("disabled_until_timestep: 0.9", "has no dense phase or layers"),
        ("tau: 1", "unknown field 'tau'"),
    ],
)
def test_a_fault_in_vsa_is_named(text: str, message: str):
    with pytest.raises(ValueError, match=message):
        load_config(visual_gen("sparse_attention_config", f"algorithm: vsa, {text}"))


# --- Sol-Attn and SkipSoftmax: the edges


@pytest.mark.parametrize("tau", [-3.5, 0, 3.4e38, -3.4028234663852886e38])
def test_tau_is_any_float32_number(tau: float):
    assert SolAttnConfig(tau=tau).tau == tau


@pytest.mark.parametrize("tau", [True, "1", math.nan, -math.inf, 3.5e38, 10**400, None, [1]])
def test_tau_is_nothing_else(tau: object):
    with pytest.raises(ValidationError):
        SolAttnConfig.model_validate({"tau": tau})


@pytest.mark.parametrize("cutoff", [math.nextafter(0, 1), 0.5, 1, 1.0])
def test_a_cutoff_of_sol_attn_lies_above_0(cutoff: float):
    assert SolAttnConfig(disabled_until_timestep=cutoff).disabled_until_timestep == cutoff


@pytest.mark.parametrize("cutoff", [0, 0.0, -0.0, math.nextafter(1, 2), -0.1, True, math.nan])
def test_sol_attn_refuses_what_is_dense_for_ever_or_no_time(cutoff: float):
    with pytest.raises(ValidationError):
        SolAttnConfig(disabled_until_timestep=cutoff)


def test_skip_softmax_accepts_dense_for_ever_with_one_warning():
    with pytest.warns(UserWarning, match="keeps every step dense") as caught:
        config = attention(
            sparse_attention_config={"algorithm": "skip_softmax", "disabled_until_timestep": 0.0}
        )
    assert config.sparse_attention_config.disabled_until_timestep == 0  # pyright: ignore
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert AttentionConfig.model_validate(config) == config
        AttentionConfig(sparse_attention_config=config.sparse_attention_config)


@pytest.mark.parametrize(
    "factor", [-1e-9, math.nan, math.inf, True, "5", {"formula": "a"}, 10**400]
)
def test_a_factor_is_finite_and_not_negative(factor: object):
    with pytest.raises(ValidationError):
        SkipSoftmaxConfig.model_validate({"threshold_scale_factor": factor})


@pytest.mark.parametrize("target", [-0.01, 1.01, True, math.nan, {"prefill": 0.5, "decode": 0.5}])
def test_a_target_is_one_share(target: object):
    with pytest.raises(ValidationError):
        SkipSoftmaxConfig.model_validate({"target_sparsity": target})


def test_dense_layers_of_skip_softmax_are_pointed_to_the_checkpoint():
    with pytest.raises(ValidationError, match="under 'ignore' in the checkpoint's calibration"):
        SkipSoftmaxConfig.model_validate({"dense_layers": [0]})


@pytest.mark.parametrize("text", [",", "0,,2", " ", "", "0,"])
def test_sol_weakness_32_and_skip_weakness_28_empty_entries_of_dense_layers_are_refused(text: str):
    with pytest.raises(ValidationError, match=r"item \d is empty"):
        SolAttnConfig.model_validate({"dense_layers": text})


def test_sol_weakness_32_a_descending_range_is_refused():
    with pytest.raises(ValidationError, match="a range must ascend, write 2-4"):
        SolAttnConfig.model_validate({"dense_layers": "4-2"})


@pytest.mark.parametrize("text", ["0-999999999", "10000"])
def test_a_range_that_no_model_has_is_refused_before_it_fills_the_memory(text: str):
    with pytest.raises(ValueError, match="layers go up to 9999"):
        parse_layers(text)


@pytest.mark.parametrize("item", [True, "1", 1.5, -1, None, math.nan, math.inf, 10**6])
def test_a_list_of_layers_holds_integers_alone(item: object):
    with pytest.raises(ValueError, match="item 2 is"):
        parse_layers([0, item])


def test_sol_weakness_33_the_servers_own_choices_are_no_fields():
    with pytest.raises(ValidationError, match="the kernel's own choice"):
        SolAttnConfig.model_validate({"kv_splits": "auto"})


# --- quantisation


def test_a_bare_recipe_is_16_bit_q_and_k_with_fp8_v():
    assert QuantAttentionConfig().recipe == ("bf16", "fp8", (0, 0, 0))


@pytest.mark.parametrize("fields", CUTEDSL)
def test_recipes_of_cutedsl(fields: dict[str, object]):
    quant = QuantAttentionConfig.model_validate(fields)
    assert quant.backends == ("CUTEDSL",)
    assert (
        attention(backend="CUTEDSL", quant_attention_config=fields).quant_attention_config == quant
    )


@pytest.mark.parametrize("fields", TRTLLM)
def test_recipes_of_trtllm(fields: dict[str, object]):
    quant = QuantAttentionConfig.model_validate(fields)
    assert quant.backends == ("TRTLLM",)
    assert (
        attention(backend="TRTLLM", quant_attention_config=fields).quant_attention_config == quant
    )


def test_every_other_combination_is_refused_with_the_list():
    known = {recipe for recipes in RECIPES.values() for recipe in recipes}
    sizes = (0, 1, 4, 16)
    refused = 0
    for qk, q, k, v in product(("bf16", "int8", "fp8", "mxfp8", "nvfp4"), sizes, sizes, sizes):
        if (qk, "fp8", (q, k, v)) in known:
            continue
        with pytest.raises(
            ValidationError, match=r"no supported recipe; use one of CUTEDSL: \(bf16"
        ):
            QuantAttentionConfig.model_validate(
                {"qk_dtype": qk, "q_block_size": q, "k_block_size": k, "v_block_size": v}
            )
        refused += 1
    assert refused == 5 * 64 - len(known)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("qk_dtype: fp4", "'bf16', 'int8', 'fp8', 'mxfp8' or 'nvfp4'"),
        ("v_dtype: bf16", "'fp8'"),
        ("v_block_size: -1", "v_block_size=-1: must be at least 0"),
        ("v_block_size: true", "expected an integer, got bool"),
        ("v_block_size: 1.0", "expected an integer, got float"),
        ("v_blocksize: 1", "did you mean 'v_block_size'"),
        ("smooth_qk: true", "smoothing comes with"),
        ("qk_dtype: int8", "no supported recipe"),
    ],
)
def test_a_fault_in_a_recipe_is_named(text: str, message: str):
    with pytest.raises(ValueError, match=message):
        load_config(visual_gen("quant_attention_config", text))


@pytest.mark.parametrize(
    ("backend", "fields", "message"),
    [
        ("VANILLA", CUTEDSL[1], "'VANILLA' does not quantise attention; use CUTEDSL"),
        ("TRTLLM", CUTEDSL[1], r"'TRTLLM' has no recipe \(mxfp8, .*CUTEDSL has this one"),
        ("CUTEDSL", TRTLLM[0], r"'CUTEDSL' has no recipe \(int8, .*TRTLLM has this one"),
    ],
)
def test_a_backend_without_the_recipe_is_refused(
    backend: str, fields: dict[str, object], message: str
):
    with pytest.raises(ValidationError, match=message):
        attention(backend=backend, quant_attention_config=fields)


# --- what composes


@pytest.mark.parametrize(
    ("backend", "fields"),
    [*(("CUTEDSL", fields) for fields in CUTEDSL), *(("TRTLLM", fields) for fields in TRTLLM)],
)
def test_skip_weakness_6_skip_softmax_composes_with_every_recipe(
    backend: str, fields: dict[str, object]
):
    config = attention(
        backend=backend,
        sparse_attention_config=SPARSE["skip_softmax"],
        quant_attention_config=fields,
    )
    assert config.sparse_attention_config is not None
    assert config.quant_attention_config is not None


@pytest.mark.parametrize("backend", [None, "CUTEDSL"])
def test_skip_weakness_6_vsa_excludes_quantisation(backend: str | None):
    with pytest.raises(ValidationError, match="vsa replaces the dense kernel that would quantise"):
        attention(
            backend=backend,
            sparse_attention_config=SPARSE["vsa"],
            quant_attention_config=CUTEDSL[1],
        )


@pytest.mark.parametrize("backend", [None, "CUTEDSL"])
def test_sol_attn_excludes_quantisation_and_says_that_the_kernels_do_not(backend: str | None):
    with pytest.raises(
        ValidationError, match=r"server refuses sol_attn.*blockattn\.quantised_attention"
    ):
        attention(
            backend=backend,
            sparse_attention_config=SPARSE["sol_attn"],
            quant_attention_config=CUTEDSL[1],
        )


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("backend", [None, "CUTEDSL", "TRTLLM"])
def test_every_algorithm_runs_on_both_kernel_families(name: str, backend: str | None):
    assert attention(backend=backend, sparse_attention_config=SPARSE[name]).backend == backend


@pytest.mark.parametrize("name", SPARSE)
def test_the_plain_backend_has_no_sparsity(name: str):
    with pytest.raises(ValidationError, match=f"does not serve algorithm='{name}'"):
        attention(backend="VANILLA", sparse_attention_config=SPARSE[name])


def test_an_unknown_backend_lists_the_known_ones():
    with pytest.raises(ValidationError, match="'CUTEDSL', 'TRTLLM' or 'VANILLA'"):
        attention(backend="FA4")


def test_an_unknown_part_names_the_nearest():
    with pytest.raises(ValidationError, match="did you mean 'quant_attention_config'"):
        attention(quantattention_config={})


# --- round trip

configs = st.one_of(
    st.builds(
        AttentionConfig,
        backend=st.none() | st.sampled_from(["CUTEDSL", "TRTLLM"]),
        sparse_attention_config=st.builds(VideoSparseAttentionConfig, vsa_sparsity=st.floats(0, 1)),
    ),
    st.builds(
        AttentionConfig,
        backend=st.sampled_from([None, "CUTEDSL"]),
        sparse_attention_config=st.none()
        | st.builds(SkipSoftmaxConfig, threshold_scale_factor=st.floats(0, 1e6)),
        quant_attention_config=st.none()
        | st.sampled_from(CUTEDSL).map(QuantAttentionConfig.model_validate),
    ),
)


@given(configs)
def test_every_combination_reads_back_equal(config: AttentionConfig):
    whole = VisualGenConfig(attention_config=config)
    assert load_config(dump_config(whole)) == whole


def test_quantisation_is_written_in_the_servers_schema():
    text = dump_config(
        VisualGenConfig(
            attention_config=attention(
                backend="CUTEDSL", quant_attention_config={"qk_dtype": "nvfp4", "v_block_size": 1}
            )
        )
    )
    assert text == (
        "# Whole if its last line is ...\n"
        "attention_config:\n  backend: CUTEDSL\n  sparse_attention_config: null\n"
        "  quant_attention_config:\n    qk_dtype: nvfp4\n    v_dtype: fp8\n"
        "    q_block_size: 0\n    k_block_size: 0\n    v_block_size: 1\n...\n"
    )


def test_reading_a_configuration_needs_no_torch():
    code = "import sys, workbench.config.files; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
