"""Attention of other libraries under one signature, and why one is not among them.

Nothing here is needed: a package that is missing, or that fails on this machine, becomes a line of
the report. Layout in and out is ``[B, T, H, D]``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from blockattn import BlockRoute
from blockattn.impl import cudnn, flash
from blockattn.problem import Problem, make_problem

Call = Callable[[], Tensor]


@dataclass(frozen=True)
class Absent:
    """Why a peer is not timed."""

    reason: str


Found = dict[str, Call | Absent]


def dense_peers(q: Tensor, k: Tensor, v: Tensor) -> Found:
    """Dense attention of every library, each tried once, and torch's own choice among its own."""
    builders = {
        "sdpa default": lambda: _sdpa(q, k, v, None),
        "sdpa flash": lambda: _sdpa(q, k, v, SDPBackend.FLASH_ATTENTION),
        "sdpa cudnn": lambda: _sdpa(q, k, v, SDPBackend.CUDNN_ATTENTION),
        "flash-attn-4": lambda: _adapter(flash, make_problem(q, k, v)),
    }
    return _attempts(builders, q.device)


def block_mask_peers(q: Tensor, k: Tensor, v: Tensor, route: BlockRoute) -> Found:
    """Attention under a block mask of every library, lists made before, each tried once."""
    index, count = route.lists()
    problem = replace(make_problem(q, k, v, route=route), lists=(index, count))
    builders = {
        "cudnn block-sparse": lambda: _adapter(cudnn, problem),
        "flash-attn-4": lambda: _adapter(flash, problem),
        "flexattention": lambda: _flex(q, k, v, index, count, route.block),
    }
    return _attempts(builders, q.device)


def attempt(build: Callable[[], Call | Absent]) -> Call | Absent:
    """The call that ``build`` gives once it has run, or why it cannot."""
    try:
        call = build()
    except (ImportError, OSError) as error:
        return Absent(f"not installed: {_short(error)}")
    if isinstance(call, Absent):
        return call
    try:
        if call().is_cuda:
            torch.cuda.synchronize()
    except _run_errors() as error:
        return Absent(f"fails here: {_short(error)}")
    return call


def _attempts(builders: Mapping[str, Callable[[], Call | Absent]], device: torch.device) -> Found:
    if device.type == "cuda":
        return {name: attempt(build) for name, build in builders.items()}
    elsewhere = Absent(f"needs a CUDA GPU, the tensors are on {device}")
    return {
        name: attempt(build) if name == "sdpa default" else elsewhere
        for name, build in builders.items()
    }


def working(found: Mapping[str, Call | Absent]) -> dict[str, Call]:
    """Those that can be timed."""
    return {name: call for name, call in found.items() if not isinstance(call, Absent)}


def reasons(found: Mapping[str, Call | Absent]) -> dict[str, str]:
    """Those that cannot, with the reason."""
    return {name: call.reason for name, call in found.items() if isinstance(call, Absent)}


def _run_errors() -> tuple[type[BaseException], ...]:
    """What a library raises when it does not serve a call; also its compiler's own errors.

    AttributeError, because these libraries follow each other's internals and a mixture of versions
    is found out in the first call; at an import it stays loud.
    """
    kinds: list[type[BaseException]] = [
        RuntimeError,
        TypeError,
        ValueError,
        AssertionError,
        AttributeError,
    ]
    try:
        from cutlass.base_dsl.common import DSLBaseError

        kinds.append(DSLBaseError)
    except (ImportError, OSError):
        pass
    return tuple(kinds)


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return f"{type(error).__name__}: {text}"[:300]


def _sdpa(q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend | None) -> Call:
    query, key, value = (x.transpose(1, 2) for x in (q, k, v))

    def call() -> Tensor:
        with nullcontext() if backend is None else sdpa_kernel(backend):
            return scaled_dot_product_attention(query, key, value).transpose(1, 2)

    return call


def _adapter(library: Any, problem: Problem) -> Call | Absent:
    """A library through the project's adapter to it, a module with `obstacles` and `run`."""
    found = library.obstacles(problem)
    if found:
        return Absent("; ".join(found))
    return lambda: library.run(problem).out


def _flex(
    q: Tensor, k: Tensor, v: Tensor, index: Tensor, count: Tensor, block: tuple[int, int]
) -> Call:
    from torch.nn.attention.flex_attention import BlockMask

    mask = BlockMask.from_kv_blocks(
        torch.zeros_like(count),
        torch.zeros_like(index),
        count,
        index,
        BLOCK_SIZE=block,
        seq_lengths=(q.shape[1], k.shape[1]),
    )
    query, key, value = (x.transpose(1, 2) for x in (q, k, v))
    options: Any = {"BLOCK_M": block[0], "BLOCK_N": block[1]}
    compiled = _compiled_flex()
    return lambda: compiled(query, key, value, block_mask=mask, kernel_options=options).transpose(
        1, 2
    )


@cache
def _compiled_flex() -> Any:
    """One compiled function for all masks, so that a shape is compiled once."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)
