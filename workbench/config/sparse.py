"""One strict model for each sparse algorithm, with the rules of TensorRT-LLM VisualGen.

Fields and rules: NVIDIA/TensorRT-LLM pull requests 18329 (sol_attn), 17781 (skip_softmax) and its
VideoSparseAttentionConfig (vsa). What SkipSoftmax leaves open, the checkpoint's calibration
(:mod:`workbench.config.checkpoint`) answers, through the two resolvers here and nothing else.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_serializer, field_validator

from workbench.config.checkpoint import read_calibration
from workbench.config.fields import Number, Strict, check_share, parse_layers

FLOAT32_MAX = 3.4028234663852886e38


class SolAttnConfig(Strict):
    """Sol-Attn (arXiv:2607.24027).

    Attributes:
        tau: standard deviations above the mean score that a block needs to be exact; larger is
            sparser. Finite and within float32.
        thresh_type: which standard deviation, ``diag`` or ``exact``.
        disabled_until_timestep: dense while the denoising time (1 = noisiest) is at or above it,
            in (0, 1]; ``None`` has no dense phase. 0 would be dense for ever and is refused.
        dense_layers: layers that stay dense, sorted and without repeats. Also read from text
            such as ``"0,2-4"``; ``None`` has none.
    """

    BACKENDS: ClassVar[tuple[str, ...]] = ("CUTEDSL", "TRTLLM")
    NOT_HERE: ClassVar[dict[str, str]] = {
        "dense_steps": "a share of the denoising time is meant; use disabled_until_timestep",
        "sink_tokens": "VisualGen has no field for a sink",
        "sink_start": "VisualGen has no field for a sink",
        "kv_splits": "the number of splits is the kernel's own choice",
    }

    algorithm: Literal["sol_attn"] = "sol_attn"
    tau: Number = 1.0
    thresh_type: Literal["diag", "exact"] = "diag"
    disabled_until_timestep: Number | None = None
    dense_layers: tuple[int, ...] | None = None

    @field_validator("tau")
    @classmethod
    def _within_float32(cls, tau: float) -> float:
        if abs(tau) > FLOAT32_MAX:
            raise ValueError("must be a float32 number (at most 3.4e38 in size)")
        return tau

    @field_validator("disabled_until_timestep")
    @classmethod
    def _reaches_sparse(cls, cutoff: float | None) -> float | None:
        if cutoff is not None and not 0 < cutoff <= 1:
            raise ValueError(
                "must be in (0, 1], or null for no dense phase; at 0 every step would be dense"
            )
        return cutoff

    @field_validator("dense_layers", mode="before")
    @classmethod
    def _layers(cls, value: object) -> tuple[int, ...] | None:
        return None if value is None else parse_layers(value)

    @field_serializer("dense_layers")
    def _as_list(self, value: tuple[int, ...] | None) -> list[int] | None:
        return None if value is None else list(value)

    def resolve_disabled_until_timestep(
        self, *, checkpoint_config: object = None, pretrained_config: object = None
    ) -> float | None:
        """The cutoff in force: the user's alone, because checkpoints hold none for Sol-Attn."""
        del checkpoint_config, pretrained_config
        return self.disabled_until_timestep


@dataclass(frozen=True)
class SkipSoftmaxParams:
    """What a launch of SkipSoftmax needs: a factor above 0, and the end of the dense phase."""

    threshold_scale_factor: float
    disabled_until_timestep: float | None


class SkipSoftmaxConfig(Strict):
    """SkipSoftmax (BLASST, arXiv:2512.12087).

    Attributes:
        threshold_scale_factor: lambda * Sk, finite and >= 0; 0 is off. ``None`` leaves it to
            ``target_sparsity``, which it wins over.
        target_sparsity: share of tiles to drop, in [0, 1], resolved by the checkpoint's
            calibration. 0 is off.
        disabled_until_timestep: dense while the denoising time is at or above it, in [0, 1]. 0 is
            accepted for compatibility, means dense for ever, and warns.
    """

    BACKENDS: ClassVar[tuple[str, ...]] = ("TRTLLM", "CUTEDSL")
    NOT_HERE: ClassVar[dict[str, str]] = {
        **dict.fromkeys(
            ("formula", "coefficients", "ignore", "config_groups"),
            "calibration belongs to the checkpoint's own config.json",
        ),
        "dense_layers": "list the layers under 'ignore' in the checkpoint's calibration",
        "dense_steps": "a share of the denoising time is meant; use disabled_until_timestep",
    }

    algorithm: Literal["skip_softmax"] = "skip_softmax"
    threshold_scale_factor: Number | None = None
    target_sparsity: Number | None = None
    disabled_until_timestep: Number | None = None

    @field_validator("threshold_scale_factor")
    @classmethod
    def _not_negative(cls, factor: float | None) -> float | None:
        if factor is not None and factor < 0:
            raise ValueError("must be at least 0; null or 0 switches skipping off")
        return factor

    _shares = field_validator("target_sparsity", "disabled_until_timestep")(check_share)

    def model_post_init(self, context: object, /) -> None:
        """Warns once for each configuration; a validator would again inside a larger one."""
        del context
        if self.disabled_until_timestep == 0:
            warnings.warn(
                "disabled_until_timestep=0 keeps every step dense; leave it out to skip everywhere",
                stacklevel=3,
            )

    def resolve_disabled_until_timestep(
        self, *, checkpoint_config: object = None, pretrained_config: object = None
    ) -> float | None:
        """The cutoff in force: the user's, else the checkpoint's, else ``None``.

        The lowering and the CUDA-graph key both ask here, so that they cannot disagree.

        Args:
            checkpoint_config, pretrained_config: at most one, as for
                :func:`workbench.config.checkpoint.read_calibration`.
        """
        if self.disabled_until_timestep is not None:
            return self.disabled_until_timestep
        calibration = read_calibration(
            checkpoint_config=checkpoint_config, pretrained_config=pretrained_config
        )
        return None if calibration is None else calibration.cutoff()

    def resolve_threshold_scale_factor(
        self, *, checkpoint_config: object = None, pretrained_config: object = None
    ) -> float | None:
        """The factor in force: the user's, else the formula at the user's or checkpoint's target.

        ``None`` means that nothing asks for skipping, 0 that it is switched off.

        Raises:
            ValueError: a target without a formula, or a calibration that cannot be used.
        """
        if self.threshold_scale_factor is not None:
            return self.threshold_scale_factor
        calibration = read_calibration(
            checkpoint_config=checkpoint_config, pretrained_config=pretrained_config
        )
        target = self.target_sparsity
        if target is None and calibration is not None:
            target = calibration.scalar_target()
        if target is None or target == 0:
            return target
        if calibration is None:
            raise ValueError(
                f"target_sparsity={target!r}: there is no calibration formula to turn it into a "
                "factor; use a checkpoint whose config.json has sparse_attention_config, or set "
                "threshold_scale_factor"
            )
        return calibration.factor(target)

    def to_sparse_params(
        self,
        *,
        module_name: str | None = None,
        checkpoint_config: object = None,
        pretrained_config: object = None,
    ) -> SkipSoftmaxParams | None:
        """What the attention module of that name launches with; ``None`` is plain dense.

        Raises:
            ValueError: the checkpoint has ``ignore`` patterns and the module no name to match.
        """
        given = {"checkpoint_config": checkpoint_config, "pretrained_config": pretrained_config}
        calibration = read_calibration(**given)
        if calibration is not None and calibration.ignores(module_name):
            return None
        factor = self.resolve_threshold_scale_factor(**given)
        if not factor:
            return None
        return SkipSoftmaxParams(factor, self.resolve_disabled_until_timestep(**given))


class VideoSparseAttentionConfig(Strict):
    """VSA (arXiv:2505.13389).

    Attributes:
        vsa_sparsity: share of the key cubes that every query cube drops, in [0, 1]: 0 keeps all
            cubes, 1 keeps one.
    """

    BACKENDS: ClassVar[tuple[str, ...]] = ("CUTEDSL", "TRTLLM")
    NOT_HERE: ClassVar[dict[str, str]] = {
        **dict.fromkeys(
            ("disabled_until_timestep", "dense_layers", "dense_steps"),
            "VisualGen's VSA is trained and has no dense phase or layers",
        ),
        "sparsity": "VisualGen calls it vsa_sparsity",
        "block_size": "cubes are 4x4x4 tokens",
    }

    algorithm: Literal["vsa"] = "vsa"
    vsa_sparsity: Number = 0.9

    _share = field_validator("vsa_sparsity")(check_share)

    def resolve_disabled_until_timestep(
        self, *, checkpoint_config: object = None, pretrained_config: object = None
    ) -> float | None:
        """``None``: VSA has no dense phase."""
        del checkpoint_config, pretrained_config


SparseConfig = Annotated[
    SolAttnConfig | SkipSoftmaxConfig | VideoSparseAttentionConfig,
    Field(discriminator="algorithm"),
]
