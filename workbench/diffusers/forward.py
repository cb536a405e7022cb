"""What the current forward call of a transformer is about: time, step, token grid, text lengths.

A hook in front of the transformer reads them from its arguments, once for all layers, so they are
those of the actual call: also with a shifted schedule, per-token times, and without a pipeline.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from workbench.attention import SparseAttention
from workbench.attention.log import Verdict
from workbench.attention.phase import capturing, step_time
from workbench.attention.policy import CROSS
from workbench.diffusers.families import Family, Grid

CROSS_CALL = Verdict("dense", CROSS)
HALVES = (torch.bfloat16, torch.float16)
# With fullgraph=True Dynamo refuses what is kept outside of graphs, and says why in these words.
ENDS_GRAPH = (
    "observe= and record=True look at every call, which ends a graph: compile without "
    "fullgraph=True, or attach without them"
)


class Clock:
    """Counts denoising steps by the times of the forward calls, of all transformers of a pipeline.

    A lower time than before is the next step, the same time the same step (guidance in separate
    calls), a higher time the first step of another run.
    """

    def __init__(self) -> None:
        self.step: int | None = None
        self._last: float | None = None

    def tick(self, time: float) -> int:
        """The step of a forward call at that time."""
        if self.step is None or self._last is None or time > self._last:
            self.step = 0
        elif time < self._last:
            self.step += 1
        self._last = time
        return self.step

    def reset(self) -> None:
        """The next call is the first step of a run."""
        self.step = self._last = None


class Forward:
    """The forward call that runs, or ran last.

    Args:
        name: of the transformer in its pipeline.
        model: the transformer (not its compiled wrapper).
        family: what is known of it.
        attention: gets the time of every call.
        clock: counts steps.
        train_timesteps: the time argument at full noise.
        scheduler: of the pipeline, if there is one; knows the times that a 16-bit argument rounds.
        watched: whether somebody looks at steps and times, which costs one wait for the device.
        compiled: whether the model is compiled and calls are also seen outside the graph, where
            values can be read.
    """

    def __init__(
        self,
        name: str,
        model: Any,
        family: Family,
        attention: SparseAttention,
        *,
        clock: Clock,
        train_timesteps: int,
        scheduler: Any,
        watched: bool,
        compiled: bool,
    ) -> None:
        self.name = name
        self.family, self.attention, self.clock = family, attention, clock
        self.train_timesteps = train_timesteps
        self._scheduler = scheduler
        self.grid: Grid | None = None
        self.step: int | None = None
        self.time: float | None = None
        self.text_lengths: tuple[int, ...] | None = None
        self.batch = 0
        self.attended: Counter[int] = Counter()  # samples so far, by layer; counted if observed
        self.order = "raster"  # of the video tokens in the blocks, see workbench.diffusers.order
        self._config = model.config
        self._names = tuple(inspect.signature(type(model).forward).parameters)[1:]
        self._watched = watched or attention.log.record
        self._compiled = compiled
        self._by_hand = False
        # Of a model that is compiled while it is attached, this hook is a part of the graph. Who
        # looks at its calls breaks the graph in any case, and would find no step in them.
        self._begin_outside: Any = torch.compiler.disable(Forward.begin, reason=ENDS_GRAPH)

    def hook(self) -> Callable[..., None]:
        """Goes in front of the transformer, with keyword arguments."""
        return _Hook(self)

    def begin(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Reads the arguments of a forward call."""
        inside = torch.compiler.is_compiling()
        if inside and self._compiled:
            return
        if inside and self._watched:
            self._begin_outside(self, args, kwargs)
            return
        given = {**dict(zip(self._names, args)), **kwargs}
        self.grid = self.family.grid(self._config, given)
        if inside:  # a graph cannot read the values of tensors
            self.text_lengths = None
            if not self._by_hand:
                self.attention.begin_step(None)
            return
        self.text_lengths = self._read_text(given)
        self.batch = len(given["hidden_states"])
        self.attended.clear()
        if not self._by_hand:
            self._publish(given.get("timestep"))

    def begin_step(self, time: float | Tensor | None) -> None:
        """Publishes a time by hand, normalised, until `None` gives it back to the hook."""
        self._by_hand = time is not None
        self.attention.begin_step(time)
        self._note(time)

    def _publish(self, timestep: float | Tensor | None) -> None:
        if isinstance(timestep, Tensor) and timestep.dtype in HALVES:
            # Looking waits for the device, so nobody may look in vain.
            wanted = self._watched or self.attention.cutoff is not None
            exact = wanted and not capturing(timestep)
            timestep = self._unrounded(timestep) if exact else timestep.float()
        time = self._normalised(timestep)
        self.attention.begin_step(time)
        self._note(time)

    def _unrounded(self, timestep: Tensor) -> Tensor:
        """A time that the pipeline rounded to 16 bits (as Mochi's does), as its scheduler has it.

        Rounded, 1 - t makes several steps of a schedule equal and moves others across a cutoff.
        """
        times, values = getattr(self._scheduler, "timesteps", None), timestep.unique()
        if not isinstance(times, Tensor) or len(values) != 1:
            return timestep.float()
        same = (times.to(values) == values).nonzero().flatten().tolist()
        step = getattr(self._scheduler, "step_index", 0) or 0  # before its first step it is None
        if len(same) > 1 and step in same:
            same = [step]
        return times[same[0]] if len(same) == 1 else timestep.float()

    def _normalised(self, timestep: float | Tensor | None) -> float | Tensor | None:
        """Denoising time of a time argument: 1 at full noise."""
        if timestep is None:
            return None
        if self.family.falling:
            return timestep / self.train_timesteps
        if not isinstance(timestep, Tensor):
            return 1 - timestep / self.train_timesteps
        kept = torch.promote_types(timestep.dtype, torch.float32)
        return (1 - timestep.double() / self.train_timesteps).to(kept)  # rounded once

    def _note(self, time: float | Tensor | None) -> None:
        moment = step_time(time, name="timestep") if self._watched else None
        self.time = None if moment is None else moment.value
        self.step = None if moment is None else self.clock.tick(moment.value)

    def _read_text(self, given: Mapping[str, Any]) -> tuple[int, ...] | None:
        mask = given.get(self.family.text_mask) if self.family.text_mask else None
        return None if mask is None else tuple(mask.bool().sum(1).tolist())


class _Hook:
    """A copy or a pickle of the model gets a hook that does nothing."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        del module
        self._forward.begin(args, kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[()]]:
        return _idle, ()


class Outside:
    """In front of a model that was compiled in place: hooks are part of its graph."""

    def __init__(self, forward: Forward, run: Callable[..., Any]) -> None:
        self._forward, self._run = forward, run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._forward.begin(args, kwargs)
        return self._run(*args, **kwargs)


class CrossCount:
    """Hook behind a cross-attention module: counts the call, which stays as it is."""

    def __init__(self, attention: SparseAttention, layer: int) -> None:
        self._attention, self._layer = attention, layer

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        del module, args, output
        self._attention.log.count(CROSS_CALL, layer=self._layer)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[()]]:
        return _idle, ()


def _idle() -> Callable[..., None]:
    return _nothing


def _nothing(*args: Any) -> None:
    del args
