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
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            help="May be given several times; a class of the small model. [default: disc]"
        ),
    ] = None,
    seeds: Annotated[str, typer.Option(help="Seeds of the noise.")] = "0,1,2",
    steps: Annotated[int, typer.Option(help="Steps of the sampler.")] = 8,
    grid: Annotated[str, typer.Option(help="Tokens along t,h,w.")] = "8,16,16",
    guidance: Annotated[float, typer.Option(help="Classifier-free guidance; 1 = none.")] = 1.0,
    weights: Annotated[
        Path | None, typer.Option(help="Weights of the small model; the bundled ones by default.")
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
    from workbench.calibrate.options import parse_samples
    from workbench.devices import choose_device
    from workbench.models import load_model
    from workbench.paths import BUNDLED_WEIGHTS, data_dir
    from workbench.profiles.session import apply_files
    from workbench.profiles.tiny import TinyVideo

    prompts = tuple(prompt or ["disc"])
    samples = parse_samples(prompts, seeds, grid, steps=steps, guidance=guidance)
    model = TinyVideo(
        load_model(weights, device=choose_device(device)),
        grid=samples.grid,
        steps=steps,
        guidance=guidance,
        gate=gate,
        impl=impl,
    )
    apply_files(
        model,
        [profile] if other is None else [profile, other],
        prompts,
        samples.seeds,
        inputs={"weights": weights or data_dir() / BUNDLED_WEIGHTS},
        format=format,
        calibration=calibration,
        check=check,
        out=out,
    )
