"""Configurations that the export tests draw: every algorithm, formats, and served cases."""

from __future__ import annotations

from hypothesis import strategies as st

from workbench.config import (
    AttentionConfig,
    QuantAttentionConfig,
    SkipSoftmaxConfig,
    SolAttnConfig,
    SparseConfig,
    VideoSparseAttentionConfig,
    VisualGenConfig,
)
from workbench.config.checkpoint import SkipCalibration
from workbench.export import Deployment

FORMULA = {
    "formula": "a * exp(b * target_sparsity)",
    "coefficients": {"a": 1443.4853, "b": 4.3036},
}
CALIBRATION = SkipCalibration(threshold=FORMULA, ignore=("blocks.0.attn1", "*attn2*"))
TIMES = (1.0, 0.9749, 0.9, 0.75, 0.5, 0.25, 0.1)
PLACE = Deployment(times=TIMES, keys=75600, layers=40, calibration=CALIBRATION)


def config(
    sparse: SparseConfig | None = None,
    quant: QuantAttentionConfig | None = None,
    backend: str | None = None,
) -> VisualGenConfig:
    parts = {"sparse_attention_config": sparse, "quant_attention_config": quant}
    return VisualGenConfig(
        attention_config=AttentionConfig(backend=backend, **parts)  # pyright: ignore
    )


layers = st.none() | st.lists(st.integers(0, 39), min_size=1).map(tuple)
thresholds = st.sampled_from(["diag", "exact"])
cutoffs = st.none() | st.floats(1e-300, 1)
on_the_schedule = st.none() | st.sampled_from(TIMES)  # a number of steps names exactly these


def sol(taus: st.SearchStrategy[float], cuts: st.SearchStrategy[float | None]):
    return st.builds(
        SolAttnConfig, tau=taus, thresh_type=thresholds, disabled_until_timestep=cuts,
        dense_layers=layers,
    )  # fmt: skip


any_tau = st.floats(-1e4, 1e4)
shares = st.floats(0, 1, exclude_min=True)
factors = st.floats(1e-3, 1e6)
by_factor = st.builds(
    SkipSoftmaxConfig, threshold_scale_factor=factors, disabled_until_timestep=cutoffs
)
by_target = st.builds(SkipSoftmaxConfig, target_sparsity=shares, disabled_until_timestep=cutoffs)
vsa = st.builds(VideoSparseAttentionConfig, vsa_sparsity=st.floats(0, 1))
sage = st.sampled_from(
    [
        QuantAttentionConfig(qk_dtype=qk, q_block_size=1, k_block_size=k, v_block_size=1)
        for qk, k in (("int8", 1), ("int8", 4), ("int8", 16), ("fp8", 1), ("fp8", 4))
    ]  # pyright: ignore
)
