"""TauTuner: turn tau and see which blocks stay exact, how dense that is, and what it costs."""

from __future__ import annotations

import torch

from workbench import decisions
from workbench.config import SolAttnConfig
from workbench.widgets.capture_session import CaptureLike
from workbench.widgets.controls import Controls
from workbench.widgets.panels import FramesPanel, RoutePanel, title_of
from workbench.widgets.session import TunerView, TuneSession
from workbench.widgets.tuner import Tuner


class TauTuner(Tuner):
    """Interactive tuning of Sol-Attn on one capture.

    Pictures follow the controls at once, from scores that serve every tau. When the controls rest,
    the real sparse call runs and is compared with dense.

    Args:
        capture: a :class:`workbench.capture.reader.Capture`, or anything with the same attributes.
        device: where to compute; by default CUDA when there is a GPU.

    Attributes:
        view: :class:`workbench.widgets.session.TunerView`.
    """

    def __init__(self, capture: CaptureLike, device: torch.device | str | None = None):
        session = TuneSession(capture, device)
        route_panel = RoutePanel(decisions.frame_edges(capture.grid))
        frames_panel = FramesPanel(capture.grid.shape, capture.video, title_of)
        super().__init__(session, Controls(session), route_panel, frames_panel)

    def _setting(self) -> tuple[SolAttnConfig, list[str]]:
        state, remarks = self.state, []
        if state.sink_tokens:
            remarks = [f"Without the sink of {state.sink_tokens} tokens: the schema has no field."]
        return SolAttnConfig.model_validate(
            {"tau": state.tau, "thresh_type": state.thresh_type}
        ), remarks

    def _describe(self, view: TunerView) -> str:
        return decisions.describe(view.classes)

    def _explain(self, view: TunerView) -> str:
        return str(view.explanation)
