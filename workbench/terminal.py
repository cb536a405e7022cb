"""What the commands print through: a console that keeps its text, and plain tables."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table


def recording_console(width: int) -> Console:
    """The terminal, or plain text of ``width`` columns where nobody watches; both keep the text."""
    watched = sys.stdout.isatty()
    return Console(record=True, highlight=False, width=None if watched else width)


def plain_table(title: str) -> Table:
    """A table without lines, its bold title above it on the left."""
    return Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
