"""The command line. A command parses its options and calls a plain function, nothing more.

To add a command, write one function with `@app.command()` and import what it needs inside it:
`workbench --help` must not wait for torch. A group is a `typer.Typer()` given to `app.add_typer`.
Where a package has commands of its own, they stand in its `commands.py`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from workbench import __version__
from workbench.bench.commands import bench
from workbench.calibrate.commands import calibrate, solve
from workbench.options import integers, three_sizes
from workbench.profiles.commands import apply, record
from workbench.sample.commands import sample
from workbench.sweep.commands import sweep
from workbench.tune.commands import order, tune

app = typer.Typer(
    name="workbench",
    help="See, tune and measure sparse attention for video diffusion.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # in "rich" what stands in brackets, [default: all], would vanish
    context_settings={"help_option_names": ["-h", "--help"]},
)

USER_ERRORS = (ValueError, TypeError, OSError, ModuleNotFoundError)


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"workbench {__version__}")
        raise typer.Exit


def _set_debug(value: bool) -> None:
    if value:
        os.environ["WORKBENCH_DEBUG"] = "1"


@app.callback()
def _options(
    debug: Annotated[
        bool,
        typer.Option(
            "--debug",
            callback=_set_debug,
            help="Show the traceback of an error (also: WORKBENCH_DEBUG=1).",
        ),
    ] = False,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Options that come before the command; the callbacks act on them."""


@app.command()
def doctor(
    json: Annotated[bool, typer.Option("--json", help="Machine-readable report.")] = False,
) -> None:
    """Say what this machine can run, and why not the rest.

    Exit status 1 when something that is required is missing or broken.
    """
    from workbench.doctor import checkup as checks
    from workbench.doctor import text as doctor_text

    report = checks.examine()
    if json:
        typer.echo(checks.to_json(report))
    else:
        doctor_text.show(report)
    raise typer.Exit(0 if report.ok else 1)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def lab(
    context: typer.Context,
    notebook: Annotated[
        str, typer.Option(help="Name of a notebook of the project.")
    ] = "01_tune_tau.ipynb",
    port: Annotated[int | None, typer.Option(help="Port; the first free one by default.")] = None,
    browser: Annotated[bool, typer.Option(help="Open a browser window.")] = True,
) -> None:
    """Open JupyterLab on a notebook. Further options go to JupyterLab."""
    from workbench import lab as lab_

    path = lab_.working_copy(notebook)
    lab_.open_lab(lab_.lab_argv(path, port=port, browser=browser, extra=tuple(context.args)))


@app.command()
def serve(
    panel: Annotated[
        str,
        typer.Argument(help="tau, threshold, masks, compare, schedule, sweep, time or doctor."),
    ] = "tau",
    file: Annotated[
        Path | None,
        typer.Argument(help="A capture (the bundled one by default); for sweep: its database."),
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port; 8866 or a free one by default.")] = None,
    browser: Annotated[bool, typer.Option(help="Open a browser window.")] = True,
) -> None:
    """Serve a panel as a page of its own, without a notebook, to browsers of this machine."""
    from workbench import serve as serve_

    wanted = serve_.request(panel, file)
    serve_.serve(serve_.voila_argv(port=port, browser=browser), wanted)


app.command()(tune)


@app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],
    }
)
def train(context: typer.Context) -> None:
    """Train the tiny video model; options as of python -m workbench.models.train (--help)."""
    from workbench.models import train as training

    training.main(context.args, prog="workbench train")


@app.command()
def capture(
    out: Annotated[Path, typer.Option(help="The capture to make (.safetensors).")],
    weights: Annotated[
        Path | None, typer.Option(help="Weights of the model; the bundled ones by default.")
    ] = None,
    label: Annotated[str, typer.Option(help="Class of the video, name or index.")] = "disc",
    seed: Annotated[int, typer.Option(help="Seed of the sampler's noise.")] = 4,
    steps: Annotated[int, typer.Option(help="Steps of the sampler.")] = 20,
    layers: Annotated[
        str | None,
        typer.Option(
            help="Layers to keep, such as 0,2,4. [default: 1,5, or what of them the model has]"
        ),
    ] = None,
    at_steps: Annotated[
        str | None,
        typer.Option(
            help="Sampler steps to keep, such as 4,12. [default: 2,16, or what of them the run has]"
        ),
    ] = None,
    grid: Annotated[str, typer.Option(help="Tokens along t,h,w.")] = "8,16,16",
    guidance: Annotated[float, typer.Option(help="Classifier-free guidance; 1 = none.")] = 2.0,
    heads: Annotated[
        str | None, typer.Option(help="Heads to keep, such as 0,2; all if left out.")
    ] = None,
    query_blocks: Annotated[
        int | None,
        typer.Option(
            help="Keep this many blocks of 64 query rows, spread evenly; all if left out."
        ),
    ] = None,
    order: Annotated[str, typer.Option(help="Token order: raster, tile or morton.")] = "raster",
    resume: Annotated[bool, typer.Option(help="Go on with an interrupted recording.")] = False,
    limit_mb: Annotated[int, typer.Option(help="Refuse a larger file (MiB).")] = 1024,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
) -> None:
    """Sample a video with the tiny model and record q, k, v of chosen layers and steps.

    The defaults are those of the bundled capture.
    """
    from math import prod

    from workbench.capture import recording_memory, spread_blocks
    from workbench.capture.recorder import SamplingPlan, record_sampling
    from workbench.devices import choose_device
    from workbench.models import load_model
    from workbench.options import fitting

    chosen = choose_device(device)
    model, sizes = load_model(weights, device=chosen), three_sizes("--grid", grid)
    plan = SamplingPlan(
        layers=fitting("--layers", layers, (1, 5), model.config.depth),
        at_steps=fitting("--at-steps", at_steps, (2, 16), steps),
        label=int(label) if label.isdecimal() else label,
        grid=sizes,
        steps=steps,
        seed=seed,
        guidance=guidance,
        heads=None if heads is None else integers("--heads", heads),
        query_blocks=None if query_blocks is None else spread_blocks(prod(sizes), query_blocks),
        order=order,
    )
    spec = plan.spec(model)
    host, on_device = recording_memory(spec, gpu=chosen.type == "cuda")
    kept = [",".join(map(str, numbers)) for numbers in (plan.layers, plan.at_steps)]
    typer.echo(f"keeps layers {kept[0]} at steps {kept[1]} of 0 to {steps - 1}")
    typer.echo(f"{out}: will take {spec.total_bytes:,} bytes")
    typer.echo(f"recording takes up to {host:,} bytes of memory, {on_device:,} on the GPU")
    limits = {"limit_bytes": limit_mb * 2**20, "resume": resume}
    typer.echo(record_sampling(model, plan, out, **limits, progress=_terminal()).summary)


app.command()(record)
app.command()(order)
app.command()(sample)


@app.command()
def synth(
    out: Annotated[Path, typer.Option(help="The capture to make (.safetensors).")],
    grid: Annotated[str, typer.Option(help="Tokens along t,h,w.")] = "8,16,16",
    heads: Annotated[int, typer.Option(help="Heads.")] = 2,
    head_dim: Annotated[int, typer.Option(help="Channels of a head.")] = 128,
    seed: Annotated[int, typer.Option(help="Seed of the fields.")] = 0,
    smoothness: Annotated[float, typer.Option(help="Correlation length in tokens.")] = 3.0,
    noise: Annotated[float, typer.Option(help="Noise on fields of deviation 1.")] = 0.5,
    order: Annotated[str, typer.Option(help="Token order: raster, tile or morton.")] = "raster",
    limit_mb: Annotated[int, typer.Option(help="Refuse a larger file (MiB).")] = 1024,
) -> None:
    """Write a synthetic capture of any size: smooth fields plus noise, no model behind it."""
    from blockattn import TokenGrid
    from workbench.synthetic import SyntheticPlan, write_synthetic

    plan = SyntheticPlan(
        TokenGrid(three_sizes("--grid", grid), order=order),
        heads=heads,
        head_dim=head_dim,
        seed=seed,
        smoothness=smoothness,
        noise=noise,
    )
    typer.echo(f"{out}: will take {plan.spec().total_bytes:,} bytes")
    typer.echo(write_synthetic(out, plan, limit_bytes=limit_mb * 2**20).summary)


_TIMES = typer.Option(help="Denoising time of every served step, falling, such as 1.0,0.97,0.9.")
_KEYS = typer.Option(help="Keys of a self-attention call.")
_BLOCKS = typer.Option("--layers", help="Transformer blocks of the served model.")
_CALIBRATION = typer.Option(help="config.json of a checkpoint's calibrated component.")
_OUT = typer.Option(help="File to write; the terminal by default.")


@app.command("export")
def export_(
    config: Annotated[Path, typer.Argument(help="A configuration in VisualGen's schema.")],
    to: Annotated[
        str | None,
        typer.Option(
            help="tensorrt_llm, model_optimizer, vllm_omni, sglang or comfyui. "
            "Without it, a table says which can."
        ),
    ] = None,
    times: Annotated[str | None, _TIMES] = None,
    keys: Annotated[int | None, _KEYS] = None,
    blocks: Annotated[int | None, _BLOCKS] = None,
    calibration: Annotated[Path | None, _CALIBRATION] = None,
    out: Annotated[Path | None, _OUT] = None,
) -> None:
    """Write a configuration in the format of another serving stack; what it cannot say is an error.

    Some count steps, keys or blocks, which a configuration does not name: give those.
    """
    from workbench.export.commands import deployment, export_file

    export_file(config, to, deployment(times, keys, blocks, calibration), out)


@app.command("import")
def import_(
    source: Annotated[Path, typer.Argument(help="A file in the format of a serving stack.")],
    of: Annotated[str, typer.Option("--from", help="Which one: a target of workbench export.")],
    times: Annotated[str | None, _TIMES] = None,
    keys: Annotated[int | None, _KEYS] = None,
    blocks: Annotated[int | None, _BLOCKS] = None,
    calibration: Annotated[Path | None, _CALIBRATION] = None,
    out: Annotated[Path | None, _OUT] = None,
) -> None:
    """Read a serving stack's file back into a configuration."""
    from workbench.export.commands import deployment, import_file

    import_file(source, of, deployment(times, keys, blocks, calibration), out)


@app.command()
def show(
    run: Annotated[
        Path, typer.Argument(help="A run folder, a sweep's database, or a .safetensors.")
    ],
) -> None:
    """Say where a result came from: versions, device, git state, seeds, inputs, command."""
    from workbench.show import describe

    typer.echo(describe(run))


app.add_typer(sweep, name="sweep")
app.command()(calibrate)
app.command()(solve)
app.command()(apply)
app.add_typer(bench, name="bench")


def _terminal() -> bool:
    """Whether a progress bar has somebody to look at it."""
    return sys.stderr.isatty()


def main() -> None:
    """Entry point: an error in what the user gave is one line and exit status 2."""
    try:
        app()
    except _user_errors() as error:
        if os.environ.get("WORKBENCH_DEBUG") == "1":
            raise
        sys.stderr.write(f"workbench: error: {error or type(error).__name__}\n")
        sys.stderr.write("  (workbench --debug COMMAND shows where it came from)\n")
        sys.exit(2)


def _user_errors() -> tuple[type[BaseException], ...]:
    """USER_ERRORS, and blockattn's own once something has imported it (it brings torch)."""
    loaded = sys.modules.get("blockattn.errors")
    return USER_ERRORS if loaded is None else (*USER_ERRORS, loaded.UnsupportedError)


if __name__ == "__main__":
    main()
