"""Capture at scale: a sample of heads and rows, resumed after a kill, within what was predicted."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from blockattn import TokenGrid
from workbench import cli
from workbench.capture import (
    CaptureSpec,
    CaptureWriter,
    Selection,
    open_capture,
    recording_memory,
    spread_blocks,
)
from workbench.capture.background import BackgroundWriter, host_bytes
from workbench.capture.memory import SLACK
from workbench.capture.recorder import Recorder, SamplingPlan, record_sampling
from workbench.models import AttentionCall, DiTConfig, VideoDiT, dense_attention

GRID = TokenGrid((5, 6, 7))  # 210 tokens: three whole blocks of 64 and 18
SELECTION = Selection(heads=(0, 1, 4, 5), query_blocks=(1, 3))
ENTRIES = ((0, 1), (3, 1), (3, 2))


def spec(**changes) -> CaptureSpec:
    settings = {"grid": GRID, "entries": ENTRIES, "heads": 6, "kv_heads": 3, "head_dim": 8}
    return CaptureSpec(**{**settings, "selection": SELECTION, **changes})


def whole_call(wanted: CaptureSpec, seed: int = 0, batch: int = 1) -> dict[str, torch.Tensor]:
    """q, k, v as a model has them."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {part: (batch, *wanted.call_shape(part)[1:]) for part in "qkv"}
    return {part: torch.randn(shape, generator=generator) for part, shape in shapes.items()}


def record(path: Path, wanted: CaptureSpec, entries=None, **settings) -> Recorder:
    """Feeds entries to a recorder, as a model would."""
    with Recorder(path, wanted, attention=lambda q, k, v, call: q, **settings) as recorder:
        feed(recorder, wanted, entries or wanted.entries)
    return recorder


def feed(recorder: Recorder, wanted: CaptureSpec, entries) -> None:
    for layer, step in entries:
        call = AttentionCall(layer, step, 1 - step / 10, wanted.grid.shape)
        recorder(**whole_call(wanted, 10 * layer + step), call=call)


# -- what is kept ----------------------------------------------------------------------------------


def test_chosen_heads_and_rows_are_kept_and_keys_are_whole(tmp_path: Path):
    record(tmp_path / "a.safetensors", spec())
    capture = open_capture(tmp_path / "a.safetensors")
    for layer, step in ENTRIES:
        given, kept = whole_call(spec(), 10 * layer + step), capture.load_rows(layer, step)
        rows = [*range(64, 128), *range(192, 210)]
        assert torch.equal(kept.q, given["q"][:, rows][:, :, [0, 1, 4, 5]].bfloat16())
        assert torch.equal(kept.k, given["k"][:, :, [0, 2]].bfloat16())
        assert torch.equal(kept.v, given["v"][:, :, [0, 2]].bfloat16())
        assert kept.query_blocks == (1, 3)
    capture.verify()


def test_a_recorder_says_when_the_rest_of_the_sampling_is_not_needed(tmp_path: Path):
    with Recorder(
        tmp_path / "a.safetensors", spec(), attention=lambda q, k, v, call: q
    ) as recorder:
        feed(recorder, spec(), ENTRIES[:-1])
        assert not recorder.complete
        feed(recorder, spec(), ENTRIES[-1:])
        assert recorder.complete


def test_the_capture_says_what_it_left_out_wherever_its_title_stands(tmp_path: Path):
    record(tmp_path / "a.safetensors", spec(title="a model"))
    capture = open_capture(tmp_path / "a.safetensors")
    assert capture.title == "a model (heads 0, 1, 4, 5 of 6; 2 of 4 query blocks)"
    assert (capture.heads, capture.kv_heads) == (4, 2)
    assert capture.head_indices == [0, 1, 4, 5]
    assert capture.query_blocks == (1, 3)


def test_what_needs_every_query_row_is_refused_with_the_reason(tmp_path: Path):
    record(tmp_path / "a.safetensors", spec())
    with pytest.raises(ValueError, match=r"holds 2 of 4 query blocks .*needs every query row"):
        open_capture(tmp_path / "a.safetensors").load(0, 1)


def test_a_sample_of_heads_alone_is_an_ordinary_capture(tmp_path: Path):
    record(tmp_path / "a.safetensors", spec(selection=Selection(heads=(2, 3))))
    loaded = open_capture(tmp_path / "a.safetensors").load(3, 2)
    assert loaded.q.shape == (1, 210, 2, 8)
    assert loaded.k.shape == (1, 210, 1, 8)
    assert loaded.query_blocks is None


def test_a_capture_of_everything_has_no_word_of_a_selection(tmp_path: Path):
    record(tmp_path / "a.safetensors", spec(selection=Selection()))
    capture = open_capture(tmp_path / "a.safetensors")
    assert "selection" not in capture.metadata
    assert capture.load(0, 1).q.shape == (1, 210, 6, 8)


@pytest.mark.parametrize("half", ["first", "last"])
def test_the_half_of_a_guidance_batch_that_knows_its_class_is_kept(tmp_path: Path, half: str):
    wanted = spec(entries=((0, 0),))
    given = whole_call(wanted, batch=2)
    with Recorder(tmp_path / "a.safetensors", wanted, conditional=half) as recorder:
        recorder(**given, call=AttentionCall(0, 0, 1.0, GRID.shape))
    kept = open_capture(tmp_path / "a.safetensors").load_rows(0, 0).k[0]
    assert torch.equal(kept, given["k"][-1 if half == "last" else 0][:, [0, 2]].bfloat16())


@pytest.mark.parametrize(
    ("selection", "error", "message"),
    [
        ({"heads": ()}, ValueError, "heads is empty"),
        ({"heads": (0, 0)}, ValueError, r"heads=\[0, 0\]: one appears twice"),
        ({"heads": 3}, TypeError, "heads=3: expected a tuple"),
        ({"heads": (0, 6)}, ValueError, "heads has 6: the model's heads count from 0 to 5"),
        ({"heads": (0, 1, 2)}, ValueError, "shared by unequal numbers of query heads"),
        ({"query_blocks": (4,)}, ValueError, "query_blocks has 4: blocks of 210 tokens count"),
        ({"query_blocks": (-1,)}, ValueError, r"query_blocks\[0\]=-1"),
    ],
)
def test_a_selection_that_cannot_be_is_refused(selection: dict, error, message: str):
    with pytest.raises(error, match=message):
        spec(selection=Selection(**selection))


def test_rows_are_spread_over_the_sequence_in_pairs_that_make_a_tile_of_128():
    assert spread_blocks(64 * 32, 8) == (4, 5, 12, 13, 20, 21, 28, 29)
    assert spread_blocks(64 * 3 + 1, 4) == (0, 1, 2, 3)
    assert spread_blocks(64 * 3, 4) == (0, 1, 2)  # the last pair has one block
    with pytest.raises(ValueError, match="query_blocks=3: must be even"):
        spread_blocks(64 * 32, 3)
    with pytest.raises(ValueError, match="query_blocks=34: must be at least 2 and at most 32"):
        spread_blocks(64 * 32, 34)


def test_a_call_of_another_shape_or_order_is_refused(tmp_path: Path):
    wanted = spec(entries=((0, 0),))
    recorder, parts = Recorder(tmp_path / "a.safetensors", wanted), whole_call(wanted)
    short = {**parts, "k": parts["k"][:, :, :2]}
    with pytest.raises(ValueError, match=r"k: shape \(1, 210, 2, 8\), but the spec is of"):
        recorder(**short, call=AttentionCall(0, 0, 1.0, GRID.shape))
    with pytest.raises(ValueError, match="order 'morton', but the capture says 'raster'"):
        recorder(**parts, call=AttentionCall(0, 0, 1.0, GRID.shape, order="morton"))
    recorder.writer.close()


# -- after a kill ----------------------------------------------------------------------------------

KILLED = """
    import os, signal, sys
    from pathlib import Path
    from tests.test_capture_scale import feed, spec
    from workbench.capture.recorder import Recorder
    recorder = Recorder(Path(sys.argv[1]), spec(), attention=lambda q, k, v, call: q)
    feed(recorder, spec(), spec().entries[:2])
    os.kill(os.getpid(), signal.SIGKILL)
"""


def python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    root = str(Path(__file__).resolve().parent.parent)
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        check=False,
        timeout=120,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([root, *sys.path])},
    )


def test_a_killed_recording_goes_on_and_gives_the_file_of_one_that_was_not_killed(tmp_path: Path):
    target = tmp_path / "a.safetensors"
    assert python(KILLED, target).returncode == -signal.SIGKILL
    assert not target.exists()
    resumed = record(target, spec(), resume=True)
    assert resumed.writer.resumed == 2
    record(tmp_path / "b.safetensors", spec())
    assert target.read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"a.safetensors", "b.safetensors"}


def interrupted(path: Path, count: int = 2, **changes) -> None:
    """A recording that ends early with some entries written."""
    recorder = Recorder(path, spec(**changes), attention=lambda q, k, v, call: q)
    feed(recorder, spec(**changes), ENTRIES[:count])
    failure = RuntimeError("no more power")
    recorder.__exit__(RuntimeError, failure, None)


def test_a_sampling_that_broke_off_is_recorded_to_the_end_by_a_second_one(tmp_path: Path):
    torch.manual_seed(0)
    model = VideoDiT(DiTConfig(depth=2, width=32, head_dim=16)).eval()
    plan = SamplingPlan((0, 1), (0, 2), grid=(2, 3, 4), steps=3, query_blocks=(0,))

    def breaks(q, k, v, call: AttentionCall) -> torch.Tensor:
        if call.step == 2:
            raise RuntimeError("no more power")
        return dense_attention(q, k, v, call)

    with pytest.raises(RuntimeError, match="no more power"):
        record_sampling(model, plan, tmp_path / "a", attention=breaks)
    broken = record_sampling(model, plan, tmp_path / "a", resume=True)
    whole = record_sampling(model, plan, tmp_path / "b")
    assert broken.path.read_bytes() == whole.path.read_bytes()


def test_what_is_there_is_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "a.safetensors"
    interrupted(path)
    written = []
    original = CaptureWriter.write
    monkeypatch.setattr(
        CaptureWriter,
        "write",
        lambda self, *entry, **parts: written.append(entry) or original(self, *entry, **parts),
    )
    record(path, spec(), resume=True)
    assert written == [(3, 2)]


def test_an_interrupted_recording_is_never_overwritten_unasked(tmp_path: Path):
    path = tmp_path / "a.safetensors"
    interrupted(path)
    with pytest.raises(FileExistsError, match=r"2 of 3 entries; resume=True \(--resume\)"):
        Recorder(path, spec())


def test_an_interrupted_recording_without_an_entry_is_begun_anew(tmp_path: Path):
    path = tmp_path / "a.safetensors"
    interrupted(path, count=0)
    record(path, spec())
    open_capture(path).verify()


def test_resume_without_an_interrupted_recording_starts_one(tmp_path: Path):
    assert record(tmp_path / "a.safetensors", spec(), resume=True).writer.resumed == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"details": {"seed": "6"}}, "seed: '5' there, '6' now"),
        ({"selection": Selection(heads=(0, 1, 4, 5), query_blocks=(0,))}, "selection: .* there"),
        ({"entries": ENTRIES[:2]}, "tensors: "),
    ],
)
def test_a_recording_with_other_settings_is_not_resumed(tmp_path: Path, changes, message: str):
    path = tmp_path / "a.safetensors"
    interrupted(path, details={"seed": "5"})
    before = path.with_name("a.safetensors.partial").read_bytes()
    with pytest.raises(ValueError, match=f"the interrupted recording is another one .*{message}"):
        Recorder(path, spec(**{"details": {"seed": "5"}, **changes}), resume=True)
    assert path.with_name("a.safetensors.partial").read_bytes() == before


def test_of_settings_in_json_only_what_differs_is_named(tmp_path: Path):
    path = tmp_path / "a.safetensors"
    interrupted(path, details={"scheduler": '{"shift": 3.0, "kind": "euler", "old": null}'})
    now = spec(details={"scheduler": '{"kind": "euler", "shift": 5.0}'})
    named = """scheduler: '{"shift": 3.0, "old": null}' there, '{"shift": 5.0}' now"""
    with pytest.raises(ValueError, match=re.escape(f"({named})")):
        Recorder(path, now, resume=True)


def test_an_entry_whose_bytes_never_reached_the_disk_is_recorded_again(tmp_path: Path):
    path = tmp_path / "a.safetensors"
    interrupted(path)
    partial = path.with_name("a.safetensors.partial")
    data = bytearray(partial.read_bytes())
    start = spec().header_bytes + spec().tensors["layer0.step1.k"].start
    data[start : start + 4] = b"\0\0\0\0"
    partial.write_bytes(bytes(data))
    assert record(path, spec(), resume=True).writer.resumed == 1
    open_capture(path).verify()


def test_a_torn_last_line_of_the_journal_counts_as_not_written(tmp_path: Path):
    path = tmp_path / "a.safetensors"
    interrupted(path)
    journal = path.with_name("a.safetensors.journal")
    journal.write_text(journal.read_text()[:-20])
    assert record(path, spec(), resume=True).writer.resumed == 1


def test_two_processes_do_not_record_the_same_file(tmp_path: Path):
    path = tmp_path / "a.safetensors"
    first = Recorder(path, spec())
    with pytest.raises(BlockingIOError, match="another process records this capture"):
        Recorder(path, spec())
    first.writer.close()


# -- size and memory are known before --------------------------------------------------------------


@pytest.mark.parametrize("selection", [Selection(), SELECTION, Selection(heads=(1, 3, 5))])
def test_the_file_is_as_large_as_predicted(tmp_path: Path, selection: Selection):
    path = tmp_path / "a.safetensors"
    record(path, spec(selection=selection))
    assert path.stat().st_size == spec(selection=selection).total_bytes


def test_the_room_is_taken_from_the_disk_at_the_start(tmp_path: Path):
    recorder = Recorder(tmp_path / "a.safetensors", spec())
    assert recorder.writer.partial.stat().st_blocks * 512 >= spec().total_bytes
    recorder.writer.close()


def test_a_disk_that_fills_up_meanwhile_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(OSError, match="more than is free; record fewer layers") as caught:
        Recorder(tmp_path / "a.safetensors", spec())
    assert caught.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


def test_resuming_counts_what_the_recording_already_occupies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "a.safetensors"
    interrupted(path)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: type("Usage", (), {"free": 0}))
    assert record(path, spec(), resume=True).writer.resumed == 2


LARGE = """
    import resource, sys
    from pathlib import Path
    import torch
    from blockattn import TokenGrid
    from workbench.capture import CaptureSpec, Selection, open_capture, spread_blocks
    from workbench.capture.memory import recording_memory
    from workbench.capture.recorder import Recorder
    from workbench.models import AttentionCall

    def peak():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    grid = TokenGrid((25, 50, 80))
    selection = Selection(heads=(1, 3), query_blocks=spread_blocks(grid.tokens, 16))
    spec = CaptureSpec(grid, ((0, 0), (1, 0), (2, 0)), heads=4, head_dim=64, selection=selection)
    x = torch.ones(1, grid.tokens, 4, 64)
    path = Path(sys.argv[1])
    warm = CaptureSpec(TokenGrid((1, 8, 8)), ((0, 0),), heads=1, head_dim=8)
    with Recorder(path.with_name("warm"), warm, attention=lambda q, k, v, call: q) as recorder:
        small = torch.ones(1, 64, 1, 8)
        recorder(small, small, small, AttentionCall(0, 0, 1.0, (1, 8, 8)))
    before = peak()
    with Recorder(path, spec, attention=lambda q, k, v, call: q) as recorder:
        for layer in range(3):
            recorder(x, x, x, AttentionCall(layer, 0, 1.0, grid.shape))
    print(peak() - before, recording_memory(spec).host, path.stat().st_size, spec.total_bytes)
"""


def test_recording_a_hundred_thousand_tokens_stays_within_the_predicted_memory(tmp_path: Path):
    done = python(LARGE, tmp_path / "a.safetensors")
    assert done.returncode == 0, done.stderr
    taken, predicted, size, total = map(int, done.stdout.split())
    assert size == total
    assert taken <= predicted
    assert predicted < 100_000**2 / 8  # a mask of tokens x tokens would be far above


# -- off the GPU -----------------------------------------------------------------------------------


def kept(wanted: CaptureSpec, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {p: torch.randn(wanted.part_shape(p), generator=generator).bfloat16() for p in "qkv"}


def test_the_thread_writes_what_was_queued_although_the_model_changes_it_afterwards(tmp_path: Path):
    path = tmp_path / "a.safetensors"
    with CaptureWriter(path, spec()) as writer:
        background = BackgroundWriter(writer, buffers=2)
        for number, entry in enumerate(ENTRIES):
            parts = kept(spec(), number)
            background.put(*entry, time=0.5, **parts)
            parts["q"].zero_()
        background.close()
    for number, entry in enumerate(ENTRIES):
        assert torch.equal(open_capture(path).load_rows(*entry).q, kept(spec(), number)["q"])


def test_a_slow_disk_holds_the_model_up_only_when_every_buffer_is_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    release, original = threading.Event(), CaptureWriter.write

    def slow(self: CaptureWriter, *entry: int, **parts) -> None:
        release.wait(30)
        original(self, *entry, **parts)

    monkeypatch.setattr(CaptureWriter, "write", slow)
    with CaptureWriter(tmp_path / "a.safetensors", spec()) as writer:
        background = BackgroundWriter(writer, buffers=2)
        for number, entry in enumerate(ENTRIES[:2]):
            background.put(*entry, time=0.5, **kept(spec(), number))
        assert background.waited == 0  # two buffers, two entries: nothing was written yet
        assert not writer.has(*ENTRIES[0])
        threading.Timer(0.05, release.set).start()
        background.put(*ENTRIES[2], time=0.5, **kept(spec(), 2))
        assert background.waited > 0
        background.close()


def test_an_error_of_the_thread_reaches_the_caller(tmp_path: Path):
    writer = CaptureWriter(tmp_path / "a.safetensors", spec())
    background = BackgroundWriter(writer)
    parts = kept(spec(), 0)
    parts["k"][0, 5] = torch.nan
    background.put(*ENTRIES[0], time=0.5, **parts)
    with pytest.raises(ValueError, match=r"not finite in bfloat16.*token 5"):
        background.close()
    writer.close()


def test_the_memory_on_a_gpu_is_two_buffers_rounded_up_to_powers_of_two():
    wanted = spec(selection=Selection())
    assert host_bytes(wanted, 2) == 2 * 2 ** (wanted.entry_bytes - 1).bit_length()
    memory = recording_memory(wanted, gpu=True)
    assert memory == (host_bytes(wanted), 2 * wanted.entry_bytes + SLACK)


# -- the command -----------------------------------------------------------------------------------


def test_the_capture_command_keeps_heads_and_rows_and_predicts_both(tmp_path: Path):
    out = tmp_path / "c.safetensors"
    options = ["--layers", "1", "--at-steps", "0", "--steps", "1", "--grid", "4,8,8"]
    chosen = ["--heads", "1", "--query-blocks", "2", "--order", "morton"]
    done = CliRunner().invoke(cli.app, ["capture", "--out", str(out), *options, *chosen])
    assert done.exit_code == 0, done.output
    assert f"will take {out.stat().st_size:,} bytes" in done.output
    assert "recording takes up to" in done.output
    assert "(heads 1 of 2; 2 of 4 query blocks)" in done.output
    capture = open_capture(out)
    assert capture.grid == TokenGrid((4, 8, 8), order="morton")
    assert capture.query_blocks == (2, 3)
