"""One profile or two on the same prompts and seeds, beside dense attention and two controls.

    dense_control   dense by a second exact implementation: the floor, rounding alone
    other_seed      dense attention from another seed: the scale, another video altogether

All distances are to the dense video of the same prompt and seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from workbench.config import AttentionConfig, SolAttnConfig
from workbench.profiles.profile import Profile
from workbench.profiles.video import Run, VideoModel, distance
from workbench.quality import Statistics, over_seeds
from workbench.sample.run import Quality, flags_of
from workbench.sweep.statistics import FEWEST, bootstrap

DENSE, CONTROL, OTHER_SEED = "dense", "dense_control", "other_seed"
# Every block exact through the sparse path, as tau is below every score: dense attention in another
# order of sums.
EXACT = Profile(
    CONTROL, "control", AttentionConfig(sparse_attention_config=SolAttnConfig(tau=-1e6))
)
Tick = Callable[[str], None]


@dataclass(frozen=True)
class Pair:
    """One prompt and seed.

    Attributes:
        runs: by name; the videos of the first pair only, of the others what ran.
        distances: of every name but ``dense`` from the dense video.
        flags: what makes a run worthless or misleading, by name.
    """

    prompt: str
    seed: int
    runs: Mapping[str, Run]
    distances: Mapping[str, Quality]
    flags: Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Difference:
    """A metric of one name minus that of another, pair by pair.

    Attributes:
        values: differences, over pairs where both are finite.
        interval: 95 % bootstrap interval of the mean; ``None`` below three pairs.
    """

    values: Statistics
    interval: tuple[float, float] | None

    @property
    def differs(self) -> bool:
        """Whether the interval leaves out zero; also ``False`` when there is no interval."""
        return self.interval is not None and not self.interval[0] <= 0 <= self.interval[1]


@dataclass(frozen=True)
class Comparison:
    """Everything that was sampled.

    Attributes:
        title: of the model. profiles: one or two. pairs: every prompt with every seed.
    """

    title: str
    profiles: Sequence[Profile]
    pairs: Sequence[Pair]

    @property
    def names(self) -> list[str]:
        """Of the profiles."""
        return [profile.name for profile in self.profiles]

    def values(self, name: str, metric: str) -> list[float]:
        """A metric of every pair: ``density``, or an attribute of :class:`Quality`."""
        if metric == "density":
            return [pair.runs[name].density for pair in self.pairs]
        return [getattr(pair.distances[name], metric) for pair in self.pairs]

    def mean(self, name: str, metric: str) -> Statistics | None:
        """Over the finite values; ``None`` without any."""
        finite = [value for value in self.values(name, metric) if math.isfinite(value)]
        return over_seeds(finite) if finite else None

    def difference(self, name: str, other: str, metric: str) -> Difference | None:
        """Paired by prompt and seed, so that what differs between them drops out."""
        both = zip(self.values(name, metric), self.values(other, metric), strict=True)
        gaps = [a - b for a, b in both if math.isfinite(a) and math.isfinite(b)]
        if not gaps:
            return None
        return Difference(over_seeds(gaps), bootstrap(gaps) if len(gaps) >= FEWEST else None)


def compare(
    model: VideoModel,
    profiles: Sequence[Profile],
    prompts: Sequence[str],
    seeds: Sequence[int],
    *,
    tick: Tick = lambda label: None,
) -> Comparison:
    """Samples every prompt and seed dense, dense again in another way, and with each profile.

    Args:
        model: see :class:`workbench.profiles.video.VideoModel`.
        profiles: one, or two of different names, read for this model.
        prompts, seeds: at least one of each, without repeats. With a single seed, the next one is
            sampled for the scale.
        tick: called with a label before each video; there are :func:`videos` of them.

    Raises:
        ValueError, TypeError, UnsupportedError: an argument does not fit; nothing is sampled then.
        ValueError: a dense video is not finite.
    """
    _check_names(profiles)
    model.check(prompts, seeds)
    for profile in (EXACT, *profiles):  # what can be refused is refused before the work
        model.policies(profile)
    pairs: list[Pair] = []
    for prompt in prompts:
        dense = _dense_runs(model, prompt, seeds, tick)
        for seed in seeds:
            runs: dict[str, Run] = {DENSE: dense[seed]}
            for profile in (EXACT, *profiles):
                tick(f"{profile.name}: {prompt}, seed {seed}")
                runs[profile.name] = model.sample(prompt, seed, profile)
            runs[OTHER_SEED] = dense[_other(seed, seeds)]
            pairs.append(_pair(prompt, seed, runs, profiles, keep=not pairs))
    return Comparison(model.title, tuple(profiles), tuple(pairs))


def videos(profiles: Sequence[Profile], prompts: Sequence[str], seeds: Sequence[int]) -> int:
    """Videos that :func:`compare` samples."""
    dense = max(2, len(seeds))
    return len(prompts) * (dense + len(seeds) * (1 + len(profiles)))


def flags(name: str, run: Run, dense: Run, *, sparse: bool) -> list[str]:
    """What makes a run worthless or misleading, in words; empty when there is nothing."""
    found = flags_of(run.video, run.records, dense.video, sparse=sparse)
    served = [record.density for record in run.records if record.kind == "sparse"]
    if name == CONTROL and any(density != 1 for density in served):
        found.append("NOT EXACT: the control left blocks out, so the floor is too high")
    return [*found, *run.warnings]


def _check_names(profiles: Sequence[Profile]) -> None:
    names = [profile.name for profile in profiles]
    if not 1 <= len(names) <= 2:
        raise ValueError(f"profiles has {len(names)}: must be one, or two to compare")
    taken = [name for name in names if name in (DENSE, CONTROL, OTHER_SEED)]
    if taken or len(set(names)) < len(names):
        raise ValueError(
            f"profiles are named {', '.join(names)}: must be two names, none of {DENSE}, {CONTROL} "
            f"and {OTHER_SEED}; rename the file"
        )


def _dense_runs(model: VideoModel, prompt: str, seeds: Sequence[int], tick: Tick) -> dict[int, Run]:
    wanted = list(seeds) if len(seeds) > 1 else [seeds[0], _other(seeds[0], seeds)]
    found: dict[int, Run] = {}
    for seed in wanted:
        tick(f"{DENSE}: {prompt}, seed {seed}")
        found[seed] = model.sample(prompt, seed, None)
        if not bool(torch.isfinite(found[seed].video).all()):
            raise ValueError(
                f"dense: {prompt!r}, seed {seed}: the model's own video holds NaN or infinite "
                "values, so nothing can be compared with it; try another dtype, size or checkpoint"
            )
    return found


def _other(seed: int, seeds: Sequence[int]) -> int:
    """The seed that a seed is compared with for the scale: the next one of the list."""
    if len(seeds) == 1:
        return seed + 1 if seed < 2**63 - 1 else seed - 1
    return seeds[(list(seeds).index(seed) + 1) % len(seeds)]


def _pair(
    prompt: str, seed: int, runs: Mapping[str, Run], profiles: Sequence[Profile], *, keep: bool
) -> Pair:
    dense = runs[DENSE]
    sparse = {profile.name: profile.sparse for profile in profiles}
    others = {name: run for name, run in runs.items() if name != DENSE}
    return Pair(
        prompt,
        seed,
        runs if keep else {name: replace(run, video=NO_VIDEO) for name, run in runs.items()},
        {name: distance(run, dense) for name, run in others.items()},
        {
            name: flags(name, run, dense, sparse=sparse.get(name, False))
            for name, run in others.items()
            if name != OTHER_SEED
        },
    )


NO_VIDEO = torch.empty(0)
