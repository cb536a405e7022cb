"""Context parallelism as diffusers configures it: Ulysses is served, ring attention is not."""

from __future__ import annotations

from typing import Any

from blockattn import UnsupportedError


def ulysses_group(parallel_config: Any) -> Any:
    """The processes that share a sequence; `None` when none does.

    Args:
        parallel_config: of an attention processor, see `enable_parallelism` in diffusers.

    Raises:
        UnsupportedError: ring attention, or parts of unequal length.
    """
    config = getattr(parallel_config, "context_parallel_config", None)
    if config is None:
        return None
    if config.ring_degree > 1:
        raise UnsupportedError(
            f"ring_degree={config.ring_degree}: with ring attention no process ever has all keys, "
            "which routing statistics and skip thresholds need; use "
            f"ContextParallelConfig(ulysses_degree={config.ring_degree * config.ulysses_degree})"
        )
    if config.ulysses_anything:
        raise UnsupportedError(
            "ulysses_anything=True: parts of unequal length are not exchanged here; choose a size "
            "whose number of tokens the processes divide, and leave it out"
        )
    return config._ulysses_mesh.get_group()
