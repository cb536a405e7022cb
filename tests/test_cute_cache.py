"""Compiled CuTe kernels on disk: hit, miss, damage, other sources, many processes, a full folder.

The compiler is planted, so that the rules hold wherever they are tested; test_cute_compile.py has
one round through the real one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import types
from itertools import product
from pathlib import Path

import pytest

from blockattn.impl.cute import cache
from blockattn.impl.cute.variant import DTYPES, HEAD_DIMS, SKIP_TILES, Variant

ARCH = "sm_90a"
PLAIN, ROUTED = Variant(), Variant(routed=True)


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """A fresh process with an empty folder; the list of what was compiled since."""
    compiled = []

    def compile_variant(variant, arch, call=False):
        compiled.append(variant)
        return lambda: f"{'in memory' if call else 'to be exported'}: {variant}"

    build = types.ModuleType("build")
    vars(build).update(
        compile_variant=compile_variant,
        shared_object=lambda made, name: f"{name}|{made()}".encode() * 9,
    )
    loader = types.ModuleType("tvm_ffi")
    vars(loader).update(load_module=lambda path: _Library(Path(path)))
    monkeypatch.setitem(sys.modules, "blockattn.impl.cute.build", build)
    monkeypatch.setattr("blockattn.impl.cute.build", build, raising=False)
    monkeypatch.setitem(sys.modules, "tvm_ffi", loader)
    monkeypatch.setenv(cache.FOLDER_VARIABLE, str(tmp_path / "kernels"))
    new_process(monkeypatch)
    return compiled


class _Library:
    """A loaded file: the function of its name, which says what was stored."""

    def __init__(self, path: Path) -> None:
        self.path, text = path, path.read_bytes()[: -cache.DIGEST_BYTES].decode()
        self.name = text.partition("|")[0]

    def __getitem__(self, name: str):
        assert name == self.name
        return lambda: f"from {self.path.name}"


def new_process(monkeypatch) -> None:
    monkeypatch.setattr(cache, "_kernels", {})
    monkeypatch.setattr(cache, "_loads", [])


def test_a_kernel_is_compiled_once_and_then_comes_from_memory(compiler):
    first, load = cache.kernel(PLAIN, ARCH)
    again, nothing = cache.kernel(PLAIN, ARCH)
    assert first is again
    assert nothing is None
    assert compiler == [PLAIN]
    assert load is not None
    assert (load.source, load.note) == ("compiled", "")
    assert cache.loads() == (load,)


def test_another_process_finds_it_on_disk(compiler, monkeypatch):
    cache.kernel(PLAIN, ARCH)
    new_process(monkeypatch)
    kernel, load = cache.kernel(PLAIN, ARCH)
    assert kernel() == f"from {cache.place(PLAIN, ARCH).name}"
    assert load is not None
    assert load.source == "disk"
    assert compiler == [PLAIN]
    assert str(load).startswith(f"kernel for {ARCH} (bf16 D=128, full range) loaded from disk in")


def test_each_variant_and_architecture_has_a_file_of_its_own(compiler):
    places = {cache.place(x, arch) for x in (PLAIN, ROUTED) for arch in (ARCH, "sm_100a")}
    assert len(places) == 4


def test_there_are_few_enough_variants_to_keep_them_all():
    """Nothing that a caller may vary freely (lengths, heads, scales, thresholds) is part of one."""
    flags = ("routed", "tail", "lengths", "causal", "lse", "device_scales")
    values = {
        "dtype": DTYPES.values(), "dim": HEAD_DIMS, "skip": (None, *SKIP_TILES),
        **dict.fromkeys(flags, (False, True)),
    }  # fmt: skip
    assert values.keys() == Variant.__dataclass_fields__.keys()
    found = 0
    for chosen in product(*values.values()):
        try:
            Variant(**dict(zip(values, chosen)))
        except ValueError:
            continue
        found += 1
    assert found == 352


@pytest.mark.parametrize("damage", ["cut short", "a byte changed", "empty"])
def test_a_damaged_file_is_compiled_again_and_said(compiler, monkeypatch, damage):
    cache.kernel(PLAIN, ARCH)
    path = cache.place(PLAIN, ARCH)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes({"cut short": data[:40], "a byte changed": data, "empty": b""}[damage])
    new_process(monkeypatch)
    with pytest.warns(UserWarning, match="checksum differs.*compiling the kernel again"):
        _, load = cache.kernel(PLAIN, ARCH)
    assert load is not None
    assert load.source == "compiled"
    assert "damaged" in load.note
    new_process(monkeypatch)
    _, load = cache.kernel(PLAIN, ARCH)
    assert load is not None
    assert load.source == "disk"


def test_a_file_whose_libraries_are_gone_is_compiled_again_and_said(compiler, monkeypatch):
    cache.kernel(PLAIN, ARCH)
    new_process(monkeypatch)
    intact = sys.modules["tvm_ffi"].load_module
    refusals = iter([RuntimeError("libcute_dsl_runtime.so: cannot open shared object file")])

    def load_module(path):
        for error in refusals:
            raise error
        return intact(path)

    monkeypatch.setattr(sys.modules["tvm_ffi"], "load_module", load_module)
    with pytest.warns(UserWarning, match="libcute_dsl_runtime.so"):
        _, load = cache.kernel(PLAIN, ARCH)
    assert load is not None
    assert (load.source, compiler) == ("compiled", [PLAIN, PLAIN])


def test_a_fault_of_the_loader_itself_stays_loud(compiler, monkeypatch):
    cache.kernel(PLAIN, ARCH)
    new_process(monkeypatch)
    monkeypatch.delattr(sys.modules["tvm_ffi"], "load_module")
    with pytest.raises(AttributeError, match="load_module"):
        cache.kernel(PLAIN, ARCH)


def test_a_folder_that_cannot_be_written_costs_the_disk_alone(compiler, monkeypatch, tmp_path):
    file = tmp_path / "file"
    file.write_text("not a folder")
    monkeypatch.setenv(cache.FOLDER_VARIABLE, str(file / "kernels"))
    kernel, load = cache.kernel(PLAIN, ARCH)
    assert kernel() == f"in memory: {PLAIN}"
    assert load is not None
    assert load.note.startswith("not kept on disk: ")


def test_no_linker_costs_the_disk_alone(compiler, monkeypatch):
    def shared_object(made, name):
        raise OSError("no C compiler (cc, gcc or clang) on PATH to link with")

    monkeypatch.setattr(sys.modules["blockattn.impl.cute.build"], "shared_object", shared_object)
    kernel, load = cache.kernel(PLAIN, ARCH)
    assert kernel() == f"in memory: {PLAIN}"
    assert load is not None
    assert "no C compiler" in str(load)
    assert cache.contents() == {}


def test_an_error_of_the_compiler_propagates_and_leaves_nothing(compiler, monkeypatch):
    def compile_variant(variant, arch, call=False):
        raise TypeError("fmax takes 2 positional arguments")

    build = sys.modules["blockattn.impl.cute.build"]
    monkeypatch.setattr(build, "compile_variant", compile_variant)
    with pytest.raises(TypeError, match="fmax"):
        cache.kernel(PLAIN, ARCH)
    assert (cache.loads(), cache.contents()) == ((), {})


def test_a_change_of_any_source_file_is_another_kernel(tmp_path):
    (tmp_path / "kernel.py").write_text("tile = 64\n")
    cache.source_digest.cache_clear()
    before = cache.source_digest(tmp_path)
    for name, text in (("kernel.py", "tile = 128\n"), ("helper.py", "")):
        (tmp_path / name).write_text(text)
        cache.source_digest.cache_clear()
        after = cache.source_digest(tmp_path)
        assert after != before
        before = after


@pytest.mark.parametrize("change", ["source", "package"])
def test_another_source_or_version_is_another_file(compiler, monkeypatch, change):
    before = cache.place(PLAIN, ARCH)
    if change == "source":
        monkeypatch.setattr(cache, "source_digest", lambda package: "another")
    else:
        versions = {**cache._versions(), "nvidia-cutlass-dsl": "99"}
        monkeypatch.setattr(cache, "_versions", lambda: versions)
    assert cache.place(PLAIN, ARCH) != before


def test_the_folder_is_the_users_choice_or_below_the_users_cache(monkeypatch):
    monkeypatch.delenv(cache.FOLDER_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache.folder() == Path("/somewhere/blockattn/cute")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache.folder() == Path.home() / ".cache/blockattn/cute"
    monkeypatch.setenv(cache.FOLDER_VARIABLE, "/chosen")
    assert cache.folder() == Path("/chosen")


def test_a_full_folder_loses_what_was_used_least_recently(compiler, monkeypatch):
    variants = [Variant(dim=dim, lse=lse) for dim in (64, 128) for lse in (False, True)]
    for age, variant in enumerate(variants[:3]):
        cache.kernel(variant, ARCH)
        os.utime(cache.place(variant, ARCH), (1e9 - age, 1e9 - age))
    size = max(cache.contents().values())
    monkeypatch.setattr(cache, "LIMIT_BYTES", 2 * size + size // 2)
    new_process(monkeypatch)
    cache.kernel(variants[2], ARCH)  # the oldest, used again
    cache.kernel(variants[3], ARCH)
    kept = [variant for variant in variants if cache.kept_on_disk(variant, ARCH)]
    assert kept == [variants[2], variants[3]]


def test_threads_that_come_at_once_compile_once(compiler):
    threads = [threading.Thread(target=cache.kernel, args=(PLAIN, ARCH)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert compiler == [PLAIN]


WRITER = """
import sys
from pathlib import Path
from blockattn.impl.cute import cache
sys.stdin.read()
for _ in range(50):
    cache.store(Path(sys.argv[1]), sys.argv[2].encode() * 20000)
    data = Path(sys.argv[1]).read_bytes()
    assert cache.intact(data) and len(set(data[:-cache.DIGEST_BYTES])) == 1
"""


def test_processes_that_write_at_once_leave_one_whole_file(tmp_path):
    path = tmp_path / "kernels" / "kernel.so"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), letter],
            stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for letter in "ab"
    ]  # fmt: skip
    complaints = [process.communicate("go")[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], complaints
    assert [item.name for item in path.parent.iterdir()] == ["kernel.so"]
