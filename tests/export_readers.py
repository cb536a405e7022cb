"""Readers of the exported formats, written from their documentation; nothing of workbench in them.

Each returns what the server would compute: which steps and layers are dense, and with which knob.
An unknown field, a wrong type or a value outside the documented range is an error, as in the
servers' own strict models.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import yaml


@dataclass
class Served:
    """What a server computes: its algorithm, knobs, dense layers, and dense or not at a step."""

    algorithm: str
    knobs: dict[str, object] = field(default_factory=dict)
    dense_layers: frozenset[int] = frozenset()
    dense_at: Callable[[int, float], bool] = lambda step, time: False
    cross_is_dense: bool = True
    quant: tuple[str, int, int] | None = None


def take(data: object, **kinds: object) -> dict:
    """The fields of a strict model: every one of a documented kind, none besides."""
    assert isinstance(data, dict), data
    assert set(data) <= set(kinds), f"unknown fields {set(data) - set(kinds)}"
    for name, value in data.items():
        allowed = kinds[name] if isinstance(kinds[name], tuple) else (kinds[name],)
        assert type(value) in allowed, f"{name}={value!r} is none of {allowed}"
    return data


NONE = type(None)


def visual_gen(text: str) -> Served:
    """visualgen-sparse-attention.md: dense while time >= cutoff."""
    attention = take(
        yaml.safe_load(text)["attention_config"],
        backend=str,
        sparse_attention_config=(dict, NONE),
        quant_attention_config=dict,
    )
    assert attention["backend"] in ("CUTEDSL", "TRTLLM")
    sparse = dict(attention.get("sparse_attention_config") or {"algorithm": "none"})
    algorithm = sparse.pop("algorithm")
    if algorithm == "sol_attn":
        take(sparse, tau=float, thresh_type=str, disabled_until_timestep=(float, NONE),
             dense_layers=(list, NONE))  # fmt: skip
        assert sparse["thresh_type"] in ("diag", "exact")
        assert all(type(n) is int and n >= 0 for n in sparse["dense_layers"] or [])
    elif algorithm == "skip_softmax":
        number = (float, NONE)
        take(sparse, threshold_scale_factor=number, target_sparsity=number,
             disabled_until_timestep=number)  # fmt: skip
    elif algorithm == "vsa":
        take(sparse, vsa_sparsity=float)
    cutoff = sparse.pop("disabled_until_timestep", None)
    layers = frozenset(sparse.pop("dense_layers", None) or ())
    knobs = {name: value for name, value in sparse.items() if value is not None}
    dense_at = lambda step, time: cutoff is not None and time >= cutoff
    return Served(algorithm, knobs, layers, dense_at, quant=_visual_gen_quant(attention))


def _visual_gen_quant(attention: dict) -> tuple[str, int, int] | None:
    quant = attention.get("quant_attention_config")
    if quant is None:
        return None
    take(quant, qk_dtype=str, v_dtype=str, q_block_size=int, k_block_size=int, v_block_size=int)
    return quant["qk_dtype"], quant["q_block_size"], quant["k_block_size"]


def checkpoint(text: str) -> Served:
    """The checkpoint section of the same page: one group, formula and scalar coefficients."""
    section = take(json.loads(text), sparse_attention_config=dict)["sparse_attention_config"]
    (group,) = take(section, config_groups=dict)["config_groups"].values()
    take(group, algorithm=str, threshold_scale_factor=dict, target_sparsity=float,
         disabled_until_timestep=float, ignore=list)  # fmt: skip
    assert group["algorithm"] == "skip_softmax"
    take(group["threshold_scale_factor"], formula=str, coefficients=dict)
    names = {"exp": math.exp, "log": math.log, "target_sparsity": group["target_sparsity"]}
    names |= group["threshold_scale_factor"]["coefficients"]
    factor = eval(group["threshold_scale_factor"]["formula"], {"__builtins__": {}}, names)
    cutoff = group.get("disabled_until_timestep")
    knobs = {"threshold_scale_factor": factor, "ignore": group.get("ignore", [])}
    dense_at = lambda step, time: cutoff is not None and time >= cutoff
    return Served("skip_softmax", knobs, dense_at=dense_at)


def layer_ranges(text: str) -> frozenset[int]:
    """``0-2,5`` as SGLang and vLLM-Omni document it."""
    found = set()
    for item in filter(None, (part.strip() for part in text.split(","))):
        first, _, last = item.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return frozenset(found)


def _sol(data: dict) -> Served:
    take(data, tau=float, thresh_type=str, sink_tokens=int, sink_start=int, dense_steps=int,
         dense_layers=str, kv_splits=str)  # fmt: skip
    assert len(data) == 7, "a missing field would take a default of theirs"
    assert data["thresh_type"] in ("diag", "exact")
    assert data["sink_tokens"] == 0
    knobs = {"tau": data["tau"], "thresh_type": data["thresh_type"]}
    steps = data["dense_steps"]
    layers = layer_ranges(data["dense_layers"])
    return Served("sol_attn", knobs, layers, lambda step, time: step < steps)


def vllm_omni(text: str, keys: int = 1) -> Served:
    """attention_backends.md, skip_softmax.md and SolAttnSpec: sparse while time <= the gate."""
    data = take(json.loads(text), default=dict, per_role=dict)
    default = data["default"]
    cross = take(data["per_role"], cross=dict)["cross"]
    take(default, backend=str, sol_attn=dict, skip_softmax=dict, quant=dict)
    if default["backend"] == "SOL_ATTN":
        assert set(default) == {"backend", "sol_attn"}
        assert cross == {"backend": "TORCH_SDPA"}
        served = _sol(default["sol_attn"])
        assert served.knobs["tau"] >= 0
        return served
    assert default["backend"] == "TRTLLM_ATTN"
    assert cross == {"backend": "TRTLLM_ATTN"}
    quant = default.get("quant")
    if quant is not None:
        take(quant, dtype_qk=str, q_block_size=int, k_block_size=int)
        assert quant["dtype_qk"] in ("int8", "fp8_e4m3")
        assert {quant["q_block_size"], quant["k_block_size"]} <= {1, 4, 16}
        names = {"int8": "int8", "fp8_e4m3": "fp8"}
        quant = names[quant["dtype_qk"]], quant["q_block_size"], quant["k_block_size"]
    if "skip_softmax" not in default:
        return Served("none", quant=quant)
    skip = take(default["skip_softmax"], target_sparsity=float, threshold=float,
                disabled_until_timestep=float)  # fmt: skip
    assert len({"target_sparsity", "threshold"} & set(skip)) == 1
    gate = skip.get("disabled_until_timestep", 0.0)
    assert 0 <= gate <= 1
    knobs = {"target_sparsity": skip.get("target_sparsity")}
    if "threshold" in skip:
        assert skip["threshold"] >= 0
        knobs = {"threshold_scale_factor": skip["threshold"] * keys}
    dense_at = lambda step, time: gate > 0 and not time <= gate
    return Served("skip_softmax", knobs, dense_at=dense_at, quant=quant)


def sglang(text: str) -> Served:
    """attention_backends.mdx, pull requests 33702 and 37959."""
    data = take(json.loads(text), attention_backend=str, attention_backend_config=dict,
                skip_softmax_params=dict)  # fmt: skip
    if "skip_softmax_params" in data:
        assert len(data) == 1, "parameters of a request, beside no argument of the server"
        skip = take(data["skip_softmax_params"], threshold_scale_factor=float, start_step=int)
        assert skip["threshold_scale_factor"] > 0
        knobs = {"threshold_scale_factor": skip["threshold_scale_factor"]}
        start = skip["start_step"]
        return Served("skip_softmax", knobs, dense_at=lambda step, time: step < start)
    config = data["attention_backend_config"]
    if data["attention_backend"] == "video_sparse_attn":
        take(config, sparsity=float)
        assert 0 <= config["sparsity"] <= 1
        return Served("vsa", {"vsa_sparsity": config["sparsity"]})
    assert data["attention_backend"] == "sol_attn"
    return _sol(config)


def comfy_blocks(text: str, count: int) -> set[int]:
    """Blocks of the node: numbers, ranges, negative from the end, clipped to the model."""
    found: set[int] = set()
    for item in filter(None, text.replace(" ", "").split(",")):
        first, last = re.fullmatch(r"(-?\d+)(?:-(-?\d+))?", item).groups()  # pyright: ignore
        ends = [int(end) + count * (int(end) < 0) for end in (first, last or first)]
        found |= set(range(max(min(ends), 0), min(max(ends), count - 1) + 1))
    return found


def comfy_profile(text: str, count: int) -> dict[int, float]:
    """The tau of every block that a profile names; the later entry wins."""
    taus: dict[int, float] = {}
    for line in text.replace(";", "\n").splitlines():
        line = line.split("#")[0].strip()
        if line:
            blocks, tau = line.split("=")
            taus.update(dict.fromkeys(comfy_blocks(blocks, count), float(tau)))
    return taus


def comfyui(text: str, count: int) -> list[float | None]:
    """The tau of every block of a model, ``None`` for a dense one, and no other change."""
    node = take(json.loads(text), class_type=str, inputs=dict)
    assert node["class_type"] == "SolAttnPatch"
    inputs = take(node["inputs"], tau=float, tau_profile=str, dense_blocks=str,
                  start_percent=float, end_percent=float, min_tokens=int, int8_qk=bool,
                  int8_pv=bool, sink_conditioning=str, morton=bool)  # fmt: skip
    assert len(inputs) == 10, "a missing input would take a default of the node"
    assert 0 <= inputs["tau"] <= 4
    assert (inputs["start_percent"], inputs["end_percent"], inputs["min_tokens"]) == (0, 1, 0)
    assert not any(inputs[name] for name in ("int8_qk", "int8_pv", "morton"))
    assert inputs["sink_conditioning"] == "off"
    dense = comfy_blocks(inputs["dense_blocks"], count)
    taus = comfy_profile(inputs["tau_profile"], count)
    return [None if n in dense else taus.get(n, inputs["tau"]) for n in range(count)]
