"""The tiny video diffusion transformer: what its parts promise."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.model_inputs import TINY, tiny_model
from workbench.models.dit import AttentionCall, DiTConfig, VideoDiT, dense_attention
from workbench.models.rope import axis_channels, rotate, rotation_table


def noise(frames: int, height: int, width: int, batch: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, frames, height, width, 3, generator=generator)


@pytest.mark.parametrize(
    ("size", "grid"),
    [((16, 64, 64), (8, 16, 16)), ((32, 64, 64), (16, 16, 16)), ((14, 60, 72), (7, 15, 18))],
)
def test_velocity_has_the_shape_of_the_video_on_every_grid(size, grid):
    calls = []

    def record(q, k, v, call):
        calls.append((call, q.shape, k.shape, v.shape))
        return dense_attention(q, k, v, call)

    video = noise(*size)
    with torch.no_grad():
        velocity = tiny_model()(video, 0.5, torch.tensor([3]), attention=record)
    tokens = grid[0] * grid[1] * grid[2]
    assert velocity.shape == video.shape
    assert torch.isfinite(velocity).all()
    assert calls[0][0].grid == grid
    assert calls[0][1] == calls[0][2] == calls[0][3] == (1, tokens, 2, 16)


def test_attention_is_called_once_per_layer_with_where_it_comes_from():
    calls = []

    def record(q, k, v, call):
        calls.append(call)
        return dense_attention(q, k, v, call)

    with torch.no_grad():
        tiny_model()(noise(4, 8, 8), 0.25, torch.tensor([0]), attention=record, step=7)
    assert calls == [AttentionCall(layer, 7, 0.25, (2, 2, 2)) for layer in range(TINY.depth)]


def test_time_is_unknown_to_attention_when_every_sample_has_its_own():
    calls = []

    def record(q, k, v, call):
        calls.append(call)
        return dense_attention(q, k, v, call)

    with torch.no_grad():
        tiny_model()(noise(2, 4, 4, 2), torch.tensor([0.1, 0.9]), torch.tensor([0, 1]),
                     attention=record)  # fmt: skip
    assert {(call.step, call.time) for call in calls} == {(None, None)}


def test_one_time_for_all_equals_that_time_for_each():
    model, video, label = tiny_model(), noise(2, 8, 8, 2), torch.tensor([0, 1])
    with torch.no_grad():
        assert torch.equal(model(video, 0.5, label), model(video, torch.full((2,), 0.5), label))


def test_an_equal_attention_function_changes_no_bit():
    model, video, label = tiny_model(), noise(4, 16, 16), torch.tensor([2])

    def own(q, k, v, call):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)

    with torch.no_grad():
        assert torch.equal(model(video, 0.5, label), model(video, 0.5, label, attention=own))


def test_the_attention_function_decides_the_output():
    model, video, label = tiny_model(), noise(4, 16, 16), torch.tensor([2])
    with torch.no_grad():
        without = model(video, 0.5, label, attention=lambda q, k, v, call: torch.zeros_like(v))
        assert not torch.allclose(without, model(video, 0.5, label), atol=1e-3)


def test_class_and_time_and_absence_of_a_class_all_matter():
    model, video = tiny_model(), noise(2, 8, 8)
    with torch.no_grad():
        outputs = [
            model(video, time, torch.tensor([label]))
            for time, label in [(0.5, 0), (0.5, 1), (0.5, TINY.null_label), (0.9, 0)]
        ]
    for i, first in enumerate(outputs):
        for second in outputs[:i]:
            assert not torch.allclose(first, second, atol=1e-4)


def test_patches_are_put_back_where_they_came_from():
    model, video = tiny_model(), noise(4, 8, 12)
    grid = model.token_grid(video)
    tokens = model._patchify(video, grid)
    assert tokens.shape == (1, 2 * 2 * 3, 2 * 4 * 4 * 3)
    assert torch.equal(model._unpatchify(tokens, grid), video)
    # Token order is raster: the second token is the next patch to the right.
    assert torch.equal(tokens[0, 1].view(2, 4, 4, 3), video[0, :2, :4, 4:8])


@given(
    offset=st.tuples(*[st.integers(-3, 3)] * 3),
    origin=st.tuples(*[st.integers(-20, 20)] * 3),
    seed=st.integers(0, 1000),
)
def test_rotated_scores_depend_on_the_offset_alone(offset, origin, seed):
    q, k = torch.randn(2, 1, 1, 1, 32, generator=torch.Generator().manual_seed(seed)).unbind(0)

    def score(start: tuple[int, int, int]) -> torch.Tensor:
        other = tuple(s + o for s, o in zip(start, offset, strict=True))
        here = rotation_table((1, 1, 1), 32, origin=start)
        there = rotation_table((1, 1, 1), 32, origin=other)
        return (rotate(q, here) * rotate(k, there)).sum()

    torch.testing.assert_close(score(origin), score((0, 0, 0)), atol=1e-4, rtol=1e-4)


def test_rotation_keeps_lengths_and_leaves_the_origin_alone():
    x = torch.randn(1, 24, 1, 16, generator=torch.Generator().manual_seed(0))
    turned = rotate(x, rotation_table((2, 3, 4), 16))
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(turned[:, 0], x[:, 0])
    assert not torch.allclose(turned[:, 1], x[:, 1])


@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_channels_are_shared_out_over_t_h_w(head_dim):
    parts = axis_channels(head_dim)
    assert sum(parts) == head_dim
    assert parts[1] == parts[2]
    assert all(part % 2 == 0 for part in parts)


@pytest.mark.parametrize("head_dim", [0, 8, 40, 100])
def test_a_head_dim_that_cannot_be_shared_out_is_refused(head_dim):
    with pytest.raises(ValueError, match=f"head_dim={head_dim}"):
        DiTConfig(head_dim=head_dim)


@pytest.mark.parametrize(
    "wrong", [{"depth": 0}, {"width": -1}, {"heads": True}, {"classes": 1.5}, {"patch": (2, 4, 0)}]
)
def test_a_size_that_makes_no_model_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        DiTConfig(**wrong)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 16, 64, 64), "must be"),
        ((1, 16, 64, 64, 4), "must be"),
        ((1, 3, 64, 64, 3), "multiple of"),
        ((1, 16, 62, 64, 3), "multiple of"),
        ((1, 0, 64, 64, 3), "multiple of"),
    ],
)
def test_a_video_that_does_not_fit_the_patches_is_refused(shape, message):
    with pytest.raises(ValueError, match=message):
        tiny_model()(torch.zeros(shape), 0.5, torch.tensor([0]))


def test_the_default_model_has_head_dim_128_and_fits_12_megabytes_in_bf16():
    model = VideoDiT()
    assert (model.config.heads, model.config.head_dim) == (2, 128)
    assert 2 * sum(p.numel() for p in model.parameters()) < 12_000_000
