"""vLLM-Omni: the JSON of ``--diffusion-attention-config``.

    {"default": {"backend": "TRTLLM_ATTN", "skip_softmax": {"target_sparsity": 0.65}},
     "per_role": {"cross": {"backend": "TRTLLM_ATTN"}}}

Follows vllm-project/vllm-omni: docs/user_guide/diffusion/attention_backends.md (1f094c4) and
docs/design/feature/skip_softmax.md (6447c0d) for ``skip_softmax`` and ``quant``; pull request 5851
(90beeee, ``SolAttnSpec``) for ``sol_attn``, which other revisions read from the environment.

Two words differ. ``threshold`` is lambda itself, so a factor needs the number of keys. A step is
sparse at or below ``disabled_until_timestep`` (here: below it), so the next smaller float64 is
written, which parts the same steps. Cross-attention, dense here, has its own dense entry.
"""

from __future__ import annotations

import math
from typing import Any

from workbench.config import (
    QuantAttentionConfig,
    SkipSoftmaxConfig,
    SolAttnConfig,
    SparseConfig,
    VisualGenConfig,
)
from workbench.export.deployment import Deployment
from workbench.export.documents import (
    attention_of,
    check_fields,
    configuration,
    mapping,
    number_of,
    read_json,
    refuse_target_0,
    write_json,
)
from workbench.export.outcome import Exported, Imported, NotExpressible
from workbench.export.sol_fields import read_sol, write_sol

NAME = "vllm_omni"
SOL, TRTLLM = "SOL_ATTN", "TRTLLM_ATTN"
DENSE = {SOL: "TORCH_SDPA", TRTLLM: TRTLLM}  # without a block of its own TRTLLM_ATTN is dense
QK_DTYPES = {"int8": "int8", "fp8": "fp8_e4m3"}
_SPEC = ("backend", "sol_attn", "skip_softmax", "quant")
_SKIP = ("target_sparsity", "threshold", "disabled_until_timestep")
_QUANT = ("dtype_qk", "q_block_size", "k_block_size")
_CHECKPOINT = "defaults of the checkpoint (target_sparsity, disabled_until_timestep) do not act"


def write(config: VisualGenConfig, place: Deployment) -> Exported:
    """One JSON object for the flag.

    Raises:
        NotExpressible: VSA, a block-scaled recipe, a negative tau, or a number that the deployment
            would have to tell and does not.
    """
    attention, notes = attention_of(config, NAME)
    spec = _sparse(attention.sparse_attention_config, place)
    if attention.quant_attention_config is not None:
        spec["quant"] = _quant(attention.quant_attention_config)
    if "skip_softmax" in spec:
        notes.append(_CHECKPOINT)
    if isinstance(attention.sparse_attention_config, SolAttnConfig):
        notes += place.notes(attention.sparse_attention_config.disabled_until_timestep)
    data = {"default": spec, "per_role": {"cross": {"backend": DENSE[spec["backend"]]}}}
    notes.append("pass it as --diffusion-attention-config")
    return Exported(write_json(data), tuple(notes))


def read(text: str, place: Deployment) -> Imported:
    """The configuration of such an object.

    Raises:
        ValueError: not the format; :class:`NotExpressible`: settings that have no place here.
    """
    data = read_json(text, NAME)
    check_fields(data, ("default", "per_role"), NAME, "")
    crossed = _dense_cross(mapping(data.get("per_role", {}), NAME, "per_role"))
    spec = mapping(data.get("default"), NAME, "default")
    check_fields(spec, _SPEC, NAME, "default.")
    backend = str(spec.get("backend", "")).upper()
    parts = {SOL: ("backend", "sol_attn"), TRTLLM: ("backend", "skip_softmax", "quant")}
    if backend not in parts:
        why = f"read are {' and '.join(parts)}"
        raise NotExpressible(NAME, f"default.backend={spec.get('backend')!r}", why, "Name one")
    check_fields(spec, parts[backend], NAME, "default.")
    if backend == SOL:
        sol = mapping(spec.get("sol_attn", {}), NAME, "default.sol_attn")
        return Imported(configuration(NAME, read_sol(sol, place, NAME, "default.sol_attn.")))
    skip, quant = _read_skip(spec, place, crossed), _read_quant(spec)
    if skip is None and quant is None:
        raise NotExpressible(NAME, "default", "it is dense", "Dense attention needs no file")
    return Imported(configuration(NAME, skip, quant))


def _sparse(sparse: SparseConfig | None, place: Deployment) -> dict[str, Any]:
    if sparse is None:
        return {"backend": TRTLLM}
    if isinstance(sparse, SkipSoftmaxConfig):
        return {"backend": TRTLLM, "skip_softmax": _skip(sparse, place)}
    if not isinstance(sparse, SolAttnConfig):
        why = "FASTVIDEO_VSA counts kept blocks (fastvideo_vsa_topk) of its own shape per model"
        fix = "Set fastvideo_vsa_topk there, from the number of blocks that it logs"
        raise NotExpressible(NAME, f"algorithm={sparse.algorithm!r}", why, fix)
    if sparse.tau < 0:
        raise NotExpressible(NAME, f"tau={sparse.tau!r}", "tau must be at least 0", "Raise it")
    return {"backend": SOL, "sol_attn": write_sol(sparse, place, NAME)}


def _skip(sparse: SkipSoftmaxConfig, place: Deployment) -> dict[str, float]:
    factor, target = sparse.threshold_scale_factor, sparse.target_sparsity
    if factor is not None and target is not None:
        why = "the factor and a target exclude each other, and here the factor wins"
        raise NotExpressible(NAME, f"target_sparsity={target!r}", why, "Remove it")
    fields = {} if factor is None else {"threshold": _threshold(factor, place)}
    if factor is None:
        fields["target_sparsity"] = _target(target)
    if sparse.disabled_until_timestep is not None:
        fields["disabled_until_timestep"] = _gate(sparse.disabled_until_timestep)
    return fields


def _threshold(factor: float, place: Deployment) -> float:
    field = f"threshold_scale_factor={factor!r}"
    if place.keys is None:
        why = "it takes lambda = factor / keys, which depends on the length"
        fix = "Give the number of keys of a call (--keys)"
        raise NotExpressible(NAME, field, why, fix)
    threshold = factor / place.keys
    if factor and not threshold:
        why = f"divided by {place.keys} keys it is 0 in float64, which switches skipping off"
        raise NotExpressible(NAME, field, why, "Write 0, or a larger factor")
    return threshold


def _target(target: float | None) -> float:
    if target is None:
        why = "the checkpoint's own target does not act there"
        raise NotExpressible(NAME, "target_sparsity=None", why, "Set it or the factor")
    refuse_target_0(target, NAME, "Set threshold_scale_factor: 0")
    return target


def _gate(cutoff: float) -> float:
    gate = math.nextafter(cutoff, 0.0)
    if gate <= 0:
        why = "0 switches the dense phase off there; here every step would be dense"
        raise NotExpressible(NAME, f"disabled_until_timestep={cutoff!r}", why, "Leave it out")
    return gate


def _quant(quant: QuantAttentionConfig) -> dict[str, Any]:
    if "TRTLLM" not in quant.backends:
        why = "it quantises in the SageAttention style only (int8 or fp8, a scale per tokens)"
        raise NotExpressible(NAME, f"qk_dtype={quant.qk_dtype!r}", why, "Use int8 or fp8")
    blocks = {"q_block_size": quant.q_block_size, "k_block_size": quant.k_block_size}
    return {"dtype_qk": QK_DTYPES[quant.qk_dtype], **blocks}


def _dense_cross(roles: dict[str, Any]) -> bool:
    """Whether cross-attention has its own dense entry; any other role or backend is refused."""
    check_fields(roles, ("cross",), NAME, "per_role.")
    entry = roles.get("cross")
    if entry is None:
        return False
    if isinstance(entry, dict):
        check_fields(entry, ("backend",), NAME, "per_role.cross.")
        entry = entry.get("backend")
    if not isinstance(entry, str) or entry.upper() not in DENSE.values():
        why = "cross-attention is dense here"
        fix = f"Name one of {', '.join(DENSE.values())}, or drop the entry"
        raise NotExpressible(NAME, f"per_role.cross={entry!r}", why, fix)
    return True


def _read_skip(spec: dict[str, Any], place: Deployment, crossed: bool) -> dict[str, Any] | None:
    if spec.get("skip_softmax") is None:
        return None
    data = mapping(spec["skip_softmax"], NAME, "default.skip_softmax")
    check_fields(data, _SKIP, NAME, "default.skip_softmax.")
    found: dict[str, Any] = {"algorithm": "skip_softmax"}
    given = [name for name in _SKIP[:2] if data.get(name) is not None]
    if len(given) != 1:
        raise ValueError(f"{NAME}: default.skip_softmax: give one of {', '.join(_SKIP[:2])}")
    if given == ["threshold"]:
        found["threshold_scale_factor"] = _factor(data["threshold"], place, crossed)
    else:
        target = number_of(data["target_sparsity"], NAME, "default.skip_softmax.target_sparsity")
        found["target_sparsity"] = _target(target)
    found["disabled_until_timestep"] = _cutoff(data.get("disabled_until_timestep"))
    return found


def _cutoff(gate: Any) -> float | None:
    """0 is their word for no dense phase, and at 1 no step lies above it."""
    if gate is None:
        return None
    value = number_of(gate, NAME, "default.skip_softmax.disabled_until_timestep")
    return None if value in (0, 1) else math.nextafter(value, 2.0)


def _factor(threshold: Any, place: Deployment, crossed: bool) -> float:
    value = number_of(threshold, NAME, "default.skip_softmax.threshold")
    field = f"default.skip_softmax.threshold={threshold!r}"
    if not crossed:
        why = "without an entry of its own cross-attention skips too, and here it never does"
        fix = f'Add "per_role": {{"cross": {{"backend": "{TRTLLM}"}}}}'
        raise NotExpressible(NAME, field, why, fix)
    if place.keys is None:
        why = "a configuration holds lambda * keys, which depends on the length"
        raise NotExpressible(NAME, field, why, "Give the number of keys of a call (--keys)")
    return value * place.keys


def _read_quant(spec: dict[str, Any]) -> dict[str, Any] | None:
    if spec.get("quant") is None:
        return None
    data = mapping(spec["quant"], NAME, "default.quant")
    check_fields(data, _QUANT, NAME, "default.quant.")
    ours = {theirs: name for name, theirs in QK_DTYPES.items()}
    dtype = data.get("dtype_qk")
    if not isinstance(dtype, str) or dtype not in ours:
        field = f"default.quant.dtype_qk={dtype!r}"
        raise NotExpressible(NAME, field, f"read are {', '.join(ours)}", "Name one of them")
    return {
        "qk_dtype": ours[dtype],
        "q_block_size": data.get("q_block_size", 1),  # their defaults
        "k_block_size": data.get("k_block_size", 16),
        "v_block_size": 1,
    }
