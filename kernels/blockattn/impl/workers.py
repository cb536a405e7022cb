"""Independent pieces of CPU work: one Python thread per core, each with single-threaded torch.

The pieces are short. Splitting every operation of a piece over all cores would wait at a barrier
after each one, which costs little on an idle machine and most of the time on a busy one; whole
pieces in parallel wait only at the end. It also makes results independent of the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Item = TypeVar("Item")
MOST = 16  # threads; with more they wait for the interpreter


def share(items: Sequence[Item], work: Callable[[Iterator[Item]], None]) -> None:
    """Calls ``work`` in every thread with one iterator that all of them draw from.

    Inside, torch's thread count is 1, gradients are off and inference mode is as for the caller;
    afterwards the count is what it was. An exception of a thread is raised here.
    """
    threads = torch.get_num_threads()
    count = min(threads, len(items), MOST)
    source = iter(items)
    if count < 2:
        work(source)
        return
    inference = torch.is_inference_mode_enabled()

    def run() -> None:
        torch.set_num_threads(1)  # of this thread, and what threads started from now on begin with
        with torch.inference_mode(inference), torch.no_grad():
            work(source)

    try:
        with ThreadPoolExecutor(count) as pool:
            running = [pool.submit(run) for _ in range(count)]
        for thread in running:
            thread.result()
    finally:
        torch.set_num_threads(threads)
