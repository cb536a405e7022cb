"""Which targets there are, and one call for each of them or for all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from workbench.config import VisualGenConfig
from workbench.export import comfyui, model_optimizer, sglang, tensorrt_llm, vllm_omni
from workbench.export.deployment import UNKNOWN, Deployment
from workbench.export.outcome import Exported, Imported, NotExpressible


@dataclass(frozen=True)
class Target:
    """A format: its title, and its two directions."""

    title: str
    write: Callable[[VisualGenConfig, Deployment], Exported]
    read: Callable[[str, Deployment], Imported]


TARGETS: dict[str, Target] = {
    tensorrt_llm.NAME: Target("TensorRT-LLM VisualGen", tensorrt_llm.write, tensorrt_llm.read),
    model_optimizer.NAME: Target("Model-Optimizer", model_optimizer.write, model_optimizer.read),
    vllm_omni.NAME: Target("vLLM-Omni", vllm_omni.write, vllm_omni.read),
    sglang.NAME: Target("SGLang diffusion", sglang.write, sglang.read),
    comfyui.NAME: Target("ComfyUI Sol-Attn node", comfyui.write, comfyui.read),
}


def export_config(config: VisualGenConfig, target: str, place: Deployment = UNKNOWN) -> Exported:
    """The configuration as a text of the target.

    Args:
        config: what :func:`workbench.config.load_config` gives.
        target: a name of :data:`TARGETS`.
        place: what the target counts in and the configuration does not say.

    Raises:
        ValueError: no such target. :class:`NotExpressible`: the target cannot say it.
    """
    return _named(target).write(config, place)


def import_config(text: str, target: str, place: Deployment = UNKNOWN) -> Imported:
    """The configuration that a text of the target means.

    Raises:
        ValueError: no such target, or not its format. :class:`NotExpressible`: a setting in it
            has no place in a configuration.
    """
    return _named(target).read(text, place)


def export_all(
    config: VisualGenConfig, place: Deployment = UNKNOWN
) -> dict[str, Exported | NotExpressible]:
    """For each target its text, or the reason why there is none."""
    found: dict[str, Exported | NotExpressible] = {}
    for name, target in TARGETS.items():
        try:
            found[name] = target.write(config, place)
        except NotExpressible as reason:
            found[name] = reason
    return found


def _named(target: str) -> Target:
    if target not in TARGETS:
        raise ValueError(f"target={target!r}: must be one of {', '.join(TARGETS)}")
    return TARGETS[target]
