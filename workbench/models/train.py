"""Train the tiny video diffusion transformer on procedurally generated video.

    python -m workbench.models.train --out run --minutes 9

Needs torch, numpy and safetensors alone. Writes into the output folder, every minute and at the
end: `tiny_video_dit.safetensors` (moving average of the weights), `checkpoint.pt` (to resume),
`training.json` (settings, loss curve), and at the end `contact_sheet.png`.

    python -m workbench.models.train --out run --minutes 2 --vsa 0.875 --start-from WEIGHTS

fine-tunes dense weights with video sparse attention and its gate, which starts shut. The weights
are then `tiny_video_dit_vsa.safetensors`; the contact sheet is sampled with the sparse attention.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import torch
from torch import Tensor

from .contact_sheet import contact_sheet, write_png
from .dit import AttentionFn, VideoDiT, dense_attention
from .moving_shapes import CLASS_NAMES
from .sampler import sample
from .trainer import TrainConfig, Trainer

PER_CLASS = 2  # videos of each class on the contact sheet


def train(
    config: TrainConfig,
    out: Path,
    *,
    device: torch.device | str | None = None,
    resume: Path | None = None,
    start_from: Path | None = None,
    sheet: bool = True,
) -> dict[str, object]:
    """Run the training, print progress, write the files named at the top of this module.

    Args:
        config: settings.
        out: output folder, made when missing.
        device: CUDA when there is one, else the CPU, when None.
        resume: a `checkpoint.pt` to continue from.
        start_from: weights to start from instead of random ones (a new schedule, a new optimiser).
        sheet: sample every class at the end and write the contact sheet.

    Returns:
        The record that the weights file carries.
    """
    out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(config, device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if start_from is not None:
        trainer.start_from(start_from)
    if resume is not None:
        trainer.resume(resume)
    saved = time.monotonic()
    for line in _run(trainer):
        print(line, flush=True)
        if time.monotonic() - saved > config.save_every:
            trainer.save(out)
            saved = time.monotonic()
    trainer.save(out)
    if sheet:
        page, count = out / "contact_sheet.png", PER_CLASS * config.model.classes
        print(f"sampling {count} videos for the sheet {page} ...", flush=True)
        write_sheet(trainer.average, page, attention=trainer.attention)
    return trainer.record()


def write_sheet(
    model: VideoDiT,
    path: Path,
    *,
    seed: int = 0,
    per_class: int = PER_CLASS,
    attention: AttentionFn = dense_attention,
) -> None:
    """Sample every class and write a contact sheet: the class's outline, then 8 frames a row."""
    labels = [c for c in range(model.config.classes) for _ in range(per_class)]
    video = sample(model.eval(), labels=labels, seed=seed, attention=attention)
    write_png(path, contact_sheet(video, labels=labels, zoom=1))


def _run(trainer: Trainer) -> Iterator[str]:
    """Train to the end of the schedule; yields a progress line every `log_every` steps."""
    losses: list[Tensor] = []
    mark, videos = time.monotonic(), 0
    start = mark - trainer.seconds
    while trainer.progress() < 1.0:
        video, label = trainer.batch()
        losses.append(trainer.train_step(video, label))
        videos += video.shape[0]
        full = len(losses) == trainer.config.log_every
        if full:
            # The only host sync of the loop: it also makes the clock tell the truth.
            trainer.curve.append((trainer.step, torch.stack(losses).mean().item()))
        trainer.seconds = time.monotonic() - start
        if full:
            rate = videos / (time.monotonic() - mark)
            yield _progress_line(trainer, rate)
            losses, mark, videos = [], time.monotonic(), 0
    if losses:
        trainer.curve.append((trainer.step, torch.stack(losses).mean().item()))


def _progress_line(trainer: Trainer, rate: float) -> str:
    step, loss = trainer.curve[-1]
    return (
        f"step {step:6d}  loss {loss:.4f}  lr {trainer.learning_rate():.2e}  "
        f"{rate:7.1f} videos/s  {trainer.seconds:6.1f} s  {100 * trainer.progress():5.1f} %"
    )


def main(arguments: list[str] | None = None, *, prog: str | None = None) -> None:
    """Command line of the training; `prog` is what its help calls it."""
    defaults = TrainConfig()
    parser = argparse.ArgumentParser(prog=prog, description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--out", type=Path, required=True, help="output folder")

    def number(name: str, default: float, text: str) -> None:
        add(name, type=type(default), default=default, help=f"{text} [default: {default}]")

    number("--steps", defaults.steps, "steps of the training")
    number("--batch", defaults.batch, "videos a step at 2,048 tokens")
    number("--learning-rate", defaults.learning_rate, "the highest of the schedule")
    number("--warmup", defaults.warmup, "steps in which the learning rate rises")
    number("--time-shift", defaults.time_shift, "odds of the median training time")
    number("--time-spread", defaults.time_spread, "deviation of the time's logit")
    number("--depth", defaults.model.depth, "layers of the model")
    number("--seed", defaults.seed, "of weights, videos and noise")
    number("--log-every", defaults.log_every, "steps between lines of progress")
    add("--minutes", type=float, help="wall-clock limit of the training; none if left out")
    add("--compile", action="store_true", help="compile the model; needs a C compiler")
    add(
        "--vsa",
        type=float,
        metavar="SPARSITY",
        help="train with video sparse attention and its gate, on the default grid alone; dense if "
        "left out",
    )
    add("--device", help="cuda or cpu; cuda when there is one")
    add("--resume", type=Path, help="checkpoint.pt of a run with equal settings")
    add("--start-from", type=Path, help="weights to start from; random ones if left out")
    given = parser.parse_args(arguments)
    names = {f.name for f in fields(TrainConfig)} & set(vars(given))
    config = replace(
        defaults,
        model=replace(defaults.model, depth=given.depth, gate=given.vsa is not None),
        sparsity=given.vsa,
        grids=defaults.grids if given.vsa is None else defaults.grids[:1],
        **{name: getattr(given, name) for name in names},
    )
    record = train(
        config, given.out, device=given.device, resume=given.resume, start_from=given.start_from
    )
    print(json.dumps({k: v for k, v in record.items() if k != "settings"}))
    print(f"classes: {', '.join(CLASS_NAMES)}; files in {given.out}")


if __name__ == "__main__":
    main()
