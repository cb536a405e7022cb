"""Reading and checking that every target needs: strict JSON, known fields, lists of layers."""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from typing import Any, NoReturn

from pydantic import ValidationError

from workbench.config import AttentionConfig, SparseConfig, VisualGenConfig, faults
from workbench.config.fields import is_finite
from workbench.export.outcome import NotExpressible


def read_json(text: str, target: str, fix: str = "") -> dict[str, Any]:
    """A JSON object whose keys are given once and whose numbers are finite.

    Args:
        fix: what to give where the text is no JSON; what the target's export writes by default.

    Raises:
        ValueError: anything else, with the place where a parser stops.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        for n, (key, _) in enumerate(pairs):
            if any(key == other for other, _ in pairs[:n]):
                raise ValueError(f"{target}: the key {key!r} is given twice; keep one")
        return dict(pairs)

    def constant(name: str) -> NoReturn:
        raise ValueError(f"{target}: {name} is no number of JSON; give a finite one")

    try:
        data = json.loads(text, object_pairs_hook=unique, parse_constant=constant)
    except json.JSONDecodeError as error:
        fix = fix or (
            f"give one JSON object, as workbench export CONFIG.yaml --to {target} writes it; "
            "a configuration in YAML is what that command reads"
        )
        raise ValueError(f"{target}: not JSON ({error}); {fix}") from error
    except RecursionError as error:
        raise ValueError(f"{target}: is nested too deeply to be one of its files") from error
    return mapping(data, target, "the file")


def write_json(data: Mapping[str, Any]) -> str:
    """Indented JSON; floats read back equal."""
    return json.dumps(data, indent=2, allow_nan=False) + "\n"


def mapping(data: object, target: str, where: str) -> dict[str, Any]:
    """The data if it is a JSON object.

    Raises:
        ValueError: it is something else.
    """
    if not isinstance(data, dict):
        raise ValueError(f"{target}: {where}={data!r}: expected a mapping of fields")
    return data


def check_fields(
    data: Mapping[str, Any], allowed: Collection[str], target: str, where: str
) -> None:
    """Refuses a field that would be dropped.

    Raises:
        NotExpressible: with the nearest allowed name.
    """
    for name in data:
        if name not in allowed:
            near = difflib.get_close_matches(name, allowed, n=1, cutoff=0.6)
            hint = f"Did you mean {near[0]!r}" if near else "Remove it"
            why = f"a configuration here holds nothing like it; read are {', '.join(allowed)}"
            raise NotExpressible(target, f"{where}{name}={data[name]!r}", why, hint)


def steps_of(value: object, target: str, field: str) -> int:
    """A number of steps.

    Raises:
        ValueError: it is no integer of at least 0.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{target}: {field}={value!r}: must be an integer of at least 0")
    return value


def number_of(value: object, target: str, field: str) -> float:
    """A finite number.

    Raises:
        ValueError: text, a bool, null, a container, or beyond float64 (JSON's 1e999, too).
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{target}: {field}={value!r}: expected a number")
    if not is_finite(value):
        raise ValueError(f"{target}: {field} is beyond float64: must be finite")
    return float(value)


def same(value: object, wanted: object) -> bool:
    """Equal, where a bool is no number: ``False`` is not 0."""
    return isinstance(value, bool) == isinstance(wanted, bool) and value == wanted


def layers_text(layers: Sequence[int]) -> str:
    """``(0, 1, 2, 5)`` -> ``0-2,5``; nothing for no layer."""
    runs = groupby(enumerate(layers), key=lambda pair: pair[1] - pair[0])
    ends = [[layer for _, layer in run] for _, run in runs]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in ends)


def attention_of(config: VisualGenConfig, target: str) -> tuple[AttentionConfig, list[str]]:
    """The part that leaves, and a note where TensorRT-LLM's own kernel family is named.

    Raises:
        NotExpressible: there is no setting, or one that is none of attention.
    """
    for name in config.model_extra or {}:
        why = "only the attention settings leave for this target"
        raise NotExpressible(target, name, why, f"Remove {name!r} and set it on that server")
    attention = config.attention_config
    if attention.sparse_attention_config is None and attention.quant_attention_config is None:
        why = "it sets neither sparse_attention_config nor quant_attention_config"
        raise NotExpressible(target, "attention_config", why, "Dense attention needs no file")
    if attention.backend is None:
        return attention, []
    note = f"backend={attention.backend} names kernels of TensorRT-LLM; {target} has its own"
    return attention, [note]


def sparse_of(config: VisualGenConfig, target: str) -> tuple[SparseConfig, list[str]]:
    """As :func:`attention_of`, for a target that has sparsity and no formats.

    Raises:
        NotExpressible: also for quantised attention.
    """
    attention, notes = attention_of(config, target)
    sparse = attention.sparse_attention_config
    if sparse is None or attention.quant_attention_config is not None:
        why = "it has no place for formats and block sizes of quantised attention"
        raise NotExpressible(target, "quant_attention_config", why, "Remove it")
    return sparse, notes


def refuse_target_0(sparsity: float | None, target: str, fix: str) -> None:
    """Refuses a target sparsity of 0, which switches skipping off here and not in the servers.

    Raises:
        NotExpressible: it is 0.
    """
    if sparsity == 0:
        why = "there the formula gives a factor above 0 and skipping stays on; here it is off"
        raise NotExpressible(target, "target_sparsity=0", why, fix)


def configuration(
    target: str, sparse: Mapping[str, Any] | None, quant: Mapping[str, Any] | None = None
) -> VisualGenConfig:
    """A checked configuration of what was read.

    Raises:
        ValueError: one line for each value that no configuration may have.
    """
    parts = {"sparse_attention_config": sparse, "quant_attention_config": quant}
    given = {name: dict(part) for name, part in parts.items() if part is not None}
    try:
        return VisualGenConfig.model_validate({"attention_config": given})
    except ValidationError as error:
        raise ValueError("\n".join(f"{target}: {line}" for line in faults(error))) from error
