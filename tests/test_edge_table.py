"""The edge cases of attention, one test per row and mechanism.

Rows and columns are those of the edge-case table of the SkipSoftmax, VSA and quantisation
specification (its section 9). ``skip`` stands for dense attention and SkipSoftmax, ``quant`` for
block-scaled attention. Where the rule here differs from the table, a comment says why.
"""

from __future__ import annotations

import ast
import math
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from blockattn import (
    attend,
    cube_layout,
    quantised_attention,
    skip_softmax_attention,
    video_sparse_attention,
    vsa_route,
)
from blockattn.layout import TokenGrid
from blockattn.quant_formats import BLOCK_SIZES, quantise_mxfp8, quantise_nvfp4
from tests.inputs import gaussian, uneven

ROWS = (
    "sq_not_multiple_of_128", "sk_not_multiple_of_128", "sq_0", "sk_0", "one_kv_tile",
    "all_tiles_skippable_after_the_first", "sq_not_equal_sk", "all_zero_tensor",
    "nan_in_a_row_of_q", "inf_in_scores", "non_contiguous_input", "fp32_input", "grad_required",
)  # fmt: skip
COLUMNS = ("skip", "vsa", "quant")
NOT_APPLICABLE = {("all_tiles_skippable_after_the_first", "vsa"): "VSA has no skip threshold"}

UNIT = math.log(2)  # a softmax scale at which raw scores are base-2 logits
every_impl = pytest.mark.parametrize("impl", ["reference", "eager"])
every_format = pytest.mark.parametrize("kind", list(BLOCK_SIZES))
traced_skip = partial(skip_softmax_attention, return_trace=True)
traced_quant = partial(quantised_attention, return_trace=True)


def test_every_row_and_column_has_a_test():
    tree = ast.parse(Path(__file__).read_text())
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    for row in ROWS:
        for column in COLUMNS:
            found = any(name.startswith(f"test_edge_{row}_{column}") for name in names)
            assert found != ((row, column) in NOT_APPLICABLE), (row, column)


def exact(q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Softmax attention in float64, output ``[B, Tq, H, D]`` and LSE ``[B, H, Tq]``."""
    a, b, c = (x.double().transpose(1, 2) for x in (q, k, v))
    scores = a @ b.transpose(2, 3) / math.sqrt(q.shape[3])
    if valid is not None:
        scores = scores.masked_fill(~valid, -torch.inf)
    return (scores.softmax(dim=-1) @ c).transpose(1, 2), scores.logsumexp(dim=-1)


def assert_exact(out: Tensor, trace, q: Tensor, k: Tensor, v: Tensor) -> None:
    want, lse = exact(q, k, v)
    assert_close(out.double(), want, rtol=1e-4, atol=1e-5)
    assert_close(trace.lse.double(), lse, rtol=1e-5, atol=1e-5)


def opposed(tokens: int, keys: int | None = None, **settings) -> tuple[Tensor, Tensor, Tensor]:
    """q and k whose every score lies far below 0: a padding key, which scores 0, would win all."""
    q, k, v = gaussian(tokens, keys=keys, **settings)
    q[..., 0], k[..., 0] = 8.0, -20.0
    return q, k, v


def planted(levels: list[float], rows: int = 128) -> tuple[Tensor, Tensor, Tensor]:
    """Key tile j (128 keys) scores ``levels[j]`` for every query, in base-2 logits at UNIT."""
    q, k, v = gaussian(rows, keys=128 * len(levels), heads=1)
    q, k = torch.zeros_like(q), torch.zeros_like(k)
    q[..., 0] = 1.0
    k[0, :, 0, 0] = torch.tensor(levels).repeat_interleave(128)
    return q, k, v


def vsa(q: Tensor, k: Tensor, v: Tensor, grid, sparsity: float = 0.0, **settings):
    """VSA's fine stage alone: a zero gate switches the coarse branch off."""
    gate = settings.pop("gate_compress", torch.zeros_like(q))
    return video_sparse_attention(
        q, k, v, grid=grid, sparsity=sparsity, gate_compress=gate, **settings
    )


def tile_map(trace) -> list[list[bool]]:
    return trace.skipped.dense()[0, 0].tolist()


# -- lengths that do not fill a tile --------------------------------------------------------------


@every_impl
@pytest.mark.parametrize("rows", [1, 129, 200])
def test_edge_sq_not_multiple_of_128_skip_missing_rows_never_veto(rows: int, impl: str):
    levels = [0.0, 6.0, -1.0, 3.0]
    q, k, v = planted(levels, rows=256)
    call = partial(traced_skip, threshold=2**-2, scale=UNIT, impl=impl)
    whole, _ = call(q, k, v)
    out, trace = call(q[:, :rows], k, v)
    assert tile_map(trace) == [[False, False, True, True]] * -(-rows // 128)
    assert out.shape == (1, rows, 1, 32)
    assert_close(out, whole[:, :rows])


@every_impl
def test_edge_sq_not_multiple_of_128_vsa_pads_cubes_and_takes_the_padding_off(impl: str):
    grid = (5, 6, 7)
    q, k, v = gaussian(math.prod(grid))
    out, trace = vsa(q, k, v, grid, impl=impl, return_trace=True)
    assert trace.route.seqlens == (8 * 64, 8 * 64)
    assert out.shape == q.shape
    assert trace.lse.shape == (1, 2, 210)
    assert_exact(out, trace, q, k, v)


@every_impl
@every_format
def test_edge_sq_not_multiple_of_128_quant_pads_scales_alone_and_with_zeros(kind: str, impl: str):
    q, k, v = gaussian(130, keys=200)
    encoded = (quantise_mxfp8 if kind == "mxfp8" else quantise_nvfp4)(q)
    assert encoded.data.shape[1] == 130
    assert encoded.scales.numel() == 2 * 256 * 4  # two heads, 130 -> 256 rows, 1 or 2 -> 4 blocks
    assert int((encoded.scales != 0).sum()) == 2 * 130 * 32 // BLOCK_SIZES[kind]
    doubled = torch.cat([q, q], dim=1)  # the same maxima, hence the same scales
    call = partial(quantised_attention, qk_dtype=kind, impl=impl)
    assert_close(call(q, k, v), call(doubled, k, v)[:, :130])


@every_impl
@pytest.mark.parametrize("keys", [1, 127, 129, 200])
def test_edge_sk_not_multiple_of_128_skip_masks_the_rest_of_the_last_tile(keys: int, impl: str):
    q, k, v = opposed(140, keys=256)
    buffers = [x.clone() for x in (k, v)]
    for x in buffers:
        x[:, keys:] = torch.nan  # what lies behind the last key is never used
    short = [x[:, :keys] for x in buffers]
    for threshold in (None, 1e-9):
        out, trace = traced_skip(q, *short, threshold=threshold, impl=impl)
        assert_exact(out, trace, q, k[:, :keys], v[:, :keys])


@every_impl
@pytest.mark.parametrize("grid", [(9, 9, 9), (5, 4, 4), (3, 2, 1)])
def test_edge_sk_not_multiple_of_128_vsa_masks_by_the_size_of_the_cube(grid, impl: str):
    q, k, v = opposed(math.prod(grid))
    assert int(cube_layout(TokenGrid(grid), q.device).sizes.min()) < 64
    out, trace = vsa(q, k, v, grid, impl=impl, return_trace=True)
    assert_exact(out, trace, q, k, v)


@every_impl
@every_format
def test_edge_sk_not_multiple_of_128_quant_padding_scales_are_0_and_masked(kind: str, impl: str):
    q, k, v = opposed(64, keys=130)
    encoded = (quantise_mxfp8 if kind == "mxfp8" else quantise_nvfp4)(k)
    assert int((encoded.scales != 0).sum()) == 2 * 130 * 32 // BLOCK_SIZES[kind]
    out, trace = traced_quant(q, k, v, qk_dtype=kind, smooth=False, impl=impl)
    _, lse = exact(q, k, v)
    # A padding key would lift an LSE of about -23 to that of its score, 0.
    assert lse.max() < -15
    assert_close(trace.lse.double(), lse, rtol=0.2, atol=0)
    assert out.isfinite().all()


# -- empty sequences ------------------------------------------------------------------------------


@every_impl
@pytest.mark.parametrize("threshold", [None, 0.5])
def test_edge_sq_0_skip_returns_without_rows(threshold: float | None, impl: str):
    q, k, v = gaussian(0, keys=200)
    out, trace = traced_skip(q, k, v, threshold=threshold, impl=impl)
    assert out.shape == q.shape
    assert trace.lse.shape == (1, 2, 0)


@every_impl
def test_edge_sq_0_vsa_is_a_value_error(impl: str):
    q, k, v = gaussian(0)
    with pytest.raises(ValueError, match="empty sequence"):
        vsa(q, k, v, (1, 1, 1), impl=impl)
    with pytest.raises(ValueError, match=r"grid\[0\]=0: must be at least 1"):
        vsa(*gaussian(8), (0, 2, 4), impl=impl)


@every_impl
@every_format
def test_edge_sq_0_quant_returns_without_rows(kind: str, impl: str):
    q, k, v = gaussian(0, keys=200)
    out, trace = traced_quant(q, k, v, qk_dtype=kind, impl=impl)
    assert out.shape == q.shape
    assert trace.lse.shape == (1, 2, 0)


@every_impl
@pytest.mark.parametrize("knob", [{}, {"threshold": 0.5}, {"threshold_scale_factor": 9.0}])
def test_edge_sk_0_skip_is_zero_with_an_lse_of_minus_infinity(knob, impl: str):
    q, k, v = gaussian(130, keys=0)
    out, trace = traced_skip(q, k, v, **knob, impl=impl)
    assert torch.equal(out, torch.zeros_like(q))
    assert (trace.lse == -torch.inf).all()
    assert trace.lse.shape == (1, 2, 130)


@every_impl
def test_edge_sk_0_vsa_is_a_value_error(impl: str):
    q, k, v = gaussian(80, keys=0)
    with pytest.raises(ValueError, match="self-attention: q has 80 tokens but k has 0"):
        vsa(q, k, v, (5, 4, 4), impl=impl)


@every_impl
@every_format
def test_edge_sk_0_quant_is_zero_with_an_lse_of_minus_infinity(kind: str, impl: str):
    q, k, v = gaussian(130, keys=0)
    out, trace = traced_quant(q, k, v, qk_dtype=kind, impl=impl)
    assert torch.equal(out, torch.zeros_like(q))
    assert (trace.lse == -torch.inf).all()


# -- tiles ----------------------------------------------------------------------------------------


@every_impl
@pytest.mark.parametrize("keys", [1, 100, 128])
def test_edge_one_kv_tile_skip_is_never_dropped(keys: int, impl: str):
    q, k, v = opposed(200, keys=keys)
    out, trace = traced_skip(q, k, v, threshold=1.0 - 1e-9, impl=impl)
    assert trace.density == 1
    assert_exact(out, trace, q, k, v)


@every_impl
@pytest.mark.parametrize("sparsity", [0.0, 0.9, 1.0])
def test_edge_one_kv_tile_vsa_keeps_the_one_cube(sparsity: float, impl: str):
    q, k, v = gaussian(27)
    out, trace = vsa(q, k, v, (3, 3, 3), sparsity, impl=impl, return_trace=True)
    assert trace.route.counts().tolist() == [[[1], [1]]]
    assert_exact(out, trace, q, k, v)


@every_impl
@every_format
def test_edge_one_kv_tile_quant_is_never_dropped(kind: str, impl: str):
    q, k, v = gaussian(200, keys=128)
    out, trace = traced_quant(q, k, v, qk_dtype=kind, skip_threshold=1.0 - 1e-9, impl=impl)
    assert trace.density == 1
    assert_close(out, quantised_attention(q, k, v, qk_dtype=kind, impl=impl), rtol=1e-5, atol=1e-6)


@every_impl
def test_edge_all_tiles_skippable_after_the_first_skip_leaves_tile_0(impl: str):
    q, k, v = planted([0.0, -5.0, -6.0, -40.0], rows=200)
    out, trace = traced_skip(q, k, v, threshold=2**-4, scale=UNIT, impl=impl)
    assert tile_map(trace) == [[False, True, True, True]] * 2
    assert_close(out, attend(q, k[:, :128], v[:, :128], scale=UNIT, impl=impl))
    assert out.isfinite().all()


@every_impl
@every_format
def test_edge_all_tiles_skippable_after_the_first_quant_leaves_tile_0(kind: str, impl: str):
    q, k, v = planted([0.0, -6.0, -8.0], rows=200)
    v[:, 0] = 8.0  # the largest value, so that the scale of V is that of tile 0 alone
    call = partial(traced_quant, qk_dtype=kind, smooth=False, scale=UNIT, impl=impl)
    out, trace = call(q, k, v, skip_threshold=2**-4)
    assert tile_map(trace) == [[False, True, True]] * 2
    want, _ = call(q, k[:, :128], v[:, :128])
    assert_close(out, want)
    assert out.isfinite().all()


@every_impl
@pytest.mark.parametrize(("queries", "keys"), [(70, 300), (300, 70)])
@pytest.mark.parametrize("causal", [False, True])
def test_edge_sq_not_equal_sk_skip_aligns_the_causal_mask_top_left(
    queries: int, keys: int, causal: bool, impl: str
):
    q, k, v = gaussian(queries, keys=keys)
    valid = torch.ones(queries, keys, dtype=torch.bool)
    valid = valid.tril() if causal else valid
    want, lse = exact(q, k, v, valid)
    for threshold in (None, 1e-9):
        out, trace = traced_skip(q, k, v, threshold=threshold, causal=causal, impl=impl)
        assert_close(out.double(), want, rtol=1e-4, atol=1e-5)
        assert_close(trace.lse.double(), lse, rtol=1e-5, atol=1e-5)


@every_impl
def test_edge_sq_not_equal_sk_vsa_is_a_value_error(impl: str):
    q, k, v = gaussian(80, keys=64)
    with pytest.raises(ValueError, match="self-attention: q has 80 tokens but k has 64"):
        vsa(q, k, v, (5, 4, 4), impl=impl)


@every_impl
@every_format
@pytest.mark.parametrize(("queries", "keys"), [(70, 300), (300, 70)])
def test_edge_sq_not_equal_sk_quant_is_allowed(queries: int, keys: int, kind: str, impl: str):
    q, k, v = gaussian(queries, keys=keys)
    out = quantised_attention(q, k, v, qk_dtype=kind, impl=impl)
    want, _ = exact(q, k, v)
    tolerance = 8e-2 if kind == "mxfp8" else 2e-1
    assert_close(out.double(), want, rtol=tolerance, atol=tolerance)


# -- values ---------------------------------------------------------------------------------------


@every_impl
@pytest.mark.parametrize("threshold", [None, 0.9])
def test_edge_all_zero_tensor_skip_is_the_uniform_average(threshold: float | None, impl: str):
    q, k, v = gaussian(200)
    zero = torch.zeros_like(q)
    for query, key in ((zero, k), (q, zero), (zero, zero)):
        out, trace = traced_skip(query, key, v, threshold=threshold, impl=impl)
        assert trace.density == 1
        assert_close(out, v.mean(dim=1, keepdim=True).expand_as(out), rtol=1e-5, atol=1e-6)
        assert_close(trace.lse, torch.full_like(trace.lse, math.log(200)))
    assert not traced_skip(q, k, zero, threshold=threshold, impl=impl)[0].any()


@every_impl
def test_edge_all_zero_tensor_vsa_is_uniform_over_the_lowest_cubes(impl: str):
    q, k, v = gaussian(256)
    zero, ones = torch.zeros_like(q), torch.ones_like(q)
    out, trace = vsa(
        zero, zero, v, (16, 4, 4), 0.5, gate_compress=ones, impl=impl, return_trace=True
    )
    # Equal shares tie, and ties go to the lower cube.
    assert trace.route.dense()[0, 0].tolist() == [[True, True, False, False]] * 4
    average = v.mean(dim=1, keepdim=True) + v[:, :128].mean(dim=1, keepdim=True)
    assert_close(out, average.expand_as(out), rtol=1e-5, atol=1e-6)
    assert not vsa(q, k, zero, (16, 4, 4), 0.5, impl=impl).any()


@every_impl
@every_format
@pytest.mark.parametrize("v_scale", ["tensor", "channel"])
def test_edge_all_zero_tensor_quant_has_clamped_scales(kind: str, v_scale: str, impl: str):
    q, k, v = gaussian(150)
    zero = torch.zeros_like(q)
    call = partial(quantised_attention, qk_dtype=kind, v_scale=v_scale, impl=impl)
    for query, key in ((zero, k), (q, zero), (zero, zero)):
        out = call(query, key, v)
        assert_close(out, v.mean(dim=1, keepdim=True).expand_as(out), rtol=0, atol=2e-2)
    assert not call(q, k, zero).any()
    assert not call(zero, zero, zero).any()


@every_impl
def test_edge_nan_in_a_row_of_q_skip_keeps_its_tiles_and_spoils_itself_alone(impl: str):
    q, k, v = planted([0.0, -9.0, -9.0], rows=256)
    q[0, 3, 0, 5] = torch.nan
    out, trace = traced_skip(q, k, v, threshold=2**-4, scale=UNIT, impl=impl)
    assert tile_map(trace) == [[False] * 3, [False, True, True]]
    assert out[0, 3].isnan().all()
    others = torch.arange(128) != 3
    dense = attend(q, k, v, scale=UNIT, impl=impl)
    assert dense[0, 3].isnan().all()
    assert_close(out[0, :128][others], dense[0, :128][others])


@every_impl
def test_edge_nan_in_a_row_of_q_vsa_spoils_its_cube_whose_selection_is_the_lowest(impl: str):
    q, k, v = gaussian(256)
    call = partial(vsa, grid=(16, 4, 4), sparsity=0.5, gate_compress=torch.ones_like(q), impl=impl)
    clean = call(q, k, v)
    q[0, 130, 1, 0] = torch.nan  # third cube, second head
    out = call(q, k, v)
    assert out[0, 128:192, 1].isnan().all()
    out[0, 128:192, 1] = clean[0, 128:192, 1]
    assert torch.equal(out, clean)
    route = vsa_route(q, k, grid=(16, 4, 4), sparsity=0.5).dense()
    assert route[0, 1, 2].tolist() == [True, True, False, False]


@every_impl
@pytest.mark.parametrize(
    ("kind", "smooth", "spoilt"),
    [("mxfp8", False, "row"), ("mxfp8", True, "head"), ("nvfp4", False, "all")],
)
def test_edge_nan_in_a_row_of_q_quant_gives_nan_and_never_a_number(
    kind: str, smooth: bool, spoilt: str, impl: str
):
    q, k, v = gaussian(150)
    q[0, 3, 1, 5] = torch.nan
    out = quantised_attention(q, k, v, qk_dtype=kind, smooth=smooth, skip_threshold=0.5, impl=impl)
    bad = torch.zeros(1, 150, 2, dtype=torch.bool)
    bad[:, 3 if spoilt == "row" else slice(None), 1 if spoilt != "all" else slice(None)] = True
    # mxfp8 scales per block, smoothing takes maxima per head, nvfp4 one maximum of the tensor.
    assert torch.equal(out.isnan().all(dim=-1), bad)
    assert torch.equal(out.isnan().any(dim=-1), bad)


@every_impl
@pytest.mark.parametrize("threshold", [None, 1e-9])
def test_edge_inf_in_scores_skip_is_nan_where_torch_is_nan(threshold: float | None, impl: str):
    q, k, v = gaussian(200)
    k[0, 150, 1, 0] = torch.inf  # a score of +inf or -inf, by the sign of the query's channel
    positive = q[0, :, 1, 0] > 0
    assert 0 < int(positive.sum()) < 200
    out = skip_softmax_attention(q, k, v, threshold=threshold, impl=impl)
    want, _ = exact(q, k, v)
    assert torch.equal(want.isnan(), out.isnan())
    assert torch.equal(out[0, :, 1].isnan().all(dim=-1), positive)
    # A score of -inf takes no mass.
    assert_close(out.double()[~want.isnan()], want[~want.isnan()], rtol=1e-4, atol=1e-5)


@every_impl
@pytest.mark.parametrize("threshold", [None, 0.0, 1e-9])
@pytest.mark.parametrize("first", [1, 128, 150, 300])
@pytest.mark.parametrize("causal", [False, True])
def test_edge_inf_in_scores_skip_leading_keys_at_minus_infinity_take_no_mass(
    causal: bool, first: int, threshold: float | None, impl: str
):
    q, k, v = gaussian(300)
    q[..., 0], k[:, :first, :, 0] = 1.0, -torch.inf
    out, trace = traced_skip(q, k, v, threshold=threshold, causal=causal, impl=impl)
    valid = torch.ones(300, 300, dtype=torch.bool)
    valid[:, :first] = False
    valid = valid.tril() if causal else valid
    k[:, :first, :, 0] = 0.0
    want, lse = exact(q, k, v, valid)
    # torch takes NaN for a row without mass; here it is 0, with an LSE of -inf.
    assert_close(out.double(), want.nan_to_num(), rtol=1e-4, atol=1e-5)
    assert_close(trace.lse.double(), lse, rtol=1e-5, atol=1e-5)


@every_impl
def test_edge_inf_in_scores_vsa_is_nan_where_torch_is_nan(impl: str):
    q, k, v = gaussian(128)
    k[0, 100, 1, 0] = torch.inf
    out = vsa(q, k, v, (8, 4, 4), impl=impl)
    want, _ = exact(q, k, v)
    # The coarse mean of the cube is infinite too: a gate of 0 times its NaN is NaN, so every cube
    # whose mean query is positive there is spoilt as a whole; the other head never is.
    assert (out.isnan() | ~want.isnan()).all()
    assert not out[:, :, 0].isnan().any()
    assert_close(out[:, :, 0].double(), want[:, :, 0], rtol=1e-4, atol=1e-5)


@every_impl
@every_format
@pytest.mark.parametrize("value", [torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_edge_inf_in_scores_quant_saturates(name: str, value: float, kind: str, impl: str):
    tensors = dict(zip("qkv", gaussian(150)))
    tensors[name][0, 9, 1, 5] = value
    out = quantised_attention(**tensors, qk_dtype=kind, smooth=False, impl=impl)
    # MXFP8's largest scale times its largest element lies above float32, so its score is infinite
    # after all, and a row is NaN exactly where unquantised attention's is.
    overflows = kind == "mxfp8" and name != "v"
    expected = exact(*tensors.values())[0].isnan() if overflows else torch.zeros_like(out).bool()
    assert torch.equal(~out.isfinite(), expected)
    assert bool(expected.any()) == overflows


# -- layout and dtype -----------------------------------------------------------------------------


def strided(x: Tensor) -> Tensor:
    """The same values with the strides of a slice of a packed, transposed tensor."""
    packed = torch.stack([x, torch.full_like(x, torch.nan)], dim=2).transpose(1, 3)
    view = packed[:, :, 0].transpose(1, 2)
    assert torch.equal(view, x)
    assert not view.is_contiguous()
    return view


# The table copies at the backend and refuses at the launcher. Here no call copies a whole input
# and none refuses one: every implementation reads q, k and v by their strides.


@every_impl
@pytest.mark.parametrize("threshold", [None, 0.5])
def test_edge_non_contiguous_input_skip_is_read_by_its_strides(threshold, impl: str):
    q, k, v = uneven(300)
    call = partial(traced_skip, threshold=threshold, impl=impl)
    out, trace = call(*(strided(x) for x in (q, k, v)))
    want, expected = call(q, k, v)
    assert_close(out, want)
    assert trace.skipped == expected.skipped


@every_impl
def test_edge_non_contiguous_input_vsa_is_read_by_its_strides(impl: str):
    q, k, v = gaussian(210)
    gate = torch.ones_like(q)
    call = partial(video_sparse_attention, grid=(5, 6, 7), sparsity=0.5, impl=impl)
    out = call(*(strided(x) for x in (q, k, v)), gate_compress=strided(gate))
    assert_close(out, call(q, k, v, gate_compress=gate))


@every_impl
@every_format
def test_edge_non_contiguous_input_quant_is_read_by_its_strides(kind: str, impl: str):
    q, k, v = gaussian(150)
    call = partial(quantised_attention, qk_dtype=kind, impl=impl)
    assert torch.equal(call(*(strided(x) for x in (q, k, v))), call(q, k, v))


# The table casts float32 to bfloat16. On a CPU, and for whoever studies errors, float32 is a dtype
# of its own: it is served as it is, so that an error seen is the mechanism's and not a cast's.


@every_impl
def test_edge_fp32_input_skip_is_served_in_float32(impl: str):
    q, k, v = gaussian(200)
    out, trace = traced_skip(q, k, v, threshold=1e-9, impl=impl)
    assert out.dtype == torch.float32
    assert_exact(out, trace, q, k, v)
    cast = attend(*(x.bfloat16() for x in (q, k, v)), impl=impl).float()
    assert (cast.double() - exact(q, k, v)[0]).abs().max() > 1e-3


@every_impl
def test_edge_fp32_input_vsa_runs_its_sparse_fine_stage_in_float32(impl: str):
    # The table falls back to dense attention here, in silence; ours stays sparse.
    q, k, v = gaussian(256)
    out, trace = vsa(q, k, v, (16, 4, 4), 0.5, impl=impl, return_trace=True)
    assert (trace.impl, trace.density) == (impl, 0.5)
    valid = trace.route.dense().repeat_interleave(64, dim=2).repeat_interleave(64, dim=3)
    want, _ = exact(q, k, v, valid)
    assert_close(out.double(), want, rtol=1e-4, atol=1e-5)


@every_impl
@every_format
def test_edge_fp32_input_quant_is_cast_to_bfloat16_first(kind: str, impl: str):
    q, k, v = gaussian(150)
    out = quantised_attention(q, k, v, qk_dtype=kind, impl=impl)
    narrow = quantised_attention(*(x.bfloat16() for x in (q, k, v)), qk_dtype=kind, impl=impl)
    assert (out.dtype, narrow.dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(out.bfloat16(), narrow)


# -- gradients ------------------------------------------------------------------------------------


def assert_forward_only(call, tensors: dict[str, Tensor]) -> None:
    for name in tensors:
        wanted = {**tensors, name: tensors[name].clone().requires_grad_()}
        with pytest.raises(ValueError, match=f"{name}: requires_grad=True.*forward only"):
            call(**wanted)
        with torch.no_grad():
            assert torch.equal(call(**wanted), call(**tensors))


@every_impl
@pytest.mark.parametrize("threshold", [None, 0.5])
def test_edge_grad_required_skip_raises_in_grad_mode(threshold: float | None, impl: str):
    tensors = dict(zip("qkv", gaussian(70)))
    assert_forward_only(partial(skip_softmax_attention, threshold=threshold, impl=impl), tensors)


@every_impl
def test_edge_grad_required_vsa_raises_in_grad_mode(impl: str):
    q, k, v = gaussian(80)
    tensors = {"q": q, "k": k, "v": v, "gate_compress": torch.ones_like(q), "gate_fine": v.clone()}
    assert_forward_only(partial(video_sparse_attention, grid=(5, 4, 4), impl=impl), tensors)


@every_impl
@every_format
def test_edge_grad_required_quant_raises_in_grad_mode(kind: str, impl: str):
    tensors = dict(zip("qkv", gaussian(70)))
    assert_forward_only(partial(quantised_attention, qk_dtype=kind, impl=impl), tensors)
