"""One CuTe lane on a machine without a GPU: imports everything, compiles a kernel of each family.

    python .ci/cute_lane.py LANE                 every probe, each in a process of its own
    python .ci/cute_lane.py LANE PROBE ARCH      one of them

What fails is named by lane, probe and architecture; the exit status is then 1. Compiling says
nothing about what a kernel computes. `.ci/cute` makes the environments and calls this in each.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
ARCHS = ("sm_90a", "sm_100a")
LIMIT = 300  # seconds that a probe may take
MODULES = (
    "cutlass.cute", "cutlass.pipeline", "cutlass.utils", "quack.softmax", "quack.topk",
    "quack.gemm", "quack.gemm_interface", "quack.rmsnorm", "flash_attn.cute",
    "flash_attn.cute.interface", "flash_attn.cute.block_sparsity", "tvm_ffi",
)  # fmt: skip


def imports(lane: str, arch: str) -> None:
    """The lane is installed whole; its modules and those of this project import."""
    from blockattn.impl import cute
    from workbench.doctor import lanes
    from workbench.provenance import package_versions

    have = package_versions(lanes.pins(lane))
    if have != lanes.pins(lane):
        raise RuntimeError(f"installed is {have}, the lane {lane} is {lanes.pins(lane)}")
    own = [module.name for module in pkgutil.iter_modules(cute.__path__, f"{cute.__name__}.")]
    others = ["cudnn.block_sparse_attention.api"] if "nvidia-cudnn-frontend" in have else []
    for name in (*MODULES, *others, *own):
        importlib.import_module(name)


def flash_dense(lane: str, arch: str) -> None:
    """flash-attn-4 through the project's adapter, without a mask."""
    _compile_flash(None)


def flash_block_sparse(lane: str, arch: str) -> None:
    """flash-attn-4 through the project's adapter, every block mask that it serves."""
    from blockattn.impl import flash

    for block in flash.blocks_served(str(flash.LIBRARY.version()), int(arch[3:-2])):
        _compile_flash(block)


def quack_softmax(lane: str, arch: str) -> None:
    """A kernel of quack."""
    import cutlass
    from quack.softmax import Softmax

    Softmax.compile(cutlass.BFloat16, cutlass.BFloat16, 1024)


def own_elementwise(lane: str, arch: str) -> None:
    """A kernel written here: the language and the compiler alone."""
    import cute_elementwise  # beside this file

    if f".target {arch}" not in cute_elementwise.compile_for(arch):
        raise RuntimeError(f"the compiler was asked for {arch} and wrote none of it")


def own_attention(lane: str, arch: str) -> None:
    """The attention kernel of this project, dense and with a route and its tail."""
    from blockattn.impl.cute import build
    from blockattn.impl.cute.variant import Variant

    for variant in (Variant(), Variant(routed=True, tail=True, lse=True)):
        build.compile_variant(variant, arch)


PROBES: dict[str, tuple[Callable[[str, str], None], tuple[str, ...]]] = {
    "imports": (imports, ("any",)),
    "own-elementwise": (own_elementwise, ARCHS),
    "own-attention": (own_attention, ("sm_90a",)),
    "quack-softmax": (quack_softmax, ARCHS),
    "flash-dense": (flash_dense, ARCHS),
    "flash-block-sparse": (flash_block_sparse, ARCHS),
}


class _NoDriver:
    """The one question to a driver, answered for the GPUs compiled for."""

    def get_max_active_clusters(self, size: int) -> int:
        return 148 // size

    def get_device_multiprocessor_count(self) -> int:
        return 148


def _compile_flash(block: tuple[int, int] | None) -> None:
    """Fake tensors make the library compile and not launch."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from blockattn.impl import flash
    from blockattn.problem import Problem
    from blockattn.route import BlockRoute

    utils: Any = importlib.import_module("cutlass.utils")
    utils.HardwareInfo = utils.hardware_info.HardwareInfo = _NoDriver
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, k, v = (torch.empty(1, 512, 2, 128, dtype=torch.bfloat16, device="cuda") for _ in "qkv")
        route, lists = None, None
        if block is not None:
            grid = [-(-512 // size) for size in block]
            words = torch.empty(1, 2, grid[0], 1, dtype=torch.int32, device="cuda")
            route = BlockRoute(words, block, (512, 512))
            index = torch.empty(1, 2, *grid, dtype=torch.int32, device="cuda")
            lists = (index, index.new_empty(1, 2, grid[0]))
        problem = Problem(q, k, v, scale=0.1, route=route, want_trace=True)
        flash.forward(problem, lists)
    if not flash.LIBRARY.load()._flash_attn_fwd.compile_cache.cache:
        raise RuntimeError("flash-attn-4 compiled nothing")


def run_probe(lane: str, probe: str, arch: str) -> SimpleNamespace:
    """A probe in a process of its own, because the architecture belongs to the process."""
    target = {} if arch == "any" else {"CUTE_DSL_ARCH": arch, "QUACK_ARCH": arch}
    target |= {} if arch == "any" else {"FLASH_ATTENTION_ARCH": arch}
    counts = {"FLASH_ATTENTION_NUM_SMS": "148" if arch == "sm_100a" else "132"}
    start = time.perf_counter()
    command = [sys.executable, str(Path(__file__).resolve()), lane, probe, arch]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT,
            env={**os.environ, **target, **counts, "QUACK_CACHE_ENABLED": "0"},
        )
        status, text = done.returncode, done.stderr
    except subprocess.TimeoutExpired:
        status, text = 124, f"stopped after {LIMIT} s"
    return SimpleNamespace(ok=status == 0, text=text, seconds=time.perf_counter() - start)


def main(lane: str) -> int:
    """Every probe of a lane, a line each."""
    failed = []
    for probe, (_, archs) in PROBES.items():
        for arch in archs:
            found = run_probe(lane, probe, arch)
            state = "ok" if found.ok else "FAILED"
            print(f"{lane} {probe} {arch}: {state} {found.seconds:.1f} s", flush=True)
            if not found.ok:
                failed.append(f"{lane} {probe} {arch}")
                print("\n".join(f"    {x}" for x in found.text.splitlines()[-8:]), flush=True)
    print(f"{lane}: {'failed: ' + ', '.join(failed) if failed else 'every probe passed'}")
    return int(bool(failed))


if __name__ == "__main__":
    if len(sys.argv) == 4:
        PROBES[sys.argv[2]][0](sys.argv[1], sys.argv[3])
    else:
        sys.exit(main(sys.argv[1]))
