"""Texts of the command line as values: samples, forms, targets."""

from __future__ import annotations

from dataclasses import dataclass

from blockattn import checks
from workbench.calibrate.samples import Samples
from workbench.calibrate.setting import Form
from workbench.calibrate.solve import target_density
from workbench.options import integers, three_sizes
from workbench.tune.settings import parse_numbers


@dataclass(frozen=True)
class Target:
    """What to solve for.

    Attributes:
        quantity: ``density`` or ``error``. value: of it.
    """

    quantity: str
    value: float

    @staticmethod
    def of(
        *, density: float | None = None, sparsity: float | None = None, error: float | None = None
    ) -> Target:
        """The one that is given; a sparsity becomes a density.

        Raises:
            TypeError, ValueError: none or several, or a value that is not allowed.
        """
        given = {"density": density, "sparsity": sparsity, "error": error}
        named = [name for name, value in given.items() if value is not None]
        if len(named) != 1:
            raise ValueError(
                f"target: {', '.join(named) or 'nothing'} given; give exactly one of "
                "--target-density, --target-sparsity and --target-error"
            )
        if error is not None:
            return Target("error", checks.finite_number("target_error", error))
        return Target("density", target_density(density, sparsity))


def parse_samples(
    labels: tuple[int | str, ...], seeds: str, grid: str, *, steps: int, guidance: float
) -> Samples:
    """Videos of a calibration."""
    size = three_sizes("--grid", grid)
    return Samples(labels, integers("--seeds", seeds), size, steps, guidance)


def parse_labels(text: str) -> tuple[int | str, ...]:
    """``disc,3`` -> ("disc", 3)."""
    parts = [part.strip() for part in text.split(",")]
    return tuple(int(part) if part.isdecimal() else part for part in parts)


def parse_form(
    by: str,
    edges: str | None,
    schedule: str,
    *,
    span: float = 0.0,
    at: float | None = None,
    dense_layers: str | None = None,
    cutoff: float | None = None,
) -> Form:
    """The form of a setting.

    Raises:
        TypeError, ValueError: a text that is no list of numbers, or as of :class:`Form`.
    """
    layers = parse_numbers("--dense-layers", dense_layers) or ()
    return Form(by, _numbers("--edges", edges), schedule, span, at, layers, cutoff)


def _numbers(name: str, text: str | None) -> tuple[float, ...]:
    if text is None:
        return ()
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise ValueError(f"{name} {text}: expected numbers such as 0.9,0.5") from error
