"""The seven Sol-Attn fields that SGLang and vLLM-Omni share with NVlabs' own backend.

    tau  thresh_type  dense_steps  dense_layers  sink_tokens  sink_start  kv_splits

Every field is written, because their defaults are others than here: 10 dense steps, layers 0 and 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.config import SolAttnConfig
from workbench.export.deployment import Deployment
from workbench.export.documents import check_fields, layers_text, same, steps_of
from workbench.export.outcome import NotExpressible

DEFAULTS: dict[str, Any] = {
    "tau": 1.0,
    "thresh_type": "diag",
    "sink_tokens": 0,
    "sink_start": 0,
    "dense_steps": 10,
    "dense_layers": "0,1",
    "kv_splits": "auto",
}


def write_sol(sparse: SolAttnConfig, place: Deployment, target: str) -> dict[str, Any]:
    """The fields of a configuration, as values that JSON has.

    Raises:
        NotExpressible: a dense phase without the times of the steps.
    """
    return {
        "tau": sparse.tau,
        "thresh_type": sparse.thresh_type,
        "sink_tokens": 0,
        "sink_start": 0,
        "dense_steps": place.dense_steps(sparse.disabled_until_timestep, target),
        "dense_layers": layers_text(sparse.dense_layers or ()),
        "kv_splits": "auto",
    }


def read_sol(
    given: Mapping[str, Any], place: Deployment, target: str, where: str
) -> dict[str, Any]:
    """The fields of a :class:`SolAttnConfig`; what is not given has the target's default.

    Raises:
        NotExpressible: a sink, a number of splits, or dense steps without their times.
        ValueError: a value that is no list of layers or number of steps.
    """
    check_fields(given, tuple(DEFAULTS), target, where)
    data = {**DEFAULTS, **given}
    if not same(data["sink_start"], None):  # where a sink of no tokens would begin
        steps_of(data["sink_start"], target, f"{where}sink_start")
    if not same(data["sink_tokens"], 0):
        why = "a configuration here has no sink, which would be lost"
        raise NotExpressible(target, f"{where}sink_tokens={data['sink_tokens']!r}", why, "Set 0")
    if data["kv_splits"] not in ("auto", None):
        why = "the number of splits is the kernel's own choice here"
        raise NotExpressible(target, f"{where}kv_splits={data['kv_splits']!r}", why, "Set 'auto'")
    steps = steps_of(data["dense_steps"], target, f"{where}dense_steps")
    return {
        "algorithm": "sol_attn",
        "tau": data["tau"],
        "thresh_type": data["thresh_type"],
        "disabled_until_timestep": place.cutoff(steps, target),
        "dense_layers": _layers(data["dense_layers"], target, where),
    }


def _layers(value: object, target: str, where: str) -> str | None:
    """Text for the configuration's own parser; the target takes a number or text, not a list."""
    if value is None or value == "":
        return None
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"{target}: {where}dense_layers={value!r}: expected text such as '0,2-4'")
    return str(value)
