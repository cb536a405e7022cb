"""Shared by the tests of `workbench.attach`: one tiny random transformer of every family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor, nn

from workbench.attention import SparseAttention
from workbench.config import SolAttnConfig

GRID = (4, 4, 16)  # tokens, in every family
VIDEO = 256
TEXT = 20  # text tokens of joint models
CUTOFF = 0.9
SOL = SolAttnConfig(tau=1.0)
WIDTH = {"num_attention_heads": 2, "attention_head_dim": 64}


@dataclass(frozen=True)
class Case:
    """A family, its tiny transformer and the arguments of one forward call."""

    name: str
    make: Callable[[], Any]
    arguments: Callable[[int], dict[str, Any]]
    layers: int = 2
    text: int = 0
    processor: str = "attn1"
    calls: int = 1  # attention calls of a layer, for a batch of two

    def model(self) -> Any:
        torch.manual_seed(0)
        model = self.make().eval()
        with torch.no_grad():  # large weights, so that attention is far from uniform
            for name, parameter in model.named_parameters():
                if name.endswith(("to_q.weight", "to_k.weight")):
                    parameter.mul_(4)
        return model

    def inputs(self, *, time: float = 0.5, batch: int = 2) -> dict[str, Any]:
        torch.manual_seed(1)
        noise = 1000 * (1 - time if self.name == "mochi" else time)
        return {**self.arguments(batch), "timestep": torch.full((batch,), noise)}

    def run(self, model: Any, **settings: Any) -> Tensor:
        with torch.no_grad():
            return model(**placed(self.inputs(**settings), model), return_dict=False)[0]

    def attentions(self, model: Any) -> list[nn.Module]:
        """The self-attention modules, found without the code under test."""
        lists = ("blocks", "transformer_blocks", "single_transformer_blocks")
        blocks = [block for name in lists for block in getattr(model, name, ())]
        return [getattr(block, self.processor) for block in blocks]


def placed(inputs: dict[str, Any], model: Any) -> dict[str, Any]:
    """The inputs on the model's device and in its dtype; times stay float32."""
    like = next(model.parameters())

    def moved(name: str, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        converts = x.is_floating_point() and name != "timestep"
        return x.to(like.device, like.dtype if converts else x.dtype)

    return {name: moved(name, x) for name, x in inputs.items()}


def spy(patch: pytest.MonkeyPatch) -> list[Tensor]:
    """Every output of every policy, in order."""
    outputs: list[Tensor] = []
    run = SparseAttention.__call__

    def call(self: SparseAttention, *args: Any, **kwargs: Any) -> Tensor:
        outputs.append(run(self, *args, **kwargs))
        return outputs[-1]

    patch.setattr(SparseAttention, "__call__", call)
    return outputs


def _wan() -> Any:
    return diffusers.WanTransformer3DModel(
        **WIDTH, in_channels=4, out_channels=4, text_dim=16, freq_dim=16, ffn_dim=32, num_layers=2
    )


def _hunyuan() -> Any:
    return diffusers.HunyuanVideoTransformer3DModel(
        **WIDTH,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        text_embed_dim=16,
        pooled_projection_dim=8,
        guidance_embeds=False,
        rope_axes_dim=(16, 24, 24),
    )


def _ltx() -> Any:
    return diffusers.LTXVideoTransformer3DModel(
        **WIDTH,
        in_channels=4,
        out_channels=4,
        cross_attention_dim=128,
        num_layers=2,
        caption_channels=16,
    )


def _cogvideox() -> Any:
    return diffusers.CogVideoXTransformer3DModel(
        **WIDTH,
        in_channels=4,
        out_channels=4,
        time_embed_dim=8,
        text_embed_dim=16,
        num_layers=2,
        sample_width=32,
        sample_height=8,
        sample_frames=13,
        patch_size=2,
        max_text_seq_length=TEXT,
    )


def _mochi() -> Any:
    model = diffusers.MochiTransformer3DModel(
        **WIDTH,
        patch_size=2,
        num_layers=2,
        pooled_projection_dim=16,
        in_channels=4,
        text_embed_dim=16,
        time_embed_dim=16,
        max_sequence_length=TEXT,
    )
    nn.init.normal_(model.pos_frequencies)
    return model


def _text(batch: int, **masks: Any) -> dict[str, Any]:
    return {"encoder_hidden_states": torch.randn(batch, TEXT, 16), **masks}


def text_mask(*lengths: int) -> Tensor:
    """[B, TEXT] with ones for the valid text tokens of every sample."""
    return (torch.arange(TEXT) < torch.tensor(lengths)[:, None]).long()


def _lengths(batch: int) -> Tensor:
    return text_mask(*(12, 7)[:batch]) if batch <= 2 else text_mask(*[12] * batch)


def _latents(batch: int) -> dict[str, Any]:
    return {"hidden_states": torch.randn(batch, 4, 4, 8, 32)}


CASES = (
    Case("wan", _wan, lambda b: {**_latents(b), **_text(b)}),
    Case(
        "hunyuan",
        _hunyuan,
        lambda b: {
            **_latents(b),
            **_text(b, encoder_attention_mask=_lengths(b)),
            "pooled_projections": torch.randn(b, 8),
        },
        text=TEXT,
        processor="attn",
        calls=2,
    ),
    Case(
        "ltx",
        _ltx,
        lambda b: {
            "hidden_states": torch.randn(b, VIDEO, 4),
            **_text(b, encoder_attention_mask=_lengths(b)),
            **dict(zip(("num_frames", "height", "width"), GRID)),
        },
    ),
    Case(
        "cogvideox",
        _cogvideox,
        lambda b: {**_latents(b), **_text(b)},
        text=TEXT,
    ),
    Case(
        "mochi",
        _mochi,
        lambda b: {**_latents(b), **_text(b, encoder_attention_mask=_lengths(b).bool())},
        text=TEXT,
        calls=2,
    ),
)
