"""The run folder of `workbench tune`: it appears whole or not at all, and replaces nothing."""

from __future__ import annotations

import csv
import json
import math
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from workbench.config import dump_config
from workbench.provenance import provenance
from workbench.tune.figures import write_figures
from workbench.tune.rows import Row
from workbench.tune.run import TuneResult

RESULTS, CONFIG, PROVENANCE, SUMMARY = (
    "results.csv",
    "config.yaml",
    "provenance.json",
    "summary.txt",
)

COLUMNS = {
    "layer": "layer of the model",
    "step": "sampler step, 0 = first",
    "time": "denoising time in [0, 1], 1 = noisiest",
    "batch": "sample of the batch",
    "head": "query head",
    "tau": "sol_attn: standard deviations above the mean score (empty otherwise)",
    "threshold": "skip_softmax: lambda, a ratio (empty otherwise)",
    "threshold_log2": "log2(lambda)",
    "threshold_scale_factor": "lambda * Sk, Sk = tokens of the key sequence",
    "density": "exact pairs / valid pairs by the one-pass curve",
    "density_delivered": "the same, counted in the real run",
    "density_alone": "sol_attn: pairs that pass the threshold, without band and sink",
    "relative_l2": "|sparse - dense| / |dense| of the head's output",
    "cosine": "cosine between the two outputs",
    "max_abs": "largest absolute difference, in units of the output",
    "time_ratio_estimated": "matrix-product work sparse / dense",
    "time_ratio_measured": "sparse_ms / dense_ms (empty when not measured)",
    "dense_ms": "median milliseconds of the dense call with all heads",
    "sparse_ms": "median milliseconds of the sparse call with all heads, routing included",
    "impl": "implementation that ran the sparse call",
    "chosen": "1 at the chosen value, else 0",
}


def default_folder(algorithm: str, now: datetime | None = None) -> Path:
    """``runs/<time>-<algorithm>`` in the current directory, with a number when it is taken."""
    stamp = (now or datetime.now()).strftime("%Y%m%d-%H%M%S")
    base = Path("runs") / f"{stamp}-{algorithm}"
    number = 1
    path = base
    while path.exists():
        number += 1
        path = base.with_name(f"{base.name}-{number}")
    return path


def check_new(folder: Path) -> Path:
    """Refuses a folder that exists or cannot be made, before any work.

    Raises:
        FileExistsError: it exists; nothing is ever overwritten.
        OSError: its place takes no new folder (tried, because permissions do not tell it all).
    """
    if folder.exists():
        raise FileExistsError(
            f"out={str(folder)!r}: exists already and a run overwrites nothing; give another --out"
        )
    place = next(path for path in folder.absolute().parents if path.exists())
    try:
        with tempfile.TemporaryDirectory(prefix=".workbench-", dir=place):
            pass
    except OSError as error:
        raise OSError(
            f"out={str(folder)!r}: nothing can be written in {place} ({error.strerror}); "
            "give --out a place where you can write"
        ) from error
    return folder


def write(result: TuneResult, folder: Path, *, command: Sequence[str], summary: str) -> Path:
    """Writes figures, results, configuration, summary and provenance.

    Args:
        result: what :func:`workbench.tune.run.run` returned.
        folder: a path that does not exist yet; its parents are made.
        command: the command line, for the provenance.
        summary: the text that was printed.

    Raises:
        FileExistsError: the folder exists.
    """
    with whole(check_new(folder)) as part:
        write_figures(result, part)
        _write_csv(result, part / RESULTS)
        (part / SUMMARY).write_text(f"{summary.rstrip()}\n\n{_columns_text()}", encoding="utf-8")
        record = json.dumps(_provenance(result, command), indent=2, ensure_ascii=False)
        (part / PROVENANCE).write_text(record + "\n", encoding="utf-8")
        (part / CONFIG).write_text(config_text(result), encoding="utf-8")
    return folder


@contextmanager
def whole(folder: Path) -> Iterator[Path]:
    """A hidden folder beside the target that takes its name when everything is written."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.partial")
    part.mkdir()
    try:
        yield part
        check_new(folder)  # another run may have finished meanwhile
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def config_text(result: TuneResult) -> str:
    """``config.yaml``: how it was chosen in comments, then the configuration."""
    line = result.choice.line
    comments = [
        f"{result.method.algorithm}, chosen by workbench tune: {result.choice.why}.",
        f"On {result.capture.title}: density {line.density:.4f}, relative L2 error "
        f"{line.error:.4f} (mean over heads, layers and steps), {result.keys} tokens.",
    ]
    return "".join(f"# {text}\n" for text in comments) + dump_config(result.config())


def all_rows(result: TuneResult) -> list[Row]:
    """Rows of every value, those of the chosen one from the run that verified it."""
    others = [row for row in result.rows if row.value != result.choice.value]
    return sorted(
        [*others, *result.choice.rows], key=lambda r: (r.layer, r.step, r.batch, r.head, r.value)
    )


def cells(result: TuneResult, row: Row) -> dict[str, object]:
    """One line of ``results.csv``; the keys are those of :data:`COLUMNS`."""
    tau = result.method.knob == "tau"
    record: dict[str, object] = asdict(row)
    value = record.pop("value")
    return {
        **record,
        "tau": value if tau else None,
        "threshold": None if tau else value,
        "threshold_log2": None if tau else math.log2(row.value),
        "threshold_scale_factor": None if tau else row.value * result.keys,
        "time_ratio_estimated": record.pop("ratio_estimated"),
        "time_ratio_measured": _ratio(row),
        "chosen": int(row.value == result.choice.value),
    }


def _ratio(row: Row) -> float | None:
    if row.sparse_ms is None or row.dense_ms is None:
        return None
    return row.sparse_ms / row.dense_ms


def _write_csv(result: TuneResult, path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(COLUMNS), extrasaction="ignore")
        writer.writeheader()
        for row in all_rows(result):
            writer.writerow(cells(result, row))


def _columns_text() -> str:
    width = max(map(len, COLUMNS))
    lines = [f"{name:<{width}}  {text}" for name, text in COLUMNS.items()]
    return "\n".join([f"Columns of {RESULTS}", *lines, ""])


def _provenance(result: TuneResult, command: Sequence[str]) -> dict[str, object]:
    capture, choice = result.capture, result.choice
    return {
        **provenance(command, {"capture": capture.path}),
        "capture": {
            "title": capture.title,
            "source": capture.source,
            "tensors_sha256": capture.checksum,
            "grid": list(capture.grid.shape),
            "entries": sorted({(row.layer, row.step) for row in result.rows}),
        },
        "settings": asdict(result.settings),
        "values": list(result.values),
        "chosen": {"value": choice.value, "why": choice.why, **asdict(choice.line)},
        "ran": {"device": result.device, "dtype": result.dtype, "calls": dict(result.ran.calls)},
        "not_run": result.ran.reasons,
        "warnings": result.warnings,
    }
