"""VSA that can be trained: the mathematics of `blockattn.video_sparse_attention`, with gradients.

The kernels of `blockattn` are forward only. Here every step is a differentiable PyTorch operation,
and only the kept cubes are computed, so that a training step costs less than a dense one. Method:
"VSA: Faster Video Diffusion with Trainable Sparse Attention" (arXiv:2505.13389).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from blockattn import checks
from blockattn.vsa import CUBE, CubeLayout, checked_layout, coarse_shares, kept_cubes

from .dit import AttentionCall, AttentionFn


def vsa_for_training(sparsity: float) -> AttentionFn:
    """An attention function for `VideoDiT`: VSA with the block's own gate.

    A model without a gate (`DiTConfig.gate` False) gets the fine stage alone, which is
    training-free top-k selection of cubes.

    Args:
        sparsity: share of the cubes to drop, in [0, 1]; checked at the first call.
    """

    def attention(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
        return differentiable_vsa(q, k, v, grid=call.grid, gate=call.gate, sparsity=sparsity)

    return attention


def differentiable_vsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    grid: tuple[int, int, int],
    gate: Tensor | None,
    sparsity: float,
) -> Tensor:
    """gate * coarse + fine, as `blockattn.video_sparse_attention` defines them.

    The selection itself has no gradient; q and k receive theirs through both branches.

    Args:
        q, k, v: [B, T, H, D] in raster order of the grid.
        grid: tokens along (t, h, w), with product T.
        gate: [B, T, H, D], or None for a coarse branch that is switched off.
        sparsity: share of the cubes to drop, in [0, 1].

    Returns:
        [B, T, H, D], dtype of q.

    Raises:
        ValueError: the sparsity is out of range, or the grid does not hold T tokens.
    """
    layout = checked_layout(q, k, grid)
    keep = kept_cubes(sparsity, layout.count)
    # Autocast would round the coarse stage's float32 products to bfloat16 and change the selection.
    with torch.autocast(q.device.type, enabled=False):
        q, k, v = (layout.tile(x) for x in (q, k, v))
        shares = coarse_shares(layout, q, k, checks.default_scale(q.shape[-1]))
        ranked = shares.detach().sort(dim=-1, descending=True, stable=True).indices
        fine = layout.untile(_fine_stage(layout, q, k, v, ranked[..., :keep]))
        if gate is None:
            return fine
        return gate * _coarse_output(layout, shares, v) + fine


def _coarse_output(layout: CubeLayout, shares: Tensor, v: Tensor) -> Tensor:
    """Coarse output, repeated for the tokens of each cube: [B, T, H, D] in raster order."""
    v_mean = layout.means(v).to(shares.dtype).transpose(1, 2)
    per_cube = (shares @ v_mean).transpose(1, 2).to(v.dtype)
    # Repeated first: the gradient is then a sum over each cube and needs no atomics.
    return per_cube.repeat_interleave(CUBE, dim=1).index_select(1, layout.slots)


def _fine_stage(layout: CubeLayout, q: Tensor, k: Tensor, v: Tensor, chosen: Tensor) -> Tensor:
    """Attention of every query cube to its chosen key cubes.

    Args:
        layout: of the grid.
        q, k, v: [B, 64 N, H, D] in cubes.
        chosen: int64 [B, H, N, K].

    Returns:
        [B, 64 N, H, D]; rows of padded queries hold nothing of use.
    """
    batch, _, heads, _ = q.shape
    rows = q.transpose(1, 2).flatten(0, 1).unflatten(1, (layout.count, CUBE))
    # Gathering by a product with a one-hot matrix is exact; the gradient of the gather is then a
    # sum in the matrix unit's float32 accumulator, without atomics and the same in every run.
    picks = F.one_hot(chosen.flatten(0, 1).flatten(1), layout.count).to(k.dtype)
    keys, values = (_gather(picks, x, layout.count) for x in (k, v))
    out = F.scaled_dot_product_attention(rows, keys, values, attn_mask=_mask(layout, chosen))
    return out.flatten(1, 2).unflatten(0, (batch, heads)).transpose(1, 2)


def _gather(picks: Tensor, x: Tensor, count: int) -> Tensor:
    """Chosen cubes of x [B, 64 N, H, D], by picks [B H, N K, N]: [B H, N, 64 K, D]."""
    cubes = x.transpose(1, 2).reshape(picks.shape[0], count, -1)
    return (picks @ cubes).reshape(picks.shape[0], count, -1, x.shape[-1])


def _mask(layout: CubeLayout, chosen: Tensor) -> Tensor | None:
    """True where a gathered key is a token: [B H, N, 64, 64 K]; None when all cubes are full."""
    if len(layout.slots) == layout.padded_tokens:
        return None
    valid = torch.arange(CUBE, device=chosen.device) < layout.sizes[:, None]
    kept = valid[chosen.flatten(0, 1)].flatten(2)
    return kept[:, :, None, :].expand(-1, -1, CUBE, -1)
