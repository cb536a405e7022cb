"""The report of a GPU as one figure; works from the JSON as well, without a GPU."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from workbench.views.bench import draw_break_even, draw_rates, draw_split, draw_targets
from workbench.views.style import INK, SMALL, new_figure, save

Report = Mapping[str, Any]
PARTS = ("prepare", "route", "attend")


def draw_report(report: Report, path: Path) -> Path:
    """Targets, and the time split, rates and break-even where their rows were measured."""
    panels = [
        (draw, cases)
        for draw, row in ((_split, 1), (_rates, 3), (_break_even, 1))
        if (cases := measured_cases(report, row))
    ]
    figure = new_figure(13.5, 4.6 * (1 + len(panels)) / 2 + 0.4)
    figure.suptitle(title(report), x=0.01, ha="left", color=INK, fontsize=SMALL + 4)
    axes = figure.subplots((len(panels) + 2) // 2, 2, squeeze=False).flatten()
    _targets(axes[0], report)
    for ax, (draw, cases) in zip(axes[1:], panels):
        draw(ax, cases, report)
    for ax in axes[len(panels) + 1 :]:
        ax.set_axis_off()
    return save(figure, path)


def title(report: Report) -> str:
    """GPU, versions and date."""
    versions = report["versions"]
    parts = [
        report["machine"]["name"],
        f"torch {versions['torch']}",
        f"triton {versions['triton']}",
    ]
    return ", ".join([*parts, report["date"][:10]])


def measured_cases(report: Report, row: int) -> list[Mapping[str, Any]]:
    """Cases of a row; none when it was not asked for or failed."""
    return report["rows"].get(str(row), {}).get("cases", [])


def scores(row: Mapping[str, Any]) -> list[tuple[str, float, float]]:
    """Implementation, how many times better than required, and the same of the aim.

    NaN where the requirement or the figure is 0 or less, so that a ratio has no meaning.
    """
    found = []
    for impl, value in row["measured"].items():
        level = row["targets"].get(impl) or row["targets"]["triton"]
        found.append((impl, *(_better(row, x, level["must"]) for x in (value, level["aim"]))))
    return found


def _better(row: Mapping[str, Any], value: float, must: float) -> float:
    if value <= 0 or must <= 0:
        return math.nan
    return value / must if row["more_is_better"] else must / value


def _targets(ax: Axes, report: Report) -> None:
    names, values, aims, texts = [], [], [], []
    for number, row in sorted(report["rows"].items(), key=lambda item: int(item[0])):
        if "failed" in row:
            names.append(f"{number} {row['short']}")
            values.append(math.nan)
            aims.append(math.nan)
            texts.append("not measured")
            continue
        for impl, score, aim in scores(row):
            names.append(f"{number} {row['short']}")
            values.append(score)
            aims.append(aim)
            texts.append(
                f"{impl} {row['measured'][impl]:.3g} {row['unit']}: {row['verdict'][impl]}"
            )
    draw_targets(ax, names, values, aims, texts, title="rows of the table of targets, worst case")


def _split(ax: Axes, cases: list[Mapping[str, Any]], report: Report) -> None:
    cases = [case for case in cases + measured_cases(report, 2) if case["more"]["split"]]
    if not cases:
        ax.set_axis_off()
        return
    names = [_data_and_tau(case) for case in cases]
    parts = {name: [1e3 * case["more"]["split"][name] for case in cases] for name in PARTS}
    bounds = [1e3 * case["more"]["bound_seconds"] for case in cases]
    draw_split(ax, names, parts, bounds, title=f"Sol-Attn, steps of a call: {_shape(cases[0])}")


def _rates(ax: Axes, cases: list[Mapping[str, Any]], report: Report) -> None:
    longest = _shape(cases[-1])
    cases = [case for case in cases if _shape(case) == longest]
    dense = next(name for name in cases[0]["samples"] if name.startswith("dense "))
    shown = [
        *cases[0]["measured"],
        *dict.fromkeys(name for case in cases for name in case["peers"]),
    ]
    table = [case["more"]["flops_per_second"] for case in cases]
    rates = {name: [row.get(name, math.nan) / 1e12 for row in table] for name in shown}
    baseline = (dense.removeprefix("dense "), max(row[dense] for row in table) / 1e12)
    density = [case["density"] for case in cases]
    draw_rates(ax, density, rates, baseline, title=f"block mask 64 x 64: {longest}")


def _break_even(ax: Axes, cases: list[Mapping[str, Any]], report: Report) -> None:
    ladders = {}
    for case in cases:
        found = case["more"]["ladder"]
        speed = [found["dense_seconds"] / value for value in found["seconds"]]
        crossing = found["break_even_density"]
        ladders[_data_and_tau(case).split(",")[0]] = (found["densities"], speed, crossing)
    draw_break_even(ax, ladders, title=f"Sol-Attn, whole calls: {_shape(cases[0])}")


def _data_and_tau(case: Mapping[str, Any]) -> str:
    parts = case["setting"].split(", ")
    kind = next(part for part in parts if part in ("random", "video-like"))
    return ", ".join([kind, *(part for part in parts if part.startswith("tau "))])


def _shape(case: Mapping[str, Any]) -> str:
    """`T 32,768, H 24, D 128` of the setting."""
    parts = case["setting"].split(", ")
    return ", ".join(part for part in parts if part[:2] in ("T ", "H ", "D "))
