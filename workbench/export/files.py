"""Files of serving stacks as they are read: every error says which file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from workbench.config.checkpoint import SkipCalibration, read_calibration
from workbench.export.documents import read_json


@contextmanager
def errors_of(path: Path) -> Iterator[None]:
    """Errors of what a file holds, every line with its path."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is no text in UTF-8 ({error.reason})") from error
    except ValueError as error:
        lines = str(error).splitlines()
        raise ValueError("\n".join(f"{path}: {line}" for line in lines)) from error


def calibration_file(path: Path) -> tuple[dict[str, Any], SkipCalibration]:
    """The config.json of ``--calibration``, and the SkipSoftmax group that it has.

    Raises:
        FileNotFoundError: no such file. ValueError: not JSON, or no calibration in it.
    """
    hint = "give a calibrated component's config.json"
    if not path.is_file():
        raise FileNotFoundError(f"--calibration {path}: no such file; {hint}")
    with errors_of(path):
        data = read_json(path.read_text(encoding="utf-8"), "calibration", hint)
        found = read_calibration(checkpoint_config=data)
        if found is None:
            raise ValueError(f"no SkipSoftmax group; {hint}")
    return data, found
