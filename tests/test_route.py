"""A route is a value: bits in, the same bits out, with laws that hold for every size."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from blockattn import BlockRoute

WIDTHS = [1, 2, 7, 31, 32, 33, 63, 64, 65, 96, 97]


def random_mask(shape: tuple[int, ...], seed: int = 0, density: float = 0.4) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=generator) < density


def route_of(queries: int = 5, keys: int = 40, seed: int = 0, **settings) -> BlockRoute:
    return BlockRoute.from_dense(random_mask((2, 3, queries, keys), seed), **settings)


# -- bits -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", WIDTHS)
def test_a_mask_survives_packing(width):
    mask = random_mask((2, 3, 4, width), seed=width)
    assert torch.equal(BlockRoute.from_dense(mask).dense(), mask)


@given(width=st.integers(1, 140), rows=st.integers(1, 4), seed=st.integers(0, 999))
def test_every_size_survives_packing(width, rows, seed):
    mask = random_mask((1, 1, rows, width), seed)
    assert torch.equal(BlockRoute.from_dense(mask).dense(), mask)


@pytest.mark.parametrize("width", WIDTHS)
def test_bit_r_of_word_w_is_key_block_32_w_plus_r_and_pad_bits_are_zero(width):
    mask = torch.ones(1, 1, 1, width, dtype=torch.bool)
    words = BlockRoute.from_dense(mask).words
    assert words.dtype == torch.int32
    assert words.shape[-1] == -(-width // 32)
    bits = [(int(word) >> r) & 1 for word in words.flatten() for r in range(32)]
    assert bits == [1] * width + [0] * (len(bits) - width)
    for key in range(width):
        one = BlockRoute.from_dense(torch.arange(width)[None, None, None] == key).words.flatten()
        assert [int(word) & 0xFFFFFFFF for word in one] == [
            1 << (key % 32) if w == key // 32 else 0 for w in range(len(one))
        ]


@given(width=st.integers(1, 140), seed=st.integers(0, 999))
def test_counts_are_the_number_of_set_bits(width, seed):
    mask = random_mask((1, 2, 3, width), seed)
    route = BlockRoute.from_dense(mask)
    assert torch.equal(route.counts(), mask.sum(dim=-1))
    assert route.counts().dtype == torch.int64


def test_words_may_lie_at_any_stride():
    mask = random_mask((1, 2, 4, 20))
    words = BlockRoute.from_dense(mask).words
    strided = torch.stack([words, torch.zeros_like(words)], dim=-1).flatten(-2)[..., ::2]
    transposed = words.transpose(1, 2).contiguous().transpose(1, 2)
    for view in (strided, transposed):
        route = BlockRoute(view, (64, 64), (256, 20 * 64))
        assert torch.equal(route.dense(), mask)
        assert torch.equal(route.counts(), mask.sum(dim=-1))


def test_a_single_word_may_lie_at_any_stride():
    # torch calls one element contiguous whatever its stride; bytes of it need stride 1.
    word = torch.tensor([5, 0], dtype=torch.int32)[::2].view(1, 1, 1, 1)
    word = word.as_strided((1, 1, 1, 1), (2, 2, 2, 2))
    route = BlockRoute(word, (64, 64), (64, 192))
    assert route.dense().flatten().tolist() == [True, False, True]
    assert route.counts().item() == 2


def test_a_set_pad_bit_is_refused():
    words = torch.full((1, 1, 1, 1), -1, dtype=torch.int32)
    assert BlockRoute(words, (64, 64), (64, 32 * 64)).density() == 1
    with pytest.raises(ValueError, match=r"past key block 30 is set.*low 31 bits"):
        BlockRoute(words, (64, 64), (64, 31 * 64))


def test_no_keys_and_no_queries_are_routes_too():
    for mask in (torch.zeros(1, 2, 3, 0), torch.zeros(1, 2, 0, 3)):
        route = BlockRoute.from_dense(mask.bool())
        assert route.density() == 0
        assert route.density_per_head().tolist() == [[0, 0]]
        assert route.dense().shape == mask.shape
        assert route.counts().shape == mask.shape[:3]


# -- density --------------------------------------------------------------------------------------


@given(tokens=st.integers(1, 300), block=st.sampled_from([16, 64, 128]), seed=st.integers(0, 99))
def test_density_lies_in_0_to_1_for_any_length(tokens, block, seed):
    count = -(-tokens // block)
    mask = random_mask((1, 2, count, count), seed)
    settings = {"block": (block, block), "seqlens": (tokens, tokens)}
    assert BlockRoute.from_dense(mask, **settings).density() == mask.double().mean().item()
    assert BlockRoute.from_dense(mask & False, **settings).density() == 0
    assert BlockRoute.full((1, 2), **settings).density() == 1


def test_density_per_head_and_per_row_average_to_the_density():
    route = route_of(keys=37)
    mask = route.dense().double()
    torch.testing.assert_close(route.density_per_head(), mask.mean(dim=(2, 3)))
    torch.testing.assert_close(route.density_per_row(), mask.mean(dim=3))
    assert route.density() == pytest.approx(mask.mean().item())


@pytest.mark.parametrize("block", [(64, 64), (128, 64), (64, 128), (16, 48)])
@pytest.mark.parametrize("seqlens", [(1, 1), (130, 130), (130, 300), (300, 130)])
def test_a_causal_route_holds_the_blocks_with_a_visible_key(seqlens, block):
    route = BlockRoute.causal((1, 2), seqlens=seqlens, block=block)
    visible = torch.arange(seqlens[1])[None, :] <= torch.arange(seqlens[0])[:, None]
    for i, j in torch.cartesian_prod(*map(torch.arange, route.grid)).tolist():
        part = visible[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
        assert bool(route.dense()[0, 1, i, j]) == bool(part.any())


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("make", [BlockRoute.full, BlockRoute.causal])
def test_words_made_without_a_mask_are_those_of_the_mask(make, width):
    route = make((2, 3), seqlens=(40 * 16, width * 16 - 5), block=(16, 16))
    assert route.words.is_contiguous()
    mask = torch.ones(40, width, dtype=torch.bool)
    mask = mask.tril() if make == BlockRoute.causal else mask
    assert torch.equal(route.words, BlockRoute.from_dense(mask.expand(2, 3, -1, -1)).words)


def test_a_mask_may_lie_at_any_offset_and_stride():
    wide = random_mask((2, 3, 65, 33))
    odd = wide.flatten()[1 : 1 + 2 * 3 * 64].view(1, 2, 3, 64)
    for mask in (wide[:, :, 1:, 1:], wide.transpose(2, 3), wide[..., ::2], odd):
        assert torch.equal(BlockRoute.from_dense(mask).dense(), mask)


# -- lists ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", WIDTHS)
def test_lists_hold_the_exact_blocks_in_ascending_order(width):
    mask = random_mask((2, 2, 3, width), seed=width)
    index, count = BlockRoute.from_dense(mask).lists()
    assert (index.dtype, count.dtype) == (torch.int32, torch.int32)
    assert (index.device, count.device) == (mask.device, mask.device)
    for place in torch.cartesian_prod(*map(torch.arange, mask.shape[:3])).tolist():
        row = mask[tuple(place)]
        number = int(count[tuple(place)])
        assert index[tuple(place)][:number].tolist() == row.nonzero().flatten().tolist()
        assert index[tuple(place)].sort().values.tolist() == list(range(width))


def test_lists_and_counts_never_read_the_device():
    # On the meta device there is nothing to read: a host synchronisation would raise.
    words = torch.zeros(1, 2, 3, 2, dtype=torch.int32, device="meta")
    index, count = BlockRoute(words, (64, 64), (192, 40 * 64)).lists()
    assert (index.shape, count.shape) == ((1, 2, 3, 40), (1, 2, 3))
    assert index.device.type == count.device.type == "meta"


# -- algebra --------------------------------------------------------------------------------------


@given(width=st.integers(1, 70), seeds=st.tuples(*[st.integers(0, 999)] * 3))
def test_union_intersection_and_difference_are_those_of_sets(width, seeds):
    a, b, c = (random_mask((1, 2, 3, width), seed) for seed in seeds)
    x, y, z = map(BlockRoute.from_dense, (a, b, c))
    assert torch.equal((x | y).dense(), a | b)
    assert torch.equal((x & y).dense(), a & b)
    assert torch.equal((x - y).dense(), a & ~b)
    assert x | y == y | x
    assert x & (y | z) == (x & y) | (x & z)
    assert (x - y) | (x & y) == x
    assert (x - y).differing(x) == int((a & b).sum())
    assert x.differing(y) == int((a ^ b).sum())
    sizes = [int(route.counts().sum()) for route in (x | y, x & y, x, y)]
    assert sizes[0] + sizes[1] == sizes[2] + sizes[3]


def test_equality_compares_bits_and_geometry():
    mask = random_mask((1, 2, 3, 40))
    route = BlockRoute.from_dense(mask)
    assert route == BlockRoute.from_dense(mask.clone())
    assert route != BlockRoute.from_dense(~mask)
    assert route != BlockRoute.from_dense(mask, block=(128, 128))
    assert route != route.heads(slice(0, 1))
    assert route != "a route"


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (route_of(block=(128, 64)), r"geometry: blocks \(64, 64\).*\(128, 64\)"),
        (route_of(seqlens=(320, 2500)), "geometry.*2560.*2500"),
        (route_of().heads(slice(0, 2)), r"\(2, 3\).*against \(2, 2\)"),
        (route_of().to("meta"), "cpu against .* meta.*use to"),
    ],
)
def test_routes_of_other_geometry_do_not_combine(other, message):
    for operation in (BlockRoute.__or__, BlockRoute.__and__, BlockRoute.__sub__):
        with pytest.raises(ValueError, match=message):
            operation(route_of(), other)
    with pytest.raises(ValueError, match=message):
        route_of().differing(other)


def test_a_route_does_not_combine_with_a_mask():
    with pytest.raises(TypeError, match="expected a BlockRoute, got Tensor"):
        route_of() & route_of().dense()


def test_heads_takes_a_slice():
    route = route_of()
    assert torch.equal(route.heads(slice(1, 3)).dense(), route.dense()[:, 1:3])


@pytest.mark.parametrize("fine", [(64, 64), (32, 64), (64, 16), (16, 32)])
@pytest.mark.parametrize("seqlens", [(256, 256), (130, 300), (1, 65)])
def test_refining_keeps_the_token_pairs(seqlens, fine):
    coarse = BlockRoute.full((1, 1), seqlens=seqlens, block=(64, 64))
    mask = random_mask(coarse.shape, seed=1, density=0.5)
    route = BlockRoute.from_dense(mask, seqlens=seqlens)

    def token_pairs(x: BlockRoute) -> torch.Tensor:
        pairs = x.dense().repeat_interleave(x.block[0], 2).repeat_interleave(x.block[1], 3)
        return pairs[:, :, : seqlens[0], : seqlens[1]]

    refined = route.refine(fine)
    assert refined.block == fine
    assert torch.equal(token_pairs(refined), token_pairs(route))


def test_refining_needs_a_divisor():
    with pytest.raises(ValueError, match=r"block=\(48, 64\): must divide .* \(64, 64\)"):
        route_of().refine((48, 64))


# -- pictures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [(64, 128), (128, 64), (128, 128), (192, 64), (64, 64)])
@pytest.mark.parametrize("tokens", [(320, 2560), (300, 2501), (0, 300), (300, 0)])
def test_a_coarser_route_is_the_smallest_that_holds_the_route(block, tokens):
    grid = [-(-length // 64) for length in tokens]
    route = BlockRoute.from_dense(random_mask((2, 3, *grid), density=0.1), seqlens=tokens)
    coarse = route.coarsen(block)
    assert (coarse.block, coarse.seqlens) == (block, tokens)
    assert torch.equal((coarse.refine((64, 64)) | route).words, coarse.refine((64, 64)).words)
    assert coarse.density() >= route.density()
    fine = route.dense()
    for where in coarse.dense().nonzero().tolist():
        rows, columns = (n * size // 64 for n, size in zip(where[2:], block))
        part = fine[where[0], where[1], rows : rows + block[0] // 64]
        assert part[:, columns : columns + block[1] // 64].any()


@pytest.mark.parametrize("block", [(96, 64), (64, 32)])
def test_only_whole_blocks_are_joined(block):
    with pytest.raises(ValueError, match="must be whole blocks of this route"):
        route_of().coarsen(block)


@given(
    queries=st.integers(1, 90), keys=st.integers(1, 90), size=st.integers(1, 40),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_an_image_fits_and_its_area_weighted_mean_is_the_density(queries, keys, size, seed):
    route = BlockRoute.from_dense(random_mask((1, 1, queries, keys), seed))
    image = route.image(size=size)
    assert max(image.shape) <= size
    assert 0 <= image.min() <= image.max() <= 1

    def areas(count: int, pixels: int) -> torch.Tensor:
        factor = -(-count // size)
        lengths = [min(factor, count - p * factor) for p in range(pixels)]
        return torch.tensor(lengths, dtype=torch.float64)

    area = areas(queries, image.shape[0])[:, None] * areas(keys, image.shape[1])[None, :]
    assert int(area.sum()) == queries * keys
    assert (image * area).sum().item() / area.sum().item() == pytest.approx(route.density())


def test_a_window_that_fits_shows_the_blocks_themselves():
    route = route_of(queries=9, keys=40)
    window = route.image(1, 2, rows=(2, 7), columns=(30, 40))
    assert torch.equal(window, route.dense()[1, 2, 2:7, 30:40].float())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch": 2}, "batch=2"),
        ({"head": 3}, "head=3"),
        ({"size": 0}, "size=0"),
        ({"rows": (3, 3)}, r"rows\[1\]=3: must be at least 4 and at most 5"),
        ({"rows": (5, 6)}, r"rows\[0\]=5"),
        ({"columns": (0, 41)}, r"columns\[1\]=41: must be at least 1 and at most 40"),
    ],
)
def test_a_window_outside_the_route_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        route_of().image(**settings)


def test_100_000_tokens_and_40_heads_take_less_than_13_mb():
    # One head here, counted up to forty; tokens x tokens would be 10 GB a head.
    tokens = 100_000
    route = BlockRoute.causal((1, 1), seqlens=(tokens, tokens))
    assert route.grid == (1563, 1563)
    assert route.nbytes * 40 == 1563 * 49 * 4 * 40 == 12_253_920
    assert route.image().shape == (391, 391)
    assert route.density() == pytest.approx(1564 / 1563 / 2)


# -- construction and files -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: BlockRoute.from_dense([[True]]), TypeError, "mask: expected a bool tensor"),
        (lambda: BlockRoute.from_dense(torch.ones(1, 1, 2, 2)), TypeError, "mask: expected a bool"),
        (lambda: BlockRoute.from_dense(random_mask((2, 2))), ValueError, r"mask: shape \(2, 2\)"),
        (lambda: route_of(seqlens=(321, 2560)), ValueError, r"mask: \(5, 40\).*make \(6, 40\)"),
        (lambda: route_of(block=(64, 0)), ValueError, r"block\[1\]=0"),
        (lambda: route_of(block=64), TypeError, "block=64: expected a pair"),
        (lambda: route_of(seqlens=(True, 64)), TypeError, r"seqlens\[0\]=True"),
        (lambda: BlockRoute.full((1, 1), seqlens=(64, -1)), ValueError, r"seqlens\[1\]=-1"),
        (lambda: BlockRoute.full((1,), seqlens=(64, 64)), TypeError, r"shape=\(1,\)"),
        (
            lambda: BlockRoute.causal((1, 1), seqlens=(64, 64), block=(0, 64)),
            ValueError,
            r"block\[0\]=0",
        ),
        (lambda: BlockRoute(torch.zeros(1, 1, 1, 1), (64, 64), (64, 64)), TypeError, "float32"),
        (
            lambda: BlockRoute(torch.zeros(1, 1, 1, 2, dtype=torch.int32), (64, 64), (64, 64)),
            ValueError,
            r"words: shape \(1, 1, 1, 2\).*expected \[B, H, 1, 1\]",
        ),
    ],
)
def test_a_bad_route_is_refused_by_name(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_saved_route_loads_as_itself(tmp_path):
    route = route_of(seqlens=(300, 2500), block=(64, 64)).heads(slice(0, 2))
    route.save(tmp_path / "a.safetensors")
    assert BlockRoute.load(tmp_path / "a.safetensors") == route


def write_broken(path, what: str) -> None:
    metadata = {"format": "blockattn.route", "block": "[64, 64]", "seqlens": "[64, 128]"}
    tensors = {"words": torch.zeros(1, 1, 1, 1, dtype=torch.int32)}
    match what:
        case "truncated":
            save_file(tensors, path, metadata=metadata)
            path.write_bytes(path.read_bytes()[:-2])
            return
        case "text":
            path.write_text("not a tensor file")
            return
        case "empty":
            path.write_bytes(b"")
            return
        case "other format":
            metadata["format"] = "something else"
        case "no geometry":
            del metadata["block"]
        case "broken geometry":
            metadata["block"] = "[64, "
        case "geometry of another kind":
            metadata["seqlens"] = json.dumps({"q": 64})
        case "no words":
            tensors = {"mask": tensors["words"]}
        case "words of another dtype":
            tensors = {"words": tensors["words"].float()}
        case "words of another shape":
            metadata["seqlens"] = "[64, 4096]"
        case "a pad bit":
            tensors = {"words": tensors["words"] - 1}
    save_file(tensors, path, metadata=metadata)


@pytest.mark.parametrize(
    "what",
    ["truncated", "text", "empty", "other format", "no geometry", "broken geometry",
     "geometry of another kind", "no words", "words of another dtype", "words of another shape",
     "a pad bit"],
)  # fmt: skip
def test_a_broken_file_is_named(tmp_path, what):
    path = tmp_path / "broken.safetensors"
    write_broken(path, what)
    with pytest.raises(ValueError, match=r"broken\.safetensors: not a route that .* save it again"):
        BlockRoute.load(path)


def test_a_missing_file_stays_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        BlockRoute.load(tmp_path / "none.safetensors")


def test_a_route_prints_its_size_and_density():
    text = repr(BlockRoute.full((1, 2), seqlens=(65, 65)))
    assert text == "BlockRoute(1 x 2 heads, 2 x 2 blocks of (64, 64), density 1.0000)"
