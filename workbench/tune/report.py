"""The run folder of `workbench tune`: figures, results, configuration, provenance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from workbench.config import dump_config
from workbench.provenance import provenance
from workbench.run_folder import whole, write_provenance, write_results, write_summary
from workbench.tune.figures import write_figures
from workbench.tune.rows import Row
from workbench.tune.run import TuneResult

CONFIG = "config.yaml"

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
    with whole(folder) as part:
        write_figures(result, part)
        write_results(part, COLUMNS, (cells(result, row) for row in all_rows(result)))
        write_summary(part, summary, COLUMNS)
        write_provenance(part, _provenance(result, command))
        (part / CONFIG).write_text(config_text(result), encoding="utf-8")
    return folder


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
    value, estimated = record.pop("value"), record.pop("ratio_estimated")
    return {
        **record,
        "tau": value if tau else None,
        "threshold": None if tau else value,
        "threshold_log2": None if tau else math.log2(row.value),
        "threshold_scale_factor": None if tau else row.value * result.keys,
        "time_ratio_estimated": estimated,
        "time_ratio_measured": _ratio(row),
        "chosen": int(row.value == result.choice.value),
    }


def _ratio(row: Row) -> float | None:
    if row.sparse_ms is None or row.dense_ms is None:
        return None
    return row.sparse_ms / row.dense_ms


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
