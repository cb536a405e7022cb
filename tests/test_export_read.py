"""Import: examples of the documentation are read, and what would be lost is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import export_readers as independent
from tests.export_inputs import FORMULA, PLACE, TIMES
from workbench.config import (
    QuantAttentionConfig,
    SkipSoftmaxConfig,
    SolAttnConfig,
    VideoSparseAttentionConfig,
)
from workbench.export import (
    Deployment,
    NotExpressible,
    import_config,
    read_profile,
    write_profile,
)

NOWHERE = Deployment()


def read(target: str, data: Any, place: Deployment = PLACE):
    return import_config(json.dumps(data), target, place).config.attention_config


def group(**changes: Any) -> dict[str, Any]:
    fields = {
        "algorithm": "skip_softmax",
        "threshold_scale_factor": FORMULA,
        "target_sparsity": 0.5,
        **changes,
    }
    kept = {name: value for name, value in fields.items() if value is not None}
    return {"sparse_attention_config": {"config_groups": {"group_0": kept}}}


def node(**changes: Any) -> dict[str, Any]:
    inputs = {
        "tau": 1.5,
        "tau_profile": "",
        "dense_blocks": "",
        "start_percent": 0.0,
        "end_percent": 1.0,
        "min_tokens": 0,
        "int8_qk": False,
        "int8_pv": False,
        "sink_conditioning": "off",
        "morton": False,
        **changes,
    }
    kept = {name: value for name, value in inputs.items() if value is not None}
    return {"class_type": "SolAttnPatch", "inputs": kept}


# --- files as their documentation shows them


def test_vllm_omnis_example_of_a_target_is_read():
    skip = {"target_sparsity": 0.65, "disabled_until_timestep": 0.86}
    found = read("vllm_omni", {"default": {"backend": "TRTLLM_ATTN", "skip_softmax": skip}})
    sparse = found.sparse_attention_config
    assert isinstance(sparse, SkipSoftmaxConfig)
    assert sparse.target_sparsity == 0.65
    cutoff = sparse.disabled_until_timestep
    assert cutoff is not None
    # There 0.86 itself is sparse; here a step at the cutoff is dense, so it is the next float64.
    assert cutoff > 0.86
    assert cutoff == pytest.approx(0.86, abs=1e-15)


def test_vllm_omnis_example_of_sage_is_read():
    quant = {"dtype_qk": "int8", "q_block_size": 1, "k_block_size": 16}
    found = read("vllm_omni", {"default": {"backend": "TRTLLM_ATTN", "quant": quant}})
    assert found.quant_attention_config == QuantAttentionConfig(
        qk_dtype="int8", q_block_size=1, k_block_size=16, v_block_size=1
    )


def test_the_defaults_of_the_other_stacks_are_known():
    for target, data in (
        ("sglang", {"attention_backend": "sol_attn"}),
        ("vllm_omni", {"default": {"backend": "sol_attn"}}),
    ):
        times = tuple(1 - n / 50 for n in range(50))
        found = read(target, data, Deployment(times=times)).sparse_attention_config
        assert found == SolAttnConfig(dense_layers=(0, 1), disabled_until_timestep=times[9])


def test_sglangs_examples_are_read():
    skip = {"threshold_scale_factor": 2940.8, "start_step": 2}
    assert read("sglang", {"skip_softmax_params": skip}).sparse_attention_config == (
        SkipSoftmaxConfig(threshold_scale_factor=2940.8, disabled_until_timestep=TIMES[1])
    )
    server = {
        "attention_backend": "video_sparse_attn",
        "attention_backend_config": {"sparsity": 0.5},
    }
    assert read("sglang", server).sparse_attention_config == VideoSparseAttentionConfig(
        vsa_sparsity=0.5
    )


def test_the_checkpoints_example_is_read():
    data = group(disabled_until_timestep=0.8, ignore=["blocks.0.attn1"], targets=["WanAttention"])
    assert read("model_optimizer", data).sparse_attention_config == SkipSoftmaxConfig(
        target_sparsity=0.5, disabled_until_timestep=0.8
    )


def test_steps_of_an_older_checkpoint_are_turned_into_a_time():
    data = group(initial_disabled_steps=3)
    found = read("model_optimizer", data).sparse_attention_config
    assert found == SkipSoftmaxConfig(target_sparsity=0.5, disabled_until_timestep=TIMES[2])
    with pytest.raises(ValueError, match="initial_disabled_steps=3 counts steps"):
        read("model_optimizer", data, NOWHERE)


@pytest.mark.parametrize(
    ("changes", "place", "tau", "layers"),
    [
        ({}, NOWHERE, 1.5, None),
        ({"tau_profile": "0--1=2.5"}, NOWHERE, 2.5, None),
        ({"tau_profile": "0-30=2.0; 31-39=2.0"}, PLACE, 2.0, None),
        ({"tau_profile": "0-3=1.5 # as the rest"}, PLACE, 1.5, None),
        ({"dense_blocks": "0-2,-1"}, PLACE, 1.5, (0, 1, 2, 39)),
        ({"dense_blocks": "3,1"}, NOWHERE, 1.5, (1, 3)),
    ],
)
def test_inputs_of_the_node_are_read(
    changes: dict[str, Any], place: Deployment, tau: float, layers: tuple[int, ...] | None
):
    found = read("comfyui", node(**changes), place).sparse_attention_config
    assert found == SolAttnConfig(tau=tau, dense_layers=layers)


def test_two_ends_of_the_dense_phase_are_not_read_in_silence():
    data = json.dumps(group(initial_disabled_steps=3, disabled_until_timestep=0.8))
    notes = import_config(data, "model_optimizer", PLACE).notes
    assert "disabled_until_timestep wins over initial_disabled_steps=3" in notes


# --- what would be lost or guessed is refused


def sol(**fields: Any) -> dict[str, Any]:
    config = {"dense_steps": 0, **fields}
    return {"attention_backend": "sol_attn", "attention_backend_config": config}


def skip(cross: str | None = "TRTLLM_ATTN", **fields: Any) -> dict[str, Any]:
    data: dict[str, Any] = {"default": {"backend": "TRTLLM_ATTN", "skip_softmax": fields}}
    return data | ({"per_role": {"cross": cross}} if cross else {})


@pytest.mark.parametrize(
    ("target", "data", "message"),
    [
        ("sglang", sol(sink_tokens=64), "sink_tokens=64: .*no sink.*Set 0"),
        ("sglang", sol(kv_splits=4), "kv_splits=4: .*Set 'auto'"),
        ("sglang", sol(tua=1), "tua=1: .*Did you mean 'tau'"),
        ("sglang", sol(dense_steps=9), "9 dense steps: the schedule has 7 steps"),
        ("sglang", {"attention_backend": "sage_attn"}, "attention_backend='sage_attn'"),
        ("sglang", {"model_path": "x"}, "model_path='x'"),
        ("sglang", {"skip_softmax_params": {}, "attention_backend": "fa"}, "backend='fa'"),
        ("vllm_omni", skip(None, threshold=0.05), "cross-attention skips too"),
        ("vllm_omni", skip(target_sparsity=0.0), "target_sparsity=0: .*stays on"),
        ("vllm_omni", {"default": {"backend": "FLASH_ATTN"}}, "default.backend='FLASH_ATTN'"),
        ("vllm_omni", {"default": {"backend": "TRTLLM_ATTN"}}, "default: it is dense"),
        ("vllm_omni", {"default": {"backend": "SOL_ATTN", "quant": {}}}, r"default\.quant"),
        ("vllm_omni", {"default": "TRTLLM_ATTN", "per_role": {"self": "X"}}, "self='X'"),
        ("vllm_omni", {"default": {"backend": "TRTLLM_ATTN", "quant": {"dtype_qk": "float16"}}},
         "dtype_qk='float16'"),
        ("vllm_omni", {"default": {"backend": "TRTLLM_ATTN", "quant": {"dtype_qk": ["int8"]}}},
         r"dtype_qk=\['int8'\]"),
        ("vllm_omni", skip("SOL_ATTN", target_sparsity=0.5), "cross='SOL_ATTN': cross-attention"),
        ("vllm_omni", {"default": {"backend": "SOL_ATTN"}, "per_role": {"cross": ["X"]}},
         r"cross=\['X'\]: cross-attention is dense here"),
        ("sglang", sol(sink_tokens=False), "sink_tokens=False: .*Set 0"),
        ("model_optimizer", {"sparse_attention_config": {"config_groups": {}, "mode": 2}},
         "sparse_attention_config.mode=2"),
        ("comfyui", node(int8_qk=0), "int8_qk=0: .*Set False"),
        ("comfyui", node(min_tokens=False), "min_tokens=False: .*Set 0"),
        ("comfyui", node(dense_blocks=["5", 0]), "connected to another node"),
        ("model_optimizer", group(target_sparsity=0.0), "target_sparsity=0: "),
        ("model_optimizer", group(algorithm="sparse_softmax"), "algorithm='sparse_softmax'"),
        ("model_optimizer", group(sparsity_n=2), "sparsity_n=2"),
        ("comfyui", node(int8_qk=True), "int8_qk=True: .*Set False"),
        ("comfyui", node(int8_pv=None), "int8_pv is missing: the node's default"),
        ("comfyui", node(start_percent=0.2), r"start_percent=0\.2"),
        ("comfyui", node(tau_profile="0-30=2.0; 39=0.9"), "one tau for all blocks"),
        ("comfyui", node(tau_profile=["5", 0]), "connected to another node"),
    ],
)  # fmt: skip
def test_what_has_no_place_here_is_refused_with_its_name(target: str, data: Any, message: str):
    with pytest.raises(NotExpressible, match=message):
        read(target, data)


@pytest.mark.parametrize(
    ("target", "data", "message"),
    [
        ("sglang", sol(dense_steps=2), "--times"),
        ("vllm_omni", skip(threshold=0.05), "--keys"),
        ("comfyui", node(tau_profile="0-3=2.0"), "--layers"),
        ("comfyui", node(dense_blocks="0,-1"), "--layers"),
    ],
)
def test_what_the_deployment_has_to_tell_is_asked_for(target: str, data: Any, message: str):
    with pytest.raises(NotExpressible, match=message):
        read(target, data, NOWHERE)


@pytest.mark.parametrize(
    ("target", "text", "message"),
    [
        ("sglang", "tau=1", "not JSON"),
        ("sglang", "[]", "expected a mapping"),
        ("sglang", '{"attention_backend": 1, "attention_backend": 2}', "given twice"),
        ("sglang", '{"tau": NaN}', "NaN is no number"),
        ("sglang", json.dumps(sol(tau="1")), "tau='1': expected a number"),
        ("sglang", json.dumps(sol(tau=True)), "tau=True: expected a number, got bool"),
        ("sglang", json.dumps(sol(dense_layers=[0, 1])), r"dense_layers=\[0, 1\]: expected text"),
        ("sglang", json.dumps(sol(dense_layers="0,,2")), "item 2 is empty"),
        ("sglang", json.dumps(sol(dense_steps=1.5)), r"dense_steps=1\.5"),
        ("sglang", json.dumps(sol(thresh_type="mean")), "thresh_type='mean'"),
        (
            "sglang",
            '{"skip_softmax_params": {"start_step": 0}}',
            "threshold_scale_factor is missing",
        ),
        ("vllm_omni", json.dumps(skip(threshold="a")), "threshold='a': expected a number"),
        ("vllm_omni", json.dumps(skip(threshold=0.1, target_sparsity=0.5)), "give one of"),
        ("vllm_omni", json.dumps(skip(target_sparsity=1.5)), r"must be in \[0, 1\]"),
        ("sglang", "[" * 100_000, "nested too deeply"),
        ("sglang", json.dumps(sol(sink_start="x")), "sink_start='x': must be an integer"),
        ("vllm_omni", json.dumps(skip(threshold=10**400)), "threshold is beyond float64"),
        ("vllm_omni", json.dumps(skip(threshold=1)).replace("1}", "1e999}"), "beyond float64"),
        ("model_optimizer", json.dumps(group(target_sparsity=10**400)), "expected a finite number"),
        ("model_optimizer", json.dumps(group(initial_disabled_steps=1.7)), "steps=1.7: must be an"),
        ("model_optimizer", json.dumps(group(initial_disabled_steps="3")), "steps='3': must be an"),
        ("comfyui", json.dumps(node(dense_blocks="9" * 6000)), "is no block or range"),
        ("model_optimizer", "{}", "expected a mapping"),
        ("model_optimizer", json.dumps(group(target_sparsity=None)), "asks for nothing"),
        ("model_optimizer", json.dumps(group(target_sparsity={"prefill": 1})), "per-phase"),
        ("comfyui", '{"class_type": "KSampler", "inputs": {}}', "class_type='KSampler'"),
        ("comfyui", json.dumps(node(dense_blocks="x")), "'x' is no block"),
        ("tensorrt_llm", "attention: {}", "attention_config"),
        ("tensorrt_llm", "attention_config: {sparse_attention_config: {algorithm: sol}}", "'sol'"),
    ],
)
def test_what_is_not_the_format_is_refused_with_its_place(target: str, text: str, message: str):
    with pytest.raises(ValueError, match=message):
        import_config(text, target, PLACE)


# --- the profile of ComfyUI

profiles = st.dictionaries(st.integers(0, 39), st.floats(-10, 10), max_size=40)


@given(profiles)
def test_a_profile_reads_back_equal_here_and_by_an_independent_reader(taus: dict[int, float]):
    text = write_profile(taus)
    assert read_profile(text, 40) == taus
    assert independent.comfy_profile(text, 40) == taus


def test_a_profile_is_written_as_its_documentation_does():
    assert write_profile({**dict.fromkeys(range(31), 2.0), 39: 0.9, 40: 0.9, 42: 0.9}) == (
        "0-30=2.0; 39-40,42=0.9"
    )


@pytest.mark.parametrize(
    ("text", "taus"),
    [
        ("", {}),
        ("0-2=2; 1=0.5", {0: 2.0, 1: 0.5, 2: 2.0}),
        ("# all\n3-1 = 1.5\n-1=2", {1: 1.5, 2: 1.5, 3: 1.5, 4: 2.0}),
    ],
)
def test_a_profile_of_the_node_is_read(text: str, taus: dict[int, float]):
    assert read_profile(text, 5) == taus == independent.comfy_profile(text, 5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0-2", r"entry 1 \('0-2'\): needs '='"),
        ("0=1; 2=x", "entry 2 .*'x' is no number"),
        ("0=nan", "not finite"),
        ("5=1", "leaves the 5 blocks"),
        ("-6=1", "leaves the 5 blocks"),
        ("a=1", "'a' is no block"),
    ],
)
def test_a_bad_profile_names_the_entry(text: str, message: str):
    with pytest.raises(ValueError, match=message):
        read_profile(text, 5)


@pytest.mark.parametrize("taus", [{-1: 1.0}, {0: float("inf")}])
def test_a_profile_that_no_node_could_read_is_not_written(taus: dict[int, float]):
    with pytest.raises(ValueError, match="at least 0 and its tau is finite"):
        write_profile(taus)


# --- the deployment


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"times": (0.5, 0.9)}, r"times\[1\]=0\.9 is above"),
        ({"times": (1.5,)}, r"in \[0, 1\]"),
        ({"times": ()}, "one a step"),
        ({"times": (float("nan"),)}, r"in \[0, 1\]"),
        ({"keys": 0}, "keys=0: must be at least 1"),
        ({"layers": True}, "layers=True"),
    ],
)
def test_a_deployment_that_cannot_be_is_refused(fields: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        Deployment(**fields)


def test_two_steps_at_one_time_cannot_be_parted():
    place = Deployment(times=(1.0, 0.9, 0.9, 0.1))
    with pytest.raises(NotExpressible, match="steps 1 and 2 have the same time"):
        place.cutoff(2, "sglang")
    assert place.cutoff(3, "sglang") == 0.9
    assert place.dense_steps(0.9, "sglang") == 3
