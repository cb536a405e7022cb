"""What this machine can run, and why not the rest."""

from workbench.doctor.checkup import (
    Finding,
    GpuInfo,
    ImplementationStatus,
    Report,
    diagnose,
)

__all__ = [
    "Finding",
    "GpuInfo",
    "ImplementationStatus",
    "Report",
    "diagnose",
]
