"""How long the first denoising step of a sampling takes, as an observer of its calls sees it."""

from __future__ import annotations

import time

from workbench.models import AttentionCall


class FirstStep:
    """A clock from the first self-attention call on.

    The first step is the slowest: kernels are compiled and memory is taken in it.
    """

    def __init__(self) -> None:
        self._began: float | None = None
        self._over = False

    def ends_at(self, call: AttentionCall) -> bool:
        """Whether a call is the first of the second step; every call is to be shown, in order.

        The time of that step was read before it, so the device has done the first step by then.
        """
        if self._began is None:
            self._began = time.perf_counter()
        ends = not self._over and bool(call.step)
        self._over = self._over or ends
        return ends

    @property
    def seconds(self) -> float:
        """Since the first call; 0 before it."""
        return 0.0 if self._began is None else time.perf_counter() - self._began
