"""Golden vectors of Sol-Attn: inputs from an integer hash and the results they must give.

Anyone can make these inputs in any language, so the numbers do not depend on a random generator.
The results were computed in float64 from bfloat16 inputs and bfloat16 block summaries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TOKENS, HEADS, DIM = 650, 2, 128

CORNERS = {  # tensor -> its first four channels at token 0, head 0, and the sum of all of it
    "q": ((1.1796875, -0.6875, 1.9140625, -1.015625), -486.605622),
    "k": ((2.078125, 0.2021484375, -1.1953125, -0.12060546875), -488.158281),
    "v": ((0.7421875, -0.1904296875, -0.890625, 0.6484375), -451.577610),
}
SUMMARIES = {  # (tensor, block, head) -> first three channels
    ("k_mean", 0, 0): (0.6875, 0.380859375, 0.484375),
    ("k_mean", 10, 1): (1.0234375, 0.75, 0.95703125),
    ("v_sum", 0, 0): (5.34375, -4.46875, -1.1875),
    ("v_sum", 10, 1): (2.1875, 0.83203125, 1.8515625),
}
DENSE_NORM, DENSE_FIRST = 241.533068, (0.245705, -0.689311, 0.612105)


@dataclass(frozen=True)
class Golden:
    """What one threshold type must give at tau = 1; rows of E are hexadecimal, bit j = block j."""

    thresh_type: str
    theta: tuple[str, str]
    rows: tuple[str, str]
    density: float
    first: tuple[float, float, float]  # output at token 0, head 0
    last: tuple[float, float, float]  # output at token 649, head 1
    lse_first: float
    lse_last: float
    norm: float
    lse_sum: float


AT_TAU_1 = (
    Golden(
        "diag",
        theta=(
            "1.40693 2.22555 2.63412 3.25304 3.52270 3.50622 "
            "3.39024 3.39523 3.09549 2.18926 1.56366",
            "2.25736 2.47227 2.57487 2.73544 2.97044 3.15245 "
            "3.15770 3.02275 2.80789 2.60460 1.63601",
        ),
        rows=(
            "f f f 1c 1f8 1f0 1f0 1f0 3f0 7e0 700",
            "1f 1f 1f 1f 3f f0 1e0 3e0 7c0 7c0 780",
        ),
        density=0.429752,
        first=(0.265686, -0.669388, 0.632033),
        last=(-0.041341, 0.994703, 0.325610),
        lse_first=18.584320,
        lse_last=21.357529,
        norm=245.590464,
        lse_sum=26230.1956,
    ),
    Golden(
        "exact",
        theta=(
            "3.53896 4.17829 4.26546 4.34266 4.76606 4.98955 "
            "4.81263 4.84587 4.49060 3.77504 3.19544",
            "4.06374 4.17876 4.19661 4.17021 3.90175 3.79779 "
            "4.00044 4.30929 4.39876 4.41496 3.66204",
        ),
        rows=(
            "3 7 e 1c 38 f0 e0 1e0 380 700 600",
            "7 f f 1e 38 70 e0 1c0 380 700 600",
        ),
        density=0.280992,
        first=(0.281185, -0.653917, 0.647705),
        last=(-0.057201, 0.985508, 0.309889),
        lse_first=18.310116,
        lse_last=21.109545,
        norm=248.172237,
        lse_sum=25918.37346,
    ),
)
AT_TAU_HALF = {  # threshold type -> density, LSE at token 649 of head 1, norm of the output
    "diag": (0.458678, 21.387296, 245.249101),
    "exact": (0.384298, 21.357529, 245.989230),
}


def hashed(n: Tensor) -> Tensor:
    """U(n) = ((n * 2654435761) mod 2^32) / 2^32 - 0.5, float64."""
    return (n * 2654435761 % 2**32).double() / 2**32 - 0.5


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v ``[1, 650, 2, 128]`` in bfloat16."""
    t = torch.arange(TOKENS)[:, None, None]
    h = torch.arange(HEADS)[None, :, None]
    d = torch.arange(DIM)[None, None, :]
    index = (t * HEADS + h) * DIM + d
    shared = t // 64 * 131 + 17 * h + 7919 * d + d * d
    q = 4 * hashed(index + 1) + 2 * hashed(shared + 3)
    k = 4 * hashed(index + 1000003) + 2 * hashed(shared + 3)
    v = 2 * hashed(index + 2000003) + hashed(shared + 77)
    q, k, v = (x.float().bfloat16()[None] for x in (q, k, v))
    return q, k, v


def hex_rows(mask: Tensor) -> str:
    """Rows of a bool matrix in the notation of :class:`Golden`."""
    return " ".join(f"{sum(int(b) << j for j, b in enumerate(row)):x}" for row in mask.tolist())
