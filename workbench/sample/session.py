"""One `workbench sample` from options to run folder: weights, progress, table, files."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from tqdm import tqdm

from blockattn import checks
from workbench.config import VisualGenConfig, load_config
from workbench.devices import choose_device
from workbench.models import VideoDiT, load_model
from workbench.paths import BUNDLED_WEIGHTS, VSA_WEIGHTS, data_dir
from workbench.quality import Lpips, lpips_obstacle
from workbench.run_folder import check_new, default_folder
from workbench.sample import report as sample_report
from workbench.sample import text as sample_text
from workbench.sample.run import Tick, run, units
from workbench.sample.settings import SampleSettings
from workbench.sample.variants import Knobs, Variant, variants
from workbench.terminal import recording_console

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
WIDTH = 132  # of the printed tables where the terminal does not say


def sample_variants(
    knobs: Knobs,
    settings: SampleSettings,
    *,
    configs: Sequence[Path] = (),
    weights: Path | None = None,
    vsa_weights: Path | None = None,
    device: str = "auto",
    dtype: str = "float32",
    out: Path | None = None,
    command: Sequence[str] | None = None,
    console: Console | None = None,
) -> Path:
    """Samples, prints and writes; returns the run folder.

    Args:
        knobs, settings: which variants, and what to sample.
        configs: files in VisualGen's schema, a variant for each, named by the file.
        weights: of the base model; the bundled ones by default.
        vsa_weights: fine-tuned with VSA, with a gate; by default the bundled ones, if they are
            there and the base model is the bundled one.
        device: ``cpu``, ``cuda`` or ``auto``.
        dtype: of the model, ``float32`` or ``bfloat16``. In bfloat16, as served models run, exact
            implementations differ more, and so does the control.
        out: run folder, which must not exist; by default ``runs/<time>-sample``.
        command: for the provenance; by default the command line of this process.
        console: where to print.

    Raises:
        FileExistsError: ``out`` exists. FileNotFoundError, ValueError, TypeError,
        UnsupportedError: an option does not fit; nothing is sampled or written then.
    """
    check_new(out or default_folder("sample"))
    checks.one_of("dtype", dtype, tuple(DTYPES))
    files = _files(weights, vsa_weights)
    chosen = variants(knobs, named_configs(configs), fine_tuned="vsa" in files)
    used = {"base", *(variant.weights for variant in chosen)}
    if vsa_weights is not None and "vsa" not in used:
        raise ValueError(
            f"vsa_weights={str(vsa_weights)!r}: none of {', '.join(v.name for v in chosen)} uses "
            "them; choose the algorithm vsa, or leave them out"
        )
    files = {name: path for name, path in files.items() if name in used}
    place = {"device": choose_device(device), "dtype": DTYPES[dtype]}
    models = {name: _model(name, path, **place) for name, path in files.items()}
    score = None if lpips_obstacle() else Lpips()
    with _progress(chosen, settings) as tick:
        result = run(models, settings, chosen, lpips=score, tick=tick)
    result = replace(result, inputs={f"{name} weights": path for name, path in files.items()})
    screen = console or recording_console(WIDTH)
    sample_text.show(result, screen)
    folder = out or default_folder("sample")
    argv = list(sys.argv if command is None else command)
    sample_report.write(result, folder, command=argv, summary=screen.export_text(clear=False))
    screen.print(f"Run folder: {folder}", style="bold", soft_wrap=True, highlight=False)
    return folder


def named_configs(paths: Sequence[Path]) -> dict[str, VisualGenConfig]:
    """Configurations by the names of their files.

    Raises:
        ValueError: two files of one name. FileNotFoundError, ValueError: as of ``load_config``.
    """
    found: dict[str, VisualGenConfig] = {}
    for path in paths:
        if path.stem in found:
            raise ValueError(f"--config {path}: another file is named {path.stem}; rename one")
        found[path.stem] = load_config(path)
    return found


def _files(weights: Path | None, vsa_weights: Path | None) -> dict[str, Path]:
    """Files of the models by the names that variants use."""
    bundled = data_dir() / VSA_WEIGHTS
    found = {"base": weights or data_dir() / BUNDLED_WEIGHTS}
    if vsa_weights is not None:
        found["vsa"] = vsa_weights
    elif weights is None and bundled.is_file():
        found["vsa"] = bundled
    return found


def _model(name: str, path: Path, *, device: torch.device, dtype: torch.dtype) -> VideoDiT:
    model = load_model(path, device=device, dtype=dtype)
    if name == "vsa" and not model.config.gate:
        raise ValueError(
            f"vsa_weights={str(path)!r}: the model has no gate; give weights made by "
            "`workbench train --vsa SPARSITY`"
        )
    return model


@contextmanager
def _progress(chosen: Sequence[Variant], settings: SampleSettings) -> Iterator[Tick]:
    """A bar on a terminal's stderr, elsewhere a line for each variant. Yields the step's call."""
    total, watched, last = units(settings, chosen), sys.stderr.isatty(), ""
    with tqdm(total=total, unit="step", leave=False, disable=not watched) as bar:

        def tick(label: str) -> None:
            nonlocal last
            if label != last and not watched:
                print(f"sampling {label}", file=sys.stderr, flush=True)
            last = label
            bar.set_description(label, refresh=False)
            bar.update()

        yield tick
