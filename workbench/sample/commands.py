"""`workbench sample`: options to plain calls, nothing more."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from workbench.options import integers, three_sizes


def sample(
    config: Annotated[
        list[Path] | None,
        typer.Option(help="A configuration in VisualGen's schema; may be given several times."),
    ] = None,
    algorithm: Annotated[
        str | None,
        typer.Option(help="dense, sol_attn, skip_softmax, vsa or quant. [default: all of them]"),
    ] = None,
    tau: Annotated[float | None, typer.Option(help="sol_attn. [default: 1]")] = None,
    threshold_scale_factor: Annotated[
        float | None, typer.Option(help="skip_softmax: lambda * Sk. [default: 400]")
    ] = None,
    sparsity: Annotated[
        float | None, typer.Option(help="vsa: share of cubes dropped. [default: 0.875]")
    ] = None,
    qk_dtype: Annotated[
        str | None,
        typer.Option(help="mxfp8, nvfp4 or bf16, over FP8 values; also joins skip_softmax."),
    ] = None,
    cutoff: Annotated[
        float | None, typer.Option(help="Dense while the denoising time is at or above it.")
    ] = None,
    dense_layers: Annotated[
        str | None, typer.Option(help="sol_attn: layers that stay dense, such as 0,2-4.")
    ] = None,
    label: Annotated[str, typer.Option(help="Class of the video, name or index.")] = "disc",
    seed: Annotated[str, typer.Option(help="Seed of the noise; several such as 0,1,2.")] = "4",
    steps: Annotated[int, typer.Option(help="Steps of the sampler.")] = 8,
    grid: Annotated[str, typer.Option(help="Tokens along t,h,w.")] = "8,16,16",
    guidance: Annotated[float, typer.Option(help="Classifier-free guidance; 1 = none.")] = 1.0,
    weights: Annotated[
        Path | None, typer.Option(help="Weights of the model; the bundled ones by default.")
    ] = None,
    vsa_weights: Annotated[
        Path | None, typer.Option(help="Weights fine-tuned with VSA. [default: bundled, if any]")
    ] = None,
    impl: Annotated[str, typer.Option(help="Implementation of sparse calls.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
    dtype: Annotated[str, typer.Option(help="Of the model: float32 or bfloat16.")] = "float32",
    out: Annotated[
        Path | None, typer.Option(help="Run folder to make. [default: runs/TIME-sample]")
    ] = None,
) -> None:
    """Sample one video with every mechanism and compare it with dense, and dense with itself.

    All runs start from the same noise. A second exact implementation of dense attention is always
    among them: what it differs from the first is rounding, the floor under every verdict.
    """
    from workbench.sample.session import sample_variants
    from workbench.sample.settings import SampleSettings
    from workbench.sample.variants import Knobs
    from workbench.tune.settings import parse_numbers

    knobs = Knobs(
        algorithm=algorithm,
        tau=tau,
        threshold_scale_factor=threshold_scale_factor,
        sparsity=sparsity,
        qk_dtype=qk_dtype,
        cutoff=cutoff,
        dense_layers=parse_numbers("--dense-layers", dense_layers),
    )
    settings = SampleSettings(
        label=int(label) if label.isdecimal() else label,
        seeds=integers("--seed", seed),
        grid=three_sizes("--grid", grid),
        steps=steps,
        guidance=guidance,
        impl=impl,
    )
    sample_variants(
        knobs,
        settings,
        configs=config or (),
        weights=weights,
        vsa_weights=vsa_weights,
        device=device,
        dtype=dtype,
        out=out,
    )
