"""What a sweep measures of every case: names, units, which way is better, what is a timing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """One measured quantity.

    Attributes:
        unit: ``1`` for a ratio.
        meaning: in a few words.
        better: ``low`` or ``high``; empty where neither is.
        timing: differs from run to run; everything else follows from the case alone.
    """

    unit: str
    meaning: str
    better: str = ""
    timing: bool = False


METRICS: dict[str, Metric] = {
    "density": Metric("1", "exact pairs / valid pairs as delivered, mean over all calls", "low"),
    "relative_l2": Metric("1", "|video - dense| / |dense|", "low"),
    "psnr": Metric("dB", "against the dense video, for a peak of 1; inf when equal", "high"),
    "ssim": Metric("1", "against the dense video; absent below 11 pixels", "high"),
    "lpips": Metric("1", "AlexNet LPIPS against the dense video, where it can run", "low"),
    "sparse_calls": Metric("calls", "served by the sparse path"),
    "dense_calls": Metric("calls", "meant to be dense"),
    "ineligible_calls": Metric("calls", "dense because the sparse path cannot serve them", "low"),
    "seconds": Metric("s", "sampling the video, densities read included", "low", timing=True),
    "attention_seconds": Metric("s", "of that in attention", "low", timing=True),
    "dense_seconds": Metric("s", "sampling its dense twin", timing=True),
    "dense_attention_seconds": Metric("s", "of that in attention", timing=True),
    "case_seconds": Metric("s", "the whole case, start of its process included", timing=True),
    "sm_clock": Metric("MHz", "clock of the GPU's processors at the end", timing=True),
}
