"""Operations and bytes that a call needs, over what this GPU reaches in a product and in a copy."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.bench.inputs import Bench
from workbench.bench.timing import medians


@dataclass(frozen=True)
class Ceilings:
    """Measured rates: 16-bit matrix product (FLOP/s), copy (bytes/s, read plus written)."""

    flops: float
    bytes: float


def measure_ceilings(bench: Bench) -> Ceilings:
    """One large matrix product of random numbers and one large copy."""
    size, count = bench.sizes.matrix, bench.sizes.copy_bytes
    generator = torch.Generator(bench.device).manual_seed(0)

    def draw() -> Tensor:
        square = torch.randn((size, size), generator=generator, device=bench.device)
        return square.to(bench.dtype)

    a, b = draw(), draw()
    source = torch.empty(count // 4, dtype=torch.int32, device=bench.device).random_()
    target = torch.empty_like(source)
    calls = {"product": lambda: a @ b, "copy": lambda: target.copy_(source)}
    found = medians(bench.timer(calls, bench.sizes.repeats))
    return Ceilings(2 * size**3 / found["product"], 2 * source.nbytes / found["copy"])


@dataclass(frozen=True)
class Work:
    """Operations of the matrix products, and bytes of every input and output once."""

    flops: float
    bytes: float

    def against(self, seconds: float, ceilings: Ceilings) -> dict[str, float | str]:
        """Achieved rates, the floor under the time and which ceiling sets it."""
        times = {"product": self.flops / ceilings.flops, "copy": self.bytes / ceilings.bytes}
        bound = max(times, key=lambda name: times[name])
        return {
            "flops": self.flops,
            "bytes": self.bytes,
            "flops_per_second": self.flops / seconds,
            "bytes_per_second": self.bytes / seconds,
            "floor_seconds": times[bound],
            "floor_set_by": bound,
            "time_over_floor": seconds / times[bound],
        }


def attention_work(q: Tensor, k: Tensor, density: float, *, summaries: int = 0) -> Work:
    """Both products over the exact pairs, and over ``summaries`` blocks for every query."""
    batch, queries, heads, dim = q.shape
    columns = density * k.shape[1] + summaries
    flops = 4.0 * batch * heads * queries * columns * dim
    return Work(flops, float(2 * q.nbytes + 2 * k.nbytes))
