"""`workbench.attach`: sparse attention in a transformer or pipeline of diffusers, for a while.

    with workbench.attach(pipe, load_config(Path("config.yaml")), record=True) as attached:
        video = pipe(prompt, num_inference_steps=40).frames
    print(attached.report())

The self-attention of the video follows the configuration; everything else stays the model's own.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from torch import Tensor, nn

from blockattn import checks
from workbench.attention.log import CallCounts, CallRecord
from workbench.attention.lowering import AnyConfig
from workbench.diffusers.forward import Clock
from workbench.diffusers.layer import Observe
from workbench.diffusers.model import AttachedModel, plain
from workbench.diffusers.report import report

TRAIN_TIMESTEPS = 1000  # of every scheduler of these families, unless the pipeline's says otherwise
COMPONENTS = ("transformer", "transformer_2")
OPTIONS = ("checkpoint_config", "gate", "quantise_dense", "taus", "impl", "strict", "record")
Configs = AnyConfig | Mapping[str, AnyConfig]


def attach(
    model: Any,
    config: Configs,
    *,
    observe: Observe | None = None,
    train_timesteps: int | None = None,
    **options: Any,
) -> Attachment:
    """Puts the attention of a configuration into a transformer, or into those of a pipeline.

    It is attached when this returns. Leaving the `with` block, or `detach()`, restores the model
    exactly. Text tokens of joint models are attended exactly and their rows densely; padding is
    cropped; a call that cannot be served runs on the model's own attention, counted and warned of.

    Args:
        model: a Wan, HunyuanVideo, LTX-Video, CogVideoX or Mochi transformer, compiled or not, or
            a pipeline with one or two of them.
        config: a whole file, its attention part, one algorithm, or `None` for dense attention. A
            mapping {"transformer": ..., "transformer_2": ...} gives each its own.
        observe: called as observe(q, k, v, call) with [B, T, H, D] before every self-attention
            call, without padding. It may keep the tensors, not change them.
        train_timesteps: the time argument at full noise, of which denoising time is a share. The
            pipeline's scheduler knows it; a transformer alone takes 1000.
        options: of :class:`workbench.attention.SparseAttention`, for every transformer:
            `checkpoint_config`, `gate`, `quantise_dense`, `taus`, `impl`, `strict`, `record`.

    A SkipSoftmax calibration in a transformer's own config.json holds for that transformer, unless
    `checkpoint_config` is given.

    Raises:
        TypeError: no such model, or an option that does not exist.
        ValueError: a setting that is not allowed or does nothing, such as a layer too many, or two
            transformers that are one module.
        UnsupportedError: ring attention, VSA among text tokens, or no layer that can be attached.
        RuntimeError: the model is attached already.
    """
    _check_options(options)
    transformers = _transformers(model)
    configs = _configs(config, transformers)
    clock, scheduler = Clock(), _scheduler(model)
    if train_timesteps is None:
        train_timesteps = _train_timesteps(scheduler)
    checks.integer("train_timesteps", train_timesteps, minimum=1)
    models = [
        AttachedModel(
            name,
            transformer,
            configs[name],
            clock=clock,
            observe=observe,
            train_timesteps=train_timesteps,
            scheduler=scheduler,
            options=options,
        )
        for name, transformer in transformers.items()
    ]
    return Attachment(models, clock)


class Attachment:
    """What is attached, until it is detached.

    Attributes:
        models: one :class:`AttachedModel` for each transformer.
    """

    def __init__(self, models: list[AttachedModel], clock: Clock) -> None:
        self.models = models
        self._clock = clock
        for model in models:
            model.attach()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.detach()

    def detach(self) -> None:
        """Restores the models; what ran can still be read. A second call does nothing."""
        for model in self.models:
            for name in model.detach():
                warnings.warn(
                    f"{model.name}: the processor of {name} was replaced while attached and is "
                    "left as it is now",
                    stacklevel=3,
                )

    def begin_step(self, time: float | Tensor | None) -> None:
        """Publishes the denoising time by hand, in [0, 1], 1 = noisiest.

        Only needed where the time cannot be read: a transformer that was compiled after it had been
        attached. `None` leaves it to the forward calls again.
        """
        for model in self.models:
            model.forward.begin_step(time)

    def counts(self) -> CallCounts:
        """How many attention calls went where, over all transformers and layers."""
        first, *others = (model.attention.counts() for model in self.models)
        return sum(others, first)

    @property
    def records(self) -> list[CallRecord]:
        """Every self-attention call as it ran, transformer by transformer, with `record=True`."""
        return [record for model in self.models for record in model.attention.records]

    def reset(self) -> None:
        """Forgets counters, records, given warnings and steps, for example after a warm-up."""
        self._clock.reset()
        for model in self.models:
            model.attention.reset()

    def report(self) -> str:
        """What is attached, what is not and why, what ran: counters, and density if recorded."""
        return report(self.models)

    def __repr__(self) -> str:
        parts = [f"{len(model.layers)} layers of {model.name}" for model in self.models]
        return f"<Attachment: {', '.join(parts)}; {self.counts()}>"


def _check_options(options: Mapping[str, Any]) -> None:
    for name in options:
        if name not in OPTIONS:
            near = difflib.get_close_matches(name, OPTIONS, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise TypeError(f"unknown option {name!r}: {hint}allowed are {', '.join(OPTIONS)}")


def _transformers(model: Any) -> dict[str, nn.Module]:
    """The transformers to attach to, by their name in the pipeline."""
    if isinstance(model, nn.Module):
        return {COMPONENTS[0]: model}
    found = {name: getattr(model, name, None) for name in COMPONENTS}
    found = {name: part for name, part in found.items() if isinstance(part, nn.Module)}
    if not found:
        raise TypeError(
            f"model: {type(model).__name__} is no torch module and has no transformer; expected a "
            "video transformer of diffusers or a pipeline"
        )
    if len({id(plain(part)) for part in found.values()}) < len(found):
        raise ValueError(
            f"model: {' and '.join(found)} are one module, which cannot have a configuration for "
            "each; set transformer_2 to None, or give each its own module"
        )
    return found


def _configs(config: Configs, transformers: Mapping[str, nn.Module]) -> dict[str, AnyConfig]:
    if not isinstance(config, Mapping):
        return dict.fromkeys(transformers, config)
    if set(config) != set(transformers):
        raise ValueError(
            f"config is for {', '.join(sorted(config)) or 'nothing'}, but there are "
            f"{', '.join(transformers)}: name each of them; None keeps one dense"
        )
    return dict(config)


def _scheduler(model: Any) -> Any:
    """The scheduler of a pipeline; a transformer alone has none."""
    return None if isinstance(model, nn.Module) else getattr(model, "scheduler", None)


def _train_timesteps(scheduler: Any) -> int:
    config = getattr(scheduler, "config", None)
    return getattr(config, "num_train_timesteps", TRAIN_TIMESTEPS)
