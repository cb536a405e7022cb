"""The reference implementation defines the operation: softmax, masks, LSE, edge cases, layouts."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import assert_close

from blockattn import BlockRoute, BlockSummary, attend
from tests import independent
from tests.inputs import gaussian, uneven

reference = partial(attend, impl="reference")


def random_route(
    q, k, *, density: float = 0.5, block: int = 64, seed: int = 0, diagonal: bool = False
) -> BlockRoute:
    """A random block mask for these tensors; optionally with every diagonal block."""
    grid = (-(-q.shape[1] // block), -(-k.shape[1] // block))
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(q.shape[0], q.shape[2], *grid, generator=generator) < density
    if diagonal:
        mask |= torch.eye(*grid, dtype=torch.bool)
    return BlockRoute.from_dense(mask, block=(block, block), seqlens=(q.shape[1], k.shape[1]))


def torch_attention(q, k, v, mask=None, **settings):
    """torch's own attention on this layout, grouped heads repeated."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, **settings)
    return out.transpose(1, 2)


# -- dense ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("tokens", [1, 3, 9, 63, 64, 65, 127, 128, 129, 239])
def test_without_a_route_it_is_dense_attention(tokens, kv_heads, causal):
    q, k, v = gaussian(tokens, batch=2, heads=4, kv_heads=kv_heads, dtype=torch.float64)
    out, trace = reference(q, k, v, causal=causal, return_trace=True)
    assert_close(out, torch_attention(q, k, v, is_causal=causal))
    scores = q.transpose(1, 2) @ k.repeat_interleave(4 // kv_heads, 2).permute(0, 2, 3, 1)
    scores = scores / 32**0.5
    if causal:
        scores.masked_fill_(torch.ones(tokens, tokens).triu(1).bool(), -torch.inf)
    assert_close(trace.lse, scores.logsumexp(dim=-1).float())
    assert (trace.algorithm, trace.density, trace.lse.dtype) == ("dense", 1, torch.float32)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(1, 300), (300, 1), (65, 130), (130, 65)])
def test_queries_and_keys_may_differ_in_length(queries, keys, causal):
    q, k, v = gaussian(queries, keys=keys, dtype=torch.float64)
    visible = torch.arange(keys)[None, :] <= torch.arange(queries)[:, None]
    mask = visible if causal else torch.ones(queries, keys, dtype=torch.bool)
    assert_close(reference(q, k, v, causal=causal), torch_attention(q, k, v, mask))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_output_has_the_inputs_dtype_and_one_rounding_of_error(dtype):
    q, k, v = gaussian(200, dtype=dtype)
    exact = reference(*(x.double() for x in (q, k, v)))
    out = reference(q, k, v)
    assert out.dtype == dtype
    assert out.is_contiguous()
    error = (out.double() - exact).abs()
    assert (error <= torch.finfo(dtype).eps * exact.abs() + 2e-6).all()


@pytest.mark.parametrize("dim", [1, 16, 80, 128, 256])
def test_head_dims_up_to_256_are_served(dim):
    q, k, v = gaussian(100, dim=dim, dtype=torch.float64)
    assert_close(reference(q, k, v), torch_attention(q, k, v))


def test_very_large_scores_do_not_overflow():
    q, k, v = gaussian(130)
    out, trace = reference(1e4 * q, 1e4 * k, v, return_trace=True)
    assert torch.isfinite(out).all()
    assert torch.isfinite(trace.lse).all()
    assert_close(out, torch_attention(1e4 * q.double(), 1e4 * k.double(), v.double()).float())


def test_all_zero_inputs_average_the_values():
    q, k, v = gaussian(130)
    assert_close(reference(0 * q, k, v), v.mean(dim=1, keepdim=True).expand_as(v))


# -- routes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("block", [16, 64, 128])
@pytest.mark.parametrize(("queries", "keys"), [(200, 200), (70, 333)])
def test_a_route_is_a_block_mask(queries, keys, block, causal):
    q, k, v = gaussian(queries, keys=keys, batch=2, dtype=torch.float64)
    route = random_route(q, k, block=block)
    out, trace = reference(q, k, v, route, causal=causal, return_trace=True)
    a, b, c = (x.numpy() for x in (q, k, v))
    found = independent.attention(
        a, b, c, scale=32**-0.5, exact=route.dense().numpy(), block=block, causal=causal
    )
    assert_close(out, torch.tensor(found.out))
    assert_close(trace.lse, torch.tensor(found.lse).float())
    assert trace.algorithm == "block_mask"


def test_query_and_key_blocks_may_differ():
    q, k, v = gaussian(300, dtype=torch.float64)
    route = BlockRoute.causal((1, 2), seqlens=(300, 300), block=(128, 64))
    mask = route.dense().repeat_interleave(128, 2).repeat_interleave(64, 3)[:, :, :300, :300]
    assert_close(reference(q, k, v, route), torch_attention(q, k, v, mask))


def test_a_full_route_is_dense():
    q, k, v = gaussian(200, dtype=torch.float64)
    full = BlockRoute.full((1, 2), seqlens=(200, 200))
    assert_close(reference(q, k, v, full), reference(q, k, v))


def test_rows_without_keys_are_zero_with_an_lse_of_minus_infinity():
    q, k, v = gaussian(200, heads=2)
    mask = torch.ones(1, 2, 4, 4, dtype=torch.bool)
    mask[0, 0, 1] = False
    mask[0, 1] = False
    route = BlockRoute.from_dense(mask, seqlens=(200, 200))
    out, trace = reference(q, k, v, route, return_trace=True)
    empty = ~mask.any(dim=-1).repeat_interleave(64, dim=2)[..., :200]
    assert (out.transpose(1, 2)[empty] == 0).all()
    assert (trace.lse[empty] == -torch.inf).all()
    assert torch.isfinite(trace.lse[~empty]).all()
    assert trace.density == 12 / 32


def test_rows_that_a_causal_mask_leaves_without_keys_are_empty_too():
    # The route keeps only the block above the diagonal, which causal=True then removes.
    q, k, v = gaussian(128)
    mask = torch.tensor([[False, True], [True, True]])[None, None].expand(1, 2, 2, 2)
    route = BlockRoute.from_dense(mask)
    out, trace = reference(q, k, v, route, causal=True, return_trace=True)
    assert (out[:, :64] == 0).all()
    assert (trace.lse[..., :64] == -torch.inf).all()
    assert_close(out[:, 64:], reference(q, k, v, causal=True)[:, 64:])
    assert trace.density == 2 / 3


# -- block lengths --------------------------------------------------------------------------------


@pytest.mark.parametrize("with_route", [False, True])
def test_block_lengths_hide_padding_whatever_it_holds(with_route):
    q, k, v = gaussian(256, heads=2, dtype=torch.float64)
    lengths = torch.tensor([64, 5, 0, 33], dtype=torch.int32)
    valid = torch.arange(256) % 64 < lengths.repeat_interleave(64)
    route = random_route(q, k, density=0.6, seed=3) if with_route else None
    mask = valid.expand(1, 2, 256, 256)
    if route is not None:
        mask = mask & route.dense().repeat_interleave(64, 2).repeat_interleave(64, 3)
    for x in (k, v):
        x[:, ~valid] = torch.nan
    k_clean, v_clean = k.nan_to_num(), v.nan_to_num()
    out, trace = reference(q, k, v, route, block_lengths=lengths, return_trace=True)
    empty = ~mask.any(dim=-1).transpose(1, 2)
    want = torch_attention(q, k_clean, v_clean, mask).masked_fill(empty[..., None], 0)
    assert torch.isfinite(out).all()
    assert_close(out, want)
    assert (trace.lse.transpose(1, 2) == -torch.inf)[empty].all()


def test_infinite_padding_does_not_leak_either():
    q, k, v = gaussian(128)
    lengths = torch.tensor([64, 10], dtype=torch.int32)
    short = reference(q[:, :, :], k[:, :74], v[:, :74])
    k[:, 74:], v[:, 74:] = torch.inf, -torch.inf
    assert_close(reference(q, k, v, block_lengths=lengths), short)


# -- empty and poisoned inputs --------------------------------------------------------------------


@pytest.mark.parametrize("skip_threshold", [None, 0.5])
@pytest.mark.parametrize("with_route", [False, True])
def test_no_keys_give_zero_and_minus_infinity(with_route, skip_threshold):
    q, k, v = gaussian(130, keys=0)
    route = BlockRoute.full((1, 2), seqlens=(130, 0)) if with_route else None
    out, trace = reference(q, k, v, route, skip_threshold=skip_threshold, return_trace=True)
    assert torch.equal(out, torch.zeros_like(q))
    assert (trace.lse == -torch.inf).all()
    assert trace.density == 0


@pytest.mark.parametrize("skip_threshold", [None, 0.5])
@pytest.mark.parametrize("with_route", [False, True])
def test_no_queries_give_an_empty_output(with_route, skip_threshold):
    q, k, v = gaussian(0, keys=130)
    route = BlockRoute.full((1, 2), seqlens=(0, 130)) if with_route else None
    out, trace = reference(q, k, v, route, skip_threshold=skip_threshold, return_trace=True)
    assert out.shape == (1, 0, 2, 32)
    assert trace.lse.shape == (1, 2, 0)
    assert trace.density == 0


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("skip_threshold", [None, 0.9])
def test_a_poisoned_query_row_poisons_itself_alone(value, skip_threshold):
    q, k, v = gaussian(300)
    clean = reference(q, k, v)
    q[0, 140, 1, 3] = value
    out = reference(q, k, v, skip_threshold=skip_threshold)
    assert not torch.isfinite(out[0, 140, 1]).any()
    rest = torch.ones(1, 300, 2, dtype=torch.bool)
    rest[0, 140, 1] = False
    assert torch.isfinite(out[rest]).all()
    if skip_threshold is None:
        assert_close(out[rest], clean[rest])


# -- combinations ---------------------------------------------------------------------------------


@pytest.mark.parametrize("lagging", [False, True])
@pytest.mark.parametrize("tile", [(64, 64), (128, 64), (128, 128)])
@pytest.mark.parametrize("heads", [(2, 2), (4, 2)])
def test_route_tail_and_skip_together_equal_an_independent_computation(heads, tile, lagging):
    q, k, v = uneven(450, heads=heads[0], kv_heads=heads[1], strength=24.0, dtype=torch.float64)
    route = random_route(q, k, density=0.6, seed=2, diagonal=True)
    out, trace = reference(
        q, k, v, route, tail=BlockSummary.of(k, v), skip_threshold=0.3, skip_tile=tile,
        skip_reference="lagging" if lagging else "exact", return_trace=True,
    )  # fmt: skip
    a, b, c = (x.numpy() for x in (q, k, v))
    found = independent.attention(
        a, b, c, scale=32**-0.5, exact=route.dense().numpy(), threshold=0.3, tile=tile,
        lagging=lagging, tail=independent.summarise(b, c, rounding=lambda x: x),
    )  # fmt: skip
    assert torch.equal(trace.skipped.dense(), torch.tensor(found.dropped))
    assert_close(out, torch.tensor(found.out))
    assert_close(trace.lse, torch.tensor(found.lse).float())
    assert trace.algorithm == "sol_attn+skip_softmax"
    dropped = int(found.dropped.sum())
    assert 0 < dropped < found.dropped.size
    assert 0 < trace.density < route.density() < 1
    assert not torch.equal(out, reference(q, k, v, route, tail=BlockSummary.of(k, v)))


def test_route_and_skip_without_a_tail():
    q, k, v = uneven(450, dtype=torch.float64)
    route = random_route(q, k, density=0.6, seed=4)
    out, trace = reference(
        q, k, v, route, causal=True, skip_threshold=0.2, skip_tile=(64, 64), return_trace=True
    )
    a, b, c = (x.numpy() for x in (q, k, v))
    found = independent.attention(
        a,
        b,
        c,
        scale=32**-0.5,
        exact=route.dense().numpy(),
        threshold=0.2,
        tile=(64, 64),
        causal=True,
    )
    assert found.dropped.any()
    assert torch.equal(trace.skipped.dense(), torch.tensor(found.dropped))
    assert_close(out, torch.tensor(found.out))
    assert trace.algorithm == "block_mask+skip_softmax"


# -- scales ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [torch.tensor, lambda x: torch.tensor([x])])
def test_a_scale_may_be_a_float_or_one_element(make):
    q, k, v = gaussian(130)
    want = reference(q, k, v, scale=0.25, scale_output=3.0)
    assert_close(reference(q, k, v, scale=make(0.25), scale_output=make(3.0)), want)
    assert not torch.equal(want, reference(q, k, v))


def test_the_scale_multiplies_scores_and_scale_output_the_output():
    q, k, v = gaussian(130, dtype=torch.float64)
    assert_close(reference(q, k, v, scale=0.5), torch_attention(q, k, v, scale=0.5))
    out, trace = reference(q, k, v, scale_output=2.5, return_trace=True)
    plain, plain_trace = reference(q, k, v, return_trace=True)
    assert_close(out, 2.5 * plain)
    assert torch.equal(trace.lse, plain_trace.lse)


def test_scale_output_enters_before_the_output_is_rounded():
    q, k, v = gaussian(130, dtype=torch.bfloat16)
    exact = reference(*(x.double() for x in (q, k, v)), scale_output=1 / 3)
    out = reference(q, k, v, scale_output=1 / 3).double()
    assert ((out - exact).abs() <= 2**-8 * exact.abs() + 1e-6).all()


# -- layouts --------------------------------------------------------------------------------------

KINDS = ("dense", "causal", "route", "tail", "skip")


def settings_of(kind: str, q, k, v) -> dict:
    route = random_route(q, k, diagonal=True)
    return {
        "dense": {},
        "causal": {"causal": True},
        "route": {"route": route},
        "tail": {"route": route, "tail": BlockSummary.of(k, v)},
        "skip": {"skip_threshold": 0.5},
    }[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_strided_inputs_equal_contiguous_ones(kind):
    q, k, v = gaussian(200, batch=2)
    settings = settings_of(kind, q, k, v)
    want = reference(q, k, v, **settings)
    packed = torch.stack([q, k, v], dim=3)  # a packed projection, sliced
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    offset = [torch.cat([x.flatten()[:1], x.flatten()])[1:].view_as(x) for x in (q, k, v)]
    every_other = [x.repeat_interleave(2, dim=3)[..., ::2] for x in (q, k, v)]
    for layout in (packed.unbind(dim=3), heads_first, offset, every_other):
        assert torch.equal(reference(*layout, **settings), want)


@pytest.mark.parametrize("kind", KINDS)
def test_expanded_keys_equal_copied_ones(kind):
    q, k, v = gaussian(200, heads=4)
    k, v = (x[:, :, :1].expand(-1, -1, 4, -1) for x in (k, v))
    settings = settings_of(kind, q, k, v)
    assert_close(reference(q, k, v, **settings), reference(q, k.clone(), v.clone(), **settings))


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_are_never_modified(kind):
    q, k, v = gaussian(200)
    settings = settings_of(kind, q, k, v)
    scale = torch.tensor(0.2)
    tensors = [q, k, v, scale]
    if "route" in settings:
        tensors.append(settings["route"].words)
    if "tail" in settings:
        tensors += [settings["tail"].k_mean, settings["tail"].v_sum, settings["tail"].lengths]
    before = [x.clone() for x in tensors]
    reference(q, k, v, scale=scale, **settings)
    assert all(torch.equal(x, copy) for x, copy in zip(tensors, before))


@pytest.mark.parametrize("kind", KINDS)
def test_grouped_heads_equal_repeated_ones(kind):
    q, k, v = gaussian(200, heads=4, kv_heads=2)
    wide = [x.repeat_interleave(2, dim=2) for x in (k, v)]
    out = reference(q, k, v, **settings_of(kind, q, k, v))
    assert_close(out, reference(q, *wide, **settings_of(kind, q, *wide)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_is_its_samples(kind):
    q, k, v = gaussian(200, batch=2)
    out = reference(q, k, v, **settings_of(kind, q, k, v))
    for b in range(2):
        one = [x[b : b + 1] for x in (q, k, v)]
        settings = settings_of(kind, *one)
        if "route" in settings:
            whole = settings_of(kind, q, k, v)["route"]
            words = whole.words[b : b + 1]
            settings["route"] = BlockRoute(words, whole.block, whole.seqlens)
        assert_close(reference(*one, **settings)[0], out[b])


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_call_gives_the_same_bits(kind):
    q, k, v = gaussian(200)
    settings = settings_of(kind, q, k, v)
    first = reference(q, k, v, **settings)
    assert all(torch.equal(first, reference(q, k, v, **settings)) for _ in range(5))
    traced, _ = reference(q, k, v, **settings, return_trace=True)
    assert torch.equal(first, traced)
