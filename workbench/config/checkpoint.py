"""SkipSoftmax calibration that a checkpoint carries in its own config.json.

    sparse_attention_config:
      config_groups:
        group_0:
          algorithm: skip_softmax
          threshold_scale_factor:
            formula: a * exp(b * target_sparsity)
            coefficients: {a: 1443.49, b: 4.3037}
          target_sparsity: 0.5
          disabled_until_timestep: 0.9
          ignore: ["*attn2*"]

Shape and rules as TensorRT-LLM VisualGen reads them. LLM checkpoints hold factors per phase
(``prefill`` / ``decode``); such a file is refused with what to do, when its factors are needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from workbench.config.fields import is_finite
from workbench.config.formula import Formula

SKIP_NAMES = ("skip_softmax", "softmax_skip")
SKIP_FIELDS = ("threshold_scale_factor", "target_sparsity", "ignore", "disabled_until_timestep")
PHASES = ("prefill", "decode")
TARGET = "target_sparsity"
_CONVERT = (
    "per-phase values (prefill/decode) are for LLMs, and video attention has one phase. Write one "
    "number, and {formula, coefficients: {a, b}} with the values under prefill"
)


@dataclass(frozen=True)
class SkipCalibration:
    """The skip group of a checkpoint.

    Attributes:
        threshold: the raw ``threshold_scale_factor`` entry, ``None`` when absent.
        target_sparsity: the raw default target, ``None`` when absent.
        disabled_until_timestep: the raw default cutoff, ``None`` when absent.
        initial_disabled_steps: a count of steps that some exporters write instead.
        ignore: patterns of modules that stay dense.
    """

    threshold: Any = None
    target_sparsity: Any = None
    disabled_until_timestep: Any = None
    initial_disabled_steps: Any = None
    ignore: tuple[str, ...] = field(default=())

    def scalar_target(self) -> float | None:
        """The default target, a share in [0, 1].

        Raises:
            ValueError: it is per phase, or no share.
        """
        if isinstance(self.target_sparsity, Mapping):
            raise ValueError(f"checkpoint target_sparsity={self.target_sparsity!r}: {_CONVERT}")
        if self.target_sparsity is None:
            return None
        return _share(TARGET, self.target_sparsity)

    def cutoff(self) -> float | None:
        """The default end of the dense phase, a denoising time in [0, 1].

        Raises:
            ValueError: it is no such time, or a count of steps stands in its place.
        """
        if self.disabled_until_timestep is not None:
            return _share("disabled_until_timestep", self.disabled_until_timestep)
        if self.initial_disabled_steps:
            raise ValueError(
                f"checkpoint initial_disabled_steps={self.initial_disabled_steps!r} counts steps; "
                "set disabled_until_timestep, the denoising time at which those steps end"
            )
        return None

    def factor(self, target_sparsity: float) -> float:
        """``threshold_scale_factor`` for a target: finite and >= 0.

        Raises:
            ValueError: no formula, one that cannot be used, or a result that is no factor.
        """
        formula, coefficients = self._formula()
        result = formula({**coefficients, TARGET: _share(TARGET, target_sparsity)})
        if result < 0:
            raise ValueError(
                f"formula {formula.text!r} gives {result} at target_sparsity={target_sparsity}: "
                "a factor must be at least 0"
            )
        return result

    def ignores(self, module_name: str | None) -> bool:
        """Whether a pattern names the module, under any of its candidate names.

        Raises:
            ValueError: there are patterns, and no name to compare them with.
        """
        if not self.ignore:
            return False
        if module_name is None:
            raise ValueError(
                f"the checkpoint keeps modules dense by name (ignore={list(self.ignore)}), but "
                "this module has no name; pass its name in the model"
            )
        names = candidate_names(module_name)
        return any(fnmatchcase(name, pattern) for name in names for pattern in self.ignore)

    def _formula(self) -> tuple[Formula, dict[str, float]]:
        entry = self.threshold
        if entry is None:
            raise ValueError(
                "the checkpoint's skip group has no threshold_scale_factor, so there is no "
                "calibration formula; calibrate it, or set threshold_scale_factor yourself"
            )
        if not isinstance(entry, Mapping):
            raise ValueError(
                f"checkpoint threshold_scale_factor={entry!r}: expected {{formula, coefficients}}"
            )
        if any(name in entry for name in PHASES):
            raise ValueError(f"checkpoint threshold_scale_factor has {_phases(entry)}: {_CONVERT}")
        if "formula" not in entry:
            raise ValueError(
                "checkpoint threshold_scale_factor has no calibration formula; it holds "
                f"{', '.join(map(str, entry)) or 'nothing'}"
            )
        formula = _checked_formula(entry["formula"])
        return formula, _coefficients(entry, formula)


def read_calibration(
    *, checkpoint_config: object = None, pretrained_config: object = None
) -> SkipCalibration | None:
    """The skip group of a checkpoint, ``None`` when it has none.

    Args:
        checkpoint_config: a component's config.json as a dict; its ``sparse_attention_config`` when
            that is a dict, else the dict itself is read.
        pretrained_config: likewise, or any object with that attribute. At most one of the two.

    Raises:
        TypeError, ValueError: both are given, two groups are for SkipSoftmax, or a field is wrong.
    """
    section = _section(checkpoint_config, pretrained_config)
    if section is None:
        return None
    if "config_groups" not in section:
        return _calibration(section, {}) if _is_skip(section) else None
    groups = section["config_groups"]
    if not isinstance(groups, Mapping):
        raise ValueError(f"checkpoint config_groups={groups!r}: expected a mapping of groups")
    for name, group in groups.items():
        if not isinstance(group, Mapping):
            raise ValueError(f"checkpoint config_groups.{name}={group!r}: expected a mapping")
    found = [name for name, group in groups.items() if _is_skip(group)]
    if len(found) > 1:
        raise ValueError(
            f"checkpoint config_groups {', '.join(map(str, found))} are all for skip_softmax; "
            "there can be one"
        )
    return _calibration(groups[found[0]], section) if found else None


def candidate_names(module_name: str) -> tuple[str, ...]:
    """Names under which a module may be listed: as it is, uncompiled, below the transformer."""
    names = [module_name, module_name.replace("._orig_mod.", ".")]
    for prefix in ("transformer.", "transformer_2."):
        names += [name.removeprefix(prefix) for name in names[:2]]
    return tuple(dict.fromkeys(names))


def _section(checkpoint_config: object, pretrained_config: object) -> Mapping[str, Any] | None:
    if checkpoint_config is not None and pretrained_config is not None:
        raise ValueError("checkpoint_config and pretrained_config are both given; give one")
    given = checkpoint_config if pretrained_config is None else pretrained_config
    if isinstance(given, Mapping):
        inner = given.get("sparse_attention_config")
        return inner if isinstance(inner, Mapping) else given
    if given is None or pretrained_config is None:
        if given is not None:
            raise TypeError(
                f"checkpoint_config: expected a dict such as a parsed config.json, got "
                f"{type(given).__name__}"
            )
        return None
    inner = getattr(pretrained_config, "sparse_attention_config", None)
    return inner if isinstance(inner, Mapping) else None


def _is_skip(group: Mapping[str, Any]) -> bool:
    """By its algorithm; a group that names none counts when it has a field of ours."""
    algorithm = group.get("algorithm", group.get("sparse_algo"))
    if algorithm is not None:
        return algorithm in SKIP_NAMES
    return any(name in group for name in SKIP_FIELDS)


def _calibration(group: Mapping[str, Any], section: Mapping[str, Any]) -> SkipCalibration:
    return SkipCalibration(
        threshold=group.get("threshold_scale_factor"),
        target_sparsity=group.get(TARGET),
        disabled_until_timestep=group.get("disabled_until_timestep"),
        initial_disabled_steps=group.get("initial_disabled_steps"),
        ignore=tuple(dict.fromkeys([*_patterns(section), *_patterns(group)])),
    )


def _patterns(holder: Mapping[str, Any]) -> list[str]:
    patterns = holder.get("ignore")
    if patterns is None:
        return []
    if not isinstance(patterns, list | tuple) or not all(isinstance(x, str) for x in patterns):
        raise ValueError(f"checkpoint ignore={patterns!r}: expected a list of name patterns")
    return list(patterns)


def _checked_formula(text: object) -> Formula:
    if not isinstance(text, str):
        raise ValueError(f"checkpoint formula={text!r}: expected text")
    formula = Formula(text)
    if TARGET not in formula.names:
        raise ValueError(f"formula {text!r} does not mention target_sparsity, so no target acts")
    return formula


def _coefficients(entry: Mapping[str, Any], formula: Formula) -> dict[str, float]:
    """The numbers that the formula names, from ``coefficients`` or next to ``formula``."""
    shared = entry.get("coefficients")
    holder = entry if shared is None else shared
    if not isinstance(holder, Mapping):
        raise ValueError(f"checkpoint coefficients={holder!r}: expected a mapping of numbers")
    if any(name in holder for name in PHASES):
        raise ValueError(f"checkpoint coefficients has {_phases(holder)}: {_CONVERT}")
    names = sorted(formula.names - {TARGET})
    missing = [name for name in names if name not in holder]
    if missing:
        raise ValueError(
            f"formula {formula.text!r} names the coefficient {', '.join(missing)}, which the "
            "checkpoint does not give"
        )
    return {name: _number(f"coefficient {name}", holder[name]) for name in names}


def _phases(entry: Mapping[str, Any]) -> str:
    return " and ".join(name for name in PHASES if name in entry)


def _share(name: str, value: object) -> float:
    number = _number(name, value)
    if not 0 <= number <= 1:
        raise ValueError(f"checkpoint {name}={value!r}: must be in [0, 1]")
    return number


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not is_finite(value):
        raise ValueError(f"checkpoint {name}={value!r}: expected a finite number")
    return float(value)
