"""Scores in one byte each: decisions at every stop of the tau slider are exact, between two not."""

from __future__ import annotations

import torch
from torch import Tensor

from blockattn import BlockScores, checks

STOPS = tuple(round(-1 + 0.02 * n, 2) for n in range(251))  # of the tau slider


def ladder(tau: float | None = None) -> tuple[float, ...]:
    """Stops of the tau slider, with the tau that a mask was made with among them."""
    own = () if tau is None else (checks.finite_number("tau", tau),)
    return tuple(sorted({*STOPS, *own}))


def coded(z: Tensor, stops: tuple[float, ...]) -> Tensor:
    """How many stops lie below each score, uint8 of z's shape; at most 255 stops.

    ``z > stops[n]`` exactly when the code is above n, in float32 as everywhere: decisions at a stop
    are exact. Between two stops those pairs are undecided whose score lies there too. NaN, which
    passes no threshold, gets code 0.
    """
    if len(stops) > 255:
        raise ValueError(f"stops: {len(stops)} of them, but a byte counts at most 255")
    edges = torch.tensor(stops, dtype=torch.float64).float().to(z.device)
    codes = torch.searchsorted(edges, z.float().contiguous(), out_int32=True)
    return codes.masked_fill_(z.isnan(), 0).to(torch.uint8)


def stop_densities(scores: BlockScores, stops: tuple[float, ...]) -> Tensor:
    """Density of every head at every stop, float64 ``[H, len(stops)]``: counted codes, no sort.

    Args:
        scores: of which the first sequence of a batch counts.
        stops: as for :func:`coded`.
    """
    always = scores.always.dense()[0].expand(scores.z.shape[1:])
    rows = []
    for z, forced in zip(scores.z[0], always):
        codes, levels = coded(z, stops), len(stops) + 1
        free = torch.bincount(codes.flatten(), minlength=levels)
        free -= torch.bincount(codes[forced], minlength=levels)
        above = free.flip(0).cumsum(0).flip(0)[1:]
        rows.append((above + forced.sum()).double() / max(1, forced.numel()))
    return torch.stack(rows).cpu()
