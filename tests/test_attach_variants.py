"""Variants within a family: image to video, replaced tokens, patches in time, fused weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers", reason="needs diffusers: pip install 'diffusers>=0.35.2'")

import diffusers

import workbench
from tests.attach_inputs import SOL, WIDTH, text_mask
from workbench.config import SolAttnConfig

TIME = torch.tensor([500.0, 500.0])
Made = tuple[Any, dict[str, Any]]


def wan_with_an_image() -> Made:
    model = diffusers.WanTransformer3DModel(
        **WIDTH, in_channels=8, out_channels=4, text_dim=16, freq_dim=16, ffn_dim=32, num_layers=2,
        image_dim=12, added_kv_proj_dim=128,
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(2, 8, 4, 8, 32),
        "encoder_hidden_states": torch.randn(2, 512, 16),
        "encoder_hidden_states_image": torch.randn(2, 7, 12),
    }


def hunyuan_with_a_given_first_frame() -> Made:
    model = diffusers.HunyuanVideoTransformer3DModel(
        **WIDTH, in_channels=4, out_channels=4, num_layers=1, num_single_layers=1,
        num_refiner_layers=1, text_embed_dim=16, pooled_projection_dim=8, guidance_embeds=True,
        rope_axes_dim=(16, 24, 24), image_condition_type="token_replace",
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(2, 4, 4, 8, 32),
        "encoder_hidden_states": torch.randn(2, 20, 16),
        "encoder_attention_mask": text_mask(12, 7),
        "pooled_projections": torch.randn(2, 8),
        "guidance": torch.full((2,), 6.0),
    }


def cogvideox_with_patches_in_time() -> Made:
    model = diffusers.CogVideoXTransformer3DModel(
        **WIDTH, in_channels=4, out_channels=4, time_embed_dim=8, text_embed_dim=16, num_layers=2,
        sample_width=32, sample_height=16, sample_frames=13, patch_size=2, patch_size_t=2,
        max_text_seq_length=20, use_rotary_positional_embeddings=True,
    )  # fmt: skip
    angles = torch.rand(2 * 8 * 16, 64)
    return model, {
        "hidden_states": torch.randn(2, 4, 4, 16, 32),
        "encoder_hidden_states": torch.randn(2, 20, 16),
        "image_rotary_emb": (angles.cos(), angles.sin()),
    }


def cogvideox_with_fused_projections() -> Made:
    model, inputs = cogvideox_with_patches_in_time()
    model.fuse_qkv_projections()
    return model, inputs


@pytest.mark.parametrize(
    "make",
    [
        wan_with_an_image,
        hunyuan_with_a_given_first_frame,
        cogvideox_with_patches_in_time,
        cogvideox_with_fused_projections,
    ],
    ids=lambda make: make.__name__,
)
@torch.inference_mode()
def test_a_variant_is_attached_like_its_family(make: Callable[[], Made]):
    torch.manual_seed(0)
    model, inputs = make()
    model.eval()

    def run() -> Any:
        return model(**inputs, timestep=TIME, return_dict=False)[0]

    bare = run()
    with workbench.attach(model, None, strict=True):
        assert torch.equal(run(), bare)
    with workbench.attach(model, SolAttnConfig(tau=-100.0), strict=True):
        torch.testing.assert_close(run(), bare, rtol=1e-4, atol=1e-5)
    with workbench.attach(model, SOL, strict=True, record=True) as attached:
        assert not torch.equal(run(), bare)
    assert attached.counts().sparse >= 2
    assert all(record.density < 1 for record in attached.records)
