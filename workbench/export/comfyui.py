"""ComfyUI: the inputs of the node SolAttnPatch, its ``tau_profile`` among them, as JSON.

    {"class_type": "SolAttnPatch",
     "inputs": {"tau": 1.5, "tau_profile": "0--1=1.5", "dense_blocks": "0-1", ...}}

Follows the node's schema in kijai/ComfyUI-SolAttn_triton and ComfyUI's own format of a workflow
for its API (``class_type``, ``inputs``); the model and the switches that change no number are left
to the workflow. The node quantises, reorders and keeps a sink unless told otherwise, so every input
that changes the result is written.
"""

from __future__ import annotations

import re
from typing import Any

from workbench.config import SolAttnConfig, VisualGenConfig
from workbench.config.fields import MAX_LAYER
from workbench.export.deployment import Deployment
from workbench.export.documents import (
    check_fields,
    configuration,
    layers_text,
    mapping,
    number_of,
    read_json,
    same,
    sparse_of,
    write_json,
)
from workbench.export.outcome import Exported, Imported, NotExpressible
from workbench.export.tau_profile import EVERY_BLOCK, read_blocks, read_profile

NAME = "comfyui"
CLASS = "SolAttnPatch"
TAU_LIMITS = (0.0, 4.0)  # of the node's slider; a profile has none
# Inputs that a configuration here fixes; the node's defaults are others.
FIXED: dict[str, Any] = {
    "start_percent": 0.0,
    "end_percent": 1.0,
    "min_tokens": 0,
    "int8_qk": False,
    "int8_pv": False,
    "sink_conditioning": "off",
    "morton": False,
}
_FROM_THE_END = re.compile(r"(^|[,-])\s*-")
_EVERY_BLOCK = re.compile(rf"{EVERY_BLOCK}=[^;=\n]+")
_FREE = ("tau", "tau_profile", "dense_blocks")
_NEUTRAL = ("model", "verbose", "use_tma", "morton_curve")  # change no number, given the rest


def write(config: VisualGenConfig, place: Deployment) -> Exported:
    """The node; its profile names every block, so that the slider's limits do not bind tau.

    Raises:
        NotExpressible: anything but Sol-Attn, ``exact``, or a dense phase.
    """
    sparse, notes = sparse_of(config, NAME)
    if not isinstance(sparse, SolAttnConfig):
        why = "the node computes Sol-Attn only"
        raise NotExpressible(NAME, f"algorithm={sparse.algorithm!r}", why, "Use sol_attn")
    _check(sparse, place)
    inputs = {
        "tau": min(max(sparse.tau, TAU_LIMITS[0]), TAU_LIMITS[1]),
        "tau_profile": f"{EVERY_BLOCK}={sparse.tau!r}",
        "dense_blocks": layers_text(sparse.dense_layers or ()),
        **FIXED,
    }
    notes.append("connect model; tau_profile takes a text node, as it is an input socket")
    return Exported(write_json({"class_type": CLASS, "inputs": inputs}), tuple(notes))


def read(text: str, place: Deployment) -> Imported:
    """The configuration of one node.

    Raises:
        ValueError: no such node; :class:`NotExpressible`: inputs that compute something else, or
            a tau for each block.
    """
    inputs = _inputs(text)
    return Imported(_configuration(inputs, _tau(inputs, place), place))


def read_taus(text: str, place: Deployment) -> tuple[VisualGenConfig, tuple[float, ...]]:
    """The configuration, and the tau of every block, which a node may give one by one.

    Args:
        place: has the number of layers.

    Raises:
        ValueError: as of :func:`read`, which refuses several taus.
    """
    inputs = _inputs(text)
    if place.layers is None:
        raise ValueError(f"{NAME}: layers=None: give the number of blocks of the model")
    taus = read_profile(_text(inputs, "tau_profile"), place.layers)
    if len(taus) < place.layers:
        own = number_of(inputs.get("tau"), NAME, "inputs.tau")
        taus = dict.fromkeys(range(place.layers), own) | taus
    each = tuple(taus[block] for block in range(place.layers))
    return _configuration(inputs, each[0], place), each


def _inputs(text: str) -> dict[str, Any]:
    """The checked inputs of one node."""
    data = read_json(text, NAME)
    check_fields(data, ("class_type", "inputs", "_meta"), NAME, "")
    if data.get("class_type") != CLASS:
        raise ValueError(f"{NAME}: class_type={data.get('class_type')!r}: expected {CLASS!r}")
    inputs = mapping(data.get("inputs"), NAME, "inputs")
    check_fields(inputs, (*_FREE, *FIXED, *_NEUTRAL), NAME, "inputs.")
    _check_fixed(inputs)
    if "tau" in inputs:  # also where a profile names every block, and it does nothing
        number_of(inputs["tau"], NAME, "inputs.tau")
    return inputs


def _configuration(inputs: dict[str, Any], tau: float, place: Deployment) -> VisualGenConfig:
    dense = _text(inputs, "dense_blocks")
    sparse = {
        "algorithm": "sol_attn",
        "tau": tau,
        "dense_layers": read_blocks(dense, _layers(dense, place), "dense_blocks") or None,
    }
    return configuration(NAME, sparse)


def _check(sparse: SolAttnConfig, place: Deployment) -> None:
    if sparse.thresh_type != "diag":
        why = "the node has no such input and computes diag"
        raise NotExpressible(NAME, f"thresh_type={sparse.thresh_type!r}", why, "Use diag")
    if sparse.disabled_until_timestep is not None:
        field = f"disabled_until_timestep={sparse.disabled_until_timestep!r}"
        why = "start_percent is a share of the model's own schedule, which its shift bends"
        raise NotExpressible(NAME, field, why, "Leave it out and set start_percent on the node")
    outside = [n for n in sparse.dense_layers or () if place.layers and n >= place.layers]
    if outside:
        why = f"the model has {place.layers} blocks, and the node drops others in silence"
        raise NotExpressible(NAME, f"dense_layers={outside}", why, "Name its own blocks")


def _check_fixed(inputs: dict[str, Any]) -> None:
    for name, value in FIXED.items():
        if name not in inputs:
            why = "the node's default computes something else"
            raise NotExpressible(NAME, f"inputs.{name} is missing", why, f"Set {value!r}")
        if not same(inputs[name], value):
            why = "a configuration here has no field for it"
            raise NotExpressible(NAME, f"inputs.{name}={inputs[name]!r}", why, f"Set {value!r}")


def _tau(inputs: dict[str, Any], place: Deployment) -> float:
    """The one tau that profile and slider give all blocks."""
    profile = _text(inputs, "tau_profile")
    if not profile.strip():
        return number_of(inputs.get("tau"), NAME, "inputs.tau")
    layers = 1 if _EVERY_BLOCK.fullmatch(profile) else place.layers
    field = f"inputs.tau_profile={profile!r}"
    if layers is None:
        why = "which blocks it leaves to tau depends on how many there are"
        raise NotExpressible(NAME, field, why, "Give them (--layers)")
    taus = read_profile(profile, layers)
    levels = set(taus.values())
    if len(taus) < layers:
        levels.add(number_of(inputs.get("tau"), NAME, "inputs.tau"))
    if len(levels) > 1:
        why = "a configuration here has one tau for all blocks"
        raise NotExpressible(NAME, field, why, "Use one tau")
    return levels.pop()


def _text(inputs: dict[str, Any], name: str) -> str:
    text = inputs.get(name, "")
    if not isinstance(text, str):
        why = "it is no text but, if a list, connected to another node"
        raise NotExpressible(NAME, f"inputs.{name}={text!r}", why, "Put its text here")
    return text


def _layers(dense: str, place: Deployment) -> int:
    """Blocks of the model; only numbers from the end need them."""
    if place.layers is not None:
        return place.layers
    if _FROM_THE_END.search(dense):
        why = "a number from the end depends on how many blocks there are"
        raise NotExpressible(NAME, f"inputs.dense_blocks={dense!r}", why, "Give them (--layers)")
    return MAX_LAYER + 1
