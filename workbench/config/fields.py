"""What every model of the configuration shares: strict fields, numbers, layer lists, faults."""

from __future__ import annotations

import difflib
import math
import re
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator

ALGORITHMS = ("sol_attn", "skip_softmax", "vsa")
MAX_SHOWN = 100  # characters of a value in an error
MAX_LAYER = 9999  # a larger number is a typing error, and a range up to it would fill the memory


def _number(value: object) -> object:
    """Refuses what pydantic would quietly turn into a number."""
    if isinstance(value, dict):
        raise ValueError("expected one number, got a mapping; prefill/decode pairs are for LLMs")
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        hint = " (YAML 1.1 reads 1e-3 as text: write 1.0e-3)" if isinstance(value, str) else ""
        raise ValueError(f"expected a number, got {type(value).__name__}{hint}")
    if value is not None and not is_finite(value):
        raise ValueError("must be finite")
    return value


def is_finite(value: int | float) -> bool:
    """Whether it is a finite float64, or an integer that is one."""
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond float64
        return False


def _integer(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"expected an integer, got {type(value).__name__}")
    return value


Number = Annotated[float, BeforeValidator(_number)]
Integer = Annotated[int, BeforeValidator(_integer)]


def check_share(value: float | None) -> float | None:
    """A number in [0, 1], or ``None``."""
    if value is not None and not 0 <= value <= 1:
        raise ValueError("must be in [0, 1]")
    return value


class Strict(BaseModel):
    """Frozen, and an unknown field is an error that names the nearest known one."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)
    # Fields that exist elsewhere, with the reason why they are none of the user's.
    NOT_HERE: ClassVar[dict[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, data: Any) -> Any:
        if cls.model_config.get("extra") != "allow" and isinstance(data, dict):
            for name in data:
                if name not in cls.model_fields:
                    raise ValueError(cls._unknown(str(name)))
        return data

    @classmethod
    def _unknown(cls, name: str) -> str:
        if name in cls.NOT_HERE:
            return f"field {name!r} cannot be set here: {cls.NOT_HERE[name]}"
        near = difflib.get_close_matches(name, cls.model_fields, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        return f"unknown field {name!r}: {hint}allowed are {', '.join(cls.model_fields)}"


def parse_layers(value: object) -> tuple[int, ...]:
    """Layer numbers, sorted and without repeats.

    Args:
        value: a list of integers, or text of comma-separated integers and ranges ``a-b``.

    Raises:
        ValueError: an item that is empty, negative, descending or no integer, by its position.
    """
    if isinstance(value, str):
        items = [_layer_range(text.strip(), n) for n, text in enumerate(value.split(","), start=1)]
        return tuple(sorted({layer for item in items for layer in item}))
    if not isinstance(value, list | tuple):
        raise ValueError("expected a list of layer numbers or text such as '0,2-4'")
    for position, item in enumerate(value, start=1):
        whole = isinstance(item, int) or (isinstance(item, float) and item.is_integer())
        if isinstance(item, bool) or not whole or not 0 <= item <= MAX_LAYER:
            raise ValueError(
                f"item {position} is {item!r}: must be an integer, 0 or above (at most {MAX_LAYER})"
            )
    return tuple(sorted({int(item) for item in value}))


def _layer_range(text: str, position: int) -> range:
    match = re.fullmatch(r"([0-9]+)(?:\s*-\s*([0-9]+))?", text)
    if match is None:
        what = "empty" if not text else repr(text)
        raise ValueError(f"item {position} is {what}: must be a number such as 3 or a range 2-4")
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise ValueError(f"item {position} is {text!r}: a range must ascend, write {last}-{first}")
    if last > MAX_LAYER:
        raise ValueError(f"item {position} is {text!r}: layers go up to {MAX_LAYER}")
    return range(first, last + 1)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def faults(error: ValidationError) -> list[str]:
    """One line for each fault: field path, its value, what is wrong."""
    lines = []
    for fault in error.errors(include_url=False):
        # The tag of the union is part of pydantic's path, but not of the file.
        path = ".".join(str(part) for part in fault["loc"] if part not in ALGORITHMS)
        value = "" if isinstance(fault["input"], dict | BaseModel) else f"={_short(fault['input'])}"
        message = fault["msg"].removeprefix("Value error, ")
        if fault["type"].startswith("union_tag"):
            given = fault["input"].get("algorithm") if isinstance(fault["input"], dict) else None
            path, value = f"{path}.algorithm", f"={given!r}"
            message = f"must be one of {', '.join(ALGORITHMS)}"
        lines.append(f"{path}{value}: {message}" if path else message)
    return lines
