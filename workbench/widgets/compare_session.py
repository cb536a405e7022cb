"""What the comparison computes and remembers; no widget and no picture in here."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from blockattn import BlockRoute
from workbench.comparison import Setting, agreement, delivered, flipped_per_head
from workbench.probe import attention_error
from workbench.views.table import Table
from workbench.widgets.capture_session import CaptureLike, CaptureSession, Measured, Recent

LISTED = 12  # heads in the table


@dataclass(frozen=True)
class CompareState:
    """Where to look, and the two settings."""

    layer: int
    step: int
    head: int
    a: Setting
    b: Setting


@dataclass(frozen=True)
class CompareView:
    """Both settings on one head.

    Attributes:
        state: what it belongs to.
        routes: exact blocks of A and B: as delivered where the real call has been made, else as
            planned.
        measured: whether each is as delivered.
        codes: uint8 ``[Nq, Nk]``, :class:`workbench.comparison.Agreement` of the head.
        flipped: int64 ``[H]``, block pairs that only one of the two computes.
        surprises: delivered pairs of A and of B that the plan did not have, or lacked; 0 is right.
    """

    state: CompareState
    routes: tuple[BlockRoute, BlockRoute]
    measured: tuple[bool, bool]
    codes: Tensor
    flipped: Tensor
    surprises: tuple[int, int]


class CompareSession(CaptureSession):
    """Plans and calls of any setting on one capture."""

    def __init__(self, capture: CaptureLike, device: torch.device | str | None = None):
        super().__init__(capture, device)
        # An output of a long video is large, so few are kept.
        self._plans, self._calls = Recent(40), Recent(6)

    def plan(self, state: CompareState, setting: Setting) -> BlockRoute:
        """Blocks that the setting will compute exactly."""
        x = self.inputs(state.layer, state.step)
        key = (state.layer, state.step, setting)
        return self._plans.get(key, lambda: setting.plan(x.q, x.k).to("cpu"))

    def measured(self, state: CompareState, setting: Setting) -> Measured | None:
        """The real call if it has been made."""
        return self._calls.peek((state.layer, state.step, setting))

    def measure(self, state: CompareState, setting: Setting) -> Measured:
        """Makes the real call, and the dense one to compare with, if need be."""
        key = (state.layer, state.step, setting)
        return self._calls.get(
            key, lambda: self.run(state.layer, state.step, setting.run, keep=True)
        )

    def view(self, state: CompareState) -> CompareView:
        """Everything that the pictures need; makes no attention call."""
        routes, surprises, calls = [], [], []
        for setting in (state.a, state.b):
            plan, call = self.plan(state, setting), self.measured(state, setting)
            route = plan if call is None else delivered(call.trace).to("cpu")
            routes.append(route)
            surprises.append(route.differing(plan))
            calls.append(call is not None)
        a, b = routes
        return CompareView(
            state,
            (a, b),
            (calls[0], calls[1]),
            agreement(a, b, head=state.head),
            flipped_per_head(a, b)[0],
            (surprises[0], surprises[1]),
        )

    def difference(self, state: CompareState) -> Tensor | None:
        """Relative L2 of A's output against B's, float64 ``[H]``; None until both have run."""
        a, b = (self.measured(state, setting) for setting in (state.a, state.b))
        if a is None or b is None or a.out is None or b.out is None:
            return None
        return attention_error(a.out, b.out).relative_l2[0]

    def table(self, view: CompareView) -> Table:
        """A row for each head, those with the most flipped pairs first."""
        state = view.state
        calls = [self.measured(state, setting) for setting in (state.a, state.b)]
        between = self.difference(state)
        densities = [route.density_per_head()[0] for route in view.routes]
        order = view.flipped.argsort(descending=True, stable=True)[:LISTED].tolist()
        rows = [
            (
                head,
                f"{int(view.flipped[head]):,}",
                *(f"{density[head]:.4f}" for density in densities),
                *("…" if call is None else f"{call.relative_l2[head]:.4f}" for call in calls),
                "…" if between is None else f"{between[head]:.4f}",
            )
            for head in order
        ]
        columns = (
            "head",
            "flipped pairs",
            "density A",
            "density B",
            "error A",
            "error B",
            "A to B",
        )
        shown = (
            "" if len(order) == len(view.flipped) else f", {LISTED} of {len(view.flipped)} heads"
        )
        caption = f"Relative L2 errors against dense, and of A against B{shown}"
        return Table(columns, rows, caption)
