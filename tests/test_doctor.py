"""`workbench doctor`: planted versions give the right finding; the report keeps its form."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from blockattn.impl import reference, registry
from blockattn.impl.registry import Implementation
from workbench.doctor import Finding, GpuInfo, ImplementationStatus, Report, diagnose, lanes
from workbench.doctor import checkup as doctor
from workbench.doctor import text as doctor_text
from workbench.doctor.versions import REQUIRED_PACKAGES

GOOD = {
    **dict.fromkeys(REQUIRED_PACKAGES, "99"),
    "python": "3.11.7",
    "torch": "2.13.0",
    "triton": "3.7.1",
    "numpy": "2.4.6",
    "ipykernel": "6.31.0",
}
LIBS = ("nvidia-cutlass-dsl-libs-base", "nvidia-cutlass-dsl-libs-cu12")
HOPPER = GpuInfo("H200", (9, 0), 141 * 2**30)


def cute(
    dsl: str, quack: str | None, flash: str | None, *, cu13: bool = True, **other: str
) -> dict[str, str]:
    names = (*LIBS, "nvidia-cutlass-dsl-libs-cu13") if cu13 else LIBS
    stack = {"quack-kernels": quack, "flash-attn-4": flash}
    given = {name: version for name, version in stack.items() if version is not None}
    return {**GOOD, **dict.fromkeys(names, dsl), "nvidia-cutlass-dsl": dsl, **given, **other}


def texts(findings: list[Finding]) -> str:
    return "\n".join(finding.text for finding in findings)


def test_a_good_set_with_a_gpu_has_no_finding():
    assert diagnose(GOOD, HOPPER, driver="580.1") == []


@pytest.mark.parametrize(
    ("dsl", "quack", "flash"),
    [
        ("4.6.1", "0.6.2", "4.0.0b19"),
        ("4.6.2", "0.6.4", "4.0.0b36"),
        ("4.6.3", "0.6.3", "4.0.0b36"),
        ("4.8.1", "0.6.5", "4.0.0b36"),
    ],
)
def test_a_cute_set_that_was_tried_has_no_finding(dsl: str, quack: str, flash: str):
    assert diagnose(cute(dsl, quack, flash), HOPPER) == []


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        (cute("4.6.1", "0.6.2", "4.0.0b19", cu13=False), "TypeError in `fmax`"),
        (cute("4.6.1", "0.6.4", "4.0.0b19"), "works with cutlass-dsl 4.6.2 only"),
        (cute("4.8.1", "0.6.2", "4.0.0b36"), "works with cutlass-dsl 4.6.1 only"),
        (cute("4.7.1", "0.6.3", "4.0.0b36"), "works with cutlass-dsl 4.6.x only"),
        (cute("4.6.3", "0.6.5", "4.0.0b36"), "works with cutlass-dsl >=4.7 only"),
        (cute("4.6.1", "0.6.2", "4.0.0b18"), "before b19 uses names"),
        (cute("4.6.1", "0.6.2", "4.0.0b24"), "4.6.0.dev0"),
        (cute("4.6.1", "0.6.2", "4.0.0b36"), "requires cutlass-dsl >=4.6.2"),
        (cute("4.6.2", "0.6.3", "4.0.0b36"), "not a set that was tried together"),
        (cute("4.6.1", None, None), "lane cute also needs quack-kernels, flash-attn-4"),
        (cute("4.8.1", None, None), "lane cute-latest also needs quack-kernels, flash-attn-4"),
        (
            cute("4.6.1", "0.6.2", "4.0.0b19", **{"nvidia-cudnn-frontend": "1.32.0"}),
            "requires cutlass-dsl >=4.8",
        ),
        (
            {**cute("4.6.1", "0.6.2", "4.0.0b19"), "nvidia-cutlass-dsl-libs-base": "4.8.1"},
            "libs-base 4.8.1 does not match nvidia-cutlass-dsl 4.6.1",
        ),
    ],
)
def test_a_bad_cute_mixture_is_named_with_the_pip_command(versions: dict[str, str], expected: str):
    found = [f for f in diagnose(versions, HOPPER) if expected in f.text]
    assert len(found) == 1
    assert found[0].fix == lanes.fix(lanes.nearest(versions))
    assert found[0].level != "error", "an optional package never makes the machine unready"


@pytest.mark.parametrize("lane", lanes.LANES)
def test_a_lane_is_known_by_its_name_and_has_no_finding(lane: str):
    pins = lanes.pins(lane)
    versions = {**cute(*(pins[name] for name in lanes.CUTE_PACKAGES)), **pins}
    assert lanes.lane_of(versions) == lanes.nearest(versions) == lane
    assert diagnose(versions, HOPPER, driver="580.65.06") == []
    del versions["quack-kernels"]
    assert lanes.lane_of(versions) is None


def test_a_mixture_of_lanes_names_the_lane_of_each_package_and_mends_to_the_nearest():
    versions = cute("4.8.1", "0.6.2", "4.0.0b36")
    (found,) = [f for f in diagnose(versions, HOPPER) if "tried together" in f.text]
    assert "nvidia-cutlass-dsl 4.8.1 (cute-latest), quack-kernels 0.6.2 (cute)" in found.text
    assert "the nearest lane is cute-latest" in found.text
    assert found.fix == (
        "pip install 'nvidia-cutlass-dsl[cu13]==4.8.1' quack-kernels==0.6.5 "
        "flash-attn-4==4.0.0b36 nvidia-cudnn-frontend==1.32.0"
    )


@pytest.mark.parametrize(
    ("driver", "lane", "warns"),
    [
        ("570.86.15", "cute", True),
        ("580.65.06", "cute", False),
        ("570.86.15", "cute-latest", False),
        (None, "cute", False),
    ],
)
def test_a_driver_before_cuda_13_is_named_where_its_libraries_do_not_compile(driver, lane, warns):
    pins = lanes.pins(lane)
    versions = {**cute(*(pins[name] for name in lanes.CUTE_PACKAGES)), **pins}
    found = diagnose(versions, HOPPER, driver=driver)
    assert bool(found) == warns
    for finding in found:
        assert "driver 570.86.15 is older than CUDA 13" in finding.text
        assert "flash-attn-4 4.0.0b19 cannot compile" in finding.text
        assert "a driver from 580 on, or pip install 'nvidia-cutlass-dsl[cu13]" in str(finding.fix)


def test_packages_that_break_each_other_do_not_break_the_report(monkeypatch: pytest.MonkeyPatch):
    def broken(_: object) -> list[str]:
        raise AttributeError("module 'cutlass' has no attribute 'old_name'")

    planted = Implementation("flash", "planted", broken, reference.run)
    monkeypatch.setattr(registry, "_FASTEST_FIRST", (planted,))
    (status,) = doctor.implementation_statuses()
    assert status.why_not is not None
    assert "do not fit each other (AttributeError: module 'cutlass'" in status.why_not


@pytest.mark.parametrize(
    ("name", "version", "expected"),
    [
        ("triton", "3.6.0", "interpreter fails"),
        ("ipykernel", "7.4.0", "stalls"),
    ],
)
def test_a_known_bad_version_is_a_warning_with_a_fix(name: str, version: str, expected: str):
    (found,) = diagnose({**GOOD, name: version}, HOPPER)
    assert (found.level, found.topic) == ("warning", name)
    assert expected in found.text
    assert found.fix is not None
    assert found.fix.startswith("pip install")


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ({"diffusers": "0.35.1", "ftfy": "6.3"}, "0.35.2 and later"),
        ({"accelerate": ""}, "no Wan transformer can be read"),
        ({"transformers": ""}, "none of its pipelines can be opened"),
        ({"diffusers": "0.36.0"}, "cannot take a prompt"),
    ],
)
def test_what_an_installed_diffusers_lacks_is_a_warning_with_a_fix(
    versions: dict[str, str], expected: str
):
    stack = {"diffusers": "0.42.1", "transformers": "5", "accelerate": "1", **versions}
    present = {name: version for name, version in stack.items() if version}
    (found,) = diagnose({**GOOD, **present}, HOPPER)
    assert (found.level, found.topic) == ("warning", "diffusers")
    assert expected in found.text
    assert found.fix is not None


def test_triton_3_6_0_is_fine_with_an_older_numpy():
    assert diagnose({**GOOD, "triton": "3.6.0", "numpy": "2.3.5"}, HOPPER) == []


@pytest.mark.parametrize("name", REQUIRED_PACKAGES)
def test_a_missing_required_package_is_an_error(name: str):
    versions = {key: value for key, value in GOOD.items() if key != name}
    levels = {finding.topic: finding.level for finding in diagnose(versions, HOPPER)}
    assert levels == {name: "error"}


@pytest.mark.parametrize(("name", "version"), [("torch", "2.10.0"), ("python", "3.10.4")])
def test_a_required_package_that_is_too_old_is_an_error(name: str, version: str):
    (found,) = diagnose({**GOOD, name: version}, HOPPER)
    assert (found.level, found.topic) == ("error", name)
    assert version in found.text


@pytest.mark.parametrize(
    ("torch", "driver", "level", "expected"),
    [
        ("2.13.0+cpu", None, "note", "no NVIDIA driver"),
        ("2.13.0+cpu", "580.1", "warning", "build without CUDA"),
        ("2.13.0+cu130", "580.1", "warning", "sees no GPU"),
    ],
)
def test_why_no_gpu_is_used_is_said(torch: str, driver: str | None, level: str, expected: str):
    (found,) = diagnose({**GOOD, "torch": torch}, None, driver=driver)
    assert found.level == level
    assert expected in found.text


def test_errors_come_before_warnings_and_notes():
    versions = {**GOOD, "torch": "2.10.0", "ipykernel": "7.4.0"}
    levels = [finding.level for finding in diagnose(versions, None)]
    assert levels == ["error", "warning", "note"]


def test_a_version_that_pep_440_does_not_know_breaks_nothing():
    assert diagnose({**GOOD, "ipykernel": "unknown"}, HOPPER) == []


def planted_report(*findings: Finding) -> Report:
    return Report(
        platform="Linux",
        python="3.11.7",
        torch_cuda="13.0",
        driver="580.1",
        gpus=[HOPPER],
        packages={"torch": "2.13.0", "flash-attn-4": None},
        chromium=None,
        implementations=[
            ImplementationStatus("eager", None),
            ImplementationStatus("cute", "flash-attn-4 is not installed"),
        ],
        findings=list(findings),
        cute_lane="cute-latest",
    )


def test_json_has_the_documented_keys():
    shown = json.loads(doctor.to_json(planted_report(Finding("note", "gpu", "text"))))
    assert (shown["schema"], shown["ok"]) == (1, True)
    assert shown["packages"] == {"torch": "2.13.0", "flash-attn-4": None}
    assert shown["gpus"] == [{"name": "H200", "capability": [9, 0], "memory_bytes": 141 * 2**30}]
    assert shown["implementations"][1]["why_not"] == "flash-attn-4 is not installed"
    assert shown["cute_lane"] == "cute-latest"
    assert shown["findings"] == [{"level": "note", "topic": "gpu", "text": "text", "fix": None}]


def test_only_an_error_makes_the_report_not_ok():
    assert planted_report(Finding("warning", "cute", "text")).ok
    assert not planted_report(Finding("error", "torch", "text")).ok


def test_the_text_names_the_implementations_the_reasons_and_the_fix():
    stream = io.StringIO()
    report = planted_report(Finding("error", "torch", "torch is missing", "pip install torch"))
    doctor_text.show(report, Console(file=stream, width=100))
    shown = stream.getvalue()
    for expected in (
        "H200, capability 9.0, 141 GiB",
        "CuTe lane",
        "dense calls of eager are torch SDPA",
        "cute-latest",
        "no: flash-attn-4 is not installed",
        "error: torch is missing",
        "fix: pip install torch",
        "Not ready",
    ):
        assert expected in shown


def test_this_machine_is_ready_and_the_reference_runs_here():
    report = doctor.examine()
    assert report.ok, texts(report.findings)
    reasons = {status.name: status.why_not for status in report.implementations}
    assert reasons["reference"] is None
    assert report.packages["torch"] is not None


def test_the_report_says_how_many_compiled_kernels_are_kept_and_where(tmp_path, monkeypatch):
    monkeypatch.setenv("BLOCKATTN_CACHE", str(tmp_path))
    for name, size in (("a.so", 3 * 2**20), ("b.so", 2**19), ("c.tmp", 2**20)):
        (tmp_path / name).write_bytes(b"0" * size)
    report = doctor.examine()
    assert report.kernels == doctor.KernelFolder(str(tmp_path), 2, 3 * 2**20 + 2**19)
    stream = io.StringIO()
    doctor_text.show(report, Console(file=stream, width=300))
    assert f"2 kept, 3.5 MiB, in {tmp_path}" in stream.getvalue()
