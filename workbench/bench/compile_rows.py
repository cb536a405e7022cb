"""Row 14: seconds until a CuTe kernel can be launched, compiled or from disk, in a new process."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from blockattn.impl import cute
from blockattn.impl.cute.variant import Variant
from workbench.bench.cases import Case, Run

ROUNDS = 3  # loads from disk behind each median
VARIANTS: Mapping[str, Variant] = {
    "dense": Variant(),
    "Sol-Attn": Variant(routed=True, tail=True),
}
SCRIPT = """
import json, sys
import torch
from blockattn.impl.cute import ARCH, cache
from blockattn.impl.cute.variant import Variant
_, load = cache.kernel(Variant(**json.loads(sys.argv[1])), ARCH)
print(json.dumps({"source": load.source, "seconds": load.seconds, "note": load.note}))
"""


def compile_rows(run: Run, wanted: Collection[int]) -> list[Case]:
    """One case for every variant and source; torch is imported before, the compiler is not."""
    obstacles = cute.obstacles(None)
    if obstacles:
        run.absent["row 14"] = "; ".join(obstacles)
        return []
    found = []
    for name, variant in VARIANTS.items():
        with tempfile.TemporaryDirectory(prefix="workbench-") as folder:
            compiled = [measure(variant, Path(folder), "compiled")]
            loaded = [measure(variant, Path(folder), "disk") for _ in range(ROUNDS)]
        for impl, seconds in (("cute", compiled), ("cute from disk", loaded)):
            middle = statistics.median(seconds)
            setting = f"{name}: {variant}, new process, imports of compiler and loader included"
            found.append(Case(14, setting, "seconds", {impl: middle}, samples={impl: seconds}))
    return found


def measure(variant: Variant, folder: Path, source: str) -> float:
    """Seconds in a new process whose kernels are kept in ``folder``.

    Raises:
        RuntimeError: the process failed, or the kernel came from elsewhere than ``source``.
    """
    made = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(asdict(variant))],
        env={**os.environ, "BLOCKATTN_CACHE": str(folder)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    if made.returncode:
        raise RuntimeError(f"loading {variant} failed: {made.stderr.strip()[-500:]}")
    load: dict[str, Any] = json.loads(made.stdout.splitlines()[-1])
    if load["source"] != source:
        raise RuntimeError(f"{variant} came from {load['source']}, not {source}: {load['note']}")
    return float(load["seconds"])
