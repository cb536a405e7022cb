"""What a comparison says, in one sentence."""

from __future__ import annotations

import math

from workbench.profiles.compare import CONTROL, OTHER_SEED, Comparison, Difference
from workbench.sweep.statistics import CONFIDENCE, FEWEST

METRIC = "relative_l2"  # there for pixels and for latents


def verdict(found: Comparison) -> str:
    """One plain sentence: which profile stays closer to dense, by how much, and on what scale.

    The difference is paired by prompt and seed; its scale is what another seed changes, and its
    floor a second exact implementation of dense attention.
    """
    spoilt = _spoilt(found)
    if spoilt:
        return f"No verdict: {spoilt}."
    return _of_one(found) if len(found.profiles) == 1 else _of_two(found)


def _spoilt(found: Comparison) -> str:
    """The first thing that leaves nothing to compare."""
    for pair in found.pairs:
        for name in found.names:
            for flag in pair.flags[name]:
                if flag.startswith(("NOT FINITE", "RAN DENSE EVERYWHERE")):
                    return f"{name}, {pair.prompt}, seed {pair.seed}: {flag}"
    return ""


def _of_two(found: Comparison) -> str:
    one, other = found.names
    gap = found.difference(one, other, METRIC)
    if gap is None:
        return "No verdict: no pair has a finite distance from dense."
    if found.values(one, METRIC) == found.values(other, METRIC):
        same = f"{one} and {other} are equally far from dense in every pair"
        return f"{same}, {_at_densities(found, one, other)}."
    if gap.interval is None:
        few = _too_few(gap.values.count)
        mean = f"the relative L2 of {one} minus that of {other} is {gap.values.mean:+.3g}"
        return f"{few}: {mean} on average, {_at_densities(found, one, other)}."
    if not gap.differs:
        start = f"No difference between {one} and {other} is shown"
        end = f"relative L2 from dense differs by {gap.values.mean:+.3g} ({_interval(gap)})"
        return f"{start}, {_at_densities(found, one, other)}: {end}{_share(found, gap)}."
    closer, farther = (one, other) if gap.values.mean < 0 else (other, one)
    return (
        f"{closer} stays closer to dense than {farther}, {_at_densities(found, closer, farther)}: "
        f"relative L2 lower by {abs(gap.values.mean):.3g} ({_interval(gap)}){_share(found, gap)}."
    )


def _of_one(found: Comparison) -> str:
    (name,) = found.names
    gap, own = found.difference(name, CONTROL, METRIC), found.mean(name, METRIC)
    if gap is None or own is None:
        return "No verdict: no pair has a finite distance from dense."
    at = f"at density {_density(found, name):.3f}"
    start = f"{name} moves the video by a relative L2 of {own.mean:.3g} from dense {at}"
    if gap.interval is None:
        return f"{start}; {_too_few(gap.values.count)}."
    if gap.interval[0] <= 0:
        exact = "no farther from dense than a second exact implementation does"
        return f"{name} moves the video {exact}, {at} ({_interval(gap)})."
    above = f"above rounding by {gap.values.mean:.3g} ({_interval(gap)})"
    return f"{start}, {above}{_share(found, gap)}."


def _too_few(pairs: int) -> str:
    counted = "1 pair is" if pairs == 1 else f"{pairs} pairs are"
    return f"{counted} too few for a verdict ({FEWEST} are needed)"


def _interval(gap: Difference) -> str:
    low, high = gap.interval or (0.0, 0.0)
    if gap.differs:  # the sentence has said the direction
        low, high = sorted((abs(low), abs(high)))
    return f"{CONFIDENCE:.0%} interval {low:.3g} to {high:.3g}, {gap.values.count} pairs"


def _share(found: Comparison, gap: Difference) -> str:
    """The difference beside what another seed changes."""
    scale = found.mean(OTHER_SEED, METRIC)
    if scale is None or scale.mean == 0:
        return ""
    return f", {abs(gap.values.mean) / scale.mean:.2%} of what another seed changes"


def _at_densities(found: Comparison, one: str, other: str) -> str:
    """Who computes more: closeness that is bought with density is no merit."""
    a, b = _density(found, one), _density(found, other)
    if f"{a:.3f}" == f"{b:.3f}":
        return f"at the same density ({a:.3f})"
    return f"at {'higher' if a > b else 'lower'} density ({a:.3f} against {b:.3f})"


def _density(found: Comparison, name: str) -> float:
    mean = found.mean(name, "density")
    return math.nan if mean is None else mean.mean
