"""Model-Optimizer: the SkipSoftmax group of a checkpoint component's config.json.

    {"sparse_attention_config": {"config_groups": {"group_0": {
        "algorithm": "skip_softmax",
        "threshold_scale_factor": {"formula": "a * exp(b * target_sparsity)",
                                   "coefficients": {"a": 1443.5, "b": 4.3}},
        "target_sparsity": 0.5, "disabled_until_timestep": 0.9, "ignore": ["blocks.0.attn1"]}}}}

Follows NVIDIA/Model-Optimizer pull requests 1269 (groups in config.json) and 1816 (one phase and a
cutoff for diffusion), and the reader's page visualgen-sparse-attention.md of NVIDIA/TensorRT-LLM.
A group holds a calibration; without one there is nothing to write.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.config import SkipSoftmaxConfig, VisualGenConfig
from workbench.config.checkpoint import SKIP_NAMES, SkipCalibration, read_calibration
from workbench.export.deployment import Deployment
from workbench.export.documents import (
    check_fields,
    configuration,
    mapping,
    read_json,
    refuse_target_0,
    sparse_of,
    steps_of,
    write_json,
)
from workbench.export.outcome import Exported, Imported, NotExpressible

NAME = "model_optimizer"
SECTION, GROUPS = "sparse_attention_config", "config_groups"
_SECTION = (GROUPS, "ignore", "producer")
_ALGORITHM = ("algorithm", "sparse_algo")
_FIELDS = (
    *_ALGORITHM,
    "threshold_scale_factor",
    "target_sparsity",
    "disabled_until_timestep",
    "initial_disabled_steps",
    "ignore",
    "targets",
)
MERGE = f"merge {SECTION} into the config.json of each transformer component it was fitted on"


def write(config: VisualGenConfig, place: Deployment) -> Exported:
    """The section, with the deployment's calibration and the configuration's target.

    Raises:
        NotExpressible: no SkipSoftmax, a fixed factor, no target, or no calibration.
        ValueError: the formula gives no factor at the target, or is for the phases of an LLM.
    """
    sparse, notes = sparse_of(config, NAME)
    if not isinstance(sparse, SkipSoftmaxConfig):
        why = "checkpoints are calibrated for skip_softmax only"
        fix = "Set it in the server's own configuration"
        raise NotExpressible(NAME, f"algorithm={sparse.algorithm!r}", why, fix)
    group = _group(sparse, _target(sparse), place)
    return Exported(write_json({SECTION: {GROUPS: {"group_0": group}}}), (*notes, MERGE))


def read(text: str, place: Deployment) -> Imported:
    """Target and cutoff of the group; its formula stays in the checkpoint, where it is used.

    Raises:
        ValueError: no such group, no target, or a count of steps without their times.
        NotExpressible: a group or field that has no place here, or a target of 0.
    """
    data = read_json(text, NAME)
    _check_group(data)
    calibration = read_calibration(checkpoint_config=data)
    if calibration is None:
        raise ValueError(f"{NAME}: {SECTION} has no group for skip_softmax; nothing to read")
    target = calibration.scalar_target()
    if target is None:
        raise ValueError(f"{NAME}: the group has no target_sparsity, so it asks for nothing")
    _factor(calibration, target)
    sparse = {
        "algorithm": "skip_softmax",
        "target_sparsity": target,
        "disabled_until_timestep": _cutoff(calibration, place),
    }
    notes = [
        "the formula and what it ignores stay in the checkpoint; load it with the model, or give "
        "--calibration"
    ]
    if calibration.initial_disabled_steps and calibration.disabled_until_timestep is not None:
        steps = calibration.initial_disabled_steps
        notes.append(f"disabled_until_timestep wins over initial_disabled_steps={steps!r}")
    return Imported(configuration(NAME, sparse), tuple(notes))


def _target(sparse: SkipSoftmaxConfig) -> float:
    if sparse.threshold_scale_factor is not None:
        why = "a group holds a formula and a target, no fixed factor"
        fix = "Set target_sparsity alone"
        field = f"threshold_scale_factor={sparse.threshold_scale_factor!r}"
        raise NotExpressible(NAME, field, why, fix)
    if sparse.target_sparsity is None:
        why = "without a target the checkpoint would come out unchanged"
        raise NotExpressible(NAME, "target_sparsity=None", why, "Set it")
    return sparse.target_sparsity


def _group(sparse: SkipSoftmaxConfig, target: float, place: Deployment) -> dict[str, Any]:
    calibration = place.calibration
    if calibration is None:
        why = "a group holds the calibration that turns the target into a factor"
        fix = "Give a calibration (--calibration config.json)"
        raise NotExpressible(NAME, f"target_sparsity={target!r}", why, fix)
    _factor(calibration, target)
    cutoff = sparse.disabled_until_timestep
    group: dict[str, Any] = {
        "algorithm": "skip_softmax",
        "threshold_scale_factor": calibration.threshold,
        "target_sparsity": target,
        # What the configuration leaves open, the checkpoint's own value answers.
        "disabled_until_timestep": calibration.cutoff() if cutoff is None else cutoff,
        "ignore": list(calibration.ignore),
    }
    return {name: value for name, value in group.items() if value not in (None, [])}


def _factor(calibration: SkipCalibration, target: float) -> float:
    refuse_target_0(target, NAME, "Leave the group out")
    return calibration.factor(target)


def _cutoff(calibration: SkipCalibration, place: Deployment) -> float | None:
    steps = calibration.initial_disabled_steps
    if steps is not None:
        steps = steps_of(steps, NAME, "initial_disabled_steps")
    if calibration.disabled_until_timestep is None and steps and place.times is not None:
        return place.cutoff(steps, NAME)
    return calibration.cutoff()


def _check_group(data: Mapping[str, Any]) -> None:
    """Refuses what a group says and a configuration with its calibration cannot."""
    section = mapping(data.get(SECTION), NAME, SECTION)
    check_fields(section, _SECTION, NAME, f"{SECTION}.")
    groups = mapping(section.get(GROUPS), NAME, f"{SECTION}.{GROUPS}")
    for name, group in groups.items():
        fields = mapping(group, NAME, f"{GROUPS}.{name}")
        algorithm = next((fields[key] for key in _ALGORITHM if key in fields), SKIP_NAMES[0])
        if algorithm not in SKIP_NAMES:
            why = "a configuration here holds nothing like it"
            field = f"{GROUPS}.{name}.algorithm={algorithm!r}"
            raise NotExpressible(NAME, field, why, "Read the file without this group")
        check_fields(fields, _FIELDS, NAME, f"{GROUPS}.{name}.")
