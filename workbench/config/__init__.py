"""The configuration file of the serving stack: strict models, reading and writing."""

from workbench.config.files import (
    AttentionConfig,
    QuantAttentionConfig,
    SkipSoftmaxConfig,
    SkipSoftmaxParams,
    SolAttnConfig,
    SparseConfig,
    VideoSparseAttentionConfig,
    VisualGenConfig,
    dump_config,
    faults,
    load_config,
    parse_layers,
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
