"""What the tests of the adapters share: inputs, routes, error rule, planted packages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from blockattn import BlockRoute
from blockattn.impl import reference
from tests.gpu_checks import DEVICE, captured, syncs_are_errors


def draw(tokens, *, heads=2, key_heads=None, keys=None, dim=128, dtype=torch.bfloat16, seed=0):
    """q ``[1, tokens, heads, dim]`` and k, v ``[1, keys, key_heads, dim]``."""
    generator = torch.Generator().manual_seed(seed)
    lengths = ((tokens, heads), *(2 * ((keys or tokens, key_heads or heads),)))
    parts = (torch.randn(1, n, h, dim, generator=generator) for n, h in lengths)
    return tuple(x.to(dtype).to(DEVICE) for x in parts)


def random_route(q, k, block=(64, 64), density=0.4, seed=1):
    """Pairs at random; the first query block has none, the second one all."""
    grid = [-(-x.shape[1] // size) for x, size in zip((q, k), block)]
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(q.shape[0], q.shape[2], *grid, generator=generator) < density
    mask[:, :, 0] = False
    mask[:, :, 1:2] = True
    seqlens = (q.shape[1], k.shape[1])
    return BlockRoute.from_dense(mask.to(DEVICE), block=block, seqlens=seqlens)


def assert_error_rule(result, problem):
    """At most twice the error of plain PyTorch at the inputs' dtype, plus one rounding; LSE."""
    wide = {name: getattr(problem, name).double() for name in "qkv"}
    tail = problem.tail and problem.tail.to(torch.float64)
    truth = reference.run(replace(problem, tail=tail, **wide))
    assert torch.isfinite(truth.out).all()
    eps = torch.finfo(problem.q.dtype).eps
    valid = problem.v if problem.block_lengths is None else problem.v.nan_to_num(nan=0.0)
    plain = (reference.run(problem).out.double() - truth.out).abs().max() + eps * valid.abs().max()
    assert result.out.dtype == problem.q.dtype
    assert result.out.is_contiguous()
    error = (result.out.double() - truth.out).abs().max()
    assert error <= 2 * plain + eps * truth.out.abs().max()
    finite = torch.isfinite(truth.lse)
    assert torch.equal(torch.isfinite(result.lse), finite)
    assert (result.lse[~finite] == -torch.inf).all()
    assert ((result.lse - truth.lse)[finite].abs() < 1e-3).all()
    return truth


def assert_nothing_waits(call):
    """A run in which every host wait is an error, after one that may compile."""
    call()
    with syncs_are_errors():
        call()


def assert_a_replay_equals_a_launch(call, tensors):
    """Also after the inputs have changed in place; and a launch equals itself, bit for bit."""
    graph, out = captured(call)
    for seed in (3, 4):
        for x in tensors:
            x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        launched = call()
        assert torch.equal(out, launched)
        assert torch.equal(call(), launched)


def plant_package(folder: Path, distribution: str, version: str, modules: dict[str, str]) -> None:
    """A package as an installer leaves it: metadata, and modules with the given text."""
    info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    text = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
    (info / "METADATA").write_text(text)
    for name, body in modules.items():
        path = folder.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        for parent in path.parents:
            if parent == folder:
                break
            (parent / "__init__.py").touch()
        path.write_text(body)
