"""Runs one case: its video, its dense twin from the same noise, and how far they are apart."""

from __future__ import annotations

import math

import torch

from workbench.attention.log import what_ran
from workbench.devices import choose_device
from workbench.models import VideoDiT, load_model
from workbench.provenance import CLOCK, environment, gpu_state, sha256_of
from workbench.quality import Lpips, lpips_obstacle
from workbench.sample.run import Row, Sampled, run
from workbench.sample.session import DTYPES
from workbench.sample.text import calls
from workbench.sample.variants import BASELINE, Variant
from workbench.sweep.cases import CONTROL, Case, flat
from workbench.sweep.store import Outcome


def run_case(case: Case) -> Outcome:
    """Samples the case and its dense twin and measures both.

    Everything but the timings follows from the case, the weights, the device and the versions.

    Raises:
        ValueError, TypeError, UnsupportedError: a setting that the model or this machine refuses.
    """
    device = choose_device(case.sampling.device)
    weights = case.sampling.weights_file
    checksum = sha256_of(weights)
    model = load_model(weights, device=device, dtype=DTYPES[case.sampling.dtype])
    settings = case.sampling.settings(case.seed, case.prompt)
    pair = [Variant(BASELINE, role="baseline"), _variant(case, model)]
    if device.type == "cuda":  # kernels are compiled at their first call
        run({"base": model}, settings, pair)
    score = None if lpips_obstacle() else Lpips()
    dense, row = run({"base": model}, settings, pair, lpips=score).rows
    records = row.sampled.records
    return Outcome(
        metrics={**_metrics(row, dense.sampled), **_clock(device)},
        environment=environment(),
        ran=what_ran(records),
        fallbacks=tuple(sorted({reason for r in records for reason in r.reasons})),
        emulated=row.sampled.emulated,
        flags=tuple(row.flags),
        weights=checksum,
    )


def _variant(case: Case, model: VideoDiT) -> Variant:
    if case.control:
        return Variant(CONTROL, role="control")
    # VSA runs training-free on a model without a gate: top-k, without the coarse branch.
    gateless = flat(case.attention)["algorithm"] == "vsa" and not model.config.gate
    return Variant("case", case.attention, gate="zero" if gateless else "model")


def _metrics(row: Row, dense: Sampled) -> dict[str, float]:
    sampled, quality = row.sampled, row.quality
    sparse_calls, dense_calls, ineligible = calls(sampled)
    found = {
        "density": sampled.density,
        "relative_l2": quality.relative_l2,
        "psnr": quality.psnr,
        "ssim": quality.ssim,
        "lpips": quality.lpips,
        "sparse_calls": sparse_calls,
        "dense_calls": dense_calls,
        "ineligible_calls": ineligible,
        "seconds": sampled.seconds,
        "attention_seconds": sampled.attention_seconds,
        "dense_seconds": dense.seconds,
        "dense_attention_seconds": dense.attention_seconds,
    }
    if math.isnan(quality.ssim) and not math.isnan(quality.psnr):
        del found["ssim"]  # frames smaller than its window
    return {name: float(value) for name, value in found.items() if value is not None}


def _clock(device: torch.device) -> dict[str, float]:
    if device.type != "cuda":
        return {}
    state = gpu_state(torch.cuda.get_device_properties(device), CLOCK) or {}
    clock = state.get("sm_mhz")
    return {} if clock is None else {"sm_clock": clock}
