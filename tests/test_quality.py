"""Quality of videos: PSNR, SSIM, relative L2, LPIPS where it can run, statistics over seeds."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from blockattn import UnsupportedError
from workbench import quality
from workbench.quality import Lpips, lpips_obstacle, over_seeds, paired, psnr, relative_l2, ssim

MEASURES = (psnr, relative_l2, ssim)


def noise(frames: int = 2, height: int = 13, width: int = 14, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(frames, height, width, 3, generator=generator)


def slow_ssim(a: np.ndarray, b: np.ndarray) -> float:
    """The definition, window by window."""
    offsets = np.arange(11) - 5
    line = np.exp(-(offsets**2) / (2 * 1.5**2))
    weights = np.outer(line, line) / line.sum() ** 2
    found = []
    for frame in range(a.shape[0]):
        for channel in range(3):
            for y in range(a.shape[1] - 10):
                for x in range(a.shape[2] - 10):
                    p, q = (v[frame, y : y + 11, x : x + 11, channel] for v in (a, b))
                    mp, mq = (weights * p).sum(), (weights * q).sum()
                    vp, vq = (weights * (p - mp) ** 2).sum(), (weights * (q - mq) ** 2).sum()
                    cov = (weights * (p - mp) * (q - mq)).sum()
                    up = (2 * mp * mq + 1e-4) * (2 * cov + 9e-4)
                    found.append(up / ((mp**2 + mq**2 + 1e-4) * (vp + vq + 9e-4)))
    return float(np.mean(found))


# -- the measures -------------------------------------------------------------------------------


@pytest.mark.parametrize("difference, decibel", [(0.1, 20.0), (0.01, 40.0), (1.0, 0.0)])
def test_psnr_is_minus_twenty_log10_of_a_constant_difference(difference: float, decibel: float):
    reference = torch.zeros(1, 4, 4, 3, dtype=torch.float64)
    assert psnr(reference + difference, reference) == pytest.approx(decibel)


def test_equal_videos_have_no_distance():
    video = noise()
    assert psnr(video, video.clone()) == math.inf
    assert relative_l2(video, video.clone()) == 0
    assert ssim(video, video.clone()) == pytest.approx(1, abs=1e-12)


def test_relative_l2_is_the_ratio_of_norms_and_black_references_do_not_hide_a_difference():
    video = noise()
    assert relative_l2(0.75 * video, video) == pytest.approx(0.25)
    black = torch.zeros_like(video)
    assert relative_l2(video, black) == math.inf
    assert relative_l2(black, black) == 0


def test_ssim_equals_its_definition_window_by_window():
    a, b = noise(seed=1), (noise(seed=1) + 0.5 * noise(seed=2)) / 1.5
    assert ssim(a, b) == pytest.approx(slow_ssim(a.double().numpy(), b.double().numpy()), abs=1e-9)


def test_ssim_of_two_plain_videos_has_the_luminance_term_alone():
    a, b = torch.full((1, 11, 11, 3), 0.5).double(), torch.full((1, 11, 11, 3), 0.25).double()
    assert ssim(a, b) == pytest.approx((2 * 0.125 + 1e-4) / (0.25 + 0.0625 + 1e-4))


@given(st.floats(0.01, 0.5), st.integers(0, 100))
def test_more_noise_is_farther_in_every_measure(amount: float, seed: int):
    video, other = noise(seed=seed), noise(seed=seed + 1)
    near, far = video.lerp(other, amount / 2), video.lerp(other, amount)
    assert psnr(near, video) > psnr(far, video)
    assert relative_l2(near, video) < relative_l2(far, video)
    assert ssim(near, video) > ssim(far, video)


@given(st.integers(0, 100))
def test_psnr_and_ssim_are_symmetric(seed: int):
    a, b = noise(seed=seed), noise(seed=seed + 1)
    assert psnr(a, b) == pytest.approx(psnr(b, a))
    assert ssim(a, b) == pytest.approx(ssim(b, a))


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize(
    "bad, kind, text",
    [
        (np.zeros((2, 13, 14, 3)), TypeError, "video: ndarray"),
        (torch.zeros(2, 13, 14, 3, dtype=torch.uint8), TypeError, "uint8"),
        (torch.zeros(13, 14, 3), ValueError, r"expected \[F, H, W, 3\]"),
        (torch.zeros(2, 3, 13, 14), ValueError, r"expected \[F, H, W, 3\]"),
        (torch.zeros(0, 13, 14, 3), ValueError, "not empty"),
        (torch.full((2, 13, 14, 3), 1.5), ValueError, r"values from 1.5 to 1.5"),
        (torch.full((2, 13, 14, 3), -0.1), ValueError, r"expected \[0, 1\]"),
        (torch.full((2, 13, 14, 3), math.nan), ValueError, "nan"),
        (torch.zeros(2, 13, 13, 3), ValueError, "must be one shape"),
    ],
)
def test_what_is_no_such_video_is_refused(measure, bad, kind, text: str):
    with pytest.raises(kind, match=text):
        measure(bad, noise())


def test_ssim_refuses_frames_smaller_than_its_window():
    with pytest.raises(ValueError, match=r"10 x 14 pixels.*11 x 11"):
        ssim(noise(height=10), noise(height=10))


def test_inputs_are_not_modified():
    a, b = noise(seed=1), noise(seed=2)
    before = a.clone(), b.clone()
    for measure in MEASURES:
        measure(a, b)
    assert torch.equal(a, before[0])
    assert torch.equal(b, before[1])


# -- LPIPS --------------------------------------------------------------------------------------


def fake_lpips(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, weights: bool) -> list[Tensor]:
    """A stand-in for the optional package that notes what it is given."""
    given: list[Tensor] = []

    class Net:
        def __init__(self, net: str, verbose: bool) -> None:
            assert (net, verbose) == ("alex", False)

        def eval(self) -> Net:
            return self

        def __call__(self, a: Tensor, b: Tensor) -> Tensor:
            given.extend((a, b))
            return (a - b).abs().mean(dim=(1, 2, 3), keepdim=True)

    monkeypatch.setitem(sys.modules, "lpips", SimpleNamespace(LPIPS=Net))
    monkeypatch.setattr(quality.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    if weights:
        (tmp_path / "checkpoints").mkdir()
        (tmp_path / "checkpoints" / quality.LPIPS_BACKBONE).touch()
    return given


def test_lpips_names_the_missing_package(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(quality.importlib.util, "find_spec", lambda name: None)
    assert lpips_obstacle() == "the package lpips is not installed"
    with pytest.raises(UnsupportedError, match="not installed; install both by hand, or use ssim"):
        Lpips()


def test_lpips_never_downloads_its_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    fake_lpips(monkeypatch, tmp_path, weights=False)
    with pytest.raises(UnsupportedError, match=f"weights {quality.LPIPS_BACKBONE} are not in"):
        Lpips()


def test_an_lpips_that_does_not_load_is_an_obstacle_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    fake_lpips(monkeypatch, tmp_path, weights=True)
    monkeypatch.setitem(sys.modules, "lpips", None)  # importing it is then an ImportError
    assert str(lpips_obstacle()).startswith("the package lpips does not load (import of lpips")


def test_lpips_gets_frames_first_and_values_from_minus_one_to_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    given = fake_lpips(monkeypatch, tmp_path, weights=True)
    ones, zeros = torch.ones(2, 4, 5, 3), torch.zeros(2, 4, 5, 3)
    assert Lpips()(ones, zeros) == 2
    assert [tuple(x.shape) for x in given] == [(2, 3, 4, 5)] * 2
    assert [float(x.unique()) for x in given] == [1, -1]


# -- statistics over seeds ----------------------------------------------------------------------


def test_mean_standard_error_median_and_range():
    found = over_seeds([1.0, 2.0, 3.0, 10.0])
    assert (found.count, found.mean, found.median) == (4, 4.0, 2.5)
    assert (found.low, found.high) == (1.0, 10.0)
    assert found.standard_error == pytest.approx(math.sqrt(50 / 3) / 2)


def test_one_seed_has_no_standard_error():
    assert over_seeds([3.0]).standard_error is None


def test_pairing_removes_what_differs_between_seeds():
    prompt = [10.0, 40.0, 25.0]
    better = [value + delta for value, delta in zip(prompt, (1.0, 1.1, 0.9))]
    error = paired(better, prompt).standard_error
    alone = over_seeds(better).standard_error
    assert error is not None
    assert alone is not None
    assert paired(better, prompt).mean == pytest.approx(1.0)
    assert error < alone / 50


@pytest.mark.parametrize(
    "values, text",
    [([], "is empty"), ([1.0, math.inf], "inf"), ([math.nan], "relative_l2 instead")],
)
def test_statistics_refuse_what_has_no_mean(values: list[float], text: str):
    with pytest.raises(ValueError, match=text):
        over_seeds(values)


def test_pairs_need_the_same_seeds():
    with pytest.raises(ValueError, match="2 entries and others 1"):
        paired([1.0, 2.0], [1.0])
