"""Sol-Attn: golden vectors, the invariants of the method, ties, sinks, tails, large means."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from blockattn import BlockRoute, BlockSummary, attend, sol_attention, sol_route, sol_scores
from blockattn.sol import sink_blocks
from tests import golden, independent
from tests.inputs import drifting, gaussian

TYPES = ("diag", "exact")
LENGTHS = (1, 63, 64, 65, 127, 128, 129, 650, 2050)
DENSE, LOCAL = -1000.0, 1000.0

reference = partial(attend, impl="reference")
sol = partial(sol_attention, impl="reference")


def sol_float64(q, k, v, *, tau: float, thresh_type: str = "diag", block: int = 64, **sink):
    """Sol-Attn in float64 on summaries rounded to the inputs' dtype: output and trace."""
    route = sol_route(q, k, tau=tau, thresh_type=thresh_type, block=block, **sink)
    tail = BlockSummary.of(k, v, block).to(torch.float64)
    wide = (x.double() for x in (q, k, v))
    return reference(*wide, route, tail=tail, return_trace=True)


def dense_float64(q, k, v):
    return reference(*(x.double() for x in (q, k, v)), return_trace=True)


def numbers(text: str) -> list[float]:
    return [float(word) for word in text.split()]


def near(*values: float, within: float = 2e-6):
    return pytest.approx(values if len(values) > 1 else values[0], abs=within)


# -- golden vectors -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def example():
    q, k, v = golden.inputs()
    return SimpleNamespace(q=q, k=k, v=v, qkv=(q, k, v), summary=BlockSummary.of(k, v))


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_golden_inputs(example, name):
    first, total = golden.CORNERS[name]
    x = getattr(example, name)
    assert tuple(x[0, 0, 0, :4].tolist()) == first
    assert x.double().sum().item() == near(total)


@pytest.mark.parametrize("place", golden.SUMMARIES)
def test_golden_summaries(example, place):
    name, block, head = place
    row = getattr(example.summary, name)[0, block, head, :3]
    assert row.dtype == torch.bfloat16
    assert tuple(row.tolist()) == golden.SUMMARIES[place]
    assert example.summary.lengths.tolist() == [64] * 10 + [10]


@pytest.mark.parametrize("want", golden.AT_TAU_1, ids=TYPES)
def test_golden_route(example, want):
    scores = sol_scores(example.q, example.k, thresh_type=want.thresh_type)
    route = scores.route(1.0)
    for head in range(2):
        theta = scores.threshold(1.0)[0, head].tolist()
        assert theta == pytest.approx(numbers(want.theta[head]), abs=1e-5)
        assert golden.hex_rows(route.dense()[0, head]) == want.rows[head]
    assert route.density() == near(want.density)
    assert route == sol_route(example.q, example.k, tau=1.0, thresh_type=want.thresh_type)


@pytest.mark.parametrize("want", golden.AT_TAU_1, ids=TYPES)
def test_golden_output(example, want):
    out, trace = sol_float64(*example.qkv, tau=1.0, thresh_type=want.thresh_type)
    assert tuple(out[0, 0, 0, :3].tolist()) == near(*want.first)
    assert tuple(out[0, 649, 1, :3].tolist()) == near(*want.last)
    assert trace.lse[0, 0, 0].item() == near(want.lse_first)
    assert trace.lse[0, 1, 649].item() == near(want.lse_last)
    assert out.norm().item() == near(want.norm)
    assert trace.lse.double().sum().item() == near(want.lse_sum, within=1e-3)
    assert (trace.algorithm, trace.density) == ("sol_attn", near(want.density))


@pytest.mark.parametrize("thresh_type", TYPES)
def test_golden_output_at_tau_one_half(example, thresh_type):
    density, lse_last, norm = golden.AT_TAU_HALF[thresh_type]
    out, trace = sol_float64(*example.qkv, tau=0.5, thresh_type=thresh_type)
    assert trace.density == near(density)
    assert trace.lse[0, 1, 649].item() == near(lse_last)
    assert out.norm().item() == near(norm)


def test_golden_dense_output(example):
    out, _ = dense_float64(*example.qkv)
    assert out.norm().item() == near(golden.DENSE_NORM)
    assert tuple(out[0, 0, 0, :3].tolist()) == near(*golden.DENSE_FIRST)


@pytest.mark.parametrize("want", golden.AT_TAU_1, ids=TYPES)
def test_the_public_call_in_bfloat16_stays_within_the_tolerances(example, want):
    out, trace = sol(*example.qkv, thresh_type=want.thresh_type, return_trace=True)
    exact, _ = sol_float64(*example.qkv, tau=1.0, thresh_type=want.thresh_type)
    assert out.dtype == torch.bfloat16
    error = out.double() - exact
    rounding = 2**-9 * exact.abs()  # of the output itself to bfloat16
    assert error.norm() <= 3e-3 * exact.norm()
    assert (error.abs() <= 2.5e-3 * example.v.abs().max() + rounding).all()
    assert trace.lse[0, 0, 0].item() == near(want.lse_first, within=1e-3)
    assert trace.lse[0, 1, 649].item() == near(want.lse_last, within=1e-3)
    assert trace.density == near(want.density)
    assert trace.density < 1
    assert not torch.equal(out, reference(*example.qkv))


@pytest.mark.parametrize("want", golden.AT_TAU_1, ids=TYPES)
def test_the_independent_computation_gives_the_golden_vectors_too(example, want):
    q, k, v = (x.double().numpy() for x in example.qkv)
    summary, scale = independent.summarise(k, v), 128**-0.5
    theta, _, exact = independent.sol_plan(q, summary.k_mean, 1.0, want.thresh_type, scale=scale)
    found = independent.attention(q, k, v, scale=scale, exact=exact, tail=summary)
    assert theta[0, 1].tolist() == pytest.approx(numbers(want.theta[1]), abs=1e-5)
    assert golden.hex_rows(exact[0, 1]) == want.rows[1]
    assert np.linalg.norm(found.out) == near(want.norm)
    assert found.lse.sum() == near(want.lse_sum, within=1e-3)


# -- against the independent computation ----------------------------------------------------------

CASES = [
    # tokens, settings of the inputs, block, tau, sink
    (1, {}, 64, 0.5, {}),
    (63, {"batch": 2}, 64, -1.0, {}),
    (65, {}, 64, 0.0, {}),
    (129, {"heads": 3, "kv_heads": 1}, 64, 0.5, {}),
    (650, {"batch": 2, "heads": 4, "kv_heads": 2, "seed": 5}, 64, 1.0, {}),
    (650, {"seed": 6}, 64, 0.3, {"sink_tokens": 70}),
    (300, {"seed": 7}, 32, 0.7, {"sink_start": 63, "sink_tokens": 2}),
    (300, {"seed": 8, "dim": 16}, 16, 1.5, {}),
    (2050, {"heads": 1, "seed": 9}, 64, 1.0, {}),
]


@pytest.mark.parametrize("thresh_type", TYPES)
@pytest.mark.parametrize(("tokens", "settings", "block", "tau", "sink"), CASES)
def test_route_and_result_equal_an_independent_computation(
    tokens, settings, block, tau, sink, thresh_type
):
    q, k, v = drifting(tokens, dtype=torch.bfloat16, **settings)
    a, b, c = (x.double().numpy() for x in (q, k, v))
    summary, scale = independent.summarise(b, c, block), a.shape[-1] ** -0.5
    theta, score, exact = independent.sol_plan(
        a, summary.k_mean, tau, thresh_type, scale=scale, block=block,
        sink=sink_blocks(tokens, block=block, **sink),
    )  # fmt: skip
    scores = sol_scores(q, k, thresh_type=thresh_type, block=block, **sink)
    assert_close(scores.threshold(tau), torch.tensor(theta).float(), rtol=1e-4, atol=1e-4)
    assert_close(scores.scores(), torch.tensor(score).float(), rtol=1e-4, atol=1e-4)

    near_tie = np.abs(score - theta[..., None]) <= 1e-4 * np.maximum(1, np.abs(theta[..., None]))
    mask = scores.route(tau).dense().numpy()
    assert ((mask == exact) | near_tie).all()

    found = independent.attention(a, b, c, scale=scale, exact=mask, block=block, tail=summary)
    out, trace = sol_float64(q, k, v, tau=tau, thresh_type=thresh_type, block=block, **sink)
    assert_close(out, torch.tensor(found.out), rtol=1e-9, atol=1e-9)
    assert_close(trace.lse.double(), torch.tensor(found.lse), rtol=1e-6, atol=1e-6)
    assert trace.density == pytest.approx(mask.mean())


def test_the_cases_above_route_some_blocks_and_not_others():
    densities = []
    for tokens, settings, block, tau, sink in CASES[4:]:
        q, k, _ = drifting(tokens, dtype=torch.bfloat16, **settings)
        route = sol_route(q, k, tau=tau, block=block, **sink)
        band = sol_route(q, k, tau=LOCAL, block=block, **sink)
        densities.append((band.density(), route.density()))
    assert all(low < found < 1 for low, found in densities)


# -- invariants -----------------------------------------------------------------------------------


@pytest.mark.parametrize("thresh_type", TYPES)
@pytest.mark.parametrize("tokens", LENGTHS)
def test_tau_minus_1000_is_dense_attention(tokens, thresh_type):
    q, k, v = drifting(tokens, heads=1)
    out, trace = sol(q, k, v, tau=DENSE, thresh_type=thresh_type, return_trace=True)
    dense, dense_trace = reference(q, k, v, return_trace=True)
    assert trace.density == 1
    assert_close(out, dense, rtol=1e-5, atol=1e-5)
    assert_close(trace.lse, dense_trace.lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("thresh_type", TYPES)
@pytest.mark.parametrize("tau", [LOCAL, 0.0, 1.0])
@pytest.mark.parametrize("tokens", [n for n in LENGTHS if n <= 128])
def test_up_to_two_blocks_everything_is_dense_at_any_tau(tokens, tau, thresh_type):
    q, k, v = gaussian(tokens)
    out, trace = sol(q, k, v, tau=tau, thresh_type=thresh_type, return_trace=True)
    assert trace.density == 1
    assert_close(out, reference(q, k, v), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("thresh_type", TYPES)
@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("sink", [0, 70])
def test_tau_plus_1000_leaves_band_and_sink(tokens, sink, thresh_type):
    sink = min(sink, tokens)
    q, k, _ = drifting(tokens)
    route = sol_route(q, k, tau=LOCAL, thresh_type=thresh_type, sink_tokens=sink)
    block = torch.arange(-(-tokens // 64))
    expected = (block[:, None] - block[None, :]).abs() <= 1
    if sink:
        expected = expected | (block >= (tokens - sink) // 64)[None, :]
    assert torch.equal(route.dense(), expected.expand(1, 2, -1, -1))


def test_a_sink_over_all_tokens_is_dense():
    q, k, v = drifting(650)
    out, trace = sol(q, k, v, tau=LOCAL, sink_tokens=650, return_trace=True)
    assert trace.density == 1
    assert_close(out, reference(q, k, v), rtol=1e-5, atol=1e-5)


def test_batches_and_heads_do_not_see_each_other():
    q, k, v = drifting(330, batch=2, heads=3, dtype=torch.float64)
    whole, trace = sol(q, k, v, tau=0.7, return_trace=True)
    for b in range(2):
        for h in range(3):
            one = (x[b : b + 1, :, h : h + 1] for x in (q, k, v))
            out, alone = sol(*one, tau=0.7, return_trace=True)
            assert torch.equal(alone.route.dense()[0, 0], trace.route.dense()[b, h])
            assert_close(out[0, :, 0], whole[b, :, h])
            assert_close(alone.lse[0, 0], trace.lse[b, h])


def test_heads_of_the_scores_are_the_scores_of_the_heads():
    q, k, _ = drifting(330, heads=4)
    part = sol_scores(q, k, sink_tokens=3).heads(slice(1, 3))
    alone = sol_scores(q[:, :, 1:3], k[:, :, 1:3], sink_tokens=3)
    assert_close(part.z, alone.z)
    assert part.route(0.5) == alone.route(0.5)


def test_permuting_heads_permutes_the_output():
    q, k, v = drifting(330, heads=4)
    order = [2, 0, 3, 1]
    out = sol(q, k, v, tau=0.7)
    moved = sol(*(x[:, :, order] for x in (q, k, v)), tau=0.7)
    assert_close(moved, out[:, :, order])


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_grouped_heads_equal_repeated_ones(kv_heads):
    q, k, v = drifting(330, heads=4, kv_heads=kv_heads)
    repeated = (x.repeat_interleave(4 // kv_heads, dim=2) for x in (k, v))
    out, trace = sol(q, k, v, tau=0.7, return_trace=True)
    want, want_trace = sol(q, *repeated, tau=0.7, return_trace=True)
    assert trace.route == want_trace.route
    assert_close(out, want)


@pytest.mark.parametrize("tau", [-0.5, 0.0, 1.0, LOCAL])
def test_keys_equal_within_each_block_make_any_route_exact(tau):
    # Then a block's mean key stands for its keys without error; values may differ freely.
    q, k, v = gaussian(650, dtype=torch.float64)
    k = k[:, ::64].repeat_interleave(64, dim=1)[:, :650]
    out, trace = sol(q, k, v, tau=tau, return_trace=True)
    dense, dense_trace = reference(q, k, v, return_trace=True)
    assert trace.density < 1
    assert_close(out, dense)
    assert_close(trace.lse, dense_trace.lse)


@pytest.mark.parametrize("thresh_type", TYPES)
@pytest.mark.parametrize("size", [1.0, 30.0, 1000.0])
def test_a_constant_added_to_every_key_changes_nothing(size, thresh_type):
    q, k, v = drifting(1300, heads=1, dtype=torch.float64)
    offset = size * torch.linspace(-1, 1, k.shape[-1], dtype=torch.float64)
    out, trace = sol(q, k, v, thresh_type=thresh_type, return_trace=True)
    moved, moved_trace = sol(q, k + offset, v, thresh_type=thresh_type, return_trace=True)
    assert 0 < trace.density < 1
    assert moved_trace.route == trace.route
    assert_close(moved, out, rtol=1e-6, atol=1e-8)


def test_sol_weakness_1_keys_with_a_large_mean_keep_the_exact_density_in_float32():
    # mean^2 / variance of the summaries is about 5e4: uncentred second moments would drift here.
    q, k, _ = drifting(4096, heads=1, dim=128, strength=0.5)
    moved = k + 8.0
    summary = BlockSummary.of(moved, moved).k_mean.double()
    assert summary.mean() ** 2 / summary.var(dim=1).mean() > 1e3
    plain, shifted = (sol_scores(q, x, thresh_type="exact") for x in (k, moved))
    near_tie = (plain.z - 1.0).abs() < 1e-3
    differing = plain.route(1.0).dense() ^ shifted.route(1.0).dense()
    assert not (differing & ~near_tie).any()
    assert plain.route(1.0).density() == pytest.approx(shifted.route(1.0).density(), abs=1e-3)


def test_scaling_v_scales_the_output():
    q, k, v = drifting(330)
    assert_close(sol(q, k, 4 * v, tau=0.7), 4 * sol(q, k, v, tau=0.7))


@given(low=st.floats(-3, 3), high=st.floats(-3, 3), seed=st.integers(0, 20))
def test_a_larger_tau_keeps_a_subset(low, high, seed):
    low, high = sorted((low, high))
    q, k, _ = drifting(330, seed=seed)
    scores = sol_scores(q, k, thresh_type=TYPES[seed % 2])
    assert scores.route(high) - scores.route(low) == scores.route(low) - scores.route(low)
    assert scores.route(high).density() <= scores.route(low).density()


@pytest.mark.parametrize("thresh_type", TYPES)
@pytest.mark.parametrize("tau", [-1.0, 0.0, 0.5, 2.0, LOCAL])
def test_a_summary_never_overestimates_the_mass(tau, thresh_type):
    q, k, v = drifting(650, dtype=torch.float64)
    _, trace = sol_float64(q, k, v, tau=tau, thresh_type=thresh_type)
    _, dense = dense_float64(q, k, v)
    assert (trace.lse <= dense.lse + 1e-5).all()
    assert (trace.lse < dense.lse - 1e-3).any()


# -- one pass for every tau -----------------------------------------------------------------------


@pytest.mark.parametrize("thresh_type", TYPES)
@pytest.mark.parametrize("tokens", [1, 129, 650, 2050])
def test_densities_at_many_taus_equal_the_density_of_each_route(tokens, thresh_type):
    q, k, _ = drifting(tokens, batch=2, dtype=torch.bfloat16)
    scores = sol_scores(q, k, thresh_type=thresh_type, sink_tokens=1)
    ties = scores.z.flatten()[:: max(1, scores.z.numel() // 12)].tolist()
    taus = [DENSE, -1.0, -0.1, 0.0, 0.1, 1.0, 1.0 + 1e-7, 3.0, LOCAL, *ties]
    found = scores.density(taus)
    assert found.dtype == torch.float64
    assert found.shape == (2, 2, len(taus))
    for n, tau in enumerate(taus):
        assert torch.equal(found[..., n], scores.route(tau).density_per_head()), tau


def test_taus_may_be_a_tensor_in_any_order():
    q, k, _ = drifting(650)
    scores = sol_scores(q, k)
    taus = torch.tensor([2.0, -1.0, 0.5], dtype=torch.float64)
    assert torch.equal(scores.density(taus), scores.density([2.0, -1.0, 0.5]))


def test_any_finite_tau_is_served():
    q, k, _ = drifting(650)
    scores = sol_scores(q, k)
    assert scores.route(1e300) == scores.always
    assert scores.route(-1e300).density() == 1
    assert scores.density([1e300, -1e300])[0, 0].tolist() == [scores.always.density(), 1]


@pytest.mark.parametrize("size", [1e5, 1e9, 1e14])
@pytest.mark.parametrize("thresh_type", TYPES)
def test_tau_works_at_any_size_of_the_scores(size, thresh_type):
    """Squares of scores from 1e19 on overflow float32: every z was 0, and tau did nothing."""
    q, k, _ = drifting(650, seed=5, dtype=torch.float32)
    plain = sol_scores(q, k, thresh_type=thresh_type, scale=1e4)
    scaled = sol_scores(size * q, size * k, thresh_type=thresh_type, scale=1e4)
    assert_close(scaled.z, plain.z, rtol=1e-4, atol=1e-4)
    assert 0 < scaled.passing(0.5).density() < 1


def test_nan_scores_pass_no_threshold():
    q, k, _ = drifting(650)
    q[0, 0, 0, 0] = torch.nan
    scores = sol_scores(q, k)
    assert scores.z[0, 0, 0].isnan().all()
    assert torch.equal(scores.route(DENSE).dense()[0, 0, 0], scores.always.dense()[0, 0, 0])
    assert torch.equal(scores.density([DENSE])[..., 0], scores.route(DENSE).density_per_head())


@pytest.mark.parametrize("thresh_type", TYPES)
def test_scores_above_the_threshold_are_the_route(thresh_type):
    q, k, _ = drifting(650)
    scores = sol_scores(q, k, thresh_type=thresh_type)
    for tau in (-0.5, 0.0, 1.0):
        margin = scores.scores() - scores.threshold(tau)[..., None]
        clear = margin.abs() > 1e-4
        assert torch.equal((margin > 0)[clear], scores.passing(tau).dense()[clear])
        assert scores.route(tau) == scores.passing(tau) | scores.always


def test_z_scores_of_the_exact_type_have_mean_0_and_deviation_1():
    q, k, _ = drifting(2050)
    z = sol_scores(q, k, thresh_type="exact").z
    assert_close(z.mean(dim=-1), torch.zeros(1, 2, 33), rtol=0, atol=1e-4)
    assert_close(z.square().mean(dim=-1), torch.ones(1, 2, 33), rtol=1e-3, atol=1e-3)


def test_the_two_threshold_types_agree_on_one_channel_and_differ_on_correlated_ones():
    q, k, _ = drifting(650, dim=1)
    assert_close(
        sol_scores(q, k, thresh_type="diag").std, sol_scores(q, k, thresh_type="exact").std
    )
    q, k = torch.ones(1, 650, 1, 8), k.expand(-1, -1, -1, 8)[:, :, :1]
    ratio = sol_scores(q, k, thresh_type="exact").std / sol_scores(q, k, thresh_type="diag").std
    assert_close(ratio, torch.full_like(ratio, 8**0.5), rtol=1e-3, atol=1e-3)


def test_the_scale_enters_the_route_through_the_variance_floor_alone():
    q, k, _ = drifting(650)
    assert sol_route(q, k, tau=1.0, scale=0.1) == sol_route(q, k, tau=1.0, scale=10.0)
    assert sol_scores(q, k, scale=1e-9).z.abs().max() < 1e-3


# -- ties -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("thresh_type", TYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tau", "exact"), [(0.0, False), (1e-6, False), (-1e-6, True)])
def test_a_tie_is_approximate(thresh_type, dtype, tau, exact):
    # Equal keys everywhere: every block scores exactly the mean, and only tau < 0 lies below it.
    # (Keys of 8 significant bits: the float32 mean of the 40 in the last block is exact as well.)
    q, k, _ = gaussian(1000)
    q, k = q.to(dtype), k[:, :1].bfloat16().to(dtype).expand(-1, 1000, -1, -1)
    scores = sol_scores(q, k, thresh_type=thresh_type)
    assert not scores.z.any()
    assert scores.route(tau) == (scores.always if not exact else scores.route(DENSE))


def test_the_floor_keeps_the_deviation_at_a_thousandth():
    q, k, _ = gaussian(1000)
    std = sol_scores(q, k[:, :1].expand(-1, 1000, -1, -1)).std
    assert_close(std, torch.full_like(std, 1e-3))


# -- sinks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "count", "blocks"),
    [
        (None, 70, (9, 11)),
        (0, 65, (0, 2)),
        (63, 2, (0, 2)),
        (600, 50, (9, 11)),
        (64, 64, (1, 2)),
        (64, 65, (1, 3)),
        (None, 10, (10, 11)),
        (None, 650, (0, 11)),
        (0, 650, (0, 11)),
        (None, 0, (11, 11)),
        (100, 0, (11, 11)),
        (650, 0, (11, 11)),
    ],
)
def test_a_sink_is_rounded_outward_to_blocks(start, count, blocks):
    assert sink_blocks(650, sink_start=start, sink_tokens=count) == blocks
    q, k, _ = drifting(650)
    scores = sol_scores(q, k, sink_start=start, sink_tokens=count)
    assert scores.sink == blocks
    forced = scores.route(LOCAL) - sol_scores(q, k).route(LOCAL)
    assert not forced.dense()[..., : blocks[0]].any()
    assert not forced.dense()[..., blocks[1] :].any()
    assert scores.route(LOCAL).dense()[..., blocks[0] : blocks[1]].all()


def test_a_sink_is_about_keys_its_own_queries_stay_sparse():
    q, k, _ = drifting(650)
    route = sol_route(q, k, tau=LOCAL, sink_tokens=64)
    assert not route.dense()[..., 10, :9].any()


def test_a_sink_does_not_change_the_statistics():
    q, k, _ = drifting(650)
    plain, sunk = sol_scores(q, k), sol_scores(q, k, sink_tokens=200)
    assert torch.equal(plain.z, sunk.z)


# -- the last block and padded summaries ----------------------------------------------------------


@pytest.mark.parametrize("tail_exact", [False, True])
@pytest.mark.parametrize("tokens", [130, 650, 2050])
def test_a_short_last_block_counts_with_its_true_length(tokens, tail_exact):
    q, k, v = gaussian(tokens, heads=1, dtype=torch.float64)
    count = -(-tokens // 64)
    mask = torch.eye(count, dtype=torch.bool)
    mask[:, -1] = tail_exact
    mask[-1, -1] = True
    route = BlockRoute.from_dense(mask[None, None], seqlens=(tokens, tokens))
    tail = BlockSummary.of(k, v)
    out, trace = reference(q, k, v, route, tail=tail, return_trace=True)
    a, b, c = (x.numpy() for x in (q, k, v))
    summary = independent.summarise(b, c, rounding=lambda x: x)
    assert summary.lengths[-1] == tokens - 64 * (count - 1) < 64
    found = independent.attention(
        a, b, c, scale=32**-0.5, exact=mask[None, None].numpy(), tail=summary
    )
    assert_close(out, torch.tensor(found.out))
    assert_close(trace.lse, torch.tensor(found.lse).float())


def test_sol_weakness_9_summary_rows_past_the_last_key_may_hold_anything():
    # As a kernel's buffers do that are padded to a whole group and never initialised.
    q, k, v = gaussian(256)
    full = [torch.cat([x, torch.full_like(x[:, :128], torch.nan)], dim=1) for x in (k, v)]
    lengths = torch.tensor([64, 64, 64, 64, 0, 0], dtype=torch.int32)
    summary = BlockSummary.of(*full)
    padded = BlockSummary(summary.k_mean, summary.v_sum, lengths)
    assert padded.k_mean[:, 4:].isnan().all()
    assert padded.v_sum[:, 4:].isnan().all()
    mask = torch.eye(4, dtype=torch.bool)[None, None].expand(1, 2, 4, 4)
    wide = torch.cat([mask, torch.zeros(1, 2, 4, 2, dtype=torch.bool)], dim=-1)
    cropped = BlockRoute.from_dense(mask)
    out = reference(q, k, v, cropped, tail=BlockSummary.of(k, v))
    found = reference(q, *full, BlockRoute.from_dense(wide), tail=padded)
    assert torch.isfinite(found).all()
    assert torch.equal(found, out)


def test_summaries_are_rounded_once_to_the_inputs_dtype():
    _, k, v = gaussian(650, dtype=torch.bfloat16)
    summary = BlockSummary.of(k, v)
    want = independent.summarise(k.double().numpy(), v.double().numpy())
    assert torch.equal(summary.k_mean.double(), torch.tensor(want.k_mean))
    assert torch.equal(summary.v_sum.double(), torch.tensor(want.v_sum))


@pytest.mark.parametrize("impl", ["reference", "eager"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_sum_of_values_without_room_in_float16_is_never_a_wrong_number(impl, dtype):
    q, k, v = gaussian(650, dtype=dtype)
    v[:, 256:320] += 1100  # the sum of block 4 is about 70,400
    out = sol_attention(q, k, v, tau=LOCAL, impl=impl)
    uses = torch.ones(650, dtype=torch.bool)
    uses[192:384] = False  # next to block 4, which they attend key by key
    assert torch.isfinite(out[:, ~uses]).all()
    assert torch.isfinite(out[:, uses]).all() == (dtype == torch.bfloat16)
    if dtype == torch.float16:
        assert not torch.isfinite(out[:, uses]).any()


# -- what makes it worth having -------------------------------------------------------------------


def test_the_summary_of_dropped_blocks_is_what_keeps_the_error_small():
    q, k, v = (x / 4 for x in drifting(2048, heads=1, strength=16.0))
    route = sol_route(q, k, tau=1.0, thresh_type="exact")
    dense = reference(q, k, v)
    with_tail = reference(q, k, v, route, tail=BlockSummary.of(k, v))
    without = reference(q, k, v, route)
    error, bare = ((x - dense).norm() / dense.norm() for x in (with_tail, without))
    assert route.density() < 0.5
    assert 0 < error < bare / 2
