"""Recording off a GPU: the file of the CPU, within the predicted memory, without holding it up."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from blockattn import TokenGrid
from workbench.capture import CaptureSpec, Selection, open_capture, recording_memory
from workbench.capture.recorder import Recorder
from workbench.models import AttentionCall

ENTRIES = tuple((layer, step) for layer in range(3) for step in (0, 1))


def spec(**changes) -> CaptureSpec:
    settings = {"grid": TokenGrid((16, 32, 32)), "entries": ENTRIES, "heads": 6, "kv_heads": 3}
    return CaptureSpec(**{**settings, "head_dim": 64, **changes})


def whole_call(wanted: CaptureSpec, seed: int = 0) -> dict[str, torch.Tensor]:
    """q, k, v as a model has them."""
    generator = torch.Generator().manual_seed(seed)
    return {part: torch.randn(wanted.call_shape(part), generator=generator) for part in "qkv"}


def record(path: Path, wanted: CaptureSpec, device: str) -> None:
    with Recorder(path, wanted, attention=lambda q, k, v, call: q.zero_()) as recorder:
        for layer, step in wanted.entries:
            values = whole_call(wanted, 10 * layer + step)
            parts = {part: x.to(device) for part, x in values.items()}
            recorder(**parts, call=AttentionCall(layer, step, 1 - step / 10, wanted.grid.shape))


CHOICES = [
    Selection(),
    Selection(heads=(0, 1)),
    Selection(query_blocks=(0, 1, 200)),
    Selection((2, 3, 4, 5), (8, 9)),
]


@pytest.mark.gpu
@pytest.mark.parametrize("selection", CHOICES)
def test_a_gpu_records_the_file_of_the_cpu_although_the_model_overwrites_q(tmp_path, selection):
    wanted = spec(selection=selection)
    for device in ("cuda", "cpu"):
        record(tmp_path / device, wanted, device)
    assert (tmp_path / "cuda").read_bytes() == (tmp_path / "cpu").read_bytes()


@pytest.mark.gpu
@pytest.mark.parametrize("selection", CHOICES)
def test_recording_on_a_gpu_takes_no_more_of_its_memory_than_predicted(tmp_path, selection):
    wanted = spec(selection=selection)
    parts = {part: x.cuda() for part, x in whole_call(wanted).items()}
    with Recorder(tmp_path / "a", wanted, attention=lambda q, k, v, call: q) as recorder:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        for layer, step in wanted.entries:
            recorder(**parts, call=AttentionCall(layer, step, 0.5, wanted.grid.shape))
        torch.cuda.synchronize()
        taken = torch.cuda.max_memory_allocated() - before
    assert taken <= recording_memory(wanted, gpu=True).device


@pytest.mark.gpu
def test_recording_does_not_wait_for_the_gpu(tmp_path: Path):
    wanted = spec(entries=((0, 0), (1, 0)))
    parts = {part: x.cuda() for part, x in whole_call(wanted).items()}
    with Recorder(tmp_path / "a", wanted, attention=lambda q, k, v, call: q) as recorder:
        recorder(**parts, call=AttentionCall(0, 0, 1.0, wanted.grid.shape))  # pins memory
        torch.cuda.synchronize()
        torch.cuda._sleep(2 * 10**9)  # cycles: the stream is busy for about a second
        recorder(**parts, call=AttentionCall(1, 0, 1.0, wanted.grid.shape))
        still_busy = not torch.cuda.current_stream().query()
    assert still_busy
    assert torch.equal(open_capture(tmp_path / "a").load(1, 0).k, parts["k"].cpu().bfloat16())


@pytest.mark.gpu
def test_recording_inside_a_cuda_graph_is_refused(tmp_path: Path):
    wanted = spec(entries=((0, 0),))
    parts = {part: x.cuda() for part, x in whole_call(wanted).items()}
    recorder = Recorder(tmp_path / "a", wanted)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="a CUDA graph is being captured"):
        with torch.cuda.graph(graph):
            recorder.observe(**parts, call=AttentionCall(0, 0, 1.0, wanted.grid.shape))
    recorder.writer.close()
