"""Autocast around a call changes nothing: neither the route, nor the numbers, nor the dtype."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from blockattn import (
    attend,
    quantised_attention,
    skip_gaps,
    skip_softmax_attention,
    sol_attention,
    sol_route,
    sol_scores,
    video_sparse_attention,
    vsa_route,
)
from blockattn.impl import products

GRID = (4, 4, 8)
TOKENS = 4 * 4 * 8


def qkv() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, TOKENS, 2, 64, generator=generator) for _ in range(3))
    return q, k, v


@pytest.fixture(autouse=True)
def products_that_autocast_reaches(monkeypatch: pytest.MonkeyPatch):
    """It casts torch.matmul alone; on some processors the products go another way."""
    monkeypatch.setattr(products, "prefers_onednn", lambda: False)


CALLS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "dense": lambda q, k, v: attend(q, k, v),
    "dense, reference": lambda q, k, v: attend(q, k, v, impl="reference"),
    "route, eager": lambda q, k, v: attend(q, k, v, sol_route(q, k), impl="eager"),
    "sol_scores": lambda q, k, v: sol_scores(q, k).z,
    "sol_attention": lambda q, k, v: sol_attention(q, k, v),
    "skip_gaps": lambda q, k, v: skip_gaps(q, k, tile=(64, 64)).gaps,
    "skip_softmax": lambda q, k, v: skip_softmax_attention(q, k, v, threshold=0.3, tile=(64, 64)),
    "vsa_route": lambda q, k, v: vsa_route(q, k, grid=GRID, sparsity=0.5).dense(),
    "vsa": lambda q, k, v: video_sparse_attention(
        q, k, v, grid=GRID, sparsity=0.5, gate_compress=torch.ones_like(q)
    ),
    "quantised": lambda q, k, v: quantised_attention(q, k, v),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_under_autocast_equals_the_call_without_it(name: str):
    plain = CALLS[name](*qkv())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = CALLS[name](*qkv())
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16  # it is still on
    assert inside.dtype == plain.dtype
    assert torch.equal(inside, plain)
