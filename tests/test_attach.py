"""`workbench.attach`: what it attends to, what it leaves alone, and how it goes away again."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import re
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("diffusers", reason="needs diffusers: pip install 'diffusers>=0.35.2'")

import workbench
from blockattn import UnsupportedError
from tests.attach_inputs import CASES, GRID, SOL, VIDEO, Case
from workbench.config import (
    AttentionConfig,
    QuantAttentionConfig,
    SkipSoftmaxConfig,
    SolAttnConfig,
    VideoSparseAttentionConfig,
)
from workbench.diffusers.families import FAMILIES
from workbench.diffusers.splice import SplicedProcessor

ROOT = Path(__file__).resolve().parent.parent
WAN, HUNYUAN, LTX = CASES[:3]
ALL_EXACT = SolAttnConfig(tau=-100.0)
VSA = VideoSparseAttentionConfig(vsa_sparsity=0.5)
families = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


# --- what runs


@families
def test_the_grid_and_the_layers_are_found_in_the_real_model(case: Case):
    model = case.model()
    with workbench.attach(model, None) as attached:
        case.run(model)
        (part,) = attached.models
        assert part.forward.grid == GRID
        modules = [model.get_submodule(name) for name in part.layers.values()]
    assert [id(m) for m in modules] == [id(m) for m in case.attentions(model)]


@pytest.mark.parametrize(
    ("name", "patches", "latents", "grid"),
    [
        ("WanTransformer3DModel", {"patch_size": (1, 2, 2)}, (1, 4, 3, 8, 12), (3, 4, 6)),
        ("WanTransformer3DModel", {"patch_size": (2, 4, 1)}, (1, 4, 6, 8, 12), (3, 2, 12)),
        (
            "HunyuanVideoTransformer3DModel",
            {"patch_size": 4, "patch_size_t": 2},
            (1, 4, 6, 8, 12),
            (3, 2, 3),
        ),
        (
            "CogVideoXTransformer3DModel",
            {"patch_size": 2, "patch_size_t": None},
            (1, 5, 4, 8, 12),
            (5, 4, 6),
        ),
        (
            "CogVideoXTransformer3DModel",
            {"patch_size": 2, "patch_size_t": 2},
            (1, 5, 4, 8, 12),
            (3, 4, 6),
        ),
        ("MochiTransformer3DModel", {"patch_size": 2}, (1, 4, 3, 8, 12), (3, 4, 6)),
    ],
)
def test_the_grid_follows_the_patches_of_the_configuration(
    name: str, patches: dict[str, Any], latents: tuple[int, ...], grid: tuple[int, int, int]
):
    (family,) = [family for family in FAMILIES if family.model == name]
    found = family.grid(SimpleNamespace(**patches), {"hidden_states": torch.zeros(latents)})
    assert found == grid


@families
@pytest.mark.parametrize(
    "config",
    [
        None,
        SolAttnConfig(tau=1.0, dense_layers=(0, 1)),
        SolAttnConfig(tau=1.0, disabled_until_timestep=0.5),
        SkipSoftmaxConfig(threshold_scale_factor=0.0),
    ],
    ids=["off", "dense layers", "dense phase", "factor 0"],
)
def test_what_stays_dense_is_the_bare_model_bit_for_bit(case: Case, config: Any):
    model = case.model()
    bare = case.run(model)
    with workbench.attach(model, config, strict=True) as attached:
        assert torch.equal(case.run(model), bare)
    assert attached.counts().sparse == 0


@families
def test_what_ran_was_sparse(case: Case):
    model = case.model()
    bare = case.run(model)
    with workbench.attach(model, SOL, record=True, strict=True) as attached:
        sparse = case.run(model)
    assert attached.counts().sparse == case.layers * case.calls
    assert not attached.counts().ineligible
    assert all(0 < record.density < 0.95 for record in attached.records)
    assert not torch.equal(sparse, bare)


@families
def test_with_every_block_exact_the_output_is_dense_within_rounding(case: Case):
    model = case.model()
    bare = case.run(model)
    with workbench.attach(model, ALL_EXACT, record=True) as attached:
        torch.testing.assert_close(case.run(model), bare, rtol=1e-4, atol=1e-5)
    assert [record.density for record in attached.records] == [1.0] * case.layers * case.calls


@families
def test_a_threshold_that_drops_nothing_is_dense_within_rounding(case: Case):
    model = case.model()
    bare = case.run(model)
    skip = SkipSoftmaxConfig(threshold_scale_factor=1e-30)
    with workbench.attach(model, skip) as attached:
        torch.testing.assert_close(case.run(model), bare, rtol=1e-4, atol=1e-5)
    assert attached.counts().sparse == case.layers * case.calls


def test_vsa_runs_without_its_coarse_branch_and_knows_the_grid():
    model = WAN.model()
    bare = WAN.run(model)
    with workbench.attach(model, VSA, gate="zero", record=True) as attached:
        assert not torch.equal(WAN.run(model), bare)
    assert [record.density for record in attached.records] == [0.5, 0.5]


def test_quantised_attention_runs_in_dense_layers_too():
    model = WAN.model()
    bare = WAN.run(model)
    config = AttentionConfig(quant_attention_config=QuantAttentionConfig(qk_dtype="mxfp8"))
    with workbench.attach(model, config, record=True) as attached:
        assert not torch.equal(WAN.run(model), bare)
    assert {record.algorithm for record in attached.records} == {"dense"}


def test_dense_layers_of_the_configuration_stay_dense():
    model = WAN.model()
    config = SolAttnConfig(tau=1.0, dense_layers=(1,))
    with workbench.attach(model, config) as attached:
        WAN.run(model)
    (part,) = attached.models
    assert part.attention.counts(0).sparse == 1
    assert part.attention.counts(1).dense["dense layer"] == 1


def test_layers_are_numbered_through_both_kinds_of_blocks():
    with workbench.attach(HUNYUAN.model(), SOL) as attached:
        layers = attached.models[0].layers
    assert layers == {0: "transformer_blocks.0.attn", 1: "single_transformer_blocks.0.attn"}


@pytest.mark.parametrize("case", [WAN, LTX], ids=lambda case: case.name)
def test_cross_attention_is_untouched_and_counted(case: Case):
    model = case.model()
    before = [name for name in model.attn_processors if "attn2" in name]
    processors = [model.attn_processors[name] for name in before]
    with workbench.attach(model, SOL) as attached:
        inside = [model.attn_processors[name] for name in before]
        case.run(model)
    assert [id(p) for p in inside] == [id(p) for p in processors]
    assert attached.counts().dense == {"cross-attention": 2}


def test_attention_of_the_text_alone_is_left_alone_with_the_reason():
    with workbench.attach(HUNYUAN.model(), SOL) as attached:
        (why,) = attached.models[0].left_alone.items()
    assert why == (
        "context_embedder.token_refiner.refiner_blocks.0.attn",
        "no self-attention of the video",
    )


def test_guidance_in_one_batch_equals_guidance_in_two_calls():
    model = HUNYUAN.model()
    both = HUNYUAN.inputs()
    single = [{k: v[n : n + 1] for k, v in both.items()} for n in (0, 1)]
    with workbench.attach(model, SOL), torch.no_grad():
        together = model(**both, return_dict=False)[0]
        apart = torch.cat([model(**inputs, return_dict=False)[0] for inputs in single])
    torch.testing.assert_close(together, apart, rtol=1e-4, atol=1e-5)


# --- calls that cannot be served


@pytest.mark.parametrize("named", [False, True], ids=["no grid", "coordinates besides"])
def test_tokens_without_a_grid_run_dense_counted_and_warned_of_once(named: bool):
    model = LTX.model()
    inputs = LTX.inputs()
    coordinates = torch.rand(2, 3, VIDEO)  # of every token, which then need no grid
    if not named:
        del inputs["num_frames"], inputs["height"], inputs["width"]
    with torch.no_grad():
        bare = model(**inputs, video_coords=coordinates, return_dict=False)[0]
        with workbench.attach(model, SOL) as attached:
            with pytest.warns(UserWarning, match="token grid: .* how its tokens lie") as given:
                out = model(**inputs, video_coords=coordinates, return_dict=False)[0]
    assert torch.equal(out, bare)
    assert attached.counts().ineligible == {"token grid": 2}
    assert len(given) == 1


def test_strict_mode_raises_instead(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORKBENCH_STRICT", "1")
    model = LTX.model()
    inputs = {**LTX.inputs(), "num_frames": None}
    with workbench.attach(model, SOL), torch.no_grad():
        with pytest.raises(UnsupportedError, match=r"layer 0: .*token grid"):
            model(**inputs, video_coords=torch.rand(2, 3, VIDEO))


def test_a_call_that_wants_gradients_runs_dense():
    model = WAN.model()
    with workbench.attach(model, SOL) as attached, pytest.warns(UserWarning, match="gradient"):
        model(**WAN.inputs())
    assert attached.counts().ineligible == {"gradient": 2}


def test_a_grid_that_is_not_the_tokens_is_refused():
    model = LTX.model()
    inputs = {**LTX.inputs(), "num_frames": 3}  # rotary embedding then fails in the model itself
    with workbench.attach(model, SOL) as attached:
        attached.models[0].forward.begin((), inputs)
        layer = attached.models[0]._splices[0][3]._run.__globals__["dispatch_attention_fn"]
        q = torch.zeros(1, VIDEO, 2, 64)
        with pytest.warns(UserWarning, match=r"256 tokens for a grid of \(3, 4, 16\)"):
            layer(q, q, q)
    assert attached.counts().ineligible == {"token grid": 1}


def test_a_processor_of_another_kind_is_left_alone_with_the_reason():
    model = WAN.model()
    model.blocks[0].attn1.processor = Foreign()
    with workbench.attach(model, SOL) as attached:
        assert isinstance(model.blocks[0].attn1.processor, Foreign)
    assert list(attached.models[0].layers) == [1]
    why = attached.models[0].left_alone["blocks.0.attn1"]
    assert why == "processor Foreign takes ['attn', 'hidden_states'], not a mask and a rotation"
    assert why in attached.report()


class Foreign:
    def __call__(self, attn: Any, hidden_states: Tensor) -> Tensor:
        return hidden_states


def test_a_model_none_of_whose_layers_can_be_attached_is_refused():
    model = WAN.model()
    for block in model.blocks:
        block.attn1.processor = Foreign()
    with pytest.raises(UnsupportedError, match=r"no layer can be attached: .*Foreign"):
        workbench.attach(model, SOL)


@pytest.mark.parametrize("case", CASES[1:2] + CASES[3:], ids=lambda case: case.name)
def test_vsa_among_text_tokens_is_refused(case: Case):
    with pytest.raises(UnsupportedError, match="text tokens attend in the same sequence"):
        workbench.attach(case.model(), VSA, gate="zero")


def test_a_model_with_ring_attention_is_refused():
    model = WAN.model()
    ring = SimpleNamespace(ring_degree=2, ulysses_degree=1)
    for block in model.blocks:
        block.attn1.processor._parallel_config = SimpleNamespace(context_parallel_config=ring)
    with pytest.raises(UnsupportedError, match=r"ring_degree=2: .* all keys"):
        workbench.attach(model, SOL)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "match"),
    [
        ((torch.nn.Linear(2, 2), SOL), {}, TypeError, "Linear is no video transformer .* expected"),
        (("a path", SOL), {}, TypeError, "str is no torch module"),
        ((WAN, "sol_attn"), {}, TypeError, "load_config"),
        ((WAN, SOL), {"strikt": True}, TypeError, "did you mean 'strict'"),
        ((WAN, SOL), {"sink_tokens": 3}, TypeError, "unknown option 'sink_tokens'"),
        ((WAN, SOL), {"gate": "zero"}, ValueError, "gate='zero' is for vsa"),
        ((WAN, VSA), {}, ValueError, "has no learned gate"),
        ((WAN, SOL), {"train_timesteps": 0}, ValueError, "train_timesteps=0"),
        ((WAN, SolAttnConfig(dense_layers=(2,))), {}, ValueError, "dense_layers has 2: .* 2 lay"),
        ((WAN, {"transformer_2": SOL}), {}, ValueError, "config is for transformer_2, but there"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_before_anything_is_attached(
    arguments: tuple[Any, Any], options: dict[str, Any], error: type[Exception], match: str
):
    model, config = arguments
    model = model.model() if isinstance(model, Case) else model
    with pytest.raises(error, match=match):
        workbench.attach(model, config, **options)
    if hasattr(model, "blocks"):
        assert not isinstance(model.blocks[0].attn1.processor, SplicedProcessor)
        assert not model._forward_pre_hooks


# --- backends of diffusers


def test_dense_calls_go_to_the_backend_that_the_model_uses():
    model = WAN.model()
    model.set_attention_backend("_native_math")
    bare = WAN.run(model)
    with workbench.attach(model, None):
        assert torch.equal(WAN.run(model), bare)


def test_a_backend_that_is_set_while_attached_is_the_models_own():
    model = WAN.model()
    with workbench.attach(model, None):
        model.set_attention_backend("_native_math")
        inside = WAN.run(model)
    assert model.blocks[0].attn1.processor._attention_backend == "_native_math"
    assert torch.equal(WAN.run(model), inside)


def test_fused_projections_are_attached_as_well():
    model = WAN.model()
    model.fuse_qkv_projections()
    bare = WAN.run(model)
    with workbench.attach(model, ALL_EXACT) as attached:
        torch.testing.assert_close(WAN.run(model), bare, rtol=1e-4, atol=1e-5)
    assert attached.counts().sparse == 2


# --- observing


@families
def test_an_observer_sees_every_call_and_changes_nothing(case: Case):
    model = case.model()
    bare = case.run(model)
    seen: list[tuple[Any, ...]] = []
    with workbench.attach(model, None, observe=lambda *call: seen.append(call)):
        assert torch.equal(case.run(model), bare)
    assert len(seen) == case.layers * case.calls
    for q, k, v, call in seen:
        assert q.shape == k.shape == v.shape
        assert q.shape[1] == VIDEO + call.prefix + call.suffix
        assert (call.model, call.grid, call.step) == ("transformer", GRID, 0)
        assert call.time == pytest.approx(0.5)
    assert [call.layer for *_, call in seen] == sorted([0, 1] * case.calls)


@families
def test_what_an_observer_holds_goes_with_the_attachment(case: Case):
    """Without waiting for the garbage collector: it may be gigabytes of a GPU."""
    gc.disable()
    try:
        assert _held_by_an_observer(case)() is None
    finally:
        gc.enable()


def _held_by_an_observer(case: Case) -> weakref.ref[Tensor]:
    held: list[Tensor] = []
    model = case.model()
    with workbench.attach(model, None, observe=lambda *call: held.append(call[0])):
        case.run(model)
    return weakref.ref(held[0])


def test_a_call_that_cannot_be_observed_is_an_error():
    model = LTX.model()
    inputs = {**LTX.inputs(), "num_frames": None}
    with workbench.attach(model, None, observe=lambda *call: None), torch.no_grad():
        with pytest.raises(UnsupportedError, match=r"layer 0: .* cannot be observed .token grid"):
            model(**inputs, video_coords=torch.rand(2, 3, VIDEO))


# --- going away again


@families
def test_the_model_is_restored_exactly(case: Case):
    model = case.model()
    processors = [module.processor for module in case.attentions(model)]
    bare = case.run(model)
    with workbench.attach(model, SOL):
        assert all(isinstance(m.processor, SplicedProcessor) for m in case.attentions(model))
    assert [id(m.processor) for m in case.attentions(model)] == [id(p) for p in processors]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert torch.equal(case.run(model), bare)


def test_the_model_is_restored_after_an_error():
    model = WAN.model()
    processor = model.blocks[0].attn1.processor
    with pytest.raises(KeyError), workbench.attach(model, SOL):
        raise KeyError("of the user")
    assert model.blocks[0].attn1.processor is processor
    assert not model._forward_pre_hooks


def test_detaching_twice_does_nothing():
    model = WAN.model()
    attached = workbench.attach(model, SOL)
    WAN.run(model)
    attached.detach()
    attached.detach()
    WAN.run(model)
    assert attached.counts().sparse == 2


def test_a_processor_that_was_replaced_meanwhile_is_kept_and_named():
    model = WAN.model()
    attached = workbench.attach(model, SOL)
    model.blocks[1].attn1.processor = Foreign()
    with pytest.warns(UserWarning, match=r"transformer: the processor of blocks\.1\.attn1"):
        attached.detach()
    assert isinstance(model.blocks[1].attn1.processor, Foreign)


def test_attaching_twice_is_refused_and_harms_nothing():
    model = WAN.model()
    with workbench.attach(model, SOL) as attached:
        with pytest.raises(RuntimeError, match="transformer is attached already"):
            workbench.attach(model, None)
        WAN.run(model)
    assert attached.counts().sparse == 2


def test_the_state_dict_is_unchanged():
    model = WAN.model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with workbench.attach(model, SOL):
        WAN.run(model)
        inside = model.state_dict()
        assert list(inside) == list(before)
        assert all(torch.equal(inside[name], before[name]) for name in before)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save"])
def test_a_copy_of_an_attached_model_is_the_bare_model(how: str):
    model = WAN.model()
    bare = WAN.run(model)
    with workbench.attach(model, SOL) as attached:
        if how == "deepcopy":
            twin = copy.deepcopy(model)
        elif how == "pickle":
            twin = pickle.loads(pickle.dumps(model))
        else:
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            twin = torch.load(file, weights_only=False)
        assert torch.equal(WAN.run(twin), bare)
    assert attached.counts().total == 0
    assert type(twin.blocks[0].attn1.processor) is type(model.blocks[0].attn1.processor)


def test_an_attached_model_moves_to_another_dtype():
    model = WAN.model()
    with workbench.attach(model, SOL, record=True) as attached:
        model.to(torch.bfloat16)
        inputs = {
            k: v.bfloat16() if v.dtype == torch.float32 else v for k, v in WAN.inputs().items()
        }
        with torch.no_grad():
            out = model(**inputs, return_dict=False)[0]
    assert out.dtype == torch.bfloat16
    assert attached.counts().sparse == 2


# --- saying so


def test_the_report_says_what_is_attached_what_is_not_and_what_ran():
    model = WAN.model()
    config = SolAttnConfig(tau=1.0, dense_layers=(0,))
    with workbench.attach(model, config, record=True) as attached:
        WAN.run(model)
    text = attached.report()
    assert "transformer: WanTransformer3DModel, 2 layers attached" in text
    assert "not attached: 2 x cross-attention" in text
    assert "calls: 1 sparse, 2 dense (cross-attention), 1 dense (dense layer)" in text
    assert "layer 0 (blocks.0.attn1): 0 sparse, 1 dense (dense layer), density 1.0000" in text
    (density,) = re.findall(r"layer 1 .*density (0\.\d+)", text)
    assert float(density) == pytest.approx(attached.records[1].density, abs=1e-4)
    assert repr(attached).startswith("<Attachment: 2 layers of transformer; 1 sparse")


def test_without_records_the_report_says_how_to_get_a_density():
    with workbench.attach(WAN.model(), SOL) as attached:
        assert "density: not recorded; attach with record=True" in attached.report()


def test_reset_forgets_what_ran():
    model = WAN.model()
    with workbench.attach(model, SOL, record=True) as attached:
        WAN.run(model)
        attached.reset()
        assert attached.counts().total == 0
        assert attached.records == []
        WAN.run(model, time=0.4)
    assert attached.records[0].step == 0


# --- the folder kernels/ of this repository


def test_in_the_repository_nobody_takes_its_folder_for_the_hub_package_kernels():
    code = (
        "import importlib.util\n"
        "assert importlib.util.find_spec('kernels') is not None\n"  # the folder is in the way
        "from diffusers.utils import is_kernels_available\n"
        "from transformers.utils.import_utils import is_kernels_available as in_transformers\n"
        "print(is_kernels_available(), in_transformers())\n"
        "import diffusers, workbench\n"
        "model = diffusers.WanTransformer3DModel(num_attention_heads=1, attention_head_dim=12,\n"
        "    in_channels=4, out_channels=4, text_dim=4, freq_dim=4, ffn_dim=4, num_layers=1)\n"
        "print(len(workbench.attach(model, None).models[0].layers))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False,
        timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False", "False", "1"]
