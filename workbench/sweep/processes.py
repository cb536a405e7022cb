"""An executor whose every task has a process of its own.

A crash, an exhausted memory or a leak ends with its task, and says how it ended. The processes die
with the one that started them, so a killed sweep leaves nothing running.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any


@dataclass(frozen=True)
class Failure:
    """How a task failed: ``reason`` in one line, and the traceback, empty when it left none."""

    reason: str
    traceback: str = ""

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Of an exception."""
        text = " ".join(str(error).split())
        trace = "".join(traceback.format_exception(error))
        return cls(f"{type(error).__name__}: {text}" if text else type(error).__name__, trace)


class TaskError(RuntimeError):
    """A task failed in its process; ``failure`` says how."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.reason)
        self.failure = failure

    def __reduce__(self) -> tuple[type[TaskError], tuple[Failure]]:
        return type(self), (self.failure,)


class ProcessPerTask(Executor):
    """Runs each task in a new process, as many at a time as there are places.

    Args:
        places: environment variables of the processes of each place, such as its GPU.
        preload: modules that the processes start with. They are imported once, in a server that
            new processes are forked from, which saves each of them seconds. Without any, processes
            start from nothing, as a GPU's driver wants it.
    """

    def __init__(self, places: Sequence[Mapping[str, str]], preload: Sequence[str] = ()) -> None:
        if not places:
            raise ValueError("places: is empty; give the environment of at least one process")
        self._context: Any = multiprocessing.get_context("forkserver" if preload else "spawn")
        if preload:
            self._context.set_forkserver_preload(list(preload))
        self._places: queue.SimpleQueue[Mapping[str, str]] = queue.SimpleQueue()
        for place in places:
            self._places.put(place)
        self._threads = ThreadPoolExecutor(len(places), "task", _leave_interrupts_to_the_parent)
        self._children: set[Any] = set()
        self._killed = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """The result of ``fn``; everything that goes in or out has to be picklable.

        The future raises :class:`TaskError` when the task raised, or its process died.
        """
        return self._threads.submit(self._in_process, fn, args, kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """With ``wait=False`` it ends the running processes, as dask's executor does."""
        self._killed = not wait
        self._threads.shutdown(wait, cancel_futures=cancel_futures or not wait)
        for child in () if wait else tuple(self._children):
            child.kill()

    def _in_process(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        place = self._places.get()
        receive, send = self._context.Pipe(duplex=False)
        child = self._context.Process(target=_child, args=(send, place, fn, args, kwargs))
        try:
            child.start()
            self._children.add(child)
            if self._killed:  # meanwhile
                child.kill()
            send.close()  # or the end of the child would go unnoticed
            return _result(receive, child)
        finally:
            receive.close()
            self._children.discard(child)
            self._places.put(place)


def _leave_interrupts_to_the_parent() -> None:
    """In a thread that starts processes, which inherit what it blocks.

    Ctrl-C is the parent's to decide; a process that still imports would answer with a traceback.
    """
    resource_tracker.ensure_running()  # or the first process would start it, which unblocks
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def _result(receive: Connection, child: Any) -> Any:
    answer: Any = Failure("")
    with suppress(EOFError):  # it died without a word
        answer = receive.recv()
    child.join()
    if answer == Failure(""):
        answer = Failure(_ending(child.exitcode))
    if isinstance(answer, Failure):
        raise TaskError(answer)
    return answer


def _ending(code: int) -> str:
    """How a process ended that gave no answer."""
    if code >= 0:
        return f"the process ended with exit status {code} and gave no result"
    hint = "; was the memory exhausted?" if code == -signal.SIGKILL else ""
    return f"the process was ended by {signal.Signals(-code).name}{hint}"


def _child(send: Connection, place: Mapping[str, str], fn: Any, args: Any, kwargs: Any) -> None:
    """Runs in the new process."""
    os.environ.update(place)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # for processes that the task itself starts
    threading.Thread(target=_die_with_parent, daemon=True).start()
    try:
        result = fn(*args, **kwargs)
    except BaseException as error:
        send.send(Failure.of(error))
        # The parent has the traceback; printed here it would tear the progress bar apart.
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        raise
    send.send(result)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
