"""Hopper's kernel whose warp groups vote by themselves: when it is taken, and what it computes.

It has no interpreter: without a GPU of compute capability 9.0 only the choice is tested, and
``test_triton_compile`` compiles it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from blockattn import BlockRoute, attend
from blockattn.impl import reference
from blockattn.problem import make_problem
from tests import independent_large as independent
from tests.gpu_checks import assert_within_the_error_rule, captured, chosen_blocks, syncs_are_errors

pytest.importorskip("triton", reason="needs triton (Linux)")
from blockattn.impl.triton import launch

TILE = 64
OTHER = {  # the kernel of all GPUs
    64: launch.Config(rows=64, columns=64, warps=4, stages=3),
    128: launch.Config(rows=128, columns=128, warps=8, stages=3),
}
each_tile = pytest.mark.parametrize("tile", [64, 128])
VOTE: dict[str, Any] = {"skip_threshold": 0.1, "skip_tile": (TILE, TILE)}


def of_tiles(tile, threshold=0.1):
    return {"skip_threshold": threshold, "skip_tile": (tile, tile)}


# -- when it is taken -----------------------------------------------------------------------------


SERVED = (1, 4096, 24, 128)  # 22 x 24 programs: four rounds of 132


def fake_problem(monkeypatch, device="cuda", capability=(9, 0), fits=True, shape=None, **settings):
    processors = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: processors)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(launch, "descriptors_fit", lambda *tensors: fits)
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(shape or SERVED, dtype=torch.bfloat16, device=device)
        return make_problem(x, x, x, **(VOTE | settings))


@pytest.mark.parametrize("shape", [SERVED, (1, 2048, 24, 128), (2, 32768, 5, 128)])
@pytest.mark.parametrize("threshold", [0.0, 0.5, 3.0])
def test_it_serves_votes_on_the_full_range_of_hopper(shape, threshold, monkeypatch):
    problem = fake_problem(monkeypatch, shape=shape, skip_threshold=threshold)
    assert launch.configure(problem) is launch.GROUPED[64, 64]


@pytest.mark.parametrize("shape", [SERVED, (1, 1280, 24, 128)])  # 10 x 24 programs: two rounds
def test_it_serves_larger_tiles_too(shape, monkeypatch):
    problem = fake_problem(monkeypatch, shape=shape, skip_tile=(128, 128))
    assert launch.configure(problem) is launch.GROUPED[128, 128]


@pytest.mark.parametrize(
    "case",
    [
        {"device": "cpu"},  # the interpreter
        {"capability": (8, 9)},
        {"capability": (10, 0)},
        {"capability": (12, 0)},
        {"fits": False},
        {"skip_threshold": None},
        {"skip_tile": (128, 128), "capability": (10, 0)},
        {"causal": True},
        {"shape": (1, 0, 24, 128)},
        {"shape": (1, 16384, 24, 64)},
        {"shape": (1, 1024, 21, 128)},  # 6 x 21 programs: a single round
        {"shape": (1, 4300, 24, 128)},  # 23 x 24 programs: a fifth round with few
        {"shape": (1, 8192, 4, 128)},
        {"shape": (1, 1280, 24, 128)},  # 7 x 24 programs: a second round with few
        {"skip_tile": (128, 128), "shape": (1, 2112, 24, 128)},  # 17 x 24: a fourth round with few
    ],
    ids=str,
)
def test_all_else_goes_to_the_kernel_of_all_gpus(case, monkeypatch):
    assert not launch.configure(fake_problem(monkeypatch, **case)).groups


@pytest.mark.parametrize("name", ["route", "block_lengths"])
def test_a_vote_within_a_route_or_over_padded_blocks_does_too(name, monkeypatch):
    problem = fake_problem(monkeypatch)
    values = {
        "route": BlockRoute.full((1, 24), seqlens=(4096, 4096), block=(TILE, TILE)),
        "block_lengths": torch.full((64,), TILE, dtype=torch.int32),
    }
    assert launch.votes_in_groups(problem)
    assert not launch.configure(replace(problem, **{name: values[name]})).groups


# -- what it computes -----------------------------------------------------------------------------


def draw(queries, keys=None, *, batch=1, heads=2, key_heads=None, dtype=torch.bfloat16, tile=64):
    """q, k, v; keys change their level with every tile, and the second tile is always dropped."""
    generator = torch.Generator("cuda").manual_seed(queries)
    keys, key_heads = keys or queries, key_heads or heads

    def normal(tokens, heads):
        return torch.randn(batch, tokens, heads, 128, generator=generator, device="cuda")

    q, k, v = normal(queries, heads), normal(keys, key_heads), normal(keys, key_heads)
    level = 2 * torch.rand(-(-keys // tile) + 1, generator=generator, device="cuda")
    level[:2] = torch.tensor([4.0, 0.1])
    k *= level.repeat_interleave(tile)[:keys, None, None]
    return q.to(dtype), k.to(dtype), v.to(dtype)


def run(problem):
    """On this kernel, at sizes that others serve faster as well."""
    assert launch.groups_serve(problem)
    return launch.run(problem, launch.GROUPED[problem.skip_tile])


def assert_follows_the_definition(q, k, v, **settings):
    """Error at most twice that of plain PyTorch at the inputs' dtype, plus one rounding.

    The map is that of the definition, but for tiles that a threshold 0.01 % away decides otherwise.
    For lambda up to 1 a dropped tile never raises the maximum, so that only its own gap counts.
    """
    problem = make_problem(q, k, v, want_trace=True, **(VOTE | settings))
    result = run(problem)
    wide = replace(problem, q=q.double(), k=k.double(), v=v.double())
    threshold = problem.skip_threshold
    sure, possible = (
        reference.run(replace(wide, skip_threshold=threshold * factor)).skipped.dense()
        for factor in (0.9999, 1.0001)
    )
    found = result.skipped.dense()
    assert not (sure & ~found).any()
    assert not (found & ~possible).any()
    truth = reference.run(wide)
    if torch.equal(truth.skipped.dense(), found):
        plain = (reference.run(problem).out.double() - truth.out).abs().max()
        eps = torch.finfo(q.dtype).eps
        allowed = 2 * (plain + eps * v.abs().max()) + eps * truth.out.abs().max()
        assert (result.out.double() - truth.out).abs().max() <= allowed
        assert (result.lse - truth.lse).abs().max() < 1e-4
    bare = run(replace(problem, want_trace=False))
    assert bare.lse is None
    assert torch.equal(bare.out, result.out)
    return result


LENGTHS = [1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 384, 700]


@pytest.mark.gpu
@pytest.mark.sm90
@each_tile
@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_length_head_and_dtype_follows_the_definition(tokens, dtype, tile):
    data = draw(tokens, batch=2, heads=4, key_heads=2, dtype=dtype, tile=tile)
    for threshold in (0.0, 0.1, 0.9):
        result = assert_follows_the_definition(*data, **of_tiles(tile, threshold))
        assert bool(result.skipped.dense().any()) == (threshold > 0 and tokens > tile)


@pytest.mark.gpu
@pytest.mark.sm90
@each_tile
@pytest.mark.parametrize("queries", [1, 100, 500])
@pytest.mark.parametrize("keys", [1, 64, 333, 4097])
def test_queries_and_keys_of_different_lengths(queries, keys, tile):
    data = draw(queries, keys, heads=3, key_heads=1, tile=tile)
    assert_follows_the_definition(*data, **of_tiles(tile))


@pytest.mark.gpu
@pytest.mark.sm90
@each_tile
@pytest.mark.parametrize("tokens", [4096, 4097])
@pytest.mark.parametrize("threshold", [0.1, 0.9])
def test_long_sequences_follow_an_independent_reference(tokens, threshold, tile):
    q, k, v = draw(tokens, heads=4, key_heads=2, tile=tile)
    settings = of_tiles(tile, threshold)
    result = run(make_problem(q, k, v, want_trace=True, **settings))
    dropped, scale = result.skipped.dense(), q.shape[3] ** -0.5
    assert dropped.any()
    for head, row in chosen_blocks(4, dropped.shape[2]):
        rows = slice(row * tile, min(tokens, (row + 1) * tile))
        want, near = independent.dropped_tiles(
            q[0, rows, head], k[0, :, head // 2],
            scale=scale, threshold=threshold, tile=(tile, tile),
        )  # fmt: skip
        assert not ((dropped[0, head, row] != want) & ~near).any()
        found = independent.attention_rows(
            q[0, rows, head], k[0, :, head // 2], v[0, :, head // 2],
            scale=scale, exact=~dropped[0, head, row], block=(tile, tile),
        )  # fmt: skip
        assert_within_the_error_rule(result.out[0, rows, head], result.lse[0, head, rows], found)


@pytest.mark.gpu
@pytest.mark.sm90
@each_tile
@pytest.mark.parametrize("tokens", [200, 2048])
def test_nothing_dropped_is_dense_attention(tokens, tile):
    q, k, v = draw(tokens)
    found = run(make_problem(q, k, v, want_trace=True, **of_tiles(tile, 0.0)))
    dense = launch.run(make_problem(q, k, v, want_trace=True))
    assert not found.skipped.dense().any()
    eps = torch.finfo(q.dtype).eps
    assert (found.out - dense.out).abs().max() <= 2 * eps * v.abs().max()
    assert (found.lse - dense.lse).abs().max() < 1e-4


@pytest.mark.gpu
@pytest.mark.sm90
@each_tile
@pytest.mark.parametrize("tokens", [250, 1000])
@pytest.mark.parametrize("level", [-30.0, -1.0, 30.0, "mixed"])
def test_scores_of_any_sign(tokens, level, tile):
    # The maximum of a row is taken over bits, whose order is another one below 0.
    q, k, v = draw(tokens, heads=3, tile=tile)
    if level == "mixed":
        order = torch.randperm(tokens, generator=torch.Generator().manual_seed(0))
        shift = 30 * torch.linspace(-1, 1, tokens, device="cuda")[order]
        q[:, ::3, :, 0] = -8
    else:
        shift = torch.full((tokens,), level, device="cuda")
    q[:, 1::3, :, 0], k[..., 0] = 8, shift[:, None].to(k.dtype)
    for threshold in (0.0, 0.2, 0.9):
        assert_follows_the_definition(q, k, v, **of_tiles(tile, threshold))


@pytest.mark.gpu
@pytest.mark.sm90
@each_tile
@pytest.mark.parametrize("key", [3, 70, 199])
def test_infinite_scores_give_nan_where_the_other_kernel_does(key, tile):
    q, k, v = draw(200)
    k[0, key, 1, 0] = torch.inf  # a score of +inf or -inf, by the sign of the query's channel
    problem = make_problem(q, k, v, want_trace=True, **of_tiles(tile, 1e-9))
    found, other = run(problem), launch.run(problem, OTHER[tile])
    assert torch.equal(found.out.isnan(), other.out.isnan())
    assert 0 < int(found.out.isnan().sum()) < found.out.numel() / 2
    finite = ~found.out.isnan()
    eps = torch.finfo(q.dtype).eps
    assert (found.out - other.out)[finite].abs().max() <= 2 * eps * v.abs().max()


@pytest.mark.gpu
@pytest.mark.sm90
@each_tile
@pytest.mark.parametrize("some", [False, True])
@pytest.mark.parametrize("first", [1, 64, 128, 300, 470, 500])
@pytest.mark.parametrize("scale", [None, 1.5])
def test_keys_at_minus_infinity_take_no_mass(first, scale, some, tile):
    # Leading keys, so that rows meet whole tiles of -inf before any score; 500: nothing else.
    q, k, v = draw(500, tile=tile)
    q[..., 0], k[:, :first, :, 0] = 1, -torch.inf
    if some:  # other rows are at +inf there, and so NaN, which keeps every tile
        q[:, ::3, :, 0] = -1
    for threshold in (0.0, 1e-9):
        settings = of_tiles(tile, threshold) | {"scale": scale}
        problem = make_problem(q, k, v, want_trace=True, **settings)
        found, want = run(problem), reference.run(problem)
        assert torch.equal(found.out.isnan(), want.out.isnan())
        assert bool(found.out.isnan().any()) == some
        sound = ~want.lse.isnan()
        assert torch.equal(found.lse.isnan(), ~sound)
        assert torch.allclose(found.lse[sound], want.lse[sound], rtol=1e-4, atol=1e-3)
        eps = torch.finfo(q.dtype).eps
        finite = ~want.out.isnan()
        assert (found.out - want.out)[finite].abs().max() <= 4 * eps * v.abs().max()


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize("threshold", [0.05, 3.0])
def test_the_planted_tiles_are_dropped_and_no_other(threshold):
    # Kept and dropped tiles take turns, and by groups of a program: none may sway another's vote.
    q, k, v = draw(9 * TILE - 5, heads=1, dtype=torch.float32)
    tile = torch.arange(9, device="cuda")
    weak = ((tile[:, None] + tile) % 3 == 1) & (tile > 0)  # [query tile, key tile]
    q, k = 0.01 * q, 0.01 * k
    for i in range(9):  # channel i carries the score of query tile i: 0, or 10 in base-2 logits
        own = slice(i * TILE, (i + 1) * TILE)
        q[:, own, :, i] = 8
        k[:, :, :, i] = torch.where(weak[i], 0.0, 10 / 8).repeat_interleave(TILE)[:571, None]
    q, k, v = (x.bfloat16() for x in (q, k, v))
    if threshold > 1:  # a tile that does not raise the maximum enough is dropped, too
        weak = weak | (tile > 0)
    settings = VOTE | {"skip_threshold": threshold, "scale": 0.6931}
    result = run(make_problem(q, k, v, want_trace=True, **settings))
    assert torch.equal(result.skipped.dense()[0, 0], weak)


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize("threshold", [0.05, 0.9])
def test_two_groups_drop_a_tile_only_together(threshold):
    # Tiles that both groups need, either of them alone, or none: each kind follows each other kind.
    tiles = 20
    q, k, v = draw(tiles * 128 - 70, heads=2)
    q, k = 0.01 * q, 0.01 * k
    need = torch.randint(4, (tiles, tiles), generator=torch.Generator().manual_seed(3))
    need[:, 0] = 3
    need = need.cuda()
    for half in range(2 * tiles):  # channel ``half`` carries the score of 64 queries
        own = slice(half * 64, (half + 1) * 64)
        q[:, own, :, half] = 8
        wanted = (need[half // 2] >> half % 2) & 1
        k[..., half] = (wanted * 10 / 8).repeat_interleave(128)[: k.shape[1], None].to(k.dtype)
    settings = of_tiles(128, threshold) | {"scale": 0.6931}
    result = assert_follows_the_definition(q, k, v, **settings)
    weak = need == 0
    weak[-1] = need[-1] & 1 == 0  # the last tile of queries has no row of the second group
    found = result.skipped.dense()[0]
    assert torch.equal(found, weak.expand_as(found))


@pytest.mark.gpu
@pytest.mark.sm90
@each_tile
def test_a_row_with_nan_keeps_its_tiles_and_spoils_itself_alone(tile):
    q, k, v = draw(500, heads=1, tile=tile)
    clean = run(make_problem(q, k, v, want_trace=True, **of_tiles(tile)))
    assert clean.skipped.dense()[:, :, 1].any()
    q = q.clone()
    q[0, tile + 6, 0, 5] = torch.nan
    found = run(make_problem(q, k, v, want_trace=True, **of_tiles(tile)))
    kept = ~found.skipped.dense()
    assert kept[:, :, 1].all()
    others = torch.arange(kept.shape[2], device="cuda") != 1
    assert torch.equal(kept[:, :, others], ~clean.skipped.dense()[:, :, others])
    assert found.out[0, tile + 6].isnan().all()
    rows = torch.arange(500, device="cuda") // tile != 1
    assert torch.equal(found.out[:, rows], clean.out[:, rows])
    assert found.out.isnan().any(dim=-1).sum() == 1


@pytest.mark.gpu
@pytest.mark.sm90
def test_what_lies_behind_the_last_token_is_never_used():
    q, k, v = draw(333)
    room = [torch.full((1, 512, 2, 128), torch.nan, dtype=q.dtype, device="cuda") for _ in "qkv"]
    for target, x in zip(room, (q, k, v)):
        target[:, :333] = x
    views = [x[:, :333] for x in room]
    found = run(make_problem(*views, **VOTE)).out
    assert torch.equal(found, run(make_problem(q, k, v, **VOTE)).out)


@pytest.mark.gpu
@pytest.mark.sm90
def test_strided_inputs_equal_contiguous_ones_and_misaligned_ones_are_served_too():
    packed = torch.stack(draw(200), dim=2)
    views = list(packed.unbind(2))
    before = packed.clone()
    found = run(make_problem(*views, want_trace=True, **VOTE))
    plain = run(make_problem(*(x.contiguous() for x in views), want_trace=True, **VOTE))
    assert torch.equal(found.out, plain.out)
    assert torch.equal(packed, before)
    by_head = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in views]
    assert torch.equal(run(make_problem(*by_head, **VOTE)).out, found.out)
    room = [torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda") for x in views]
    odd = [flat[1:].view(x.shape) for flat, x in zip(room, views)]
    for target, x in zip(odd, views):
        target.copy_(x)
    problem = make_problem(*odd, want_trace=True, **VOTE)
    assert not launch.groups_serve(problem)
    other = launch.run(problem)
    assert other.skipped == found.skipped
    assert (other.out - found.out).abs().max() <= torch.finfo(found.out.dtype).eps * 8


@pytest.mark.gpu
@pytest.mark.sm90
def test_scales_on_the_device_equal_scales_on_the_host():
    q, k, v = draw(300)
    host = run(make_problem(q, k, v, scale=0.0625, scale_output=0.5, **VOTE)).out
    tensors = {"scale": 0.0625, "scale_output": 0.5}
    tensors = {name: torch.tensor([value], device="cuda") for name, value in tensors.items()}
    assert torch.equal(run(make_problem(q, k, v, **tensors, **VOTE)).out, host)


@pytest.mark.gpu
@pytest.mark.sm90
@each_tile
@pytest.mark.parametrize("tokens", [60, 2000])  # the last program has groups without a row
@pytest.mark.parametrize("threshold", [0.1, 3.0])
def test_both_kernels_drop_the_same_tiles(tokens, threshold, tile):
    data = draw(tokens, batch=2, heads=4, tile=tile)
    problem = make_problem(*data, want_trace=True, **of_tiles(tile, threshold))
    found, other = run(problem), launch.run(problem, OTHER[tile])
    differing = found.skipped.differing(other.skipped)
    assert int(differing) <= 2  # sums of products in another order, close to the threshold
    assert (found.skipped.density() > 0.05) == (tokens > tile)


@pytest.mark.gpu
@pytest.mark.sm90
@each_tile
@pytest.mark.parametrize("threshold", [0.0, 0.3])
def test_a_full_gpu_gives_the_same_bits_a_hundred_times(threshold, tile):
    # More programs than fit at once: one begins where another ended.
    data = draw(4097, heads=24, tile=tile)
    problem = make_problem(*data, want_trace=True, **of_tiles(tile, threshold))
    first = run(problem)
    for _ in range(100):
        again = run(problem)
        assert torch.equal(again.out, first.out)
        assert torch.equal(again.lse, first.lse)
        assert again.skipped == first.skipped


@pytest.mark.gpu
@pytest.mark.sm90
def test_it_runs_in_a_graph_without_a_wait():
    q, k, v = draw(4096, heads=24)
    call = partial(attend, q, k, v, impl="triton", **VOTE)
    assert launch.configure(make_problem(q, k, v, **VOTE)) is launch.GROUPED[64, 64]
    call()
    with syncs_are_errors():
        call()
    graph, out = captured(call)
    for target, x in zip((q, k, v), draw(4096, heads=24)):
        target.copy_(x.flip(1))
    graph.replay()
    assert torch.equal(out, call())
