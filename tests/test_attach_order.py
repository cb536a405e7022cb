"""Token order in models of diffusers, and captures through `workbench.attach`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("diffusers", reason="diffusers is not installed")

import workbench
from blockattn import TokenGrid, UnsupportedError
from tests.attach_inputs import CASES, GRID, SOL, TEXT, VIDEO, WIDTH, Case
from workbench.capture import CaptureSpec, Selection, open_capture
from workbench.capture.recorder import Recorder
from workbench.diffusers.order import token_order
from workbench.diffusers.wan import BOUNDARY, tiny_wan, wan_pipeline
from workbench.models import AttentionCall
from workbench.rows import probe_rows

ORDERS = ("tile", "morton")
HEAD_DIM = WIDTH["attention_head_dim"]
BY_NAME = {case.name: case for case in CASES}


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.mark.parametrize("order", ORDERS)
def test_a_dense_model_gives_the_same_video_in_every_order(case: Case, order: str):
    model = case.model()
    plain = case.run(model)
    exact = _in_float64(case, case.model())
    with workbench.attach(model, None) as attached, token_order(attached, order):
        turned = case.run(model)
    allowed = 2 * (plain - exact).abs().max() + exact.abs().max() * torch.finfo(plain.dtype).eps
    assert exact.isfinite().all()
    assert (turned - exact).abs().max() <= allowed
    assert not torch.equal(turned, plain)  # the order did something
    assert torch.equal(case.run(model), plain)  # and is gone


def _in_float64(case: Case, model: Any) -> Tensor:
    inputs = {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in case.inputs().items()
    }
    with torch.no_grad():
        return model.double()(**inputs, return_dict=False)[0]


def test_the_blocks_see_the_tokens_in_the_order_and_say_so(case: Case):
    seen: dict[str, list[tuple[Tensor, AttentionCall]]] = {"raster": [], "tile": []}
    model = case.model()
    for order, calls in seen.items():

        def look(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, calls=calls) -> None:
            calls.append((q.clone(), call))

        with (
            workbench.attach(model, None, observe=look) as attached,
            token_order(attached, order),
        ):
            case.run(model)
    for (raster, _), (tile, call) in zip(seen["raster"], seen["tile"], strict=True):
        grid = TokenGrid(GRID, call.prefix, call.suffix, order="tile")
        assert call.order == "tile"
        assert torch.allclose(tile, grid.arrange(raster), atol=1e-4)
        assert not torch.allclose(tile, raster, atol=1e-2)


def test_a_sparse_model_runs_sparse_in_another_order(case: Case):
    model, outputs = case.model(), []
    for order in ("raster", "tile"):
        with (
            workbench.attach(model, SOL, record=True) as attached,
            token_order(attached, order),
        ):
            outputs.append(case.run(model))
        assert attached.counts().sparse == case.layers * case.calls
        assert all(record.density < 1 for record in attached.records)
    assert not torch.allclose(*outputs, atol=1e-5)
    assert not torch.allclose(outputs[1], case.run(model), atol=1e-5)


def test_rotations_from_the_pipeline_are_turned_too():
    case = BY_NAME["cogvideox"]
    model = case.model()
    angle = torch.randn(VIDEO, HEAD_DIM // 2).repeat_interleave(2, dim=1)
    rotation = (angle.cos(), angle.sin())
    with torch.no_grad():
        plain = model(**case.inputs(), image_rotary_emb=rotation, return_dict=False)[0]
        with workbench.attach(model, None) as attached, token_order(attached, "morton"):
            turned = model(**case.inputs(), image_rotary_emb=rotation, return_dict=False)[0]
    assert torch.allclose(turned, plain, atol=1e-4)
    assert not torch.allclose(plain, case.run(model), atol=1e-2)


def test_an_exception_leaves_the_model_in_raster_order():
    case = BY_NAME["wan"]
    model = case.model()
    plain = case.run(model)
    with pytest.raises(RuntimeError, match="stopped"):
        _stop(model)
    assert torch.equal(case.run(model), plain)
    assert not model._forward_pre_hooks


def _stop(model: Any) -> None:
    with workbench.attach(model, None) as attached, token_order(attached, "tile"):
        raise RuntimeError("stopped")


def test_raster_order_changes_nothing():
    case = BY_NAME["wan"]
    model = case.model()
    plain = case.run(model)
    with workbench.attach(model, None) as attached, token_order(attached, "raster"):
        assert torch.equal(case.run(model), plain)


def test_two_orders_at_once_are_refused():
    model = BY_NAME["wan"].model()
    with workbench.attach(model, None) as attached, token_order(attached, "tile"):
        with pytest.raises(RuntimeError, match="runs in tile order already"):
            token_order(attached, "morton").__enter__()


def test_an_order_of_a_detached_model_is_refused():
    model = BY_NAME["wan"].model()
    with workbench.attach(model, None) as attached:
        pass
    with pytest.raises(RuntimeError, match="transformer is detached, so nothing would know"):
        token_order(attached, "tile").__enter__()
    assert not model._forward_pre_hooks


def test_an_unknown_order_is_refused():
    with workbench.attach(BY_NAME["wan"].model(), None) as attached:
        with pytest.raises(ValueError, match="order='hilbert'"):
            token_order(attached, "hilbert").__enter__()


def test_times_of_the_single_tokens_of_wan_follow_the_tokens():
    case = BY_NAME["wan"]
    model = case.model()
    times = torch.linspace(0, 900, VIDEO).expand(2, -1)
    inputs = {**case.inputs(), "timestep": times, "return_dict": False}
    with torch.no_grad():
        plain = model(**inputs)[0]
        with workbench.attach(model, None) as attached, token_order(attached, "tile"):
            turned = model(**inputs)[0]
        backwards = model(**{**inputs, "timestep": times.flip(1)})[0]
    assert torch.allclose(turned, plain, atol=1e-4)
    assert not torch.allclose(backwards, plain, atol=1e-3)


def test_a_time_for_each_token_is_refused_elsewhere_with_the_reason():
    case = BY_NAME["ltx"]
    model = case.model()
    inputs = {**case.inputs(), "timestep": torch.full((2, VIDEO), 500.0)}
    with workbench.attach(model, None) as attached, token_order(attached, "tile"):
        with pytest.raises(UnsupportedError, match=r"\(2, 256\), one for each token"):
            model(**inputs)


def test_tokens_that_stay_first_are_refused_with_the_reason():
    model = BY_NAME["hunyuan"].model()
    model.register_to_config(image_condition_type="token_replace")
    with workbench.attach(model, None) as attached:
        with pytest.raises(UnsupportedError, match="first tokens of the sequence in its own way"):
            token_order(attached, "tile").__enter__()


def test_a_compiled_model_is_refused():
    model = torch.compile(BY_NAME["wan"].model())
    with workbench.attach(model, None) as attached:
        with pytest.raises(UnsupportedError, match="is compiled"):
            token_order(attached, "tile").__enter__()


# -- captures --------------------------------------------------------------------------------------


def spec_of(case: Case, *, tokens: int, order: str = "raster", **changes: Any) -> CaptureSpec:
    text = {"before": {"prefix": tokens}, "after": {"suffix": tokens}}
    side = {"cogvideox": "before"}.get(case.name, "after")
    grid = TokenGrid(GRID, order=order, **(text[side] if tokens else {}))
    settings = {"entries": ((0, 0), (1, 1)), "heads": 2, "head_dim": HEAD_DIM, **changes}
    return CaptureSpec(grid=grid, title=case.name, **settings)


def sampled(case: Case, model: Any, recorder: Recorder, order: str = "raster") -> None:
    """Three steps, as a scheduler would make them."""
    with (
        workbench.attach(model, None, observe=recorder.observe) as attached,
        token_order(attached, order),
    ):
        for time in (0.9, 0.6, 0.3):
            case.run(model, time=time, batch=1)


def valid_text(case: Case) -> int:
    """Text tokens of the first sample that take part."""
    return {"cogvideox": TEXT, "hunyuan": 12, "mochi": 12}.get(case.name, 0)


def test_a_capture_through_attach_holds_what_the_model_attended(case: Case, tmp_path: Path):
    seen: dict[tuple[int, int | None], tuple[Tensor, ...]] = {}
    path, model = tmp_path / "a.safetensors", case.model()
    selection = Selection(heads=(1,), query_blocks=(0, 1, 3))
    spec = spec_of(case, tokens=valid_text(case), selection=selection)
    with Recorder(path, spec) as recorder:
        original = recorder.observe

        def both(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> None:
            seen[call.layer, call.step] = (q.clone(), k.clone(), v.clone())
            original(q, k, v, call)

        recorder.observe = both  # pyright: ignore[reportAttributeAccessIssue]
        sampled(case, model, recorder)
    capture = open_capture(path)
    assert path.stat().st_size == spec.total_bytes
    rows = selection.rows(spec.grid.tokens)
    for (layer, step), time in zip(((0, 0), (1, 1)), (0.9, 0.6), strict=True):
        kept, (q, k, v) = capture.load_rows(layer, step), seen[layer, step]
        assert kept.time == pytest.approx(time, abs=1e-3)
        assert torch.equal(kept.q, q[:, rows][:, :, 1:].bfloat16())
        assert torch.equal(kept.k, k[:, :, 1:].bfloat16())
        assert torch.equal(kept.v, v[:, :, 1:].bfloat16())
        probe = probe_rows(kept.q, kept.k, kept.v, (0, 1, 3), 1.0)
        assert 0 < probe.density <= 1


def test_recording_does_not_change_what_the_model_gives(case: Case, tmp_path: Path):
    model = case.model()
    plain = case.run(model, time=0.9, batch=1)
    spec = spec_of(case, tokens=valid_text(case), entries=((0, 0),))
    with Recorder(tmp_path / "a", spec) as recorder:
        with workbench.attach(model, None, observe=recorder.observe):
            assert torch.equal(case.run(model, time=0.9, batch=1), plain)


def test_a_capture_of_a_model_in_another_order_says_so(tmp_path: Path):
    case = BY_NAME["wan"]
    model, captures = case.model(), {}
    for order in ("raster", "morton"):
        with Recorder(tmp_path / order, spec_of(case, tokens=0, order=order)) as recorder:
            sampled(case, model, recorder, order)
        captures[order] = open_capture(tmp_path / order)
    raster, morton = (captures[order].load(1, 1) for order in ("raster", "morton"))
    restored = captures["morton"].grid.restore(morton.q)
    assert captures["morton"].grid.order == "morton"
    assert torch.allclose(restored.float(), raster.q.float(), atol=5e-2)
    assert not torch.allclose(morton.q.float(), raster.q.float(), atol=5e-2)


def test_a_pipeline_of_two_transformers_is_recorded_and_stopped_when_all_is_there(tmp_path: Path):
    torch.manual_seed(0)
    pipe = wan_pipeline(tiny_wan(seed=0), tiny_wan(seed=1))
    text = {name: torch.randn(1, 16, 32) for name in ("prompt_embeds", "negative_prompt_embeds")}
    size = {"num_frames": 13, "height": 128, "width": 128, "num_inference_steps": 6}
    spec = CaptureSpec(TokenGrid(GRID, order="tile"), ((0, 0), (2, 4)), heads=2, head_dim=64)
    steps: list[int] = []

    def stop(pipe: Any, step: int, time: Any, values: dict) -> dict:
        steps.append(step)
        pipe._interrupt = recorder.complete
        return values

    with (
        Recorder(tmp_path / "a", spec) as recorder,
        workbench.attach(pipe, None, observe=recorder.observe) as attached,
        token_order(attached, "tile"),
    ):
        pipe(**text, **size, output_type="latent", callback_on_step_end=stop)
    capture = open_capture(tmp_path / "a")
    high, low = (model.attention.counts() for model in attached.models)
    assert steps == [0, 1, 2, 3, 4]  # of six
    assert high.total > 0
    assert low.total > 0
    assert capture.time(0, 0) > BOUNDARY > capture.time(2, 4)
