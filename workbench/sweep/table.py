"""The results of a sweep as plain values: what gates, fronts and figures are made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from workbench.sweep.metrics import Metric

State = Literal["pending", "running", "done", "failed"]


@dataclass(frozen=True)
class SweepCase:
    """One setting with one seed and one prompt.

    Attributes:
        key: hash of everything that defines the case.
        setting: name of what is compared; equal for all seeds and prompts, unique otherwise.
        attention: fields of its configuration, ``algorithm`` first, in one flat mapping; empty for
            the control.
        sampling: fields of the sampler: grid, steps, guidance, weights and so on.
        seed, prompt: of the noise; class of the video.
        control: dense against dense by a second exact implementation: the floor under a verdict.
        state: only a ``done`` case has metrics.
        reason: why it failed.
        metrics: by name. NaN of a video that is not finite, inf for the PSNR of equal videos; what
            could not be measured is absent.
        ran: algorithms and implementations that ran, such as ``sol_attn: eager``.
        fallbacks: why faster implementations did not run.
        emulated: number formats that no matrix unit there takes.
        flags: what makes the case worthless or misleading.
        provenance: id of the environment it ran in.
    """

    key: str
    setting: str
    attention: Mapping[str, Any]
    sampling: Mapping[str, Any]
    seed: int
    prompt: str
    control: bool
    state: State
    reason: str | None
    metrics: Mapping[str, float]
    ran: tuple[str, ...] = ()
    fallbacks: tuple[str, ...] = ()
    emulated: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    provenance: str | None = None


@dataclass(frozen=True)
class SweepTable:
    """All cases of a sweep in the order of its plan.

    Attributes:
        name: of the sweep.
        metrics: what each name of :attr:`SweepCase.metrics` means, its unit and direction.
    """

    name: str
    cases: tuple[SweepCase, ...]
    metrics: Mapping[str, Metric]

    @property
    def done(self) -> tuple[SweepCase, ...]:
        """Cases with results, controls included."""
        return tuple(case for case in self.cases if case.state == "done")

    @property
    def settings(self) -> tuple[str, ...]:
        """Names of what is compared, in order, controls included."""
        return tuple(dict.fromkeys(case.setting for case in self.cases))

    def of(self, setting: str) -> tuple[SweepCase, ...]:
        """The cases of a setting, one for each seed and prompt.

        Raises:
            KeyError: no setting of that name.
        """
        found = tuple(case for case in self.cases if case.setting == setting)
        if not found:
            raise KeyError(f"setting={setting!r}: must be one of {', '.join(self.settings)}")
        return found

    def control_of(self, case: SweepCase) -> SweepCase:
        """The control with the seed, prompt and sampler of a case."""
        same = (case.seed, case.prompt, case.sampling)
        return next(
            other
            for other in self.cases
            if other.control and (other.seed, other.prompt, other.sampling) == same
        )


def load(path: str | Path) -> SweepTable:
    """Reads the database of a sweep, also while it runs.

    Raises:
        FileNotFoundError: there is none. ValueError: the file is no database of a sweep.
    """
    from workbench.sweep.store import Store

    with Store.open(Path(path)) as store:
        return store.table()
