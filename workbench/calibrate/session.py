"""One `workbench calibrate` or `workbench solve`, from options to files."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console

from blockattn.impl import registry
from workbench.calibrate import report, text
from workbench.calibrate.collect import LIMIT_BYTES, Calibration, calibrate, plan_for
from workbench.calibrate.error_solve import error_by_group, solve_error
from workbench.calibrate.file import open_calibration, save_calibration
from workbench.calibrate.fit import SPACES, fit_calibration, transfer
from workbench.calibrate.free_run import Delivery, deliver, solve_free_run
from workbench.calibrate.options import Target
from workbench.calibrate.probes import Probes, probe_setting
from workbench.calibrate.samples import Samples
from workbench.calibrate.setting import Form, Setting
from workbench.capture.recorder import model_checksum
from workbench.devices import choose_device
from workbench.models import VideoDiT, load_model
from workbench.paths import BUNDLED_WEIGHTS, data_dir
from workbench.provenance import provenance
from workbench.run_folder import check_new, default_folder, write_new
from workbench.terminal import recording_console

WIDTH = 110  # of the printed tables where the terminal does not say


def calibrate_file(
    out: Path,
    algorithm: str,
    samples: Samples,
    *,
    thresh_type: str = "diag",
    weights: Path | None = None,
    hold_out: Path | None = None,
    limit_bytes: int = LIMIT_BYTES,
    device: str = "auto",
    command: Sequence[str] | None = None,
    console: Console | None = None,
) -> Calibration:
    """Calibrates, prints and writes one file.

    Args:
        out: the calibration to make, which must not exist. For SkipSoftmax the fit in log space is
            written beside it, as ``.config.json``, for ``workbench export --calibration``.
        algorithm, samples, thresh_type: what to calibrate.
        weights: of the model; the bundled ones by default.
        hold_out: for SkipSoftmax, a calibration of another size on which the fit is tried.
        limit_bytes: of the table.
        device: ``cpu``, ``cuda`` or ``auto``.
        command, console: for the provenance, and where to print.

    Raises:
        FileExistsError, FileNotFoundError, ValueError, TypeError: nothing is sampled then.
    """
    formula = out.with_suffix(".config.json")
    for path in (out, formula):
        check_new(path)
    other = None if hold_out is None else open_calibration(hold_out)
    if other is not None and "skip_softmax" not in (algorithm, other.algorithm):
        raise ValueError(f"hold_out={str(hold_out)!r}: the fit is skip_softmax's; leave it out")
    screen = console or recording_console(WIDTH)
    model = load_model(weights, device=choose_device(device))
    plan = plan_for(model, algorithm, samples, thresh_type=thresh_type, limit_bytes=limit_bytes)
    screen.print(f"{plan}", soft_wrap=True, highlight=False)
    record = _record(weights, samples, sys.argv if command is None else command)
    record["model_sha256"] = model_checksum(model)
    made = calibrate(model, plan, record=record, tick=_say)
    save_calibration(made, out)
    screen.print(text.density_table(made))
    if algorithm == "skip_softmax":
        for line in fit_report(made, other) + write_formula(made, formula):
            screen.print(line, soft_wrap=True, highlight=False)
    screen.print(f"{out}: wrote {out.stat().st_size:,} bytes", soft_wrap=True, highlight=False)
    return made


def fit_report(made: Calibration, other: Calibration | None) -> list[str]:
    """The fit in both spaces; a calibration too small for one is still a calibration."""
    lines: list[str] = []
    try:
        for space in SPACES:
            fit = fit_calibration(made, space=space)
            lines += text.fit_lines(fit, None if other is None else transfer(fit, other))
    except ValueError as error:
        lines.append(f"no fit: {error}")
    return lines


def write_formula(made: Calibration, path: Path) -> list[str]:
    """Writes the fit in log space as servers read it; says so, or nothing where there is no fit."""
    try:
        fit = fit_calibration(made, space="log")
    except ValueError:
        return []  # the report has said why
    write_new(path, json.dumps(fit.checkpoint_config(), indent=2) + "\n")
    return [f"{path}: the fit, for workbench export --calibration"]


@dataclass(frozen=True)
class Solved:
    """A setting with everything that was measured about it.

    Attributes:
        setting, target: what runs, and what was asked for.
        predicted: of every group, on the calibration's own dense calls.
        delivered: the same quantity where it was measured: of the density, a free run of the
            calibration's videos; of the error, real calls on them.
        held_out: free runs of videos that the calibration has not seen.
        probes: real calls along the dense run of the first held-out video.
    """

    setting: Setting
    target: Target
    predicted: Sequence[float]
    delivered: Sequence[float]
    held_out: Delivery
    probes: Probes


def solve(
    model: VideoDiT,
    calibration: Calibration,
    target: Target,
    form: Form,
    held_out: Samples,
    *,
    impl: str = "auto",
) -> Solved:
    """Solves for the target and measures the setting on videos that the calibration has not seen.

    Raises:
        ValueError: the target is out of reach, or a held-out seed was calibrated on.
    """
    seen = sorted(set(held_out.seeds) & set(calibration.samples.seeds))
    if seen:
        raise ValueError(f"held_out has seeds {seen}: the calibration has seen them; take others")
    if target.quantity == "error":
        found = solve_error(model, calibration, target.value, form, impl=impl, tick=_say)
        setting, predicted, delivered = found.setting, found.predicted, found.delivered
    else:
        best = solve_free_run(model, calibration, target.value, form, impl=impl, tick=_say)
        setting, predicted = best.solution.setting, best.solution.predicted
        delivered = best.delivered[-1].by_group.tolist()
    runs = deliver(model, setting, held_out, impl=impl, tick=_say)
    first = replace(held_out, labels=held_out.labels[:1], seeds=held_out.seeds[:1])
    probes = probe_setting(model, setting, first, impl=impl, tick=_say)
    return Solved(setting, target, predicted, delivered, runs, probes)


def solve_file(
    path: Path,
    target: Target,
    form: Form,
    *,
    held_out: Sequence[int],
    weights: Path | None = None,
    impl: str = "auto",
    device: str = "auto",
    out: Path | None = None,
    command: Sequence[str] | None = None,
    console: Console | None = None,
) -> Path:
    """Solves, measures, prints and writes; returns the run folder.

    Args:
        path: the calibration.
        target, form: what to solve for, and which values there are.
        held_out: seeds to measure on.
        weights: the model that was calibrated; the bundled ones by default.
        impl, device: of the sparse calls, and of the model.
        out: run folder, which must not exist; by default ``runs/<time>-solve``.
        command, console: for the provenance, and where to print.

    Raises:
        FileExistsError, FileNotFoundError, ValueError, TypeError: nothing is written then.
    """
    check_new(out or default_folder("solve"))
    registry.check_name(impl)
    calibration = open_calibration(path)
    place = choose_device(device)
    model = load_model(weights, device=place)
    _check_model(model, calibration, path)
    fresh = replace(calibration.samples, seeds=tuple(held_out))
    solved = solve(model, calibration, target, form, fresh, impl=impl)
    screen = console or recording_console(WIDTH)
    _show(solved, screen)
    record = _record(weights, fresh, sys.argv if command is None else command, calibration=path)
    folder = out or default_folder("solve")
    report.write(
        solved.setting,
        solved.held_out,
        solved.probes,
        folder,
        summary=screen.export_text(clear=False),
        record={
            **record,
            "target": vars(target),
            "ran": {"device": str(place), "calls": dict(solved.held_out.calls)},
            "fallbacks": list(solved.held_out.fallbacks),
            "calibrated": calibration.record,
        },
    )
    screen.print(f"Run folder: {folder}", style="bold", soft_wrap=True, highlight=False)
    return folder


def _show(solved: Solved, screen: Console) -> None:
    samples, target = solved.held_out.samples, solved.target
    count = len(solved.setting.levels)
    columns: dict[str, Sequence[float]] = {
        "requested": [target.value] * count,
        "predicted": solved.predicted,
        "delivered": solved.delivered,
    }
    wanted: float | None = None
    if target.quantity == "density":
        columns["held out"] = solved.held_out.by_group.tolist()
        wanted = target.value
    else:
        layers = solved.held_out.density.shape[1]
        found = error_by_group(solved.probes, solved.setting, layers, samples)
        columns["held out"] = found.tolist()
    screen.print(
        text.solved_table(solved.setting, samples.times, columns, quantity=target.quantity)
    )
    lines = text.steps_lines(solved.setting.form, samples.times)
    lines += text.missed_lines(solved.delivered, target.quantity, target.value)
    lines += text.delivery_lines(solved.held_out, wanted)
    for line in (*lines, *text.ran_lines(solved.held_out)):
        screen.print(line, soft_wrap=True, highlight=False)
    screen.print(text.worst_table(solved.probes))
    screen.print(text.probe_line(solved.probes), soft_wrap=True, highlight=False)


def _check_model(model: VideoDiT, calibration: Calibration, path: Path) -> None:
    wanted = calibration.record.get("model_sha256")
    if wanted is not None and wanted != model_checksum(model):
        raise ValueError(
            f"calibration={str(path)!r}: was made with other weights; give the same --weights"
        )


def _record(
    weights: Path | None, samples: Samples, command: Sequence[str], **inputs: Path
) -> dict[str, object]:
    files = {"weights": weights or data_dir() / BUNDLED_WEIGHTS, **inputs}
    seeds = {f"noise {n}": seed for n, seed in enumerate(samples.seeds)}
    record = provenance(list(command), files, seeds=seeds)
    record["threads"] = torch.get_num_threads()
    return record


def _say(label: str) -> None:
    print(f"sampling {label}", file=sys.stderr, flush=True)
