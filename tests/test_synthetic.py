"""Synthetic q, k, v: structured in (t, h, w), reproducible, always labelled synthetic."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cosine_similarity
from typer.testing import CliRunner

from blockattn import TokenGrid
from workbench import cli
from workbench.capture import open_capture
from workbench.curves import sol_curve
from workbench.fields import lattice_weights
from workbench.synthetic import SyntheticPlan, random_qkv, synthetic_qkv, write_synthetic

GRID = TokenGrid((4, 8, 12))


def likeness(x: torch.Tensor, axis: int, distance: int, grid: TokenGrid = GRID) -> float:
    """Mean cosine between tokens that lie `distance` apart along t, h or w, of head 0."""
    field = grid.restore(x)[0, :, 0].float().reshape(*grid.shape, -1)
    near, far = (field.narrow(axis, start, grid.shape[axis] - distance) for start in (0, distance))
    return float(cosine_similarity(near, far, dim=-1).mean())


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_neighbours_are_alike_and_distant_tokens_are_not(axis: int):
    q = synthetic_qkv(GRID, smoothness=2.0, noise=0.3).q
    near, far = likeness(q, axis, 1), likeness(q, axis, GRID.shape[axis] - 1)
    assert near > 0.5
    assert near > far + 0.2


def test_smoothness_is_the_reach_of_the_likeness():
    short, long = (synthetic_qkv(GRID, smoothness=s).k for s in (1.5, 6.0))
    assert likeness(long, 2, 3) > likeness(short, 2, 3) + 0.2


def test_noise_lowers_the_likeness_and_random_tensors_have_none():
    quiet, loud = (likeness(synthetic_qkv(GRID, noise=n).v, 2, 1) for n in (0.0, 2.0))
    assert quiet > loud + 0.3
    assert abs(likeness(random_qkv(GRID).v, 2, 1)) < 0.05


def test_query_and_key_of_a_token_are_alike_but_not_equal():
    made = synthetic_qkv(GRID)
    own = cosine_similarity(made.q.float(), made.k.float(), dim=-1)
    assert own.mean() > 0.6
    assert not torch.equal(made.q, made.k)


def test_heads_differ_in_the_density_of_their_route():
    made = synthetic_qkv(TokenGrid((8, 16, 16)), heads=4)
    density = sol_curve(made.q, made.k, [1.0]).per_head.flatten()
    assert len(set(density.tolist())) == 4
    assert float(density.max() - density.min()) > 0.05
    assert float(density.max()) < 0.6


def test_the_order_of_the_tokens_changes_their_places_alone():
    raster, morton = (
        TokenGrid((4, 4, 8), prefix=3, suffix=2, order=o) for o in ("raster", "morton")
    )
    assert torch.equal(morton.restore(synthetic_qkv(morton).k), synthetic_qkv(raster).k)


@given(
    shape=st.tuples(*[st.integers(1, 7)] * 3),
    smoothness=st.floats(0.2, 20),
    seed=st.integers(0, 2**31),
)
def test_any_grid_gives_finite_reproducible_tensors(shape, smoothness: float, seed: int):
    grid = TokenGrid(shape, prefix=1)
    one, two = (
        synthetic_qkv(grid, heads=3, head_dim=8, batch=2, smoothness=smoothness, seed=seed)
        for _ in range(2)
    )
    for x, y in zip((one.q, one.k, one.v), (two.q, two.k, two.v)):
        assert x.shape == (2, grid.tokens, 3, 8)
        assert x.dtype == torch.bfloat16
        assert bool(torch.isfinite(x).all())
        assert torch.equal(x, y)


@given(tokens=st.integers(1, 50), spacing=st.floats(1, 80))
def test_interpolation_keeps_the_variance_of_the_noise(tokens: int, spacing: float):
    weights = lattice_weights(tokens, spacing)
    assert weights.shape[0] == tokens
    assert torch.allclose(weights.norm(dim=1), torch.ones(tokens), atol=1e-5)
    assert int((weights > 0).sum(dim=1).max()) <= 2


def test_seeds_heads_and_samples_are_independent():
    made, other = synthetic_qkv(GRID, batch=2), synthetic_qkv(GRID, batch=2, seed=1)
    assert not torch.equal(made.q, other.q)
    assert not torch.equal(made.q[0], made.q[1])
    assert not torch.equal(made.q[:, :, 0], made.q[:, :, 1])


def test_random_tensors_are_standard_normal():
    made = random_qkv(TokenGrid((4, 16, 16)), dtype=torch.float32)
    for x in (made.q, made.k, made.v):
        assert abs(float(x.mean())) < 0.01
        assert abs(float(x.std()) - 1) < 0.01
    assert not torch.equal(made.q, made.k)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"smoothness": 0}, ValueError, "smoothness=0: must be greater than 0"),
        ({"noise": -0.1}, ValueError, "noise=-0.1"),
        ({"noise": float("nan")}, ValueError, "noise=nan"),
        ({"heads": 0}, ValueError, "heads=0"),
        ({"head_dim": True}, TypeError, "head_dim=True"),
        ({"seed": -1}, ValueError, "seed=-1"),
        ({"seed": 2**63}, ValueError, "seed=9223372036854775808"),
        ({"head_dim": 257}, ValueError, "head_dim=257: must be .* at most 256"),
        ({"batch": 1.5}, TypeError, "batch=1.5"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: dict, error, message: str):
    with pytest.raises(error, match=message):
        synthetic_qkv(GRID, **changes)
    if "batch" not in changes:
        with pytest.raises(error, match=message):
            SyntheticPlan(GRID, **changes)


@pytest.mark.parametrize("make", [synthetic_qkv, random_qkv])
def test_a_shape_that_is_no_grid_is_refused(make):
    with pytest.raises(TypeError, match=r"grid=\(4, 8, 12\): expected a blockattn\.TokenGrid"):
        make((4, 8, 12))


def test_a_synthetic_capture_says_so_in_source_title_and_model(tmp_path: Path):
    capture = write_synthetic(tmp_path / "s.safetensors", SyntheticPlan(GRID, seed=3))
    assert capture.source == "synthetic"
    assert "synthetic" in capture.title
    assert capture.metadata["model"].startswith("none")
    assert torch.equal(capture.load(0, 0).q, synthetic_qkv(GRID, seed=3).q)
    capture.verify()


def test_the_synth_command_writes_a_labelled_capture(tmp_path: Path):
    out = tmp_path / "s.safetensors"
    options = ["--grid", "2,5,7", "--heads", "3", "--head-dim", "16", "--order", "tile"]
    done = CliRunner().invoke(cli.app, ["synth", "--out", str(out), *options])
    assert done.exit_code == 0, done.output
    assert f"will take {out.stat().st_size:,} bytes" in done.output
    assert "synthetic" in done.output
    capture = open_capture(out)
    assert capture.grid == TokenGrid((2, 5, 7), order="tile")
    assert (capture.heads, capture.head_dim) == (3, 16)
