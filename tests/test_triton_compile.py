"""Every Triton kernel builds for GPUs that are not here, without spilling a register.

Compilation runs in a process of its own: the interpreter, which the other tests use, and the
compiler exclude each other.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="needs triton (Linux)")
pytestmark = pytest.mark.timeout(900)  # a compiler without a cache, on a busy machine

SCRIPT = """
import dataclasses, json, sys
from blockattn.impl.triton import compile_only as c
capability = int(sys.argv[1])
variants = {
    "dense": dict(LSE=True, RAGGED=True),
    "causal": dict(CAUSAL=True, RAGGED=True),
    "sol": dict(ROUTED=True, TAIL=True, RAGGED=True, LSE=True),
    "sol split": dict(ROUTED=True, TAIL=True, SPLIT=True, RAGGED=True),
    "mask": dict(ROUTED=True, SCALE_PTR=True, SCALE_OUTPUT_PTR=True),
    "padded": dict(ROUTED=True, LENGTHS=True),
    "skip": dict(SKIP=True, LSE=True, RAGGED=True),
    "skip sol": dict(SKIP=True, ROUTED=True, TAIL=True, LSE=True, RAGGED=True),
    "skip causal": dict(SKIP=True, CAUSAL=True, LSE=True, RAGGED=True),
}
if capability < 120:
    variants |= {f"{name} 128": variants[name] | {"skip_tile": (128, 128)}
                 for name in ("skip", "skip causal")}
found = {name: c.compile_attention(capability, **flags) for name, flags in variants.items()}
found |= {f"{name} D=64": c.compile_attention(capability, head_dim=64, **variants[name])
          for name in ("dense", "sol")}
found["sol fp16"] = c.compile_attention(capability, element="fp16", **variants["sol"])
if capability == 90:
    every = dict(RAGGED=True, SCALE_PTR=True, SCALE_OUTPUT_PTR=True)
    for element, flags in (("bf16", {}), ("fp16", every)):
        for tile in (64, 128):
            item = c.compile_vote_groups(element, (tile, tile), **flags)
            found[f"groups {tile} {element}"] = item
found["combine"] = c.compile_combine(capability)
for exact in (False, True):
    for name, item in c.compile_preparation(capability, exact=exact).items():
        found[f"{name} exact={exact}"] = item
for dim, element in ((128, "bf16"), (64, "bf16"), (256, "bf16"), (128, "fp16")):
    for name, item in c.compile_quantisers(capability, dim, element).items():
        found[f"{name} D={dim} {element}"] = item
print(json.dumps({name: dataclasses.asdict(item) for name, item in found.items()}))
"""
CODES_SCRIPT = """
import dataclasses, json, sys
from blockattn.impl.triton import compile_scaled as c
capability = int(sys.argv[1])
variants = {
    "dense": dict(LSE=True, RAGGED=True, CHANNELS=True, SCALE_PTR=True, SCALE_OUTPUT_PTR=True),
    "sol": dict(ROUTED=True, TAIL=True, RAGGED=True, LSE=True),
    "skip": dict(SKIP=True, LSE=True, RAGGED=True),
}
found = {}
for form in ("plain", "mxfp8", "nvfp4"):
    for name, flags in variants.items():
        found[f"{form} {name}"] = c.compile_scaled(capability, form, **flags)
    found[f"{form} P not rounded"] = c.compile_scaled(
        capability, form, round_p=False, **variants["skip"])
    found[f"{form} summaries"] = c.compile_summaries(capability, form)
print(json.dumps({name: dataclasses.asdict(item) for name, item in found.items()}))
"""
SHARED_MEMORY = {90: 227 * 1024, 100: 227 * 1024, 103: 227 * 1024, 120: 99 * 1024}
MATRIX_UNITS = {90: "wgmma", 100: "tcgen05", 103: "tcgen05"}


@pytest.fixture(scope="module", params=SHARED_MEMORY)
def building(request):
    """A capability and the processes of both scripts: compiling takes minutes, so side by side."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    processes = {
        script: subprocess.Popen(
            [sys.executable, "-c", script, str(request.param)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for script in (SCRIPT, CODES_SCRIPT)
    }  # fmt: skip
    yield request.param, processes
    for process in processes.values():
        process.kill()
        process.communicate()


def test_every_kernel_builds_without_spills(building):
    capability, processes = building
    found = built_without_spills(processes[SCRIPT], capability)
    unit = MATRIX_UNITS.get(capability)
    if unit is not None:
        for name in ("dense", "sol", "mask", "skip"):
            assert found[name]["instructions"][unit] > 0, name
            assert found[name]["instructions"]["tma"] > 0, name
    for name in (name for name in found if name.startswith("skip")):
        count = found[name]["instructions"]
        assert (count["vote"] > 0) == (capability == 90), name
        assert count["vote of all"] == (capability == 90 and not name.endswith("128")), name
    for name in (name for name in found if name.startswith("groups")):
        # Scores and output of whole tiles, and of a ragged one, by each group: none serialised.
        groups, tiles = (3 if " 64 " in name else 2), (1 if "bf16" in name else 2)
        count = found[name]["instructions"]
        assert count["matrix wait"] == groups * 2 * tiles, name
        # A place is given back once a tile, when all warps of the group are done with it.
        assert count["arrival"] == count["arrival of all"] == groups * tiles, name
    assert_quantisers_round_as_pytorch_does(found)
    for name in (name for name in found if name.startswith("nvfp4 D=")):
        assert (found[name]["instructions"]["e2m1"] > 0) == (capability >= 100), name


def assert_quantisers_round_as_pytorch_does(found):
    """Correctly rounded division, no flushed denormals, the instruction for e4m3.

    In NVFP4 alone a reciprocal and fused multiply-adds stand for a division; scales are not
    denormal, so that there is nothing to flush.
    """
    kernels = {name: item["instructions"] for name, item in found.items() if " D=" in name}
    encoders = {"mxfp8", "nvfp4", "nvfp4 any strides", "fp8 tensor", "fp8 channel"}
    for name, count in kernels.items():
        if name.split(" D=")[0] not in encoders | {"amax tensor", "amax channel"}:
            continue
        assert count["flush"] - count["reciprocal"] == count["approximate division"] == 0, name
        assert (count["fused"] > 0) == (count["reciprocal"] > 0) == name.startswith("nvfp4"), name
        assert (count["e4m3"] > 0) == (name.split(" D=")[0] in encoders), name
        assert (count["division"] > 0) == name.startswith(("nvfp4", "fp8")), name
        assert count["wide load"] > 0, name


def built_without_spills(process, capability):
    """Resources of every kernel of a script, by name."""
    output, complaint = process.communicate()
    assert process.returncode == 0, complaint
    found = json.loads(output)
    spilling = {name: item for name, item in found.items() if item["local"] or item["stack"]}
    assert not spilling
    assert max(item["shared"] for item in found.values()) <= SHARED_MEMORY[capability]
    return found


def test_the_kernel_over_codes_builds_without_spills_and_scales_where_the_unit_does(building):
    capability, processes = building
    found = built_without_spills(processes[CODES_SCRIPT], capability)
    count = {name: item["instructions"] for name, item in found.items()}
    for form in ("mxfp8", "nvfp4"):
        assert (count[f"{form} dense"]["scaled"] > 0) == (capability >= 100)
        assert (count[f"{form} sol"]["scaled"] > 0) == (capability == 120)
    for name in ("plain dense", "mxfp8 sol", "nvfp4 skip"):
        assert (count[name]["fp8 unit"] > 0) == (capability in (100, 103)), name
        assert count[name]["e4m3"] > 0, name
        assert (count[name]["tma"] > 0) == (capability >= 90), name
    assert count["plain P not rounded"]["e4m3"] == 0
