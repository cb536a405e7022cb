"""The packages that pipelines need, fetched late, with the command where one is missing."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from packaging.version import Version

# Transformers holds the text encoders; without accelerate no Wan transformer can be read from disk.
PACKAGES = ("diffusers", "transformers", "accelerate")


def diffusers_package() -> Any:
    """The package diffusers.

    Raises:
        ModuleNotFoundError: it, or one that its pipelines need, is missing or does not load.
    """
    for name in PACKAGES:
        try:
            import_module(name)
        except (ImportError, OSError) as error:
            raise ModuleNotFoundError(
                f"{name} cannot be imported ({error}): pip install {' '.join(PACKAGES)}"
            ) from error
    return import_module(PACKAGES[0])


def dtype_argument() -> str:
    """What `from_pretrained` calls the type of the weights; 0.42 renamed it."""
    return "dtype" if Version(diffusers_package().__version__) >= Version("0.42") else "torch_dtype"
