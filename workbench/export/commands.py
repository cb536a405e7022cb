"""What ``workbench export`` and ``workbench import`` do: files in, text out, notes beside it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from workbench.config import VisualGenConfig, dump_config, load_config
from workbench.export.deployment import Deployment
from workbench.export.files import calibration_file, errors_of
from workbench.export.outcome import NotExpressible
from workbench.export.targets import TARGETS, export_all, export_config, import_config
from workbench.run_folder import write_new
from workbench.views.table import Table


def export_file(config: Path, target: str | None, place: Deployment, out: Path | None) -> None:
    """Writes a configuration for a target, to a file or the terminal; without one, says which can.

    Raises:
        FileExistsError: the output exists. ValueError: not a configuration, or not expressible.
    """
    source = load_config(config)
    if target is None and out is not None:
        raise ValueError(f"--out {out}: a file has one format; name it with --to")
    if target is None:
        sys.stdout.write(f"{targets_table(source, place)!r}\n")
        return
    made = export_config(source, target, place)
    _deliver(made.text, out, made.notes)


def import_file(source: Path, target: str, place: Deployment, out: Path | None) -> None:
    """Writes the configuration that a target's file means, to a file or the terminal.

    Raises:
        FileNotFoundError: no such file. FileExistsError: the output exists.
        ValueError: not the target's format, or a setting that has no place in a configuration.
    """
    if not source.is_file():
        raise FileNotFoundError(f"{source}: no such file; give the path of a {target} file")
    with errors_of(source):
        made = import_config(source.read_text(encoding="utf-8"), target, place)
    _deliver(dump_config(made.config), out, made.notes)


def targets_table(config: VisualGenConfig, place: Deployment) -> Table:
    """A row for each target: whether it can say the configuration, and why not."""
    rows = [
        (name, TARGETS[name].title, "no", f"{made.field}: {made.why}. {made.fix}")
        if isinstance(made, NotExpressible)
        else (name, TARGETS[name].title, "yes", "; ".join(made.notes))
        for name, made in export_all(config, place).items()
    ]
    return Table(("target", "of", "can say it", "notes, or why not"), rows)


def deployment(
    times: str | None, keys: int | None, layers: int | None, calibration: Path | None
) -> Deployment:
    """The deployment that options describe.

    Args:
        times: denoising times between commas.
        keys, layers: as of :class:`Deployment`.
        calibration: a component's config.json with a SkipSoftmax group.

    Raises:
        ValueError: text that is no number, or a file without a calibration.
    """
    return Deployment(
        times=None if times is None else tuple(_time(text) for text in times.split(",")),
        keys=keys,
        layers=layers,
        calibration=None if calibration is None else calibration_file(calibration)[1],
    )


def _time(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ValueError(f"--times: {text.strip()!r} is no number; write 1.0,0.97,0.9") from error


def _deliver(text: str, out: Path | None, notes: Sequence[str]) -> None:
    if out is None:
        sys.stdout.write(text)
    else:
        write_new(out, text)
    for note in notes:
        sys.stderr.write(f"note: {note}\n")
