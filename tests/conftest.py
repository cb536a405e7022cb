"""What every test shares: GPU markers that say what is missing, hypothesis profile, threads."""

from __future__ import annotations

import os

import matplotlib
import pytest
import torch
from hypothesis import settings

matplotlib.use("Agg")
# Triton decides at the definition of a kernel whether Python interprets it.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Most tensors here are small: a second thread costs more than it gives, above all on a busy CPU.
torch.set_num_threads(1)

settings.register_profile("workbench", deadline=None, max_examples=25)
settings.register_profile(
    "ci", parent=settings.get_profile("workbench"), derandomize=True, print_blob=True
)
settings.load_profile("ci" if os.environ.get("CI") else "workbench")

_CAPABILITIES = {"sm90": ((9, 0),), "sm100": ((10, 0), (10, 3))}


def _why_skipped(marker: str) -> str | None:
    """What this machine lacks for a test with `marker`, or None when it can run."""
    if not torch.cuda.is_available():
        return "needs a CUDA GPU: torch.cuda.is_available() is False"
    wanted = _CAPABILITIES.get(marker)
    have = torch.cuda.get_device_capability()
    if wanted is None or have in wanted:
        return None
    names = " or ".join(f"{major}.{minor}" for major, minor in wanted)
    return f"needs compute capability {names}: this GPU has {have[0]}.{have[1]}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for marker in ("gpu", "sm90", "sm100"):
            reason = _why_skipped(marker) if item.get_closest_marker(marker) else None
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))
