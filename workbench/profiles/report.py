"""The run folder of `workbench apply`: every pair, copies of the profiles, videos, provenance."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from matplotlib.figure import Figure

from workbench.profiles.compare import CONTROL, DENSE, OTHER_SEED, Comparison, Pair
from workbench.run_folder import whole, write_provenance, write_results, write_summary
from workbench.sample.video import write_gif
from workbench.views import Strip, draw_videos, new_figure, save, videos_size

COLUMNS = {
    "prompt": "of the video",
    "seed": "of the noise",
    "name": "dense, dense_control, other_seed, or a profile",
    "relative_l2": "|video - dense| / |dense|, of pixels, or of latents without a decoder",
    "psnr": "dB for a peak of 1, inf when equal, nan for latents",
    "ssim": "structural similarity, nan for latents or frames below 11 pixels",
    "density": "exact pairs / valid pairs as delivered, mean over all calls",
    "density_by_step": "mean over the layers of each step, separated by spaces",
    "sparse_calls": "calls that the sparse path served",
    "dense_calls": "calls that were meant to be dense",
    "ineligible_calls": "calls that went dense because the sparse path cannot serve them",
    "seconds": "of the sampling, reading of densities included; no benchmark",
    "ran": "algorithms and implementations that ran",
    "flags": "what makes the run worthless or misleading",
}


def write(
    found: Comparison,
    folder: Path,
    *,
    files: Mapping[str, Path],
    record: Mapping[str, object],
    summary: str,
) -> Path:
    """Writes the results.

    Args:
        found: what :func:`workbench.profiles.compare.compare` returned.
        folder: a path that does not exist yet; it appears whole or not at all.
        files: of the profiles by name; copies are kept.
        record: the provenance. summary: the text that was printed.

    Raises:
        FileExistsError: the folder exists.
    """
    with whole(folder) as part:
        for name, path in files.items():
            (part / f"{name}{path.suffix}").write_bytes(path.read_bytes())
        _write_videos(found.pairs[0], part)
        rows = [row for pair in found.pairs for row in cells(pair)]
        write_results(part, COLUMNS, rows)
        write_summary(part, summary, COLUMNS)
        write_provenance(part, record)
    return folder


def cells(pair: Pair) -> list[dict[str, object]]:
    """Lines of ``results.csv``, one for each name; the keys are those of :data:`COLUMNS`."""
    return [_row(pair, name) for name in pair.runs]


def _row(pair: Pair, name: str) -> dict[str, object]:
    run, distance = pair.runs[name], pair.distances.get(name)
    quality = {} if distance is None else asdict(distance)
    return {
        "prompt": pair.prompt,
        "seed": pair.seed,
        "name": name,
        **{metric: quality.get(metric) for metric in ("relative_l2", "psnr", "ssim")},
        "density": run.density,
        "density_by_step": " ".join(f"{value:.6g}" for value in run.densities),
        "sparse_calls": run.count("sparse"),
        "dense_calls": run.count("dense"),
        "ineligible_calls": run.count("ineligible"),
        "seconds": run.seconds,
        "ran": run.ran,
        "flags": "; ".join(pair.flags.get(name, ())),
    }


def picture(pair: Pair) -> Figure:
    """Frames of every run of a pair beside their difference from dense; for pixels only."""
    dense = pair.runs[DENSE].video
    strips = [Strip(DENSE, "torch attention, density 1", dense)]
    for name, distance in pair.distances.items():
        if math.isfinite(distance.relative_l2):
            detail = f"rel. L2 {distance.relative_l2:.3g}"
            if name not in (CONTROL, OTHER_SEED):
                detail += f"\ndensity {pair.runs[name].density:.3f}"
            warn = bool(pair.flags.get(name))
            strips.append(Strip(name, detail, pair.runs[name].video, dense, warn))
    height, width = dense.shape[1:3]
    figure = new_figure(*videos_size(len(strips), ratio=height / width))
    draw_videos(figure, strips)
    return figure


def _write_videos(pair: Pair, part: Path) -> None:
    """Videos of the first pair; latents have no colours."""
    if not pair.runs[DENSE].pixels:
        return
    save(picture(pair), part / "comparison.png")
    large = pair.runs[DENSE].video.shape[1] > 200  # pixels: shown as they are
    for name, run in pair.runs.items():
        distance = pair.distances.get(name)
        if distance is None or math.isfinite(distance.relative_l2):
            write_gif(part / f"{name}.gif", run.video, zoom=1 if large else 4)
