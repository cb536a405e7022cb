"""Long work in the background: progress, cancel, errors, and results that came too late."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from workbench.widgets.job import Job, Tick


class Ends:
    """A job with what it reported."""

    def __init__(self) -> None:
        self.results: list[Any] = []
        self.errors: list[Exception] = []
        self.job = Job(self.results.append, self.errors.append)

    async def until(self, happened: Callable[[], object]) -> None:
        for _ in range(2000):
            if happened():
                return
            await asyncio.sleep(0.005)
        raise TimeoutError("did not happen in 10 s")


@pytest.fixture
def ends() -> Ends:
    return Ends()


def counting(tick: Tick) -> str:
    for number in range(3):
        tick(f"part {number}")
    return "whole"


def test_without_an_event_loop_the_work_runs_at_once(ends: Ends):
    assert ends.job.box.layout.display == "none"
    ends.job.start(counting, 3)
    assert ends.results == ["whole"]
    assert ends.job.box.layout.display is None
    assert ends.job.text == "done"
    assert not ends.job.running


def test_without_an_event_loop_an_error_reaches_the_caller(ends: Ends):
    def broken(tick: Tick) -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        ends.job.start(broken, 1)
    assert ends.job.text == "failed"
    assert not ends.job.running


def test_in_an_event_loop_the_page_stays_alive_and_sees_progress(ends: Ends):
    go, seen = threading.Event(), []

    def slow(tick: Tick) -> int:
        tick("first")
        tick("second")
        go.wait(10)
        return threading.get_ident()

    async def use():
        ends.job.start(slow, 4)
        assert ends.job.running
        await ends.until(lambda: "second" in ends.job.text)
        seen.append((ends.job._bar.value, ends.job._bar.max, ends.job.text))
        go.set()
        await ends.until(lambda: not ends.job.running)

    asyncio.run(use())
    value, largest, text = seen[0]
    assert (value, largest) == (1, 4)  # one step has ended
    assert text.startswith("second: step 2 of 4, about ")
    assert ends.results != [threading.get_ident()]
    assert len(ends.results) == 1
    assert ends.job._bar.value == 4


def test_cancel_stops_at_the_next_step_and_gives_no_result(ends: Ends):
    go, steps = threading.Event(), []

    def endless(tick: Tick) -> None:
        while True:
            tick("again")
            steps.append(1)
            go.wait(10)

    async def use():
        ends.job.start(endless, 100)
        await ends.until(lambda: steps)
        ends.job._button.click()
        assert ends.job.text == "stopping …"
        go.set()
        await ends.until(lambda: not ends.job.running)

    asyncio.run(use())
    assert len(steps) == 1
    assert (ends.results, ends.errors) == ([], [])
    assert ends.job.text == "cancelled after 0 of 100 steps"


def test_an_error_in_the_background_is_handed_over(ends: Ends):
    def broken(tick: Tick) -> None:
        raise RuntimeError("lost")

    async def use():
        ends.job.start(broken, 1)
        await ends.until(lambda: not ends.job.running)

    asyncio.run(use())
    assert [str(error) for error in ends.errors] == ["lost"]
    assert ends.job.text == "failed"


def test_a_new_start_drops_what_is_stale_and_never_runs_beside_it(ends: Ends):
    go, at_work, most = threading.Event(), [], []

    def work(name: str) -> Callable[[Tick], str]:
        def run(tick: Tick) -> str:
            at_work.append(name)
            most.append(len(at_work))
            go.wait(10)
            at_work.remove(name)
            return name

        return run

    async def use():
        ends.job.start(work("old"), 1)
        await ends.until(lambda: at_work)
        ends.job.start(work("new"), 1)
        go.set()
        await ends.until(lambda: not ends.job.running)

    asyncio.run(use())
    assert ends.results == ["new"]
    assert most == [1, 1]
