"""The configuration that leaves for a serving stack: TensorRT-LLM VisualGen's YAML.

    attention_config:
      backend: CUTEDSL
      sparse_attention_config:
        algorithm: sol_attn
        tau: 1.0
        thresh_type: diag
        disabled_until_timestep: null
        dense_layers: null

Models are strict: an unknown field is an error that names the nearest one, and a bool is no number.
The algorithms are in :mod:`workbench.config.sparse`, the formats in :mod:`workbench.config.quant`;
here is what composes, and reading and writing. What composes with ``quant_attention_config``:

    sparse        quantised   why not
    none          yes
    skip_softmax  yes         same dense kernel family
    sol_attn      no          the server refuses it (the kernels here can do it)
    vsa           no          its fine stage replaces the dense kernel that quantises
"""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import ConfigDict, ValidationError, model_validator

from workbench.config.fields import Strict, faults
from workbench.config.quant import QuantAttentionConfig, check_backend
from workbench.config.sparse import SparseConfig

Backend = Literal["CUTEDSL", "TRTLLM", "VANILLA"]

_NOT_QUANTISED = {
    "sol_attn": (
        "the server refuses sol_attn together with quantised attention. The kernels can do it: "
        "blockattn.quantised_attention(..., route=sol_route(q, k), with_tail=True). "
        "Drop one of them"
    ),
    "vsa": (
        "vsa replaces the dense kernel that would quantise. Drop one of them, or use skip_softmax"
    ),
}
MAX_VALUES = 100_000
# What is written here says how it ends. A file written by hand promises nothing and needs no end.
END = "..."  # of a document in YAML
PROMISE = f"# Whole if its last line is {END}"
_PARTS = ("sparse_attention_config", "quant_attention_config")


class AttentionConfig(Strict):
    """Which kernel family serves attention, its sparsity and its formats; all optional."""

    backend: Backend | None = None
    sparse_attention_config: SparseConfig | None = None
    quant_attention_config: QuantAttentionConfig | None = None

    @model_validator(mode="after")
    def _backend_serves_it(self) -> AttentionConfig:
        sparse = self.sparse_attention_config
        if sparse and self.backend and self.backend not in sparse.BACKENDS:
            raise ValueError(
                f"backend={self.backend!r} does not serve algorithm={sparse.algorithm!r}; "
                f"use {' or '.join(sparse.BACKENDS)}"
            )
        return self

    @model_validator(mode="after")
    def _formats_compose(self) -> AttentionConfig:
        sparse, quant = self.sparse_attention_config, self.quant_attention_config
        if quant is None:
            return self
        if sparse is not None and sparse.algorithm in _NOT_QUANTISED:
            raise ValueError(f"quant_attention_config: {_NOT_QUANTISED[sparse.algorithm]}")
        if self.backend is not None:
            check_backend(quant, self.backend)
        return self


class VisualGenConfig(Strict):
    """A VisualGen file; what is not attention is kept as it is and left to the server to check."""

    model_config = ConfigDict(frozen=True, extra="allow")

    attention_config: AttentionConfig

    @model_validator(mode="before")
    @classmethod
    def _nested(cls, data: Any) -> Any:
        """A part of attention_config beside it would be kept for the server and do nothing here."""
        for name in _PARTS:
            if isinstance(data, dict) and name in data:
                raise ValueError(f"field {name!r} belongs inside attention_config; indent it there")
        return data


class _UniqueKeys(yaml.SafeLoader):
    """YAML whose mappings name every key once; PyYAML alone lets the last one win in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                continue  # what a merge brings in may be overridden
            name = self.construct_object(key, deep=True)
            if isinstance(name, Hashable) and name in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {name!r} is given twice; keep one", key.start_mark
                )
            if isinstance(name, Hashable):
                seen.add(name)
        return super().construct_mapping(node, deep)


def read_yaml(source: str | Path, where: str, *, whole: bool = False) -> Any:
    """What YAML says.

    Args:
        source: a ``Path``, or the text.
        where: names it in an error.
        whole: refuse a text of :func:`dump_config` that was cut off.

    Raises:
        ValueError: no text, no YAML, a key that is given twice, a date or integer that is none,
            or more or deeper than any configuration.
    """
    try:
        text = source.read_text(encoding="utf-8") if isinstance(source, Path) else source
        if whole:
            _check_end(text)
        data = yaml.load(text, _UniqueKeys)
        _check_size(data)
    except yaml.YAMLError as error:
        raise ValueError(f"{where}: not YAML: {' '.join(str(error).split())}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: is no text in UTF-8 ({error.reason})") from error
    except ValueError as error:  # of the constructor of a date or an integer
        raise ValueError(f"{where}: {error}") from error
    except RecursionError as error:
        raise ValueError(f"{where}: is nested too deeply to be a configuration") from error
    return data


def _check_end(text: str) -> None:
    """Every part of a configuration may be left out, so what is left of a file would be valid.

    An editor may put a byte order mark in front, and a user comments behind.
    """
    lines = text.removeprefix("\ufeff").splitlines()
    said = [line for line in (line.split("#")[0].strip() for line in lines) if line]
    if PROMISE in lines and said[-1:] != [END]:
        raise ValueError(f"was cut off: its last line is not {END}; copy or write it again")


def _check_size(data: object) -> None:
    """Refuses aliases that make gigabytes of a few lines, or hold themselves."""
    count, left = 0, [data]
    while left:
        item = left.pop()
        count += 1
        if count > MAX_VALUES:
            raise ValueError(f"holds over {MAX_VALUES:,} values, aliases written out; shorten it")
        if isinstance(item, dict):
            left += item.values()
        elif isinstance(item, list | tuple):
            left += item


def load_config(source: str | Path) -> VisualGenConfig:
    """Reads a VisualGen configuration.

    Args:
        source: a ``Path``, or YAML text (a ``str`` is never taken for a file name).

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: no YAML, or not the schema; one line for each fault with the path of its field.
    """
    where = str(source) if isinstance(source, Path) else "configuration"
    if isinstance(source, Path) and not source.is_file():
        raise FileNotFoundError(
            f"{where}: no such configuration file; give the path of a YAML file"
        )
    data = read_yaml(source, where, whole=True)
    if not isinstance(data, dict) or "attention_config" not in data:
        have = f", found {', '.join(map(str, data))}" if isinstance(data, dict) and data else ""
        raise ValueError(f"{where}: expected a mapping with the key attention_config{have}")
    try:
        return VisualGenConfig.model_validate(data)
    except ValidationError as error:
        raise ValueError("\n".join(f"{where}: {line}" for line in faults(error))) from error


def dump_config(config: VisualGenConfig) -> str:
    """YAML text that :func:`load_config` reads back to an equal configuration, if it is whole."""
    data = config.model_dump()  # as Python values: JSON has no infinities, dates or integer keys
    for name in ("backend", "quant_attention_config"):
        if getattr(config.attention_config, name) is None:
            data["attention_config"].pop(name)
    body = yaml.safe_dump(data, sort_keys=False, allow_unicode=True)
    return f"{PROMISE}\n{body}{END}\n"
