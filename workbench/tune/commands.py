"""`workbench tune` and `workbench order`: options to plain calls, nothing more."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def tune(
    capture: Annotated[
        Path | None, typer.Argument(help="A capture (.safetensors); the bundled one by default.")
    ] = None,
    algorithm: Annotated[str, typer.Option(help="sol_attn or skip_softmax.")] = "sol_attn",
    taus: Annotated[
        str | None, typer.Option(help="sol_attn: low:high:count or a list. [default: 0:3:9]")
    ] = None,
    thresholds: Annotated[
        str | None,
        typer.Option(help="skip_softmax: lambda in (0, 1], likewise. [default: from the capture]"),
    ] = None,
    thresh_type: Annotated[
        str | None, typer.Option(help="sol_attn: diag or exact. [default: diag]")
    ] = None,
    sink_tokens: Annotated[
        int, typer.Option(help="sol_attn: last tokens that are always exact.")
    ] = 0,
    target_density: Annotated[
        float | None, typer.Option(help="Choose the value with this mean density.")
    ] = None,
    target_error: Annotated[
        float | None, typer.Option(help="Choose the sparsest value with at most this mean error.")
    ] = None,
    layers: Annotated[
        str | None, typer.Option(help="Layers of the capture, such as 0,2-4.")
    ] = None,
    steps: Annotated[str | None, typer.Option(help="Steps of the capture, such as 4,12.")] = None,
    dense_layers: Annotated[
        str | None, typer.Option(help="sol_attn: layers that the server keeps dense.")
    ] = None,
    disabled_until_timestep: Annotated[
        float | None, typer.Option(help="The server is dense at or above this denoising time.")
    ] = None,
    impl: Annotated[str, typer.Option(help="Implementation; auto takes the fastest.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
    repeats: Annotated[int, typer.Option(help="Timings of each setting; 0 takes no time.")] = 3,
    out: Annotated[
        Path | None, typer.Option(help="Run folder to make. [default: runs/TIME-ALGORITHM]")
    ] = None,
) -> None:
    """Density, true error and time of each setting on a capture; choose one and export it."""
    from workbench.tune.session import tune_capture
    from workbench.tune.settings import TuneSettings, knob_values, parse_numbers

    settings = TuneSettings(
        algorithm=algorithm,
        values=knob_values(algorithm, taus, thresholds),
        thresh_type=thresh_type,
        sink_tokens=sink_tokens,
        target_density=target_density,
        target_error=target_error,
        layers=parse_numbers("--layers", layers),
        steps=parse_numbers("--steps", steps),
        dense_layers=parse_numbers("--dense-layers", dense_layers),
        disabled_until_timestep=disabled_until_timestep,
        impl=impl,
        device=device,
        repeats=repeats,
    )
    tune_capture(capture, settings, out=out)


def order(
    capture: Annotated[
        Path | None, typer.Argument(help="A capture (.safetensors); the bundled one by default.")
    ] = None,
    taus: Annotated[str, typer.Option(help="low:high:count or a list.")] = "0:2:5",
    orders: Annotated[str, typer.Option(help="Of raster, tile, morton.")] = "raster,tile,morton",
    impl: Annotated[str, typer.Option(help="Implementation; auto takes the fastest.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="Also draw it, as PNG.")] = None,
) -> None:
    """Show what the order of the tokens does to Sol-Attn's density and error at equal tau."""
    from workbench.tune.orders import show_orders
    from workbench.tune.settings import parse_values

    names = [name.strip() for name in orders.split(",")]
    values = sorted(set(parse_values("--taus", taus)))  # in any order, as of tune
    show_orders(capture, values, names, device=device, impl=impl, out=out)
