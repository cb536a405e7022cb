"""Head parallelism over two processes: the result of one process; ring attention is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, multiprocessing

from blockattn import UnsupportedError
from tests import ulysses_worker
from workbench.diffusers.parallel import ulysses_group

BFLOAT16 = torch.finfo(torch.bfloat16).eps
needs_gloo = pytest.mark.skipif(
    not distributed.is_available() or not distributed.is_gloo_available(),
    reason="needs torch.distributed with gloo",
)


needs_two_gpus = pytest.mark.skipif(
    torch.cuda.device_count() < ulysses_worker.RANKS,
    reason=f"needs two CUDA GPUs, this machine has {torch.cuda.device_count()}",
)


def run(
    worker: Callable[[int, str, str], None], folder: Path, *, backend: str = "gloo"
) -> list[Any]:
    """What every process saved."""
    multiprocessing.spawn(worker, (str(folder), backend), nprocs=ulysses_worker.RANKS)
    return [
        torch.load(folder / f"{rank}.pt", weights_only=False)
        for rank in range(ulysses_worker.RANKS)
    ]


@needs_gloo
def test_two_processes_give_the_result_of_one_bit_for_bit(tmp_path: Path):
    first, second = run(ulysses_worker.exchange_and_attend, tmp_path)
    for found in (first, second):
        assert found["heads"], "all tokens of half the heads"
        assert found["tokens"], "there and back again"
        assert found["uneven"].startswith("3 heads cannot be shared out to 2 processes")
    assert set(first["mechanisms"]) == {"sol", "skip", "vsa"}
    for name, one in first["mechanisms"].items():
        both = (one, second["mechanisms"][name])
        assert all(found["equal"] and found["sparse"] == 1 for found in both)
        mean = sum(found["density"] for found in both) / 2  # each reports that of its heads
        assert mean == pytest.approx(one["density of one"])
        assert mean < 1


@needs_gloo
def test_a_model_of_diffusers_with_its_own_ulysses_configuration(tmp_path: Path):
    pytest.importorskip("diffusers", reason="needs diffusers: pip install 'diffusers>=0.35.2'")
    first, second = run(ulysses_worker.diffusers_model, tmp_path)
    for found in (first, second):
        assert torch.equal(found["dense"], found["bare"])
        assert not torch.equal(found["two"], found["dense"])
        torch.testing.assert_close(found["two"], found["one"], rtol=1e-4, atol=1e-5)
    means = [(a + b) / 2 for a, b in zip(first["density"], second["density"])]
    assert means == pytest.approx(first["density of one"])
    assert max(means) < 1


@pytest.mark.gpu
@needs_two_gpus
def test_two_gpus_give_the_result_of_one(tmp_path: Path):
    """Within rounding: how a GPU shares out a call's keys depends on the number of its heads."""
    first, second = run(ulysses_worker.exchange_and_attend, tmp_path, backend="nccl")
    for found in (first, second):
        assert found["heads"], "all tokens of half the heads"
        assert found["tokens"], "there and back again"
    for name, one in first["mechanisms"].items():
        both = (one, second["mechanisms"][name])
        assert all(found["impl"] == "triton" and found["sparse"] == 1 for found in both)
        assert all(found["difference"] <= 2 * BFLOAT16 for found in both)
        mean = sum(found["density"] for found in both) / 2
        assert mean == pytest.approx(one["density of one"])
        assert mean < 1


@pytest.mark.gpu
@needs_two_gpus
def test_a_model_of_diffusers_over_two_gpus(tmp_path: Path):
    """Half the tokens are other matrix products, whose rounding two layers carry on."""
    pytest.importorskip("diffusers", reason="needs diffusers: pip install 'diffusers>=0.35.2'")
    first, second = run(ulysses_worker.diffusers_model, tmp_path, backend="nccl")
    for found in (first, second):
        assert distance(found["one"], found["bare"]) > 8 * BFLOAT16
        assert distance(found["dense"], found["bare"]) < 4 * BFLOAT16
        assert distance(found["two"], found["one"]) < 4 * BFLOAT16
        assert found["impl"] == {"triton"}
    means = [(a + b) / 2 for a, b in zip(first["density"], second["density"])]
    assert means == pytest.approx(first["density of one"], abs=0.05)
    assert max(means) < 1


def distance(x: Tensor, y: Tensor) -> float:
    """Relative L2."""
    return float((x.double() - y.double()).norm() / y.double().norm())


def parallel(**settings: Any) -> Any:
    """A parallel configuration of diffusers, as far as it is looked at."""
    values = {"ring_degree": 1, "ulysses_degree": 1, "ulysses_anything": False, **settings}
    return SimpleNamespace(context_parallel_config=SimpleNamespace(**values))


def test_ring_attention_is_refused_with_the_reason():
    match = "ring_degree=2: .* no process ever has all keys, .*ulysses_degree=4"
    with pytest.raises(UnsupportedError, match=match):
        ulysses_group(parallel(ring_degree=2, ulysses_degree=2))


def test_parts_of_unequal_length_are_refused():
    with pytest.raises(UnsupportedError, match="ulysses_anything=True"):
        ulysses_group(parallel(ulysses_degree=2, ulysses_anything=True))


@pytest.mark.parametrize("config", [None, SimpleNamespace(context_parallel_config=None)])
def test_without_context_parallelism_nothing_is_exchanged(config: Any):
    assert ulysses_group(config) is None
