"""Quantised attention in the configuration: which recipes exist, on which backend.

Recipes as in TensorRT-LLM VisualGen's QuantAttentionConfig: (qk_dtype, v_dtype, (q, k, v block
size)). ``CUTEDSL`` has the block-scaled formats, ``TRTLLM`` the SageAttention style, in which a
block size counts the tokens of one scale.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import field_validator, model_validator

from workbench.config.fields import Integer, Strict

Recipe = tuple[str, str, tuple[int, int, int]]

RECIPES: dict[str, tuple[Recipe, ...]] = {
    "CUTEDSL": (
        ("bf16", "fp8", (0, 0, 0)),
        ("mxfp8", "fp8", (0, 0, 0)),
        ("mxfp8", "fp8", (0, 0, 1)),
        ("nvfp4", "fp8", (0, 0, 0)),
        ("nvfp4", "fp8", (0, 0, 1)),
    ),
    "TRTLLM": (
        ("int8", "fp8", (1, 1, 1)),
        ("int8", "fp8", (1, 4, 1)),
        ("int8", "fp8", (1, 16, 1)),
        ("fp8", "fp8", (1, 1, 1)),
        ("fp8", "fp8", (1, 4, 1)),
    ),
}


class QuantAttentionConfig(Strict):
    """Formats of q, k and v. Without any field it is 16-bit q and k with FP8 v.

    Attributes:
        qk_dtype: format of q and k.
        v_dtype: format of v; ``fp8`` is the only one.
        q_block_size, k_block_size: tokens of one scale of q and k; 0 where the format has its own.
        v_block_size: 0 is one scale for v; 1 one for each (head, channel).
    """

    NOT_HERE: ClassVar[dict[str, str]] = {
        "smooth_qk": "smoothing comes with every qk_dtype but bf16",
        "algorithm": "quantisation has recipes; set qk_dtype and the block sizes",
    }

    qk_dtype: Literal["bf16", "int8", "fp8", "mxfp8", "nvfp4"] = "bf16"
    v_dtype: Literal["fp8"] = "fp8"
    q_block_size: Integer = 0
    k_block_size: Integer = 0
    v_block_size: Integer = 0

    @field_validator("q_block_size", "k_block_size", "v_block_size")
    @classmethod
    def _not_negative(cls, size: int) -> int:
        if size < 0:
            raise ValueError("must be at least 0")
        return size

    @model_validator(mode="after")
    def _some_backend_has_it(self) -> QuantAttentionConfig:
        if not self.backends:
            listed = "; ".join(
                f"{name}: {', '.join(map(_text, recipes))}" for name, recipes in RECIPES.items()
            )
            raise ValueError(f"{_text(self.recipe)} is no supported recipe; use one of {listed}")
        return self

    @property
    def recipe(self) -> Recipe:
        sizes = (self.q_block_size, self.k_block_size, self.v_block_size)
        return self.qk_dtype, self.v_dtype, sizes

    @property
    def backends(self) -> tuple[str, ...]:
        """Backends that have the recipe."""
        return tuple(name for name, recipes in RECIPES.items() if self.recipe in recipes)


def check_backend(quant: QuantAttentionConfig, backend: str) -> None:
    """Refuses a backend that does not have the recipe, with those that it has.

    Raises:
        ValueError: the backend quantises nothing, or has other recipes.
    """
    if backend not in RECIPES:
        raise ValueError(
            f"backend={backend!r} does not quantise attention; use {' or '.join(quant.backends)}"
        )
    if backend not in quant.backends:
        listed = ", ".join(map(_text, RECIPES[backend]))
        raise ValueError(
            f"backend={backend!r} has no recipe {_text(quant.recipe)}; it has {listed}, and "
            f"{' or '.join(quant.backends)} has this one"
        )


def _text(recipe: Recipe) -> str:
    qk, v, (q_block, k_block, v_block) = recipe
    return f"({qk}, {v}, ({q_block}, {k_block}, {v_block}))"
