"""Captures: q, k, v that a model produced, with where they came from."""

from workbench.capture.reader import (
    QKV,
    Capture,
    CaptureSpec,
    CaptureWriter,
    open_capture,
)

__all__ = [
    "QKV",
    "Capture",
    "CaptureSpec",
    "CaptureWriter",
    "open_capture",
]
