"""Everything around the kernels of `blockattn`: capture, analysis, figures, widgets, commands.

Importing this package costs nothing: it imports no other module. `blockattn` is below it and
knows nothing of it. `workbench.attach` is fetched when it is first used.
"""

from importlib import import_module

__version__ = "0.1.0"

_FETCHED = {"attach": "workbench.diffusers"}


def __getattr__(name: str) -> object:
    if name not in _FETCHED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_FETCHED[name]), name)
