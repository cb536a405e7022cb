"""Doctor: what this machine can run, why not the rest, and the fix."""

from __future__ import annotations

from collections import Counter
from html import escape

import ipywidgets as widgets

from workbench.doctor import Report
from workbench.doctor.checkup import Level, examine
from workbench.doctor.versions import REQUIRED_PACKAGES
from workbench.views.table import Table
from workbench.widgets import texts
from workbench.widgets.job import Job, Tick
from workbench.widgets.panel import Panel

SIGNS: dict[Level, str] = {"error": "✖ error", "warning": "⚠ warning", "note": "ℹ note"}
LOOKING = "looking"


class Doctor(Panel):
    """The report of ``workbench doctor`` as tables; "Look again" after an installation.

    Attributes:
        report: what was found.
    """

    def __init__(self):
        self.report: Report = examine()
        self.job = Job(self._found, self._failed)
        self._tables = widgets.HTML()
        self._button = widgets.Button(description="Look again", icon="refresh")
        self._button.on_click(lambda _: self.look_again())
        super().__init__([])

    @property
    def tables(self) -> str:
        """HTML of the tables."""
        return self._tables.value

    def look_again(self) -> None:
        """Examines the machine once more, in the background."""
        self._guard(LOOKING, lambda: self.job.start(_examine, 1))

    def _found(self, report: Report) -> None:
        self.report = report
        self._redraw()
        self._show_state()

    def _failed(self, error: Exception) -> None:
        self._report(LOOKING, error)
        self._show_state()

    def _arrangement(self) -> list[widgets.Widget]:
        row = widgets.HBox([self._button, self.job.box])
        return [row, self._problem, self._summary, self._ran, self._tables]

    def _redraw(self) -> None:
        self._summary.value = texts.lines(describe_report(self.report))
        tables = (findings_table, implementations_table, machine_table, packages_table)
        self._tables.value = texts.table(*(table(self.report) for table in tables))

    def _show_what_ran(self) -> None:
        able = [item.name for item in self.report.implementations if item.why_not is None]
        best = f"attention takes the first of {', '.join(able)} that serves a call"
        self._ran.value = texts.status(f"<b>What runs:</b> {escape(best if able else 'nothing')}")


def describe_report(report: Report) -> str:
    """Whether it is ready, and what was found, in one line."""
    counts = Counter(finding.level for finding in report.findings)
    told = ", ".join(
        f"{counts[level]} {level}{'s' if counts[level] > 1 else ''}"
        for level in SIGNS
        if counts[level]
    )
    ready = "Ready." if report.ok else "Not ready: see the errors."
    return f"{ready} Found: {told or 'nothing to say'}."


def findings_table(report: Report) -> Table:
    """What to know, the worst first, with its fix."""
    rows = [(SIGNS[x.level], x.topic, x.text, x.fix or "—") for x in report.findings]
    return Table(("level", "about", "finding", "fix"), rows, "Findings")


def implementations_table(report: Report) -> Table:
    """Which implementation of attention can run here, fastest first, and why not the others."""
    rows = [(x.name, "yes" if x.why_not is None else f"no: {x.why_not}")
            for x in report.implementations]  # fmt: skip
    return Table(("implementation", "runs here"), rows, "Implementations, fastest first")


def machine_table(report: Report) -> Table:
    """Platform, versions of the main parts, GPUs with capability and memory in GiB."""
    rows: list[tuple[str, str]] = [
        ("platform", report.platform),
        ("Python", report.python),
        ("CUDA of torch", report.torch_cuda or "none"),
        ("CuTe lane", report.cute_lane or "none"),
        ("NVIDIA driver", report.driver or "none"),
        ("browser", report.chromium or "none"),
    ]
    for gpu in report.gpus:
        size = gpu.memory_bytes / 2**30
        rows.append(("GPU", f"{gpu.name}, capability {'.'.join(map(str, gpu.capability))}, "
                            f"{size:.0f} GiB"))  # fmt: skip
    return Table(("", ""), rows, "This machine")


def packages_table(report: Report) -> Table:
    """Versions of packages, and which of them may be missing."""
    rows = [
        (name, version or "not installed", "" if name in REQUIRED_PACKAGES else "optional")
        for name, version in report.packages.items()
    ]
    return Table(("package", "version", ""), rows, "Packages")


def _examine(tick: Tick) -> Report:
    tick("looking")
    return examine()
