"""Capture files: what goes in comes out, the size is known before, and damage is named."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import weakref
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from blockattn import TokenGrid
from workbench.capture import QKV, CaptureSpec, CaptureWriter, open_capture
from workbench.capture.format import combined_digest, tensor_name

GRID = TokenGrid((2, 3, 4), prefix=1, suffix=2, order="morton")
ENTRIES = ((0, 1), (0, 3), (2, 1))


def spec(**changes) -> CaptureSpec:
    settings = {"grid": GRID, "entries": ENTRIES, "heads": 4, "kv_heads": 2, "head_dim": 8}
    return CaptureSpec(**{**settings, "video_shape": (4, 6, 8), "title": "a test", **changes})


def entry(layer: int, step: int, wanted: CaptureSpec, dtype=torch.bfloat16) -> dict:
    generator = torch.Generator().manual_seed(100 * layer + step)
    parts = {
        part: torch.randn(wanted.part_shape(part), generator=generator).to(dtype) for part in "qkv"
    }
    return {"time": 1 - step / 99, **parts}


def video(wanted: CaptureSpec) -> torch.Tensor:
    assert wanted.video_shape is not None
    count = torch.Size(wanted.video_shape).numel() * 3
    return (torch.arange(count) % 251).to(torch.uint8).reshape(*wanted.video_shape, 3)


def write(
    path: Path, wanted: CaptureSpec | None = None, entries=None, dtype=torch.bfloat16
) -> Path:
    wanted = wanted or spec()
    with CaptureWriter(path, wanted) as writer:
        for layer, step in entries or wanted.entries:
            writer.write(layer, step, **entry(layer, step, wanted, dtype))
        if wanted.video_shape is not None:
            writer.write_video(video(wanted))
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "a.safetensors")


def rewrite(path: Path, *, tensors=None, metadata=None, drop=()) -> None:
    """The file again, as another program might have left it."""
    with safe_open(str(path), framework="pt") as opened:
        facts = {**(opened.metadata() or {}), **(metadata or {})}
    kept = {key: value for key, value in facts.items() if key not in drop}
    held = {**load_file(path), **(tensors or {})}
    save_file({k: v for k, v in held.items() if k not in drop}, path, metadata=kept)


# -- what goes in comes out ------------------------------------------------------------------------


def test_what_was_written_is_read_again_bit_for_bit(file: Path):
    capture, wanted = open_capture(file), spec()
    for layer, step in ENTRIES:
        expected, found = entry(layer, step, wanted), capture.load(layer, step)
        assert isinstance(found, QKV)
        assert (found.layer, found.step, found.time) == (layer, step, expected["time"])
        for part in "qkv":
            value = getattr(found, part)
            assert value.dtype == torch.bfloat16
            assert torch.equal(value, expected[part])
    assert torch.equal(capture.video, video(wanted))
    capture.verify()


def test_the_reader_states_the_layout_and_where_the_capture_comes_from(file: Path):
    capture = open_capture(str(file))
    assert capture.grid == GRID
    assert capture.entries == list(ENTRIES)
    assert (capture.layers, capture.steps) == ([0, 2], [1, 3])
    assert (capture.source, capture.title) == ("model", "a test")
    assert (capture.batch, capture.heads, capture.kv_heads, capture.head_dim) == (1, 4, 2, 8)
    assert "a test" in repr(capture)


def test_an_ordinary_safetensors_reader_reads_the_file_too(file: Path):
    tensors = load_file(file)
    assert set(tensors) == set(spec().tensors)
    assert torch.equal(tensors["layer0.step3.k"], entry(0, 3, spec())["k"])


def test_entries_may_come_in_any_order_and_give_the_same_file(tmp_path: Path):
    one = write(tmp_path / "one.safetensors")
    other = write(tmp_path / "other.safetensors", entries=ENTRIES[::-1])
    assert one.read_bytes() == other.read_bytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_other_dtypes_are_rounded_to_bfloat16(tmp_path: Path, dtype: torch.dtype):
    found = open_capture(write(tmp_path / "a.safetensors", dtype=dtype)).load(0, 1)
    assert torch.equal(found.q, entry(0, 1, spec(), dtype)["q"].bfloat16())


def test_the_writer_keeps_no_tensor_in_memory(tmp_path: Path):
    writer = CaptureWriter(tmp_path / "a.safetensors", spec())
    given = entry(0, 1, spec())
    watched = [weakref.ref(given[part]) for part in "qkv"]
    writer.write(0, 1, **given)
    del given
    assert [ref() for ref in watched] == [None, None, None]
    writer.close()


def test_strided_tensors_are_written_by_their_values(tmp_path: Path):
    wanted = spec(entries=((0, 0),), video_shape=None)
    given = entry(0, 0, wanted)
    turned = {part: given[part].transpose(1, 2).contiguous().transpose(1, 2) for part in "qkv"}
    assert not turned["q"].is_contiguous()
    with CaptureWriter(tmp_path / "a.safetensors", wanted) as writer:
        writer.write(0, 0, time=1.0, **turned)
    assert torch.equal(open_capture(tmp_path / "a.safetensors").load(0, 0).v, given["v"])


def test_a_capture_without_a_video_has_none(tmp_path: Path):
    assert open_capture(write(tmp_path / "a.safetensors", spec(video_shape=None))).video is None


def test_a_call_can_be_moved_to_another_dtype(file: Path):
    found = open_capture(file).load(2, 1)
    wide = found.to("cpu", torch.float32)
    assert wide.q.dtype == wide.k.dtype == wide.v.dtype == torch.float32
    assert (wide.layer, wide.step, wide.time) == (2, 1, found.time)


def test_a_synthetic_capture_always_says_so_in_its_title():
    assert spec(source="synthetic", title="fields").title == "synthetic: fields"
    assert spec(source="synthetic", title="").title == "synthetic"
    assert spec(source="synthetic", title="Synthetic noise").title == "Synthetic noise"


# -- the size is known before, and refused ---------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"video_shape": None},
        {"details": {"seed": "7", "label": 'a "quoted" name, é'}},
        {"grid": TokenGrid((1, 1, 1)), "entries": ((11, 40),)},
    ],
)
def test_the_predicted_size_is_the_size_of_the_file(tmp_path: Path, changes: dict):
    wanted = spec(**changes)
    assert write(tmp_path / "a.safetensors", wanted).stat().st_size == wanted.total_bytes


def test_the_prediction_for_a_hundred_thousand_tokens_needs_no_memory():
    wanted = CaptureSpec(TokenGrid((25, 50, 80)), ((0, 0),), heads=40, head_dim=128)
    assert wanted.data_bytes == 3 * 100_000 * 40 * 128 * 2
    assert wanted.total_bytes - wanted.data_bytes < 2000


def test_a_capture_above_the_limit_is_refused_with_the_number_and_the_way_to_raise_it(tmp_path):
    wanted = spec(grid=TokenGrid((25, 50, 80)))
    with pytest.raises(
        ValueError, match=rf"{wanted.total_bytes:,}.*limit_bytes=1,048,576.*--limit"
    ):
        CaptureWriter(tmp_path / "a.safetensors", wanted, limit_bytes=2**20)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_noticed_before_the_recording(tmp_path: Path, monkeypatch):
    usage = type("Usage", (), {"free": 100})
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage)
    with pytest.raises(OSError, match="only 100 are free"):
        CaptureWriter(tmp_path / "a.safetensors", spec())
    assert list(tmp_path.iterdir()) == []


# -- a recording that fails leaves no capture ------------------------------------------------------


def test_a_capture_replaces_nothing(file: Path):
    before = file.read_bytes()
    with pytest.raises(FileExistsError, match="replaces nothing"):
        CaptureWriter(file, spec())
    assert file.read_bytes() == before


def unfinished(folder: Path) -> bool:
    """Whether a folder holds a recording that did not end, and nothing else."""
    names = {path.name for path in folder.iterdir()}
    return names == {"a.safetensors.partial", "a.safetensors.journal"}


def test_a_recording_that_fails_leaves_a_partial_file_alone(tmp_path: Path):
    file = tmp_path / "a.safetensors"

    def break_down() -> None:
        with writer:
            writer.write(0, 1, **entry(0, 1, spec()))
            raise RuntimeError("the sampler broke")

    writer = CaptureWriter(file, spec())
    with pytest.raises(RuntimeError, match="the sampler broke"):
        break_down()
    assert not file.exists()
    with pytest.raises(ValueError, match="not a safetensors file"):
        open_capture(writer.partial)


def test_a_recording_that_ends_too_early_names_what_is_missing(tmp_path: Path):
    with pytest.raises(ValueError, match=r"7 of 10 tensors never came.*layer0\.step3\.q"):
        with CaptureWriter(tmp_path / "a.safetensors", spec()) as writer:
            writer.write(0, 1, **entry(0, 1, spec()))
    assert unfinished(tmp_path)


def test_a_killed_recording_leaves_no_capture(tmp_path: Path):
    code = """
        import os, signal, sys, torch
        from blockattn import TokenGrid
        from workbench.capture import CaptureSpec, CaptureWriter
        spec = CaptureSpec(TokenGrid((2, 3, 4)), ((0, 0), (0, 1)), heads=1, head_dim=8)
        writer = CaptureWriter(sys.argv[1], spec)
        x = torch.zeros(spec.part_shape("q"))
        writer.write(0, 0, time=1.0, q=x, k=x, v=x)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    target = tmp_path / "a.safetensors"
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(target)],
        check=False,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == -signal.SIGKILL
    assert unfinished(tmp_path)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ((5, 5), r"layer=5, step=5 was not announced"),
        ((0, 1), r"layer=0, step=1 is written already"),
    ],
)
def test_an_entry_that_has_no_room_is_refused(tmp_path: Path, where, message: str):
    writer = CaptureWriter(tmp_path / "a.safetensors", spec())
    writer.write(0, 1, **entry(0, 1, spec()))
    with pytest.raises(ValueError, match=message):
        writer.write(*where, **entry(*where, spec()))
    writer.close()


def change(parts: dict, **changes) -> dict:
    return {**parts, **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"q": torch.zeros(1, 9, 4, 8)},
            r"layer0\.step1\.q: shape \(1, 9, 4, 8\).*\(1, 27, 4, 8\)",
        ),
        ({"k": torch.zeros(1, 27, 4, 8)}, r"layer0\.step1\.k: shape"),
        ({"time": float("nan")}, r"time=nan: must be finite"),
        ({"time": 900.0}, r"time=900\.0: must be in \[0, 1\]"),
        ({"time": None}, r"time=None: a capture states the denoising time"),
        ({"v": torch.full((1, 27, 2, 8), torch.inf)}, r"step1\.v: 432 values are not finite"),
    ],
)
def test_an_entry_that_cannot_be_right_is_refused(tmp_path: Path, changes: dict, message: str):
    writer = CaptureWriter(tmp_path / "a.safetensors", spec())
    with pytest.raises(ValueError, match=message):
        writer.write(0, 1, **change(entry(0, 1, spec()), **changes))
    writer.close()


def test_the_first_value_that_is_not_finite_is_located(tmp_path: Path):
    given = entry(0, 1, spec())
    given["k"][0, 20, 1, 3] = torch.nan
    writer = CaptureWriter(tmp_path / "a.safetensors", spec())
    with pytest.raises(ValueError, match="batch 0, head 1, token 20"):
        writer.write(0, 1, **given)
    writer.close()


def test_a_video_that_does_not_fit_is_refused(tmp_path: Path):
    writer = CaptureWriter(tmp_path / "a.safetensors", spec())
    with pytest.raises(TypeError, match=r"video: dtype torch\.float32, expected uint8"):
        writer.write_video(video(spec()).float())
    with pytest.raises(ValueError, match="video: shape"):
        writer.write_video(video(spec())[:1])
    writer.close()
    silent = CaptureWriter(tmp_path / "b.safetensors", spec(video_shape=None))
    with pytest.raises(ValueError, match="no room for one"):
        silent.write_video(video(spec()))
    silent.close()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"entries": ()}, ValueError, "entries is empty"),
        ({"entries": ((0, 1), (0, 1))}, ValueError, "appears twice"),
        ({"entries": ((0, -1),)}, ValueError, r"entries\[1\]=-1"),
        ({"heads": True}, TypeError, "heads=True"),
        ({"head_dim": 0}, ValueError, "head_dim=0"),
        ({"grid": (2, 3, 4)}, TypeError, "grid=.*TokenGrid"),
        ({"source": "guess"}, ValueError, "source='guess'"),
        ({"details": {"sha256": "x"}}, ValueError, "details has 'sha256'"),
        ({"details": {"seed": 3}}, TypeError, r"details\['seed'\]=3"),
    ],
)
def test_a_spec_that_cannot_be_is_refused(changes: dict, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        spec(**changes)


# -- damage is named -------------------------------------------------------------------------------


def test_a_missing_file_says_how_to_make_one(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"none\.safetensors: no such file.*workbench capt"):
        open_capture(tmp_path / "none.safetensors")


@pytest.mark.parametrize("kept", [0.3, 0.999])
def test_a_truncated_file_says_how_much_is_missing(file: Path, kept: float):
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * kept)])
    size = rf"{int(len(data) * kept):,} bytes of {len(data):,}"
    with pytest.raises(ValueError, match=rf"a\.safetensors: truncated: {size}|not a safetensors"):
        open_capture(file)


def test_a_file_cut_within_its_tensors_is_called_truncated(file: Path):
    data = file.read_bytes()
    file.write_bytes(data[:-1])
    with pytest.raises(ValueError, match=rf"truncated: {len(data) - 1:,} bytes of {len(data):,}"):
        open_capture(file)


@pytest.mark.parametrize("content", [b"", b"abc", b"PK\x03\x04" + b"x" * 500, b"\x00" * 64])
def test_a_file_of_another_kind_is_no_capture(tmp_path: Path, content: bytes):
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.safetensors: no capture: it is not a safetensors"):
        open_capture(path)


def test_a_safetensors_file_of_another_kind_is_no_capture(tmp_path: Path):
    save_file({"x": torch.zeros(2)}, tmp_path / "a.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"its format is 'pt', a capture has 'workbench\.capture'"):
        open_capture(tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"metadata": {"version": "2"}}, r"version '2', this workbench reads '1'"),
        ({"metadata": {"source": "hearsay"}}, r"source is 'hearsay'"),
        ({"metadata": {"grid": "[2, 3]"}}, r"the header is damaged: shape=\(2, 3\)"),
        ({"metadata": {"grid": "[2, 3"}}, r"the header is damaged"),
        ({"metadata": {"entries": "[]"}}, r"the header is damaged"),
        ({"metadata": {"entries": "[[0, 1, NaN]]"}}, r"damaged: time of .*=nan: must be finite"),
        ({"metadata": {"entries": "[[0, 1, 7]]"}}, r"damaged: time of .*=7: must be in \[0, 1\]"),
        ({"metadata": {"entries": '[[0, 1, "0.5"]]'}}, r"damaged: time of .*expected a number"),
        ({"metadata": {"entries": "[[0, 1, null]]"}}, r"damaged: .*\(0, 1\) has no time"),
        ({"metadata": {"entries": "[[0, 1, 1], [0, 1, 0]]"}}, r"\(0, 1\) is listed twice"),
        ({"metadata": {"order": "hilbert"}}, r"the header is damaged: order='hilbert'"),
        ({"drop": ("prefix", "sha256")}, r"the header lacks \['prefix', 'sha256'\]"),
        ({"drop": ("layer0.step3.k",)}, r"tensor 'layer0\.step3\.k' is missing"),
        ({"drop": ("layer0.step1.q",)}, r"tensor 'layer0\.step1\.q' is missing"),
        (
            {"tensors": {"layer2.step1.v": torch.zeros(1, 27, 2, 8)}},
            r"layer2\.step1\.v is F32 \[1, 27, 2, 8\].*asks for BF16",
        ),
        (
            {"tensors": {"layer0.step3.q": torch.zeros(1, 26, 4, 8).bfloat16()}},
            r"layer0\.step3\.q is BF16 \[1, 26, 4, 8\].*\[1, 27, 4, 8\]",
        ),
        (
            {"tensors": {"layer0.step1.k": torch.zeros(27, 8).bfloat16()}},
            r"expected \[B, T, H, D\]",
        ),
        ({"tensors": {"video": torch.zeros(4, 6, 8, 3)}}, r"video is F32"),
    ],
)
def test_damage_to_the_header_or_a_tensor_is_named(file: Path, damage: dict, message: str):
    rewrite(file, **damage)
    with pytest.raises(ValueError, match=message) as caught:
        open_capture(file)
    assert str(file) in str(caught.value)


def test_an_unknown_entry_lists_those_there_are(file: Path):
    with pytest.raises(
        ValueError, match=r"layer=1, step=1: not in .*\[\(0, 1\), \(0, 3\), \(2, 1\)"
    ):
        open_capture(file).load(1, 1)


def test_verify_names_the_tensor_whose_bytes_changed(file: Path):
    data = bytearray(file.read_bytes())
    data[spec().header_bytes + spec().tensors[tensor_name(0, 3, "q")].start] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(ValueError, match=r"checksum mismatch in \['layer0\.step3\.q'\]"):
        open_capture(file).verify()


def test_verify_notices_a_checksum_that_was_changed(file: Path):
    rewrite(file, metadata={"sha256": "0" * 64})
    with pytest.raises(ValueError, match="checksum mismatch in the header"):
        open_capture(file).verify()


@pytest.mark.parametrize(
    "changed",
    [
        {"title": "another"},
        {"entries": "[[0, 1, 0.5], [0, 3, 0.25], [2, 1, 0.75]]"},
        {"more": "a fact that nobody recorded"},
    ],
)
def test_verify_notices_a_fact_that_was_changed(file: Path, changed: dict[str, str]):
    assert "header_sha256" not in open_capture(file)._spec.details
    open_capture(file).verify()
    rewrite(file, metadata=changed)
    with pytest.raises(ValueError, match="checksum mismatch in the header"):
        open_capture(file).verify()


def test_a_file_of_before_the_header_had_a_checksum_verifies(file: Path):
    rewrite(file, drop=("header_sha256",))
    open_capture(file).verify()


@pytest.mark.parametrize("text", ["[]", "{", "{}"])
def test_verify_survives_a_list_of_checksums_that_is_damaged_itself(file: Path, text: str):
    rewrite(file, metadata={"tensor_sha256": text})
    with pytest.raises(ValueError, match="checksum mismatch"):
        open_capture(file).verify()


@pytest.mark.parametrize("name", ["", ".", "folder"])
def test_a_folder_is_no_name_for_a_capture(tmp_path: Path, monkeypatch, name: str):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match="a folder; name a file in it"):
        CaptureWriter(name, spec())
    assert list(tmp_path.rglob("*.partial")) == []


def test_the_checksum_covers_names_and_bytes_but_not_their_order(file: Path):
    metadata = open_capture(file).metadata
    digests = json.loads(metadata["tensor_sha256"])
    assert combined_digest(dict(reversed(digests.items()))) == metadata["sha256"]
    swapped = {**digests, "layer0.step1.q": digests["layer0.step1.k"]}
    assert combined_digest(swapped) != metadata["sha256"]
