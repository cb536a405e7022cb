"""From a variant to machine code: arguments that stand for any call, compilation, linking.

Needs cutlass (CuTe DSL) and no GPU. What it makes needs neither cutlass nor this module to run.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path
from typing import Any

from blockattn.impl.cute.variant import Variant


def compile_variant(variant: Variant, arch: str, options: str = "", call: bool = False) -> Any:
    """The compiled host function of a variant, to be exported.

    Args:
        arch: ``sm_90a``.
        options: more options of ``cute.compile``.
        call: it is to be called in this process too, which costs another compilation of host code.
    """
    import cutlass.cute as cute

    with warnings.catch_warnings():
        # cutlass 4.8 warns about names that are the only ones in 4.6.
        warnings.simplefilter("ignore", DeprecationWarning)
        from blockattn.impl.cute.sm90 import Attention

        return cute.compile(
            Attention(variant),
            *stand_ins(variant),
            options=f"--gpu-arch {arch} --enable-tvm-ffi {options}".strip(),
            no_jit_engine=not call,
        )


def stand_ins(variant: Variant) -> tuple[Any, ...]:
    """Arguments of the kernel's host function without data, in its order.

    Every size but the head dim is a symbol, so that one kernel serves all lengths; equal symbols
    are compared at every call. q, k and v may have any strides that are whole 16 bytes.
    """
    import cutlass
    import cutlass.cute as cute

    from blockattn.impl.cute.shapes import ELEMENTS

    element = ELEMENTS[variant.dtype]
    batch, queries, keys, heads, key_heads, blocks = (cute.sym_int() for _ in range(6))

    def strided(tokens: Any, heads: Any) -> Any:
        strides = tuple(cute.sym_int64(divisibility=8) for _ in range(3))
        return cute.runtime.make_fake_tensor(
            element, (batch, tokens, heads, variant.dim), (*strides, 1), assumed_align=16
        )

    def dense(dtype: Any, *shape: Any, wanted: bool = True) -> Any:
        if not wanted:
            return None
        order = tuple(reversed(range(len(shape))))
        return cute.runtime.make_fake_compact_tensor(
            dtype, shape, stride_order=order, assumed_align=16
        )

    number = scale = cutlass.Float32(1.0)
    if variant.device_scales:  # one element of anything, so aligned as a number is
        scale = cute.runtime.make_fake_tensor(cutlass.Float32, (1,), (1,), assumed_align=4)
    whole, integer = (cutlass.Float32, cutlass.Int32)
    summary = batch, blocks, key_heads, variant.dim
    pairs, entries = cute.sym_int(), cute.sym_int()
    return (
        strided(queries, heads),
        strided(keys, key_heads),
        strided(keys, key_heads),
        dense(element, batch, queries, heads, variant.dim),
        dense(whole, batch, heads, queries, wanted=variant.lse),
        dense(integer, batch, heads, pairs, entries, wanted=variant.routed),
        dense(integer, batch, heads, pairs, 3, wanted=variant.routed),
        dense(integer, batch, heads, cute.sym_int(), cute.sym_int(), wanted=variant.tail),
        dense(element, *summary, wanted=variant.tail),
        dense(element, *summary, wanted=variant.tail),
        dense(integer, blocks, wanted=variant.tail),
        dense(integer, blocks, wanted=variant.lengths),
        dense(
            cutlass.Int8, batch, heads, cute.sym_int(), cute.sym_int(), wanted=bool(variant.skip)
        ),
        scale,
        scale,
        number,
        cutlass.Int32(1),
        dense(integer, 1),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )


def shared_object(compiled: Any, name: str) -> bytes:
    """A shared library that ``tvm_ffi.load_module`` loads, with the function called ``name``.

    Raises:
        OSError: no C compiler to link with, or it failed; the text says why.
    """
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise OSError("no C compiler (cc, gcc or clang) on PATH to link with")
    with tempfile.TemporaryDirectory(prefix="blockattn-") as folder:
        source, target = Path(folder, "kernel.o"), Path(folder, "kernel.so")
        compiled.export_to_c(object_file_path=str(source), function_name=name)
        libraries = [Path(path) for path in _runtime_libraries()]
        command = [compiler, "-shared", "-o", str(target), str(source), *map(str, libraries)]
        command += [f"-Wl,-rpath,{path.parent}" for path in libraries]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(f"{compiler} cannot link the kernel: {done.stderr.strip()[-500:]}")
        return target.read_bytes()


def _runtime_libraries() -> list[str]:
    """Libraries with the functions that a compiled host function calls."""
    from cutlass.cute.runtime import find_runtime_libraries

    return find_runtime_libraries(enable_tvm_ffi=True)
