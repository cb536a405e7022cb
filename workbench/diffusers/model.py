"""One transformer: which of its modules are attached, which are not and why, and how to undo it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from blockattn import UnsupportedError
from workbench.attention import SparseAttention
from workbench.attention.lowering import AnyConfig, as_attention_config
from workbench.config import VideoSparseAttentionConfig
from workbench.diffusers.calibration import own_calibration
from workbench.diffusers.families import Family, family_of
from workbench.diffusers.forward import Clock, CrossCount, Forward, Outside
from workbench.diffusers.layer import Layer, Observe, model_dense
from workbench.diffusers.parallel import ulysses_group
from workbench.diffusers.splice import SplicedProcessor, obstacle

Splice = tuple[str, Any, Any, SplicedProcessor]  # name, module, its processor, ours


class AttachedModel:
    """One transformer. Making it checks everything and changes nothing; `attach` changes.

    Attributes:
        name: in the pipeline.
        transformer: the module itself, without the wrapper of `torch.compile`.
        family: what is known of it.
        attention: the policy of its layers, with counters and records.
        forward: its current forward call.
        layers: module of every attached layer, by its number.
        left_alone: why another module with attention is not attached, by its name.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        config: AnyConfig,
        *,
        clock: Clock,
        observe: Observe | None,
        train_timesteps: int,
        scheduler: Any,
        options: Mapping[str, Any],
    ) -> None:
        self.name, self._outer, self.transformer = name, model, plain(model)
        self.family = family_of(self.transformer)
        names = self.family.attention_modules(self.transformer)
        _check_config(config, self.family, options)
        surroundings = {"num_layers": len(names), "module_names": names, "dense": model_dense}
        surroundings |= own_calibration(self.transformer, config)
        self.attention = SparseAttention(config, **{**surroundings, **options})
        self.forward = Forward(
            name,
            self.transformer,
            self.family,
            self.attention,
            clock=clock,
            train_timesteps=train_timesteps,
            scheduler=scheduler,
            watched=observe is not None,
            compiled=self.compiled,
        )
        self.layers: dict[int, str] = {}
        self.left_alone: dict[str, str] = self._others(names)
        self._splices = self._plan(names, observe)
        self._handles: list[RemovableHandle] = []
        self._compiled: Any = None

    @property
    def compiled(self) -> bool:
        """Whether it is compiled now: wrapped by `torch.compile`, or in place."""
        wrapped = self._outer is not self.transformer
        return wrapped or self.transformer._compiled_call_impl is not None

    @property
    def attached(self) -> bool:
        """Whether our processors are in its place now."""
        return bool(self._handles)

    def attach(self) -> None:
        """Puts our processors and hooks in."""
        for _, module, _, spliced in self._splices:
            module.processor = spliced
        self._compiled = self.transformer._compiled_call_impl
        if self._compiled is not None:
            self.transformer._compiled_call_impl = Outside(self.forward, self._compiled)
        hook = self.forward.hook()
        for model in {id(m): m for m in (self.transformer, self._outer)}.values():
            self._handles.append(model.register_forward_pre_hook(hook, with_kwargs=True))
        for layer, name in enumerate(self.family.cross_modules(self.transformer)):
            count = CrossCount(self.attention, layer)
            self._handles.append(self.transformer.get_submodule(name).register_forward_hook(count))

    def detach(self) -> list[str]:
        """Takes them out again.

        Returns:
            Names of the modules whose processor somebody else replaced meanwhile.
        """
        replaced = []
        for name, module, processor, spliced in self._splices:
            if module.processor is spliced:
                module.processor = processor
            else:
                replaced.append(name)
        for handle in self._handles:
            handle.remove()
        if self._compiled is not None:
            self.transformer._compiled_call_impl = self._compiled
        self._handles, self._splices, self._compiled = [], [], None
        return replaced

    def _others(self, names: list[str]) -> dict[str, str]:
        """Why the modules that are no layers of ours are left alone."""
        cross = set(self.family.cross_modules(self.transformer))
        return {
            name: "cross-attention" if name in cross else "no self-attention of the video"
            for name, module in self.transformer.named_modules()
            if name not in names and getattr(module, "processor", None) is not None
        }

    def _plan(self, names: list[str], observe: Observe | None) -> list[Splice]:
        splices: list[Splice] = []
        for index, name in enumerate(names):
            module = self.transformer.get_submodule(name)
            processor = module.processor
            self._check_free(processor)
            reason = obstacle(processor)
            if reason is not None:
                self.left_alone[name] = reason
                continue
            layer = Layer(index, self.attention, self.forward, observe)
            splices.append((name, module, processor, SplicedProcessor(processor, layer)))
            self.layers[index] = name
        if not splices:
            raise UnsupportedError(
                f"{self.name}: no layer can be attached: {'; '.join(set(self.left_alone.values()))}"
            )
        return splices

    def _check_free(self, processor: Any) -> None:
        if isinstance(processor, SplicedProcessor):
            raise RuntimeError(
                f"{self.name} is attached already, and two policies cannot share a layer; leave "
                "that `with` block, or call detach(), first"
            )
        ulysses_group(getattr(processor, "_parallel_config", None))


def plain(model: nn.Module) -> Any:
    """The model itself, without the wrapper of `torch.compile`."""
    return getattr(model, "_orig_mod", model)


def _check_config(config: AnyConfig, family: Family, options: Mapping[str, Any]) -> None:
    """What VSA needs of a model, before anything is built."""
    if not isinstance(
        as_attention_config(config).sparse_attention_config, VideoSparseAttentionConfig
    ):
        return
    if family.text != "nowhere":
        raise UnsupportedError(
            f"vsa: its cubes hold video tokens only, and in {family.model} text tokens attend in "
            "the same sequence; choose sol_attn or skip_softmax"
        )
    if options.get("gate", "model") != "zero":
        raise ValueError(
            f"gate='model': {family.model} of diffusers has no learned gate for VSA's coarse "
            'branch; choose gate="zero" for top-k attention without it'
        )
