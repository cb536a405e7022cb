"""A setting in a free run: its errors feed forward, and its density drifts from the prediction.

A calibration predicts, call by call, what happens on the dense trajectory. Once attention is
sparse, later calls see other q and k. The density of such a run is measured here, and solving can
be repeated with the drift taken off.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from workbench.attention import SparseAttention
from workbench.attention.log import CallRecord
from workbench.calibrate.collect import Calibration
from workbench.calibrate.samples import Samples, Tick
from workbench.calibrate.setting import Form, Setting, knob
from workbench.calibrate.solve import Solution, by_group, solve_density
from workbench.config import SkipSoftmaxConfig, SolAttnConfig
from workbench.models import AttentionCall, VideoDiT

TOLERANCE = 1e-3  # of a density: a free run closer to its target than this is not solved again
ROUNDS = 3


class ScheduledAttention:
    """The attention of a setting inside a model: the policy of each call's own value.

    The configuration of the server has one value for all layers and steps, so a setting with more
    is run as one :class:`workbench.attention.SparseAttention` for each distinct value.

    Args:
        setting: what to run.
        num_layers: of the model.
        impl: implementation of the sparse calls.

    Attributes:
        records: one for every call, in order, with the density that was delivered.
    """

    def __init__(self, setting: Setting, num_layers: int, *, impl: str = "auto") -> None:
        self.setting, self.num_layers, self.impl = setting, num_layers, impl
        self.records: list[CallRecord] = []
        self._any = next(
            knob(setting.algorithm, level) for level in setting.levels if not math.isnan(level)
        )
        self._policies: dict[float, SparseAttention] = {}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
        if call.time is None:
            raise ValueError(
                f"layer {call.layer}: the call has no denoising time, on which a setting may "
                "depend; pass the model its time as a float"
            )
        policy = self._policy(call.layer, call.time, k.shape[1])
        out = policy(q, k, v, call)
        self.records.append(policy.records.pop())
        return out

    def _policy(self, layer: int, time: float, keys: int) -> SparseAttention:
        # A call that is meant to be dense has no value: any policy keeps it so, and says why.
        dense = self.setting.form.dense(layer, time)
        value = self._any if dense else self.setting.value(layer, time)
        if value not in self._policies:
            config = sparse_config(self.setting, value, keys)
            self._policies[value] = SparseAttention(
                config, num_layers=self.num_layers, impl=self.impl, record=True
            )
        return self._policies[value]


def sparse_config(setting: Setting, value: float, keys: int) -> SolAttnConfig | SkipSoftmaxConfig:
    """One value of a setting in the schema of the server.

    Args:
        value: tau or lambda. keys: length of the sequence, which SkipSoftmax's factor needs.
    """
    form = setting.form
    if setting.algorithm == "skip_softmax":
        return SkipSoftmaxConfig(
            threshold_scale_factor=value * keys, disabled_until_timestep=form.cutoff
        )
    return SolAttnConfig(
        tau=value,
        thresh_type="exact" if setting.thresh_type == "exact" else "diag",
        disabled_until_timestep=form.cutoff,
        dense_layers=form.dense_layers or None,
    )


@dataclass(frozen=True)
class Delivery:
    """What free runs of a setting delivered.

    Attributes:
        density: float64 ``[videos, layers, steps]``, mean over batch and heads of each call.
        setting: what ran.
        samples: the videos.
        calls: how many each algorithm and implementation served, such as ``sol_attn: eager``.
        fallbacks: why faster implementations did not run.
    """

    density: Tensor
    setting: Setting
    samples: Samples
    calls: Mapping[str, int] = field(default_factory=dict)
    fallbacks: tuple[str, ...] = ()

    @property
    def groups(self) -> Tensor:
        """Group of every call, int64 ``[layers, steps]``; -1 where it was meant to be dense."""
        return self.setting.form.group_map(self.density.shape[1], self.samples.times)

    @property
    def by_group(self) -> Tensor:
        """Mean of the sparse calls of every group, float64 ``[groups]``; NaN without one."""
        return by_group(self.density.mean(dim=0), self.groups, len(self.setting.levels))

    @property
    def by_video(self) -> Tensor:
        """Mean of the sparse calls of every video, float64 ``[videos]``."""
        return self.density[:, self.groups >= 0].mean(dim=1)

    @property
    def overall(self) -> float:
        """Mean of all calls, dense ones included."""
        return float(self.density.mean())


def deliver(
    model: VideoDiT,
    setting: Setting,
    samples: Samples,
    *,
    impl: str = "auto",
    tick: Tick = lambda label: None,
) -> Delivery:
    """Samples every video with the setting and reads the density that each call delivered.

    Args:
        model: of the setting's layers.
        setting, samples: what to run, on which videos.
        impl: implementation of the sparse calls.
        tick: called when a video begins.
    """
    records: list[CallRecord] = []
    for index, (label, seed) in enumerate(samples.videos):
        tick(f"{label}, seed {seed}")
        attention = ScheduledAttention(setting, model.config.depth, impl=impl)
        samples.run(model, index, attention)
        records += attention.records
    # The model walks its layers within each step.
    shape = (len(samples.videos), samples.steps, model.config.depth)
    found = torch.tensor([record.density for record in records], dtype=torch.float64)
    calls = Counter(record.ran for record in records)
    fallbacks = dict.fromkeys(reason for record in records for reason in record.reasons)
    return Delivery(found.reshape(shape).transpose(1, 2), setting, samples, calls, tuple(fallbacks))


@dataclass(frozen=True)
class Corrected:
    """A solution whose free runs on the calibration's own videos meet the target.

    Attributes:
        solution: ``predicted`` is what its calls would deliver on the dense trajectory.
        delivered: the free run of every round, the first without any correction.
    """

    solution: Solution
    delivered: list[Delivery]


def solve_free_run(
    model: VideoDiT,
    calibration: Calibration,
    target: float,
    form: Form | None = None,
    *,
    impl: str = "auto",
    tick: Tick = lambda label: None,
) -> Corrected:
    """Solves, runs the calibration's videos sparsely, and solves again with the drift taken off.

    Args:
        model: that was calibrated.
        target: mean density of the sparse calls of every group in the free run.
        form: which levels there are; one global level by default.
        impl: implementation of the sparse calls.
        tick: called when a video begins.

    Raises:
        ValueError: as of :func:`workbench.calibrate.solve.solve_density`.
    """
    runs: list[Delivery] = []
    found = solve_density(calibration, target, form)
    while True:
        runs.append(deliver(model, found.setting, calibration.samples, impl=impl, tick=tick))
        reached = runs[-1].by_group
        off = (reached - target).nan_to_num().abs().max()
        if len(runs) == ROUNDS or float(off) <= TOLERANCE:
            return Corrected(found, runs)
        drift = (reached - torch.tensor(found.predicted, dtype=torch.float64)).nan_to_num()
        found = solve_density(calibration, target, form, drift=drift)
