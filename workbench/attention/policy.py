"""The attention function that runs a configuration inside a model, and says what it ran.

    attention = SparseAttention(load_config(Path("config.yaml")), num_layers=40)
    for step, time in enumerate(times):
        attention.begin_step(time)
        model(x, time, label, attention=attention, step=step)
    print(attention.counts())

In this order a call goes to dense attention: cross-attention, a mask, a dense layer, the dense
phase, and what the sparse path cannot serve (that warns once, and raises in strict mode). All other
calls are sparse. Only facts checked beforehand make a call dense: an error of a kernel propagates.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from blockattn import UnsupportedError, checks
from workbench.attention.calls import OBSTACLES, Knobs, Outcome, obstacle
from workbench.attention.log import CallCounts, CallLog, CallRecord, Kind, Verdict
from workbench.attention.lowering import AnyConfig, Surroundings, as_attention_config, lower
from workbench.attention.phase import DENSE, StepTime, step_time
from workbench.models.dit import AttentionCall, AttentionFn, dense_attention

STRICT_VARIABLE = "WORKBENCH_STRICT"
MaskedAttentionFn = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
SPARSE = Verdict("sparse", "sparse")
CROSS, MASK = "cross-attention", "mask"
SPARSE_OFF, DENSE_LAYER, DENSE_PHASE = "sparse off", "dense layer", "dense phase"
# What a model, not the tensors, can have against a sparse call.
REFUSALS = ("token grid", "attention mask", "attention options")
KNOWN: tuple[tuple[Kind, str], ...] = (
    ("sparse", "sparse"),
    *(("dense", reason) for reason in (CROSS, MASK, SPARSE_OFF, DENSE_LAYER, DENSE_PHASE)),
    *(("ineligible", reason) for reason in (*OBSTACLES, *REFUSALS)),
)


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Dense attention under a mask: q, k, v [B, T, H, D]; GQA allowed.

    Args:
        mask: broadcastable to [B, H, Tq, Tk]; bool with True = attend, or numbers to add.
    """
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    grouped = q.shape[1] != k.shape[1]
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)
    return out.transpose(1, 2)


class SparseAttention:
    """Attention of a configuration, for `workbench.models` or any model that calls it like one.

    Args:
        config: a whole file, its attention part, one algorithm, or `None` for dense attention.
        num_layers: of the model; dense layers that it does not have are refused.
        dense: the baseline's dense attention. Dense calls are handed to it as they are, so that
            "sparse off" equals the baseline bit for bit.
        masked: dense attention that honours a mask: (q, k, v, mask) -> output.
        checkpoint_config: the checkpoint's config.json with a SkipSoftmax calibration.
        module_names: name of every layer's attention module, for the checkpoint's `ignore` list.
        gate: `model` takes VSA's gate from the call and insists on it; `zero` leaves the coarse
            branch out (training-free top-k).
        quantise_dense: with a quantised configuration, whether calls of dense layers and phase are
            quantised too, as the server does, or go to `dense`.
        sink_start, sink_tokens: Sol-Attn's sink, see `blockattn.sol_attention`. The query rows of
            the sink are attended densely.
        key_tokens: keys of the whole sequence, where k holds one rank's part of it.
        taus: Sol-Attn's tau of every layer, in place of the configuration's one; files for ComfyUI
            hold them.
        impl: implementation of the sparse calls; a name that cannot serve a call raises.
        strict: raise where a call would go dense unintended or lacks its denoising time; `None`
            reads WORKBENCH_STRICT.
        record: keep `records`, one per call, with the delivered density (waits for the device).

    Raises:
        TypeError, ValueError: an argument is not allowed, or does nothing with this configuration.
        UnsupportedError: a recipe that exists only on the server.

    Replaying a captured CUDA graph adds nothing to counters and records. Compiled code counts;
    publish the time with `begin_step` there, so that each phase compiles once.
    """

    def __init__(
        self,
        config: AnyConfig,
        *,
        num_layers: int | None = None,
        dense: AttentionFn = dense_attention,
        masked: MaskedAttentionFn = masked_attention,
        checkpoint_config: Mapping[str, Any] | None = None,
        module_names: Sequence[str] | None = None,
        gate: str = "model",
        quantise_dense: bool = True,
        sink_start: int | None = None,
        sink_tokens: int = 0,
        key_tokens: int | None = None,
        taus: Sequence[float] | None = None,
        impl: str = "auto",
        strict: bool | None = None,
        record: bool = False,
    ) -> None:
        self.dense, self.masked = dense, masked
        self.strict = strict_from_environment() if strict is None else checks.flag("strict", strict)
        self.quantise_dense = checks.flag("quantise_dense", quantise_dense)
        self.config = as_attention_config(config)
        if not self.quantise_dense and self.config.quant_attention_config is None:
            raise ValueError("quantise_dense=False: nothing is quantised here; drop it")
        self._layers = num_layers if module_names is None else len(module_names)
        if num_layers is not None:
            checks.integer("num_layers", num_layers, minimum=1)
        record = checks.flag("record", record)
        self.log = CallLog(KNOWN, layers=self._layers or None, record=record)
        self._mechanism, self._quantised = lower(
            self.config,
            Surroundings(
                num_layers=num_layers or self._layers or None,
                checkpoint_config=checkpoint_config,
                module_names=module_names,
                gate=gate,
                sink_start=sink_start,
                sink_tokens=sink_tokens,
                key_tokens=key_tokens,
                taus=taus,
                impl=impl,
                dense=dense,
                warn=self.log.warn_once,
            ),
        )
        self._published: StepTime | None = None
        self._phase: int | None = None
        self._last_read: tuple[Tensor, int, StepTime | None] | None = None

    @property
    def cutoff(self) -> float | None:
        """The resolved end of the dense phase; `None` without one."""
        return None if self._mechanism is None else self._mechanism.cutoff

    def begin_step(self, time: float | Tensor | None) -> None:
        """Publishes the denoising time of the step to all layers: the one read of it on the host.

        Args:
            time: a number or a tensor of times, of which the largest counts; `None` withdraws it.

        Raises:
            TypeError, ValueError: no real number in [0, 1]. RuntimeError: a device tensor while a
            CUDA graph is captured.
        """
        unread = isinstance(time, Tensor) and self.cutoff is None and not self.log.record
        self._published = None if unread else step_time(time)
        self._phase = self._phase_of(self._published)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        call: AttentionCall,
        *,
        mask: Tensor | None = None,
        cross: bool = False,
        refused: tuple[str, str] | None = None,
    ) -> Tensor:
        """Attention output [B, Tq, Hq, D].

        Args:
            q, k, v: [B, T, H, D].
            call: has `layer`, `step`, `time`, `grid` and, for VSA, `gate`; where text attends too,
                `prefix` and `suffix`.
            mask: goes to `masked`, see `masked_attention`.
            cross: k and v come from another sequence, even one of equal length.
            refused: why the model cannot hand this call to a sparse path: a reason of `REFUSALS`
                and what was found.
        """
        checks.flag("cross", cross)
        self._check_layer(call.layer)
        time, phase = self._now(call)
        verdict = self._decide(
            q, k, v, call.layer, phase, mask=mask is not None, cross=cross, refused=refused
        )
        missing = self.cutoff is not None and phase is None and verdict.kind == "sparse"
        if verdict.kind == "ineligible":
            self._not_served(verdict, call.layer)
        if missing:
            self._without_time(call.layer)
        out, trace = self._run(verdict, q, k, v, call, mask)
        self.log.count(verdict, layer=call.layer, missing_time=missing)
        if self.log.record:
            self.log.records.append(_record(verdict, call, time, trace, missing))
        return out

    def graph_key(self, time: float | Tensor | None = None) -> Knobs:
        """Every setting that changes what a call launches, as (name, value) pairs.

        A CUDA graph serves one key. Its `sparse_attn_phase` (0 dense, 1 sparse) is there only when
        the configuration has a cutoff and the time is known.

        Args:
            time: of the step; by default the one published by `begin_step`.
        """
        sparse = self.config.sparse_attention_config
        key: list[tuple[str, Any]] = [("algorithm", None if sparse is None else sparse.algorithm)]
        if self._mechanism is not None:
            key += self._mechanism.knobs()
        if self._quantised is not None:
            key += [*self._quantised.knobs(), ("quantise_dense", self.quantise_dense)]
        key.append(("record", self.log.record))
        moment = self._published if time is None or self.cutoff is None else step_time(time)
        phase = self._phase_of(moment)
        if phase is not None:
            key.append(("sparse_attn_phase", phase))
        return tuple(key)

    def goes_dense(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> bool:
        """Whether a call with these arguments would be handed to `dense` as it is."""
        _, phase = self._now(call)
        verdict = self._decide(q, k, v, call.layer, phase, mask=False, cross=False)
        return verdict.kind != "sparse" and not self._quantises(verdict.reason)

    def counts(self, layer: int | None = None) -> CallCounts:
        """How many calls went where since the last reset, in one layer or in all.

        Raises:
            ValueError: a layer, without `num_layers` or beyond it.
        """
        return self.log.counts(layer)

    @property
    def records(self) -> list[CallRecord]:
        """Every call since the last reset, with `record=True`."""
        return self.log.records

    def reset(self) -> None:
        """Forgets counters, records, given warnings and the published time."""
        self.log.reset()
        self._published = self._phase = self._last_read = None

    def _check_layer(self, layer: object) -> None:
        """A layer of another type would be in no list of dense layers; one too many, in no model.

        Plain comparisons, which `torch.compile` follows.
        """
        if isinstance(layer, bool) or not isinstance(layer, int):
            raise TypeError(f"call.layer={layer!r}: expected an integer, 0 = first layer")
        if layer < 0 or (self._layers is not None and layer >= self._layers):
            known = "" if self._layers is None else f" and below the model's {self._layers} layers"
            raise ValueError(
                f"call.layer={layer}: must be at least 0{known}; correct num_layers or module_names"
            )

    def _phase_of(self, time: StepTime | None) -> int | None:
        return None if time is None or self.cutoff is None else time.phase(self.cutoff)

    def _now(self, call: AttentionCall) -> tuple[StepTime | None, int | None]:
        """Time and phase of a call."""
        if self._published is not None and torch.compiler.is_compiling():
            # A time that is looked at would be guarded, and every step would compile anew.
            return self._published, self._phase
        time = self._time(call)
        return time, self._phase_of(time)

    def _time(self, call: AttentionCall) -> StepTime | None:
        """The published time, else the call's; two that differ are an error."""
        own: Any = call.time
        if isinstance(own, Tensor):
            return self._published or self._read_once(own)
        moment = step_time(own, name="call.time")
        if self._published is None or moment is None:
            return self._published or moment
        if self._published.rounded(moment.value) != self._published.value:
            raise ValueError(
                f"call.time={moment.value}: begin_step published {self._published.value} for this "
                "step; call begin_step(time) at every step with the time the layers get, or never"
            )
        return self._published

    def _read_once(self, time: Tensor) -> StepTime | None:
        """Layers of one step hand over the same tensor, which is read at the first of them."""
        if self.cutoff is None and not self.log.record:
            return None
        last = self._last_read
        if last is None or last[0] is not time or last[1] != time._version:
            self._last_read = last = (time, time._version, step_time(time, name="call.time"))
        return last[2]

    def _decide(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: int,
        phase: int | None,
        *,
        mask: bool,
        cross: bool,
        refused: tuple[str, str] | None = None,
    ) -> Verdict:
        if cross or (q.ndim == k.ndim == 4 and q.shape[1] != k.shape[1]):
            return Verdict("dense", CROSS)
        if mask:
            return Verdict("dense", MASK)
        intended = self._intended(layer, phase)
        if intended is not None and not self._quantises(intended.reason):
            return intended
        recipe = None if self._quantised is None else self._quantised.recipe
        found = refused or obstacle(q, k, v, recipe)
        if found is not None:
            return Verdict("ineligible", *found)
        return intended or SPARSE

    def _intended(self, layer: int, phase: int | None) -> Verdict | None:
        """Why the configuration itself keeps a call dense."""
        mechanism = self._mechanism
        if mechanism is None:
            return Verdict("dense", SPARSE_OFF)
        if mechanism.keeps_dense(layer):
            return Verdict("dense", DENSE_LAYER)
        if phase == DENSE:
            return Verdict("dense", DENSE_PHASE)
        return None

    def _quantises(self, reason: str) -> bool:
        """Whether a call that stays dense for that reason runs on quantised operands."""
        return self._quantised is not None and (reason == SPARSE_OFF or self.quantise_dense)

    def _run(
        self,
        verdict: Verdict,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        call: AttentionCall,
        mask: Tensor | None,
    ) -> Outcome:
        trace = self.log.record
        if verdict.kind == "sparse" and self._mechanism is not None:
            return self._mechanism.run(q, k, v, call, trace=trace)
        if mask is not None:
            return self.masked(q, k, v, mask), None
        intended = verdict.reason in (SPARSE_OFF, DENSE_LAYER, DENSE_PHASE)
        if intended and self._quantised is not None and self._quantises(verdict.reason):
            return self._quantised.run(q, k, v, trace=trace)
        return self.dense(q, k, v, call), None

    def _not_served(self, verdict: Verdict, layer: int) -> None:
        message = (
            f"layer {layer}: the configured attention cannot serve this call and "
            f"{{}} ({verdict.reason}: {verdict.detail})"
        )
        if self.strict:
            raise UnsupportedError(message.format("strict mode lets nothing go dense unasked"))
        self.log.warn_once(verdict.reason, message.format("dense attention runs instead"))

    def _without_time(self, layer: int) -> None:
        message = (
            f"disabled_until_timestep={self.cutoff}: no denoising time reached the attention of "
            f"layer {layer}; {{}}. Call begin_step(time) before the model, or give it its time as "
            "a float"
        )
        if self.strict:
            raise ValueError(message.format("strict mode does not guess the phase"))
        self.log.warn_once(
            "missing time", message.format("it runs sparse as if past the cutoff, at every step")
        )


def strict_from_environment() -> bool:
    """WORKBENCH_STRICT: `1` is strict, `0` and unset are not.

    Raises:
        ValueError: another value.
    """
    value = os.environ.get(STRICT_VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{STRICT_VARIABLE}={value!r}: must be 0 or 1")
    return value == "1"


def _record(
    verdict: Verdict, call: AttentionCall, time: StepTime | None, trace: Any, missing: bool
) -> CallRecord:
    ran = ("dense", "baseline", 1.0, ())
    if trace is not None:
        ran = (trace.algorithm, trace.impl, trace.density, trace.emulated)
    return CallRecord(
        call.layer,
        call.step,
        None if time is None else time.value,
        verdict.kind,
        verdict.reason,
        verdict.detail,
        *ran,
        note="no denoising time: ran as if past the cutoff" if missing else "",
        reasons=() if trace is None else tuple(map(str, trace.reasons)),
    )
