"""The report of `workbench.doctor.checkup` for people, through rich."""

from __future__ import annotations

import os

from rich.console import Console
from rich.table import Table
from rich.text import Text

from workbench.doctor import Finding, Report
from workbench.doctor.versions import REQUIRED_PACKAGES

_STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan"}


def show(report: Report, console: Console | None = None) -> None:
    """Print the report. The levels are words as well as colours."""
    out = console if console is not None else Console(highlight=False)
    for table in (_machine(report), _packages(report), _implementations(report)):
        if table.row_count:
            out.print(table)
    for finding in report.findings:
        out.print(_finding(finding), soft_wrap=True)
    out.print("Ready." if report.ok else "Not ready: see the errors above.", style="bold")


def _machine(report: Report) -> Table:
    table = _table("This machine", "", "")
    table.add_row("platform", report.platform)
    table.add_row("Python", report.python)
    cuda = f"CUDA {report.torch_cuda}" if report.torch_cuda else "no CUDA"
    table.add_row("torch", f"{report.packages.get('torch') or 'missing'} ({cuda})")
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    triton = report.packages.get("triton") or "missing"
    table.add_row("triton", triton + (" (TRITON_INTERPRET=1)" if interpreted else ""))
    table.add_row("CuTe lane", report.cute_lane or "none")
    if report.kernels is not None:
        kept = f"{report.kernels.files} kept, {report.kernels.size / 2**20:.1f} MiB"
        table.add_row("CuTe kernels", f"{kept}, in {report.kernels.path}")
    table.add_row("NVIDIA driver", report.driver or "none")
    for gpu in report.gpus:
        major, minor = gpu.capability
        memory = f"{gpu.memory_bytes / 2**30:.0f} GiB"
        table.add_row("GPU", f"{gpu.name}, capability {major}.{minor}, {memory}")
    table.add_row("browser", report.chromium or "none")
    return table


def _packages(report: Report) -> Table:
    table = _table("Packages", "package", "version", "")
    for name, version in report.packages.items():
        shown = Text(version) if version else Text("not installed", style="dim")
        table.add_row(name, shown, "" if name in REQUIRED_PACKAGES else "optional")
    return table


def _implementations(report: Report) -> Table:
    table = _table("Implementations of attention", "name", "runs here")
    for status in report.implementations:
        table.add_row(status.name, "yes" if status.why_not is None else f"no: {status.why_not}")
    table.caption, table.caption_justify = "dense calls of eager are torch SDPA", "left"
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None)
    table.show_header = any(columns)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _finding(finding: Finding) -> Text:
    text = Text(f"{finding.level}: ", style=_STYLES[finding.level])
    text.append(finding.text, style="default")
    if finding.fix:
        text.append(f"\n    fix: {finding.fix}", style="default")
    return text
