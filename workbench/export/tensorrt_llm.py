"""TensorRT-LLM VisualGen: the YAML that a configuration here already is.

Follows docs/source/features/visualgen-sparse-attention.md and visualgen-quantized-attention.md of
NVIDIA/TensorRT-LLM (1.4.0rc1; strict pydantic models in tensorrt_llm/visual_gen). The schema is
the same; refused is what it accepts and computes in another way.
"""

from __future__ import annotations

from workbench.config import SkipSoftmaxConfig, VisualGenConfig, dump_config, load_config
from workbench.export.deployment import Deployment
from workbench.export.documents import refuse_target_0
from workbench.export.outcome import Exported, Imported, NotExpressible

NAME = "tensorrt_llm"


def write(config: VisualGenConfig, place: Deployment) -> Exported:
    """YAML for ``VisualGenArgs``; what is not attention is kept.

    Raises:
        NotExpressible: no backend for a sparse or quantised setting, or a target sparsity of 0.
    """
    attention = config.attention_config
    asks = attention.sparse_attention_config or attention.quant_attention_config
    if asks and attention.backend is None:
        why = "the server's default kernels are dense and 16-bit"
        raise NotExpressible(NAME, "backend", why, "Set backend to CUTEDSL or TRTLLM")
    _check(config)
    del place  # it counts nothing that a configuration does not say
    return Exported(dump_config(config))


def read(text: str, place: Deployment) -> Imported:
    """The configuration of a VisualGen file.

    Raises:
        ValueError: no such file; :class:`NotExpressible`: a target sparsity of 0.
    """
    del place
    config = load_config(text)
    _check(config)
    return Imported(config)


def _check(config: VisualGenConfig) -> None:
    sparse = config.attention_config.sparse_attention_config
    if not isinstance(sparse, SkipSoftmaxConfig) or sparse.threshold_scale_factor is not None:
        return
    refuse_target_0(sparse.target_sparsity, NAME, "Set threshold_scale_factor: 0")
