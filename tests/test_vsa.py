"""VSA: cubes of a ragged grid, coarse stage, top-k with its ties, fine stage, gates, refusals."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import assert_close

from blockattn import (
    BlockRoute,
    TokenGrid,
    UnsupportedError,
    attend,
    cube_layout,
    kept_cubes,
    video_sparse_attention,
    vsa_route,
)
from tests.inputs import gaussian

CPU = torch.device("cpu")
WAN_720P = (21, 45, 80)
EXACT = {"rtol": 1e-9, "atol": 1e-9}
axis = st.integers(1, 9)
grids = st.tuples(axis, axis, axis)


def layout_of(*shape: int):
    return cube_layout(TokenGrid(shape), CPU)


def inputs(shape: tuple[int, int, int], *, dtype=torch.float64, **rest):
    """q, k, v and two gates of a grid, batch 1, 2 heads, D = 16."""
    tokens = math.prod(shape)
    q, k, v = gaussian(tokens, dim=16, dtype=dtype, **rest)
    gates = gaussian(tokens, dim=16, dtype=dtype, seed=rest.get("seed", 0) + 100, heads=2)[:2]
    return q, k, v, *gates


# -- an independent VSA: numpy, float64, one query cube after another ------------------------------


def cubes_of(shape: tuple[int, int, int]) -> list[list[int]]:
    """Raster tokens of every 4x4x4 cube, cubes and tokens in t, h, w order."""
    corners = product(*(range(0, size, 4) for size in shape))
    edges = [[range(c, min(c + 4, size)) for c, size in zip(corner, shape)] for corner in corners]
    return [[(t * shape[1] + h) * shape[2] + w for t, h, w in product(*ranges)] for ranges in edges]


@dataclass
class Expected:
    coarse: np.ndarray
    fine: np.ndarray
    lse: np.ndarray
    chosen: np.ndarray


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def independent(q, k, v, shape: tuple[int, int, int], keep: int, scale: float) -> Expected:
    q, k, v = (x.double().numpy() for x in (q, k, v))
    cubes = cubes_of(shape)
    batch, tokens, heads, _ = q.shape
    coarse, fine = np.zeros_like(q), np.zeros_like(q)
    lse = np.zeros((batch, heads, tokens))
    chosen = np.zeros((batch, heads, len(cubes), len(cubes)), dtype=bool)
    for b, h in np.ndindex(batch, heads):
        means = [np.stack([x[b, c, h].mean(axis=0) for c in cubes]) for x in (q, k, v)]
        shares = softmax(means[0] @ means[1].T * scale)
        for i, own in enumerate(cubes):
            coarse[b, own, h] = shares[i] @ means[2]
            picked = sorted(range(len(cubes)), key=lambda j: (-shares[i, j], j))[:keep]
            chosen[b, h, i, picked] = True
            keys = [token for j in picked for token in cubes[j]]
            scores = q[b, own, h] @ k[b, keys, h].T * scale
            fine[b, own, h] = softmax(scores) @ v[b, keys, h]
            lse[b, h, own] = np.logaddexp.reduce(scores, axis=-1)
    return Expected(coarse, fine, lse, chosen)


# -- cubes ----------------------------------------------------------------------------------------


@given(grids)
def test_tile_and_untile_are_a_bijection_on_any_grid(shape):
    layout = layout_of(*shape)
    x = torch.randn(2, math.prod(shape), 1, 3)
    assert torch.equal(layout.untile(layout.tile(x)), x)
    assert len(layout.slots.unique()) == math.prod(shape)
    assert layout.padded_tokens == 64 * layout.count


@given(grids)
def test_valid_tokens_are_a_prefix_of_their_cube_in_thw_order_and_the_rest_is_zero(shape):
    layout = layout_of(*shape)
    numbered = torch.arange(1.0, math.prod(shape) + 1).reshape(1, -1, 1, 1)
    tiled = layout.tile(numbered).reshape(layout.count, 64)
    for row, tokens in zip(tiled.tolist(), cubes_of(shape), strict=True):
        assert row == [token + 1.0 for token in tokens] + [0.0] * (64 - len(tokens))


@given(grids)
def test_sizes_are_the_products_of_the_clipped_edges(shape):
    corners = product(*(range(0, size, 4) for size in shape))
    sizes = [math.prod(min(4, n - c) for n, c in zip(shape, corner)) for corner in corners]
    layout = layout_of(*shape)
    assert layout.sizes.tolist() == sizes
    assert layout.sizes.dtype == torch.int32
    assert layout.cubes == tuple(-(-n // 4) for n in shape)


def test_means_are_float32_sums_over_valid_tokens_rounded_once():
    layout = layout_of(5, 4, 4)
    x = torch.full((1, 80, 1, 1), 1.01, dtype=torch.bfloat16)
    means = layout.means(layout.tile(x))
    assert means.dtype == torch.bfloat16
    assert torch.equal(means.flatten(), x[0, :2, 0, 0])


def test_example_5x4x4_has_two_cubes_and_the_published_words():
    layout = layout_of(5, 4, 4)
    assert layout.sizes.tolist() == [64, 16]
    words = [[0xFFFFFFFF, 0xFFFFFFFF], [0x0000FFFF, 0]]
    assert layout.valid_words().tolist() == words


def test_example_5x4x4_at_sparsity_0_has_the_published_rows():
    q, k, *_ = inputs((5, 4, 4))
    index, count = vsa_route(q, k, grid=(5, 4, 4), sparsity=0.0).lists()
    assert index[0, 0].tolist() == [[0, 1], [0, 1]]
    assert [0, *count[0, 0].cumsum(0).tolist()] == [0, 2, 4]


def test_wan_720p_has_1440_cubes_and_22_percent_padding():
    layout = layout_of(*WAN_720P)
    assert layout.cubes == (6, 12, 20)
    assert (layout.count, layout.padded_tokens, len(layout.slots)) == (1440, 92160, 75600)
    assert int(layout.sizes.sum()) == 75600


def test_the_cache_returns_one_layout_per_grid_and_holds_at_most_16():
    cube_layout.cache_clear()
    for size in range(1, 21):
        layout_of(size, 2, 3)
    assert cube_layout.cache_info().currsize == 16
    assert layout_of(20, 2, 3) is layout_of(20, 2, 3)
    assert TokenGrid((20, 2, 3)) == TokenGrid((20, 2, 3), order="raster")


# -- how many cubes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cubes, sparsity, kept",
    [
        (10, 0.7, 4),  # 1 - 0.7 is a little above 0.3, and the float product decides
        (100, 0.7, 31),
        (1200, 0.7, 361),
        (1440, 0.9, 144),
        (10, 0.0, 10),
        (10, 0, 10),
        (10, 1.0, 1),
        (10, 1, 1),
        (1, 0.9, 1),
        (3, 0.5, 2),
    ],
)
def test_kept_cubes(cubes, sparsity, kept):
    assert kept_cubes(sparsity, cubes) == kept


def test_the_count_is_of_cubes_of_the_padded_grid_not_of_tokens_over_64():
    q, k, *_ = inputs((5, 5, 5))  # 125 tokens, 8 cubes
    route = vsa_route(q, k, grid=(5, 5, 5), sparsity=0.5)
    assert route.shape[2:] == (8, 8)
    assert (route.counts() == 4).all()


@pytest.mark.parametrize(
    "sparsity, error",
    [
        (-0.1, ValueError),
        (1.1, ValueError),
        (math.nan, ValueError),
        (math.inf, ValueError),
        (True, TypeError),
        ("0.9", TypeError),
        (None, TypeError),
    ],
)
def test_sparsity_outside_0_to_1_is_refused(sparsity, error):
    with pytest.raises(error, match="sparsity"):
        kept_cubes(sparsity, 10)


# -- sparsity 0 with a zero gate is dense attention: it shows padding between tokens --


@pytest.mark.parametrize("impl", ["reference", "eager"])
@pytest.mark.parametrize("shape", [(8, 8, 8), (9, 9, 9), (5, 4, 4), (3, 3, 3), (1, 1, 1)])
def test_skip_weakness_29_sparsity_0_with_a_zero_gate_is_dense_attention(shape, impl):
    q, k, v, *_ = inputs(shape)
    gate = torch.zeros_like(q)
    out, trace = video_sparse_attention(
        q, k, v, grid=shape, sparsity=0.0, gate_compress=gate, impl=impl, return_trace=True
    )
    dense, dense_trace = attend(q, k, v, impl="reference", return_trace=True)
    assert_close(out, dense, **EXACT)
    assert_close(trace.lse, dense_trace.lse)
    assert trace.density == 1.0
    assert trace.impl == impl


def test_sparsity_0_is_dense_attention_on_wan_720p():
    """The grid of 75,600 tokens, on query cubes of every kind: inside, faces, edges, the corner."""
    q, k, v = gaussian(math.prod(WAN_720P), heads=1, dim=8)
    layout = layout_of(*WAN_720P)
    route = vsa_route(q, k, grid=WAN_720P, sparsity=0.0)
    assert route.density() == 1.0
    first = [int((layout.sizes == size).nonzero()[0]) for size in layout.sizes.unique()]
    cubes = torch.tensor(sorted({*first, 0, 777, 1439}))
    slots = (cubes[:, None] * 64 + torch.arange(64)).flatten()
    some = replace(route, words=route.words[:, :, cubes], seqlens=(len(slots), 92160))
    fine = attend(
        layout.tile(q)[:, slots],
        layout.tile(k),
        layout.tile(v),
        some,
        block_lengths=layout.sizes,
    )
    tokens = torch.full((92160,), -1).index_copy(0, layout.slots, torch.arange(75600))[slots]
    rows = tokens >= 0
    assert int(rows.sum()) == int(layout.sizes[cubes].sum())
    parts = (x.transpose(1, 2) for x in (q[:, tokens[rows]], k, v))
    dense = scaled_dot_product_attention(*parts).transpose(1, 2)
    assert_close(fine[:, rows], dense, rtol=1e-4, atol=1e-5)


# -- against the independent loops ----------------------------------------------------------------

SHAPES = [(8, 8, 8), (9, 9, 9), (4, 4, 4), (3, 2, 1), (12, 4, 4), (9, 4, 3), (12, 10, 9), (5, 7, 6)]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_coarse_stage_is_attention_over_cube_means(shape):
    q, k, v, *_ = inputs(shape, seed=1)
    out = video_sparse_attention(
        q, k, v, grid=shape, gate_compress=torch.ones_like(q), gate_fine=torch.zeros_like(q)
    )
    assert_close(out.numpy(), independent(q, k, v, shape, 1, 0.25).coarse, **EXACT)


@pytest.mark.parametrize("impl", ["reference", "eager"])
@pytest.mark.parametrize("sparsity", [0.3, 0.9])
@pytest.mark.parametrize("shape", SHAPES)
def test_route_output_and_lse_equal_the_independent_loops(shape, sparsity, impl):
    """Cube counts 1, 3, 8, 9, 27 and 36, even and odd; every gate combination at once."""
    q, k, v, compress, gate_fine = inputs(shape, seed=int(10 * sparsity))
    call = partial(
        video_sparse_attention, q, k, v, grid=shape, sparsity=sparsity, gate_compress=compress
    )
    keep = kept_cubes(sparsity, layout_of(*shape).count)
    expected = independent(q, k, v, shape, keep, 0.25)
    coarse = compress.numpy() * expected.coarse
    gated, trace = call(gate_fine=gate_fine, impl=impl, return_trace=True)
    assert_close(gated.numpy(), coarse + gate_fine.numpy() * expected.fine, **EXACT)
    assert_close(call(impl=impl).numpy(), coarse + expected.fine, **EXACT)
    assert np.array_equal(trace.route.dense().numpy(), expected.chosen)
    assert_close(trace.lse.numpy(), expected.lse.astype(np.float32), rtol=1e-5, atol=1e-5)


@settings(max_examples=15)
@given(grids, st.floats(0.0, 1.0), st.integers(0, 10_000))
def test_any_grid_and_sparsity_equal_the_independent_loops(shape, sparsity, seed):
    q, k, v, compress, _ = inputs(shape, seed=seed)
    out = video_sparse_attention(q, k, v, grid=shape, sparsity=sparsity, gate_compress=compress)
    keep = kept_cubes(sparsity, layout_of(*shape).count)
    expected = independent(q, k, v, shape, keep, 0.25)
    assert_close(out.numpy(), compress.numpy() * expected.coarse + expected.fine, **EXACT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precision_stays_within_two_roundings_of_float64_on_its_own_route(dtype):
    q, k, v, compress, _ = inputs((9, 5, 6), dtype=dtype)
    call = partial(video_sparse_attention, grid=(9, 5, 6), sparsity=0.5, return_trace=True)
    out, trace = call(q, k, v, gate_compress=compress)
    wide, wide_trace = call(q.double(), k.double(), v.double(), gate_compress=compress.double())
    same = (trace.route.dense() == wide_trace.route.dense()).all(dim=-1)
    rows = same[0].T[layout_of(9, 5, 6).slots // 64]
    assert out.dtype == dtype
    assert rows.float().mean() > 0.9
    step = 4 * torch.finfo(dtype).eps
    assert_close(out[0][rows].double(), wide[0][rows], rtol=step, atol=4 * step)


def test_the_trace_tells_what_ran_and_that_it_was_sparse():
    q, k, v, *_ = inputs((9, 9, 9))
    gate = torch.zeros_like(q)
    out, trace = video_sparse_attention(
        q, k, v, grid=(9, 9, 9), sparsity=0.9, gate_compress=gate, return_trace=True
    )
    assert trace.algorithm == "vsa"
    assert trace.density == pytest.approx(3 / 27)
    assert trace.lse.shape == (1, 2, 729)
    assert trace.lse.isfinite().all()
    assert trace.route.seqlens == (27 * 64, 27 * 64)
    assert (out - attend(q, k, v)).abs().max() > 1e-2


@pytest.mark.parametrize("order", ["tile", "morton"])
def test_another_token_order_gives_the_same_result_in_that_order(order):
    shape = (5, 6, 7)
    tensors = inputs(shape)
    raster = video_sparse_attention(
        *tensors[:3], grid=shape, sparsity=0.5, gate_compress=tensors[3], gate_fine=tensors[4]
    )
    grid = TokenGrid(shape, order=order)
    q, k, v, compress, fine = (grid.arrange(x) for x in tensors)
    out = video_sparse_attention(
        q, k, v, grid=grid, sparsity=0.5, gate_compress=compress, gate_fine=fine
    )
    assert torch.equal(grid.restore(out), raster)


def test_scale_is_used_by_both_stages_and_may_be_a_device_element():
    q, k, v, compress, _ = inputs((5, 6, 7))
    call = partial(
        video_sparse_attention, q, k, v, grid=(5, 6, 7), sparsity=0.5, gate_compress=compress
    )
    expected = independent(q, k, v, (5, 6, 7), 4, 0.75)
    by_hand = compress.numpy() * expected.coarse + expected.fine
    assert_close(call(scale=0.75).numpy(), by_hand, **EXACT)
    on_device = call(scale=torch.tensor(0.75))  # float32, so the exponents are rounded to it
    assert_close(on_device.numpy(), by_hand, rtol=1e-5, atol=1e-5)


# -- selection ------------------------------------------------------------------------------------


@pytest.mark.parametrize("select_dtype", ["float32", "input"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ties_go_to_the_lower_cube(dtype, select_dtype):
    q = torch.randn(1, 9 * 64, 1, 8, dtype=dtype)
    k = torch.ones(1, 9 * 64, 1, 8, dtype=dtype)
    route = vsa_route(q, k, grid=(36, 4, 4), sparsity=0.7, select_dtype=select_dtype)
    assert (route.dense()[..., :3]).all()
    assert not route.dense()[..., 3:].any()


def test_selection_in_the_input_dtype_sees_probabilities_rounded_to_it():
    """Cube 1 leads cube 0 by less than a bfloat16 step: float32 sees it, bfloat16 ties."""
    level = torch.tensor([1.0, 1.0078125, -4.0]).repeat_interleave(64)
    k = level[None, :, None, None].bfloat16()
    q = torch.full_like(k, 0.25)
    route = partial(vsa_route, q, k, grid=(12, 4, 4), sparsity=1.0, scale=1.0)
    assert route(select_dtype="float32").dense()[0, 0, 0].tolist() == [False, True, False]
    assert route(select_dtype="input").dense()[0, 0, 0].tolist() == [True, False, False]


def test_the_own_cube_is_not_forced_into_the_selection():
    k = torch.tensor([1.0, -1.0, -1.0]).repeat_interleave(64)[None, :, None, None]
    route = vsa_route(torch.ones_like(k), k, grid=(12, 4, 4), sparsity=1.0)
    assert route.dense()[0, 0].tolist() == [[True, False, False]] * 3


def test_skip_weakness_30_every_query_cube_keeps_the_same_number_so_paired_rows_share_it():
    """Weakness 30: a kernel that takes a pair's loop bound from one row is right for these."""
    q, k, *_ = inputs((9, 9, 9))
    assert vsa_route(q, k, grid=(9, 9, 9), sparsity=0.8).counts().unique().tolist() == [6]


def test_nan_in_a_query_spoils_its_cube_alone():
    q, k, v, compress, _ = inputs((9, 4, 4))
    call = partial(video_sparse_attention, grid=(9, 4, 4), sparsity=0.5, gate_compress=compress)
    clean = call(q, k, v)
    q[0, 70, 1] = math.nan  # second cube, second head
    out = call(q, k, v)
    assert out[0, 64:128, 1].isnan().all()
    out[0, 64:128, 1] = clean[0, 64:128, 1]
    assert torch.equal(out, clean)


# -- what is refused, before any work --------------------------------------------------------------


def refuse(error: type[Exception], match: str, *, shape=(5, 4, 4), **changes) -> None:
    q, k, v, compress, _ = inputs(shape, dtype=torch.float32)
    call = {"q": q, "k": k, "v": v, "grid": shape, "gate_compress": compress, **changes}
    with pytest.raises(error, match=match):
        video_sparse_attention(call.pop("q"), call.pop("k"), call.pop("v"), **call)


def test_a_missing_gate_is_refused_and_the_message_says_what_to_wire():
    refuse(ValueError, "gate_compress=None.*to_gate_compress", gate_compress=None)


@pytest.mark.parametrize("name", ["gate_compress", "gate_fine"])
def test_gates_must_be_tensors_like_q_without_gradient(name):
    good = torch.zeros(1, 80, 2, 16)
    refuse(TypeError, f"{name}.*float", **{name: 1.0})
    refuse(ValueError, f"{name}.*expected q's", **{name: good[:, :79]})
    refuse(ValueError, f"{name}.*expected q's", **{name: good.double()})
    refuse(ValueError, f"{name}: requires_grad", **{name: good.requires_grad_()})


def test_grouped_heads_are_refused():
    _, k, v = gaussian(80, heads=2, kv_heads=1, dim=16)
    refuse(ValueError, "k: 1 heads, but q has 2; VSA does not serve GQA", k=k, v=v)


def test_cross_attention_is_refused():
    _, k, v = gaussian(80, keys=64, dim=16)
    refuse(ValueError, "is self-attention: q has 80 tokens but k has 64", k=k, v=v)


def test_a_grid_that_fits_torchs_layout_is_told_so():
    q = torch.randn(1, 2, 80, 16)
    same = {"q": q, "k": q, "v": q, "gate_compress": q}
    refuse(ValueError, r"grid=.* but q has 2; .*SDPA layout, as x\.transpose\(1, 2\)", **same)


def test_an_empty_sequence_is_refused():
    q, k, v = gaussian(0, dim=16)
    refuse(ValueError, "empty sequence", q=q, k=k, v=v, gate_compress=q)


@pytest.mark.parametrize(
    "grid, error, match",
    [
        ((5, 4, 5), ValueError, r"grid=\(5, 4, 5\): has 100 tokens, but q has 80"),
        ((5, 4), TypeError, r"grid=\(5, 4\): expected a TokenGrid or three integers"),
        (80, TypeError, "grid=80: expected a TokenGrid"),
        (None, TypeError, "grid=None: expected a TokenGrid"),
        ((5, 4, 4.0), TypeError, r"grid\[2\]=4.0: expected an integer"),
        ((True, 20, 4), TypeError, r"grid\[0\]=True: expected an integer"),
        ((0, 4, 4), ValueError, r"grid\[0\]=0: must be at least 1"),
        (TokenGrid((4, 4, 4), suffix=16), ValueError, "text tokens, but VSA serves video tokens"),
    ],
)
def test_a_grid_that_does_not_describe_the_sequence_is_refused(grid, error, match):
    refuse(error, match, grid=grid)


def test_every_other_argument_is_checked_too():
    refuse(ValueError, "sparsity=2", sparsity=2)
    refuse(ValueError, "select_dtype='half': must be one of", select_dtype="half")
    refuse(ValueError, "scale=0", scale=0.0)
    refuse(ValueError, "impl='none'", impl="none")
    refuse(TypeError, "return_trace=1", return_trace=1)
    refuse(TypeError, "vsa_sparsity", vsa_sparsity=0.5)
    refuse(ValueError, "v: shape", v=torch.zeros(1, 79, 2, 16))
    refuse(ValueError, "requires_grad", q=torch.zeros(1, 80, 2, 16, requires_grad=True))


def test_arguments_are_checked_before_any_work(monkeypatch):
    monkeypatch.setattr("blockattn.vsa.CubeLayout.tile", None)
    refuse(ValueError, "impl='none'", impl="none")
    refuse(ValueError, "sparsity=2", sparsity=2)
    refuse(ValueError, "gate_fine", gate_fine=torch.zeros(1))


def test_inputs_stay_as_they_are_and_any_strides_are_read():
    tensors = inputs((5, 6, 7))
    wide = [torch.stack([x, x + 1], dim=-1).transpose(1, 2) for x in tensors]
    strided = [x.transpose(1, 2)[..., 0] for x in wide]
    before = [x.clone() for x in wide]
    call = partial(video_sparse_attention, grid=(5, 6, 7), sparsity=0.5)
    q, k, v, compress, fine = strided
    out = call(q, k, v, gate_compress=compress, gate_fine=fine)
    q, k, v, compress, fine = tensors
    assert_close(out, call(q, k, v, gate_compress=compress, gate_fine=fine), **EXACT)
    assert all(torch.equal(x, y) for x, y in zip(wide, before))


def test_the_route_is_a_value_that_attend_runs_too():
    q, k, v, *_ = inputs((9, 4, 4))
    layout = layout_of(9, 4, 4)
    route = vsa_route(q, k, grid=(9, 4, 4), sparsity=0.5)
    assert isinstance(route, BlockRoute)
    parts = (layout.tile(x) for x in (q, k, v))
    fine = layout.untile(attend(*parts, route, block_lengths=layout.sizes))
    whole = video_sparse_attention(
        q, k, v, grid=(9, 4, 4), sparsity=0.5, gate_compress=torch.zeros_like(q)
    )
    assert_close(fine, whole, **EXACT)


def test_a_named_implementation_that_cannot_serve_the_call_is_an_error_with_reasons(monkeypatch):
    monkeypatch.setattr(
        "blockattn.impl.registry._FASTEST_FIRST",
        tuple(replace(x, obstacles=lambda _: ["not today"]) for x in _implementations()),
    )
    refuse(UnsupportedError, "not today", impl="eager")


def _implementations():
    from blockattn.impl import registry

    return registry.implementations()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(9, 9, 9), (5, 6, 7)])
def test_on_a_gpu_the_result_is_the_same(shape):
    q, k, v, compress, fine = inputs(shape, dtype=torch.float32)
    call = partial(video_sparse_attention, grid=shape, sparsity=0.5)
    on_cpu = call(q, k, v, gate_compress=compress, gate_fine=fine)
    q, k, v, compress, fine = (x.cuda() for x in (q, k, v, compress, fine))
    out = call(q, k, v, gate_compress=compress, gate_fine=fine)
    assert_close(out.cpu(), on_cpu, rtol=1e-3, atol=1e-4)
