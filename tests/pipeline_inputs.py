"""Tiny random pipelines of every family, with text encoders and tokenizers of a few words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.attach_inputs import CASES
from workbench.diffusers.wan import tiny_wan_pipeline

WORDS = {"<pad>": 0, "<unk>": 1, "red": 2, "ball": 3}
PARTS: Any = diffusers  # its classes are loaded late, where no type checker sees them
TEXTS: Any = transformers


def tokenizer() -> Any:
    words = Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    return TEXTS.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", unk_token="<unk>"
    )


def encoder(width: int, kind: str = "T5") -> Any:
    torch.manual_seed(0)
    sizes = {"d_model": width, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    config = getattr(TEXTS, f"{kind}Config")(vocab_size=len(WORDS), **sizes)
    return getattr(TEXTS, f"{kind}EncoderModel")(config).eval()


def transformer(name: str) -> Any:
    return next(case for case in CASES if case.name == name).model()


def texts(width: int, kind: str = "T5") -> dict[str, Any]:
    return {"tokenizer": tokenizer(), "text_encoder": encoder(width, kind), "vae": None}


def wan() -> Any:
    pipe = tiny_wan_pipeline(layers=2)
    pipe.register_modules(**texts(32, "UMT5"))
    return pipe


def ltx() -> Any:
    scheduler = PARTS.FlowMatchEulerDiscreteScheduler()
    return PARTS.LTXPipeline(transformer=transformer("ltx"), scheduler=scheduler, **texts(16))


def cogvideox() -> Any:
    sizes = {"in_channels": 4, "out_channels": 4, "num_layers": 2, "time_embed_dim": 16}
    grid = {"sample_width": 16, "sample_height": 16, "sample_frames": 13}
    model = PARTS.CogVideoXTransformer3DModel(
        num_attention_heads=2, attention_head_dim=64, text_embed_dim=16, **sizes, **grid
    )
    scheduler = PARTS.CogVideoXDDIMScheduler()
    return PARTS.CogVideoXPipeline(transformer=model.eval(), scheduler=scheduler, **texts(16))


def mochi() -> Any:
    scheduler = PARTS.FlowMatchEulerDiscreteScheduler(invert_sigmas=True)
    return PARTS.MochiPipeline(transformer=transformer("mochi"), scheduler=scheduler, **texts(16))


def hunyuan() -> Any:
    torch.manual_seed(0)
    words = {"vocab_size": len(WORDS), "bos_token_id": 0, "eos_token_id": 0}
    sizes = {"intermediate_size": 16, "num_attention_heads": 2}
    llama = TEXTS.LlamaConfig(hidden_size=16, num_hidden_layers=3, **sizes, **words)
    clip = TEXTS.CLIPTextConfig(hidden_size=8, num_hidden_layers=1, **sizes, **words)
    return PARTS.HunyuanVideoPipeline(
        text_encoder=TEXTS.LlamaModel(llama).eval(),
        tokenizer=tokenizer(),
        transformer=transformer("hunyuan"),
        vae=None,
        scheduler=PARTS.FlowMatchEulerDiscreteScheduler(shift=7.0),
        text_encoder_2=TEXTS.CLIPTextModel(clip).eval(),
        tokenizer_2=tokenizer(),
    )


# Frames, height and width that make a grid of 4 x 8 x 8 tokens (Wan: 4 x 6 x 8).
PIPELINES: dict[str, tuple[Callable[[], Any], tuple[int, int, int]]] = {
    "wan": (wan, (13, 96, 128)),
    "ltx": (ltx, (25, 256, 256)),
    "cogvideox": (cogvideox, (13, 128, 128)),
    "mochi": (mochi, (19, 128, 128)),
    "hunyuan": (hunyuan, (13, 128, 128)),
}
