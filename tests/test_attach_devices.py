"""Attached models where they run: on a CPU in float32, on a GPU in bfloat16 with its kernels.

Every sparse call is compared with the definition: the pairs of tokens that its route names, in
float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

pytest.importorskip("diffusers", reason="needs diffusers: pip install 'diffusers>=0.35.2'")

import workbench
from blockattn import (
    BlockRoute,
    BlockSummary,
    attend,
    cube_layout,
    skip_softmax_attention,
    sol_attention,
    video_sparse_attention,
)
from blockattn.layout import TokenGrid
from tests.attach_inputs import CASES, CUTOFF, SOL, Case, spy
from workbench.capture.memory import recording_memory
from workbench.config import SkipSoftmaxConfig, SolAttnConfig, VideoSparseAttentionConfig
from workbench.diffusers.wan import tiny_wan_pipeline
from workbench.profiles.pipeline import PipelineVideo
from workbench.profiles.record import record_pipeline, spread_plan

# Ten times the largest factor that makes sense: of the two tiles of keys the second one is dropped,
# which no lower factor reaches with random weights.
SKIP = SkipSoftmaxConfig(threshold_scale_factor=2560.0)
VSA = VideoSparseAttentionConfig(vsa_sparsity=0.5)
WAN = CASES[0]
families = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@dataclass(frozen=True)
class Place:
    """Where a model runs, in what, and what serves its sparse calls there.

    On a CPU the reference alone serves a skip threshold above 1.
    """

    device: str
    dtype: torch.dtype
    impls: dict[str, str]

    def model(self, case: Case) -> Any:
        # Without the warning of diffusers that some layers of a checkpoint stay float32.
        return torch.nn.Module.to(case.model(), self.device, self.dtype)


CPU = Place("cpu", torch.float32, {"sol": "eager", "skip": "reference", "vsa": "eager"})
GPU = Place("cuda", torch.bfloat16, dict.fromkeys(("sol", "skip", "vsa"), "triton"))
places = pytest.mark.parametrize(
    "place", [pytest.param(CPU, id="cpu"), pytest.param(GPU, id="cuda", marks=pytest.mark.gpu)]
)


@places
@families
@pytest.mark.parametrize(
    "config",
    [None, SolAttnConfig(tau=1.0, disabled_until_timestep=0.5)],
    ids=["off", "dense phase"],
)
def test_what_stays_dense_is_the_bare_model_bit_for_bit(case: Case, place: Place, config: Any):
    model = place.model(case)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    bare = case.run(model)
    with workbench.attach(model, config, strict=True) as attached:
        assert torch.equal(case.run(model), bare)
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert attached.counts().sparse == 0
    assert torch.isfinite(bare).all()
    assert torch.equal(case.run(model), bare)
    assert list(model.state_dict()) == list(state)


@places
@families
@pytest.mark.filterwarnings("ignore:threshold=.* is at least 1:UserWarning")
@pytest.mark.parametrize("mechanism", ["sol", "skip", "vsa"])
def test_a_sparse_call_is_what_its_route_says(
    case: Case, place: Place, mechanism: str, monkeypatch: pytest.MonkeyPatch
):
    if mechanism == "vsa" and (case.text or case.name == "mochi"):
        pytest.skip("vsa is refused where text attends with the video, see test_attach.py")
    config, options, definition = MECHANISMS[mechanism]
    model, outputs = place.model(case), spy(monkeypatch)
    bare = case.run(model)
    seen: list[tuple[Tensor, Tensor, Tensor, Any]] = []
    watch = {"observe": lambda *call: seen.append(call), "record": True, "strict": True}
    with workbench.attach(model, config, **watch, **options) as attached:
        out = case.run(model)
    assert torch.isfinite(out).all()
    assert not torch.equal(out, bare)
    impl = place.impls[mechanism]
    assert {(r.kind, r.impl) for r in attached.records} == {("sparse", impl)}
    assert all(0 < record.density < 1 for record in attached.records)
    assert f"ran: {attached.records[0].algorithm}: {impl}" in attached.report()
    assert len(seen) == len(outputs) == case.layers * case.calls
    for (q, k, v, call), found in zip(seen, outputs):
        assert q.dtype == found.dtype == place.dtype
        assert_error_rule(found, q, k, v, call, definition(q, k, v, call))


@places
def test_a_compiled_model_is_one_graph_and_gives_the_same(place: Place):
    torch._dynamo.reset()
    counters.clear()
    model = place.model(WAN)
    with workbench.attach(model, SOL):
        eager = WAN.run(model)
    run = torch.compile(model, backend="eager", fullgraph=True)
    with workbench.attach(run, SOL, strict=True) as attached:
        assert torch.equal(WAN.run(run), eager)
        WAN.run(run, time=0.4)
    assert counters["stats"]["unique_graphs"] == 1
    assert attached.counts().sparse == 2 * WAN.layers
    torch._dynamo.reset()


@places
def test_dense_and_sparse_steps_of_one_model_follow_the_time(place: Place):
    model = place.model(WAN)
    config = SolAttnConfig(tau=1.0, disabled_until_timestep=CUTOFF)
    with workbench.attach(model, config, strict=True, record=True) as attached:
        for time in (0.95, 0.9, 0.85):
            WAN.run(model, time=time)
    kinds = {record.time: record.kind for record in attached.records}
    assert list(kinds.values()) == ["dense", "dense", "sparse"]
    assert list(kinds) == pytest.approx([0.95, 0.9, 0.85])


@pytest.mark.gpu
def test_recording_a_pipeline_takes_no_more_of_the_gpu_than_predicted(tmp_path: Path):
    pipe = tiny_wan_pipeline(layers=2, dtype=torch.bfloat16).to("cuda")
    video = PipelineVideo(pipe, "tiny", (21, 256, 448), 2, guidance=1.0)
    plan = spread_plan(video, layers=2, steps=2, heads=2, prompt="a")
    spec = plan.spec(video)
    video.run("a", 0)  # takes what stays, such as the workspace of matrix products
    bare = _peak(lambda: video.run("a", 0))
    recording = _peak(lambda: record_pipeline(video, plan, spec, tmp_path / "a"))
    assert spec.total_bytes == (tmp_path / "a").stat().st_size
    assert recording - bare <= recording_memory(spec, gpu=True).device


def _peak(run: Callable[[], Any]) -> int:
    """Bytes of the GPU that a run takes at most."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


# -- the definition, in whole matrices -----------------------------------------------------------


def sol(q: Tensor, k: Tensor, v: Tensor, call: Any) -> Callable[[torch.dtype], Tensor]:
    sink = (0, call.prefix) if call.prefix else (q.shape[1] - call.suffix, call.suffix)
    settings = {"tau": SOL.tau, "sink_start": sink[0], "sink_tokens": sink[1]}
    _, trace = sol_attention(q, k, v, **settings, return_trace=True)
    tail = BlockSummary.of(k, v)

    def run(dtype: torch.dtype) -> Tensor:
        parts = (x.to(dtype) for x in (q, k, v))
        options = {"route": trace.route, "tail": tail.to(dtype), "impl": "reference"}
        return with_dense_text(attend(*parts, **options), q, k, v, call, dtype)

    return run


def skip(q: Tensor, k: Tensor, v: Tensor, call: Any) -> Callable[[torch.dtype], Tensor]:
    rows = video_rows(q, call)
    cut = [x[:, rows] for x in (q, k, v)]
    threshold = float(SKIP.threshold_scale_factor or 0) / k.shape[1]
    _, trace = skip_softmax_attention(*cut, threshold=threshold, return_trace=True)
    kept = torch.ones(q.shape[0], q.shape[2], q.shape[1], k.shape[1], dtype=torch.bool).to(q.device)
    kept[:, :, rows, rows] = ~token_pairs(trace.skipped)
    return lambda dtype: masked(q, k, v, kept, dtype)


def vsa(q: Tensor, k: Tensor, v: Tensor, call: Any) -> Callable[[torch.dtype], Tensor]:
    grid = TokenGrid(call.grid)
    settings = {"grid": grid, "sparsity": VSA.vsa_sparsity, "gate_compress": torch.zeros_like(q)}
    _, trace = video_sparse_attention(q, k, v, **settings, return_trace=True)
    cubes = cube_layout(grid, q.device).slots // 64
    kept = trace.route.dense()[:, :, cubes][..., cubes]
    return lambda dtype: masked(q, k, v, kept, dtype)


MECHANISMS: dict[str, tuple[Any, dict[str, Any], Callable[..., Any]]] = {
    "sol": (SOL, {}, sol),
    "skip": (SKIP, {}, skip),
    "vsa": (VSA, {"gate": "zero"}, vsa),
}


def video_rows(q: Tensor, call: Any) -> slice:
    return slice(call.prefix, q.shape[1] - call.suffix)


def token_pairs(route: BlockRoute) -> Tensor:
    """[B, H, Tq, Tk] of a route in blocks."""
    rows, columns = (
        torch.arange(tokens, device=route.words.device) // size
        for tokens, size in zip(route.seqlens, route.block)
    )
    return route.dense()[:, :, rows][..., columns]


def masked(q: Tensor, k: Tensor, v: Tensor, kept: Tensor, dtype: torch.dtype) -> Tensor:
    """Softmax attention over the pairs that are kept [B, H, Tq, Tk], all in one dtype."""
    q, k, v = (x.to(dtype).transpose(1, 2) for x in (q, k, v))
    scores = (q @ k.transpose(2, 3)) * q.shape[-1] ** -0.5
    return (scores.masked_fill(~kept, -torch.inf).softmax(-1) @ v).transpose(1, 2)


def with_dense_text(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, call: Any, dtype: torch.dtype
) -> Tensor:
    """The output with exact attention in the rows of the text."""
    every = torch.ones(1, 1, 1, k.shape[1], dtype=torch.bool, device=q.device)
    dense = masked(q, k, v, every, dtype)
    rows = video_rows(q, call)
    dense[:, rows] = out[:, rows]
    return dense


def assert_error_rule(
    found: Tensor, q: Tensor, k: Tensor, v: Tensor, call: Any, definition: Callable[..., Tensor]
) -> None:
    """At most twice the error of plain PyTorch at the inputs' dtype, plus one rounding.

    The reference computes in float32, whatever its inputs are, so that a rounding of the
    probabilities is added to its error.
    """
    truth, plain = definition(torch.float64), definition(q.dtype)
    assert torch.isfinite(truth).all()
    every = torch.ones(1, 1, 1, k.shape[1], dtype=torch.bool, device=q.device)
    assert not torch.allclose(truth, masked(q, k, v, every, torch.float64), atol=1e-3)
    eps = torch.finfo(q.dtype).eps
    error, own = ((x.double() - truth).abs().max() for x in (found, plain))
    own = own + eps * v.abs().max()
    assert error <= 2 * own + eps * truth.abs().max(), f"layer {call.layer}: {error} against {own}"
