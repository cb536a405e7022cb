"""Videos as files and pictures: GIF, contact sheet, side by side."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageSequence
from torch import Tensor

from workbench.sample.video import pixels, write_gif, write_sheet
from workbench.views import Strip, draw_tradeoff, draw_videos, new_figure, to_png, videos_size

COLOURS = torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 1]])


def flags(frames: int = 4) -> Tensor:
    """A plain frame per colour."""
    return COLOURS[torch.arange(frames) % 4][:, None, None].expand(-1, 6, 8, -1)


def read(path: Path) -> list[np.ndarray]:
    with Image.open(path) as image:
        return [np.array(frame.convert("RGB")) for frame in ImageSequence.Iterator(image)]


# -- files --------------------------------------------------------------------------------------


def test_a_gif_holds_every_frame_in_order_with_its_colours(tmp_path: Path):
    frames = read(write_gif(tmp_path / "deep" / "video.gif", flags(), zoom=3))
    assert [frame.shape for frame in frames] == [(18, 24, 3)] * 4
    for frame, colour in zip(frames, COLOURS):
        assert np.abs(frame / 255 - colour.numpy()).max() < 0.02


def test_a_gif_keeps_frames_that_repeat_and_plays_for_ever(tmp_path: Path):
    path = write_gif(tmp_path / "still.gif", torch.full((5, 6, 8, 3), 0.5), fps=10)
    with Image.open(path) as image:
        assert image.info["loop"] == 0
        total = sum(frame.info["duration"] for frame in ImageSequence.Iterator(image))
    assert total == 5 * 100


def test_pixels_are_rounded_and_magnified_without_blur():
    video = torch.rand(2, 3, 4, 3, generator=torch.Generator().manual_seed(0))
    large = pixels(video, 2)
    assert large.dtype == np.uint8
    assert np.array_equal(large[:, ::2, ::2], large[:, 1::2, 1::2])
    assert np.abs(large[:, ::2, ::2] / 255 - video.numpy()).max() <= 0.5 / 255 + 1e-6


def test_a_sheet_is_a_png_with_a_row_of_frames(tmp_path: Path):
    path = write_sheet(tmp_path / "sheet.png", flags(), columns=2, zoom=1)
    with Image.open(path) as image:
        assert image.format == "PNG"
        found = np.array(image)
    assert found.shape == (6 + 2 * 4, 2 * 8 + 3 * 4, 3)
    assert found[6, 6].tolist() == [255, 0, 0]  # the first frame
    assert found[6, 18].tolist() == [255, 255, 255]  # the last one


@pytest.mark.parametrize(
    "video, kind, text",
    [
        (torch.zeros(2, 4, 4, 3, dtype=torch.uint8), TypeError, "floating-point"),
        (torch.zeros(4, 4, 3), ValueError, r"\[F, H, W, 3\]"),
        (torch.zeros(0, 4, 4, 3), ValueError, "not empty"),
        (torch.full((2, 4, 4, 3), torch.nan), ValueError, "NaN"),
    ],
)
def test_what_has_no_picture_is_refused_and_writes_nothing(
    tmp_path: Path, video: Tensor, kind: type[Exception], text: str
):
    for write, name in ((write_gif, "a.gif"), (write_sheet, "a.png")):
        with pytest.raises(kind, match=text):
            write(tmp_path / name, video)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "settings, kind",
    [({"fps": 0}, ValueError), ({"fps": 51}, ValueError), ({"zoom": True}, TypeError)],
)
def test_bad_settings_of_a_gif_are_refused(tmp_path: Path, settings: dict, kind: type[Exception]):
    with pytest.raises(kind, match=next(iter(settings))):
        write_gif(tmp_path / "a.gif", flags(), **settings)


def test_a_gif_must_be_named_so(tmp_path: Path):
    with pytest.raises(ValueError, match=r"must end in \.gif"):
        write_gif(tmp_path / "a.mp4", flags())


# -- pictures -----------------------------------------------------------------------------------


def test_videos_stand_beside_their_differences():
    video, other = flags().contiguous(), flags().contiguous().clone()
    other[:, :3] = 0
    strips = [Strip("dense", "", video), Strip("sparse", "density 0.3", other, video, warn=True)]
    figure = new_figure(*videos_size(2, columns=4, ratio=6 / 8))
    draw_videos(figure, strips, columns=4)
    pictures = [image for ax in figure.axes for image in ax.get_images()]
    assert len(pictures) == 3  # two videos, one difference
    shown = np.asarray(pictures[2].get_array().filled(-1))
    expected = np.abs((other - video).numpy()).mean(-1)
    assert np.allclose(shown[:, :8], expected[0])
    assert np.allclose(shown[:, -8:], expected[3])
    texts = [text.get_text() for ax in figure.axes for text in ax.texts]
    assert texts == ["dense", "", "sparse", "density 0.3"]
    assert to_png(figure).startswith(b"\x89PNG")


def test_a_difference_of_nothing_is_dark_not_stretched():
    figure = new_figure(*videos_size(1))
    draw_videos(figure, [Strip("same", "", flags(), flags())])
    scale = next(image for ax in figure.axes[2:3] for image in ax.get_images())
    assert scale.norm.vmax == pytest.approx(1 / 255)
    assert scale.get_array().max() == 0


def test_videos_of_several_shapes_have_no_common_picture():
    with pytest.raises(ValueError, match="one shape"):
        draw_videos(new_figure(), [Strip("a", "", flags(4)), Strip("b", "", flags(3))])


def test_the_tradeoff_has_a_point_per_schedule():
    figure = new_figure()
    ax = figure.subplots()
    density, psnr = [[0.2, 0.5, 0.7], [0.4, 0.6, 0.8]], [[20.0, 25, 30], [22, 26, 31]]
    draw_tradeoff(ax, density, psnr, [0, 2], [0, 1, 4], control=120.0)
    assert [line.get_xdata().tolist() for line in ax.lines] == density
    assert [line.get_ydata().tolist() for line in ax.lines] == psnr
    assert [text.get_text() for text in ax.texts] == ["0", "1", "4"] * 2
    assert "120 dB" in ax.get_title(loc="left")
    with pytest.raises(ValueError, match=r"both must be \(2, 2\)"):
        draw_tradeoff(ax, density, psnr, [0, 2], [0, 1], control=120.0)
