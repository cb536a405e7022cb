"""Compiles variants for a GPU that is not there and reads what the binary needs.

cutlass compiles, the disassembler in Triton's wheel reads; no driver is used. It says nothing about
the numbers that a kernel computes. ``python -m blockattn.impl.cute.compile_only`` prints a table.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from blockattn.impl.cute import ARCH, build
from blockattn.impl.cute.variant import Variant

INSTRUCTIONS: Mapping[str, str] = {
    "wgmma": r"HGMMA",
    "matrix wait": r"WARPGROUP\.DEPBAR",
    "tma load": r"UTMALDG",
    "tma store": r"UTMASTG",
    "exp2": r"MUFU\.EX2",
    "register split": r"USETMAXREG",
    "spill": r"(?:LDL|STL)\b",
}
EXAMPLES: Mapping[str, Variant] = {
    "dense": Variant(),
    "dense lse": Variant(lse=True),
    "dense fp16 D=64": Variant(dtype="fp16", dim=64),
    "causal": Variant(causal=True, lse=True),
    "mask": Variant(routed=True),
    "mask D=64": Variant(routed=True, dim=64),
    "sol": Variant(routed=True, tail=True, lse=True),
    "sol device scales": Variant(routed=True, tail=True, device_scales=True),
    "padded": Variant(lengths=True),
    "padded sol": Variant(routed=True, tail=True, lengths=True),
    "skip 64": Variant(skip=64, lse=True),
    "skip 128": Variant(skip=128, lse=True),
    "skip causal": Variant(skip=64, causal=True),
    "skip sol": Variant(skip=64, routed=True, tail=True, lse=True),
}


@dataclass(frozen=True)
class Resources:
    """What one binary needs.

    Attributes:
        registers: per thread at launch, before warp groups share them out anew.
        stack: bytes per thread in memory, where registers spill to.
        shared: bytes of static shared memory; the ring of tiles is dynamic and not counted.
        instructions: how often each kind occurs in the machine code.
        seconds: of the compilation.
    """

    registers: int
    stack: int
    shared: int
    instructions: dict[str, int]
    seconds: float


def resources(variant: Variant, arch: str = ARCH) -> Resources:
    """Compiles one variant."""
    with tempfile.TemporaryDirectory(prefix="blockattn-") as folder:
        start = time.perf_counter()
        build.compile_variant(variant, arch, f"--keep-cubin --dump-dir {folder}")
        seconds = time.perf_counter() - start
        (binary,) = Path(folder).rglob("*.cubin")
        usage = _tool("cuobjdump", "--dump-resource-usage", str(binary))
        code = _tool("nvdisasm", "-c", str(binary))
    counts = {name: len(re.findall(pattern, code)) for name, pattern in INSTRUCTIONS.items()}
    return Resources(
        _number("REG", usage), _number("STACK", usage), _number("SHARED", usage), counts, seconds
    )


def _tool(name: str, *arguments: str) -> str:
    """Output of a program that comes with Triton."""
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([path, *arguments], check=True, capture_output=True, text=True).stdout


def _number(name: str, usage: str) -> int:
    return max(int(value) for value in re.findall(rf"\b{name}:(\d+)", usage))


def main() -> None:
    """A table of the examples."""
    for name, variant in EXAMPLES.items():
        found = resources(variant)
        counts = ", ".join(f"{key} {value}" for key, value in found.instructions.items())
        print(
            f"{name:18} {found.seconds:5.2f} s, {found.registers} registers, "
            f"stack {found.stack}, shared {found.shared}; {counts}"
        )


if __name__ == "__main__":
    main()
