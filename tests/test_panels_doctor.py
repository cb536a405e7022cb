"""Doctor: the report of `workbench doctor` as a panel."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.panel_inputs import press
from workbench.doctor import Finding, GpuInfo, ImplementationStatus, Report
from workbench.doctor.checkup import examine, implementation_statuses
from workbench.widgets import Doctor, doctor

REPORT = Report(
    platform="Linux <x>",
    python="3.12.1",
    torch_cuda="13.0",
    driver="580.1",
    gpus=[GpuInfo("H200", (9, 0), 141 * 2**30)],
    packages={"torch": "2.11", "flash-attn-4": None},
    chromium=None,
    implementations=[
        ImplementationStatus("triton", "no <GPU>"),
        ImplementationStatus("eager", None),
    ],
    findings=[
        Finding("warning", "torch", "too <old>", "pip install torch"),
        Finding("note", "a", "b"),
    ],
)


@pytest.fixture
def panel(monkeypatch: pytest.MonkeyPatch) -> Doctor:
    monkeypatch.setattr(doctor, "examine", lambda: REPORT)
    return Doctor()


def test_it_shows_what_was_found_with_signs_and_fixes(panel: Doctor):
    assert "Ready. Found: 1 warning, 1 note." in panel.summary
    for text in (
        "⚠ warning", "too &lt;old&gt;", "pip install torch", "no: no &lt;GPU&gt;", "not installed",
        "H200, capability 9.0, 141 GiB", "Linux &lt;x&gt;",
    ):  # fmt: skip
        assert text in panel.tables
    assert "takes the first of eager that serves a call" in panel.what_ran


def test_errors_come_with_not_ready(panel: Doctor, monkeypatch: pytest.MonkeyPatch):
    broken = replace(REPORT, findings=[Finding("error", "torch", "is missing")], implementations=[])
    monkeypatch.setattr(doctor, "examine", lambda: broken)
    panel.look_again()
    assert "Not ready: see the errors. Found: 1 error." in panel.summary
    assert "✖ error" in panel.tables
    assert "<b>What runs:</b> nothing" in panel.what_ran


def test_looking_again_runs_in_the_background_and_shows_its_error(
    panel: Doctor, monkeypatch: pytest.MonkeyPatch
):
    def lost() -> Report:
        raise OSError("no <disk>")

    monkeypatch.setattr(doctor, "examine", lost)

    press(panel)
    assert "OSError: no &lt;disk&gt;" in panel.problem
    assert panel.report is REPORT


def test_here_it_agrees_with_the_command():
    panel = Doctor()
    assert panel.report.implementations == implementation_statuses()
    assert panel.report.packages == examine().packages
    able = [item.name for item in panel.report.implementations if item.why_not is None]
    assert {"eager", "reference"} <= set(able)
    assert ", ".join(able) in panel.what_ran
