"""Masks of any size and the Python half of the route viewer; the browser has its own test."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import itertools
import logging
import struct
from types import SimpleNamespace

import comm
import numpy as np
import pytest
import torch
from comm.base_comm import BaseComm
from hypothesis import given
from hypothesis import strategies as st

from blockattn import BlockRoute, TokenGrid, attend, sol_attention, sol_scores
from tests.inputs import drifting
from tests.viewer_inputs import BLOCK, LARGE, SMALL, field_mask, field_masks, field_scores
from workbench import decisions, views
from workbench.capture import QKV
from workbench.decisions import Decision
from workbench.mask_codes import STOPS, coded, ladder
from workbench.masks import Mask, MaskSet, block_boxes, capture_masks, token_blocks
from workbench.probe import attention_error
from workbench.widgets.route_viewer import RouteViewer, payload
from workbench.widgets.route_viewer.widget import script

GRID = TokenGrid((3, 9, 20))  # 540 tokens: the last of 9 blocks has 28
LIMIT = 1_000_000  # bytes of an update


def scores_of(tokens: int = 540, heads: int = 2, sink: int = 0, seed: int = 0):
    q, k, _ = drifting(tokens, heads=heads, seed=seed)
    return sol_scores(q, k, sink_tokens=sink)


# -- masks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("tau", [-5.0, 0.0, 0.7, 5.0])
@pytest.mark.parametrize("sink", [0, 100])
def test_a_mask_of_scores_has_the_route_the_decisions_and_the_density_of_sol_attention(tau, sink):
    scores = scores_of(sink=sink)
    mask = Mask.of_scores(scores, tau)
    for head in range(2):
        assert torch.equal(mask.classes(head), decisions.classify(scores, tau, head=head))
        assert mask.exact(head) == scores.route(tau).heads(slice(head, head + 1))
    assert torch.equal(mask.density(), scores.density([tau])[0, :, 0])


def test_a_route_that_somebody_made_has_no_rules_and_keeps_its_word_for_the_rest():
    route = BlockRoute.from_dense(torch.rand(2, 3, 5, 7) < 0.3, block=(128, 64))
    mask = Mask.of_route(route, batch=1, rest="skipped")
    assert mask.rest == "skipped"
    assert torch.equal(mask.density(), route.density_per_head()[1])
    for head in range(3):
        exact = route.dense()[1, head]
        assert torch.equal(mask.classes(head), exact.to(torch.uint8) * int(Decision.ROUTED))


@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 70),
    size=st.integers(1, 24),
    part=st.floats(0, 1),
    seed=st.integers(0, 99),
)
def test_a_window_is_the_mean_over_the_pairs_of_each_pixel(rows, columns, size, part, seed):
    generator = torch.Generator().manual_seed(seed)
    dense = torch.rand(1, 1, rows, columns, generator=generator) < 0.4
    mask = Mask(BlockRoute.from_dense(dense), band=2, sink=(columns // 2, columns // 2 + 1))
    top, left = int(part * (rows - 1)), int(part * (columns - 1))
    window = mask.window(0, (top, rows), (left, columns), size)
    down, across = window.factor
    exact = mask.exact(0).dense()[0, 0, top:, left:].double().numpy()
    for i in range(window.density.shape[0]):
        for j in range(window.density.shape[1]):
            pairs = exact[i * down : (i + 1) * down, j * across : (j + 1) * across]
            assert window.density[i, j] == pytest.approx(pairs.mean(), rel=1e-6)
    assert max(window.density.shape) <= size
    assert (window.classes is None) == (window.factor != (1, 1))


def test_the_rule_of_a_window_says_how_many_pairs_a_pixel_holds():
    mask = Mask(BlockRoute.full((1, 1), seqlens=(900, 300), block=(1, 1)))
    assert mask.window(0).rule == "1 pixel = mean of 2 x 1 pairs (query x key)"
    assert mask.window(0, (100, 300)).rule == "1 cell = 1 block pair"


def test_40_heads_of_100_000_tokens_are_held_in_12_and_a_half_megabytes():
    count = 1563
    words = torch.zeros(1, 40, count, -(-count // 32), dtype=torch.int32)
    mask = Mask(BlockRoute(words, (64, 64), (100_000, 100_000)), band=1)
    assert mask.passing.nbytes == 40 * 1563 * 49 * 4 <= 12_500_000
    assert float(mask.density()[39]) == pytest.approx((3 * count - 2) / count**2)


# -- coded scores -------------------------------------------------------------------------------


@pytest.mark.parametrize("tau", [None, 1.0, 1.2345, -7.0, 9.0])
def test_every_decision_at_a_stop_follows_from_the_code(tau):
    stops = ladder(tau)
    z = torch.cat([3 * torch.randn(3000), torch.tensor(stops).float(), torch.tensor([torch.nan])])
    z = torch.cat([z, torch.nextafter(torch.tensor(stops).float(), torch.tensor(9e9))])
    codes = coded(z, stops)
    for index, stop in enumerate(stops):
        assert torch.equal(codes > index, z > stop)
    assert tau is None or tau in stops


def test_the_error_of_a_code_is_one_step_of_the_slider():
    z = torch.empty(5000).uniform_(-1, 4)
    codes = coded(z, STOPS).long()
    edges = torch.tensor([-torch.inf, *STOPS, torch.inf])
    assert (edges[codes] < z).all()
    assert (z <= edges[codes + 1]).all()
    assert max(b - a for a, b in itertools.pairwise(STOPS)) == pytest.approx(0.02)


def test_more_stops_than_a_byte_counts_are_refused():
    with pytest.raises(ValueError, match="stops: 300 of them, but a byte counts at most 255"):
        coded(torch.zeros(1), tuple(range(300)))


# -- geometry for the browser -------------------------------------------------------------------


@pytest.mark.parametrize("order", ["raster", "tile", "morton"])
@pytest.mark.parametrize(("prefix", "suffix"), [(0, 0), (70, 130)])
def test_boxes_and_blocks_of_tokens_are_those_of_the_grid(order, prefix, suffix):
    grid = TokenGrid((3, 9, 20), prefix, suffix, order)
    boxes = block_boxes(grid, BLOCK)
    for index, box in enumerate(boxes.tolist()):
        known = grid.box(index, BLOCK)
        wanted = [-1] * 6 if known is None else [edge for axis in known.axes for edge in axis]
        assert box == wanted
    row = torch.rand(len(boxes)) < 0.5
    blocks = token_blocks(grid, BLOCK).astype(np.int64)
    selected = decisions.selected_tokens(row, grid, BLOCK)
    assert torch.equal(row[blocks].reshape(grid.shape), selected)


def test_a_grid_of_too_many_blocks_is_refused_rather_than_wrapped():
    with pytest.raises(ValueError, match="more than 65,536 blocks"):
        token_blocks(TokenGrid((10, 100, 100)), block=1)


# -- sets ---------------------------------------------------------------------------------------


def load(layer: int, step: int) -> QKV:
    q, k, v = drifting(540, heads=4, kv_heads=2, seed=10 * layer + step)
    return QKV(q, k, v, layer, step, 0.5)


CAPTURE = SimpleNamespace(grid=GRID, entries=[(1, 3), (4, 9)], title="test", video=None, load=load)


def test_masks_of_a_capture_are_those_of_its_calls_with_their_errors():
    book = capture_masks(CAPTURE, 0.8, sink_tokens=64, errors=True)
    for layer, step in CAPTURE.entries:
        x = load(layer, step)
        scores = sol_scores(x.q, x.k, sink_tokens=64)
        mask = book.load(layer, step)
        assert mask.passing == scores.passing(0.8)
        assert torch.equal(book.densities[layer, step], scores.density([0.8])[0, :, 0])
        out = sol_attention(x.q, x.k, x.v, tau=0.8, sink_tokens=64)
        error = attention_error(out, attend(x.q, x.k, x.v)).relative_l2[0]
        torch.testing.assert_close(book.errors[layer, step], error)
        some = book.scores(layer, step, range(1, 4))
        torch.testing.assert_close(some.z, scores.z[:, 1:4])
    table = book.table(book.densities, 4)
    assert table.shape == (2, 2, 4)
    assert np.isnan(table[0, 1]).all()
    assert table[1, 1].tolist() == pytest.approx(book.densities[4, 9].tolist())


def test_a_set_without_masks_an_unknown_call_and_a_wrong_grid_are_refused():
    mask = Mask.of_scores(scores_of(), 1.0)
    with pytest.raises(ValueError, match="masks: it holds no"):
        MaskSet(GRID, {}, "")
    with pytest.raises(ValueError, match=r"layer=7, step=0: no mask; there are .*\[\(0, 0\)\]"):
        MaskSet(GRID, {(0, 0): mask}, "").load(7, 0)
    with pytest.raises(ValueError, match="the mask is of 540 x 540 tokens, but grid"):
        MaskSet(TokenGrid((3, 9, 21)), {(0, 0): mask}, "").load(0, 0)


# -- what the browser is sent -------------------------------------------------------------------


class Recorded(BaseComm):
    """Keeps the size of everything that would go to the browser."""

    sizes: list[int] = []  # noqa: RUF012

    def publish_msg(self, msg_type, data=None, metadata=None, buffers=None, **keys):
        size = len(repr(data)) + sum(memoryview(buffer).nbytes for buffer in buffers or ())
        self.sizes.append(size)


@pytest.fixture
def sizes(monkeypatch) -> list[int]:
    monkeypatch.setattr(comm, "create_comm", Recorded)
    monkeypatch.setattr(Recorded, "sizes", [])
    return Recorded.sizes


def test_no_update_is_larger_than_a_megabyte_also_at_100_000_tokens(sizes):
    viewer = RouteViewer(field_masks(LARGE, 2, entries=((0, 0),)))
    assert max(sizes) < LIMIT
    assert sum(sizes) < 1_600_000
    before = len(sizes)
    viewer.want_scores = True
    assert max(sizes) < LIMIT
    codes = received(viewer, "codes")
    assert len(sizes) - before >= 3
    scores = field_scores(LARGE, range(1), 0)
    assert codes == coded(scores.z, ladder(1.0)).numpy().tobytes()


def received(viewer: RouteViewer, name: str) -> bytes:
    """Parts put together as the browser does, all of the shown picture."""
    parts = [getattr(viewer, f"{name}_{n}") for n in range(viewer.facts["parts"][name])]
    assert {struct.unpack("<I", part[:4])[0] for part in parts} == {viewer.shown["serial"]}
    return b"".join(part[4:] for part in parts)


def index_of(viewer: RouteViewer, name: str) -> bytes:
    """Parts of a table of the index, put together."""
    parts = [getattr(viewer, f"{name}_{n}") for n in range(viewer.facts["parts"][name])]
    return b"".join(part[4:] for part in parts)


def test_small_masks_bring_every_head_so_that_another_head_needs_no_kernel(sizes):
    viewer = RouteViewer(field_masks())
    assert viewer.shown["heads"] == [0, 2]
    assert viewer.shown["scored"]
    mask = field_mask(SMALL, 2, 0, 1.0)
    assert received(viewer, "bits") == mask.passing.words.numpy().tobytes()
    sizes.clear()
    viewer.head = 1
    assert len(sizes) == 1
    assert sizes[0] < 1000


def test_the_index_of_very_many_calls_travels_in_parts(sizes):
    tiny = Mask(BlockRoute.full((1, 64), seqlens=(540, 540)))
    entries = [(layer, step) for layer in range(100) for step in range(60)]
    half = {entry: torch.full((64,), 0.5) for entry in entries[:-1]}
    masks = dict.fromkeys(entries, tiny)
    viewer = RouteViewer(MaskSet(GRID, masks, "", errors=half, densities=half))
    assert max(sizes) < LIMIT
    for name in ("densities", "errors"):
        assert viewer.facts["parts"][name] == 2
        table = np.frombuffer(index_of(viewer, name), np.float32).reshape(100, 60, 64)
        assert (table[:-1] == 0.5).all()
    sizes.clear()
    viewer.layer, viewer.step = 99, 59
    assert np.frombuffer(index_of(viewer, "densities"), np.float32)[-1] == 1
    assert sum(sizes) < 1.1 * LIMIT  # of two parts only the one that changed


def test_the_browser_knows_which_calls_there_are():
    viewer = RouteViewer(field_masks())
    bits = np.unpackbits(np.frombuffer(viewer.recorded, np.uint8), bitorder="little")
    assert (viewer.facts["layers"], viewer.facts["steps"]) == ([0, 2, 5], [0, 8])
    assert bits[:6].reshape(3, 2).tolist() == [[1, 1], [1, 1], [0, 1]]


def test_the_index_follows_tau_where_the_masks_come_with_curves():
    book = capture_masks(CAPTURE, 0.8)
    viewer = RouteViewer(book)
    stops = np.frombuffer(viewer.curve_stops)
    table = np.frombuffer(index_of(viewer, "curves"), np.uint16).reshape(2, 2, 4, len(stops))
    for layer, step in CAPTURE.entries:
        x = load(layer, step)
        wanted = sol_scores(x.q, x.k).density(stops.tolist())[0].numpy()
        np.testing.assert_allclose(table[book.place((layer, step))] / 65_535, wanted, atol=1e-5)
        assert torch.equal(book.curves[layer, step], torch.from_numpy(wanted))
    viewer.tau = 2.0
    shown = viewer.figure().axes[1].images[0].get_array()
    x = load(4, 9)
    assert shown[1, 1] == pytest.approx(float(sol_scores(x.q, x.k).density([2.0])[0, 0, 0]))


def test_the_index_is_sent_also_where_a_picture_was_drawn_before_it():
    """In a notebook the picture for readers without a kernel comes first."""
    book = capture_masks(CAPTURE, errors=True)

    async def cell() -> RouteViewer:
        viewer = RouteViewer(book)
        viewer._repr_mimebundle_()
        await asyncio.sleep(0.1)
        return viewer

    viewer = asyncio.run(cell())
    for name, known in (("densities", book.densities), ("errors", book.errors)):
        table = np.frombuffer(index_of(viewer, name), np.float32).reshape(2, 2, 4)
        np.testing.assert_array_equal(table, book.table(known, 4))


def test_curves_that_would_be_too_much_stay_at_home():
    book = capture_masks(CAPTURE)
    many = {(layer, step): book.masks[1, 3] for layer in range(30) for step in range(80)}
    curves = dict.fromkeys(many, book.curves[1, 3])
    large = dataclasses.replace(book, masks=many, curves=curves, densities={})
    assert not payload.sends_curves(large, large.load(0, 0))
    assert payload.sends_curves(book, book.load(1, 3))
    with pytest.raises(ValueError, match="curves: of 2400 calls, but there are 2 masks"):
        dataclasses.replace(book, curves=curves)


def test_another_layer_loads_its_mask_and_enters_it_in_the_index():
    viewer = RouteViewer(field_masks())
    viewer.layer, viewer.step = 2, 8
    assert viewer.shown["layer"] == 2
    assert viewer.shown["step"] == 8
    table = np.frombuffer(index_of(viewer, "densities"), np.float32).reshape(3, 2, 2)
    assert np.isfinite(table).all(axis=2).tolist() == [[True, False], [True, True], [False, False]]
    known = field_mask(SMALL, 2, 208, 1.0).density()
    assert table[1, 1].tolist() == pytest.approx(known.tolist())


def test_a_burst_of_choices_loads_the_last_one_alone():
    viewer = RouteViewer(field_masks())
    loaded = []
    viewer.observe(lambda change: loaded.append(change["new"]["layer"]), names="shown")

    async def burst():
        for layer in (2, 0, 5, 2):
            viewer.layer = layer
        await asyncio.sleep(0.15)

    asyncio.run(burst())
    assert loaded == [2]


def test_the_module_is_one_script_and_ends_with_the_only_export():
    assert script().count("export ") == 1
    assert RouteViewer._esm == script()


# -- what a script reads ------------------------------------------------------------------------


def test_text_and_figure_follow_head_window_and_tau():
    viewer = RouteViewer(field_masks(sink_blocks=3))
    viewer.head, viewer.tau, viewer.window = 1, 0.5, [10, 40, 90, 128]
    scores = field_scores(SMALL, range(2), 0, sink_blocks=3)
    classes = decisions.classify(scores, 0.5, head=1)
    assert viewer.summary() == decisions.describe(classes)
    image = viewer.figure().axes[0].images[0]
    palette = np.array([views.looks("approximate")[code].face for code in Decision])
    shown = np.array([[f"#{r:02x}{g:02x}{b:02x}" for r, g, b in row] for row in as_bytes(image)])
    assert (shown == palette[classes[10:40, 90:128].numpy()]).all()
    assert image.get_extent() == [89.5, 127.5, 39.5, 9.5]


def as_bytes(image) -> np.ndarray:
    return np.round(np.asarray(image.get_array()) * 255).astype(int)


def test_a_large_figure_shows_the_pooled_window_and_its_rule():
    viewer = RouteViewer(field_masks(LARGE, 1, entries=((0, 0),)))
    ax = viewer.figure().axes[0]
    window = viewer.mask.window(0)
    assert (ax.images[0].get_array() == window.density).all()
    legend = [text.get_text() for text in ax.get_legend().get_texts()]
    assert "1 pixel = mean of 4 x 4 pairs (query x key)" in legend


def test_a_reader_without_kernel_gets_a_picture():
    bundle = RouteViewer(field_masks())._repr_mimebundle_()
    data = bundle[0] if isinstance(bundle, tuple) else bundle
    assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG")
    assert "application/vnd.jupyter.widget-view+json" in data


def test_a_mask_without_scores_is_shown_and_tau_changes_nothing():
    route = BlockRoute.from_dense(torch.rand(1, 2, 9, 9) < 0.3, seqlens=(540, 540))
    mask = Mask.of_route(route, rest="skipped")
    viewer = RouteViewer(MaskSet(GRID, {(0, 0): mask}, "a kernel's own"))
    viewer.tau = 3.0
    assert not viewer.facts["scored"]
    assert not viewer.shown["scored"]
    assert viewer.current() == (mask, 0)
    assert "skipped" in viewer.summary()
    assert "approximate" not in viewer.summary()
    with pytest.raises(ValueError, match="book: has no scores, so tau cannot move"):
        viewer.want_scores = True


def test_rectangular_blocks_keep_their_own_boxes():
    route = BlockRoute.from_dense(torch.rand(1, 1, 5, 9) < 0.3, block=(128, 64), seqlens=(540, 540))
    viewer = RouteViewer(MaskSet(GRID, {(0, 0): Mask.of_route(route)}, ""))
    assert len(viewer.query_boxes) == 5 * 12
    assert len(viewer.key_boxes) == 9 * 12
    assert viewer.facts["block"] == [128, 64]


# -- errors -------------------------------------------------------------------------------------


def test_a_mask_that_cannot_be_read_is_shown_logged_and_raised_and_the_next_one_heals(caplog):
    viewer = RouteViewer(field_masks(broken=(5,)))
    with caplog.at_level(logging.ERROR), pytest.raises(OSError, match="layer 5 is gone"):
        viewer.layer = 5
    assert "OSError: capture file of layer 5 is gone" in viewer.problem
    assert "RouteViewer failed to load layer 5" in caplog.text
    assert viewer.shown["layer"] == 0  # what is still on the screen
    viewer.layer = 2
    assert viewer.problem == ""
    assert viewer.shown["layer"] == 2


def test_it_opens_with_another_mask_where_the_first_cannot_be_read(caplog):
    viewer = RouteViewer(field_masks(broken=(0,)))
    assert viewer.problem == (
        "Error while loading layer 0, step 0: OSError: capture file of layer 0 is gone"
    )
    assert "failed to load layer 0, step 8" in caplog.text
    assert (viewer.layer, viewer.step) == (viewer.shown["layer"], viewer.shown["step"]) == (2, 0)
    viewer.step = 8
    assert viewer.problem == ""
    with pytest.raises(OSError, match="layer 5 is gone"):
        RouteViewer(field_masks(broken=(0, 2, 5)))


def test_a_mask_whose_scores_fail_leaves_the_one_before_whole():
    book = field_masks()
    scores = book.scores
    assert scores is not None

    def failing(layer: int, step: int, heads: range):
        if layer == 5:
            raise OSError("scores of layer 5 are gone")
        return scores(layer, step, heads)

    viewer = RouteViewer(dataclasses.replace(book, scores=failing))
    before = viewer.summary(), received(viewer, "bits")
    with pytest.raises(OSError, match="scores of layer 5"):
        viewer.layer = 5
    viewer.layer = 0
    assert viewer.problem == ""
    assert (viewer.summary(), received(viewer, "bits")) == before


def test_the_index_takes_no_error_back_and_text_follows_a_choice_at_once():
    viewer = RouteViewer(field_masks(broken=(5,)))

    async def choose():
        viewer.layer = 2
        assert viewer.summary() == RouteViewer(field_masks(), layer=2).summary()
        viewer.layer = 5
        with pytest.raises(OSError, match="layer 5 is gone"):
            viewer.flush()
        await asyncio.sleep(0.15)  # the index of layer 2 is filled meanwhile
        assert "layer 5 is gone" in viewer.problem

    asyncio.run(choose())


def test_a_widget_that_has_no_picture_still_appears_with_its_error(monkeypatch):
    def broken(*_: object) -> None:
        raise ValueError("no picture")

    viewer = RouteViewer(field_masks())
    monkeypatch.setattr(RouteViewer, "figure", broken)
    bundle = viewer._repr_mimebundle_()
    data = bundle[0] if isinstance(bundle, tuple) else bundle
    assert "application/vnd.jupyter.widget-view+json" in data
    assert "image/png" not in data


def test_an_error_of_the_browser_reaches_the_log(caplog):
    viewer = RouteViewer(field_masks())
    with caplog.at_level(logging.ERROR):
        viewer.browser_problem = "window=[1]: expected [top, bottom, left, right]"
    assert "RouteViewer failed in the browser: window=[1]" in caplog.text


def not_finite(layer: int, step: int) -> QKV:
    call = load(layer, step)
    if layer == 4:
        call.q[0, 70, 2] = torch.nan
    return call


def test_scores_that_are_nan_are_said_with_their_call_and_heads(caplog):
    capture = SimpleNamespace(**{**vars(CAPTURE), "load": not_finite})
    with pytest.raises(ValueError, match="layer 4, step 9: dense: the reference is not finite"):
        capture_masks(capture, errors=True)
    book = capture_masks(capture)
    assert RouteViewer(book).problem == ""
    with caplog.at_level(logging.WARNING):
        viewer = RouteViewer(book, layer=4)
    assert viewer.problem == (
        "layer 4, step 9: 9 of 324 scores are NaN (heads 2), because q or k holds NaN or infinity; "
        "such a pair passes no threshold."
    )
    assert "9 of 324 scores are NaN" in caplog.text


@pytest.mark.parametrize(
    ("trait", "value", "message"),
    [
        ("query_block", 128, "query_block=128: must be at least 0 and at most 127"),
        ("key_block", -1, "key_block=-1: must be at least 0 and at most 127"),
        ("window", [0, 200, 0, 12], "window=.* 0 <= top < bottom <= 128"),
        ("window", [], "window=.*: expected"),
    ],
)
def test_places_outside_the_mask_are_refused(trait, value, message):
    viewer = RouteViewer(field_masks())
    before = getattr(viewer, trait)
    with pytest.raises(ValueError, match=message):
        setattr(viewer, trait, value)
    assert getattr(viewer, trait) == before


def test_a_video_without_a_frame_is_named():
    book = dataclasses.replace(field_masks(), video=torch.zeros(0, 36, 64, 3, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"video: shape \(0, 36, 64, 3\), expected .* give None"):
        RouteViewer(book)


def test_figures_of_another_number_of_heads_are_refused_by_name():
    book = dataclasses.replace(field_masks(), errors={(0, 0): torch.zeros(3)})
    with pytest.raises(ValueError, match=r"layer=0, step=0: 3 heads, but the first mask has 2"):
        RouteViewer(book)


def test_heads_calls_and_masks_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"head=2: must be in 0\.\.1"):
        RouteViewer(field_masks(), head=2)
    with pytest.raises(ValueError, match="layer=3, step=None: no mask; there are"):
        RouteViewer(field_masks(), layer=3)
    one = Mask.of_scores(scores_of(heads=1), 1.0)
    two = Mask.of_scores(scores_of(heads=2), 1.0)
    viewer = RouteViewer(MaskSet(GRID, {(0, 0): one, (1, 0): two}, ""))
    with pytest.raises(ValueError, match=r"layer=1, step=0: 2 heads of .* the first mask has 1"):
        viewer.layer = 1


def test_parts_carry_the_number_of_their_picture():
    data = bytes(range(256)) * 8000
    made = payload.parts(77, data)
    assert len(made) == payload.part_count(len(data)) == 3
    assert all(len(part) < LIMIT and part[:4] == b"\x4d\0\0\0" for part in made)
    assert b"".join(part[4:] for part in made) == data
