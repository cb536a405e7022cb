"""`workbench apply` and `workbench record`: options to plain calls, nothing more."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from workbench.options import integers, video_size


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


def record(
    model: Annotated[Path, typer.Argument(help="Folder of a diffusers pipeline or transformer.")],
    out: Annotated[Path, typer.Option(help="The capture to make (.safetensors).")],
    prompt: Annotated[str, typer.Option(help="Text of the video.")],
    layers: Annotated[str, typer.Option(help="Layers to keep, such as 0,20,39.")],
    at_steps: Annotated[str, typer.Option(help="Sampler steps to keep, such as 5,25.")],
    heads: Annotated[str | None, typer.Option(help="Heads to keep. [default: all]")] = None,
    query_blocks: Annotated[
        int | None,
        typer.Option(help="Keep this many blocks of 64 query rows. [default: all]"),
    ] = None,
    order: Annotated[str, typer.Option(help="Token order: raster, tile or morton.")] = "raster",
    size: Annotated[
        str | None, typer.Option(help="frames,height,width. [default: the pipeline's own]")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Of the scheduler. [default: the pipeline's own]")
    ] = None,
    guidance: Annotated[
        float | None, typer.Option(help="Of the text. [default: the pipeline's own]")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the noise.")] = 0,
    resume: Annotated[bool, typer.Option(help="Go on with an interrupted recording.")] = False,
    limit_mb: Annotated[int, typer.Option(help="Refuse a larger file (MiB).")] = 1024,
    check: Annotated[
        bool, typer.Option("--check", help="Say how large and how long, and stop.")
    ] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
) -> None:
    """Sample with a diffusers pipeline and record q, k, v of chosen layers, steps, heads, rows."""
    from workbench.capture import check_size, check_target, recording_memory
    from workbench.devices import choose_device
    from workbench.profiles.models import pipeline
    from workbench.profiles.record import RecordPlan, forecast, record_pipeline

    plan = RecordPlan(
        layers=integers("--layers", layers),
        at_steps=integers("--at-steps", at_steps),
        prompt=prompt,
        seed=seed,
        heads=None if heads is None else integers("--heads", heads),
        query_blocks=query_blocks,
        order=order,
    )
    sizes = None if size is None else video_size("--size", size)
    check_target(out)
    plan.check(model, steps)
    video = pipeline(model, size=sizes, steps=steps, guidance=guidance, device=device)
    spec = plan.spec(video)
    host, on_device = recording_memory(spec, gpu=choose_device(device).type == "cuda")
    typer.echo(f"{out}: will take {spec.total_bytes:,} bytes, {spec.label}")
    typer.echo(f"recording takes up to {host:,} bytes of memory, {on_device:,} on the GPU")
    limits = {"limit_bytes": limit_mb * 2**20, "resume": resume}
    if check:
        check_size(out, spec, limits["limit_bytes"])
        typer.echo(forecast(plan, video.step_seconds(prompt)))
        return
    typer.echo(record_pipeline(video, plan, spec, out, **limits, tell=typer.echo).summary)
