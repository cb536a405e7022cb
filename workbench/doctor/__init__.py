"""What this machine can run, and why not the rest."""

from workbench.doctor.checkup import (
    Finding,
    GpuInfo,
    ImplementationStatus,
    KernelFolder,
    Report,
    diagnose,
)

__all__ = [
    "Finding",
    "GpuInfo",
    "ImplementationStatus",
    "KernelFolder",
    "Report",
    "diagnose",
]
