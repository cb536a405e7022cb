"""Probes: real calls whose errors do not compound, and the attention mass that they keep."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from blockattn import BlockRoute, sol_route
from tests.calibrate_inputs import SAMPLES, small_model
from workbench.calibrate.probes import CallProbe, ProbeRow, Probes, probe_setting
from workbench.calibrate.recall import best_recall, block_mass, recall
from workbench.calibrate.setting import Form, Setting
from workbench.models import AttentionCall, dense_attention
from workbench.probe import probe_skip, probe_sol


def brute_force(q: Tensor, k: Tensor, block: tuple[int, int]) -> Tensor:
    """Mass of block pairs in float64 from the whole matrix, pair by pair."""
    q, k = q.double().transpose(1, 2), k.double().transpose(1, 2)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    weights = (q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])).softmax(dim=-1)
    rows = weights.split(block[0], 2)
    pairs = [[part.sum(dim=(2, 3)) for part in row.split(block[1], 3)] for row in rows]
    mass = torch.stack([torch.stack(row, dim=-1) for row in pairs], dim=-2)
    return mass / q.shape[2]


@pytest.mark.parametrize("block", [(64, 64), (128, 128), (16, 48)])
@pytest.mark.parametrize("heads", [(2, 2), (4, 2)])
def test_mass_equals_the_whole_matrix(block: tuple[int, int], heads: tuple[int, int]):
    q, k = torch.randn(2, 200, heads[0], 8) * 2, torch.randn(2, 200, heads[1], 8)
    mass = block_mass(q, k, block)
    torch.testing.assert_close(mass.double(), brute_force(q, k, block), rtol=1e-5, atol=1e-8)
    assert mass.sum(dim=(2, 3)).flatten().tolist() == pytest.approx([1.0] * 2 * heads[0])


def test_rows_in_chunks_make_the_same_mass(monkeypatch: pytest.MonkeyPatch):
    q, k = torch.randn(1, 300, 1, 8), torch.randn(1, 300, 1, 8)
    whole = block_mass(q, k, (64, 64))
    monkeypatch.setattr("workbench.calibrate.recall.SCORES_AT_ONCE", 1)
    torch.testing.assert_close(block_mass(q, k, (64, 64)), whole, rtol=1e-6, atol=1e-9)


def test_equal_scores_spread_mass_by_the_length_of_the_blocks():
    q = torch.zeros(1, 160, 1, 4)
    mass = block_mass(q, q, (64, 64))[0, 0]
    lengths = torch.tensor([64.0, 64.0, 32.0]) / 160
    torch.testing.assert_close(mass, lengths[:, None] * lengths[None, :])


@given(seed=st.integers(0, 300), tau=st.floats(-1, 3), tokens=st.sampled_from([128, 200, 512]))
def test_no_route_beats_the_best_router_of_its_budget(seed: int, tau: float, tokens: int):
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(1, tokens, 2, 8, generator=generator) * 2 for _ in range(2))
    route = sol_route(q, k, tau=tau)
    mass = block_mass(q, k, route.block)
    ours, best = recall(mass, route), best_recall(mass, route)
    assert bool((ours <= best + 1e-9).all())
    assert bool((best <= 1).all() and (ours > 0).all())
    assert bool(
        (best >= route.density_per_head() - 1e-6).all()
    )  # the best blocks are above average


def test_the_route_of_the_largest_masses_is_the_best():
    q, k = torch.randn(1, 512, 2, 8) * 3, torch.randn(1, 512, 2, 8)
    mass = block_mass(q, k, (64, 64))
    chosen = torch.zeros_like(mass, dtype=torch.bool)
    chosen.scatter_(-1, mass.topk(3, dim=-1).indices, True)
    route = BlockRoute.from_dense(chosen, seqlens=(512, 512))
    torch.testing.assert_close(recall(mass, route), best_recall(mass, route))
    full = BlockRoute.full((1, 2), seqlens=(512, 512))
    torch.testing.assert_close(recall(mass, full), torch.ones(1, 2).double(), rtol=1e-6, atol=1e-6)


def test_mass_of_other_blocks_is_refused():
    q = torch.randn(1, 256, 1, 8)
    with pytest.raises(ValueError, match=r"compute the mass with block=\(64, 64\)"):
        recall(block_mass(q, q, (128, 128)), sol_route(q, q))


@pytest.mark.parametrize("algorithm", ["sol_attn", "skip_softmax"])
def test_a_probe_returns_dense_so_that_errors_do_not_compound(algorithm: str):
    probe = CallProbe(Setting(algorithm, Form(), (-0.5,)), "ring", 5)
    probed = SAMPLES.run(small_model(), 0, probe)
    assert torch.equal(probed, SAMPLES.run(small_model(), 0, dense_attention))
    assert len(probe.rows) == 2 * 3 * 2  # layers, steps, heads


@pytest.mark.parametrize("algorithm", ["sol_attn", "skip_softmax"])
def test_a_row_holds_what_a_real_call_gives(algorithm: str):
    q, k, v = (torch.randn(1, 300, 2, 16) * 2 for _ in range(3))
    call = AttentionCall(3, 7, 0.5, (3, 10, 10))
    setting = Setting(algorithm, Form(), (-0.25,))
    probe = CallProbe(setting, "ring", 5)
    dense = probe(q, k, v, call)
    if algorithm == "sol_attn":
        real = probe_sol(q, k, v, -0.25, dense=dense)
    else:
        real = probe_skip(q, k, v, 2**-0.25, dense=dense)
    for row in probe.rows:
        assert (row.layer, row.step, row.time, row.label, row.seed) == (3, 7, 0.5, "ring", 5)
        assert row.relative_l2 == float(real.error.relative_l2[0, row.head])
        assert row.density == float(real.density_per_head[0, row.head])
        assert row.recall <= row.best_recall + 1e-9


def test_calls_that_stay_dense_have_no_row():
    setting = Setting("sol_attn", Form(dense_layers=(0,), cutoff=0.9), (0.5,))
    probes = probe_setting(small_model(), setting, SAMPLES, mass=False)
    assert {row.layer for row in probes.rows} == {1}
    assert max(row.time for row in probes.rows) < 0.9
    assert math.isnan(probes.rows[0].recall)
    table = probes.table("relative_l2")
    assert bool(torch.from_numpy(table)[0].isnan().all())


def row(error: float, layer: int = 0, step: int = 0) -> ProbeRow:
    return ProbeRow("ring", 0, layer, step, 0.5, 0, 0, 1.0, 0.2, error, 1.0, 0.0, 0.5, 0.6)


def test_the_worst_come_first_and_what_is_not_finite_before_all():
    probes = Probes([row(0.1), row(math.inf), row(0.4), row(math.nan)])
    errors = [item.relative_l2 for item in probes.worst()]
    assert errors[2:] == [0.4, 0.1]
    assert not any(map(math.isfinite, errors[:2]))
    assert len(probes.worst(1)) == 1


def test_a_table_is_the_mean_of_its_cells():
    probes = Probes([row(0.1, 0, 1), row(0.3, 0, 1), row(0.5, 2, 0)])
    table = probes.table("relative_l2")
    assert table[0, 1] == pytest.approx(0.2)
    assert table[2, 0] == 0.5
    assert math.isnan(table[1, 1])
    with pytest.raises(ValueError, match="name='label'"):
        probes.column("label")


def test_a_call_outside_a_sampling_is_refused():
    q = torch.randn(1, 64, 2, 16)
    probe = CallProbe(Setting("sol_attn", Form(), (1.0,)))
    with pytest.raises(ValueError, match="no step or no denoising time"):
        probe(q, q, q, AttentionCall(0, None, 0.5, (1, 8, 8)))
