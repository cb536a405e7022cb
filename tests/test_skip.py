"""SkipSoftmax: planted maxima with known skip maps, one pass for every threshold, edge cases."""

from __future__ import annotations

import math
import warnings
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from blockattn import BlockRoute, attend, skip_gaps, skip_softmax_attention
from blockattn.skip import _warn_large_threshold, threshold_from_factor, threshold_log2
from tests import independent
from tests.inputs import gaussian, uneven

REFERENCES = ("exact", "lagging")
UNIT = math.log(2)  # a softmax scale at which raw scores are base-2 logits

reference = partial(attend, impl="reference")
skip_softmax = partial(skip_softmax_attention, impl="reference")


def planted(levels: list[float], *, rows: int = 128, tile: int = 128, axis: int = 0, dim: int = 8):
    """One query tile along a unit vector and key tile j along it with maximum ``levels[j]``.

    Every other key of a tile lies below its maximum; values are random.
    """
    q, k, v = gaussian(rows, keys=tile * len(levels), heads=1, dim=dim)
    height = torch.rand(len(levels), tile, generator=torch.Generator().manual_seed(1))
    height = torch.tensor(levels)[:, None] - 2 * height
    height[:, tile // 3] = torch.tensor(levels)
    q, k = torch.zeros_like(q), torch.zeros_like(k)
    q[..., axis] = 1
    k[..., axis] = height.flatten()[None, :, None]
    return q, k, v


def skip_map(q, k, v, log2_threshold: float, **settings) -> list[list[bool]]:
    """Dropped tiles of head 0, one row per query tile, at a scale of base-2 logits."""
    _, trace = reference(
        q, k, v, skip_threshold=2.0**log2_threshold, scale=UNIT, return_trace=True, **settings
    )
    return trace.skipped.dense()[0, 0].tolist()


def expected_map(levels, log2_threshold: float, kind: str) -> list[bool]:
    """The rule itself, on one number per tile."""
    true = lag = -math.inf
    dropped = []
    for level in levels:
        before = true if kind == "exact" else lag
        dropped.append(before > -math.inf and level - before < log2_threshold)
        if dropped[-1]:
            continue
        true = max(true, level)
        if level - lag > 8:
            lag = level
    return dropped


# -- planted maxima -------------------------------------------------------------------------------

EXAMPLE = [0.0, 6.0, -1.0, 3.0, -9.0, 12.0, 4.0]


@pytest.mark.parametrize(
    ("kind", "tiles"), [("exact", [2, 4, 6]), ("lagging", [4, 6])], ids=REFERENCES
)
def test_the_example_of_the_specification(kind, tiles):
    (row,) = skip_map(*planted(EXAMPLE), -4, skip_reference=kind)
    assert [j for j, dropped in enumerate(row) if dropped] == tiles


@pytest.mark.parametrize("kind", REFERENCES)
@given(levels=st.lists(st.integers(-9, 9), min_size=1, max_size=9))
def test_planted_maxima_give_the_map_of_the_rule(kind, levels):
    levels = [3.0 * level for level in levels]  # no gap near the threshold -4 or the lag of 8
    (row,) = skip_map(
        *planted(levels, rows=16, tile=16), -4, skip_tile=(16, 16), skip_reference=kind
    )
    assert row == expected_map(levels, -4, kind)


@pytest.mark.parametrize("kind", REFERENCES)
@pytest.mark.parametrize("log2_threshold", [-20, -4, 0, 1, 30])
def test_the_first_tile_is_never_dropped(log2_threshold, kind):
    levels = [-50.0, *EXAMPLE]
    (row,) = skip_map(*planted(levels), log2_threshold, skip_reference=kind)
    assert not row[0]
    assert row == expected_map(levels, log2_threshold, kind)


def test_one_tile_is_never_dropped():
    q, k, v = planted([0.0])
    assert skip_map(q, k, v, 30) == [[False]]


@pytest.mark.parametrize("kind", REFERENCES)
def test_the_comparison_is_strict(kind):
    q, k, v = planted([2.0, 2.0, 2.0])
    assert skip_map(q, k, v, 0, skip_reference=kind) == [[False] * 3]
    assert skip_map(q, k, v, 1e-3, skip_reference=kind) == [[False, True, True]]


def test_a_dropped_tile_leaves_maximum_sum_and_output_alone():
    # Tile 1 holds a new maximum and is dropped at lambda = 16; tile 2 is then measured from tile 0.
    q, k, v = planted([0.0, 3.0, -1.0])
    out, trace = reference(q, k, v, skip_threshold=16.0, scale=UNIT, return_trace=True)
    assert trace.skipped.dense()[0, 0].tolist() == [[False, True, True]]
    assert_close(out, reference(q, k[:, :128], v[:, :128], scale=UNIT))


@pytest.mark.parametrize("kind", REFERENCES)
def test_the_lse_covers_the_kept_tiles_only(kind):
    q, k, v = planted(EXAMPLE)
    _, trace = reference(
        q, k, v, skip_threshold=2**-4, scale=UNIT, skip_reference=kind, return_trace=True
    )
    kept = ~trace.skipped.dense()[0, 0, 0].repeat_interleave(128)
    out, want = reference(q, k[:, kept], v[:, kept], scale=UNIT, return_trace=True)
    assert_close(trace.lse, want.lse)
    found, _ = reference(
        q, k, v, skip_threshold=2**-4, scale=UNIT, skip_reference=kind, return_trace=True
    )
    assert_close(found, out)


def test_query_tiles_decide_independently():
    other = [0.0, -9.0, 5.0, 5.0, 5.0, -9.0, 12.0]
    first, second = planted(EXAMPLE, axis=0), planted(other, axis=1)
    q = torch.cat([first[0], second[0]], dim=1)
    found = skip_map(q, first[1] + second[1], first[2], -4)
    assert found == [expected_map(EXAMPLE, -4, "exact"), expected_map(other, -4, "exact")]
    assert found[0] != found[1]


def test_one_row_keeps_a_tile_for_all():
    q, k, v = planted(EXAMPLE, axis=0)
    _, other, _ = planted([0.0, 0.0, 0.0, 0.0, 9.0, 0.0, 0.0], axis=1)
    q[0, 77] = torch.eye(8)[1]
    (row,) = skip_map(q, k + other, v, -4)
    assert row == [False] * 6 + [True]  # the row vetoes tiles 2 and 4, not the last one
    q[0, 77] = torch.eye(8)[0]
    assert skip_map(q, k + other, v, -4) == [expected_map(EXAMPLE, -4, "exact")]


@pytest.mark.parametrize("kind", REFERENCES)
def test_rows_whose_keys_are_all_masked_cannot_veto(kind):
    q, k, v = planted(EXAMPLE)
    mask = torch.tensor([[False], [True]]).expand(1, 1, 2, 14)
    route = BlockRoute.from_dense(mask, seqlens=(128, 7 * 128))
    out, trace = reference(
        q, k, v, route, skip_threshold=2**-4, scale=UNIT, skip_reference=kind, return_trace=True
    )
    assert trace.skipped.dense()[0, 0].tolist() == [expected_map(EXAMPLE, -4, kind)]
    assert not out[:, :64].any()
    assert out[:, 64:].all()


def test_heads_decide_independently_and_read_their_own_group():
    first, second = planted(EXAMPLE), planted(EXAMPLE[::-1])
    k, v = (torch.cat([first[n], second[n]], dim=2) for n in (1, 2))
    q = first[0].expand(-1, -1, 4, -1)
    _, trace = reference(q, k, v, skip_threshold=2**-4, scale=UNIT, return_trace=True)
    rows = trace.skipped.dense()[0, :, 0].tolist()
    want = [expected_map(EXAMPLE, -4, "exact"), expected_map(EXAMPLE[::-1], -4, "exact")]
    assert rows == [want[0], want[0], want[1], want[1]]


@pytest.mark.parametrize("kind", REFERENCES)
@pytest.mark.parametrize(("rows", "cut"), [(1, 0), (130, 0), (128, 100), (200, 127)])
def test_ragged_last_tiles_vote_with_their_real_rows_and_keys(rows, cut, kind):
    # Rows that are not there cannot veto, keys that are not there have no maximum.
    q, k, v = planted(EXAMPLE, rows=rows)
    k[0, -128:, 0, 0] = -30.0
    k[0, -128, 0, 0] = EXAMPLE[-1]  # the last tile's maximum is its first key, which stays
    keys = k.shape[1] - cut
    found = skip_map(q, k[:, :keys], v[:, :keys], -4, skip_reference=kind)
    assert found == [expected_map(EXAMPLE, -4, kind)] * -(-rows // 128)


def test_causal_tiles_use_the_visible_maximum():
    # Keys fall along the sequence, so every tile left of the diagonal sets the maximum and the
    # diagonal one lies 4 below the tile before it.
    levels = [0.0, -4.0, -8.0]
    q, k, v = planted(levels, rows=384)
    found = skip_map(q, k, v, -3, causal=True)
    assert found == [[False] * 3, [False, True, False], [False, True, True]]
    _, trace = reference(q, k, v, skip_threshold=2**-3, scale=UNIT, causal=True, return_trace=True)
    assert trace.density == (6 - 3) / 6


def test_skip_weakness_34_a_fully_masked_leading_tile_does_not_become_the_reference():
    # The first tile is masked by the route; real scores far below 0 must not be measured from 0.
    q, k, v = planted([5.0, -50.0, -51.0])
    mask = torch.tensor([False, True, True])[None, None, None]
    route = BlockRoute.from_dense(mask, block=(128, 128))
    out, trace = reference(q, k, v, route, skip_threshold=2**-4, scale=UNIT, return_trace=True)
    assert trace.skipped.dense()[0, 0].tolist() == [[False, False, False]]
    assert_close(out, reference(q, k[:, 128:], v[:, 128:], scale=UNIT))


# -- against an independent computation -----------------------------------------------------------

GAUSSIAN_TABLE = [  # threshold_scale_factor, tiles dropped with the lagging and exact reference
    (0.3, 0, 0),
    (512, 0, 0),
    (650, 0, 3),
    (700, 5, 13),
    (750, 22, 27),
    (1000, 48, 48),
]


@pytest.fixture(scope="module")
def gaussian_example():
    """Standard normal x 0.5, 4 heads, 512 tokens, head dim 128: 64 tiles."""
    generator = np.random.default_rng(42)
    q, k, v = (generator.standard_normal((4, 512, 128)) * 0.5 for _ in range(3))
    return tuple(torch.tensor(x.transpose(1, 0, 2)[None].copy()) for x in (q, k, v))


@pytest.mark.parametrize(("factor", "lagging", "exact"), GAUSSIAN_TABLE)
def test_the_table_of_the_specification(gaussian_example, factor, lagging, exact):
    dense = reference(*gaussian_example)
    for kind, dropped in (("lagging", lagging), ("exact", exact)):
        out, trace = reference(
            *gaussian_example, skip_threshold=factor / 512, skip_reference=kind, return_trace=True
        )
        assert int(trace.skipped.counts().sum()) == dropped
        assert trace.density == 1 - dropped / 64
        assert torch.equal(out, dense) == (dropped == 0)


@pytest.mark.parametrize("kind", REFERENCES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys", "heads"), [(300, 300, (2, 2)), (200, 520, (4, 2))])
def test_maps_and_results_equal_an_independent_computation(queries, keys, heads, causal, kind):
    q, k, v = uneven(keys, heads=heads[0], kv_heads=heads[1], dtype=torch.float64)
    q = q[:, :queries]
    out, trace = reference(
        q, k, v, skip_threshold=0.3, skip_tile=(64, 32), skip_reference=kind, causal=causal,
        return_trace=True,
    )  # fmt: skip
    found = independent.attention(
        q.numpy(), k.numpy(), v.numpy(), scale=32**-0.5, threshold=0.3, tile=(64, 32),
        lagging=kind == "lagging", causal=causal,
    )  # fmt: skip
    assert torch.equal(trace.skipped.dense(), torch.tensor(found.dropped))
    assert_close(out, torch.tensor(found.out))
    assert_close(trace.lse, torch.tensor(found.lse).float())
    assert 0 < trace.density < 1
    assert found.dropped.any()
    assert not torch.equal(out, reference(q, k, v, causal=causal))


def test_the_lagging_reference_never_drops_more_than_the_exact_one():
    q, k, v = uneven(650)
    maps = [
        reference(q, k, v, skip_threshold=0.4, skip_reference=kind, skip_tile=(64, 64),
                  return_trace=True)[1].skipped
        for kind in REFERENCES
    ]  # fmt: skip
    assert maps[0].density() > maps[1].density() > 0


# -- thresholds -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", REFERENCES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_threshold_0_is_dense_bit_for_bit(dtype, causal, kind):
    q, k, v = uneven(300, dtype=dtype)
    out, trace = reference(
        q, k, v, skip_threshold=0, skip_reference=kind, causal=causal, return_trace=True
    )
    dense, dense_trace = reference(q, k, v, causal=causal, return_trace=True)
    assert torch.equal(out, dense)
    assert torch.equal(trace.lse, dense_trace.lse)
    assert trace.skipped.density() == 0
    assert (trace.algorithm, dense_trace.skipped) == ("skip_softmax", None)


@pytest.mark.parametrize("settings", [{}, {"threshold_scale_factor": 0}, {"threshold": None}])
def test_no_threshold_and_factor_0_are_dense(settings):
    q, k, v = gaussian(300)
    out, trace = skip_softmax(q, k, v, **settings, return_trace=True)
    assert torch.equal(out, reference(q, k, v))
    assert (trace.algorithm, trace.skipped, trace.density) == ("dense", None, 1)


def test_a_factor_is_lambda_times_the_number_of_keys():
    assert threshold_from_factor(128, 512) == 0.25
    assert threshold_log2(0.25) == -2
    assert threshold_log2(0) == -math.inf
    q, k, v = uneven(650)
    out, trace = skip_softmax(q, k, v, threshold_scale_factor=195, return_trace=True)
    same, same_trace = skip_softmax(q, k, v, threshold=0.3, return_trace=True)
    assert trace.skipped == same_trace.skipped
    assert torch.equal(out, same)
    assert trace.skipped.density() > 0


def test_a_larger_threshold_drops_more_of_the_same_tiles():
    q, k, v = uneven(650)
    maps = [
        skip_softmax(q, k, v, threshold=x, return_trace=True)[1].skipped
        for x in (0.0, 0.01, 0.1, 0.5, 0.99)
    ]
    for less, more in pairwise(maps):
        assert (less - more).density() == 0
    assert maps[-1].density() > maps[2].density() > 0


def test_a_sparse_call_is_visible_in_trace_and_output():
    q, k, v = uneven(650)
    out, trace = skip_softmax(q, k, v, threshold=0.5, return_trace=True)
    dropped = int(trace.skipped.counts().sum())
    assert dropped > 0
    assert trace.density == 1 - dropped / (2 * 36)
    assert not torch.equal(out, reference(q, k, v))
    assert f"{dropped} tiles skipped" in str(trace)


@pytest.mark.parametrize("settings", [{"threshold": 2.0}, {"threshold_scale_factor": 600.0}])
def test_lambda_of_1_or_more_warns_once_and_runs(settings):
    q, k, v = gaussian(300)
    _warn_large_threshold.cache_clear()
    with pytest.warns(UserWarning, match=r"threshold=2 \(threshold_scale_factor=600 over 300 keys"):
        _, trace = skip_softmax(q, k, v, **settings, return_trace=True)
    assert trace.skipped.density() > 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        skip_softmax(q, k, v, **settings)
        reference(q, k, v, skip_threshold=3.0)


def test_no_keys_leave_the_factor_without_a_length():
    q, k, v = gaussian(130, keys=0)
    assert torch.equal(skip_softmax(q, k, v, threshold_scale_factor=5), torch.zeros_like(q))


# -- one pass for every threshold -----------------------------------------------------------------

LADDER = [0.0, 1e-6, 1e-3, 0.01, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1.0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("queries", "keys", "tile"), [(300, 300, (128, 128)), (450, 450, (64, 32)), (70, 650, (64, 64))]
)
def test_the_map_of_one_pass_is_the_map_of_a_run_at_that_threshold(
    queries, keys, tile, causal, dtype
):
    q, k, v = uneven(keys, heads=4, kv_heads=2, dtype=dtype)
    q = q[:, :queries]
    gaps = skip_gaps(q, k, causal=causal, tile=tile)
    sparsity = gaps.sparsity(LADDER)
    assert sparsity.shape == (1, 4, len(LADDER))
    for n, threshold in enumerate(LADDER):
        _, trace = reference(
            q, k, v, skip_threshold=threshold, skip_tile=tile, causal=causal, return_trace=True
        )
        found = gaps.skipped(threshold)
        limit = threshold_log2(threshold)
        near = (gaps.gaps - limit).abs() <= 1e-4 * max(1, abs(limit))
        assert not ((found.dense() ^ trace.skipped.dense()) & ~near).any()
        share = found.counts().sum(dim=-1) / gaps.reachable.counts().sum(dim=-1)
        assert_close(sparsity[..., n], share.double())
    assert sparsity[..., 0].max() == 0
    assert sparsity[..., -1].max() > 0


def test_the_comparison_of_one_pass_is_strict_too():
    q, k, _ = planted([2.0, 2.0, 2.0])
    gaps = skip_gaps(q, k, scale=UNIT)
    assert gaps.gaps.flatten().tolist() == [math.inf, 0, 0]
    assert gaps.skipped(1.0).density() == 0
    assert gaps.sparsity([1.0]).item() == 0


def test_gaps_mark_first_tiles_and_tiles_out_of_reach():
    q, k, _ = planted([0.0, -4.0, -8.0], rows=384)
    found = skip_gaps(q, k, scale=UNIT, causal=True)
    inf = math.inf
    want = torch.tensor([[inf, -inf, -inf], [inf, -4, -inf], [inf, -4, -8]])
    assert_close(found.gaps[0, 0], want)
    assert found.reachable.dense()[0, 0].tolist() == (want > -inf).tolist()
    assert not found.skipped(1.0).dense()[0, 0, 0].any()


def test_a_nan_row_keeps_its_tiles_in_both():
    q, k, v = planted(EXAMPLE)
    q[0, 3, 0, 0] = torch.nan
    assert skip_map(q, k, v, -4) == [[False] * 7]
    gaps = skip_gaps(q, k, scale=UNIT)
    assert gaps.skipped(2**-4).density() == 0
    assert gaps.sparsity([2**-4, 1.0]).tolist() == [[[0, 0]]]


@pytest.mark.parametrize("threshold", [1.0000001, 2.0])
def test_one_pass_cannot_tell_above_lambda_1(threshold):
    q, k, _ = gaussian(300)
    gaps = skip_gaps(q, k)
    for call in (gaps.skipped, lambda x: gaps.sparsity([0.5, x])):
        with pytest.raises(ValueError, match="above 1 a dropped tile may hold a new maximum"):
            call(threshold)


def test_gaps_of_no_keys_and_no_queries_are_empty():
    for queries, keys in ((130, 0), (0, 130)):
        q, k, _ = gaussian(queries, keys=keys)
        gaps = skip_gaps(q, k)
        assert gaps.skipped(0.5).density() == 0
        assert gaps.sparsity([0.0, 1.0]).tolist() == [[[0, 0], [0, 0]]]
