"""`workbench calibrate` and `workbench solve`: options to plain calls, nothing more."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def calibrate(
    out: Annotated[Path, typer.Option(help="The calibration to make (.safetensors).")],
    algorithm: Annotated[str, typer.Option(help="sol_attn or skip_softmax.")] = "sol_attn",
    labels: Annotated[str, typer.Option(help="Classes of the videos, such as disc,ring.")] = "disc",
    seeds: Annotated[str, typer.Option(help="Seeds of the noise, such as 0,1,2.")] = "0,1,2,3",
    grid: Annotated[str, typer.Option(help="Tokens along t,h,w.")] = "8,16,16",
    steps: Annotated[int, typer.Option(help="Steps of the sampler.")] = 8,
    guidance: Annotated[float, typer.Option(help="Classifier-free guidance; 1 = none.")] = 1.0,
    thresh_type: Annotated[str, typer.Option(help="sol_attn: diag or exact.")] = "diag",
    weights: Annotated[
        Path | None, typer.Option(help="Weights of the model; the bundled ones by default.")
    ] = None,
    hold_out: Annotated[
        Path | None,
        typer.Option(help="skip_softmax: a calibration of another size, to try the fit on."),
    ] = None,
    limit_mb: Annotated[
        int, typer.Option(help="Largest table (MiB); beyond it scores become quantiles.")
    ] = 256,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
) -> None:
    """One dense pass over sampled videos: density at every tau or threshold, per layer, step, head.

    SkipSoftmax also gets the fit a * exp(b * sparsity) that servers evaluate.
    """
    from workbench.calibrate.options import parse_labels, parse_samples
    from workbench.calibrate.session import calibrate_file

    samples = parse_samples(parse_labels(labels), seeds, grid, steps=steps, guidance=guidance)
    calibrate_file(
        out,
        algorithm,
        samples,
        thresh_type=thresh_type,
        weights=weights,
        hold_out=hold_out,
        limit_bytes=limit_mb * 2**20,
        device=device,
    )


def solve(
    calibration: Annotated[Path, typer.Argument(help="What workbench calibrate wrote.")],
    target_density: Annotated[
        float | None, typer.Option(help="Mean density of each group.")
    ] = None,
    target_sparsity: Annotated[float | None, typer.Option(help="The same as 1 - density.")] = None,
    target_error: Annotated[
        float | None, typer.Option(help="Largest mean relative L2 error of each group.")
    ] = None,
    by: Annotated[str, typer.Option(help="One value by: global, layer or window.")] = "global",
    edges: Annotated[
        str | None, typer.Option(help="window: falling denoising times, such as 0.9,0.5.")
    ] = None,
    schedule: Annotated[
        str, typer.Option(help="Over denoising time: constant, linear, cosine or step.")
    ] = "constant",
    span: Annotated[
        float, typer.Option(help="schedule: level at the noise minus level at the video.")
    ] = 0.0,
    at: Annotated[float | None, typer.Option(help="schedule step: denoising time.")] = None,
    dense_layers: Annotated[
        str | None, typer.Option(help="sol_attn: layers that stay dense, such as 0,2-4.")
    ] = None,
    cutoff: Annotated[
        float | None, typer.Option(help="Dense while the denoising time is at or above it.")
    ] = None,
    held_out: Annotated[
        str, typer.Option(help="Seeds that the calibration has not seen, to measure on.")
    ] = "100,101,102,103",
    weights: Annotated[
        Path | None, typer.Option(help="Weights of the model; the bundled ones by default.")
    ] = None,
    impl: Annotated[str, typer.Option(help="Implementation of the sparse calls.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
    out: Annotated[
        Path | None, typer.Option(help="Run folder to make. [default: runs/TIME-solve]")
    ] = None,
) -> None:
    """Solve a calibration for a density, sparsity or error, and measure it on held-out seeds.

    A level is tau, or log2(lambda) for skip_softmax; --span is in levels.
    """
    from workbench.calibrate.options import Target, parse_form
    from workbench.calibrate.session import solve_file
    from workbench.options import integers

    form = parse_form(
        by, edges, schedule, span=span, at=at, dense_layers=dense_layers, cutoff=cutoff
    )
    solve_file(
        calibration,
        Target.of(density=target_density, sparsity=target_sparsity, error=target_error),
        form,
        held_out=integers("--held-out", held_out),
        weights=weights,
        impl=impl,
        device=device,
        out=out,
    )
