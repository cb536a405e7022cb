"""Pictures and figures of SkipSoftmax, VSA and quantised attention: what they must show."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blockattn import TokenGrid, attend, cube_layout, kept_cubes, vsa_route
from blockattn.quant_formats import quantise_nvfp4
from blockattn.vsa import CUBE
from workbench import views
from workbench.capture import CaptureSpec, CaptureWriter, open_capture
from workbench.mechanisms import cubes
from workbench.mechanisms.combinations import combination_errors
from workbench.mechanisms.formats import ERROR_COLUMNS, Format, format_errors, format_sizes
from workbench.mechanisms.probes import probe_quantised, probe_vsa
from workbench.mechanisms.vsa import NAMES, vsa_effect
from workbench.models import DiTConfig, VideoDiT, save_model

PNG = b"\x89PNG\r\n\x1a\n"
GRIDS = st.tuples(*[st.integers(1, 9)] * 3)
SMALL = (5, 6, 7)  # ragged along every axis


def texts(ax) -> str:
    legend = [] if ax.get_legend() is None else ax.get_legend().get_texts()
    own = [ax.title, ax._left_title, ax.xaxis.label, ax.yaxis.label, *ax.texts, *legend]
    return "\n".join(text.get_text() for text in own)


def qkv(tokens: int = 210, heads: int = 2, dim: int = 32, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(1, tokens, heads, dim, generator=generator).to(dtype) for _ in range(3)]


# -- cubes ---------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(GRIDS, st.sampled_from(["raster", "tile", "morton"]))
def test_a_token_lies_in_the_cube_of_its_position_whatever_the_order(shape, order):
    index = cubes.cube_index(TokenGrid(shape, order=order))
    _, rows, columns = (-(-size // 4) for size in shape)
    for t, h, w in itertools.product(*map(range, shape)):
        assert index[t, h, w] == (t // 4 * rows + h // 4) * columns + w // 4


@settings(max_examples=25, deadline=None)
@given(GRIDS)
def test_compaction_keeps_every_token_and_fills_from_the_left(shape):
    grid = TokenGrid(shape)
    natural, stored = cubes.filled_slots(grid)
    sizes = cube_layout(grid, torch.device("cpu")).sizes
    assert torch.equal(natural.sum(1), sizes.long())
    assert torch.equal(stored, torch.arange(CUBE) < sizes[:, None])


def test_a_ragged_cube_has_holes_before_compaction():
    natural, _ = cubes.filled_slots(TokenGrid((4, 4, 3)))
    assert torch.equal(natural[0], torch.tensor([True, True, True, False] * 16))


def test_chosen_cubes_are_painted_where_their_tokens_lie():
    grid = TokenGrid(SMALL)
    count = cube_layout(grid, torch.device("cpu")).count
    row = torch.zeros(count, dtype=torch.bool)
    row[[0, count - 1]] = True
    painted = cubes.cube_tokens(row, grid)
    assert torch.equal(painted, cubes.one_cube(0, grid) | cubes.one_cube(count - 1, grid))
    assert int(painted.sum()) == 64 + 1 * 2 * 3


@pytest.mark.parametrize("row", [torch.zeros(3, dtype=torch.bool), torch.zeros(8)])
def test_a_row_of_another_length_or_dtype_is_refused(row):
    with pytest.raises(ValueError, match=r"expected bool \(8,\)"):
        cubes.cube_tokens(row, TokenGrid(SMALL))


@pytest.mark.parametrize(
    ("index", "error", "message"),
    [
        (-1, ValueError, "index=-1: must be at least 0 and at most 7"),
        (8, ValueError, "index=8: must be at least 0 and at most 7"),
        (True, TypeError, "index=True: expected an integer"),
        (1.0, TypeError, "index=1.0: expected an integer"),
    ],
)
def test_a_cube_that_is_not_there_is_refused(index, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        cubes.one_cube(index, TokenGrid(SMALL))


@pytest.mark.parametrize("sparsity", [0.3, 0.5, 0.9])
def test_the_largest_coarse_shares_are_the_cubes_that_vsa_keeps(sparsity):
    q, k, _ = qkv()
    shares = cubes.coarse_attention(q, k, grid=SMALL)
    assert torch.allclose(shares.sum(-1), torch.ones(()))
    route = vsa_route(q, k, grid=SMALL, sparsity=sparsity)
    keep = kept_cubes(sparsity, shares.shape[-1])
    chosen = torch.zeros_like(shares, dtype=torch.bool)
    chosen.scatter_(-1, shares.topk(keep).indices, True)
    assert torch.equal(chosen, route.dense())


def test_the_line_under_the_cubes_counts_cubes_and_padding():
    said = cubes.describe_cubes(TokenGrid((7, 15, 18)))
    for text in ("1,890 tokens in 40 cubes (2 x 4 x 5)", "12 of them full", "670 of 2,560 slots"):
        assert text in said


def test_cubes_are_numbered_and_ragged_ones_have_their_size():
    grid = TokenGrid((2, 5, 8))
    figure = views.new_figure(*views.cubes_size(grid.shape))
    views.draw_cubes(figure, cubes.cube_index(grid), title="a grid")
    shown = [texts(ax).split("\n") for ax in figure.axes]
    assert len(shown) == 2
    for words in shown:
        assert {"0", "(32)", "2", "(8)"} <= set(words)
    assert views.to_png(figure).startswith(PNG)


def test_slots_show_the_share_of_padding():
    ax = views.new_figure().subplots()
    views.draw_slots(ax, cubes.filled_slots(TokenGrid((4, 4, 6)))[1], "stored")
    assert "padding  25.0%" in texts(ax)
    assert "slot in the cube" in texts(ax)


def test_a_coarse_map_frames_what_is_kept_and_marks_the_query():
    figure = views.new_figure()
    ax = figure.subplots()
    shares = torch.softmax(torch.randn(6, 6, generator=torch.Generator().manual_seed(0)), -1)
    kept = torch.eye(6, dtype=torch.bool)
    views.draw_coarse(ax, shares, kept, query=2, title="head 0")
    assert len(ax.collections) == 2
    assert "query cube" in texts(ax)
    assert any("white frames: kept" in other.get_ylabel() for other in figure.axes)
    with pytest.raises(ValueError, match=r"kept: shape \(3, 3\), but shares has \(6, 6\)"):
        views.draw_coarse(ax, shares, torch.eye(3))


@pytest.mark.parametrize("shares", [torch.full((4, 4), 0.25), torch.eye(4)])
def test_a_coarse_map_draws_uniform_and_one_hot_shares(shares):
    ax = views.new_figure().subplots()
    views.draw_coarse(ax, shares)
    assert views.to_png(ax.figure).startswith(PNG)


# -- probes --------------------------------------------------------------------------------------


def test_vsa_without_sparsity_and_gate_is_dense_and_with_it_is_not():
    q, k, v = qkv()
    assert probe_vsa(q, k, v, 0.0, grid=SMALL).error.total.relative_l2 < 1e-5
    sparse = probe_vsa(q, k, v, 0.75, grid=SMALL, dense=attend(q, k, v))
    assert sparse.density == 0.25
    assert sparse.error.total.relative_l2 > 0.01
    assert sparse.dense_impl == "given"


def test_a_gate_adds_the_coarse_branch():
    q, k, v = qkv()
    open_, shut = (
        probe_vsa(q, k, v, 0.5, grid=SMALL, gate_compress=torch.full_like(q, gate)).error.total
        for gate in (1.0, 0.0)
    )
    assert open_.relative_l2 != shut.relative_l2


def test_a_quantised_probe_says_what_was_emulated():
    probe = probe_quantised(*qkv(dtype=torch.bfloat16), qk_dtype="nvfp4")
    assert "nvfp4 QK" in probe.trace.emulated
    assert 0.001 < probe.error.total.relative_l2 < 0.5


# -- formats -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (Format(), "BF16 QK + FP8 V"),
        (Format("mxfp8"), "MXFP8 QK + FP8 V, smoothed"),
        (Format("nvfp4", "channel", smooth=False), "NVFP4 QK + FP8 V per channel, not smoothed"),
        (Format(smooth=True, round_p=True), "BF16 QK + FP8 V, smoothed, P rounded"),
    ],
)
def test_a_format_is_named_by_what_it_quantises(kind, name):
    assert kind.name == name


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"qk_dtype": "int8"}, ValueError),
        ({"v_scale": "channel"}, ValueError),
        ({"smooth": 1}, TypeError),
        ({"round_p": "no"}, TypeError),
    ],
)
def test_a_format_that_does_not_exist_is_refused(arguments, error):
    with pytest.raises(error):
        Format(**arguments)


@pytest.fixture(scope="module")
def capture(tmp_path_factory):
    path = tmp_path_factory.mktemp("capture") / "small.safetensors"
    spec = CaptureSpec(
        grid=TokenGrid((4, 4, 4)),
        entries=((0, 1), (2, 1)),
        heads=2,
        head_dim=32,
        batch=2,
        source="synthetic",
        title="noise",
    )
    generator = torch.Generator().manual_seed(1)
    with CaptureWriter(path, spec) as writer:
        for layer, step in spec.entries:
            q, k, v = (torch.randn(2, 64, 2, 32, generator=generator) for _ in range(3))
            writer.write(layer, step, time=0.5, q=q, k=k, v=v)
    return open_capture(path)


def test_errors_of_formats_have_a_place_for_every_format_call_and_head(capture):
    errors = format_errors(capture, [Format(), Format("mxfp8"), Format("nvfp4")])
    assert errors.relative_l2.shape == errors.cosine.shape == (3, 2, 2)
    assert errors.mean.tolist() == sorted(errors.mean.tolist())
    call = capture.load(2, 1)
    alone = probe_quantised(call.q, call.k, call.v, dense=attend(call.q, call.k, call.v), **{
        "qk_dtype": "nvfp4"
    })  # fmt: skip
    assert torch.equal(errors.relative_l2[2, 1], alone.error.relative_l2.mean(0))
    assert errors.cells == [f"layer {n}, step 1, head {h}" for n in (0, 2) for h in (0, 1)]


def test_errors_of_formats_say_emulated_in_label_and_table(capture):
    errors = format_errors(capture, [Format("nvfp4", round_p=True)], entries=[(0, 1)])
    assert "emulated" in errors.label
    table = views.Table(ERROR_COLUMNS, errors.rows())
    assert "nvfp4 QK, fp8 V, fp8 P" in repr(table)
    assert errors.columns == ["NVFP4 QK\nFP8 V\nsmoothed\nP rounded"]
    nothing = replace(errors, emulated=((),))
    assert "emulated" not in nothing.label


def test_no_formats_are_refused(capture):
    with pytest.raises(ValueError, match="formats is empty"):
        format_errors(capture, [])


def test_bits_are_counted_with_their_scales():
    parts = qkv(tokens=128, dim=128, dtype=torch.bfloat16)
    rows = {row[0]: row[3] for row in format_sizes(*parts)}
    # 8 + 8 / 32, 4 + 8 / 16, 8; per channel 8 + 32 / 128 tokens.
    assert rows == {
        "MXFP8 K": "8.25",
        "NVFP4 K": "4.50",
        "FP8 V": "8.00",
        "FP8 V per channel": "8.25",
    }


def test_combinations_are_sparse_where_they_should_be_and_quantising_changes_them():
    q, k, v = qkv(tokens=640, dim=64, dtype=torch.bfloat16)
    found = combination_errors(3 * q, k, v, [Format("nvfp4")], tau=1.0, threshold=0.9)
    assert found.formats == ("not quantised", "NVFP4 QK + FP8 V, smoothed")
    assert found.relative_l2[0, 0] == 0
    assert found.density[0].tolist() == [1, 1]
    assert bool((found.density[1] < 1).all())
    assert bool((found.relative_l2[:, 1] != found.relative_l2[:, 0]).all())
    assert found.rows[0] == "dense\ndensity 1.000"


def test_formats_have_a_row_with_their_mean_and_a_mark_per_call():
    ax = views.new_figure().subplots()
    errors = torch.tensor([[[0.01, 0.03]], [[0.1, 0.3]]])
    views.draw_formats(ax, errors, ["a", "b"], ["layer 1, step 2"], "error (emulated)")
    said = texts(ax)
    for text in ("0.0200", "0.2000", "layer 1, step 2", "mean", "error (emulated)"):
        assert text in said
    with pytest.raises(ValueError, match=r"pass \[formats, calls, heads\]"):
        views.draw_formats(ax, errors, ["a"], ["layer 1, step 2"], "error")


def test_rounding_shows_the_original_the_decoded_values_and_the_blocks():
    ax = views.new_figure().subplots()
    values = torch.linspace(-1, 1, 32)
    after = quantise_nvfp4(values[None, None, None]).dequantise().flatten()
    views.draw_rounding(ax, values, {"NVFP4 (emulated)": after}, 16)
    lines = {line.get_label(): line.get_ydata() for line in ax.lines}
    assert np.allclose(lines["original"], values)
    assert np.allclose(lines["NVFP4 (emulated)"], after)
    assert "blocks of 16" in texts(ax)
    with pytest.raises(ValueError, match="at most 3"):
        views.draw_rounding(ax, values, dict.fromkeys("abcd", values), 16)


# -- thresholds and schedule ---------------------------------------------------------------------


def test_one_threshold_has_three_units():
    table = views.units_table([-3, 0], 4096)
    assert table.rows == [("-3", "0.125", "512"), ("0", "1", "4096")]


def test_the_axes_above_a_chart_hold_lambda_and_the_scale_factor():
    ax = views.new_figure().subplots()
    views.draw_curve(ax, [-8, -4, 0], torch.zeros(1, 3), xlabel="log2(lambda)")
    views.add_threshold_units(ax, 2048)
    lower, upper = ax.child_axes
    for above, name in ((lower, "lambda"), (upper, "threshold_scale_factor")):
        assert above.get_xlabel() == name
    ticks = [float(label.get_text()) for label in ax.get_xticklabels()]
    factors = [float(label.get_text()) for label in upper.get_xticklabels()]
    assert np.allclose(factors, 2048 * 2.0 ** np.array(ticks), rtol=0.05)


@pytest.mark.parametrize(("cutoff", "dense"), [(None, 0), (0.5, 2), (0.51, 1), (0.0, 3), (1.0, 1)])
def test_a_schedule_is_dense_at_or_above_the_cutoff(cutoff, dense):
    ax = views.new_figure().subplots()
    views.draw_schedule(ax, [1.0, 0.5, 0.25], cutoff)
    squares = [len(line.get_xdata()) for line in ax.lines if line.get_marker() == "s"]
    assert squares == [dense]
    assert f"{dense} dense" in texts(ax)
    assert f"{dense} of 3 steps are dense" in views.describe_schedule([1.0, 0.5, 0.25], cutoff)


# -- methods and tables --------------------------------------------------------------------------


def test_methods_have_their_value_and_error_or_say_why_there_are_none():
    ax = views.new_figure().subplots()
    views.draw_methods(ax, ["a", "b"], [0.5, 0.25], [0.01, 0.02], highlight=1)
    assert "0.2500 ± 0.0200" in texts(ax)
    empty = views.new_figure().subplots()
    views.draw_methods(empty, [], [], missing="no weights here")
    assert texts(empty).strip() == "no weights here"


def test_without_fine_tuned_weights_the_effect_says_so(tmp_path: Path):
    effect = vsa_effect(weights=tmp_path / "none.safetensors")
    assert effect.names == ()
    assert "none.safetensors are not bundled here" in str(effect)


def test_with_fine_tuned_weights_every_method_has_its_error(tmp_path: Path):
    config = {"depth": 1, "width": 32, "heads": 1, "head_dim": 32}
    save_model(VideoDiT(DiTConfig(**config)), tmp_path / "base.safetensors")
    record = {"settings": {"sparsity": 0.5}}
    tuned = tmp_path / "tuned.safetensors"
    save_model(VideoDiT(DiTConfig(**config, gate=True)), tuned, record=record)
    effect = vsa_effect(
        videos=2,
        times=(0.5,),
        weights=tuned,
        base=tmp_path / "base.safetensors",
        grid=(4, 4, 8),
        device="cpu",
    )
    assert effect.names == tuple(NAMES.values())
    assert all(value > 0 for value in effect.mean)
    assert "At sparsity 0.5 (1 of 2 cubes kept), over 2 videos" in str(effect)


def test_a_table_is_readable_as_text_and_safe_as_html():
    table = views.Table(["a", "long name"], [("x<y", 1)], "what it says")
    assert repr(table) == "what it says\na    long name\nx<y  1"
    assert '<td style="text-align:left">x&lt;y</td>' in table._repr_html_()
    with pytest.raises(ValueError, match=r"rows\[0\] has 1 cells, but there are 2 columns"):
        views.Table(["a", "b"], [("x",)])
