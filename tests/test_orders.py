"""Token order: the model is the same in every order, and what an order changes is measured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from blockattn import TokenGrid
from tests.model_inputs import fresh_model
from workbench import cli
from workbench.attention import SparseAttention
from workbench.capture import Capture, CaptureSpec, CaptureWriter, Selection, open_capture
from workbench.capture.recorder import SamplingPlan, record_sampling
from workbench.config import SolAttnConfig, VideoSparseAttentionConfig
from workbench.models import AttentionCall, VideoDiT, dense_attention, sample
from workbench.orders import OrderEffect, OrderRow, order_effect
from workbench.synthetic import synthetic_qkv
from workbench.views import draw_orders, new_figure, to_png

GRID = (5, 6, 7)  # ragged for both tiles and the Z-curve
ORDERS = ("tile", "morton")


@pytest.fixture(scope="module")
def model() -> VideoDiT:
    return fresh_model(3)


def velocity(model: VideoDiT, dtype: torch.dtype, **settings) -> Tensor:
    frames, height, width = (g * p for g, p in zip(GRID, model.config.patch))
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, frames, height, width, 3, generator=generator)
    one = VideoDiT(model.config).to(dtype)
    one.load_state_dict(model.state_dict())
    with torch.no_grad():
        return one(x.to(dtype), 0.5, torch.tensor([1]), **settings)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_model_gives_the_same_velocity_in_every_order(model, order: str, dtype: torch.dtype):
    exact = velocity(model, torch.float64)
    plain = velocity(model, dtype)
    turned = velocity(model, dtype, order=order)
    allowed = 2 * (plain.double() - exact).abs().max() + exact.abs().max() * torch.finfo(dtype).eps
    assert exact.isfinite().all()
    assert (turned.double() - exact).abs().max() <= allowed


@pytest.mark.parametrize("order", ORDERS)
def test_the_blocks_run_on_tokens_and_rotations_in_that_order(model: VideoDiT, order: str):
    seen: dict[str, tuple[Tensor, AttentionCall]] = {}

    def spy(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
        seen.setdefault(call.order, (q.clone(), call))
        return dense_attention(q, k, v, call)

    for name in ("raster", order):
        velocity(model, torch.float32, attention=spy, order=name)
    places = TokenGrid(GRID, order=order)
    assert seen[order][1].grid == GRID
    assert torch.allclose(seen[order][0], places.arrange(seen["raster"][0]), atol=1e-6)
    assert not torch.allclose(seen[order][0], seen["raster"][0], atol=1e-2)


def test_an_unknown_order_is_refused(model: VideoDiT):
    with pytest.raises(ValueError, match=r"order='hilbert': must be one of 'raster', 'tile'"):
        velocity(model, torch.float32, order="hilbert")


def test_a_sampled_video_is_the_same_in_every_order(model: VideoDiT):
    settings = {"labels": ["ring"], "grid": GRID, "steps": 3}
    raster = sample(model, **settings)
    assert torch.allclose(sample(model, order="morton", **settings), raster, atol=1e-4)


@pytest.mark.parametrize("order", ORDERS)
def test_sparse_attention_runs_sparse_in_every_order(model: VideoDiT, order: str):
    """And blocks that hold other tokens give another output."""
    outputs = {}
    for name in ("raster", order):
        attention = SparseAttention(SolAttnConfig(tau=1.0), record=True)
        outputs[name] = velocity(model, torch.float32, attention=attention, order=name)
        assert attention.counts().sparse == 3
        assert all(0 < record.density < 1 for record in attention.records)
    dense = velocity(model, torch.float32)
    assert not torch.equal(outputs[order], dense)
    assert not torch.allclose(outputs[order], outputs["raster"], atol=1e-5)


@pytest.mark.parametrize("order", ORDERS)
def test_vsa_finds_the_same_cubes_in_every_order(model: VideoDiT, order: str):
    outputs = []
    for name in ("raster", order):
        config = VideoSparseAttentionConfig(vsa_sparsity=0.5)
        attention = SparseAttention(config, gate="zero", record=True)
        outputs.append(velocity(model, torch.float32, attention=attention, order=name))
        assert all(0 < record.density < 1 for record in attention.records)
    assert torch.allclose(*outputs, atol=1e-5)


def test_a_capture_states_the_order_in_which_its_model_ran(model: VideoDiT, tmp_path: Path):
    plans = {
        order: SamplingPlan((1,), (0,), grid=GRID, steps=1, order=order)
        for order in ("raster", "morton")
    }
    raster, morton = (record_sampling(model, plan, tmp_path / name) for name, plan in plans.items())
    assert morton.grid == TokenGrid(GRID, order="morton")
    wanted, found = raster.load(1, 0), morton.load(1, 0)
    assert torch.allclose(morton.grid.restore(found.q).float(), wanted.q.float(), atol=2e-2)
    assert not torch.allclose(found.q.float(), wanted.q.float(), atol=2e-2)


# -- what an order changes -------------------------------------------------------------------------


def captured(path: Path, order: str = "raster", selection: Selection | None = None) -> Capture:
    grid = TokenGrid((8, 16, 16), order=order)
    chosen = selection or Selection()
    spec = CaptureSpec(grid, ((0, 0),), heads=2, head_dim=32, source="synthetic", selection=chosen)
    made = synthetic_qkv(TokenGrid((8, 16, 16)), heads=2, head_dim=32, smoothness=3.0)
    q, k, v = (grid.arrange(x) for x in (made.q, made.k, made.v))
    with CaptureWriter(path, spec) as writer:
        writer.write(0, 0, time=0.5, q=q[:, chosen.rows(grid.tokens)], k=k, v=v)
    return open_capture(path)


def test_compact_blocks_lower_the_error_of_smooth_fields_at_equal_tau(tmp_path: Path):
    effect = order_effect(captured(tmp_path / "a"), [0.5, 1.0, 1.5])
    raster, tile = (effect.lines(order) for order in ("raster", "tile"))
    for one, other in zip(raster, tile, strict=True):
        assert 0 < other.density < 1
        assert other.relative_l2 < one.relative_l2
    assert effect.extent("raster") == (1, 4, 16)
    assert effect.extent("tile") == (4, 4, 4)


def test_the_effect_does_not_depend_on_the_order_of_the_capture(tmp_path: Path):
    one = order_effect(captured(tmp_path / "a"), [1.0])
    other = order_effect(captured(tmp_path / "b", "morton"), [1.0])
    assert one.rows == other.rows


def test_density_and_error_are_those_of_every_head(tmp_path: Path):
    effect = order_effect(captured(tmp_path / "a"), [1.0], orders=["tile"])
    assert [(row.order, row.head) for row in effect.rows] == [("tile", 0), ("tile", 1)]
    mean = sum(row.density for row in effect.rows) / 2
    assert effect.lines("tile")[0].density == pytest.approx(mean)
    assert effect.impls == ("eager",)
    assert effect.lines("tile", 0) == effect.lines("tile")
    with pytest.raises(ValueError, match=r"layer=3: the capture has layers \[0\]"):
        effect.lines("tile", 3)


def test_layers_may_differ_so_each_is_told():
    rows = [
        OrderRow("tile", layer, 0, 0, 0, 1.0, density, error)
        for layer, density, error in ((2, 0.25, 0.125), (5, 0.75, 0.375))
    ]
    effect = OrderEffect("a", TokenGrid((8, 16, 16)), ("tile",), (1.0,), rows, ("eager",))
    assert effect.layers == [2, 5]
    assert effect.lines("tile", 5) == [("tile", 1.0, 0.75, 0.375)]
    assert effect.lines("tile") == [("tile", 1.0, 0.5, 0.25)]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"orders": ["hilbert"]}, ValueError, "orders='hilbert'"),
        ({"orders": ["tile", "tile"]}, ValueError, "at most once"),
        ({"orders": []}, ValueError, "at most once"),
        ({"taus": [1.0, 0.5]}, ValueError, "must rise strictly"),
        ({"taus": []}, ValueError, "taus is empty"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path: Path, changes, error, message: str):
    settings = {"taus": [1.0], **changes}
    with pytest.raises(error, match=message):
        order_effect(captured(tmp_path / "a"), settings.pop("taus"), **settings)


def test_a_capture_of_chosen_rows_is_refused_with_the_reason(tmp_path: Path):
    rows = captured(tmp_path / "a", selection=Selection(query_blocks=(0, 1)))
    with pytest.raises(ValueError, match="needs every query row"):
        order_effect(rows, [1.0])


def test_the_figure_has_a_panel_for_equal_tau_and_one_for_equal_density(tmp_path: Path):
    effect = order_effect(captured(tmp_path / "a"), [0.5, 1.0])
    figure = new_figure(11.5, 4)
    draw_orders(figure, {order: effect.lines(order) for order in effect.orders}, effect.title)
    titles = [ax.get_title(loc="left") for ax in figure.axes]
    assert titles == ["density at equal tau", "error at equal tau", "error at equal density"]
    assert to_png(figure)


def test_the_order_command_prints_every_order_and_draws_them(tmp_path: Path):
    capture, out = captured(tmp_path / "a.safetensors"), tmp_path / "orders.png"
    arguments = ["order", str(capture.path), "--taus", "1,0.5", "--out", str(out)]
    done = CliRunner().invoke(cli.app, arguments)
    assert done.exit_code == 0, done.output
    assert "tile: a block of 64 tokens spans 4.0 x 4.0 x 4.0 (t, h, w)" in done.output
    assert out.is_file()
    again = CliRunner().invoke(cli.app, arguments)
    assert isinstance(again.exception, FileExistsError)
