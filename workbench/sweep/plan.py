"""The plan of a sweep: a YAML file that names settings in three ways, as a list of cases.

    name: tau
    seeds: [0, 1, 2]
    prompts: [disc, ring]
    sampling: {grid: [4, 16, 16], steps: 8}
    base: {algorithm: sol_attn}
    grid: {tau: [0.5, 1, 2], disabled_until_timestep: [null, 0.9]}
    one_at_a_time: {thresh_type: [exact], steps: [4, 16]}
    cases:
      - {algorithm: skip_softmax, threshold_scale_factor: 400, qk_dtype: mxfp8}
      - {config: served.yaml}

Every setting runs with every seed and prompt. The control, dense against dense, is always among
them, once for each sampler.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator, model_validator

from workbench.config import AttentionConfig, load_config
from workbench.config.fields import Integer, Strict
from workbench.config.files import read_yaml
from workbench.provenance import file_record
from workbench.sweep.cases import BUNDLED, Case, Sampling, flat, name_of, read_setting, valid


class PlanFile(Strict):
    """What a plan's file holds.

    Attributes:
        name: of the sweep.
        seeds, prompts: of the noise; classes of the video, by name.
        sampling: fields of the sampler, for every setting.
        base: fields that `grid` and `one_at_a_time` start from; alone, it is one setting.
        grid: values of fields; every combination of them.
        one_at_a_time: values of fields; `base`, and each value alone.
        cases: settings, written out; ``config`` takes one from a file in VisualGen's schema.
    """

    name: str
    seeds: tuple[Integer, ...] = Field(default=(0,), min_length=1)
    prompts: tuple[str, ...] = Field(default=("disc",), min_length=1)
    sampling: dict[str, Any] = Field(default_factory=dict)
    base: dict[str, Any] = Field(default_factory=dict)
    grid: dict[str, list[Any]] = Field(default_factory=dict)
    one_at_a_time: dict[str, list[Any]] = Field(default_factory=dict)
    cases: list[dict[str, Any]] = Field(default_factory=list)

    @field_validator("seeds", "prompts")
    @classmethod
    def _no_repeats(cls, values: tuple[Any, ...]) -> tuple[Any, ...]:
        if len(set(values)) != len(values):
            raise ValueError("must be without repeats")
        return values

    @field_validator("name")
    @classmethod
    def _names_a_file(cls, name: str) -> str:
        if not name or not all(letter.isalnum() or letter in "-_." for letter in name):
            raise ValueError("must be letters, digits, '-', '_' and '.': it names the database")
        return name

    @model_validator(mode="after")
    def _has_settings(self) -> PlanFile:
        if (self.grid or self.one_at_a_time) and not self.base:
            raise ValueError("base: is missing; grid and one_at_a_time start from it")
        if not self.base and not self.cases:
            raise ValueError("needs base, with grid or one_at_a_time, or cases")
        empty = [name for name, values in (self.grid | self.one_at_a_time).items() if not values]
        if empty:
            raise ValueError(f"{empty[0]}: has no values; give at least one")
        return self

    def settings(self) -> Iterator[dict[str, Any]]:
        """All settings as they are written; one may come several times."""
        if self.grid:
            for values in itertools.product(*self.grid.values()):
                yield {**self.base, **dict(zip(self.grid, values))}
        if self.one_at_a_time or (self.base and not self.grid):
            yield self.base
        for name, values in self.one_at_a_time.items():
            yield from ({**self.base, name: value} for value in values)
        yield from self.cases


@dataclass(frozen=True)
class Setting:
    """What is compared; ``attention`` is ``None`` for the control."""

    name: str
    attention: AttentionConfig | None
    sampling: Sampling


@dataclass(frozen=True)
class Plan:
    """A plan with its settings checked, controls first, and named.

    Attributes:
        inputs: size and checksum of every file that goes in, by role.
    """

    name: str
    seeds: tuple[int, ...]
    prompts: tuple[str, ...]
    settings: tuple[Setting, ...]
    inputs: Mapping[str, Mapping[str, object]]

    def cases(self) -> list[Case]:
        """All cases; what belongs together comes together, so that half a sweep is of use."""
        return [
            Case(setting.name, setting.attention, setting.sampling, seed, prompt)
            for seed in self.seeds
            for prompt in self.prompts
            for setting in self.settings
        ]

    def record(self) -> dict[str, Any]:
        """Everything that decides the results, ready for JSON; two equal ones can be resumed."""
        return {
            "name": self.name,
            "seeds": list(self.seeds),
            "prompts": list(self.prompts),
            "settings": {item.name: _record(item) for item in self.settings},
            "inputs": {role: dict(found) for role, found in self.inputs.items()},
        }


def load_plan(path: Path) -> Plan:
    """Reads a plan and checks every setting, before anything runs.

    Raises:
        FileNotFoundError: no such file, or one that it names.
        ValueError: no YAML, an unknown field, or a value that is not allowed; a line for each.
    """
    if not path.is_file():
        raise FileNotFoundError(f"plan={str(path)!r}: no such file; give the path of a YAML file")
    data = read_yaml(path, f"plan={str(path)!r}")
    if not isinstance(data, dict):
        raise ValueError(
            f"plan={str(path)!r}: expected a mapping with name, base and grid or cases"
        )
    try:
        return make_plan(data, folder=path.parent)
    except ValueError as error:
        told = "\n".join(f"{path}: {line}" for line in str(error).splitlines())
        raise ValueError(told) from error


def make_plan(data: Mapping[str, Any], *, folder: Path = Path()) -> Plan:
    """A plan from the mapping that a file holds.

    Args:
        folder: that the paths of ``config`` start from.

    Raises:
        FileNotFoundError, ValueError: as of :func:`load_plan`.
    """
    written = valid(PlanFile, data)
    read = [_read(fields, written.sampling, folder) for fields in written.settings()]
    samplers = list(dict.fromkeys(sampling for _, _, sampling in read))
    for sampling in samplers:
        for seed, prompt in itertools.product(written.seeds, written.prompts):
            sampling.settings(seed, prompt)
    varied = [n for n in Sampling.model_fields if len({getattr(s, n) for s in samplers}) > 1]
    controls = [Setting(name_of(None, s, varied), None, s) for s in samplers]
    settings = [
        Setting(name or name_of(attention, sampling, varied), attention, sampling)
        for name, attention, sampling in read
    ]
    return Plan(
        written.name,
        written.seeds,
        written.prompts,
        tuple(_unique([*controls, *settings])),
        inputs_of(samplers),
    )


def inputs_of(samplers: list[Sampling]) -> dict[str, dict[str, object]]:
    """Size and checksum of the weights that samplers use.

    Raises:
        FileNotFoundError: a file is not there.
    """
    files = {sampling.weights: sampling.weights_file for sampling in samplers}
    for name, path in files.items():
        if not path.is_file():
            raise FileNotFoundError(
                f"weights={name!r}: must be {', '.join(BUNDLED)} or a file, and there is no "
                f"{str(path)!r} in {Path.cwd()}, where its path begins; start from the folder of "
                "the first run, or put it there"
            )
    return {weights_role(name): file_record(path) for name, path in files.items()}


def weights_role(weights: str) -> str:
    """Under which the record of a plan keeps the checksum of weights."""
    return f"{weights} weights"


def check_unchanged(database: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Refuses to go on with a sweep whose settings are others now: its rows would not compare.

    Raises:
        ValueError: a line for each difference.
    """
    lines = differences(old, new)
    if lines:
        raise ValueError(
            f"database={str(database)!r}: holds a sweep with other settings; give another --out, "
            "or take these changes back:\n" + "\n".join(f"  {line}" for line in lines)
        )


def differences(old: Any, new: Any, where: str = "") -> list[str]:
    """Lines that say how two JSON-able values differ, field by field."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        lines = []
        for name in [*old, *(name for name in new if name not in old)]:
            place = f"{where}: {name}" if where else str(name)
            if name not in new:
                lines.append(f"{place}: is gone")
            elif name not in old:
                lines.append(f"{place}: is new")
            else:
                lines += differences(old[name], new[name], place)
        return lines
    return [] if old == new else [f"{where}: {old!r} -> {new!r}"]


def _read(
    fields: Mapping[str, Any], sampling: Mapping[str, Any], folder: Path
) -> tuple[str, AttentionConfig, Sampling]:
    """Name (empty to make one), attention and sampler of a setting as it is written."""
    if "config" not in fields:
        return ("", *read_setting(fields, sampling))
    own = {name: value for name, value in fields.items() if name != "config"}
    other = [name for name in own if name not in Sampling.model_fields]
    if other:
        raise ValueError(f"{other[0]}={own[other[0]]!r}: the file {fields['config']} has the rest")
    path = folder / str(fields["config"])
    _, sampler = read_setting({"algorithm": "dense", **own}, sampling)
    return path.stem, load_config(path).attention_config, sampler


def _unique(settings: list[Setting]) -> list[Setting]:
    """Each setting once, whatever ways of writing led to it; names tell them apart."""
    found: dict[tuple[AttentionConfig | None, Sampling], Setting] = {}
    for setting in settings:
        found.setdefault((setting.attention, setting.sampling), setting)
    names: dict[str, Setting] = {}
    for setting in found.values():
        if names.setdefault(setting.name, setting) != setting:
            raise ValueError(
                f"{setting.name}: two settings have this name; drop one, or rename its file"
            )
    return list(names.values())


def _record(setting: Setting) -> dict[str, Any]:
    return {
        "attention": flat(setting.attention),
        "sampling": setting.sampling.model_dump(mode="json"),
    }
