"""What is attached and what ran, as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from workbench.attention.log import CallCounts, density_by_layer, what_ran
from workbench.attention.policy import CROSS
from workbench.diffusers.model import AttachedModel


def report(models: Sequence[AttachedModel]) -> str:
    """One paragraph for each transformer: layers, modules left alone with the reason, what ran."""
    return "\n\n".join(_model(model) for model in models)


def _model(model: AttachedModel) -> str:
    counts = model.attention.counts()
    lines = [
        f"{model.name}: {model.family.model}, {len(model.layers)} layers attached",
        *(f"  not attached: {n} x {why}" for why, n in Counter(model.left_alone.values()).items()),
        f"  calls: {counts}",
        *(f"  ran: {what}" for what in what_ran(model.attention.records)),
        *_layers(model),
    ]
    return "\n".join(lines)


def _layers(model: AttachedModel) -> list[str]:
    densities = density_by_layer(model.attention.records)
    lines = []
    for index, name in model.layers.items():
        counts = _without_cross(model.attention.counts(index))
        density = f", density {densities[index]:.4f}" if index in densities else ""
        lines.append(f"  layer {index} ({name}): {counts}{density}")
    if not densities:
        lines.append("  density: not recorded; attach with record=True")
    return lines


def _without_cross(counts: CallCounts) -> CallCounts:
    return replace(counts, dense={r: n for r, n in counts.dense.items() if r != CROSS})
