"""The configuration file of the serving stack: strict models, reading and writing."""

from workbench.config.fields import faults, parse_layers
from workbench.config.files import AttentionConfig, VisualGenConfig, dump_config, load_config
from workbench.config.quant import QuantAttentionConfig
from workbench.config.sparse import (
    SkipSoftmaxConfig,
    SkipSoftmaxParams,
    SolAttnConfig,
    SparseConfig,
    VideoSparseAttentionConfig,
)

__all__ = [
    "AttentionConfig",
    "QuantAttentionConfig",
    "SkipSoftmaxConfig",
    "SkipSoftmaxParams",
    "SolAttnConfig",
    "SparseConfig",
    "VideoSparseAttentionConfig",
    "VisualGenConfig",
    "dump_config",
    "faults",
    "load_config",
    "parse_layers",
]
