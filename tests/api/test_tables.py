"""Tables of columns in plain text."""

from __future__ import annotations

from collections.abc import Sequence

from makeway_api.tables import Column, aligned, text_table

COLUMNS: Sequence[Column[tuple[str, int], object]] = (
    Column("WHAT", lambda row: row[0]),
    Column("N", lambda row: row[1], right=True),
)


def test_numbers_are_aligned_to_the_right_below_their_head() -> None:
    assert text_table(COLUMNS, [("a", 5), ("bcdef", 10)]) == "WHAT    N\na       5\nbcdef  10"


def test_a_table_without_rows_is_its_head() -> None:
    assert text_table(COLUMNS, []) == "WHAT  N"


def test_a_surface_writes_cells_in_its_own_way() -> None:
    assert text_table(COLUMNS, [("a", 5)], lambda cell: f"<{cell}>") == "WHAT    N\n<a>   <5>"


def test_a_cell_stays_on_its_line() -> None:
    assert aligned([("a\nb\x1b[2J", "c"), ("d", "e")]) == "a b [2J  c\nd        e"
