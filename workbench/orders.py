"""What the order of the tokens does to Sol-Attn: density and error of each order at equal tau.

A block of 64 tokens in raster order is a strip of one frame; in tile or Morton order it is close to
a cube. Attention does not depend on the order, but a block's mean key and the decision about it do.
The q, k, v of a model that runs in another order are those of raster order, put in that order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blockattn import TokenGrid, attend, checks
from blockattn.layout import ORDERS
from workbench.capture import QKV, Capture
from workbench.curves import rising
from workbench.masks import block_boxes
from workbench.probe import probe_sol

Tick = Callable[[str], None]


class OrderRow(NamedTuple):
    """One head in one order at one tau."""

    order: str
    layer: int
    step: int
    batch: int
    head: int
    tau: float
    density: float
    relative_l2: float


class OrderLine(NamedTuple):
    """Mean over steps, samples and heads, and over layers where none is named."""

    order: str
    tau: float
    density: float
    relative_l2: float


@dataclass(frozen=True)
class OrderEffect:
    """Density and error of every head in every order.

    Attributes:
        title: of the capture. grid: its tokens.
        orders, taus: what was tried.
        rows: one for each order, call, sample, head and tau.
        impls: what ran the sparse calls.
    """

    title: str
    grid: TokenGrid
    orders: tuple[str, ...]
    taus: tuple[float, ...]
    rows: list[OrderRow]
    impls: tuple[str, ...]

    @property
    def layers(self) -> list[int]:
        return sorted({row.layer for row in self.rows})

    def lines(self, order: str, layer: int | None = None) -> list[OrderLine]:
        """Means at every tau, in the order of the taus; of one layer, or of all."""
        checks.one_of("order", order, self.orders)
        if layer is not None and layer not in self.layers:
            raise ValueError(f"layer={layer}: the capture has layers {self.layers}")
        chosen = [r for r in self.rows if r.order == order and layer in (None, r.layer)]
        return [_line(order, tau, [row for row in chosen if row.tau == tau]) for tau in self.taus]

    def extent(self, order: str) -> tuple[float, float, float]:
        """Mean size along (t, h, w) of the box around a block of 64 tokens."""
        boxes = block_boxes(replace(self.grid, order=order)).astype(float)
        video = boxes[boxes[:, 1] > 0]
        sizes = (video[:, 1::2] - video[:, ::2]).mean(axis=0)
        return float(sizes[0]), float(sizes[1]), float(sizes[2])


def order_effect(
    capture: Capture,
    taus: Sequence[float],
    *,
    orders: Sequence[str] = ORDERS,
    device: torch.device | str | None = None,
    impl: str = "auto",
    tick: Tick = lambda label: None,
    **routing: Any,
) -> OrderEffect:
    """Runs Sol-Attn on every call of a capture in every order, against the same dense output.

    Args:
        capture: with all its query rows, in any order.
        taus: strictly rising.
        orders: of ``raster``, ``tile``, ``morton``.
        device: where to compute; the CPU by default.
        impl: implementation of the sparse calls.
        tick: called with a label before each unit of work, one for each call and order.
        routing: as for :func:`blockattn.sol_scores`: thresh_type, sink_start, sink_tokens.

    Raises:
        TypeError, ValueError: an argument is not allowed, or the capture holds chosen rows alone.
    """
    ladder = rising("taus", taus)
    chosen = [checks.one_of("orders", order, ORDERS) for order in orders]
    if not chosen or len(set(chosen)) != len(chosen):
        raise ValueError(f"orders={chosen}: name each of {', '.join(ORDERS)} at most once")
    rows, impls = [], set()
    for layer, step in capture.entries:
        call = _in_raster(capture.load(layer, step).to(device), capture.grid)
        dense = attend(call.q, call.k, call.v)
        for order in chosen:
            tick(f"layer {layer} step {step}, {order}")
            grid = replace(capture.grid, order=order)
            q, k, v, wanted = (grid.arrange(x) for x in (call.q, call.k, call.v, dense))
            for tau in ladder:
                probe = probe_sol(q, k, v, tau, dense=wanted, impl=impl, **routing)
                impls.add(probe.trace.impl)
                rows += _rows(order, call, tau, probe.density_per_head, probe.error.relative_l2)
    return OrderEffect(
        capture.title, capture.grid, tuple(chosen), tuple(ladder), rows, tuple(sorted(impls))
    )


def _in_raster(call: QKV, grid: TokenGrid) -> QKV:
    q, k, v = (grid.restore(x) for x in (call.q, call.k, call.v))
    return replace(call, q=q, k=k, v=v)


def _rows(order: str, call: QKV, tau: float, density: Tensor, error: Tensor) -> list[OrderRow]:
    return [
        OrderRow(order, call.layer, call.step, batch, head, tau, float(d), float(e))
        for batch, heads in enumerate(zip(density, error))
        for head, (d, e) in enumerate(zip(*heads))
    ]


def _line(order: str, tau: float, rows: list[OrderRow]) -> OrderLine:
    density = sum(row.density for row in rows) / len(rows)
    error = sum(row.relative_l2 for row in rows) / len(rows)
    return OrderLine(order, tau, density, error)
