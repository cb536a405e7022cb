"""One `workbench apply` from options to run folder: model, files, progress, tables."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from tqdm import tqdm

from workbench.export.files import calibration_file
from workbench.profiles import report, text
from workbench.profiles.compare import Tick, compare, videos
from workbench.profiles.models import Choice
from workbench.profiles.profile import Profile, read_file
from workbench.profiles.video import VideoModel
from workbench.provenance import provenance
from workbench.run_folder import check_new, default_folder
from workbench.sample.settings import check_videos
from workbench.terminal import recording_console

WIDTH = 132  # of the printed tables where the terminal does not say


def apply_files(
    choice: Choice,
    files: Sequence[Path],
    prompts: Sequence[str] | None,
    seeds: Sequence[int],
    *,
    format: str | None = None,
    calibration: Path | None = None,
    check: bool = False,
    out: Path | None = None,
    command: Sequence[str] | None = None,
    console: Console | None = None,
) -> Path | None:
    """Reads one profile or two, says what was understood, runs and compares.

    Args:
        choice: the model that they are applied to.
        files: written by ``workbench export``.
        prompts, seeds: the videos: every prompt with every seed. No prompts: the model's own.
        format: of the files; ``None`` recognises each.
        calibration: config.json with a SkipSoftmax group, instead of the model's own.
        check: stop after saying what was understood.
        out: run folder, which must not exist; by default ``runs/<time>-apply``.
        command: for the provenance; by default the command line of this process.
        console: where to print.

    Returns:
        The run folder; ``None`` with ``check``.

    Raises:
        FileExistsError, FileNotFoundError, ValueError, TypeError, UnsupportedError: a file or an
            option does not fit; nothing is sampled or written then.
    """
    _check_files(files)
    if not check:
        check_new(out or default_folder("apply"))
    texts = choice.prompts(prompts)
    check_videos(texts, seeds)
    inputs = _inputs(files, calibration, choice)  # before a model takes minutes to load
    group = None if calibration is None else calibration_file(calibration)[0]
    model = choice.open()
    model.check(texts, seeds)
    profiles = read_profiles(model, files, format=format, calibration=group)
    if group is not None and all(profile.calibration is not group for profile in profiles):
        raise ValueError(
            f"--calibration {calibration}: no profile looks at it; it is for skip_softmax files "
            "that hold no formula themselves. Leave it out"
        )
    screen = console or recording_console(WIDTH)
    text.show_understood(profiles, model, screen)
    if check:
        return None
    with _progress(videos(profiles, texts, seeds)) as tick:
        found = compare(model, profiles, texts, seeds, tick=tick)
    text.show(found, screen)
    folder = out or default_folder("apply")
    record = {
        **provenance(
            list(sys.argv if command is None else command),
            inputs,
            seeds={f"noise {n}": seed for n, seed in enumerate(seeds)},
        ),
        "model": model.title,
        "prompts": list(texts),
        "warnings": text.alarms(found),
    }
    copies = dict(zip(_names(files), files))
    report.write(
        found, folder, files=copies, record=record, summary=screen.export_text(clear=False)
    )
    screen.print(f"Run folder: {folder}", style="bold", soft_wrap=True, highlight=False)
    return folder


def _check_files(files: Sequence[Path]) -> None:
    """Refuses files that a table could not tell apart, and a third one, before a model loads."""
    if not 1 <= len(files) <= 2:
        raise ValueError(f"files has {len(files)}: must be one, or two to compare")
    if len({path.resolve() for path in files}) < len(files):
        raise ValueError(f"{files[0]} is given twice; give another file beside it, or it alone")
    names = _names(files)
    if len(set(names)) < len(names):
        raise ValueError(
            f"{' and '.join(map(str, files))}: both would be called {names[0]}; rename one of them"
        )


def _inputs(files: Sequence[Path], calibration: Path | None, choice: Choice) -> dict[str, Path]:
    """Every file that goes in, by role.

    Raises:
        FileNotFoundError: one of them is not there.
    """
    found = {f"profile {name}": path for name, path in zip(_names(files), files)}
    if calibration is not None:
        found["calibration"] = calibration
    found |= choice.inputs
    for role, path in found.items():
        if not path.is_file():
            raise FileNotFoundError(f"{role}: {path}: no such file")
    return found


def read_profiles(
    model: VideoModel,
    files: Sequence[Path],
    *,
    format: str | None = None,
    calibration: Mapping[str, Any] | None = None,
) -> list[Profile]:
    """The files as profiles of the model.

    Raises:
        FileNotFoundError, ValueError: as of ``read_file``.
    """
    return [
        replace(read_file(path, model.place, format=format, calibration=calibration), name=name)
        for name, path in zip(_names(files), files)
    ]


def _names(files: Sequence[Path]) -> list[str]:
    """Stems of the files; with their folders where two are equal, as config.yaml of two runs."""
    stems = [path.stem for path in files]
    if len(set(stems)) == len(stems):
        return stems
    return [f"{path.absolute().parent.name}-{path.stem}" for path in files]


@contextmanager
def _progress(total: int) -> Iterator[Tick]:
    """A bar on a terminal's stderr, elsewhere a line for each video."""
    watched = sys.stderr.isatty()
    with tqdm(total=total, unit="video", leave=False, disable=not watched) as bar:

        def tick(label: str) -> None:
            if not watched:
                print(f"sampling {label}", file=sys.stderr, flush=True)
            bar.set_description(label, refresh=False)
            bar.update()

        yield tick
