"""Packages of others behind an adapter: whether one is here, loads, and which version it is.

A package that is missing or does not load is tolerated, and its exception kept as the cause of the
refusal. Any other exception of an import (AttributeError, TypeError: a mixture of versions) is a
fault of the installation and stays loud; `workbench doctor` names the mixture.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module, metadata
from typing import Any

import torch

from blockattn.layout import whole_16_bytes
from blockattn.problem import Problem

DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Library:
    """A distribution and the module of it that an adapter calls.

    Attributes:
        distribution: its name for the installer.
        module: what is imported, at the first call that nothing else speaks against.
        extra: of this project, which installs it.
    """

    distribution: str
    module: str
    extra: str

    def absent(self) -> list[str]:
        """Why it is not installed, without importing it."""
        if self.version() is not None:
            return []
        return [f"{self.distribution} is not installed; the extra {self.extra} has it"]

    def unloadable(self) -> list[str]:
        """Why it is installed and cannot be imported; imports it, once."""
        if self.module not in _tried:
            _tried[self.module] = _failure(self.module)
        error = _tried[self.module]
        if error is None:
            return []
        name = f"{self.distribution} {self.version()}"
        return [f"{name} cannot be imported: {type(error).__name__}: {error}"]

    def version(self) -> str | None:
        return _version(self.distribution)

    def cause(self) -> ImportError | OSError | None:
        """The exception behind :meth:`unloadable` once that was asked, to be chained."""
        return _tried.get(self.module)

    def load(self) -> Any:
        """The module, of a library that nothing speaks against."""
        return import_module(self.module)


_tried: dict[str, ImportError | OSError | None] = {}  # by module: how its import failed, if it did


def _failure(module: str) -> ImportError | OSError | None:
    try:
        import_module(module)
    except (ImportError, OSError) as error:
        return error
    return None


@lru_cache(maxsize=16)
def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def gpu_obstacles(problem: Problem | None, majors: tuple[int, ...]) -> list[str]:
    """The GPU that a call, or with ``None`` this machine, would use is not one of those served."""
    if problem is None and not torch.cuda.is_available():
        return ["needs a CUDA GPU"]
    if problem is not None and problem.q.device.type != "cuda":
        return [f"q is on {problem.q.device}, needs a CUDA GPU"]
    device = None if problem is None else problem.q.device
    if torch.cuda.get_device_capability(device)[0] in majors:
        return []
    served = " and ".join(f"{major}.x" for major in majors)
    return [f"{torch.cuda.get_device_name(device)}: serves compute capability {served}"]


def tensor_obstacles(problem: Problem, dims: tuple[int, ...]) -> list[str]:
    """What kernels for 16-bit tensors with floats as scales cannot take."""
    found = []
    tensors = (problem.q, problem.k, problem.v)
    on_gpu = problem.q.device.type == "cuda"
    if problem.operands is not None:
        found.append("codes of quantised operands, serves plain tensors")
    if problem.q.dtype not in DTYPES:
        found.append(f"dtype {problem.q.dtype}, serves bfloat16 and float16")
    if problem.q.shape[3] not in dims:
        found.append(f"head dim {problem.q.shape[3]}, serves {', '.join(map(str, dims))}")
    if any(x.numel() == 0 for x in tensors):
        found.append("an empty sequence")
    if on_gpu and not all(x.stride(3) == 1 and whole_16_bytes(x) for x in tensors):
        found.append("q, k or v are not aligned to 16 bytes with contiguous channels")
    if problem.skip_threshold is not None:
        found.append("a skip threshold")
    if isinstance(problem.scale, torch.Tensor):
        found.append("a scale on the device, serves a float")
    if isinstance(problem.scale_output, torch.Tensor) or problem.scale_output != 1.0:
        found.append("scale_output, serves 1")
    return found


def key_lists(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact key blocks of every query block, ascending, as far as the counts go.

    Returns:
        index int32 ``[B, H, Nq, Nk]`` and count int32 ``[B, H, Nq]``, on the device.
    """
    if problem.lists is not None:
        return problem.lists
    route = problem.route
    if route is None:
        raise ValueError("route=None: only a call with a route has lists of key blocks")
    if problem.q.device.type != "cuda":
        return route.lists()
    from blockattn.impl.triton.lists import row_lists

    return row_lists(route.words, route.grid[1])
