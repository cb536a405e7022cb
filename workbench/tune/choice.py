"""Choosing a value of the knob: for a density from the one-pass curve, for an error from probes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from decimal import ROUND_FLOOR, Context, Decimal

import numpy as np

from workbench.curves import Curve, Evaluate

LADDER_POINTS = 129  # of the curve that is inverted; it refines between two of them by itself


def for_density(
    passes: Sequence[Evaluate],
    target: float,
    span: tuple[float, float],
    value: Callable[[float], float],
    *,
    name: str,
    sparsest: str,
) -> float:
    """The sparsest value whose mean density is not below the target, from the one-pass curve.

    Args:
        passes: density of every head at many values, one for each layer and step.
        target: requested mean density over all of them.
        span: positions that hold the densest and the sparsest setting.
        value: position -> value of the knob.
        name: of the knob, as for `Curve`.
        sparsest: why no value of the knob is sparser than the last, for messages.

    Raises:
        ValueError: the target lies outside what any value reaches; the range is named, and why.
    """
    ladder = [value(float(x)) for x in np.linspace(*span, LADDER_POINTS)]
    joined = Curve.join([Curve(ladder, one(ladder), name, one) for one in passes])
    low, high = joined.reach
    least, most = round(low, 4), round(high, 4)  # as named, so that what is named can be had
    if not min(low, least) <= target <= max(high, most):
        raise ValueError(
            f"target_density={target:g}: this capture reaches {least:.4f} to {most:.4f} "
            f"({sparsest}); choose a density in between"
        )
    wanted = low if target <= max(low, least) else min(high, target)
    return _shortest(joined.solve(wanted), joined)


def _shortest(value: float, curve: Curve) -> float:
    """The value with the fewest digits that makes exactly the same mean density."""
    candidates = [float(f"{value:.{digits}g}") for digits in range(2, 10)]
    if curve.evaluate is None:
        return value
    reached = curve.evaluate([value, *candidates]).flatten(0, -2).mean(dim=0).tolist()
    same = [item for item, density in zip(candidates, reached[1:]) if density == reached[0]]
    return same[0] if same else value


def for_error(
    positions: Sequence[float], errors: Sequence[float], limit: float
) -> tuple[float, int]:
    """Where the error of probed settings reaches a limit.

    The errors are made monotone first (running maximum from the dense side), so a lucky sparse
    setting beyond a bad one is not taken.

    Args:
        positions: ascending, towards sparser.
        errors: mean error at each of them.
        limit: largest error allowed.

    Returns:
        (candidate, safe): the position at which the linearly interpolated envelope reaches the
        limit, and the index of the last probed position at or below it.

    Raises:
        ValueError: already the densest probe exceeds the limit.
    """
    envelope = np.maximum.accumulate(np.asarray(errors, dtype=float))
    good = int(np.count_nonzero(envelope <= limit))
    if good == 0:
        raise ValueError(
            f"target_error={limit:g}: the densest setting tried already has {envelope[0]:.4g}; "
            "allow more error or try denser settings"
        )
    safe = good - 1
    if good == len(positions):
        return positions[safe], safe
    share = (limit - envelope[good - 1]) / (envelope[good] - envelope[good - 1])
    return float(positions[safe] + share * (positions[good] - positions[safe])), safe


def towards_dense(value: float, digits: int = 4) -> float:
    """Rounds a value down to few significant digits: down is denser for every knob."""
    return float(Context(prec=digits, rounding=ROUND_FLOOR).create_decimal(Decimal(value)))


def next_above(value: float, digits: int = 3) -> float:
    """The next number of few significant digits above a value: 0.501 after 0.5."""
    return float(Context(prec=digits).next_plus(Decimal(value)))
