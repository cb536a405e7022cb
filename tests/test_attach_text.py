"""Text and video in one sequence: text keys exact, text rows dense, padding never attended."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("diffusers", reason="needs diffusers: pip install 'diffusers>=0.35.2'")

import workbench
from blockattn import UnsupportedError, attend, skip_softmax_attention, sol_attention
from tests.attach_inputs import CASES, SOL, TEXT, VIDEO, Case, spy, text_mask
from tests.policy_inputs import CALL, TOKENS, Dense, qkv
from workbench.attention import SparseAttention
from workbench.attention.text import merged
from workbench.config import SkipSoftmaxConfig, SolAttnConfig
from workbench.models.dit import AttentionCall, dense_attention

JOINT = [case for case in CASES if case.text]
MASKED = [case for case in JOINT if case.name in ("hunyuan", "mochi")]
SKIP = SkipSoftmaxConfig(threshold_scale_factor=0.5 * TOKENS)
BEFORE = replace(CALL, grid=(3, 8, 8), prefix=64)
BEHIND = replace(CALL, grid=(3, 8, 8), suffix=64)
UNEVEN = replace(CALL, grid=(4, 5, 12), suffix=16)  # text within a block of video
calls = pytest.mark.parametrize(
    "call", [BEFORE, BEHIND, UNEVEN], ids=["before", "behind", "uneven"]
)


def text_rows(call: AttentionCall) -> slice:
    return slice(call.prefix) if call.prefix else slice(TOKENS - call.suffix, TOKENS)


def video_rows(call: AttentionCall) -> slice:
    return slice(call.prefix, TOKENS - call.suffix)


# --- the policy


@calls
@pytest.mark.parametrize("config", [SolAttnConfig(tau=1.0), SKIP], ids=["sol", "skip"])
def test_text_rows_are_dense_and_video_rows_are_not(config: Any, call: AttentionCall):
    q, k, v = qkv()
    attention = SparseAttention(config, num_layers=2, record=True)
    out = attention(q, k, v, call)
    dense = dense_attention(q, k, v, call)
    assert torch.equal(out[:, text_rows(call)], dense_attention(q[:, text_rows(call)], k, v, call))
    assert not torch.allclose(out[:, video_rows(call)], dense[:, video_rows(call)])
    assert attention.counts().sparse == 1
    assert attention.records[0].density < 1


@calls
def test_text_is_the_sink_of_sol_attn(call: AttentionCall):
    q, k, v = qkv()
    out = SparseAttention(SolAttnConfig(tau=1.0))(q, k, v, call)
    rows = text_rows(call)
    sink = {"sink_start": rows.start or 0, "sink_tokens": call.prefix + call.suffix}
    assert torch.equal(
        out[:, video_rows(call)], sol_attention(q, k, v, tau=1.0, **sink)[:, video_rows(call)]
    )


@calls
def test_skip_softmax_drops_no_text_key(call: AttentionCall):
    """Text keys of score 0, far below the video's, which a threshold over all keys would drop."""
    q, k, v = qkv()
    video, text = video_rows(call), text_rows(call)
    k[:, text] = 0.0
    out = SparseAttention(SKIP)(q, k, v, call)[:, video]
    q = q[:, video]
    part, trace = skip_softmax_attention(
        q, k[:, video], v[:, video], threshold=0.5, return_trace=True
    )
    mean = v[:, text].mean(1, keepdim=True).expand_as(q)
    lse = torch.full_like(trace.lse, math.log(v[:, text].shape[1]))
    torch.testing.assert_close(out, merged(part, trace.lse, mean, lse))
    assert trace.density < 1


def test_the_density_of_a_call_counts_the_dense_rows_of_its_text():
    q, k, v = qkv()
    attention = SparseAttention(SolAttnConfig(tau=1.0), record=True)
    attention(q, k, v, BEFORE)
    _, trace = sol_attention(q, k, v, tau=1.0, sink_start=0, sink_tokens=64, return_trace=True)
    rows = trace.computed.density_per_row().mean((0, 1))  # of 4 blocks of queries, the first text
    assert attention.records[0].density == pytest.approx((1 + float(rows[1:].sum())) / 4)


def test_the_density_of_skip_softmax_counts_all_pairs_with_text():
    q, k, v = qkv()
    attention = SparseAttention(SKIP, record=True)
    attention(q, k, v, BEFORE)
    video = [x[:, 64:] for x in (q, k, v)]
    _, trace = skip_softmax_attention(*video, threshold=0.5, return_trace=True)
    assert trace.density < 1
    pairs = 192 * 192 * trace.density + 192 * 64 + 64 * TOKENS
    assert attention.records[0].density == pytest.approx(pairs / TOKENS**2)


def test_text_rows_go_to_the_baseline_that_was_handed_in():
    dense = Dense()
    SparseAttention(SolAttnConfig(tau=1.0), dense=dense)(*qkv(), BEFORE)
    assert dense.calls == 1


@pytest.mark.parametrize(
    ("call", "options"),
    [(replace(BEFORE, suffix=8), {}), (BEFORE, {"sink_tokens": 64})],
    ids=["two texts", "a sink besides"],
)
def test_two_sinks_are_refused(call: AttentionCall, options: dict[str, int]):
    with pytest.raises(UnsupportedError, match="one sink is served"):
        SparseAttention(SolAttnConfig(tau=1.0), **options)(*qkv(), call)


def test_attention_over_two_sets_of_keys_is_that_over_their_union():
    q, k, v = (x.double() for x in qkv())
    halves = [
        attend(q, k[:, part], v[:, part], return_trace=True)
        for part in (slice(100), slice(100, TOKENS))
    ]
    (a, first), (b, second) = halves
    out = merged(a, first.lse, b, second.lse)
    torch.testing.assert_close(out, dense_attention(q, k, v, CALL), rtol=1e-5, atol=1e-6)


# --- the models


@pytest.mark.parametrize("case", JOINT, ids=lambda case: case.name)
def test_text_rows_of_a_model_are_those_of_its_own_dense_attention(
    case: Case, monkeypatch: pytest.MonkeyPatch
):
    model = case.model()
    outputs = spy(monkeypatch)
    seen: list[tuple[Tensor, Tensor, Tensor, Any]] = []
    with workbench.attach(model, SOL, observe=lambda *call: seen.append(call)):
        case.run(model)
    assert len(seen) == len(outputs) == case.layers * case.calls
    for (q, k, v, call), out in zip(seen, outputs):
        assert (call.prefix > 0) == (case.name == "cogvideox")
        rows = slice(call.prefix) if call.prefix else slice(q.shape[1] - call.suffix, q.shape[1])
        torch.testing.assert_close(out[:, rows], dense_attention(q[:, rows], k, v, call))
        video = slice(call.prefix, q.shape[1] - call.suffix)
        assert not torch.allclose(out[:, video], dense_attention(q[:, video], k, v, call))


@pytest.mark.parametrize("case", MASKED, ids=lambda case: case.name)
@pytest.mark.parametrize("lengths", [(12, 7), (7, 7), (TEXT, TEXT), (TEXT, 1)], ids=str)
def test_padding_is_cropped_and_never_attended(case: Case, lengths: tuple[int, int]):
    model = case.model()
    inputs = case.inputs()
    mask = text_mask(*lengths)
    inputs["encoder_attention_mask"] = mask.bool() if case.name == "mochi" else mask
    poisoned = dict(inputs)
    poisoned["encoder_hidden_states"] = inputs["encoder_hidden_states"].masked_fill(
        mask[..., None] == 0, 1e4
    )
    seen: list[int] = []

    def observe(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> None:
        seen.append(call.suffix)

    with workbench.attach(model, SOL, observe=observe, strict=True) as attached, torch.no_grad():
        clean = model(**inputs, return_dict=False)[0]
        dirty = model(**poisoned, return_dict=False)[0]
    assert torch.equal(clean, dirty)
    assert torch.isfinite(clean).all()
    assert set(seen) == set(lengths)
    assert not attached.counts().ineligible


def test_samples_of_a_batch_are_attended_with_their_own_text_wherever_they_stand():
    case = MASKED[0]
    model = case.model()
    inputs = case.inputs(batch=4)
    inputs["encoder_attention_mask"] = text_mask(7, 12, 12, 7)
    seen: list[tuple[int, int]] = []

    def observe(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> None:
        seen.append((q.shape[0], call.suffix))

    with workbench.attach(model, SOL, observe=observe), torch.no_grad():
        together = model(**inputs, return_dict=False)[0]
        assert seen == 2 * [(1, 7), (2, 12), (1, 7)]
        for n in range(4):
            one = {name: value[n : n + 1] for name, value in inputs.items()}
            alone = model(**one, return_dict=False)[0]
            torch.testing.assert_close(together[n : n + 1], alone, rtol=1e-4, atol=1e-5)


def test_a_mask_that_is_not_the_texts_runs_dense_and_is_warned_of():
    case = next(case for case in JOINT if case.name == "cogvideox")
    model = case.model()
    tokens = TEXT + VIDEO
    mask = torch.zeros(2, 1, tokens)
    mask[:, :, -1] = -1e4
    inputs = {**case.inputs(), "attention_kwargs": {"attention_mask": mask}}
    with torch.no_grad():
        bare = model(**inputs, return_dict=False)[0]
        with workbench.attach(model, SOL) as attached:
            with pytest.warns(UserWarning, match="attention mask: shape"):
                out = model(**inputs, return_dict=False)[0]
    assert torch.equal(out, bare)
    assert attached.counts().ineligible == {"attention mask": 2}
