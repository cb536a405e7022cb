"""Attention inside a model: what runs sparse, what runs dense, and why, counted."""

from workbench.attention.policy import (
    SparseAttention,
    masked_attention,
)

__all__ = [
    "SparseAttention",
    "masked_attention",
]
