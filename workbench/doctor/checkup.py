"""What this machine can run and why not the rest: `workbench doctor`.

`diagnose` is a plain function of versions and GPU, so that a test can plant any combination.
Nothing optional is imported: versions come from the metadata of installed distributions.
The JSON report (`to_json`) has the keys of `Report`, plus `schema` (1) and `ok`; keys are only
ever added to it.
"""

from __future__ import annotations

import dataclasses
import json
import platform
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from workbench.doctor import lanes
from workbench.doctor.versions import (
    MINIMUMS,
    OPTIONAL_PACKAGES,
    REQUIRED_PACKAGES,
    RULES,
    Rule,
)
from workbench.provenance import driver_version, package_versions

Level = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class Finding:
    """One thing to know. `error`: something required is missing or broken; `fix`: a command."""

    level: Level
    topic: str
    text: str
    fix: str | None = None


@dataclass(frozen=True)
class GpuInfo:
    """A CUDA device as torch sees it; `capability` is (major, minor), memory is in bytes."""

    name: str
    capability: tuple[int, int]
    memory_bytes: int


@dataclass(frozen=True)
class ImplementationStatus:
    """Whether an implementation of `attend` can run here; `why_not` is None when it can."""

    name: str
    why_not: str | None


@dataclass(frozen=True)
class KernelFolder:
    """Compiled CuTe kernels that are kept on disk: where, how many, bytes in all."""

    path: str
    files: int
    size: int


@dataclass(frozen=True)
class Report:
    """All that `workbench doctor` found. `packages` maps a distribution to its version or None;
    `cute_lane` is the lane that is installed whole (`workbench.doctor.lanes`); `kernels` is None
    where torch does not load."""

    platform: str
    python: str
    torch_cuda: str | None
    driver: str | None
    gpus: list[GpuInfo]
    packages: dict[str, str | None]
    chromium: str | None
    implementations: list[ImplementationStatus]
    findings: list[Finding]
    cute_lane: str | None = None
    kernels: KernelFolder | None = None

    @property
    def ok(self) -> bool:
        """True when nothing that is required is missing or broken."""
        return all(finding.level != "error" for finding in self.findings)


def diagnose(
    versions: Mapping[str, str], gpu: GpuInfo | None, *, driver: str | None = None
) -> list[Finding]:
    """Judge a set of installed versions.

    Args:
        versions: distribution name -> version of what is installed; "python" is one of the names.
        gpu: the first GPU that torch sees, or None.
        driver: version of the NVIDIA kernel driver, or None without one.

    Returns:
        Findings, errors first. An empty list means that nothing is wrong.
    """
    findings = [
        *_missing(versions),
        *_too_old(versions),
        *_broken_rules(versions),
        *_cute_stack(versions),
        *_cute_driver(versions, driver),
        *_gpu(versions, gpu, driver),
    ]
    order: dict[Level, int] = {"error": 0, "warning": 1, "note": 2}
    return sorted(findings, key=lambda finding: order[finding.level])


def _missing(versions: Mapping[str, str]) -> Iterator[Finding]:
    for name in REQUIRED_PACKAGES:
        if name not in versions and not (name == "triton" and platform.system() != "Linux"):
            yield Finding("error", name, f"{name} is not installed", f"pip install {name}")


def _too_old(versions: Mapping[str, str]) -> Iterator[Finding]:
    for name, minimum in MINIMUMS.items():
        have = versions.get(name)
        if have is not None and not _matches(have, f">={minimum}"):
            fix = None if name == "python" else f"pip install '{name}>={minimum}'"
            yield Finding("error", name, f"{name} {have} is older than {minimum}", fix)


def _broken_rules(versions: Mapping[str, str]) -> Iterator[Finding]:
    for rule in RULES:
        if _applies(rule, versions):
            have = ", ".join(f"{name} {versions[name]}" for name in rule.when)
            fix = rule.fix or lanes.fix(lanes.nearest(versions))
            yield Finding("warning", next(iter(rule.when)), f"{have}: {rule.why}", fix)


def _applies(rule: Rule, versions: Mapping[str, str]) -> bool:
    present = all(
        name in versions and _matches(versions[name], spec) for name, spec in rule.when.items()
    )
    return present and all(name not in versions for name in rule.absent)


def _cute_stack(versions: Mapping[str, str]) -> Iterator[Finding]:
    have = {name: versions[name] for name in lanes.CUTE_PACKAGES if name in versions}
    listed, lane = lanes.described(versions), lanes.nearest(versions)
    if have and len(have) < len(lanes.CUTE_PACKAGES):
        lacking = ", ".join(name for name in lanes.CUTE_PACKAGES if name not in versions)
        text = f"only {listed}; the lane {lane} also needs {lacking}"
        yield Finding("note", "cute", text, lanes.fix(lane))
    elif have and tuple(have.values()) not in lanes.TRIED_SETS:
        text = f"{listed}: not a set that was tried together; the nearest lane is {lane}"
        yield Finding("warning", "cute", text, lanes.fix(lane))
    yield from _mixed_libraries(versions)


def _mixed_libraries(versions: Mapping[str, str]) -> Iterator[Finding]:
    dsl = versions.get("nvidia-cutlass-dsl")
    for suffix in ("base", "core", "cu12", "cu13"):
        name = f"nvidia-cutlass-dsl-libs-{suffix}"
        if dsl is not None and versions.get(name, dsl) != dsl:
            text = f"{name} {versions[name]} does not match nvidia-cutlass-dsl {dsl}"
            yield Finding("warning", "cute", text, lanes.fix(lanes.nearest(versions)))


def _cute_driver(versions: Mapping[str, str], driver: str | None) -> Iterator[Finding]:
    """The beta of the lane `cute` takes the CUDA 12.9 libraries for those of an older compiler."""
    beta = lanes.pins("cute")["flash-attn-4"]
    if driver is None or versions.get("flash-attn-4") != beta:
        return
    if _matches(driver, f"<{lanes.CUDA_13_DRIVER}"):
        text = (
            f"NVIDIA driver {driver} is older than CUDA 13, so cutlass-dsl takes its CUDA 12 "
            f"libraries, with which flash-attn-4 {beta} cannot compile; the lane cute-latest can"
        )
        fix = f"a driver from {lanes.CUDA_13_DRIVER} on, or {lanes.fix('cute-latest')}"
        yield Finding("warning", "cute", text, fix)


def _gpu(versions: Mapping[str, str], gpu: GpuInfo | None, driver: str | None) -> Iterator[Finding]:
    torch = versions.get("torch")
    if gpu is not None or torch is None:
        return
    if driver is None:
        yield Finding("note", "gpu", "no NVIDIA driver here: the CPU implementations run")
    elif "+cpu" in torch:
        text = f"NVIDIA driver {driver} is here, but torch {torch} is a build without CUDA"
        fix = f"pip uninstall -y torch && pip install torch=={torch.partition('+')[0]}"
        yield Finding("warning", "gpu", text, f"{fix}  (from an index that has the CUDA build)")
    else:
        text = f"NVIDIA driver {driver} is here, but torch {torch} sees no GPU"
        yield Finding("warning", "gpu", text, "check CUDA_VISIBLE_DEVICES, then nvidia-smi")


def _matches(version: str, spec: str) -> bool:
    """PEP 440 match, pre-releases included. A version that is no PEP 440 version matches none."""
    try:
        public = Version(Version(version).public)
    except InvalidVersion:
        return False
    return SpecifierSet(spec).contains(public, prereleases=True)


def chromium_path() -> str | None:
    """The browser that the browser test would drive."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((path for path in map(shutil.which, names) if path), None)


def _torch_devices() -> tuple[str | None, list[GpuInfo]]:
    """CUDA version torch was built for, and the GPUs it sees. Needs torch."""
    import torch

    if not torch.cuda.is_available():
        return torch.version.cuda, []
    gpus = []
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        gpus.append(GpuInfo(found.name, (found.major, found.minor), found.total_memory))
    return torch.version.cuda, gpus


def implementation_statuses() -> list[ImplementationStatus]:
    """Every implementation of `attend`, and why it cannot run here. Needs torch.

    A mixture of versions that breaks an import stops every call, but not the report that names it.
    """
    from blockattn.impl import registry

    found = []
    for item in registry.implementations():
        try:
            reason = item.why_not()
        except (AttributeError, TypeError) as error:
            reason = f"its packages do not fit each other ({type(error).__name__}: {error})"
        found.append(ImplementationStatus(item.name, reason))
    return found


def kernel_folder() -> KernelFolder:
    """What is kept of compiled CuTe kernels. Needs torch."""
    from blockattn.impl.cute import cache

    sizes = cache.contents()
    return KernelFolder(str(cache.folder()), len(sizes), sum(sizes.values()))


def examine() -> Report:
    """Look at this machine."""
    packages = package_versions([*REQUIRED_PACKAGES, *OPTIONAL_PACKAGES])
    driver = driver_version()
    cuda, gpus, implementations, kernels, broken = None, [], [], None, []
    try:
        cuda, gpus = _torch_devices()
        implementations, kernels = implementation_statuses(), kernel_folder()
    except (ImportError, OSError) as error:  # OSError: a shared library of torch does not load
        broken.append(Finding("error", "import", f"{type(error).__name__}: {error}"))
    found = {name: version for name, version in packages.items() if version is not None}
    versions = {"python": platform.python_version(), **found}
    findings = diagnose(versions, gpus[0] if gpus else None, driver=driver)
    return Report(
        platform=platform.platform(),
        python=platform.python_version(),
        torch_cuda=cuda,
        driver=driver,
        gpus=gpus,
        packages=packages,
        chromium=chromium_path(),
        implementations=implementations,
        findings=[*broken, *findings],
        cute_lane=lanes.lane_of(found),
        kernels=kernels,
    )


def to_json(report: Report) -> str:
    """The report as a JSON object; see the module docstring for the promise it keeps."""
    return json.dumps({"schema": 1, "ok": report.ok, **dataclasses.asdict(report)}, indent=2)
