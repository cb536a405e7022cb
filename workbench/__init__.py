"""Everything around the kernels of `blockattn`: capture, analysis, figures, widgets, commands.

Importing this package costs nothing: it imports no other module. `blockattn` is below it and
knows nothing of it.
"""

__version__ = "0.1.0"
