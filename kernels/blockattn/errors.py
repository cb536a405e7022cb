"""Exceptions of the kernel stack and the reasons they carry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Reason:
    """Why one implementation did not serve a call, in words a user can act on."""

    impl: str
    text: str

    def __str__(self) -> str:
        return f"{self.impl}: {self.text}"


class UnsupportedError(RuntimeError):
    """A named implementation cannot serve the call; ``reasons`` holds one entry per obstacle."""

    def __init__(self, message: str, reasons: Sequence[Reason] = ()) -> None:
        self.reasons = tuple(reasons)
        lines = [message, *(f"  - {reason}" for reason in self.reasons)]
        super().__init__("\n".join(lines))
