"""Compare VSA with and without its training, on videos that no training has seen.

    python -m workbench.models.compare_vsa --base tiny_video_dit.safetensors \
        --tuned tiny_video_dit_vsa.safetensors --out comparison.json

Every method predicts the velocity of the same noisy videos: dense attention, training-free top-k
(the dense weights with VSA's selection and no coarse branch), and the fine-tuned weights with their
gate. Two ablations of the fine-tuned weights say what the gate and what the weights contribute.
Figures are paired: a difference is taken video by video before it is averaged.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from blockattn.layout import TokenGrid
from blockattn.vsa import cube_layout, kept_cubes

from .dit import AttentionCall, AttentionFn, VideoDiT, dense_attention
from .moving_shapes import make_videos
from .vsa_training import vsa_for_training
from .weights import load_model, training_record

TIMES = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99)
SEED = 20_261_130  # no training run uses it
Methods = dict[str, tuple[VideoDiT, AttentionFn]]


def compare(
    base: Path | None,
    tuned: Path,
    *,
    sparsity: float | None = None,
    videos: int = 512,
    batch: int = 32,
    grid: tuple[int, int, int] = (8, 16, 16),
    times: Sequence[float] = TIMES,
    seed: int = SEED,
    device: torch.device | str | None = None,
) -> dict[str, object]:
    """Velocity errors of all methods and their paired differences.

    Args:
        base: weights trained dense; the bundled ones when None.
        tuned: weights fine-tuned with VSA, with a gate.
        sparsity: of VSA; the one of the fine-tuning when None.
        videos: how many are drawn; at least 2, for standard errors.
        batch: videos per forward pass.
        grid: tokens along (t, h, w).
        times: denoising times; every video is seen at each, with noise of its own.
        seed: of videos and noise.
        device: CUDA when there is one, else the CPU, when None.

    Returns:
        A JSON-able report: settings, `methods`, `differences` and `share_of_gap_closed`.

    Raises:
        ValueError: fewer than 2 videos, or tuned weights without gate or sparsity.
    """
    if videos < 2:
        raise ValueError(f"videos={videos}: must be at least 2, for a standard error")
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    models = load_model(base, device), load_model(tuned, device)
    share = _sparsity(tuned, models[1], sparsity)
    methods = _methods(*models, share)
    errors = velocity_errors(methods, videos, batch, grid, times, seed, device)
    cubes = cube_layout(TokenGrid(grid), torch.device("cpu")).count
    return {
        "sparsity": share,
        "kept_cubes": kept_cubes(share, cubes),
        "cubes": cubes,
        "grid": grid,
        "videos": videos,
        "times": list(times),
        "seed": seed,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "precision": "bfloat16 autocast" if device.type == "cuda" else "float32",
        "base": _facts(base),
        "tuned": _facts(tuned),
        **summary(errors),
    }


def summary(errors: dict[str, Tensor]) -> dict[str, object]:
    """Means, standard errors and paired differences.

    Args:
        errors: method name -> velocity MSE [videos, times].
    """
    per_video = {name: e.double().mean(1) for name, e in errors.items()}
    free, tuned, dense = (per_video[n] for n in ("training_free_top_k", "tuned_vsa", "dense"))
    return {
        "unit": "velocity MSE, mean over the times; standard errors over videos",
        "methods": {
            name: {**_mean(per_video[name]), "by_time": errors[name].double().mean(0).tolist()}
            for name in errors
        },
        "differences": {
            f"{name} - training_free_top_k": _mean(e - free)
            for name, e in per_video.items()
            if name != "training_free_top_k"
        }
        | {"tuned_vsa - dense": _mean(tuned - dense)},
        "videos_where_tuned_vsa_beats_top_k": (tuned < free).double().mean().item(),
        "share_of_gap_closed": ((free - tuned).mean() / (free - dense).mean()).item(),
    }


@torch.no_grad()
def velocity_errors(
    methods: Methods,
    videos: int,
    batch: int,
    grid: tuple[int, int, int],
    times: Sequence[float],
    seed: int,
    device: torch.device,
) -> dict[str, Tensor]:
    """Velocity MSE of every method on the same videos, times and noise: [videos, times] each."""
    generator = torch.Generator(device).manual_seed(seed)
    patch = next(iter(methods.values()))[0].config.patch
    frames, height, width = (g * p for g, p in zip(grid, patch, strict=True))
    found: dict[str, list[Tensor]] = {name: [] for name in methods}
    for start in range(0, videos, batch):
        video, label = make_videos(
            min(batch, videos - start),
            frames=frames, height=height, width=width, generator=generator,
        )  # fmt: skip
        video = 2 * video - 1
        noise = [torch.randn(video.shape, generator=generator, device=device) for _ in times]
        for name, method in methods.items():
            rows = [_error(method, video, label, t, e) for t, e in zip(times, noise, strict=True)]
            found[name].append(torch.stack(rows, 1).cpu())
    return {name: torch.cat(parts) for name, parts in found.items()}


def _error(
    method: tuple[VideoDiT, AttentionFn], video: Tensor, label: Tensor, time: float, noise: Tensor
) -> Tensor:
    """Velocity MSE of each video of a batch: float32 [B]."""
    model, attention = method
    with torch.autocast(video.device.type, torch.bfloat16, enabled=video.device.type == "cuda"):
        velocity = model(torch.lerp(video, noise, time), time, label, attention=attention)
    return (velocity.float() - (noise - video)).square().flatten(1).mean(1)


def _methods(base: VideoDiT, tuned: VideoDiT, sparsity: float) -> Methods:
    vsa = vsa_for_training(sparsity)

    def without_gate(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
        return vsa(q, k, v, replace(call, gate=None))

    return {
        "dense": (base, dense_attention),
        "training_free_top_k": (base, without_gate),
        "tuned_vsa": (tuned, vsa),
        "tuned_without_gate": (tuned, without_gate),
        "tuned_dense": (tuned, dense_attention),
    }


def _sparsity(path: Path, model: VideoDiT, sparsity: float | None) -> float:
    settings = training_record(path).get("settings")
    known = settings.get("sparsity") if isinstance(settings, dict) else None
    chosen = known if sparsity is None else sparsity
    if not model.config.gate or chosen is None:
        raise ValueError(
            f"tuned={str(path)!r}: gate={model.config.gate}, recorded sparsity={known}; "
            "give weights of `python -m workbench.models.train --vsa SPARSITY`"
        )
    return float(chosen)


def _facts(path: Path | None) -> dict[str, object]:
    return {k: v for k, v in training_record(path).items() if k != "settings"}


def _mean(values: Tensor) -> dict[str, float]:
    error = values.std(unbiased=True) / len(values) ** 0.5
    return {"mean": values.mean().item(), "standard_error": error.item()}


def main(arguments: list[str] | None = None) -> None:
    """Command line of the comparison."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--base", type=Path, help="dense weights; the bundled ones if absent")
    parser.add_argument("--tuned", type=Path, required=True, help="weights fine-tuned with VSA")
    parser.add_argument("--out", type=Path, required=True, help="JSON report")
    parser.add_argument("--sparsity", type=float, help="of VSA; that of the fine-tuning if absent")
    parser.add_argument("--videos", type=int, default=512)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--device", help="cuda or cpu; cuda when there is one")
    given = vars(parser.parse_args(arguments))
    out: Path = given.pop("out")
    report = compare(given.pop("base"), given.pop("tuned"), **given)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
