"""Where the bundled files are: in the checkout, or inside the installed package.

A wheel carries `data/` and `notebooks/` inside the package `workbench` (see pyproject.toml); a
checkout and an editable installation have them beside it.
"""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
# Files in data_dir(); named here so that a plan or a command can name them without loading torch.
BUNDLED_WEIGHTS = "tiny_video_dit.safetensors"
VSA_WEIGHTS = "tiny_video_dit_vsa.safetensors"  # fine-tuned with VSA, with its gate


def checkout_dir() -> Path | None:
    """Root of the source checkout this package runs from, or None for an installed wheel."""
    root = _PACKAGE.parent
    return root if (root / "pyproject.toml").is_file() else None


def data_dir() -> Path:
    """Folder with the bundled weights and captures.

    Raises:
        FileNotFoundError: neither place holds the folder; the message names both.
    """
    return _bundled("data")


def notebooks_dir() -> Path:
    """Folder with the notebooks.

    Raises:
        FileNotFoundError: neither place holds the folder; the message names both.
    """
    return _bundled("notebooks")


def _bundled(name: str) -> Path:
    root = checkout_dir()
    # The checkout comes first: a developer edits that one.
    places = [_PACKAGE / name] if root is None else [root / name, _PACKAGE / name]
    for place in places:
        if place.is_dir():
            return place
    looked = ", ".join(str(place) for place in places)
    raise FileNotFoundError(
        f"the bundled folder {name!r} is missing (looked at {looked}); "
        "install from a complete checkout: pip install -e ."
    )
