"""A small table that a notebook shows, with a plain text for readers who do not see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True)
class Table:
    """Rows under named columns, aligned to the left.

    Attributes:
        columns: their names.
        rows: a text for each column.
        caption: what the table says, shown above it.

    Raises:
        ValueError: a row of another length than the columns.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    caption: str = ""

    def __post_init__(self) -> None:
        for number, row in enumerate(self.rows):
            if len(row) != len(self.columns):
                raise ValueError(
                    f"rows[{number}] has {len(row)} cells, but there are {len(self.columns)} "
                    "columns; give one cell for each"
                )

    def __repr__(self) -> str:
        lines = [[str(cell) for cell in row] for row in (self.columns, *self.rows)]
        widths = [max(len(line[n]) for line in lines) for n in range(len(self.columns))]
        texts = ["  ".join(c.ljust(w) for c, w in zip(line, widths)).rstrip() for line in lines]
        return "\n".join(([self.caption] if self.caption else []) + texts)

    def _repr_html_(self) -> str:
        style = ' style="text-align:left"'
        head = "".join(f"<th{style}>{escape(name)}</th>" for name in self.columns)
        body = "".join(
            "<tr>" + "".join(f"<td{style}>{escape(str(cell))}</td>" for cell in row) + "</tr>"
            for row in self.rows
        )
        caption = f"<caption{style}>{escape(self.caption)}</caption>" if self.caption else ""
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
