"""One of two processes that share a video, for the tests of head parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from blockattn import UnsupportedError
from tests.policy_inputs import CALL, SOL, VSA, qkv
from workbench.attention import SparseAttention
from workbench.config import SkipSoftmaxConfig
from workbench.ulysses import Ulysses, to_heads, to_tokens

RANKS = 2
CONFIGS: dict[str, Any] = {
    "sol": (SOL, {}),
    "skip": (SkipSoftmaxConfig(threshold_scale_factor=128.0), {}),
    "vsa": (VSA, {"gate": "zero"}),
}


def start(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS
    )


def finish(rank: int, folder: str, found: dict[str, Any]) -> None:
    torch.save(found, Path(folder) / f"{rank}.pt")
    distributed.destroy_process_group()


def part(x: Tensor, rank: int) -> Tensor:
    """This process's tokens."""
    return x.chunk(RANKS, dim=1)[rank]


def exchange_and_attend(rank: int, folder: str) -> None:
    start(rank, folder)
    x = qkv(heads=4)[0]
    heads = to_heads(part(x, rank), None)
    found: dict[str, Any] = {
        "heads": torch.equal(heads, x.chunk(RANKS, dim=2)[rank]),
        "tokens": torch.equal(to_tokens(heads, None), part(x, rank)),
        "mechanisms": {name: attend(rank, *CONFIGS[name]) for name in CONFIGS},
    }
    try:
        to_heads(torch.zeros(1, 4, 3, 8), None)
    except UnsupportedError as error:
        found["uneven"] = str(error)
    finish(rank, folder, found)


def attend(rank: int, config: Any, options: dict[str, Any]) -> dict[str, Any]:
    """One mechanism over two processes, and over one."""
    policy, alone = (
        SparseAttention(config, num_layers=2, record=True, **options) for _ in range(2)
    )
    q, k, v = qkv(heads=4)
    out = Ulysses(policy)(*(part(x, rank) for x in (q, k, v)), CALL)
    return {
        "equal": torch.equal(out, part(alone(q, k, v, CALL), rank)),
        "density": policy.records[0].density,
        "density of one": alone.records[0].density,
        "sparse": policy.counts().sparse,
    }


def diffusers_model(rank: int, folder: str) -> None:
    """A real transformer with diffusers' own Ulysses configuration, attached."""
    import diffusers

    import workbench
    from tests.attach_inputs import CASES
    from tests.attach_inputs import SOL as TAU

    start(rank, folder)
    torch.accelerator.device_count = lambda: 1  # diffusers asks, and divides by it
    case = CASES[0]
    model = case.model()
    found: dict[str, Any] = {"bare": case.run(model)}
    with workbench.attach(model, TAU, record=True) as alone:
        found["one"] = case.run(model)
    model.enable_parallelism(config=diffusers.ContextParallelConfig(ulysses_degree=RANKS))
    with workbench.attach(model, None):
        found["dense"] = case.run(model)
    with workbench.attach(model, TAU, record=True, strict=True) as attached:
        found["two"] = case.run(model)
    found["density"] = [record.density for record in attached.records]
    found["density of one"] = [record.density for record in alone.records]
    finish(rank, folder, found)
