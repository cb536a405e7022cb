"""What fine-tuning with VSA is worth, measured on the bundled weights, where they are bundled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from workbench.models.compare_vsa import compare
from workbench.paths import VSA_WEIGHTS, data_dir

NAMES = {
    "dense": "dense weights, dense attention",
    "training_free_top_k": "dense weights, VSA without gate",
    "tuned_without_gate": "fine-tuned weights, VSA without gate",
    "tuned_vsa": "fine-tuned weights, VSA with their gate",
    "tuned_dense": "fine-tuned weights, dense attention",
}


@dataclass(frozen=True)
class VsaEffect:
    """Velocity error of each method, or why there is none.

    Attributes:
        missing: what is not here, "" when the comparison ran.
        names: of the methods; empty when nothing ran.
        mean, standard_error: velocity MSE of each method over the videos.
        report: everything that :func:`workbench.models.compare_vsa.compare` says.
    """

    missing: str
    names: tuple[str, ...] = ()
    mean: tuple[float, ...] = ()
    standard_error: tuple[float, ...] = ()
    report: dict[str, Any] | None = None

    def __str__(self) -> str:
        if self.report is None:
            return self.missing
        gap = self.report["differences"]["tuned_vsa - training_free_top_k"]
        return (
            f"At sparsity {self.report['sparsity']:g} ({self.report['kept_cubes']} of "
            f"{self.report['cubes']} cubes kept), over {self.report['videos']} videos drawn for "
            "this comparison: the fine-tuned weights with their gate change the velocity error of "
            f"training-free top-k by {gap['mean']:+.5f} ± {gap['standard_error']:.5f} (standard "
            "error of the paired difference), which closes "
            f"{self.report['share_of_gap_closed']:.0%} of its distance from dense."
        )


def vsa_effect(
    *,
    videos: int = 4,
    times: Sequence[float] = (0.5, 0.9),
    weights: Path | None = None,
    base: Path | None = None,
    grid: tuple[int, int, int] = (8, 16, 16),
    device: torch.device | str | None = None,
) -> VsaEffect:
    """Compares training-free top-k with the fine-tuned weights on new videos.

    Args:
        videos: how many are drawn, at least 2.
        times: denoising times at which each is looked at.
        weights: fine-tuned weights; the bundled ones when None.
        base: weights trained dense; the bundled ones when None.
        grid: tokens along (t, h, w).
        device: CUDA when there is one, else the CPU, when None.

    Returns:
        An effect whose `missing` says so when the weights are not there.
    """
    path = data_dir() / VSA_WEIGHTS if weights is None else weights
    if not path.is_file():
        return VsaEffect(
            f"The fine-tuned weights {path.name} are not bundled here, so nothing is compared. "
            "Make them with `python -m workbench.models.train --vsa 0.875 --start-from ...`."
        )
    report = compare(base, path, videos=videos, times=times, grid=grid, batch=2, device=device)
    methods = cast(dict[str, dict[str, Any]], report["methods"])
    return VsaEffect(
        missing="",
        names=tuple(NAMES[name] for name in NAMES),
        mean=tuple(methods[name]["mean"] for name in NAMES),
        standard_error=tuple(methods[name]["standard_error"] for name in NAMES),
        report=report,
    )
