"""Tables of named columns, and their layout in plain text, for notebooks and both commands.

A table is one sequence of columns: every surface that shows it, as text or as HTML, takes header and cells from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Row_contra = TypeVar("Row_contra", contravariant=True)
Cell_co = TypeVar("Cell_co", covariant=True)
Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class Column(Generic[Row_contra, Cell_co]):
    """One column: its name in the header, and its cell of a row."""

    name: str
    cell: Callable[[Row_contra], Cell_co]
    right: bool = False
    """aligned to the right, as numbers are"""
    optional: bool = False
    """left out where no row has anything to show in it"""


def text_table(columns: Sequence[Column[Row, object]], rows: Iterable[Row], text: Callable[[object], str] = str) -> str:
    """Return rows below a header of the columns' names; `text` writes a cell, which stays on its line."""
    cells = [[text(column.cell(row)) for column in columns] for row in rows]
    right = frozenset(n for n, column in enumerate(columns) if column.right)
    return aligned([[column.name for column in columns], *cells], right)


def aligned(lines: Sequence[Sequence[str]], right: frozenset[int] = frozenset()) -> str:
    """Return lines of cells in columns, two spaces apart; those in `right` are aligned to the right."""
    clean = [[plain(cell) for cell in line] for line in lines]
    widths = [max(map(len, cells)) for cells in zip(*clean, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if n in right else cell.ljust(width)
            for n, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in clean
    )


def plain(text: str) -> str:
    """Return text on one line and without control characters, safe for a terminal."""
    return "".join(c if c.isprintable() else " " for c in text)
