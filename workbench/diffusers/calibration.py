"""SkipSoftmax calibration that a transformer carries in its own config.json."""

from __future__ import annotations

from typing import Any

from workbench.attention.lowering import AnyConfig, as_attention_config
from workbench.config import SkipSoftmaxConfig
from workbench.config.checkpoint import read_calibration

SECTION = "sparse_attention_config"


def own_calibration(model: Any, config: AnyConfig) -> dict[str, Any]:
    """The option `checkpoint_config` of `SparseAttention` from the model itself.

    Args:
        model: a transformer of diffusers, which keeps unknown fields of its config.json.
        config: what is attached.

    Returns:
        The option, or nothing where the model has no calibration or the mechanism is another.
    """
    if not isinstance(as_attention_config(config).sparse_attention_config, SkipSoftmaxConfig):
        return {}
    given = {SECTION: model.config.get(SECTION)}
    found = given[SECTION] is not None and read_calibration(checkpoint_config=given) is not None
    return {"checkpoint_config": given} if found else {}
