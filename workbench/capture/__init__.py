"""Captures: q, k, v that a model produced, with where they came from."""

from workbench.capture.format import CaptureSpec
from workbench.capture.memory import recording_memory
from workbench.capture.reader import QKV, Capture, open_capture
from workbench.capture.selection import Selection, spread_blocks
from workbench.capture.writer import CaptureWriter, check_size, check_target

__all__ = [
    "QKV",
    "Capture",
    "CaptureSpec",
    "CaptureWriter",
    "Selection",
    "check_size",
    "check_target",
    "open_capture",
    "recording_memory",
    "spread_blocks",
]
