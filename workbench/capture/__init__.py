"""Captures: q, k, v that a model produced, with where they came from."""

from workbench.capture.format import CaptureSpec
from workbench.capture.reader import QKV, Capture, open_capture
from workbench.capture.writer import CaptureWriter

__all__ = [
    "QKV",
    "Capture",
    "CaptureSpec",
    "CaptureWriter",
    "open_capture",
]
