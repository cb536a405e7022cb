"""One of two processes that share a video, for the tests of head parallelism.

With gloo on CPUs in float32, with NCCL on a GPU each in bfloat16.
"""

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


def start(rank: int, folder: str, backend: str) -> dict[str, Any]:
    """Joins the other process; where this one keeps its tensors, and in which dtype."""
    torch.set_num_threads(1)
    place: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32}
    if backend == "nccl":
        place = {"device": torch.device("cuda", rank), "dtype": torch.bfloat16}
        torch.cuda.set_device(rank)
    distributed.init_process_group(
        backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS
    )
    return place


def finish(rank: int, folder: str, found: dict[str, Any]) -> None:
    on_cpu = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in found.items()}
    torch.save(on_cpu, Path(folder) / f"{rank}.pt")
    distributed.destroy_process_group()


def part(x: Tensor, rank: int) -> Tensor:
    """This process's tokens."""
    return x.chunk(RANKS, dim=1)[rank]


def exchange_and_attend(rank: int, folder: str, backend: str) -> None:
    place = start(rank, folder, backend)
    x = qkv(heads=4)[0].to(**place)
    heads = to_heads(part(x, rank), None)
    found: dict[str, Any] = {
        "heads": torch.equal(heads, x.chunk(RANKS, dim=2)[rank]),
        "tokens": torch.equal(to_tokens(heads, None), part(x, rank)),
        "mechanisms": {name: attend(rank, place, *CONFIGS[name]) for name in CONFIGS},
    }
    try:
        to_heads(torch.zeros(1, 4, 3, 8, **place), None)
    except UnsupportedError as error:
        found["uneven"] = str(error)
    finish(rank, folder, found)


def attend(
    rank: int, place: dict[str, Any], config: Any, options: dict[str, Any]
) -> dict[str, Any]:
    """One mechanism over two processes, and over one."""
    policy, alone = (
        SparseAttention(config, num_layers=2, record=True, **options) for _ in range(2)
    )
    q, k, v = (x.to(**place) for x in qkv(heads=4))
    out = Ulysses(policy)(*(part(x, rank) for x in (q, k, v)), CALL)
    one = part(alone(q, k, v, CALL), rank)
    return {
        "equal": torch.equal(out, one),
        "difference": float((out - one).abs().max() / v.abs().max()),
        "impl": policy.records[0].impl,
        "density": policy.records[0].density,
        "density of one": alone.records[0].density,
        "sparse": policy.counts().sparse,
    }


def diffusers_model(rank: int, folder: str, backend: str) -> None:
    """A real transformer with diffusers' own Ulysses configuration, attached."""
    import diffusers

    import workbench
    from tests.attach_inputs import CASES
    from tests.attach_inputs import SOL as TAU

    place = start(rank, folder, backend)
    if backend == "gloo":
        torch.accelerator.device_count = lambda: 1  # diffusers asks, and divides by it
    case = CASES[0]
    model = case.model()
    for module in case.attentions(model):  # so that attention is most of what comes out
        module.to_out[0].weight.data.mul_(64)
    model = torch.nn.Module.to(model, place["device"], place["dtype"])
    found: dict[str, Any] = {"bare": case.run(model)}
    with workbench.attach(model, TAU, record=True) as alone:
        found["one"] = case.run(model)
    model.enable_parallelism(config=diffusers.ContextParallelConfig(ulysses_degree=RANKS))
    with workbench.attach(model, None):
        found["dense"] = case.run(model)
    with workbench.attach(model, TAU, record=True, strict=True) as attached:
        found["two"] = case.run(model)
    found["impl"] = {record.impl for record in attached.records}
    found["density"] = [record.density for record in attached.records]
    found["density of one"] = [record.density for record in alone.records]
    finish(rank, folder, found)
