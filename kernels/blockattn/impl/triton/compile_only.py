"""Compiles the kernels for a GPU that is not there and reads what the binary needs.

No driver is used: Triton's compiler and the disassembler in its wheel are enough. It says that a
kernel builds, how many registers and bytes of shared memory it takes, and whether anything spills;
it says nothing about the numbers that the kernel computes.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from blockattn.impl.triton import (
    attention,
    launch,
    lists,
    nvfp4,
    prepare,
    quantise,
    select,
    vote_groups,
    words,
)
from blockattn.layout import num_blocks
from blockattn.scale_layout import SCALE_COLUMNS

INTEGERS_64 = re.compile(r"stride|lines")
FLOATS = {"scale", "scale_output", "limit", "tau", "unit", "floor"}
FLOAT_POINTERS = {
    "lse_ptr", "partial_ptr", "partial_lse_ptr", "scale_ptr", "scale_output_ptr",
    "q_mean_ptr", "center_ptr", "deviation_ptr", "z_ptr", "mean_ptr", "std_ptr",
    "q_mean", "factor_ptr",
}  # fmt: skip
ELEMENT_POINTERS = {"out_ptr", "q", "k", "v", "k_mean", "v_sum", "x_ptr"}
OTHER_POINTERS = {
    "drop_ptr": "*i8", "map_ptr": "*i8", "codes_ptr": "*u8",
    "upper_ptr": "*fp16", "lower_ptr": "*fp16",
}  # fmt: skip


@dataclass(frozen=True)
class Resources:
    """What one binary needs.

    Attributes:
        registers: per thread.
        local, stack: bytes per thread in memory, where registers spill to.
        shared: bytes per program.
        instructions: how often each kind occurs in the PTX; ``matrix wait`` in the machine code, as
            ptxas adds waits where it cannot keep products in flight. ``arrival``: of a thread at an
            mbarrier; ``of all`` where threads have met right before.
    """

    registers: int
    local: int
    stack: int
    shared: int
    instructions: dict[str, int]


def compile_attention(
    capability: int,
    *,
    head_dim: int = 128,
    element: str = "bf16",
    skip_tile: tuple[int, int] = (64, 64),
    **flags: bool,
) -> Resources:
    """One variant of the attention kernel; ``flags`` are its upper-case switches, default off."""
    plain = not any(flags.get(name) for name in ("ROUTED", "SKIP", "LENGTHS"))
    config = launch.configuration(
        divmod(capability, 10),
        plain=plain,
        causal=flags.get("CAUSAL", False),
        skip_tile=skip_tile if flags.get("SKIP") else None,
    )
    descriptors = capability >= 90
    query = descriptors and launch.query_through_descriptor(
        divmod(capability, 10),
        skip=flags.get("SKIP", False),
        plain=plain and not flags.get("CAUSAL", False),
    )
    constants = dict.fromkeys(_switches(attention.attention), False) | flags
    constants |= {"ROWS": config.rows, "COLUMNS": config.columns, "D": head_dim}
    constants |= {"TMA": descriptors, "QUERY_TMA": query, "STAGES": config.stages}
    constants["ADAPTIVE"] = config.adaptive
    constants["VOTERS"] = config.warps if config.adaptive else 0
    tiles = {"q_src": config.rows, "k_src": config.columns, "v_src": config.columns}

    def source(name: str) -> str:
        block = f"[1, {tiles.get(name, 64)}, 1, {head_dim}]"
        through = query if name == "q_src" else descriptors
        return f"tensordesc<{element}{block}>" if through else f"*{element}"

    return _compile(attention.attention, capability, constants, config.warps, element, source)


def compile_vote_groups(
    element: str = "bf16", skip_tile: tuple[int, int] = (64, 64), **flags: bool
) -> Resources:
    """The vote by groups, which is for 9.0 alone; ``flags`` as for :func:`compile_attention`."""
    config = launch.GROUPED[skip_tile]
    constants = dict.fromkeys(_switches(vote_groups.vote_groups), False) | flags
    constants |= {"D": 128, "GROUPS": config.groups, "STAGES": config.stages}

    def source(name: str) -> str:
        rows = launch.GROUP_ROWS if name == "q_src" else config.columns
        return f"tensordesc<{element}[1, {rows}, 1, 128],{vote_groups.LAYOUT!r}>"

    return _compile(vote_groups.vote_groups, 90, constants, config.warps, element, source)


def compile_combine(capability: int, head_dim: int = 128, element: str = "bf16") -> Resources:
    """The kernel that merges the shares of a split call."""
    constants = {"ROWS": 64, "D": head_dim, "LSE": True, "SCALE_OUTPUT_PTR": False}
    return _compile(attention.combine, capability, constants, 4, element)


def compile_preparation(
    capability: int, head_dim: int = 128, element: str = "bf16", exact: bool = False
) -> dict[str, Resources]:
    """Summaries with centred keys, routing, lists and words of a map, by kernel."""
    made = {}
    constants: dict[str, Any] = {"L": 64, "D": head_dim, "EARLY": capability >= 90}
    slices = {"CHANNELS": prepare.CHANNELS, "ROWS": prepare.CENTER_ROWS}
    strides = {f"{name}_stride_d": 1 for name in "qv"}
    variants: dict[str, tuple[Any, dict[str, Any], int]] = {
        "mean keys": (prepare._mean_keys, constants | {"stride_d": 1}, prepare.SUMMARY_WARPS),
        "summarise": (prepare._summarise, constants | slices | strides, prepare.SUMMARY_WARPS),
    }
    shape = {"D": head_dim, "ROWS": select.ROWS, "COLUMNS": select.COLUMNS}
    shape |= {"STAGES": select.STAGES.get(capability // 10, 2)}
    for given, scores in ((False, False), (True, False), (True, True)):
        flags = {"GIVEN": given, "SCORES": scores, "BAND": 1, "SPAN": select.SPAN}
        flags["EARLY"] = capability >= 90
        flags["COLUMNS"] = select.COLUMNS // 2 if scores else select.COLUMNS
        warps = select.MORE_WARPS if scores else select.WARPS
        name = f"select given={given} scores={scores}"
        variants[name] = select._select, shape | flags, warps
    variants["statistics"] = select._statistics, shape | {"EXACT": exact}, select.MORE_WARPS
    for pairs in (False, True):
        flags = {"PAIRS": pairs, "ROWS": lists.ELEMENTS // 16, "WIDTH": 16}
        variants[f"lists pairs={pairs}"] = lists._lists, flags, lists.WARPS
    variants["words"] = words._words, {"WORDS": words.WORDS}, words.WARPS
    for name, (kernel, flags, warps) in variants.items():
        made[name] = _compile(kernel, capability, flags, warps, element)
    return made


def compile_quantisers(
    capability: int, head_dim: int = 128, element: str = "bf16"
) -> dict[str, Resources]:
    """The encoders of MXFP8, NVFP4 and FP8 V for contiguous channels, by kernel."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[element]
    wide = quantise.width(head_dim, 1)
    given = {
        "DIM": head_dim,
        "ROWS": quantise.ROWS,
        "STEPS": quantise.STEPS,
        "CONVERT": capability >= 89,
        "CONVERT_E2M1": capability >= 100,
        "FUSED": True,
        "LARGEST": quantise.largest_number(dtype),
        "stride_d": 1,
    }
    variants: dict[str, tuple[Any, dict[str, int], dict[str, Any]]] = {
        "mxfp8": (quantise._mxfp8, _scale_shape(head_dim, 32), quantise.SCALED_OPTIONS),
        "nvfp4 any strides": (
            nvfp4._nvfp4,
            _scale_shape(head_dim, 16),
            quantise.SCALED_OPTIONS,
        ),
        "nvfp4": (
            nvfp4._nvfp4,
            _scale_shape(head_dim, 16) | {"ROWS": quantise.NVFP4_ROWS},
            quantise.NVFP4_OPTIONS,
        ),
    }
    for channels, scale in ((False, "tensor"), (True, "channel")):
        shape = {"CHANNELS": channels, "WIDTH": wide}
        variants[f"amax {scale}"] = quantise._amax, shape, quantise.AMAX_OPTIONS
        variants[f"fp8 {scale}"] = quantise._fp8_values, shape, quantise.OPTIONS
    made = {}
    for name, (kernel, shape, options) in variants.items():
        wanted = inspect.signature(kernel.fn).parameters
        constants = {key: value for key, value in (given | shape).items() if key in wanted}
        made[name] = _compile(kernel, capability, constants, 4, element, options=options)
    return made


def _scale_shape(head_dim: int, block: int) -> dict[str, int]:
    columns = num_blocks(head_dim // block, SCALE_COLUMNS)
    return {"WIDTH": quantise.width(head_dim, block), "COLUMNS": columns}


def _switches(kernel: Any) -> list[str]:
    return [name for name in inspect.signature(kernel.fn).parameters if name.isupper()]


def _compile(
    kernel: Any,
    capability: int,
    constants: dict,
    warps: int,
    element: str,
    source: Any = None,
    options: dict | None = None,
) -> Resources:
    names = list(inspect.signature(kernel.fn).parameters)
    kinds = {name: _kind(name, element, source) for name in names}
    kinds |= dict.fromkeys(constants, "constexpr")
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if kinds[name].startswith("*") or (kinds[name] == "i64" and "stride" in name)
    }
    language = GluonASTSource if kernel.is_gluon() else ASTSource
    built = triton.compile(
        language(kernel, signature=kinds, constexprs=constants, attrs=aligned),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": warps} | (options or {}),
    )
    return _resources(built)


def _kind(name: str, element: str, source: Any) -> str:
    """Triton's type of an argument, from its name."""
    if name.endswith("_src"):
        return source(name)
    if name in ELEMENT_POINTERS:
        return f"*{element}"
    if name in FLOAT_POINTERS:
        return "*fp32"
    if name in FLOATS:
        return "fp32"
    if name in OTHER_POINTERS:
        return OTHER_POINTERS[name]
    if name.endswith("_ptr"):
        return "*i32"
    return "i64" if INTEGERS_64.search(name) else "i32"


def _resources(built: Any) -> Resources:
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        command = [str(tools / "cuobjdump"), "--dump-resource-usage", "--dump-sass", file.name]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    numbers = {key: int(value) for key, value in re.findall(r"(REG|LOCAL|STACK):(\d+)", usage)}
    ptx = built.asm["ptx"]
    kinds = {"wgmma": "wgmma.mma", "tcgen05": "tcgen05.mma", "tma": "cp.async.bulk.tensor"}
    kinds |= {"scaled": "block_scale", "fp8 unit": "kind::f8f6f4"}
    kinds |= {"e4m3": "cvt.rn.satfinite.e4m3x2.f32", "e2m1": "cvt.rn.satfinite.e2m1x2.f32"}
    kinds |= {"division": "div.rn.f32", "flush": ".ftz", "reciprocal": "rcp.approx.ftz"}
    kinds |= {"vote": "barrier.cta.arrive", "vote of all": "bar.red.or"}
    kinds |= {"approximate division": "div.full", "fused": "fma.rn", "wide load": "ld.global.v4"}
    counts = {name: ptx.count(text) for name, text in (kinds | {"mma": " mma.sync"}).items()}
    counts["matrix wait"] = usage.count("WARPGROUP.DEPBAR")
    arrival = r"\n.*mbarrier\.arrive\.shared"
    counts["arrival"] = len(re.findall(arrival, ptx))
    counts["arrival of all"] = len(re.findall(r"\tbar\.sync .*\n\t// begin.*" + arrival, ptx))
    return Resources(
        numbers["REG"], numbers["LOCAL"], numbers["STACK"], built.metadata.shared, counts
    )
