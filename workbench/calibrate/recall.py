"""Attention mass inside a route, and the most that any router could catch with as many blocks.

Mass is the softmax weight of dense attention. A recall of 0.9 says that the exact blocks hold 90 %
of it; the ceiling takes, for every query block, the same number of key blocks by their true mass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blockattn import BlockRoute, checks
from blockattn.layout import num_blocks
from blockattn.precision import own_precision

SCORES_AT_ONCE = 1 << 24  # elements of the largest score buffer


@own_precision()
def block_mass(
    q: Tensor, k: Tensor, block: tuple[int, int], *, scale: float | None = None
) -> Tensor:
    """Softmax mass of every block pair, as a share of its head's: exact, in chunks of rows.

    Args:
        q: ``[B, Tq, Hq, D]``; k: ``[B, Tk, Hk, D]``, Hk dividing Hq.
        block: tokens of a query and of a key block.
        scale: softmax scale, default D ** -0.5.

    Returns:
        float32 ``[B, Hq, Nq, Nk]``; the pairs of a head sum to 1.
    """
    checks.query_key(q, k)
    rows, columns = checks.integer_pair("block", block)
    tokens, keys, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    factor = checks.default_scale(q.shape[3]) if scale is None else scale
    shape = (q.shape[0], q.shape[2], num_blocks(tokens, rows), num_blocks(keys, columns))
    mass = torch.empty(shape, dtype=torch.float32, device=q.device)
    step = rows * max(1, SCORES_AT_ONCE // (rows * keys * q.shape[0]))
    for head in range(q.shape[2]):
        key = k[:, :, head // group].float().transpose(1, 2)
        for start in range(0, tokens, step):
            weights = (q[:, start : start + step, head].float() @ key * factor).softmax(dim=-1)
            first = start // rows
            pooled = _block_sum(_block_sum(weights, columns).transpose(1, 2), rows)
            mass[:, head, first : first + pooled.shape[2]] = pooled.transpose(1, 2)
    return mass / tokens


def recall(mass: Tensor, route: BlockRoute) -> Tensor:
    """Mass inside a route's exact pairs, float64 ``[B, H]`` in [0, 1].

    Args:
        mass: of :func:`block_mass` with the route's block sizes.
        route: exact pairs.

    Raises:
        ValueError: shapes that differ.
    """
    _check(mass, route)
    return (mass.double() * route.dense()).sum(dim=(2, 3)).clamp(max=1.0).cpu()


def best_recall(mass: Tensor, route: BlockRoute) -> Tensor:
    """Most mass that any route can hold with as many key blocks per query block: as `recall`."""
    _check(mass, route)
    ranked = mass.double().sort(dim=-1, descending=True).values
    places = torch.arange(mass.shape[-1], device=mass.device)
    taken = places < route.counts()[..., None]
    return (ranked * taken).sum(dim=(2, 3)).clamp(max=1.0).cpu()


def _block_sum(x: Tensor, block: int) -> Tensor:
    """Sums over blocks of the last axis, whose last one may be short."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[-1] % block))
    return padded.unflatten(-1, (-1, block)).sum(dim=-1)


def _check(mass: Tensor, route: BlockRoute) -> None:
    if tuple(mass.shape) != route.shape:
        raise ValueError(
            f"mass: shape {tuple(mass.shape)}, but the route has {route.shape}; compute the mass "
            f"with block={route.block}"
        )
