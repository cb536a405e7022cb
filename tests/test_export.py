"""Export and import: what a target can say comes back equal, what it cannot is an error."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import export_readers as independent
from tests.export_inputs import (
    CALIBRATION,
    FORMULA,
    PLACE,
    TIMES,
    any_tau,
    by_factor,
    by_target,
    config,
    cutoffs,
    on_the_schedule,
    sage,
    sol,
    vsa,
)
from workbench.config import (
    QuantAttentionConfig,
    SkipSoftmaxConfig,
    SolAttnConfig,
    VideoSparseAttentionConfig,
    VisualGenConfig,
    load_config,
)
from workbench.config.checkpoint import SkipCalibration
from workbench.export import (
    TARGETS,
    Deployment,
    NotExpressible,
    export_all,
    export_config,
    import_config,
)

MORE_TIMES = [*TIMES, 0.95, 0.9 - 1e-16, 0.05]
SKIP = SkipSoftmaxConfig(threshold_scale_factor=900.0)
TARGET = SkipSoftmaxConfig(target_sparsity=0.5)


def there_and_back(source: VisualGenConfig, target: str) -> VisualGenConfig:
    return import_config(export_config(source, target, PLACE).text, target, PLACE).config


# --- what a target can say comes back equal

EXPRESSIBLE = {
    "tensorrt_llm": sol(any_tau, cutoffs) | by_factor | by_target | vsa,
    "model_optimizer": by_target,
    "vllm_omni": sol(st.floats(0, 1e4), on_the_schedule) | by_target,
    "sglang": sol(any_tau, on_the_schedule) | vsa,
    "comfyui": sol(any_tau, st.none()),
}


@pytest.mark.parametrize("target", TARGETS)
@given(st.data())
def test_every_expressible_setting_reads_back_equal(target: str, data: st.DataObject):
    sparse = data.draw(EXPRESSIBLE[target])
    if target == "comfyui":
        sparse = sparse.model_copy(update={"thresh_type": "diag"})
    source = config(sparse, backend="CUTEDSL" if target == "tensorrt_llm" else None)
    assert there_and_back(source, target) == source


@given(by_factor)
def test_a_threshold_reads_back_equal_but_for_rounding(sparse: SkipSoftmaxConfig):
    found = there_and_back(config(sparse), "vllm_omni").attention_config.sparse_attention_config
    assert isinstance(found, SkipSoftmaxConfig)
    assert found.threshold_scale_factor == pytest.approx(sparse.threshold_scale_factor, rel=1e-15)
    assert found.disabled_until_timestep == sparse.disabled_until_timestep


@given(sage, st.none() | by_target)
def test_sage_recipes_read_back_equal(
    quant: QuantAttentionConfig, sparse: SkipSoftmaxConfig | None
):
    assert there_and_back(config(sparse, quant), "vllm_omni") == config(sparse, quant)


@given(by_factor)
def test_a_request_of_sglang_reads_back_with_the_same_dense_steps(sparse: SkipSoftmaxConfig):
    found = there_and_back(config(sparse), "sglang").attention_config.sparse_attention_config
    assert isinstance(found, SkipSoftmaxConfig)
    assert found.threshold_scale_factor == sparse.threshold_scale_factor
    cuts = [item.disabled_until_timestep or math.inf for item in (sparse, found)]
    assert [time >= cuts[0] for time in TIMES] == [time >= cuts[1] for time in TIMES]


def test_what_is_not_attention_stays_in_the_servers_own_format_and_is_refused_elsewhere():
    text = (
        "model: wan\nattention_config:\n  backend: CUTEDSL\n"
        "  sparse_attention_config: {algorithm: sol_attn}"
    )
    source = load_config(text)
    assert there_and_back(source, "tensorrt_llm") == source
    with pytest.raises(NotExpressible, match=r"sglang: model: .*Remove 'model'"):
        export_config(source, "sglang")


# --- an independent reader computes the same


def served_alike(served: independent.Served, source: Any) -> None:
    """The same steps are dense, here and there, on the schedule of the deployment."""
    cutoff = source.disabled_until_timestep
    here = [cutoff is not None and time >= cutoff for time in TIMES]
    assert [served.dense_at(step, time) for step, time in enumerate(TIMES)] == here


@given(sol(st.floats(0, 1e4), cutoffs), st.sampled_from(["tensorrt_llm", "vllm_omni", "sglang"]))
def test_sol_attn_is_the_same_for_an_independent_reader(sparse: SolAttnConfig, target: str):
    text = export_config(config(sparse, backend="CUTEDSL"), target, PLACE).text
    readers = {"tensorrt_llm": "visual_gen", "vllm_omni": "vllm_omni", "sglang": "sglang"}
    served = getattr(independent, readers[target])(text)
    assert served.algorithm == "sol_attn"
    assert served.knobs == {"tau": sparse.tau, "thresh_type": sparse.thresh_type}
    assert served.dense_layers == frozenset(sparse.dense_layers or ())
    served_alike(served, sparse)


@given(by_factor | by_target, st.sampled_from(MORE_TIMES))
def test_skip_softmax_is_the_same_for_an_independent_reader(sparse: SkipSoftmaxConfig, time: float):
    cutoff = sparse.disabled_until_timestep
    here = cutoff is not None and time >= cutoff
    wanted = {k: v for k, v in sparse.model_dump().items() if v is not None}
    for name in ("algorithm", "disabled_until_timestep"):
        wanted.pop(name, None)
    source = config(sparse, backend="TRTLLM")
    first = independent.visual_gen(export_config(source, "tensorrt_llm", PLACE).text)
    assert (first.knobs, first.dense_at(0, time)) == (wanted, here)
    second = independent.vllm_omni(export_config(source, "vllm_omni", PLACE).text, keys=75600)
    assert second.knobs == pytest.approx(wanted, rel=1e-15)
    assert second.dense_at(0, time) == here


@given(by_factor)
def test_a_request_of_sglang_is_the_same_for_an_independent_reader(sparse: SkipSoftmaxConfig):
    served = independent.sglang(export_config(config(sparse), "sglang", PLACE).text)
    assert served.knobs == {"threshold_scale_factor": sparse.threshold_scale_factor}
    served_alike(served, sparse)


@given(by_target)
def test_a_group_gives_an_independent_reader_the_factor_of_the_calibration(
    sparse: SkipSoftmaxConfig,
):
    served = independent.checkpoint(export_config(config(sparse), "model_optimizer", PLACE).text)
    a, b = FORMULA["coefficients"].values()  # pyright: ignore
    factor = a * math.exp(b * sparse.target_sparsity)  # pyright: ignore
    assert served.knobs["threshold_scale_factor"] == pytest.approx(factor, rel=1e-12)
    assert served.knobs["ignore"] == list(CALIBRATION.ignore)
    served_alike(served, sparse)


@given(vsa)
def test_vsa_is_the_same_for_independent_readers(sparse: VideoSparseAttentionConfig):
    source = config(sparse, backend="CUTEDSL")
    for target, read in (("tensorrt_llm", "visual_gen"), ("sglang", "sglang")):
        served = getattr(independent, read)(export_config(source, target, PLACE).text)
        assert served.knobs == {"vsa_sparsity": sparse.vsa_sparsity}


@given(sol(any_tau, st.none()), st.integers(40, 60))
def test_the_node_of_comfyui_computes_the_same_in_every_block(sparse: SolAttnConfig, count: int):
    sparse = sparse.model_copy(update={"thresh_type": "diag"})
    found = independent.comfyui(export_config(config(sparse), "comfyui").text, count)
    dense = set(sparse.dense_layers or ())
    assert found == [None if n in dense else sparse.tau for n in range(count)]


@given(sage)
def test_sage_is_the_same_for_independent_readers(quant: QuantAttentionConfig):
    source = config(SKIP, quant, backend="TRTLLM")
    wanted = quant.qk_dtype, quant.q_block_size, quant.k_block_size
    theirs = independent.visual_gen(export_config(source, "tensorrt_llm").text)
    assert theirs.quant == wanted
    assert independent.vllm_omni(export_config(source, "vllm_omni", PLACE).text).quant == wanted


# --- what a target cannot say is an error that names it

SOL = SolAttnConfig()
CUT = SolAttnConfig(disabled_until_timestep=0.9)
MXFP8 = QuantAttentionConfig(qk_dtype="mxfp8")
NOWHERE = Deployment()


@pytest.mark.parametrize(
    ("target", "source", "place", "message"),
    [
        ("tensorrt_llm", config(SOL), PLACE, "backend: .*Set backend to CUTEDSL or TRTLLM"),
        ("tensorrt_llm", config(SkipSoftmaxConfig(target_sparsity=0), backend="TRTLLM"), PLACE,
         "target_sparsity=0: .*stays on"),
        ("model_optimizer", config(SOL), PLACE, "algorithm='sol_attn': .*skip_softmax only"),
        ("model_optimizer", config(SKIP), PLACE, r"threshold_scale_factor=900\.0: .*Set target"),
        ("model_optimizer", config(SkipSoftmaxConfig()), PLACE, "=None: .*unchanged"),
        ("model_optimizer", config(SkipSoftmaxConfig(target_sparsity=0)), PLACE, "Leave the group"),
        ("model_optimizer", config(TARGET), NOWHERE, "--calibration"),
        ("model_optimizer", config(TARGET, MXFP8), PLACE, "quant_attention_config: "),
        ("vllm_omni", config(VideoSparseAttentionConfig()), PLACE, "'vsa': .*kept blocks"),
        ("vllm_omni", config(SolAttnConfig(tau=-1)), PLACE, r"tau=-1\.0: tau must be at least 0"),
        ("vllm_omni", config(CUT), NOWHERE, r"disabled_until_timestep=0\.9: it counts dense steps"),
        ("vllm_omni", config(SKIP), NOWHERE, r"threshold_scale_factor=900\.0: .*--keys"),
        ("vllm_omni", config(SkipSoftmaxConfig(threshold_scale_factor=5e-324)), PLACE,
         "factor=5e-324: divided by 75600 keys it is 0"),
        ("vllm_omni", config(SkipSoftmaxConfig()), PLACE, "target_sparsity=None"),
        ("vllm_omni", config(SkipSoftmaxConfig(target_sparsity=0)), PLACE, "target_sparsity=0"),
        ("vllm_omni", config(SkipSoftmaxConfig(target_sparsity=0.5, threshold_scale_factor=1)),
         PLACE, "target_sparsity=0.5: .*Remove it"),
        ("vllm_omni", config(TARGET.model_copy(update={"disabled_until_timestep": 5e-324})), PLACE,
         "disabled_until_timestep=5e-324: 0 switches the dense phase off"),
        ("vllm_omni", config(None, MXFP8), PLACE, "qk_dtype='mxfp8': .*int8 or fp8"),
        ("sglang", config(TARGET), PLACE, r"target_sparsity=0\.5: .*takes a factor"),
        ("sglang", config(SkipSoftmaxConfig(threshold_scale_factor=0)), PLACE, "asks for nothing"),
        ("sglang", config(CUT), NOWHERE, r"disabled_until_timestep=0\.9: .*--times"),
        ("sglang", config(SKIP, MXFP8), PLACE, "quant_attention_config: "),
        ("comfyui", config(SolAttnConfig(thresh_type="exact")), PLACE, "thresh_type='exact'"),
        ("comfyui", config(CUT), PLACE, r"disabled_until_timestep=0\.9: start_percent"),
        ("comfyui", config(SKIP), PLACE, "algorithm='skip_softmax': .*Sol-Attn only"),
        ("comfyui", config(SolAttnConfig(dense_layers=(3, 40))), PLACE, r"dense_layers=\[40\]"),
        *[(target, config(), PLACE, "attention_config: .*needs no file") for target in TARGETS
          if target != "tensorrt_llm"],
    ],
)  # fmt: skip
def test_what_cannot_be_said_names_target_field_and_fix(
    target: str, source: VisualGenConfig, place: Deployment, message: str
):
    with pytest.raises(NotExpressible, match=message) as caught:
        export_config(source, target, place)
    assert str(caught.value).startswith(f"{target}: {caught.value.field}: ")
    assert caught.value.fix in str(caught.value)


@pytest.mark.filterwarnings("ignore:disabled_until_timestep=0")
@pytest.mark.parametrize("target", ["vllm_omni", "sglang"])
def test_dense_for_ever_is_refused_where_0_means_something_else(target: str):
    never = SkipSoftmaxConfig(threshold_scale_factor=5.0, disabled_until_timestep=0)
    with pytest.raises(NotExpressible, match="Leave it out"):
        export_config(config(never), target, PLACE)


def test_a_calibration_of_an_llm_is_refused():
    phases = SkipCalibration(threshold={"formula": "a * target_sparsity", "prefill": {"a": 1}})
    with pytest.raises(ValueError, match="per-phase"):
        export_config(config(TARGET), "model_optimizer", Deployment(calibration=phases))


def test_a_cutoff_of_the_checkpoint_stays_where_the_configuration_leaves_it_open():
    own = SkipCalibration(threshold=FORMULA, disabled_until_timestep=0.8)
    text = export_config(config(TARGET), "model_optimizer", Deployment(calibration=own)).text
    assert '"disabled_until_timestep": 0.8' in text


def test_all_targets_at_once_give_a_text_or_a_reason():
    found = export_all(config(SOL, backend="CUTEDSL"))
    said = {name for name, made in found.items() if not isinstance(made, NotExpressible)}
    assert list(found) == list(TARGETS)
    assert said == {"tensorrt_llm", "vllm_omni", "sglang", "comfyui"}


def test_a_conversion_is_told():
    made = export_config(config(CUT, backend="TRTLLM"), "sglang", PLACE)
    assert json.loads(made.text)["attention_backend_config"]["dense_steps"] == 3
    assert any("became 3 dense of 7 steps" in note for note in made.notes)
    assert any("backend=TRTLLM" in note for note in made.notes)


def test_an_unknown_target_is_named():
    with pytest.raises(ValueError, match="target='trt': must be one of tensorrt_llm"):
        export_config(config(SOL), "trt")
