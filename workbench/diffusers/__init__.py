"""Sparse attention inside the video transformers of diffusers, which stay as they are."""

from workbench.diffusers.attach import Attachment, attach

__all__ = ["Attachment", "attach"]
