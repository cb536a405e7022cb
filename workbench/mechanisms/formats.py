"""Error of each quantisation format on recorded attention calls, per layer, step and head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blockattn import QuantRecipe, attend, checks
from blockattn.quant import quantise_operands
from workbench.capture import Capture
from workbench.mechanisms.probes import probe_quantised

QK_NAMES = {"bf16": "BF16 QK", "mxfp8": "MXFP8 QK", "nvfp4": "NVFP4 QK"}
V_NAMES = {"tensor": "FP8 V", "channel": "FP8 V per channel"}


@dataclass(frozen=True)
class Format:
    """One way to quantise a call.

    Attributes:
        qk_dtype: ``bf16`` (not quantised), ``mxfp8`` or ``nvfp4``.
        v_scale: ``tensor`` or ``channel``, see :class:`blockattn.QuantRecipe`.
        smooth: smooth q and k first; ``None``: unless ``qk_dtype`` is ``bf16``.
        round_p: round the probabilities to FP8 as well (only the reference does it).

    Raises:
        TypeError, ValueError: no supported recipe.
    """

    qk_dtype: str = "bf16"
    v_scale: str = "tensor"
    smooth: bool | None = None
    round_p: bool = False

    def __post_init__(self) -> None:
        self.recipe  # noqa: B018  (raises for what does not exist)
        if self.smooth is not None:
            checks.flag("smooth", self.smooth)
        checks.flag("round_p", self.round_p)

    @property
    def recipe(self) -> QuantRecipe:
        return QuantRecipe(self.qk_dtype, "fp8", self.v_scale)

    @property
    def smoothed(self) -> bool:
        return self.recipe.block_scaled if self.smooth is None else self.smooth

    @property
    def name(self) -> str:
        """For a label, e.g. "NVFP4 QK + FP8 V, smoothed"."""
        base = f"{QK_NAMES[self.qk_dtype]} + {V_NAMES[self.v_scale]}"
        notes = ["smoothed"] if self.smoothed else []
        if self.recipe.block_scaled and not self.smoothed:
            notes = ["not smoothed"]
        return ", ".join([base, *notes, *(["P rounded"] if self.round_p else [])])

    def arguments(self) -> dict[str, Any]:
        """Keywords for :func:`blockattn.quantised_attention`."""
        return {
            "qk_dtype": self.qk_dtype,
            "v_scale": self.v_scale,
            "smooth": self.smooth,
            "round_p": self.round_p,
        }


@dataclass(frozen=True)
class FormatErrors:
    """Errors of several formats over several recorded calls.

    Attributes:
        formats, entries: what the first two axes stand for; an entry is (layer, step).
        relative_l2, cosine: float64 ``[formats, entries, heads]`` against dense attention over the
            unquantised operands; the mean over the samples of a batch.
        emulated: number formats that were emulated, of each format.
    """

    formats: tuple[Format, ...]
    entries: tuple[tuple[int, int], ...]
    relative_l2: Tensor
    cosine: Tensor
    emulated: tuple[tuple[str, ...], ...]

    @property
    def mean(self) -> Tensor:
        """float64 ``[formats]``: mean relative L2 error over calls and heads."""
        return self.relative_l2.flatten(1).mean(dim=1)

    @property
    def names(self) -> list[str]:
        return [entry.name for entry in self.formats]

    @property
    def columns(self) -> list[str]:
        """The names with a line for each part, to stand below a table's columns."""
        return [stacked(name) for name in self.names]

    @property
    def calls(self) -> list[str]:
        """A label for each entry."""
        return [f"layer {layer}, step {step}" for layer, step in self.entries]

    @property
    def cells(self) -> list[str]:
        """A label for each (entry, head)."""
        heads = range(self.relative_l2.shape[2])
        return [f"{call}, head {head}" for call in self.calls for head in heads]

    @property
    def label(self) -> str:
        """Quantity of an axis; it says so where the formats were emulated."""
        return "relative L2 error" + (" (emulated formats)" if any(self.emulated) else "")

    def rows(self) -> list[tuple[str, str, str, str, str]]:
        """For a table: format, mean and largest error, smallest cosine, what was emulated."""
        return [
            (
                entry.name,
                f"{float(error.mean()):.4f}",
                f"{float(error.max()):.4f}",
                f"{float(cosine.min()):.5f}",
                ", ".join(emulated) or "nothing",
            )
            for entry, error, cosine, emulated in zip(
                self.formats, self.relative_l2, self.cosine, self.emulated
            )
        ]


def stacked(name: str) -> str:
    """A format's name with a line for each part."""
    return name.replace(" + ", "\n").replace(" per ", "\nper ").replace(", ", "\n")


ERROR_COLUMNS = ("format", "mean error", "largest error", "smallest cosine", "emulated here")


def format_errors(
    capture: Capture,
    formats: Sequence[Format],
    *,
    entries: Sequence[tuple[int, int]] | None = None,
    device: torch.device | str | None = None,
) -> FormatErrors:
    """Runs every format on every recorded call; the same dense output serves all formats.

    Args:
        capture: recorded calls.
        formats: at least one.
        entries: (layer, step) to take; all of the capture when None.
        device: where the calls run; the CPU when None.

    Raises:
        ValueError: no formats, or an entry that the capture does not hold.
    """
    if not formats:
        raise ValueError("formats is empty: give at least one Format")
    chosen = tuple(capture.entries if entries is None else entries)
    columns = []
    for entry in chosen:
        call = capture.load(*entry).to(device)
        dense = attend(call.q, call.k, call.v)
        columns.append(
            [
                probe_quantised(call.q, call.k, call.v, dense=dense, **kind.arguments())
                for kind in formats
            ]
        )
    relative, cosine = (
        torch.stack(
            [torch.stack([getattr(p.error, name).mean(dim=0) for p in row]) for row in columns], 1
        )
        for name in ("relative_l2", "cosine")
    )
    emulated = tuple(probe.trace.emulated for probe in columns[0])
    return FormatErrors(tuple(formats), chosen, relative, cosine, emulated)


SIZE_COLUMNS = ("operand", "element", "scales", "bits per value", "of bfloat16")


def format_sizes(q: Tensor, k: Tensor, v: Tensor) -> list[tuple[str, str, str, str, str]]:
    """What one value costs in each format, counted from the encoded tensors, scales included.

    Args:
        q: ``[B, Tq, Hq, D]``; k, v: ``[B, Tk, Hk, D]``.
    """
    keys = {
        name: quantise_operands(q, k, v, QuantRecipe(name, "fp8", "tensor")).k
        for name in ("mxfp8", "nvfp4")
    }
    values = {
        scale: quantise_operands(q, k, v, QuantRecipe("mxfp8", "fp8", scale)).v
        for scale in ("tensor", "channel")
    }
    texts = {
        "mxfp8": ("MXFP8 K", "8 bits, e4m3", "a power of two per 32 channels"),
        "nvfp4": ("NVFP4 K", "4 bits, e2m1", "e4m3 per 16 channels, float32 per tensor"),
        "tensor": ("FP8 V", "8 bits, e4m3", "float32 per tensor"),
        "channel": ("FP8 V per channel", "8 bits, e4m3", "float32 per (head, channel)"),
    }
    # A global scale adds nothing to the bits of a value worth writing, but it is counted.
    bits = {
        name: 8 * (x.nbytes + (0 if name == "mxfp8" else 4)) / k.numel() for name, x in keys.items()
    }
    for name, x in values.items():
        bits[name] = 8 * (x.data.numel() + 4 * x.scale.numel()) / v.numel()
    return [(*texts[name], f"{n:.2f}", f"{n / 16:.1%}") for name, n in bits.items()]
