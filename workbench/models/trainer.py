"""Settings, state and one step of a training run; :mod:`workbench.models.train` is the loop."""

from __future__ import annotations

import json
import math
import random
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from ..paths import BUNDLED_WEIGHTS, VSA_WEIGHTS
from .dit import AttentionFn, DiTConfig, VideoDiT, dense_attention
from .loss import flow_matching_loss
from .moving_shapes import make_videos
from .vsa_training import vsa_for_training
from .weights import load_model, save_model, training_record

Grid = tuple[int, int, int]


@dataclass(frozen=True)
class TrainConfig:
    """Settings of a training run; with the seed they fix it up to the device's arithmetic."""

    model: DiTConfig = field(default_factory=DiTConfig)
    steps: int = 20_000
    minutes: float | None = None  # wall-clock limit; the schedule ends at whichever comes first
    batch: int = 64  # videos per step at 2,048 tokens; larger grids take fewer
    learning_rate: float = 1e-3
    warmup: int = 300
    weight_decay: float = 0.01
    clip: float = 1.0
    ema: float = 0.999
    label_dropout: float = 0.1
    time_shift: float = 5.0  # odds of the median training time: 5 means t = 5 / 6
    time_spread: float = 1.5  # standard deviation of the logit of the training time
    seed: int = 0
    grids: tuple[tuple[Grid, float], ...] = (
        ((8, 16, 16), 0.8),
        ((16, 16, 16), 0.1),
        ((7, 15, 18), 0.1),
    )
    sparsity: float | None = None  # train with VSA at this sparsity, and with its gate
    compile: bool = False
    save_every: float = 60.0  # seconds
    log_every: int = 100  # steps

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "log_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.minutes is not None and not self.minutes > 0:
            raise ValueError(f"minutes={self.minutes}: must be above 0, or left out for no limit")
        if self.sparsity is not None and not 0 <= self.sparsity <= 1:
            raise ValueError(f"sparsity={self.sparsity}: must be in [0, 1], or left out for dense")
        if self.model.gate != (self.sparsity is not None):
            raise ValueError(
                f"model.gate={self.model.gate} with sparsity={self.sparsity}: the gate belongs to "
                "training with VSA; set both or neither"
            )

    @property
    def weights_name(self) -> str:
        """File name of the weights."""
        return BUNDLED_WEIGHTS if self.sparsity is None else VSA_WEIGHTS


class Trainer:
    """Model, moving average, optimiser and random state of one run."""

    def __init__(self, config: TrainConfig, device: torch.device | str) -> None:
        self.config, self.device = config, torch.device(device)
        torch.manual_seed(config.seed)
        self.model = VideoDiT(config.model).to(self.device)
        self.average = VideoDiT(config.model).to(self.device).requires_grad_(False)
        self.average.load_state_dict(self.model.state_dict())
        self.optimizer = torch.optim.AdamW(
            _parameter_groups(self.model, config.weight_decay),
            lr=config.learning_rate,
            betas=(0.9, 0.95),
            fused=self.device.type == "cuda",
        )
        self.generator = torch.Generator(self.device).manual_seed(config.seed)
        self.step, self.seconds = 0, 0.0
        self.attention: AttentionFn = dense_attention
        if config.sparsity is not None:
            self.attention = vsa_for_training(config.sparsity)
        self.origin: dict[str, object] | None = None  # record of the weights it started from
        self.curve: list[tuple[int, float]] = []  # (step, mean loss since the last entry)
        if config.compile:
            _compile_blocks(self.model)

    def progress(self) -> float:
        """Share of the run that is done, by steps or by time, whichever is further."""
        limit = self.config.minutes
        by_time = 0.0 if limit is None else self.seconds / (60 * limit)
        return min(1.0, max(self.step / self.config.steps, by_time))

    def learning_rate(self) -> float:
        """Linear warm-up, then a cosine down to 1 % at the end of the run."""
        ramp = min(1.0, (self.step + 1) / self.config.warmup)
        cosine = 0.5 + 0.5 * math.cos(math.pi * self.progress())
        return self.config.learning_rate * ramp * (0.01 + 0.99 * cosine)

    def batch(self) -> tuple[Tensor, Tensor]:
        """Fresh videos in [-1, 1] with labels, on a grid drawn for this step."""
        grid = _grid_of_step(self.config, self.step)
        frames, height, width = (g * p for g, p in zip(grid, self.config.model.patch, strict=True))
        count = max(1, self.config.batch * 2048 // max(2048, math.prod(grid)))
        with torch.no_grad():
            video, label = make_videos(
                count, frames=frames, height=height, width=width, generator=self.generator
            )
            dropped = torch.rand(count, generator=self.generator, device=self.device)
            null = self.config.model.null_label
            label = label.masked_fill(dropped < self.config.label_dropout, null)
        return 2 * video - 1, label

    def train_step(self, video: Tensor, label: Tensor) -> Tensor:
        """One optimiser step; returns the loss as a device scalar (no host sync)."""
        rate = self.learning_rate()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        on_gpu = self.device.type == "cuda"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=on_gpu):
            loss = flow_matching_loss(
                self.model,
                video,
                label,
                self.generator,
                time_shift=self.config.time_shift,
                time_spread=self.config.time_spread,
                attention=self.attention,
            )
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self._update_average()
        return loss.detach()

    @torch.no_grad()
    def _update_average(self) -> None:
        # Early on the average must not remember the initial weights: its memory grows with the run.
        decay = min(self.config.ema, (1 + self.step) / (10 + self.step))
        average: list[Tensor] = list(self.average.parameters())
        current: list[Tensor] = list(self.model.parameters())
        get_ema_multi_avg_fn(decay)(average, current, self.step)

    def save(self, folder: Path) -> None:
        """Write weights, curve and a checkpoint to resume from."""
        save_model(self.average, folder / self.config.weights_name, record=self.record())
        text = json.dumps({**self.record(), "curve": self.curve}, indent=1)
        (folder / "training.json").write_text(text)
        part = folder / "checkpoint.part"
        state = {name: getattr(self, name).state_dict() for name in _STATEFUL}
        state |= {"generator": self.generator.get_state().cpu(), "step": self.step}
        state |= {"seconds": self.seconds, "curve": self.curve}
        torch.save(state, part)
        part.replace(folder / "checkpoint.pt")

    def resume(self, path: Path) -> None:
        """Continue from a checkpoint of a run with the same settings."""
        if not path.is_file():
            raise FileNotFoundError(f"resume={str(path)!r}: no such checkpoint file")
        state = torch.load(path, map_location=self.device, weights_only=True)
        for name in _STATEFUL:
            getattr(self, name).load_state_dict(state[name])
        self.generator.set_state(state["generator"].cpu())
        self.step, self.seconds = state["step"], state["seconds"]
        self.curve = [(int(step), float(loss)) for step, loss in state["curve"]]

    def start_from(self, path: Path) -> None:
        """Take the weights of a file, with a new optimiser and schedule; a new gate stays shut.

        Raises:
            FileNotFoundError, ValueError: no such file, or of a model of another size.
        """
        source = load_model(path, self.device)
        if replace(source.config, gate=self.config.model.gate) != self.config.model:
            raise ValueError(
                f"start_from={str(path)!r}: holds {source.config}, the run trains "
                f"{self.config.model}; they may differ in the gate alone"
            )
        fresh = self.model.state_dict()
        state = {key: source.state_dict().get(key, fresh[key]) for key in fresh}
        self.model.load_state_dict(state)
        self.average.load_state_dict(state)
        known = {k: v for k, v in training_record(path).items() if k != "settings"}
        self.origin = {"file": path.name, **known}

    def record(self) -> dict[str, object]:
        """Facts about the run for the weights' metadata."""
        on_gpu = self.device.type == "cuda"
        return {
            "steps": self.step,
            "loss": self.curve[-1][1] if self.curve else None,
            "seconds": round(self.seconds, 1),
            "seed": self.config.seed,
            "device": torch.cuda.get_device_name() if on_gpu else "cpu",
            "torch": torch.__version__,
            "started_from": self.origin,
            "settings": asdict(self.config),
        }


_STATEFUL = ("model", "average", "optimizer")


def _grid_of_step(config: TrainConfig, step: int) -> Grid:
    """Grid of a step, fixed by seed and step, so that a resumed run takes the same ones."""
    draw = random.Random(f"{config.seed}/{step}")
    grids, shares = zip(*config.grids, strict=True)
    return draw.choices(grids, weights=shares)[0]


def _parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Weight decay for matrices of linear layers only."""
    matrices = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
    known = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in known]
    return [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]


def _compile_blocks(model: VideoDiT) -> None:
    """Compile the two halves of every block; the attention call between them stays as it is."""
    torch._dynamo.config.cache_size_limit = 64
    for block in model.layers():
        block.project = torch.compile(block.project, dynamic=False)
        block.finish = torch.compile(block.finish, dynamic=False)
