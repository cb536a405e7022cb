"""SGLang diffusion: server arguments, or for SkipSoftmax the parameters of a request, as JSON.

    {"attention_backend": "sol_attn", "attention_backend_config": {"tau": 1.0, ...}}
    {"attention_backend": "video_sparse_attn", "attention_backend_config": {"sparsity": 0.9}}
    {"skip_softmax_params": {"threshold_scale_factor": 2940.8, "start_step": 14}}

Follows sgl-project/sglang: docs_new/docs/sglang-diffusion/attention_backends.mdx (0161514:
``--attention-backend-config`` takes a file, JSON or pairs), pull requests 33702 (``sol_attn``) and
37959 (``skip_softmax_params``). A dense phase is a number of steps there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.config import SkipSoftmaxConfig, SolAttnConfig, SparseConfig, VisualGenConfig
from workbench.export.deployment import Deployment
from workbench.export.documents import (
    check_fields,
    configuration,
    mapping,
    read_json,
    sparse_of,
    steps_of,
    write_json,
)
from workbench.export.outcome import Exported, Imported, NotExpressible
from workbench.export.sol_fields import read_sol, write_sol

NAME = "sglang"
BACKEND, CONFIG, REQUEST = "attention_backend", "attention_backend_config", "skip_softmax_params"
SOL, VSA = "sol_attn", "video_sparse_attn"
SERVER = "pass both to the server: --attention-backend and --attention-backend-config"
PER_REQUEST = "skip_softmax_params belongs to each image or video request, not to the server"


def write(config: VisualGenConfig, place: Deployment) -> Exported:
    """One JSON object with the names of the arguments.

    Raises:
        NotExpressible: quantisation, a target sparsity, or a dense phase without its times.
    """
    sparse, notes = sparse_of(config, NAME)
    data = _arguments(sparse, place)
    notes += place.notes(sparse.resolve_disabled_until_timestep())
    notes.append(PER_REQUEST if REQUEST in data else SERVER)
    return Exported(write_json(data), tuple(notes))


def read(text: str, place: Deployment) -> Imported:
    """The configuration of such an object.

    Raises:
        ValueError: not the format; :class:`NotExpressible`: settings that have no place here.
    """
    data = read_json(text, NAME)
    if REQUEST in data:
        check_fields(data, (REQUEST,), NAME, "")
        return Imported(configuration(NAME, _read_skip(data[REQUEST], place)))
    check_fields(data, (BACKEND, CONFIG), NAME, "")
    fields = mapping(data.get(CONFIG, {}), NAME, CONFIG)
    if data.get(BACKEND) == SOL:
        return Imported(configuration(NAME, read_sol(fields, place, NAME, f"{CONFIG}.")))
    if data.get(BACKEND) == VSA:
        check_fields(fields, ("sparsity",), NAME, f"{CONFIG}.")
        share = fields.get("sparsity", 0.0)  # their default, which drops nothing
        return Imported(configuration(NAME, {"algorithm": "vsa", "vsa_sparsity": share}))
    why = f"read are {SOL} and {VSA}"
    raise NotExpressible(NAME, f"{BACKEND}={data.get(BACKEND)!r}", why, "Name one of them")


def _arguments(sparse: SparseConfig, place: Deployment) -> dict[str, Any]:
    if isinstance(sparse, SolAttnConfig):
        return {BACKEND: SOL, CONFIG: write_sol(sparse, place, NAME)}
    if isinstance(sparse, SkipSoftmaxConfig):
        return {REQUEST: _skip(sparse, place)}
    return {BACKEND: VSA, CONFIG: {"sparsity": sparse.vsa_sparsity}}


def _skip(sparse: SkipSoftmaxConfig, place: Deployment) -> dict[str, Any]:
    factor, target = sparse.threshold_scale_factor, sparse.target_sparsity
    if target is not None or factor is None:
        why = "a request takes a factor, and no checkpoint's formula is read"
        fix = "Set threshold_scale_factor alone (what the formula gives at the target)"
        raise NotExpressible(NAME, f"target_sparsity={target!r}", why, fix)
    if factor == 0:
        why = "0 asks for nothing"
        raise NotExpressible(NAME, "threshold_scale_factor=0", why, "Dense needs no file")
    if sparse.disabled_until_timestep == 0:
        why = "every step would be dense"
        raise NotExpressible(NAME, "disabled_until_timestep=0", why, "Leave it out")
    steps = place.dense_steps(sparse.disabled_until_timestep, NAME)
    return {"threshold_scale_factor": factor, "start_step": steps}


def _read_skip(given: object, place: Deployment) -> Mapping[str, Any]:
    data = mapping(given, NAME, REQUEST)
    check_fields(data, ("threshold_scale_factor", "start_step"), NAME, f"{REQUEST}.")
    for name in ("threshold_scale_factor", "start_step"):
        if name not in data:
            raise ValueError(f"{NAME}: {REQUEST}.{name} is missing; give it")
    steps = steps_of(data["start_step"], NAME, f"{REQUEST}.start_step")
    return {
        "algorithm": "skip_softmax",
        "threshold_scale_factor": data["threshold_scale_factor"],
        "disabled_until_timestep": place.cutoff(steps, NAME),
    }
