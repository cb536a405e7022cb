"""The CuTe kernel builds for Hopper without a GPU: TMA, matrix unit, no spilled register.

One round through the real compiler, linker, file and loader as well.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="needs triton (Linux), which has the disassembler")
WHY = "needs the CuTe DSL stack: pip install -e '.[cute-latest]' or '.[cute]'"
pytest.importorskip("tvm_ffi", reason=WHY)
pytest.importorskip("cutlass", reason=WHY)

from blockattn.impl.cute.compile_only import EXAMPLES, resources  # noqa: E402

pytestmark = pytest.mark.timeout(300)  # a busy machine


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_kind_of_kernel_builds_without_spills(name):
    found = resources(EXAMPLES[name])
    assert found.instructions["spill"] == 0
    assert found.stack == 0
    # 384 threads share 65,536 registers.
    assert found.registers <= 168
    for unit in ("wgmma", "tma load", "tma store", "exp2", "register split"):
        assert found.instructions[unit] > 0, unit
    # Where it sees no way to keep products in flight, the assembler waits after every single one.
    assert found.instructions["matrix wait"] < found.instructions["wgmma"] / 2


SCRIPT = """
import sys, torch
from blockattn.impl.cute import ARCH, cache
from blockattn.impl.cute.variant import Variant
kernel, load = cache.kernel(Variant(routed=True, tail=True, lse=True), ARCH)
q = torch.zeros(1, 64, 1, 128, dtype=torch.bfloat16)
try:
    kernel(q)
except (TypeError, ValueError) as error:
    heavy = {"cutlass", "quack", "torch._dynamo"} & set(sys.modules)
    print(load.source, sorted(heavy), repr(load.note), str(error))
"""


def start(folder, **more: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "BLOCKATTN_CACHE": str(folder), **more}
    command = [sys.executable, "-c", SCRIPT]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def test_a_kernel_comes_back_from_disk_without_the_compiler(tmp_path):
    compiled, loaded = (start(tmp_path).communicate()[0] for _ in range(2))
    assert compiled.startswith("compiled ['cutlass'] ''")  # quack alone takes 1.5 s
    assert loaded.startswith("disk [] ''")
    # Both are the same function: the loader names its parameters when a call does not fit them.
    assert "pair_index" in loaded
    assert compiled.partition("''")[2] == loaded.partition("''")[2]


def test_processes_that_compile_at_once_all_get_the_kernel(tmp_path):
    processes = [start(tmp_path) for _ in range(2)]
    found = [process.communicate()[0] for process in processes]
    assert all("pair_index" in text for text in found), found
    assert [path.suffix for path in tmp_path.iterdir()] == [".so"]


def test_a_kernel_that_cannot_be_kept_is_called_from_memory(tmp_path):
    file = tmp_path / "not-a-folder"
    file.touch()
    # cutlass makes functions to call for the GPU that is here alone.
    text = start(file / "kernels", CUTE_DSL_ARCH="sm_90a").communicate()[0]
    assert text.startswith("compiled ['cutlass'] \"not kept on disk: ")
    assert "pair_index" in text
