"""What `workbench tune` tries and aims for, checked before any work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from blockattn import checks
from blockattn.impl import registry
from blockattn.sol import THRESHOLD_TYPES
from workbench.config import faults, parse_layers
from workbench.tune.methods import Method, SkipSoftmax, SolAttn

ALGORITHMS = ("sol_attn", "skip_softmax")
MAX_VALUES = 1000  # in one range; more is a typing error


def parse_values(name: str, text: str) -> tuple[float, ...]:
    """Numbers from ``low:high:count`` (both ends included) or from a list such as ``0,0.5,1``.

    Raises:
        ValueError: something that is no finite number, or a count outside 1..1000.
    """
    parts = text.split(":")
    if len(parts) == 1:
        return tuple(_number(name, text, part) for part in text.split(","))
    if len(parts) != 3 or not parts[2].strip().isdecimal():
        raise ValueError(f"{name} {text!r}: expected low:high:count such as 0:3:9, or 0,0.5,1")
    low, high = (_number(name, text, part) for part in parts[:2])
    count = checks.integer(f"{name} {text!r}: count", int(parts[2]), minimum=1, maximum=MAX_VALUES)
    if count == 1 and low != high:
        raise ValueError(f"{name} {text!r}: one value cannot span {low:g} to {high:g}")
    steps = max(1, count - 1)
    return tuple(low + (high - low) * n / steps for n in range(count))


def parse_numbers(name: str, text: str | None) -> tuple[int, ...] | None:
    """Layers or steps from text such as ``0,2-4``; ``None`` stays."""
    if text is None:
        return None
    try:
        return parse_layers(text)
    except ValueError as error:
        raise ValueError(f"{name} {text!r}: {error}") from error


def knob_values(
    algorithm: str, taus: str | None, thresholds: str | None
) -> tuple[float, ...] | None:
    """Values of the algorithm's own knob; the other algorithm's is refused, not ignored."""
    checks.one_of("algorithm", algorithm, ALGORITHMS)
    own, other = ("taus", taus), ("thresholds", thresholds)
    if algorithm == "skip_softmax":
        own, other = other, own
    if other[1] is not None:
        raise ValueError(
            f"--{other[0]} {other[1]}: {algorithm} has no such setting; use --{own[0]}"
        )
    return None if own[1] is None else parse_values(f"--{own[0]}", own[1])


def _number(name: str, text: str, part: str) -> float:
    try:
        return checks.finite_number(f"{name} {text!r}", float(part))
    except ValueError as error:
        raise ValueError(f"{name} {text!r}: {part.strip()!r} is not a finite number") from error


@dataclass(frozen=True)
class TuneSettings:
    """What to try and what to aim for.

    Attributes:
        algorithm: ``sol_attn`` or ``skip_softmax``.
        values: taus (standard deviations) or thresholds (lambda in (0, 1]); ``None`` takes nine.
        thresh_type, sink_tokens: Sol-Attn routing, as for :func:`blockattn.sol_scores`.
        target_density: choose the value with this mean density; not with ``target_error``.
        target_error: choose the sparsest value whose mean relative L2 error stays at or below it.
        layers, steps: take these of the capture; ``None`` takes all.
        dense_layers, disabled_until_timestep: what the server will run dense. It goes into the
            exported configuration, and such entries of the capture are left out here.
        impl, device: implementation and device; ``auto`` takes the best that is there.
        repeats: interleaved timings of each setting; 0 measures no time.

    Raises:
        TypeError, ValueError: a value that is not allowed, or one that the algorithm would ignore.
    """

    algorithm: str = "sol_attn"
    values: tuple[float, ...] | None = None
    thresh_type: str | None = None
    sink_tokens: int = 0
    target_density: float | None = None
    target_error: float | None = None
    layers: tuple[int, ...] | None = None
    steps: tuple[int, ...] | None = None
    dense_layers: tuple[int, ...] | None = None
    disabled_until_timestep: float | None = None
    impl: str = "auto"
    device: str = "auto"
    repeats: int = 3

    def __post_init__(self) -> None:
        checks.one_of("algorithm", self.algorithm, ALGORITHMS)
        checks.one_of("impl", self.impl, ("auto", *registry.names()))
        checks.integer("repeats", self.repeats)
        checks.integer("sink_tokens", self.sink_tokens)
        if self.thresh_type is not None:
            checks.one_of("thresh_type", self.thresh_type, THRESHOLD_TYPES)
        self._check_values()
        self._check_targets()
        if self.algorithm != "sol_attn":
            self._refuse_ignored()
        self._check_export()

    def _check_export(self) -> None:
        """What the configuration would refuse at the end is refused now."""
        try:
            self.method().config(0.5, 1, **self.serving())
        except ValidationError as error:
            raise ValueError("; ".join(faults(error))) from error

    def _check_values(self) -> None:
        if self.values is None:
            return
        if not self.values:
            raise ValueError(f"{self.method().knob}: no value given; give one or more")
        for value in self.values:
            checks.finite_number(self.method().knob, value)
            if self.algorithm == "skip_softmax" and not 0 < value <= 1:
                raise ValueError(
                    f"threshold={value:g}: lambda must be in (0, 1]; above 1 a dropped tile "
                    "may hold a row's largest score"
                )
        object.__setattr__(self, "values", tuple(sorted(set(self.values))))

    def _check_targets(self) -> None:
        if self.target_density is not None and self.target_error is not None:
            raise ValueError(
                f"target_density={self.target_density} and target_error={self.target_error}: "
                "one of them decides; give one"
            )
        if self.target_density is not None:
            number = checks.finite_number("target_density", self.target_density)
            if not 0 < number <= 1:
                raise ValueError(f"target_density={number:g}: must be in (0, 1]")
        if self.target_error is not None:
            checks.finite_number("target_error", self.target_error, minimum=0.0)

    def _refuse_ignored(self) -> None:
        for name, given in (
            ("thresh_type", self.thresh_type),
            ("sink_tokens", self.sink_tokens or None),
            ("dense_layers", self.dense_layers),
        ):
            if given is not None:
                raise ValueError(f"{name}={given!r}: {self.algorithm} has no such setting; drop it")

    def method(self) -> Method:
        if self.algorithm == "skip_softmax":
            return SkipSoftmax()
        return SolAttn(self.thresh_type or "diag", self.sink_tokens)

    def serving(self) -> dict[str, Any]:
        """Settings that only the server needs."""
        return {
            "dense_layers": self.dense_layers,
            "disabled_until_timestep": self.disabled_until_timestep,
        }
