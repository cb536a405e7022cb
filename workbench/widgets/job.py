"""Long work in a thread: a bar with the time left, a button that cancels, stale results dropped."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import ipywidgets as widgets

Tick = Callable[[str], None]
Work = Callable[[Tick], Any]


class Cancelled(Exception):
    """Raised inside the work by its next tick, after somebody cancelled it."""


class _Run:
    """One start of the work."""

    def __init__(self, steps: int):
        self.steps, self.done, self.began = steps, 0, time.monotonic()
        self.stop = threading.Event()


class Job:
    """Runs one piece of work at a time.

    In a running event loop (a notebook kernel) the work goes to a thread, so that the page stays
    alive; without one it runs at once. A new start cancels the one before, whose result is dropped.

    Args:
        done: called with the result.
        failed: called with an exception, where there is no caller left to see it.

    Attributes:
        box: bar, text and button; hidden until the first start.
    """

    def __init__(self, done: Callable[[Any], None], failed: Callable[[Exception], None]):
        self._done, self._failed = done, failed
        self._run: _Run | None = None
        self._alone = threading.Lock()
        self._bar = widgets.IntProgress(min=0, layout={"width": "260px"})
        self._text = widgets.HTML()
        self._button = widgets.Button(description="Cancel", icon="stop", layout={"width": "100px"})
        self._button.on_click(lambda _: self.cancel())
        self.box = widgets.HBox(
            [self._bar, self._button, self._text],
            layout={"display": "none", "align_items": "center"},
        )

    @property
    def running(self) -> bool:
        """Whether work is under way."""
        return self._run is not None

    @property
    def text(self) -> str:
        """Progress in words."""
        return self._text.value

    def start(self, work: Work, steps: int) -> None:
        """Starts the work; ``work(tick)`` calls ``tick(label)`` before each of its ``steps``.

        Raises:
            Exception: what the work raises, if there is no event loop.
        """
        if self._run is not None:
            self._run.stop.set()
        self._run = run = _Run(steps)
        self._bar.max, self._bar.value = steps, 0
        self._text.value = "starting"
        self.box.layout.display, self._button.disabled = None, False
        loop = _running_loop()
        if loop is None:
            self._finish_here(run, work)
            return
        future = loop.run_in_executor(None, self._work, run, work, loop)
        future.add_done_callback(lambda ended: self._finish(run, ended))

    def cancel(self) -> None:
        """Asks the work to stop at its next step."""
        if self._run is not None:
            self._run.stop.set()
            self._button.disabled = True
            self._text.value = "stopping …"

    def _work(self, run: _Run, work: Work, loop: asyncio.AbstractEventLoop) -> Any:
        with self._alone:  # what was cancelled ends before the next piece begins
            return work(lambda label: self._tick(run, label, loop))

    def _tick(self, run: _Run, label: str, loop: asyncio.AbstractEventLoop | None) -> None:
        if run.stop.is_set():
            raise Cancelled
        run.done += 1
        if loop is None:
            self._show(run, run.done, label)
        else:
            loop.call_soon_threadsafe(self._show, run, run.done, label)

    def _show(self, run: _Run, number: int, label: str) -> None:
        if run is not self._run or run.stop.is_set():
            return
        self._bar.value = number - 1
        finished = max(number - 1, 0)
        left = (time.monotonic() - run.began) / finished * (run.steps - finished) if finished else 0
        ahead = f", about {left:.0f} s left" if finished else ""
        self._text.value = f"{label}: step {number} of {run.steps}{ahead}"

    def _finish_here(self, run: _Run, work: Work) -> None:
        try:
            result = work(lambda label: self._tick(run, label, None))
        finally:
            self._run = None
            self._end("failed")
        self._end("done")
        self._done(result)

    def _finish(self, run: _Run, ended: asyncio.Future[Any]) -> None:
        if run is not self._run:
            ended.exception()  # dropped, and so it is not reported as never looked at
            return
        self._run = None
        error = ended.exception()
        if isinstance(error, Cancelled):
            self._end(f"cancelled after {max(run.done - 1, 0)} of {run.steps} steps")
        elif isinstance(error, Exception):
            self._end("failed")
            self._failed(error)
        else:
            self._bar.value = run.steps
            self._end("done")
            self._done(ended.result())

    def _end(self, text: str) -> None:
        self._button.disabled = True
        self._text.value = text


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
