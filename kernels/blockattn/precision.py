"""Autocast stays outside: the dtype of q, k and v decides what is computed, and in which precision.

``torch.autocast`` casts the operands of every matrix product, also those of float32 statistics:
another block would be routed, and a float32 call would return bfloat16, both without a word.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def own_precision() -> Iterator[None]:
    """Switches autocast off inside, on every kind of device that a call may run on."""
    with ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield
