"""Optional packages: missing or unloadable ones are tolerated and named, an API break is loud."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from blockattn import BlockRoute, UnsupportedError, attend
from blockattn.impl import cudnn, flash
from blockattn.impl import library as library_check
from tests.adapter_inputs import plant_package

ROOT = Path(__file__).resolve().parent.parent
ADAPTERS = {"flash": (flash, "4.0.0b36"), "cudnn": (cudnn, "1.32.0")}


@pytest.fixture
def plant(tmp_path, monkeypatch):
    """Installs a package with the given text as an adapter's library; nothing is imported yet.

    The adapter's calls, here on the CPU, pass for calls on a Hopper GPU.
    """

    def put(name: str, body: str) -> None:
        adapter, version = ADAPTERS[name]
        library = adapter.LIBRARY
        plant_package(tmp_path, library.distribution, version, {library.module: body})
        top = library.module.partition(".")[0]
        for module in [x for x in sys.modules if x.partition(".")[0] == top]:
            monkeypatch.delitem(sys.modules, module)
        monkeypatch.setattr(adapter, "gpu_obstacles", lambda *_: [])

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(library_check, "_tried", {})
    monkeypatch.setattr(library_check, "_version", library_check._version.__wrapped__)
    yield put
    for module in [x for x in sys.modules if x.partition(".")[0] in ("flash_attn", "cudnn")]:
        if str(tmp_path) in str(getattr(sys.modules[module], "__file__", "")):
            del sys.modules[module]


def call(impl: str):
    q = torch.ones(1, 128, 1, 64, dtype=torch.bfloat16)
    route = BlockRoute.full((1, 1), seqlens=(128, 128))
    return attend(q, q, q, route, impl=impl, return_trace=True)


@pytest.mark.parametrize("name", ADAPTERS)
@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("import a_package_that_is_not_here", ModuleNotFoundError),
        ("from torch import a_name_that_is_not_there", ImportError),
        ("raise OSError('libcuda.so.1: cannot open shared object file')", OSError),
    ],
)
def test_a_package_that_does_not_load_is_tolerated_and_its_cause_chained(name, body, error, plant):
    plant(name, body)
    with pytest.raises(UnsupportedError, match=f"impl='{name}' cannot serve") as refused:
        call(name)
    assert type(refused.value.__cause__) is error
    adapter, version = ADAPTERS[name]
    why = f"{adapter.LIBRARY.distribution} {version} cannot be imported: {error.__name__}: "
    (reason,) = refused.value.reasons
    assert reason.text.startswith(why)
    assert str(refused.value.__cause__) in reason.text
    _, trace = call("auto")
    assert trace.impl == "eager"
    assert reason in trace.reasons


@pytest.mark.parametrize("name", ADAPTERS)
@pytest.mark.parametrize("impl", ["by name", "auto"])
@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("import torch; torch.a_name_that_was_renamed", AttributeError),
        ("(lambda: 0)(1)", TypeError),
    ],
)
def test_an_api_break_in_the_import_is_loud_whoever_asks(name, impl, body, error, plant):
    plant(name, body)
    with pytest.raises(error):
        call(name if impl == "by name" else "auto")


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_api_break_in_the_first_call_is_loud_and_nothing_else_runs(name, plant, tmp_path):
    entry = {"flash": "_flash_attn_fwd", "cudnn": "block_sparse_attention_forward"}[name]
    plant(name, f"def {entry}(*tensors): pass")  # what is given by name, it does not take
    if name == "flash":
        text = "class BlockSparseTensorsTorch:\n    def __init__(self, **_): pass"
        (tmp_path / "flash_attn" / "cute" / "block_sparsity.py").write_text(text)
    for impl in (name, "auto"):
        with pytest.raises(TypeError, match="unexpected keyword argument"):
            call(impl)


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_missing_package_is_named_with_the_extra_that_has_it(name, monkeypatch):
    monkeypatch.setattr(library_check, "_version", lambda _: None)
    adapter, _ = ADAPTERS[name]
    text = f"{adapter.LIBRARY.distribution} is not installed; the extra {adapter.LIBRARY.extra}"
    assert adapter.obstacles(None)[0].startswith(text)
    with pytest.raises(UnsupportedError, match=text) as refused:
        call(name)
    assert refused.value.__cause__ is None


@pytest.mark.parametrize("name", ADAPTERS)
def test_nothing_is_imported_for_a_call_that_it_does_not_serve(name, plant):
    plant(name, "raise AttributeError('imported')")
    q = torch.ones(1, 128, 1, 64)
    _, trace = attend(q, q, q, skip_threshold=0.1, return_trace=True)
    assert any(reason.impl == name and "float32" in reason.text for reason in trace.reasons)


# -- the lanes ------------------------------------------------------------------------------------


def test_the_script_of_the_lanes_is_sound_bash():
    script = ROOT / ".ci" / "cute"
    done = subprocess.run(
        ["bash", "-n", str(script)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert os.access(script, os.X_OK)


def test_a_lane_that_is_not_what_is_installed_fails_by_name(tmp_path: Path):
    for distribution in ("nvidia-cutlass-dsl", "quack-kernels", "flash-attn-4"):
        plant_package(tmp_path, distribution, "0.1", {})
    done = subprocess.run(
        [sys.executable, str(ROOT / ".ci" / "cute_lane.py"), "cute", "imports", "any"],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode != 0
    assert "installed is {'nvidia-cutlass-dsl': '0.1'" in done.stderr
    assert "the lane cute is {'nvidia-cutlass-dsl': '4.6.1'" in done.stderr
