"""What an export or import gives: a text or a configuration, what to know beside it, or why not."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.config import VisualGenConfig


class NotExpressible(ValueError):
    """One side has no way to say what the other side says.

    Attributes:
        target: name of the target, such as ``sglang``.
        field: the field that cannot be said, with its value where it has one.
        why: what the target lacks.
        fix: what to change.
    """

    def __init__(self, target: str, field: str, why: str, fix: str) -> None:
        super().__init__(f"{target}: {field}: {why}. {fix}")
        self.target, self.field, self.why, self.fix = target, field, why, fix


@dataclass(frozen=True)
class Exported:
    """A text in a target's format.

    Attributes:
        text: complete, ends with a newline.
        notes: what the text cannot carry and does not change the computation: how to pass it, and
            which of two equal things the target chooses itself.
    """

    text: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Imported:
    """A configuration read from a target's format, and what to know about it."""

    config: VisualGenConfig
    notes: tuple[str, ...] = ()
