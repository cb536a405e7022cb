"""Runs work once a burst of events has settled; what an event made stale is dropped."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from blockattn import checks


class Debouncer:
    """Calls ``work`` when no request came for ``wait`` seconds.

    In a running event loop (a notebook kernel) a request sets a timer and cancels the one before.
    Without a loop there is nobody to wait for, so a request runs the work at once.

    Args:
        work: called without arguments; it reads the newest state itself.
        wait: seconds of quiet before the work runs.
        max_wait: seconds after which a burst that goes on is served anyway, e.g. a long drag.
    """

    def __init__(self, work: Callable[[], None], wait: float, max_wait: float | None = None):
        self._work = work
        self._wait = checks.finite_number("wait", wait, minimum=0.0)
        limit = self._wait if max_wait is None else max_wait
        self._limit = checks.finite_number("max_wait", limit, minimum=self._wait)
        self._bounded = max_wait is not None
        self._timer: asyncio.TimerHandle | None = None
        self._first: float | None = None

    @property
    def pending(self) -> bool:
        """Whether work was asked for and has not run."""
        return self._first is not None

    def __call__(self) -> None:
        """Asks for the work."""
        loop = _running_loop()
        if loop is None:
            self._run()
            return
        self._stop_timer()
        now = time.monotonic()
        self._first = self._first if self._first is not None else now
        delay = self._wait
        if self._bounded:
            delay = max(0.0, min(delay, self._first + self._limit - now))
        self._timer = loop.call_later(delay, self._run)

    def flush(self) -> bool:
        """Runs pending work now; says whether there was any."""
        if not self.pending:
            return False
        self._run()
        return True

    def cancel(self) -> None:
        """Forgets pending work."""
        self._stop_timer()
        self._first = None

    def _run(self) -> None:
        self.cancel()
        self._work()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
