"""ThresholdTuner: turn the threshold of SkipSoftmax; see which tiles are dropped at what cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from workbench import decisions, views
from workbench.config import SkipSoftmaxConfig
from workbench.widgets.capture_session import CaptureLike, Measured
from workbench.widgets.panels import FourPlots, FramesPanel
from workbench.widgets.skip_controls import TILES, SkipControls
from workbench.widgets.skip_session import (
    CURVE_LOG2,
    LOWEST,
    SkipSession,
    SkipState,
    SkipView,
    describe_threshold,
)
from workbench.widgets.tuner import Tuner


class ThresholdTuner(Tuner):
    """Interactive tuning of SkipSoftmax on one capture.

    Pictures follow the controls at once, from gaps that serve every threshold. When the controls
    rest, the real call runs and is compared with dense. It opens where some tiles are skipped.

    Args:
        capture: a :class:`workbench.capture.reader.Capture`, or anything with the same attributes.
        device: where to compute; by default CUDA when there is a GPU.

    Attributes:
        view: :class:`workbench.widgets.skip_session.SkipView`.
    """

    def __init__(self, capture: CaptureLike, device: torch.device | str | None = None):
        self._fresh = True
        session, grid = SkipSession(capture, device), capture.grid
        frames = FramesPanel(grid.shape, capture.video, title_of, "query tile", "skipped")
        edges = {tile: decisions.frame_edges(grid, tile) for tile in TILES}
        self._skip, self._knobs = session, SkipControls(session)
        super().__init__(session, self._knobs, SkipPanel(edges), frames)

    def _prepare(self) -> None:
        super()._prepare()
        if self._fresh and self.state.log2_threshold == SkipState.log2_threshold:
            self._fresh = False
            self._knobs.log2_threshold.value = self._skip.start(self.state)
        self._fresh = False

    def _setting(self) -> tuple[SkipSoftmaxConfig, list[str]]:
        state, keys = self.state, self.session.capture.grid.tokens
        remark = f"lambda = {state.threshold:.4g} at {keys:,} keys; tiles of {state.tile} here."
        return SkipSoftmaxConfig(threshold_scale_factor=state.threshold * keys), [remark]

    def _describe(self, view: SkipView) -> str:
        units = describe_threshold(view.state.log2_threshold, self.session.capture.grid.tokens)
        return f"{decisions.describe_skip(view.states)} {units}"

    def _explain(self, view: SkipView) -> str:
        return str(view.explanation)


def title_of(view: SkipView) -> str:
    """Layer, step, head, threshold and density, as every picture names them."""
    state = view.state
    return (
        f"layer {state.layer} · step {state.step} · head {state.head} · "
        f"log2(lambda) {state.log2_threshold:.2f} · density {float(view.density[state.head]):.3f}"
    )


class SkipPanel(FourPlots):
    """Skip map, density curve, histogram of the gaps, density and error of every head."""

    def __init__(self, frame_edges: Mapping[int, Sequence[float]]):
        super().__init__()
        self._frame_edges = frame_edges

    def draw(self, view: SkipView, measured: Measured | None) -> bytes:
        """PNG of a view; without a measurement the errors are ellipses."""
        state, density = view.state, float(view.density[view.state.head])
        for ax in self.figure.axes:
            ax.clear()
        views.draw_skip(
            self._map,
            view.states,
            title_of(view),
            query=state.query_block,
            key=state.key_block,
            frame_edges=self._frame_edges[state.tile],
        )
        views.draw_curve(
            self._curve,
            CURVE_LOG2,
            view.curve,
            (state.log2_threshold, density),
            [f"head {head}" for head in range(len(view.curve))],
            highlight=state.head,
            xlabel="log2(lambda)",
            ylabel="density (computed / valid tiles)",
            title="Density against lambda",
        )
        views.draw_histogram(
            self._histogram,
            view.gaps[view.gaps.isfinite()],
            state.log2_threshold,
            title=f"Tiles of head {state.head}",
            xlabel="tile max - running max (base-2 logits)",
            ylabel="tiles",
            limits=(LOWEST, 12.0),
            label=f"{density:.1%} of all\ncomputed",
        )
        error = None if measured is None else measured.relative_l2
        views.draw_heads(self._heads, view.density, error, highlight=state.head, title="Every head")
        return views.to_png(self.figure)
