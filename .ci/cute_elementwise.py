"""The smallest kernel in CuTe DSL: language and compiler alone. `cute_lane.py` compiles it."""

import tempfile

import cutlass
import cutlass.cute as cute


@cute.kernel
def double(x: cute.Tensor, y: cute.Tensor):
    """One element a thread."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    place = block * 128 + thread
    if place < x.shape[0]:
        y[place] = x[place] * 2.0


@cute.jit
def launch(x: cute.Tensor, y: cute.Tensor):
    """Blocks of 128 threads."""
    double(x, y).launch(grid=[(x.shape[0] + 127) // 128, 1, 1], block=[128, 1, 1])


def compile_for(arch: str) -> str:
    """PTX for an architecture such as ``sm_90a``; the length stays open."""
    length = cute.sym_int()
    x, y = (cute.runtime.make_fake_compact_tensor(cutlass.Float32, (length,)) for _ in "xy")
    with tempfile.TemporaryDirectory() as folder:
        options = f"--gpu-arch {arch} --enable-tvm-ffi --keep-ptx --dump-dir {folder}"
        return str(cute.compile(launch, x, y, options=options).artifacts.PTX)
