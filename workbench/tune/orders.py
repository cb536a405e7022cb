"""`workbench order`: what tile and Morton order do to a capture, as a table and a figure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from blockattn import BLOCK
from workbench.capture import open_capture
from workbench.devices import choose_device
from workbench.orders import OrderEffect, OrderLine, order_effect
from workbench.terminal import plain_table, recording_console
from workbench.tune.run import DEFAULT_TAU
from workbench.views import draw_orders, new_figure, save

WIDTH = 110
SIZE = (11.5, 4.0)  # inches


def show_orders(
    path: Path | None,
    taus: Sequence[float],
    orders: Sequence[str],
    *,
    device: str = "auto",
    impl: str = "auto",
    out: Path | None = None,
    console: Console | None = None,
) -> OrderEffect:
    """Measures, prints, and draws to ``out`` where that is given.

    Raises:
        FileExistsError: ``out`` exists. FileNotFoundError, ValueError, TypeError: the capture or a
        setting is not right; nothing is written then.
    """
    if out is not None and out.exists():
        raise FileExistsError(f"out={str(out)!r}: exists already; give another path, or delete it")
    capture = open_capture(path)
    with Console(stderr=True).status("reading the capture") as status:  # silent off a terminal
        effect = order_effect(
            capture,
            taus,
            orders=orders,
            device=choose_device(device),
            impl=impl,
            tick=status.update,
        )
    screen = console or recording_console(WIDTH)
    _print(effect, screen)
    if out is not None:
        figure = new_figure(*SIZE)
        draw_orders(figure, {order: effect.lines(order) for order in effect.orders}, effect.title)
        save(figure, out)
        screen.print(f"Figure: {out}", soft_wrap=True)
    return effect


def _print(effect: OrderEffect, screen: Console) -> None:
    screen.print(f"[bold]{effect.title}[/bold]")
    calls = len({(row.layer, row.step) for row in effect.rows})
    screen.print(
        f"Sol-Attn by {', '.join(effect.impls)}, mean over {calls} calls and their heads; density: "
        f"exact blocks of {BLOCK} / all; error: relative L2 against dense, the same in every order"
    )
    screen.print(_by_tau(effect))
    if len(effect.layers) > 1:
        screen.print(_by_layer(effect))
    for order in effect.orders:
        t, h, w = effect.extent(order)
        screen.print(
            f"{order}: a block of {BLOCK} tokens spans {t:.1f} x {h:.1f} x {w:.1f} (t, h, w)"
        )


def _by_tau(effect: OrderEffect) -> Table:
    table = _headed("Density and error in each token order", "tau", effect)
    for at, tau in enumerate(effect.taus):
        table.add_row(f"{tau:g}", *_cells([effect.lines(order)[at] for order in effect.orders]))
    return table


def _by_layer(effect: OrderEffect) -> Table:
    """At the tau nearest to the method's default: one order serves all layers of a model."""
    at = min(range(len(effect.taus)), key=lambda n: abs(effect.taus[n] - DEFAULT_TAU))
    table = _headed(f"Layer by layer at tau = {effect.taus[at]:g}", "layer", effect)
    for layer in effect.layers:
        lines = [effect.lines(order, layer)[at] for order in effect.orders]
        table.add_row(str(layer), *_cells(lines))
    return table


def _headed(title: str, first: str, effect: OrderEffect) -> Table:
    table = plain_table(title)
    table.add_column(first, justify="right")
    for order in effect.orders:
        table.add_column(f"{order}\ndensity", justify="right")
        table.add_column("\nerror", justify="right")
    return table


def _cells(lines: Sequence[OrderLine]) -> list[str]:
    return [f"{x:.4f}" for line in lines for x in (line.density, line.relative_l2)]
