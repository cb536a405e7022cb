"""A kernel that comes up while the one before it ends (programmatic dependent launch, 9.0 on).

``arrived`` lets the next kernel of the stream take the processors that this one leaves free;
``awaited`` holds a program until the kernel before it is done and its writes are seen. A program
touches nothing that the kernel before writes until then. At least one program of such a kernel must
wait: when it is done, all that came before is done as well, for whatever follows it. A program that
does not wait has to follow a kernel launched in the ordinary way, which begins after all others.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda


@triton.jit
def awaited(EARLY: tl.constexpr):
    """Everything before this kernel is done."""
    if EARLY:
        cuda.gdc_wait()


@triton.jit
def arrived(EARLY: tl.constexpr):
    """The next kernel may come up once every program has said so."""
    if EARLY:
        cuda.gdc_launch_dependents()


def early(device: torch.device) -> bool:
    """Whether kernels on a device may come up early."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def follows(device: torch.device) -> dict[str, Any]:
    """Launch options of a kernel that waits for the one before it by itself."""
    return {"EARLY": True, "launch_pdl": True} if early(device) else {"EARLY": False}
