"""The run folder of `workbench sample`: a folder per variant, pictures that compare, results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from matplotlib.figure import Figure

from workbench.provenance import provenance
from workbench.run_folder import whole, write_provenance, write_results, write_summary
from workbench.sample.run import Row, SampleResult
from workbench.sample.text import alarms, calls, small
from workbench.sample.variants import BASELINE
from workbench.sample.video import write_gif, write_sheet
from workbench.views import Strip, draw_videos, heatmap, new_figure, save, videos_size

COLUMNS = {
    "variant": "name, and the folder with its video.gif, frames.png and config.yaml",
    "weights": "base, or vsa: fine-tuned with VSA",
    "seed": "of the noise",
    "compared_with": "baseline of the next four columns",
    "psnr": "dB for a peak of 1, inf when equal",
    "ssim": "structural similarity, 1 when equal",
    "relative_l2": "|video - baseline| / |baseline|",
    "lpips": "AlexNet LPIPS, empty when it cannot run here",
    "psnr_base": "PSNR against the dense run of the base weights",
    "ssim_base": "SSIM against it",
    "relative_l2_base": "relative L2 against it",
    "density": "exact pairs / valid pairs as delivered, mean over all calls",
    "density_by_step": "mean over the layers of each step, separated by spaces",
    "cutoff": "dense while the denoising time is at or above it (empty: no dense phase)",
    "dense_steps": "how many steps of the schedule that is",
    "dense_layers": "layers that its configuration keeps dense, separated by spaces",
    "seconds": "of the sampling, reading of densities included; no benchmark",
    "impl": "algorithms and implementations that ran",
    "emulated": "number formats that were emulated on this machine",
    "sparse_calls": "calls that the sparse path served",
    "dense_calls": "calls that were meant to be dense",
    "ineligible_calls": "calls that went dense because the sparse path cannot serve them",
    "flags": "what makes the row worthless or misleading",
}


def write(result: SampleResult, folder: Path, *, command: Sequence[str], summary: str) -> Path:
    """Writes videos, pictures, results, configurations and provenance.

    Args:
        result: what :func:`workbench.sample.run.run` returned.
        folder: a path that does not exist yet; it appears whole or not at all.
        command, summary: for the provenance, and the text that was printed.

    Raises:
        FileExistsError: the folder exists.
    """
    with whole(folder) as part:
        for row in result.rows:
            _write_variant(result, row, part)
        save(comparison(result), part / "comparison.png")
        save(densities(result), part / "density.png")
        write_results(part, COLUMNS, map(cells, result.rows))
        write_summary(part, summary, COLUMNS)
        write_provenance(part, _provenance(result, command))
    return folder


def comparison(result: SampleResult) -> Figure:
    """Frames of every variant of the first seed beside their difference from its baseline.

    A video that is not finite has no picture and is left out; the table says so.
    """
    rows = [row for row in result.rows if row.sampled.seed == result.settings.seeds[0]]
    videos = {row.sampled.variant.name: row.sampled.video for row in rows}
    strips = []
    for row in rows:
        if math.isnan(row.quality.psnr):
            continue
        variant = row.sampled.variant
        other = BASELINE if variant.role == "baseline" else variant.compared_with
        reference = None if variant.name == BASELINE else videos[other]
        warn = bool(row.flags)
        strips.append(Strip(variant.name, detail(row), row.sampled.video, reference, warn))
    height, width = result.rows[0].sampled.video.shape[1:3]
    figure = new_figure(*videos_size(len(strips), ratio=height / width))
    draw_videos(figure, strips)
    return figure


def detail(row: Row) -> str:
    """The figures under a name."""
    if row.sampled.variant.name == BASELINE:
        return "torch attention, density 1"
    quality = row.to_base if row.sampled.variant.role == "baseline" else row.quality
    return (
        f"PSNR {quality.psnr:.1f} dB, SSIM {quality.ssim:.3f}\n"
        f"rel. L2 {small(quality.relative_l2)}\ndensity {row.sampled.density:.3f}"
    )


def densities(result: SampleResult) -> Figure:
    """Delivered density of every variant and step, of the first seed."""
    rows = [row for row in result.rows if row.sampled.seed == result.settings.seeds[0]]
    times = result.settings.times
    figure = new_figure(max(7.0, 2.8 + 0.62 * len(times)), max(3.0, 1.3 + 0.34 * len(rows)))
    heatmap(
        figure.subplots(),
        [row.sampled.densities() for row in rows],
        [row.sampled.variant.name for row in rows],
        [f"{step}\nt={time:.2f}" for step, time in enumerate(times)],
        "density (exact / valid pairs)",
        row_label="",
        column_label="step and denoising time (1 = noisiest)",
        title="Delivered density per step, mean over layers and heads",
        limits=(0.0, 1.0),
    )
    return figure


def cells(row: Row) -> dict[str, object]:
    """One line of ``results.csv``; the keys are those of :data:`COLUMNS`."""
    sampled, variant = row.sampled, row.sampled.variant
    sparse, dense, ineligible = calls(sampled)
    return {
        "variant": variant.name,
        "weights": variant.weights,
        "seed": sampled.seed,
        "compared_with": variant.compared_with,
        **asdict(row.quality),
        "psnr_base": row.to_base.psnr,
        "ssim_base": row.to_base.ssim,
        "relative_l2_base": row.to_base.relative_l2,
        "density": sampled.density,
        "density_by_step": " ".join(f"{value:.6g}" for value in sampled.densities()),
        "cutoff": variant.cutoff,
        "dense_steps": row.dense_steps,
        "dense_layers": " ".join(map(str, variant.dense_layers)),
        "seconds": sampled.seconds,
        "impl": sampled.ran,
        "emulated": ", ".join(sampled.emulated),
        "sparse_calls": sparse,
        "dense_calls": dense,
        "ineligible_calls": ineligible,
        "flags": "; ".join(row.flags),
    }


def _write_variant(result: SampleResult, row: Row, part: Path) -> None:
    """Its configuration, and its video unless that has no colours."""
    folder = part / row.sampled.variant.name
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(row.sampled.variant.config_text(), encoding="utf-8")
    if math.isnan(row.quality.psnr):
        return
    suffix = f"_seed{row.sampled.seed}" if len(result.settings.seeds) > 1 else ""
    write_gif(folder / f"video{suffix}.gif", row.sampled.video)
    write_sheet(folder / f"frames{suffix}.png", row.sampled.video)


def _provenance(result: SampleResult, command: Sequence[str]) -> dict[str, object]:
    seeds = {f"noise {n}": seed for n, seed in enumerate(result.settings.seeds)}
    return {
        **provenance(command, result.inputs, seeds=seeds),
        "settings": asdict(result.settings),
        "times": result.settings.times,
        "variants": [_variant_record(result, variant.name) for variant in result.variants],
        "ran": {"device": result.device, "dtype": result.dtype},
        "warnings": alarms(result),
    }


def _variant_record(result: SampleResult, name: str) -> Mapping[str, object]:
    row = result.of(name)[0]
    variant, config = row.sampled.variant, row.sampled.variant.config
    return {
        "name": name,
        "role": variant.role,
        "weights": variant.weights,
        "gate": variant.gate,
        "compared_with": variant.compared_with,
        "note": variant.note,
        "config": None if config is None else config.model_dump(mode="json"),
        "impl": row.sampled.ran,
        "fallbacks": sorted({reason for r in row.sampled.records for reason in r.reasons}),
    }
