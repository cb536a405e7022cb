"""What the policy launches for each mechanism, and which arguments it refuses."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from blockattn import (
    QuantRecipe,
    UnsupportedError,
    quantised_attention,
    skip_softmax_attention,
    sol_attention,
)
from tests.policy_inputs import (
    CALL,
    DENSE_TIME,
    MXFP8,
    SKIP,
    SKIP_MXFP8,
    SOL,
    TOKENS,
    VSA,
    Dense,
    changed,
    checkpoint,
    key_of,
    qkv,
    tokens,
    video,
)
from workbench.attention import SparseAttention
from workbench.attention.log import CallCounts
from workbench.config import (
    AttentionConfig,
    QuantAttentionConfig,
    SkipSoftmaxConfig,
    SolAttnConfig,
    VisualGenConfig,
)
from workbench.models.dit import dense_attention

# --- mechanisms


def test_vsa_without_a_gate_says_how_to_get_one():
    with pytest.raises(ValueError, match=r"layer 1: .*to_gate_compress.*gate=\"zero\""):
        SparseAttention(VSA)(*qkv(), CALL)


def test_vsa_with_a_zero_gate_is_top_k_attention_and_dense_without_sparsity():
    q, k, v = qkv()
    out = SparseAttention(changed(VSA, vsa_sparsity=0.0), gate="zero")(q, k, v, CALL)
    torch.testing.assert_close(out, dense_attention(q, k, v, CALL), atol=1e-4, rtol=1e-3)


def test_vsa_takes_the_gate_of_a_gated_model():
    attention = SparseAttention(VSA, strict=True)
    out = video(attention, gate=True)
    assert attention.counts() == CallCounts(sparse=6)
    assert not torch.equal(out, video(SparseAttention(VSA, gate="zero"), gate=True))


@pytest.mark.parametrize(("config", "options"), [(SOL, {}), (SKIP, {}), (VSA, {"gate": "zero"})])
def test_sol_weakness_37_samples_of_a_batch_do_not_see_each_other(
    config: Any, options: dict[str, Any]
):
    one, two = qkv(), [x.flip(1) for x in qkv()]
    attention = SparseAttention(config, **options)
    both = attention(*(torch.cat(pair) for pair in zip(one, two)), CALL)
    torch.testing.assert_close(both[:1], attention(*one, CALL))
    torch.testing.assert_close(both[1:], attention(*two, CALL))


def test_sol_weakness_34_grouped_heads_under_vsa_are_a_value_error():
    q, k, v = tokens(heads=4), tokens(heads=2, seed=1), tokens(heads=2, seed=2)
    with pytest.raises(ValueError, match="VSA does not serve GQA"):
        SparseAttention(VSA, gate="zero")(q, k, v, CALL)


def test_a_grid_of_other_tokens_under_vsa_is_a_value_error():
    with pytest.raises(ValueError, match=r"has 128 tokens, but q has 256"):
        SparseAttention(VSA, gate="zero")(*qkv(), replace(CALL, grid=(2, 8, 8)))


@pytest.mark.parametrize(("start", "rows"), [(None, slice(226, 256)), (10, slice(10, 40))])
def test_sol_weakness_36_the_query_rows_of_a_sink_are_dense(start: int | None, rows: slice):
    q, k, v = qkv()
    baseline = Dense()
    config = SolAttnConfig(tau=3.0)
    attention = SparseAttention(config, dense=baseline, sink_start=start, sink_tokens=30)
    out = attention(q, k, v, CALL)
    alone = sol_attention(q, k, v, tau=3.0, sink_start=start, sink_tokens=30)
    dense = dense_attention(q, k, v, CALL)
    torch.testing.assert_close(out[:, rows], dense[:, rows])
    assert not torch.allclose(alone[:, rows], dense[:, rows])
    others = torch.ones(TOKENS, dtype=torch.bool)
    others[rows] = False
    assert torch.equal(out[:, others], alone[:, others])
    assert baseline.calls == 1


def test_skip_weakness_40_a_shard_divides_by_the_length_of_the_whole_sequence():
    q, k, v = qkv()
    whole = SkipSoftmaxConfig(threshold_scale_factor=0.9 * 4 * TOKENS)
    out = SparseAttention(whole, key_tokens=4 * TOKENS)(q, k, v, CALL)
    assert torch.equal(out, skip_softmax_attention(q, k, v, threshold=0.9))


def test_layers_that_the_checkpoint_ignores_stay_dense():
    names = [f"blocks.{n}.attn1" for n in range(3)]
    config = SkipSoftmaxConfig(threshold_scale_factor=100.0)
    attention = SparseAttention(
        config,
        num_layers=3,
        module_names=names,
        checkpoint_config=checkpoint(ignore=["blocks.0.*", "*.2.attn1"]),
    )
    for layer in range(3):
        attention(*qkv(), replace(CALL, layer=layer))
    assert attention.counts() == CallCounts(sparse=1, dense={"dense layer": 2})


def test_a_checkpoint_gives_factor_and_cutoff():
    given = checkpoint(target_sparsity=0.5, disabled_until_timestep=0.7)
    attention = SparseAttention(SkipSoftmaxConfig(), checkpoint_config=given)
    key = key_of(attention)
    assert key["threshold_scale_factor"] == pytest.approx(10 * math.e)
    assert attention.cutoff == 0.7


@pytest.mark.parametrize(("config", "reason"), [(MXFP8, "sparse off"), (SKIP_MXFP8, "dense phase")])
def test_quantised_attention_also_serves_calls_that_are_not_sparse(config: Any, reason: str):
    q, k, v = qkv()
    baseline = Dense()
    attention = SparseAttention(config, dense=baseline, record=True)
    out = attention(q, k, v, DENSE_TIME)
    assert torch.equal(out, quantised_attention(q, k, v, qk_dtype="mxfp8"))
    assert baseline.calls == 0
    assert attention.counts().dense == {reason: 1}
    assert attention.records[0].emulated


def test_the_dense_phase_can_be_left_to_the_unquantised_baseline():
    q, k, v = qkv()
    attention = SparseAttention(SKIP_MXFP8, quantise_dense=False)
    assert torch.equal(attention(q, k, v, DENSE_TIME), dense_attention(q, k, v, CALL))


@pytest.mark.parametrize(
    ("qk", "v_block"), [("bf16", 0), ("mxfp8", 0), ("mxfp8", 1), ("nvfp4", 0), ("nvfp4", 1)]
)
def test_recipes_reach_the_kernels(qk: str, v_block: int):
    quant = QuantAttentionConfig.model_validate({"qk_dtype": qk, "v_block_size": v_block})
    recipe = QuantRecipe(qk, "fp8", "channel" if v_block else "tensor")
    q, k, v = qkv(64)
    expected = quantised_attention(
        q, k, v, qk_dtype=recipe.qk_dtype, v_dtype=recipe.v_dtype, v_scale=recipe.v_scale
    )
    assert torch.equal(SparseAttention(quant)(q, k, v, CALL), expected)


def test_recipes_of_the_server_alone_are_refused_at_construction():
    quant = QuantAttentionConfig(qk_dtype="int8", q_block_size=1, k_block_size=4, v_block_size=1)
    with pytest.raises(UnsupportedError, match="no SageAttention style recipes"):
        SparseAttention(quant)


# --- construction


def test_every_form_of_a_configuration_means_the_same():
    part = AttentionConfig(sparse_attention_config=SOL)
    keys = {
        SparseAttention(form).graph_key()
        for form in (SOL, part, VisualGenConfig(attention_config=part))
    }
    assert len(keys) == 1


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (SKIP, {"sink_tokens": 3}, "sink_start and sink_tokens are for sol_attn"),
        (None, {"sink_start": 0}, "sink_start and sink_tokens are for sol_attn"),
        (SOL, {"sink_start": 10}, "sink_start=10 without sink_tokens is no sink"),
        (SOL, {"quantise_dense": False}, "quantise_dense=False: nothing is quantised here"),
        (SOL, {"gate": "zero"}, "gate='zero' is for vsa"),
        (SOL, {"checkpoint_config": {}}, "calibration for skip_softmax"),
        (VSA, {"key_tokens": 9}, "routing needs all keys"),
        (SOL, {"num_layers": 1, "sink_tokens": -1}, "sink_tokens=-1"),
        (changed(SOL, dense_layers="0,7-8"), {"num_layers": 8}, "dense_layers has 8: .* 0 to 7"),
        (SOL, {"num_layers": 0}, "num_layers=0"),
        (SOL, {"gate": "none"}, "gate='none': must be one of 'model', 'zero'"),
        (SKIP, {"key_tokens": 0}, "key_tokens=0"),
        (SKIP, {"module_names": []}, "has 0 names: must name at least one layer"),
        (SKIP, {"module_names": ["a"], "num_layers": 2}, "has 1 names: must name 2 layers"),
        (SKIP, {"checkpoint_config": checkpoint(ignore=["*"])}, "this module has no name"),
        (SkipSoftmaxConfig(target_sparsity=0.5), {}, "no calibration formula"),
    ],
)
def test_an_argument_that_is_wrong_or_does_nothing_is_refused(
    config: Any, options: dict[str, Any], message: str
):
    with pytest.raises(ValueError, match=message):
        SparseAttention(config, **options)


@pytest.mark.parametrize(
    ("config", "options"),
    [
        ("sol_attn", {}),
        ({"algorithm": "sol_attn"}, {}),
        (SOL, {"num_layers": True}),
        (SOL, {"sink_tokens": 1.5}),
        (SOL, {"strict": 1}),
        (SOL, {"record": "yes"}),
        (SKIP_MXFP8, {"quantise_dense": 1}),
        (SKIP, {"module_names": "blocks"}),
        (SKIP, {"module_names": [1]}),
    ],
)
def test_an_argument_of_a_wrong_type_is_refused(config: Any, options: dict[str, Any]):
    with pytest.raises(TypeError):
        SparseAttention(config, **options)


@pytest.mark.parametrize(
    "config", [SOL, SKIP, SKIP_MXFP8, changed(SOL, disabled_until_timestep=None)]
)
def test_inputs_are_not_modified(config: Any):
    inputs = qkv()
    before = [x.clone() for x in inputs]
    sink = {"sink_tokens": 9} if isinstance(config, SolAttnConfig) else {}
    SparseAttention(config, **sink)(*inputs, CALL)
    assert all(torch.equal(a, b) for a, b in zip(inputs, before))
