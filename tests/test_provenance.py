"""A provenance record says how to make a result again, and nothing about the machine unasked."""

from __future__ import annotations

import hashlib
import json
import subprocess
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import workbench
from workbench import provenance as module
from workbench.paths import data_dir
from workbench.provenance import driver_version, git_state, package_versions, provenance, sha256_of


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A small git repository with one committed file."""
    root = tmp_path / "project"
    root.mkdir()
    (root / "a.txt").write_text("one")
    who = ["-c", "user.name=t", "-c", "user.email=t@example.invalid", "-c", "commit.gpgsign=false"]
    for command in (["init", "-q"], ["add", "a.txt"], [*who, "commit", "-qm", "first"]):
        subprocess.run(["git", *command], cwd=root, check=True, timeout=20)
    return root


def test_the_record_is_json_and_names_versions_device_and_command(tmp_path: Path):
    source = tmp_path / "in.bin"
    source.write_bytes(b"abc")
    record = provenance(["workbench", "tune", "--taus", "1"], {"capture": source}, seeds={"x": 3})
    assert json.loads(json.dumps(record)) == record
    assert record["command"] == ["workbench", "tune", "--taus", "1"]
    assert record["seeds"] == {"x": 3}
    assert record["versions"]["workbench"] == workbench.__version__
    assert record["versions"]["torch"] is not None
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    assert record["device"]["kind"] == kind
    assert record["device"]["name"]
    assert record["device"]["cores"] >= 1
    assert datetime.fromisoformat(record["time"]).utcoffset().total_seconds() == 0


def test_inputs_have_path_as_given_size_and_checksum(tmp_path: Path, monkeypatch):
    (tmp_path / "in.bin").write_bytes(b"abc")
    monkeypatch.chdir(tmp_path)
    record = provenance(None, {"capture": Path("in.bin")})
    expected = hashlib.sha256(b"abc").hexdigest()
    assert record["inputs"] == {"capture": {"path": "in.bin", "bytes": 3, "sha256": expected}}
    assert record["command"] is None


def test_the_record_holds_no_folder_of_this_machine_that_nobody_gave():
    bundled = data_dir() / "tiny_video_dit.safetensors"
    record = provenance(["/somewhere/bin/workbench", "tune"], {"weights": bundled})
    assert record["inputs"]["weights"]["path"] == "data/tiny_video_dit.safetensors"
    assert record["command"] == ["workbench", "tune"]
    assert str(Path.home()) + "/" not in json.dumps(record)
    assert str(data_dir()) not in json.dumps(record)


def test_a_missing_input_is_an_error(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"inputs has .*none\.bin"):
        provenance(None, {"capture": tmp_path / "none.bin"})


def test_a_package_that_is_not_installed_has_no_version():
    assert package_versions(["torch", "no-such-package"])["no-such-package"] is None


def test_git_state_tells_a_clean_checkout_from_a_changed_one(checkout: Path):
    clean = git_state(checkout)
    assert clean is not None
    assert len(clean["commit"]) == 40
    assert clean["dirty"] is False
    (checkout / "new.txt").write_text("results beside the code do not change the code")
    assert git_state(checkout) == clean
    (checkout / "a.txt").write_text("two")
    assert git_state(checkout) == {**clean, "dirty": True}


def test_outside_a_checkout_or_without_git_there_is_no_git_state(
    checkout: Path, tmp_path: Path, monkeypatch
):
    assert git_state(None) is None
    assert git_state(tmp_path) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(checkout) is None


def test_an_installed_package_has_no_git_state(monkeypatch):
    monkeypatch.setattr(module, "checkout_dir", lambda: None)
    assert provenance(None, {})["git"] is None


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue\nGCC 12.2.0 x",
            "550.54.15",
        ),
        ("NVRM version: Open Kernel Module for x86_64  570.86.15  Release Build", "570.86.15"),
        ("something else", None),
    ],
)
def test_the_driver_version_is_read_from_the_kernel(tmp_path: Path, text: str, version: str | None):
    path = tmp_path / "version"
    path.write_text(text)
    assert driver_version(path) == version
    assert driver_version(tmp_path / "absent") is None


def test_a_record_is_its_origin_and_its_environment():
    whole = provenance(["x"], {}, seeds={"noise": 1})
    origin, environment = module.origin(["x"], {}, seeds={"noise": 1}), module.environment()
    assert set(whole) == {*origin, *environment}
    assert {name: whole[name] for name in environment} == environment
    assert not set(origin) & set(environment)


def test_the_id_of_a_record_follows_from_its_content_alone():
    record = {"a": 1, "b": {"c": [1, 2], "d": None}}
    text = b'{"a":1,"b":{"c":[1,2],"d":null}}'
    assert module.record_id(record) == hashlib.sha256(text).hexdigest()[:12]
    assert module.record_id({"b": {"d": None, "c": [1, 2]}, "a": 1}) == module.record_id(record)
    assert module.record_id({**record, "a": 2}) != module.record_id(record)


def test_clocks_and_power_are_what_the_drivers_tool_says(tmp_path: Path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\n"
        '[ "$1 $2 $3" = "--id=GPU-12ab '
        '--query-gpu=clocks.max.sm,clocks.max.mem,power.limit --format=csv,noheader,nounits" ] '
        "|| exit 2\n"
        "echo '1980, 3201, [N/A]'\n"
    )
    tool.chmod(0o755)
    gpu = SimpleNamespace(uuid="12ab")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = module.gpu_state(gpu, module.LIMITS)
    assert found == {"max_sm_mhz": 1980.0, "max_memory_mhz": 3201.0, "watts": None}
    assert module.gpu_state(gpu, module.CLOCK) is None  # the tool refuses
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert module.gpu_state(gpu, module.LIMITS) is None  # there is no tool


def test_a_large_file_is_summed_in_pieces(tmp_path: Path):
    data = bytes(range(256)) * 8192 + b"end"
    (tmp_path / "large").write_bytes(data)
    assert sha256_of(tmp_path / "large") == hashlib.sha256(data).hexdigest()
