"""What some targets count in and a configuration does not say: steps, keys, layers, calibration.

The configuration names a denoising time and a length-free factor, so that one file serves every
schedule and length. SGLang counts steps and vLLM-Omni takes the threshold itself: a conversion is
exact only for the schedule and the length that are served, which therefore have to be given.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from workbench.config.checkpoint import SkipCalibration
from workbench.export.outcome import NotExpressible


@dataclass(frozen=True)
class Deployment:
    """The served case; every part is optional until a target needs it.

    Attributes:
        times: denoising time of every step, falling, in [0, 1], 1 = noisiest.
        keys: keys of a self-attention call (Sk).
        layers: transformer blocks of the model.
        calibration: of the checkpoint, for targets that hold it themselves.

    Raises:
        ValueError: times that rise or leave [0, 1], or a count below 1.
    """

    times: tuple[float, ...] | None = None
    keys: int | None = None
    layers: int | None = None
    calibration: SkipCalibration | None = None

    def __post_init__(self) -> None:
        for name in ("keys", "layers"):
            count = getattr(self, name)
            if count is not None and (isinstance(count, bool) or count < 1):
                raise ValueError(f"{name}={count!r}: must be at least 1")
        times = self.times
        if times is None:
            return
        if not times or not all(0 <= time <= 1 for time in times):
            raise ValueError(f"times={times!r}: must be denoising times in [0, 1], one a step")
        for step, (before, after) in enumerate(pairwise(times), start=1):
            if after > before:
                raise ValueError(f"times[{step}]={after!r} is above {before!r}: times must fall")

    def dense_steps(self, cutoff: float | None, target: str) -> int:
        """Number of first steps at or above the cutoff; 0 for ``None``.

        Raises:
            NotExpressible: the times of the steps are not known.
        """
        if cutoff is None:
            return 0
        return sum(time >= cutoff for time in self._known(f"={cutoff!r}", target))

    def cutoff(self, steps: int, target: str) -> float | None:
        """The cutoff that keeps exactly the first steps dense: the time of the last of them.

        Raises:
            NotExpressible: the times are not known, are fewer, or do not tell two steps apart.
        """
        if steps == 0:
            return None
        times = self._known(f" for {steps} dense steps", target)
        field = f"{steps} dense steps"
        if steps > len(times):
            raise NotExpressible(
                target, field, f"the schedule has {len(times)} steps", "Give all of its times"
            )
        if steps < len(times) and times[steps] == times[steps - 1]:
            why = f"steps {steps - 1} and {steps} have the same time, so no cutoff parts them"
            raise NotExpressible(target, field, why, "Change the number of dense steps")
        return times[steps - 1]

    def notes(self, cutoff: float | None) -> list[str]:
        """What a cutoff became: the count is right for this schedule and for no other."""
        if cutoff is None or self.times is None:
            return []
        steps = sum(time >= cutoff for time in self.times)
        return [
            f"disabled_until_timestep={cutoff!r} became {steps} dense of {len(self.times)} steps: "
            "count again for another schedule"
        ]

    def _known(self, value: str, target: str) -> tuple[float, ...]:
        if self.times is None:
            raise NotExpressible(
                target,
                f"disabled_until_timestep{value}",
                "it counts dense steps, and how many lie above a time depends on the schedule",
                "Give the denoising time of every step (--times)",
            )
        return self.times


UNKNOWN = Deployment()
