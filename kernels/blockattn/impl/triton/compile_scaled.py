"""Compiles the kernel over codes for a GPU that is not there; see ``compile_only``."""

from __future__ import annotations

from typing import Any

import triton.language as tl

from blockattn.impl.triton import scaled, scaled_attention
from blockattn.impl.triton.compile_only import Resources, _compile, _switches


def compile_scaled(
    capability: int,
    form: str,
    *,
    head_dim: int = 128,
    element: str = "bf16",
    round_p: bool = True,
    **flags: bool,
) -> Resources:
    """One variant of the kernel over codes; ``form``: ``plain`` (in ``element``), mxfp8, nvfp4."""
    config = scaled.configuration(
        divmod(capability, 10),
        plain=not any(flags.get(name) for name in ("ROUTED", "SKIP")),
        skip=flags.get("SKIP", False),
        coded=form != "plain",
        round_p=round_p,
    )
    element = {"mxfp8": "bf16", "nvfp4": "fp16"}.get(form, element)
    stored = {"mxfp8": "fp8e4nv", "nvfp4": "u8"}.get(form, element)
    descriptors = capability >= 90
    constants: dict[str, Any] = dict.fromkeys(_switches(scaled_attention.scaled_attention), False)
    constants |= flags
    constants |= {"ROWS": config.rows, "COLUMNS": config.columns, "D": head_dim, "FORMAT": form}
    constants |= {"WIDE": {"bf16": tl.bfloat16, "fp16": tl.float16}[element], "CONVERT": True}
    constants |= {"NATIVE": config.native_qk, "ROUND": round_p, "FP8": config.fp8}
    constants |= {"TMA": descriptors, "STAGES": config.stages}
    ahead = not config.native_qk and (not flags.get("ROUTED") or flags.get("SKIP", False))
    constants |= {"QUERY_FORMAT": "plain" if ahead else form}
    constants |= {"QUERY_TMA": descriptors and not ahead}
    rows = {"q_src": config.rows, "k_src": config.columns, "v_src": config.columns}
    kinds = {"q_src": element if ahead else stored, "k_src": stored, "v_src": "fp8e4nv"}

    def source(name: str) -> str:
        kind = kinds.get(name, element)
        width = head_dim // 2 if kind == "u8" else head_dim
        block = f"[1, {rows.get(name, 64)}, 1, {width}]"
        through = constants["QUERY_TMA"] if name == "q_src" else descriptors
        return f"tensordesc<{kind}{block}>" if through else f"*{kind}"

    kernel = scaled_attention.scaled_attention
    return _compile(kernel, capability, constants, config.warps, element, source)


def compile_summaries(capability: int, form: str, head_dim: int = 128) -> Resources:
    """The kernel that writes block summaries of codes."""
    wide, stored = {
        "plain": (tl.bfloat16, "bf16"),
        "mxfp8": (tl.bfloat16, "fp8e4nv"),
        "nvfp4": (tl.float16, "u8"),
    }[form]
    constants = {"L": 64, "D": head_dim, "FORMAT": form, "WIDE": wide}

    def source(name: str) -> str:
        return f"*{stored}" if name == "k_src" else "*fp8e4nv"

    element = "fp16" if form == "nvfp4" else "bf16"
    return _compile(scaled_attention.summaries, capability, constants, 4, element, source)
