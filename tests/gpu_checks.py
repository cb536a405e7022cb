"""What tests of GPU kernels share: inputs made on the device, the error rule, graphs, waits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from blockattn import BlockRoute, BlockSummary
from blockattn.problem import Result
from tests import independent_large as independent

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NEEDS_CUTE = pytest.mark.skipif(
    not all(map(find_spec, ("tvm_ffi", "cutlass"))),
    reason="needs the CuTe DSL stack: pip install -e '.[cute-latest]' or '.[cute]'",
)
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # what the interpreter computes in


def draw(tokens: int, *, heads=2, key_heads=None, dim=64, drift=0.0, seed=0):
    """q, k, v made on the device; with drift neighbours resemble each other, as in a video."""
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=DEVICE)

    q, k, v = (normal(1, tokens, n, dim) for n in (heads, *(2 * (key_heads or heads,))))
    if drift:
        walk = drift * (normal(tokens, dim) / math.sqrt(tokens)).cumsum(dim=0)[None, :, None]
        q, k = q + walk, k + walk
    return q.to(DTYPE), k.to(DTYPE), v.to(DTYPE)


def random_route(q: Tensor, k: Tensor, density=0.4, seed=1) -> BlockRoute:
    """A route for q and k in blocks of 64, the same on every machine."""
    blocks = (-(-x.shape[1] // 64) for x in (q, k))
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(q.shape[0], q.shape[2], *blocks, generator=generator) < density
    return BlockRoute.from_dense(mask.to(DEVICE), seqlens=(q.shape[1], k.shape[1]))


def assert_rounded_means(tail: BlockSummary, k: Tensor, v: Tensor) -> None:
    """Key means and value sums are those of the definition, rounded once."""
    for found, x, mean in ((tail.k_mean, k, True), (tail.v_sum, v, False)):
        sums, lengths = independent.block_sums(x)
        want = sums / lengths[None, :, None, None] if mean else sums
        half = torch.finfo(x.dtype).eps * want.abs() / 2 + 1e-5
        assert ((found.double() - want).abs() <= half).all()


def chosen_blocks(heads: int, blocks: int, count: int = 10) -> list[tuple[int, int]]:
    """The first and the last block of the last head, and others at random."""
    generator = torch.Generator().manual_seed(blocks)
    head = torch.randint(heads, (count,), generator=generator).tolist()
    row = torch.randint(blocks, (count,), generator=generator).tolist()
    return [(heads - 1, 0), (heads - 1, blocks - 1), *zip(head, row)]


def assert_within_the_error_rule(out: Tensor, lse: Tensor, want: independent.Rows) -> None:
    """At most twice the error of plain arithmetic at the inputs' dtype, plus one rounding."""
    assert torch.isfinite(want.out).all()
    allowed = 2 * want.rounding + torch.finfo(out.dtype).eps * float(want.out.abs().max())
    assert float((out.double() - want.out).abs().max()) <= allowed
    assert ((lse.double() - want.lse).abs() <= 1e-4 + 1e-6 * want.lse.abs()).all()


NAN_KINDS = ("a key is NaN", "two rows are NaN at a key")


def plant_nan(q: Tensor, k: Tensor, token: int, kind: str) -> None:
    """NaN among the scores of the last head with one key, in place; other scores are numbers.

    Of every row, or of row 5 and the last: the key is infinite and they are 0 where others are not.
    """
    if kind == NAN_KINDS[0]:
        k[0, token, -1, 5] = torch.nan
        return
    q[..., 0], k[0, token, -1, 0] = -1, torch.inf
    q[0, [5, -1], -1, 0] = 0


def assert_as_infinite(result: Result, truth: Result, v: Tensor) -> None:
    """NaN and -inf where the reference has them, and elsewhere its numbers to two roundings."""
    assert result.skipped == truth.skipped
    assert truth.out.isnan().any()
    assert not truth.out.isnan().all()
    assert torch.equal(result.out.isnan(), truth.out.isnan())
    assert torch.equal(result.lse.isnan(), truth.lse.isnan())
    error = (result.out - truth.out)[~truth.out.isnan()].abs().max()
    assert error <= 2 * torch.finfo(DTYPE).eps * v.abs().max()
    finite = torch.isfinite(truth.lse)
    assert torch.equal(result.lse == -torch.inf, truth.lse == -torch.inf)
    assert not finite.any() or (result.lse - truth.lse)[finite].abs().max() < 1e-4


@contextmanager
def syncs_are_errors() -> Iterator[None]:
    """A call that waits for the GPU raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def captured(call: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """The call as a graph, after a run that compiles, and the tensor a replay writes."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    return graph, out
