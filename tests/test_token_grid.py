"""Video tokens in a sequence: each order is a bijection, each block has its (t, h, w) box."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blockattn import Box, TokenGrid
from blockattn.layout import ORDERS, num_blocks

RAGGED = [(5, 7, 3), (7, 15, 18), (21, 45, 80)]
TEXT = [(0, 0), (5, 0), (0, 9), (65, 7)]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("shape", RAGGED)
def test_an_order_is_a_bijection_with_its_inverse(shape, order):
    grid = TokenGrid(shape, order=order)
    every = torch.arange(grid.tokens)
    assert torch.equal(grid.permutation.sort().values, every)
    assert torch.equal(grid.permutation[grid.inverse], every)
    assert torch.equal(grid.inverse[grid.permutation], every)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("shape", RAGGED)
def test_every_position_of_the_video_appears_once(shape, order):
    grid = TokenGrid(shape, prefix=3, suffix=2, order=order)
    t, h, w = grid.coordinates[3:-2].unbind(dim=1)
    raster = (t * shape[1] + h) * shape[2] + w
    assert torch.equal(raster.sort().values, torch.arange(grid.video_tokens))


def code_of(t: int, h: int, w: int) -> int:
    """Morton code bit by bit: column lowest, then row, then frame."""
    code = 0
    for bit in range(12):
        code += ((w >> bit) % 2) * 8**bit
        code += ((h >> bit) % 2) * 8**bit * 2
        code += ((t >> bit) % 2) * 8**bit * 4
    return code


@pytest.mark.parametrize("shape", [(5, 7, 3), (7, 15, 18), (2, 33, 65)])
def test_morton_order_follows_the_interleaved_bits(shape):
    places = sorted(product(*map(range, shape)), key=lambda place: code_of(*place))
    assert TokenGrid(shape, order="morton").coordinates.tolist() == [list(p) for p in places]


def test_morton_order_of_a_2x2x2_cube_varies_the_column_first():
    coordinates = TokenGrid((2, 2, 2), order="morton").coordinates.tolist()
    assert coordinates == [list(p) for p in product(range(2), repeat=3)]


@pytest.mark.parametrize("shape", [(5, 7, 3), (7, 15, 18), (8, 8, 8)])
def test_tile_order_walks_4x4x4_cubes_and_raster_order_inside_each(shape):
    starts = product(*(range(0, size, 4) for size in shape))
    cubes = (
        product(*(range(a, min(a + 4, size)) for a, size in zip(start, shape))) for start in starts
    )
    places = [list(place) for cube in cubes for place in cube]
    assert TokenGrid(shape, order="tile").coordinates.tolist() == places


def test_raster_order_is_the_identity():
    grid = TokenGrid((5, 7, 3), prefix=4, suffix=1)
    assert torch.equal(grid.permutation, torch.arange(grid.tokens))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("prefix", "suffix"), TEXT)
def test_text_stays_where_it_is_and_has_no_coordinates(prefix, suffix, order):
    grid = TokenGrid((5, 7, 3), prefix=prefix, suffix=suffix, order=order)
    text = [*range(prefix), *range(prefix + 105, grid.tokens)]
    assert grid.tokens == prefix + 105 + suffix
    assert grid.permutation[text].tolist() == text
    assert (grid.coordinates[text] == -1).all()
    assert (grid.coordinates[prefix : prefix + 105] >= 0).all()


@given(data=st.data(), order=st.sampled_from(ORDERS))
def test_position_is_the_inverse_of_coordinates(data, order):
    shape = data.draw(st.tuples(*[st.integers(1, 9)] * 3))
    grid = TokenGrid(shape, prefix=data.draw(st.integers(0, 5)), order=order)
    place = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    assert tuple(grid.coordinates[grid.position(*place)].tolist()) == place


@pytest.mark.parametrize(
    ("shape", "block", "order"),
    [*product(RAGGED[:2], [64, 128], ORDERS), ((21, 45, 80), 128, "morton")],
)
def test_blocks_partition_the_video_and_their_boxes_hold_their_tokens(shape, block, order):
    grid = TokenGrid(shape, prefix=10, suffix=3, order=order)
    seen = torch.zeros(shape, dtype=torch.int64)
    for index in range(num_blocks(grid.tokens, block)):
        rows = grid.block_coordinates(index, block)
        seen.index_put_(tuple(rows.unbind(dim=1)), torch.ones(len(rows), dtype=torch.int64), True)
        box = grid.box(index, block)
        lows, highs = zip(*box.axes)
        assert tuple(rows.min(dim=0).values.tolist()) == lows
        assert tuple((rows.max(dim=0).values + 1).tolist()) == highs
    assert (seen == 1).all()


def test_a_block_of_text_alone_has_no_box():
    grid = TokenGrid((2, 4, 8), prefix=64)
    assert grid.box(0) is None
    assert len(grid.block_coordinates(0)) == 0
    assert grid.box(1) == Box((0, 2), (0, 4), (0, 8))


def test_a_4x4x4_tile_of_a_whole_grid_is_one_block():
    grid = TokenGrid((8, 8, 8), order="tile")
    assert grid.box(5) == Box((4, 8), (0, 4), (4, 8))
    assert str(grid.box(5)) == "t 4-7, h 0-3, w 4-7"


@given(
    shape=st.tuples(*[st.integers(1, 9)] * 3),
    text=st.tuples(st.integers(0, 5), st.integers(0, 5)),
    order=st.sampled_from(ORDERS),
    dim=st.sampled_from([0, 1, 2]),
)
def test_restore_undoes_arrange_along_any_axis(shape, text, order, dim):
    grid = TokenGrid(shape, prefix=text[0], suffix=text[1], order=order)
    x = torch.arange(2 * 3 * grid.tokens).reshape(2, 3, grid.tokens).movedim(2, dim)
    assert torch.equal(grid.restore(grid.arrange(x, dim), dim), x)


def test_arrange_puts_each_token_at_its_place():
    grid = TokenGrid((5, 7, 3), order="morton")
    t, h, w = TokenGrid((5, 7, 3)).coordinates.unbind(dim=1)
    x = (100 * t + 10 * h + w)[None, :, None, None]
    moved = grid.arrange(x)
    assert moved[0, grid.position(3, 6, 2), 0, 0].item() == 362


def test_grids_are_values():
    assert TokenGrid((5, 7, 3)) == TokenGrid([5, 7, 3])
    assert hash(TokenGrid((5, 7, 3))) == hash(TokenGrid([5, 7, 3]))
    assert TokenGrid((5, 7, 3)) != TokenGrid((5, 7, 3), order="tile")


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"shape": (5, 7)}, TypeError, r"shape=\(5, 7\)"),
        ({"shape": "abc"}, TypeError, "shape='abc'"),
        ({"shape": (5, 7, 0)}, ValueError, r"shape\[2\]=0"),
        ({"shape": (5, 7, True)}, TypeError, r"shape\[2\]=True"),
        ({"shape": (5, 7.0, 3)}, TypeError, r"shape\[1\]=7.0"),
        ({"shape": (5, 7, 3), "prefix": -1}, ValueError, "prefix=-1"),
        ({"shape": (5, 7, 3), "suffix": True}, TypeError, "suffix=True"),
        ({"shape": (5, 7, 3), "order": "zigzag"}, ValueError, "order='zigzag'.*'morton'"),
        ({"shape": (5, 7, 3), "order": 3}, TypeError, "order=3"),
    ],
)
def test_a_bad_grid_is_refused_by_name(settings, error, message):
    with pytest.raises(error, match=message):
        TokenGrid(**settings)


def test_places_outside_the_grid_are_refused():
    grid = TokenGrid((5, 7, 3))
    with pytest.raises(ValueError, match="h=7: must be at least 0 and at most 6"):
        grid.position(0, 7, 0)
    with pytest.raises(ValueError, match="index=2: must be at least 0 and at most 1"):
        grid.box(2)
    with pytest.raises(ValueError, match=r"axis 1 of shape .* has 104 tokens, .* has 105"):
        grid.arrange(torch.zeros(1, 104, 1, 1))
