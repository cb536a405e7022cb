"""The CuTe DSL stack comes in lanes: sets of versions that were tried together, each an extra.

The packages of a lane follow each other's internals, so that a mixture of two lanes is an
experiment of its own. `.ci/cute` installs each lane and compiles with it.
"""

from __future__ import annotations

from collections.abc import Mapping

LANES: Mapping[str, tuple[str, ...]] = {
    "cute": (
        "nvidia-cutlass-dsl[cu13]==4.6.1",
        "quack-kernels==0.6.2",
        "flash-attn-4==4.0.0b19",
    ),
    "cute-latest": (
        "nvidia-cutlass-dsl[cu13]==4.8.1",
        "quack-kernels==0.6.5",
        "flash-attn-4==4.0.0b36",
        "nvidia-cudnn-frontend==1.32.0",
    ),
}
CUTE_PACKAGES = ("nvidia-cutlass-dsl", "quack-kernels", "flash-attn-4")
CUDA_13_DRIVER = 580  # the first driver for CUDA 13; with an older one the CUDA 12 libraries load

# (cutlass-dsl, quack, flash-attn-4) that install, import and compile flash-attn-4's forward for
# both sm_90a and sm_100a. The lanes, the first and the last of them, also ran on an H200.
TRIED_SETS = frozenset(
    {
        ("4.6.1", "0.6.2", "4.0.0b19"),
        ("4.6.2", "0.6.4", "4.0.0b36"),
        ("4.6.3", "0.6.3", "4.0.0b36"),
        ("4.7.1", "0.6.5", "4.0.0b36"),
        ("4.8.1", "0.6.5", "4.0.0b36"),
    }
)


def pins(lane: str) -> dict[str, str]:
    """Version of each distribution that a lane names."""
    pairs = (line.split("==") for line in LANES[lane])
    return {name.partition("[")[0]: version for name, version in pairs}


def lane_of(versions: Mapping[str, str]) -> str | None:
    """The lane whose every package is installed in its version, None where there is none."""
    whole = (lane for lane in LANES if pins(lane).items() <= versions.items())
    return next(whole, None)


def nearest(versions: Mapping[str, str]) -> str:
    """The lane that most of the installed versions belong to; the first one when they tie."""
    return max(LANES, key=lambda lane: len(pins(lane).items() & versions.items()))


def fix(lane: str) -> str:
    """The command that turns any mixture into a lane."""
    return "pip install " + " ".join(f"'{x}'" if "[" in x else x for x in LANES[lane])


def described(versions: Mapping[str, str]) -> str:
    """The installed packages of the stack, each with the lane that its version belongs to."""
    parts = []
    for name in CUTE_PACKAGES:
        if name in versions:
            owner = next((x for x in LANES if pins(x)[name] == versions[name]), "no lane")
            parts.append(f"{name} {versions[name]} ({owner})")
    return ", ".join(parts)
