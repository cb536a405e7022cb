"""From a configuration to what the kernels here launch: mechanism, recipe, resolved once.

What the schema leaves open (the model's layers and names, VSA's gate, a sink, the implementation)
comes from the surroundings; an argument that the configuration would not look at is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blockattn import QuantRecipe, UnsupportedError, checks
from blockattn.impl import registry
from workbench.attention.calls import Mechanism, Quantised, Skip, Sol, Vsa
from workbench.attention.text import Dense
from workbench.config import (
    AttentionConfig,
    QuantAttentionConfig,
    SkipSoftmaxConfig,
    SolAttnConfig,
    VideoSparseAttentionConfig,
    VisualGenConfig,
)

GATES = ("model", "zero")
V_SCALES = ("tensor", "channel")  # by v_block_size

AnyConfig = (
    VisualGenConfig
    | AttentionConfig
    | SolAttnConfig
    | SkipSoftmaxConfig
    | VideoSparseAttentionConfig
    | QuantAttentionConfig
    | None
)


@dataclass(frozen=True)
class Surroundings:
    """What the configuration does not hold; see :class:`workbench.attention.SparseAttention`.

    Raises:
        TypeError, ValueError: an argument is not allowed.
    """

    dense: Dense
    warn: Callable[[str, str], None]
    num_layers: int | None = None
    checkpoint_config: Mapping[str, Any] | None = None
    module_names: Sequence[str] | None = None
    gate: str = "model"
    sink_start: int | None = None
    sink_tokens: int = 0
    key_tokens: int | None = None
    taus: Sequence[float] | None = None
    impl: str = "auto"

    def __post_init__(self) -> None:
        registry.check_name(self.impl)
        checks.one_of("gate", self.gate, GATES)
        checks.integer("sink_tokens", self.sink_tokens)
        if self.sink_start is not None:
            checks.integer("sink_start", self.sink_start)
        if self.key_tokens is not None:
            checks.integer("key_tokens", self.key_tokens, minimum=1)
        if self.num_layers is not None:
            checks.integer("num_layers", self.num_layers, minimum=1)
        if self.module_names is not None:
            self._check_names(self.module_names)
        if self.taus is not None:
            self._check_taus(self.taus)

    def _check_names(self, names: Sequence[str]) -> None:
        if isinstance(names, str) or not all(isinstance(name, str) for name in names):
            raise TypeError(f"module_names={names!r}: expected one name for each layer")
        if not names or (self.num_layers is not None and len(names) != self.num_layers):
            wanted = (
                "at least one layer" if self.num_layers is None else f"{self.num_layers} layers"
            )
            raise ValueError(f"module_names has {len(names)} names: must name {wanted}")

    def _check_taus(self, taus: Sequence[float]) -> None:
        if len(taus) != self.num_layers:
            raise ValueError(
                f"taus has {len(taus)} values: must be one for each of the model's "
                f"{self.num_layers} layers"
            )
        for layer, tau in enumerate(taus):
            checks.finite_number(f"taus[{layer}]", tau)

    def check_used(self, sparse: object) -> None:
        """Refuses what the algorithm would not look at.

        Raises:
            ValueError: with everything that has no effect.
        """
        unused = []
        if self.sink_start is not None and self.sink_tokens == 0:
            unused.append(f"sink_start={self.sink_start} without sink_tokens is no sink")
        if not isinstance(sparse, SolAttnConfig) and (self.sink_start, self.sink_tokens) != (
            None,
            0,
        ):
            unused.append("sink_start and sink_tokens are for sol_attn")
        if not isinstance(sparse, SolAttnConfig) and self.taus is not None:
            unused.append("taus are for sol_attn")
        if not isinstance(sparse, VideoSparseAttentionConfig) and self.gate != "model":
            unused.append(f"gate={self.gate!r} is for vsa")
        if not isinstance(sparse, SkipSoftmaxConfig):
            if self.checkpoint_config is not None:
                unused.append("checkpoint_config holds calibration for skip_softmax")
            if self.key_tokens is not None:
                unused.append(
                    f"key_tokens={self.key_tokens} is for skip_softmax, and routing needs all keys"
                )
        if unused:
            raise ValueError(f"{'; '.join(unused)}: drop it, or choose that algorithm")


def lower(
    config: AttentionConfig, given: Surroundings
) -> tuple[Mechanism | None, Quantised | None]:
    """The mechanism of a configuration (``None``: sparse off) and its quantised dense attention.

    Raises:
        ValueError: a surrounding that has no effect, a layer that the model does not have, or a
            calibration that cannot be used.
        UnsupportedError: a recipe that exists only on the server.
    """
    sparse = config.sparse_attention_config
    given.check_used(sparse)
    recipe = kernel_recipe(config.quant_attention_config)
    quantised = None if recipe is None else Quantised(recipe, given.impl)
    if isinstance(sparse, SolAttnConfig):
        return _sol(sparse, given), quantised
    if isinstance(sparse, SkipSoftmaxConfig):
        return _skip(sparse, given, recipe), quantised
    if isinstance(sparse, VideoSparseAttentionConfig):
        return Vsa(sparse.vsa_sparsity, given.gate, given.impl), quantised
    return None, quantised


def _sol(sparse: SolAttnConfig, given: Surroundings) -> Sol:
    layers = frozenset(sparse.dense_layers or ())
    beyond = sorted(layer for layer in layers if layer >= (given.num_layers or layer + 1))
    if beyond:
        raise ValueError(
            f"dense_layers has {', '.join(map(str, beyond))}: the model's {given.num_layers} "
            f"layers count from 0 to {(given.num_layers or 0) - 1}"
        )
    return Sol(
        tau=sparse.tau,
        thresh_type=sparse.thresh_type,
        cutoff=sparse.resolve_disabled_until_timestep(),
        dense_layers=layers,
        sink_start=given.sink_start,
        sink_tokens=given.sink_tokens,
        impl=given.impl,
        dense=given.dense,
        taus=None if given.taus is None else tuple(map(float, given.taus)),
    )


def _skip(
    sparse: SkipSoftmaxConfig, given: Surroundings, recipe: QuantRecipe | None
) -> Skip | None:
    names: Sequence[str | None] = given.module_names or [None]
    params = [
        sparse.to_sparse_params(module_name=name, checkpoint_config=given.checkpoint_config)
        for name in names
    ]
    active = [item for item in params if item is not None]
    if not active:
        return None
    return Skip(
        factor=active[0].threshold_scale_factor,
        cutoff=active[0].disabled_until_timestep,
        ignored=frozenset(n for n, item in enumerate(params) if item is None),
        key_tokens=given.key_tokens,
        recipe=recipe,
        impl=given.impl,
        warn=given.warn,
        dense=given.dense,
    )


def as_attention_config(config: AnyConfig) -> AttentionConfig:
    """The attention part of any form of configuration.

    Raises:
        TypeError: something else, with how to read a file.
    """
    if config is None:
        return AttentionConfig()
    if isinstance(config, VisualGenConfig):
        return config.attention_config
    if isinstance(config, AttentionConfig):
        return config
    if isinstance(config, QuantAttentionConfig):
        return AttentionConfig(quant_attention_config=config)
    if isinstance(config, SolAttnConfig | SkipSoftmaxConfig | VideoSparseAttentionConfig):
        return AttentionConfig(sparse_attention_config=config)
    raise TypeError(
        f"config: expected a configuration of workbench.config, got {type(config).__name__}; "
        "read YAML with load_config"
    )


def kernel_recipe(quant: QuantAttentionConfig | None) -> QuantRecipe | None:
    """The recipe as the kernels here take it.

    Raises:
        UnsupportedError: a recipe with scales per group of tokens, which only the server has.
    """
    if quant is None:
        return None
    if "CUTEDSL" not in quant.backends:
        raise UnsupportedError(
            f"quant_attention_config {quant.recipe}: the kernels here have no SageAttention style "
            "recipes (int8, fp8 with scales per group of tokens); use bf16, mxfp8 or nvfp4"
        )
    return QuantRecipe(quant.qk_dtype, quant.v_dtype, V_SCALES[quant.v_block_size])
