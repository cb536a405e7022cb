"""How much memory recording takes beside the model, known before it starts."""

from __future__ import annotations

import math
from typing import NamedTuple

from workbench.capture.background import BUFFERS, host_bytes
from workbench.capture.format import PARTS, CaptureSpec

SLACK = 2**24  # of the allocators, which neither give every page back nor fit sizes exactly


class Memory(NamedTuple):
    """Bytes on the host and on the GPU."""

    host: int
    device: int


def recording_memory(spec: CaptureSpec, *, gpu: bool = False) -> Memory:
    """The most that a recorder of this spec takes, for models of up to 4 bytes a number.

    On a CPU: the chosen part of q, k and v as the model has it, and a copy of one of them in
    bfloat16. On a GPU: pinned buffers on the host; on the device the chosen part and a copy for
    every buffer. Slack for the allocator comes on top.
    """
    chosen = 0 if spec.selection.whole else 2 * spec.entry_bytes
    if gpu:
        return Memory(host_bytes(spec), chosen + BUFFERS * spec.entry_bytes + SLACK)
    largest = max(math.prod(spec.part_shape(part)) for part in PARTS)
    return Memory(chosen + 2 * largest + SLACK, 0)
