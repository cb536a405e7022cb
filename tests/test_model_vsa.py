"""VSA in the video model: the gate, the form that can be trained, fine-tuning, comparison."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch

import blockattn
from workbench.models.compare_vsa import compare, summary
from workbench.models.dit import AttentionCall, DiTConfig, VideoDiT, dense_attention
from workbench.models.sampler import sample
from workbench.models.train import main as train_command
from workbench.models.train import train
from workbench.models.trainer import TrainConfig, Trainer
from workbench.models.vsa_training import differentiable_vsa, vsa_for_training
from workbench.models.weights import load_model, save_model, training_record
from workbench.paths import VSA_WEIGHTS, data_dir

TINY = DiTConfig(depth=2, width=32, heads=2, head_dim=16)
GATED = replace(TINY, gate=True)
SETTINGS = TrainConfig(
    model=GATED, sparsity=0.5, steps=4, batch=2, warmup=1, learning_rate=5e-3, log_every=2,
    grids=(((4, 8, 4), 1.0),),
)  # fmt: skip
GRIDS = [(4, 8, 8), (8, 8, 8), (5, 4, 4), (5, 7, 6), (1, 3, 9)]


def filled(config: DiTConfig) -> VideoDiT:
    """A model without zero layers, so that every path matters."""
    torch.manual_seed(0)
    model = VideoDiT(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def inputs(grid: tuple[int, int, int], *, dtype=torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(math.prod(grid))
    shape = (2, math.prod(grid), 2, 16)
    return [2 * torch.randn(shape, generator=generator, dtype=dtype) for _ in range(4)]


def noise(*size: int) -> torch.Tensor:
    return torch.randn(*size, 3, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("grid", GRIDS)
def test_the_trainable_form_equals_video_sparse_attention(grid, sparsity):
    q, k, v, gate = inputs(grid)
    ours = differentiable_vsa(q, k, v, grid=grid, gate=gate, sparsity=sparsity)
    known = blockattn.video_sparse_attention(
        q, k, v, grid=grid, gate_compress=gate, sparsity=sparsity, impl="reference"
    )
    torch.testing.assert_close(ours, known, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("grid", GRIDS)
def test_no_gate_is_a_gate_of_zero(grid):
    q, k, v, gate = inputs(grid)
    shut = torch.zeros_like(gate)
    without = differentiable_vsa(q, k, v, grid=grid, gate=None, sparsity=0.5)
    assert torch.equal(without, differentiable_vsa(q, k, v, grid=grid, gate=shut, sparsity=0.5))


@pytest.mark.parametrize("grid", GRIDS)
def test_sparsity_zero_without_gate_is_dense(grid):
    q, k, v, _ = inputs(grid)
    call = AttentionCall(0, None, None, grid)
    torch.testing.assert_close(
        vsa_for_training(0.0)(q, k, v, call), dense_attention(q, k, v, call), atol=2e-6, rtol=1e-5
    )


@pytest.mark.parametrize("grid", [(4, 8, 4), (5, 4, 3)])
def test_gradients_are_those_of_the_function(grid):
    q, k, v, gate = (x[:1].requires_grad_() for x in inputs(grid, dtype=torch.float64))

    def small(scale, *tensors):
        return differentiable_vsa(*tensors[:3], grid=grid, gate=tensors[3], sparsity=0.6) * scale

    scale = torch.randn(1, q.shape[1], 1, 1, dtype=torch.float64)
    assert torch.autograd.gradcheck(small, (scale, q, k, v, gate), fast_mode=True)
    out = differentiable_vsa(q, k, v, grid=grid, gate=gate, sparsity=0.6)
    grads = torch.autograd.grad(out.square().sum(), (q, k, v, gate))
    assert all(g.abs().max() > 0 for g in grads)


def test_keys_outside_the_selection_matter_to_the_coarse_branch_alone():
    grid = (4, 4, 16)
    q, k, v, gate = inputs(grid)
    other = v.clone()
    other[:, 0] += 1  # one token of the first cube
    one = {"grid": grid, "sparsity": 1.0}
    route = blockattn.vsa_route(q, k, grid=grid, sparsity=1.0).dense()
    blind = ~route[..., 0]  # query cubes that do not attend to the first cube, [B, H, N]
    assert blind.any()
    layout = blockattn.cube_layout(blockattn.TokenGrid(grid), q.device)
    rows = blind.transpose(1, 2)[:, layout.slots // 64]
    fine = [differentiable_vsa(q, k, x, gate=None, **one)[rows] for x in (v, other)]
    both = [differentiable_vsa(q, k, x, gate=gate, **one)[rows] for x in (v, other)]
    assert torch.equal(*fine)
    assert not torch.equal(*both)


def test_a_grid_of_another_size_is_refused():
    q, k, v, gate = inputs((4, 4, 4))
    with pytest.raises(ValueError, match=r"grid=\(4, 4, 5\)"):
        differentiable_vsa(q, k, v, grid=(4, 4, 5), gate=gate, sparsity=0.5)
    with pytest.raises(ValueError, match="sparsity"):
        differentiable_vsa(q, k, v, grid=(4, 4, 4), gate=gate, sparsity=1.5)


def test_a_model_without_gate_has_no_gate_to_give():
    seen = []
    with torch.no_grad():
        filled(TINY)(noise(1, 4, 8, 8), 0.5, torch.tensor([0]), attention=_record(seen))
    assert [call.gate for call in seen] == [None, None]


def test_every_call_carries_the_gate_of_its_block_also_under_guidance():
    seen = []
    sample(filled(GATED), labels=[0, 1], grid=(2, 2, 3), steps=1, attention=_record(seen))
    assert [call.gate.shape for call in seen] == 2 * [(4, 12, 2, 16)]
    assert not torch.equal(seen[0].gate, seen[1].gate)
    assert seen[0] == AttentionCall(0, 0, 1.0, (2, 2, 3))


def _record(seen):
    def attention(q, k, v, call):
        seen.append(call)
        assert call.gate is None or call.gate.dtype == q.dtype
        return dense_attention(q, k, v, call)

    return attention


def test_a_fresh_gate_is_shut():
    config = replace(GATED, depth=1)
    model, video = VideoDiT(config), noise(1, 8, 16, 16)
    calls = []
    model(video, 0.5, torch.tensor([0]), attention=_record(calls))
    assert calls[0].gate.requires_grad
    assert not calls[0].gate.any()


def test_the_gate_decides_only_where_attention_uses_it():
    model, video, label = filled(GATED), noise(1, 8, 32, 32), torch.tensor([0])
    plain = VideoDiT(TINY).eval()
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if "gate" not in k})
    with torch.no_grad():
        assert torch.equal(model(video, 0.5, label), plain(video, 0.5, label))
        sparse = [m(video, 0.5, label, attention=vsa_for_training(0.7)) for m in (model, plain)]
    assert not torch.allclose(*sparse, atol=1e-3)


def test_a_gate_that_is_no_bool_is_refused():
    with pytest.raises(ValueError, match="gate=1"):
        DiTConfig(gate=1)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"sparsity": 1.2, "model": GATED}, "sparsity=1.2"),
        ({"sparsity": math.nan, "model": GATED}, "sparsity=nan"),
        ({"sparsity": 0.5, "model": TINY}, "set both or neither"),
        ({"model": GATED}, "set both or neither"),
    ],
)
def test_gate_and_sparsity_go_together(wrong, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**wrong)


def test_fine_tuning_starts_from_dense_weights_and_opens_the_gate(tmp_path):
    start = tmp_path / "dense.safetensors"
    save_model(filled(TINY), start, dtype=torch.float32, record={"steps": 7, "settings": {}})
    trainer = Trainer(SETTINGS, "cpu")
    trainer.start_from(start)
    dense = load_model(start).state_dict()
    assert all(torch.equal(trainer.model.state_dict()[k], v) for k, v in dense.items())
    record = train(SETTINGS, tmp_path / "run", device="cpu", sheet=False, start_from=start)
    assert record["started_from"] == {"file": "dense.safetensors", "steps": 7}
    tuned = load_model(tmp_path / "run" / "tiny_video_dit_vsa.safetensors")
    assert tuned.config.gate
    assert all(block.to_gate_compress.weight.any() for block in tuned.layers())
    assert training_record(tmp_path / "run" / "tiny_video_dit_vsa.safetensors")["settings"][
        "sparsity"
    ] == 0.5  # fmt: skip


def test_weights_of_another_size_are_no_start(tmp_path):
    save_model(VideoDiT(replace(TINY, depth=1)), tmp_path / "m.safetensors")
    with pytest.raises(ValueError, match="gate alone"):
        Trainer(SETTINGS, "cpu").start_from(tmp_path / "m.safetensors")


def test_training_steps_with_vsa_lower_the_loss_of_a_batch():
    trainer = Trainer(SETTINGS, "cpu")
    video, label = trainer.batch()
    losses = []
    for _ in range(30):
        trainer.step = 0  # keep the learning rate up
        losses.append(trainer.train_step(video, label).item())
    assert sum(losses[-8:]) < 0.9 * sum(losses[:8])


def test_the_command_refuses_a_sparsity_out_of_range(tmp_path):
    with pytest.raises(ValueError, match="sparsity=2"):
        train_command(["--out", str(tmp_path), "--vsa", "2"])


def test_the_comparison_pairs_its_figures(tmp_path):
    base, tuned = tmp_path / "base.safetensors", tmp_path / "tuned.safetensors"
    save_model(filled(TINY), base)
    save_model(filled(GATED), tuned, record={"settings": {"sparsity": 0.5}})
    options = {"videos": 3, "grid": (4, 8, 4), "times": (0.2, 0.9), "device": "cpu"}
    report = compare(base, tuned, batch=2, **options)
    assert json.loads(json.dumps(report))["kept_cubes"] == 1
    methods = report["methods"]
    assert len({method["mean"] for method in methods.values()}) >= 4
    for method in methods.values():
        assert method["mean"] == pytest.approx(sum(method["by_time"]) / 2)
    difference = report["differences"]["tuned_vsa - training_free_top_k"]["mean"]
    expected = methods["tuned_vsa"]["mean"] - methods["training_free_top_k"]["mean"]
    assert difference == pytest.approx(expected)
    assert compare(base, tuned, batch=2, **options) == report


def test_dense_training_free_and_sparse_agree_when_nothing_is_dropped(tmp_path):
    base, tuned = tmp_path / "base.safetensors", tmp_path / "tuned.safetensors"
    save_model(filled(TINY), base)
    save_model(filled(GATED), tuned)
    report = compare(
        base, tuned, sparsity=0.0, videos=2, grid=(4, 8, 4), times=(0.5,), device="cpu"
    )
    means = {name: method["mean"] for name, method in report["methods"].items()}
    assert means["training_free_top_k"] == pytest.approx(means["dense"], rel=1e-4)
    assert means["tuned_without_gate"] == pytest.approx(means["tuned_dense"], rel=1e-4)


def test_standard_errors_are_over_videos_and_differences_are_paired():
    dense = torch.tensor([[1.0, 1.0], [2.0, 4.0], [5.0, 3.0]])
    report = summary({"dense": dense, "training_free_top_k": dense + 4, "tuned_vsa": dense + 1})
    assert report["methods"]["dense"]["mean"] == pytest.approx(8 / 3)
    assert report["methods"]["dense"]["standard_error"] == pytest.approx(
        torch.tensor([1.0, 3.0, 4.0]).std().item() / math.sqrt(3)
    )
    assert report["differences"]["tuned_vsa - dense"]["mean"] == pytest.approx(1)
    assert report["differences"]["tuned_vsa - dense"]["standard_error"] == pytest.approx(0)
    assert report["share_of_gap_closed"] == pytest.approx(0.75)
    assert report["videos_where_tuned_vsa_beats_top_k"] == 1


def test_weights_without_gate_cannot_be_compared_as_tuned(tmp_path):
    save_model(VideoDiT(TINY), tmp_path / "m.safetensors")
    with pytest.raises(ValueError, match="--vsa"):
        compare(tmp_path / "m.safetensors", tmp_path / "m.safetensors", device="cpu")


def test_the_bundled_dense_weights_have_no_gate_and_still_load():
    assert not load_model(data_dir() / "tiny_video_dit.safetensors").config.gate


def test_the_gate_fits_into_12_megabytes_in_bf16():
    assert 2 * sum(p.numel() for p in VideoDiT(DiTConfig(gate=True)).parameters()) < 12_000_000


# -- the bundled weights ------------------------------------------------------------------------


def test_the_bundled_fine_tuned_weights_are_small_have_a_gate_and_sample():
    path = data_dir() / VSA_WEIGHTS
    assert path.stat().st_size <= 12_000_000
    tuned = load_model(path)
    assert tuned.config.gate
    assert any(block.to_gate_compress.weight.abs().max() > 0 for block in tuned.blocks)
    assert training_record(path)["settings"]["sparsity"] == 0.875
    video = sample(tuned, labels=["disc"], grid=(4, 4, 4), steps=2, guidance=1.0)
    assert torch.isfinite(video).all()
