"""Procedural video and contact sheets: what the generator promises."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workbench.models.contact_sheet import contact_sheet, write_png
from workbench.models.moving_shapes import (
    CLASS_NAMES,
    hsv_to_rgb,
    make_videos,
    random_scene,
    render,
    signed_distance,
)


@given(seed=st.integers(0, 2**31))
def test_equal_seeds_give_equal_videos_in_range(seed):
    size = {"frames": 3, "height": 16, "width": 20}
    video, label = make_videos(2, seed=seed, **size)
    again, label_again = make_videos(2, seed=seed, **size)
    assert video.shape == (2, 3, 16, 20, 3)
    assert video.dtype == torch.float32
    assert torch.equal(video, again)
    assert torch.equal(label, label_again)
    assert video.min() >= 0
    assert video.max() <= 1
    assert ((label >= 0) & (label < len(CLASS_NAMES))).all()


def test_other_seeds_give_other_videos():
    first, _ = make_videos(1, seed=0, frames=2, height=16, width=16)
    second, _ = make_videos(1, seed=1, frames=2, height=16, width=16)
    assert not torch.allclose(first, second, atol=0.05)


def test_wanted_classes_are_given():
    wanted = torch.tensor([5, 0, 3])
    _, label = make_videos(3, labels=wanted, frames=1, height=8, width=8)
    assert torch.equal(label, wanted)


def test_something_moves_in_every_video():
    video, _ = make_videos(8, seed=3, frames=16, height=32, width=32)
    change = (video[:, -1] - video[:, 0]).abs().amax((1, 2, 3))
    assert (change > 0.1).all()


def test_classes_have_distinct_silhouettes():
    axis = torch.linspace(-1.3, 1.3, 65)
    inside = [signed_distance(c, axis, axis[:, None]) < 0 for c in range(len(CLASS_NAMES))]
    for i, first in enumerate(inside):
        assert 0 < first.float().mean() < 1
        for second in inside[:i]:
            union, both = (first | second).sum(), (first & second).sum()
            assert both / union < 0.9


@pytest.mark.parametrize(
    ("name", "inside", "outside"),
    [
        ("disc", (0.0, 0.9), (0.8, 0.8)),
        ("square", (0.8, 0.8), (0.0, 0.9)),
        ("triangle", (0.0, -1.1), (0.0, 0.7)),
        ("ring", (0.0, 0.75), (0.0, 0.0)),
        ("cross", (1.0, 0.0), (0.7, 0.7)),
        ("star", (0.0, 1.1), (0.0, -0.8)),
    ],
)
def test_shapes_hold_the_points_they_should(name, inside, outside):
    kind = CLASS_NAMES.index(name)
    assert signed_distance(kind, *map(torch.tensor, inside)) < 0
    assert signed_distance(kind, *map(torch.tensor, outside)) > 0


def test_the_nearest_object_covers_the_others():
    scene = random_scene(4, torch.Generator().manual_seed(0))
    scene.start[:] = 0.5
    scene.speed[:] = 0.0
    scene.present[:] = 1.0
    scene.kind[:] = CLASS_NAMES.index("disc")
    alone = random_scene(4, torch.Generator().manual_seed(0))
    for field in ("start", "speed", "kind"):
        getattr(alone, field)[:] = getattr(scene, field)
    alone.present[:, :-1] = 0.0
    # All objects share a centre and the nearest is the largest, so the others leave no trace.
    torch.testing.assert_close(render(scene, 2, 64, 64), render(alone, 2, 64, 64))


def test_objects_bounce_and_stay_in_the_frame():
    scene = random_scene(3, torch.Generator().manual_seed(0))
    scene.present[:, :-1] = 0.0
    shown = render(scene, 80, 16, 16)
    scene.present[:] = 0.0
    empty = render(scene, 80, 16, 16)
    covered = ((shown - empty).abs().amax(-1) > 0.05).float().sum((2, 3))
    assert (covered > 5).all()


@pytest.mark.parametrize(
    ("hsv", "rgb"),
    [((0, 1, 1), (1, 0, 0)), ((1 / 3, 1, 1), (0, 1, 0)), ((2 / 3, 1, 0.5), (0, 0, 0.5)),
     ((0.7, 0, 0.4), (0.4, 0.4, 0.4)), ((0.5, 0.5, 1), (0.5, 1, 1))],
)  # fmt: skip
def test_colours_from_hue_saturation_value(hsv, rgb):
    got = hsv_to_rgb(*(torch.tensor(float(x)) for x in hsv))
    torch.testing.assert_close(got, torch.tensor([float(x) for x in rgb]), atol=1e-5, rtol=0)


def test_a_contact_sheet_has_a_row_per_video_and_a_cell_per_frame():
    video = torch.zeros(2, 16, 8, 8, 3)
    sheet = contact_sheet(video, labels=[0, 5], columns=3, zoom=2)
    assert sheet.dtype == np.uint8
    assert sheet.shape == (2 * (16 + 4) + 4, 4 * (16 + 4) + 4, 3)
    assert sheet[5, 25].tolist() == [0, 0, 0]
    assert sheet[0, 0].tolist() == [255, 255, 255]


def test_a_written_png_holds_the_pixels(tmp_path):
    image = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)
    write_png(tmp_path / "sub" / "a.png", image)
    data = (tmp_path / "sub" / "a.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (7, 5)
    start = data.index(b"IDAT")
    size = struct.unpack(">I", data[start - 4 : start])[0]
    lines = np.frombuffer(zlib.decompress(data[start + 4 : start + 4 + size]), np.uint8)
    assert np.array_equal(lines.reshape(5, 22)[:, 1:].reshape(5, 7, 3), image)


def test_a_png_of_another_kind_is_refused(tmp_path):
    with pytest.raises(ValueError, match="uint8"):
        write_png(tmp_path / "a.png", np.zeros((4, 4), np.float32))
