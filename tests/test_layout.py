"""How a sequence is cut into blocks: lengths, sums and means over true lengths only."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blockattn.layout import block_lengths, block_mean, block_sum, num_blocks, pad_blocks


@pytest.mark.parametrize(
    ("tokens", "block", "lengths"),
    [
        (0, 64, []),
        (1, 64, [1]),
        (63, 64, [63]),
        (64, 64, [64]),
        (65, 64, [64, 1]),
        (128, 64, [64, 64]),
        (650, 64, [64] * 10 + [10]),
        (7, 3, [3, 3, 1]),
    ],
)
def test_only_the_last_block_is_short(tokens, block, lengths):
    assert num_blocks(tokens, block) == len(lengths)
    found = block_lengths(tokens, block)
    assert found.dtype == torch.int32
    assert found.tolist() == lengths


@given(tokens=st.integers(1, 400), block=st.integers(1, 130))
def test_block_lengths_add_up_to_the_sequence_and_stay_in_1_to_block(tokens, block):
    lengths = block_lengths(tokens, block)
    assert int(lengths.sum()) == tokens
    assert int(lengths.min()) >= 1
    assert int(lengths.max()) <= block


def test_padding_appends_zeros_to_the_last_block_alone():
    x = torch.ones(2, 5, 3, 4)
    padded = pad_blocks(x, 4)
    assert padded.shape == (2, 2, 4, 3, 4)
    assert torch.equal(padded.flatten(1, 2)[:, :5], x)
    assert not padded.flatten(1, 2)[:, 5:].any()


@given(tokens=st.integers(1, 90), block=st.integers(1, 40), seed=st.integers(0, 99))
def test_sums_and_means_equal_a_loop_over_the_blocks(tokens, block, seed):
    x = torch.randn(1, tokens, 2, 3, generator=torch.Generator().manual_seed(seed)).double()
    sums = [x[:, a : a + block].sum(dim=1) for a in range(0, tokens, block)]
    means = [x[:, a : a + block].mean(dim=1) for a in range(0, tokens, block)]
    torch.testing.assert_close(block_sum(x, block), torch.stack(sums, dim=1))
    torch.testing.assert_close(block_mean(x, block), torch.stack(means, dim=1))


def test_a_mean_divides_by_the_true_length():
    assert block_mean(torch.ones(1, 65, 1, 1))[0, :, 0, 0].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sol_weakness_3_sums_are_accumulated_in_float32(dtype):
    # 64 x 257 in bfloat16 steps would stop growing: 256 + 1 rounds back to 256.
    x = torch.ones(1, 64, 1, 1, dtype=dtype)
    x[0, 0] = 256
    total = block_sum(x)
    assert total.dtype == torch.float32
    assert total.item() == 256 + 63


def test_float64_stays_float64():
    assert block_sum(torch.ones(1, 3, 1, 1, dtype=torch.float64)).dtype == torch.float64
