"""What is known of each family of video transformers: where its attention is, how tokens lie.

Everything here is read from diffusers' model classes: names of modules, patch sizes, which side of
the video the text is on, which way the time argument runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

Grid = tuple[int, int, int]
Given = Mapping[str, Any]  # arguments of the forward call, by name


@dataclass(frozen=True)
class Family:
    """One family of transformers.

    Attributes:
        model: name of the class in diffusers; subclasses belong to the family too.
        blocks: (list of blocks, module inside a block) of the self-attention of the video, in the
            order in which they run; layers are numbered through all lists.
        cross: the same for cross-attention, which stays as it is and is counted.
        grid: (config, arguments of forward) -> tokens along (t, h, w), `None` where they do not
            say.
        multiple: height and width in pixels are multiples of it, the size of a token.
        text: where text tokens stand in the self-attention: nowhere, `before` or `after` the video.
        text_mask: forward's argument [B, text] with the valid text tokens, where the model masks
            them inside the attention.
        falling: whether the time argument is large for noise. Mochi's is small.
    """

    model: str
    blocks: tuple[tuple[str, str], ...]
    grid: Callable[[Any, Given], Grid | None]
    multiple: int
    cross: tuple[tuple[str, str], ...] = ()
    text: Literal["nowhere", "before", "after"] = "nowhere"
    text_mask: str | None = None
    falling: bool = True

    def attention_modules(self, model: nn.Module) -> list[str]:
        """Names of the self-attention modules, layer by layer."""
        return _names(model, self.blocks)

    def check_size(self, size: Sequence[int]) -> None:
        """Refuses frames, height and width of a video that the models cannot make.

        Raises:
            ValueError: a height or width between two multiples.
        """
        for name, value in zip(("height", "width"), size[1:], strict=True):
            if value % self.multiple:
                above = -(-value // self.multiple) * self.multiple
                raise ValueError(
                    f"{name}={value}: must be a multiple of {self.multiple} for {self.model}, such "
                    f"as {above}"
                )

    def cross_modules(self, model: nn.Module) -> list[str]:
        """Names of the cross-attention modules."""
        return _names(model, self.cross)


def _names(model: nn.Module, lists: tuple[tuple[str, str], ...]) -> list[str]:
    return [
        f"{blocks}.{n}.{inner}"
        for blocks, inner in lists
        for n in range(len(model.get_submodule(blocks)))  # pyright: ignore[reportArgumentType]
    ]


def _wan_grid(config: Any, given: Given) -> Grid:
    (_, _, *size), patch = given["hidden_states"].shape, config.patch_size
    return size[0] // patch[0], size[1] // patch[1], size[2] // patch[2]


def _hunyuan_grid(config: Any, given: Given) -> Grid:
    (_, _, *size), p = given["hidden_states"].shape, config.patch_size
    return size[0] // config.patch_size_t, size[1] // p, size[2] // p


def _ltx_grid(config: Any, given: Given) -> Grid | None:
    """LTX gets tokens; their grid stands beside them, unless coordinates of every token do."""
    del config
    grid = (given.get("num_frames"), given.get("height"), given.get("width"))
    if None in grid or given.get("video_coords") is not None:
        return None
    return grid  # pyright: ignore[reportReturnType]


def _cogvideox_grid(config: Any, given: Given) -> Grid:
    (_, frames, _, *size), p = given["hidden_states"].shape, config.patch_size
    frames_per_token = config.patch_size_t or 1
    return -(-frames // frames_per_token), size[0] // p, size[1] // p


def _mochi_grid(config: Any, given: Given) -> Grid:
    (_, _, *size), p = given["hidden_states"].shape, config.patch_size
    return size[0], size[1] // p, size[2] // p


FAMILIES = (
    Family(
        "WanTransformer3DModel",
        blocks=(("blocks", "attn1"),),
        cross=(("blocks", "attn2"),),
        grid=_wan_grid,
        multiple=16,
    ),
    Family(
        "HunyuanVideoTransformer3DModel",
        blocks=(("transformer_blocks", "attn"), ("single_transformer_blocks", "attn")),
        grid=_hunyuan_grid,
        multiple=16,
        text="after",
        text_mask="encoder_attention_mask",
    ),
    Family(
        "LTXVideoTransformer3DModel",
        blocks=(("transformer_blocks", "attn1"),),
        cross=(("transformer_blocks", "attn2"),),
        grid=_ltx_grid,
        multiple=32,
    ),
    Family(
        "CogVideoXTransformer3DModel",
        blocks=(("transformer_blocks", "attn1"),),
        grid=_cogvideox_grid,
        multiple=16,
        text="before",
    ),
    Family(
        "MochiTransformer3DModel",
        blocks=(("transformer_blocks", "attn1"),),
        grid=_mochi_grid,
        multiple=16,
        text="after",  # its processor crops the padding itself, sample by sample
        falling=False,
    ),
)


def family_of(model: nn.Module) -> Family:
    """The family of a transformer.

    Raises:
        TypeError: none of them, with those that are known.
    """
    classes = {cls.__name__ for cls in type(model).__mro__}
    for family in FAMILIES:
        if family.model in classes:
            return family
    known = ", ".join(family.model for family in FAMILIES)
    raise TypeError(
        f"model: {type(model).__name__} is no video transformer whose attention is known here; "
        f"expected {known}, or a pipeline that has one"
    )
