"""Pictures: what they must show, and that they show it without colour and without pyplot."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis.extra import numpy as arrays
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgb
from matplotlib.patches import PathPatch

from workbench import views
from workbench.decisions import Decision, TileState
from workbench.views import blocks, frames, style

PNG = b"\x89PNG\r\n\x1a\n"
MASKS = arrays.arrays(bool, arrays.array_shapes(min_dims=2, max_dims=2, max_side=9))


def axes():
    return views.new_figure().subplots()


def texts(ax) -> str:
    """Every text of an axes: title, labels, legend, annotations."""
    legend = [] if ax.get_legend() is None else ax.get_legend().get_texts()
    own = [ax.title, ax._left_title, ax.xaxis.label, ax.yaxis.label, *ax.texts, *legend]
    return "\n".join(text.get_text() for text in own)


def lightness(color: str) -> float:
    """CIELAB L* of a colour, what remains of it in grey."""
    linear = [((c + 0.055) / 1.055) ** 2.4 if c > 0.04045 else c / 12.92 for c in to_rgb(color)]
    y = float(np.dot(linear, [0.2126, 0.7152, 0.0722]))
    return 116 * y ** (1 / 3) - 16 if y > 0.008856 else 903.3 * y


def all_decisions() -> torch.Tensor:
    classes = torch.zeros(12, 12, dtype=torch.uint8)
    classes[:, 3:5] = Decision.ROUTED
    classes.fill_diagonal_(Decision.DIAGONAL)
    classes[:, 11] = Decision.SINK
    return classes


@pytest.mark.parametrize("y", [0.0, 0.5, 1.0])
def test_the_mark_of_a_curve_keeps_its_label_inside_the_chart(y: float):
    figure = views.new_figure(3, 2)
    ax = figure.subplots()
    views.draw_curve(ax, [0.0, 1.0, 2.0], [[1.0, 0.5, 0.0]], (2 - 2 * y, y), title="t")
    figure.draw_without_rendering()
    (label,) = ax.texts
    box, frame = label.get_window_extent(), ax.get_window_extent()
    assert frame.y0 <= box.y0 < box.y1 <= frame.y1
    assert frame.x0 <= box.x0 < box.x1 <= frame.x1


@pytest.mark.parametrize(
    ("place", "message"),
    [({"query": 12}, "query=12"), ({"query": -1}, "query=-1"), ({"query": 0, "key": 12}, "key=12")],
)
def test_a_block_outside_the_map_is_not_marked_but_refused(place, message):
    with pytest.raises(ValueError, match=f"{message}: must be at least 0 and at most 11"):
        views.draw_route(axes(), all_decisions(), **place)


@pytest.mark.parametrize("shape", [(0, 8, 8, 3), (2, 0, 8, 3)])
def test_a_video_without_frames_or_pixels_is_refused(shape):
    keys = torch.zeros(2, 4, 4, dtype=torch.bool)
    with pytest.raises(ValueError, match="with a frame and a pixel at least"):
        views.draw_frames(views.new_figure(), keys, keys, np.zeros(shape, np.uint8))


@pytest.mark.parametrize("looks", [style.DECISIONS, style.TILES], ids=["decisions", "tiles"])
def test_classes_are_told_apart_without_colour(looks):
    for one, other in itertools.combinations(looks.values(), 2):
        assert abs(lightness(one.face) - lightness(other.face)) > 10 or one.hatch != other.hatch


def test_the_four_decisions_differ_in_lightness_and_the_forced_ones_are_hatched_too():
    steps = sorted(lightness(look.face) for look in style.DECISIONS.values())
    assert min(np.diff(steps)) > 10
    hatches = [style.DECISIONS[code].hatch for code in (Decision.DIAGONAL, Decision.SINK)]
    assert None not in hatches
    assert len(set(hatches)) == 2


def test_a_routing_map_names_its_axes_title_and_the_share_of_every_decision():
    ax = axes()
    views.draw_route(ax, all_decisions(), "layer 2, tau 1.0")
    said = texts(ax)
    for text in ("query block", "key block", "layer 2, tau 1.0", "approximate  68.8%"):
        assert text in said
    assert {patch.get_hatch() for patch in ax.patches if isinstance(patch, PathPatch)} == {
        style.DECISIONS[Decision.DIAGONAL].hatch,
        style.DECISIONS[Decision.SINK].hatch,
    }


def test_a_decision_that_does_not_occur_has_no_entry_in_the_legend():
    ax = axes()
    views.draw_route(ax, torch.ones(4, 4, dtype=torch.uint8))
    assert "routed  100.0%" in texts(ax)
    assert "sink" not in texts(ax)


def test_latent_frames_are_numbered_along_the_map():
    ax = axes()
    views.draw_route(ax, all_decisions(), frame_edges=[0, 4, 8, 12])
    assert {"t 0", "t 1", "t 2"} <= {text.get_text() for text in ax.texts}


def test_a_map_of_many_blocks_is_pooled_by_mean_and_says_so():
    classes = torch.zeros(1200, 1200, dtype=torch.uint8)
    classes[::2] = Decision.ROUTED
    ax = axes()
    views.draw_route(ax, classes)
    (image,) = ax.images
    assert max(image.get_array().shape) <= 512
    assert np.allclose(image.get_array().mean(), 0.5, atol=0.01)
    assert "1 pixel = mean of 3 x 3 pairs" in texts(ax)


@settings(max_examples=30)
@given(MASKS)
def test_hatched_cells_are_exactly_the_true_ones(mask):
    path = blocks.cells_path(mask)
    if not mask.any():
        assert path is None
        return
    rows, columns = np.indices(mask.shape)
    points = np.stack([columns.ravel(), rows.ravel()], axis=1)
    inside = np.zeros(len(points), dtype=bool)
    for polygon in path.to_polygons():
        low, high = polygon.min(axis=0), polygon.max(axis=0)
        inside |= ((points > low) & (points < high)).all(axis=1)
    assert np.array_equal(inside.reshape(mask.shape), mask)


@settings(max_examples=30)
@given(MASKS)
def test_an_outline_is_as_long_as_the_border_of_its_cells(mask):
    padded = np.pad(mask, 1).astype(int)
    border = np.abs(np.diff(padded, axis=0)).sum() + np.abs(np.diff(padded, axis=1)).sum()
    runs = frames.outline(mask)
    assert np.abs(runs[:, 1] - runs[:, 0]).sum() == border


def test_a_skip_map_names_its_tiles_and_states():
    states = torch.tensor([[0, 2], [1, 0]], dtype=torch.uint8)
    ax = axes()
    views.draw_skip(ax, states, "lambda 0.01")
    said = texts(ax)
    for text in ("query tile", "key tile", "computed  50.0%", "skipped  25.0%", "masked (causal)"):
        assert text in said
    assert TileState(2) is TileState.MASKED


def test_a_curve_has_a_line_per_head_a_bold_mean_and_the_current_value():
    ax = axes()
    per_head = torch.tensor([[0.9, 0.5, 0.1], [0.7, 0.3, 0.1]])
    views.draw_curve(ax, [0, 1, 2], per_head, (1.0, 0.5), ["head 0", "head 1"], highlight=0)
    widths = {line.get_label(): line.get_linewidth() for line in ax.lines}
    assert max(widths["head 0"], widths["head 1"]) < widths["mean"]
    mean = next(line for line in ax.lines if line.get_label() == "mean")
    assert np.allclose(mean.get_ydata(), [0.8, 0.4, 0.1])
    assert "0.5" in texts(ax)
    assert "standard deviations" in texts(ax)
    assert len({line.get_linestyle() for line in ax.lines[:2]}) == 2


@pytest.mark.parametrize("heads", [1, 2, 40])
def test_a_curve_serves_any_number_of_heads(heads):
    ax = axes()
    views.draw_curve(ax, [0, 1], torch.rand(heads, 2), labels=[f"head {n}" for n in range(heads)])
    assert views.to_png(ax.figure).startswith(PNG)
    assert ("head 0" in texts(ax)) == (heads <= 4)


@pytest.mark.parametrize(
    ("tau", "share"), [(0.0, "50.0%"), (-2.0, "100.0%"), (1.0, "0.0%"), (9.0, "0.0%")]
)
def test_a_histogram_says_the_share_above_tau_and_a_tie_is_not_above(tau, share):
    ax = axes()
    views.draw_histogram(ax, torch.tensor([-1.0, 0.0, 0.5, 1.0]), tau)
    assert f"{share} above\ntau = {tau:.2f}" in texts(ax)
    assert ax.get_xlim()[0] < tau < ax.get_xlim()[1]
    assert views.to_png(ax.figure).startswith(PNG)


def test_a_histogram_leaves_out_what_is_not_finite_and_says_so():
    ax = axes()
    views.draw_histogram(ax, torch.tensor([-1.0, 1.0, math.nan, math.inf]), 0.0, title="Scores")
    assert "Scores  (2 of 4 not finite)" in texts(ax)
    assert "50.0% above" in texts(ax)
    views.draw_histogram(axes(), torch.full((3,), math.nan), 0.0)


def test_heads_show_density_error_and_an_ellipsis_until_it_is_measured():
    ax = axes()
    views.draw_heads(ax, [0.25, 0.5], [0.0312, 1.7])
    assert {"0.250", "0.500", "0.031", "1.700"} <= set(texts(ax).split("\n"))
    assert [bar.get_width() for bar in ax.patches[:2]] == [0.25, 0.5]
    waiting = axes()
    views.draw_heads(waiting, [0.25, 0.5])
    assert texts(waiting).split("\n").count("…") == 2


def test_frames_have_a_panel_and_a_share_each_and_outline_keys_and_query():
    selected = torch.zeros(3, 4, 4, dtype=torch.bool)
    selected[1, :2] = True
    own = torch.zeros_like(selected)
    own[2, 0] = True
    figure = views.new_figure(*views.frames_size((3, 4, 4)))
    video = torch.full((6, 8, 8, 3), 128, dtype=torch.uint8)
    views.draw_frames(figure, selected, own, video, title="query block 4")
    (ax,) = figure.axes
    said = texts(ax)
    for text in ("t 0   0% exact", "t 1   50% exact", "query block 4", "approximate (washed out)"):
        assert text in said
    washed, tinted = (image.get_array() for image in ax.images[:2])
    assert np.allclose(washed, washed[0, 0])
    assert tinted[0, 0].mean() < tinted[-1, -1].mean() - 0.2
    outlined = [c for c in ax.collections if isinstance(c, LineCollection) and c.get_segments()]
    assert len(outlined) == 3  # keys of frame 1; the query of frame 2, in white and above it
    assert views.to_png(figure).startswith(PNG)


def test_of_many_frames_an_even_choice_is_shown_that_holds_the_query():
    query = np.zeros((100, 2, 2), dtype=bool)
    query[37] = True
    chosen = frames.shown_frames(query, 24)
    assert len(chosen) == 24
    assert chosen[0] == 0
    assert chosen[-1] == 99
    assert 37 in chosen
    assert chosen == sorted(set(chosen))


def test_a_heatmap_writes_its_numbers_and_leaves_out_what_was_not_measured():
    ax = axes()
    values = [[0.125, float("nan")], [0.5, 1.0]]
    views.heatmap(ax, values, [2, 4], ["a", "b"], "density", title="by layer")
    assert [text.get_text() for text in ax.texts] == ["0.125", "0.5", "1"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["2", "4"]
    assert views.to_png(ax.figure).startswith(PNG)


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (
            lambda f: views.heatmap(f.subplots(), [[1.0]], [1, 2], [1], "x"),
            r"values: shape \(1, 1\), but there are 2 rows and 1 columns",
        ),
        (
            lambda f: views.draw_frames(f, np.ones((1, 2, 2)), np.ones((1, 2, 3))),
            r"selected \(1, 2, 2\) and own \(1, 2, 3\): both must be \[T, H, W\]",
        ),
        (
            lambda f: views.draw_frames(
                f, np.ones((1, 2, 2)), np.ones((1, 2, 2)), np.ones((3, 4, 4))
            ),
            r"video: shape \(3, 4, 4\), expected \[frames, height, width, 3\]",
        ),
    ],
)
def test_shapes_that_do_not_belong_together_are_refused(draw, message):
    with pytest.raises(ValueError, match=message):
        draw(views.new_figure())


def test_equal_data_gives_equal_bytes_and_files(tmp_path: Path):
    first, second = axes(), axes()
    for ax in (first, second):
        views.draw_route(ax, all_decisions(), query=3, key=1)
    assert views.to_png(first.figure) == views.to_png(second.figure)
    saved = views.save(first.figure, tmp_path / "new" / "route.png")
    assert saved.read_bytes().startswith(PNG)


def test_a_picture_in_a_notebook_carries_its_text():
    ax = axes()
    bundle = views.picture(ax.figure, "nothing yet")._repr_mimebundle_()
    assert bundle["text/plain"] == "nothing yet"
    assert bundle["image/png"].startswith("iVBOR")


def test_no_view_knows_pyplot():
    package = Path(views.__file__).parent
    for path in [*package.glob("*.py"), *(package.parent / "widgets").glob("*.py")]:
        imports = [line for line in path.read_text().splitlines() if "import" in line]
        assert not [line for line in imports if "pyplot" in line], path.name


# --- distances from dense


def test_every_distance_is_a_point_and_every_mean_is_written():
    ax = axes()
    views.draw_distances(ax, ["a", "b"], [[1e-3, 3e-3], [0.1, 0.3]], title="two pairs")
    assert ax.get_yscale() == "log"
    points = [line for line in ax.lines if line.get_marker() == "o"]
    assert [list(map(float, line.get_ydata())) for line in points] == [[1e-3, 3e-3], [0.1, 0.3]]
    assert {"0.002", "0.2", "two pairs"} <= set(texts(ax).split("\n"))


def test_distances_of_zero_are_written_below_their_name():
    ax = axes()
    views.draw_distances(ax, ["control", "b"], [[0.0, 0.0], [0.1, 0.3]])
    assert [label.get_text() for label in ax.get_xticklabels()] == ["control\n2 equal", "b"]


def test_distances_need_a_row_for_each_name():
    with pytest.raises(ValueError, match=r"\[2 names, pairs\]"):
        views.draw_distances(axes(), ["a", "b"], [[0.1, 0.3]])
