"""Which device a command runs on."""

from __future__ import annotations

import torch


def choose_device(name: str) -> torch.device:
    """``auto`` is CUDA where there is one.

    Raises:
        ValueError: no device of that name works here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device={name!r}: must be auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device={name!r}: must be auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device={name!r}: this machine has {torch.cuda.device_count()} CUDA devices; "
            "use --device cpu or see workbench doctor"
        )
    return device
