"""`workbench apply`: options to plain calls, nothing more."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def apply(
    profile: Annotated[Path, typer.Argument(help="A file that workbench export wrote.")],
    other: Annotated[
        Path | None, typer.Argument(help="Another one, to compare with the first.")
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="tensorrt_llm, model_optimizer, vllm_omni, sglang, comfyui or tau_profile. "
            "[default: recognised]",
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(help="Folder of a diffusers pipeline. [default: the small model]"),
    ] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            help="May be given several times; a class of the small model. [default: disc]"
        ),
    ] = None,
    seeds: Annotated[str, typer.Option(help="Seeds of the noise.")] = "0,1,2",
    steps: Annotated[
        int | None, typer.Option(help="Of the sampler. [default: 8, or the pipeline's own]")
    ] = None,
    guidance: Annotated[
        float | None,
        typer.Option(help="Classifier-free guidance. [default: 1 = none, or the pipeline's own]"),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(help="--model: frames,height,width. [default: the pipeline's own]"),
    ] = None,
    grid: Annotated[
        str | None, typer.Option(help="Small model: tokens along t,h,w. [default: 8,16,16]")
    ] = None,
    weights: Annotated[
        Path | None, typer.Option(help="Small model: its weights. [default: the bundled ones]")
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option(help="skip_softmax: config.json with the calibration to use.")
    ] = None,
    gate: Annotated[
        str, typer.Option(help="vsa: model, or zero for top-k cubes without the coarse branch.")
    ] = "model",
    impl: Annotated[str, typer.Option(help="Implementation of the sparse calls.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
    check: Annotated[
        bool, typer.Option("--check", help="Say what the files mean, layer by layer, and stop.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Run folder to make. [default: runs/TIME-apply]")
    ] = None,
) -> None:
    """Run exported files in a model, beside dense attention, and say which stays closer to it.

    Steps, keys and layers that a file counts in are those of this run. What cannot be honoured is
    an error before anything is sampled.
    """
    from workbench.options import integers
    from workbench.profiles.models import Choice
    from workbench.profiles.session import apply_files

    apply_files(
        Choice(model, weights, grid, size, steps, guidance, gate, impl, device),
        [profile] if other is None else [profile, other],
        prompt,
        integers("--seeds", seeds),
        format=format,
        calibration=calibration,
        check=check,
        out=out,
    )
