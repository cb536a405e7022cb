"""Small launches of every GPU kernel under compute-sanitizer: a line for each tool and kernel.

    python .ci/sanitize.py           every tool and kernel; details of what was found come last
    python .ci/sanitize.py KERNEL    one launch without a tool, compared with plain PyTorch

Each pair runs in a process of its own with a limit, several at once, so that one that hangs is
named and costs its own time alone. Before that every kernel runs without a tool, which compiles it.
What is not shown to be clean, unfinished pairs included, makes the exit status 1. By its release
notes, racecheck before 2026.3 may report hazards of warp groups and mbarriers that are none.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from glob import glob
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
from blockattn import attend, quantised_attention, sol_attention  # noqa: E402
from blockattn.quant_formats import (  # noqa: E402
    quantise_fp8_values,
    quantise_mxfp8,
    quantise_nvfp4,
)

TOOLS = ("racecheck", "memcheck", "synccheck")  # the slowest first
LIMIT = 45  # seconds of a tool on a kernel
COMPILE_LIMIT = 90  # seconds of a launch without a tool
WORKERS = 12
PORT, PORTS = 49152, 16  # of the tool's connections; every process gets some of its own
KILLED = (124, 137, -signal.SIGKILL)  # by timeout
SHOWN = 12  # lines of what a launch printed that is not clean
TOLERANCE = 0.05  # of bfloat16 results of about 1
CLEAN = "nothing found"
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")

Call = Callable[..., Any]
Pair = tuple[str | None, str]  # tool or none, kernel
SPARSE: Mapping[str, Call] = {
    "dense": attend,
    "sol": partial(sol_attention, tau=0.0),  # preparation, routing, lists, route and tail
    "skip 64": partial(attend, skip_threshold=0.2, skip_tile=(64, 64)),
    "skip 128": partial(attend, skip_threshold=0.2, skip_tile=(128, 128)),
}
# Kernels of Triton that calls of this size do not reach -> the call that gets them here.
GROUPS: Mapping[str, str] = {"groups 64": "skip 64", "groups 128": "skip 128"}  # on Hopper
FORCED: Mapping[str, str] = {**GROUPS, "split": "dense"}
SPLITS = 3  # shares of the keys, merged by a kernel of their own
QUANTISERS: Mapping[str, Call] = {
    "mxfp8": quantise_mxfp8,
    "nvfp4": quantise_nvfp4,
    "fp8 v": quantise_fp8_values,
}


def kernels() -> list[str]:
    """Names of the launches whose packages are here; those of CuTe need Hopper."""
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    names = (*SPARSE, "quantised", *FORCED)
    found = [f"triton {name}" for name in names if hopper or name not in GROUPS]
    if all(map(find_spec, ("tvm_ffi", "cutlass"))):
        found += [f"cute {name}" for name in SPARSE]
    return found + [f"quantiser {name}" for name in QUANTISERS]


def result(kernel: str, device: str) -> Tensor:
    """One call; everything but the kernels that it is about happens on the CPU.

    330 tokens: three pairs of query blocks, the last block ragged. Keys fade, so that votes drop.
    """
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 330, 2, 128, generator=generator) for _ in range(3))
    k = k * torch.linspace(3, 0.3, 330)[:, None, None]
    data = [x.bfloat16().to(device) for x in (q, k, v)]
    impl, name = kernel.split(" ", 1)
    if impl == "quantiser":
        return QUANTISERS[name](data[0]).dequantise().cpu()
    call = quantised_attention if name == "quantised" else SPARSE[FORCED.get(name, name)]
    if device == "cpu":
        return call(*data, impl="reference")
    with forced(name):
        return call(*data, impl=impl).cpu()


@contextmanager
def forced(name: str) -> Iterator[None]:
    """Within it Triton takes the kernel of :data:`FORCED` whatever the size; else nothing changes.

    Raises:
        RuntimeError: by the call, where that kernel does not compute it at any size.
    """
    if name not in FORCED:
        yield
        return
    from blockattn.impl.triton import launch as host

    def grouped(problem: Any) -> bool:
        if not host.groups_serve(problem):
            raise RuntimeError(f"{name}: the kernel with warp groups does not serve this call")
        return True

    if name in GROUPS:
        changed = patch.object(host, "votes_in_groups", grouped)
    else:
        changed = patch.object(host, "split_count", lambda problem, tiles: SPLITS)
    with changed:
        yield


def launch(kernel: str, device: str = "cuda") -> int:
    """0 where a kernel agrees with plain PyTorch."""
    error = float((result(kernel, device).float() - result(kernel, "cpu").float()).abs().max())
    print(f"{kernel}: largest error {error:.2g}")
    return int(not error <= TOLERANCE)  # a NaN is no agreement


def under(tool: str | None, kernel: str, number: int = 0) -> tuple[str, str]:
    """A launch in a process of its own: the verdict and all that it printed."""
    command, limit = [sys.executable, __file__, kernel], COMPILE_LIMIT
    if tool is not None:
        ports = ["--port", str(PORT + PORTS * number), "--max-connections", str(PORTS)]
        command, limit = [program(), "--tool", tool, *ports, *command], LIMIT
    # timeout ends all that a launch started, also where this script was ended before.
    command = ["timeout", "--kill-after=5", str(limit), *command]
    # Without torch's cache every tensor is an allocation of its own, so that a step past it shows.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    with tempfile.TemporaryFile("w+") as output:
        status = subprocess.run(
            command, stdout=output, stderr=output, env=environment, check=False
        ).returncode
        output.seek(0)
        text = output.read()
    return verdict(tool, status, text, limit), text


def verdict(tool: str | None, status: int, text: str, limit: int) -> str:
    """What a process showed, in words; :data:`CLEAN` where it ended well and found nothing."""
    found = SUMMARY.search(text)
    if status in KILLED:
        return f"not finished after {limit} s"
    if found and int(found[1]):
        return f"{found[1]} reports"
    if status or (tool is not None and not found):
        return f"failed with status {status}"
    return CLEAN


def program() -> str:
    """compute-sanitizer of the search path, else of the newest toolkit.

    Raises:
        FileNotFoundError: there is none.
    """
    found = shutil.which("compute-sanitizer")
    others = sorted(glob("/usr/local/cuda*/bin/compute-sanitizer"))
    if found is None and not others:
        raise FileNotFoundError("compute-sanitizer is neither on PATH nor in /usr/local/cuda*")
    return found or others[-1]


def sweep(pairs: Sequence[Pair]) -> dict[Pair, tuple[str, str]]:
    """A line for each pair as it ends; verdict and output of those that are not clean."""

    def run(number: int) -> tuple[str, str]:
        tool, kernel = pairs[number]
        said, text = under(tool, kernel, number)
        print(f"{tool or 'no tool':10} {kernel:17} {said}", flush=True)
        return said, text

    with ThreadPoolExecutor(WORKERS) as pool:
        found = dict(zip(pairs, pool.map(run, range(len(pairs)))))
    return {pair: (said, text) for pair, (said, text) in found.items() if said != CLEAN}


def main() -> int:
    """Every kernel without a tool, then those that ran with every tool."""
    print(subprocess.run([program(), "--version"], capture_output=True, text=True).stdout.strip())
    names = kernels()
    dirty = sweep([(None, name) for name in names])
    dirty |= sweep([pair for pair in product(TOOLS, names) if (None, pair[1]) not in dirty])
    lines = [f"{tool or 'no tool'} {kernel}: {said}" for (tool, kernel), (said, _) in dirty.items()]
    for line, (_, text) in zip(lines, dirty.values()):
        print(f"\n=== {line}\n" + "\n".join(text.splitlines()[:SHOWN]))
    print("\nnot clean:", "; ".join(lines) or "none")
    return int(bool(dirty))


if __name__ == "__main__":
    sys.exit(main() if len(sys.argv) == 1 else launch(sys.argv[1]))
