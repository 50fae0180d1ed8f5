"""Statements of the loop's commits: compiled by SQLAlchemy once, then given to the driver as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Column, Connection, Insert, Update, select

MAX_KEYS = 500
"""Keys of one SELECT."""

Row = Mapping[str, object]


class BulkStatement:
    """An INSERT or UPDATE for rows that set the same columns.

    SQLAlchemy would convert the values of every row once more (a third of the time of a commit of the loop). No
    database needs that here: the values are texts, numbers and truth values.
    """

    def __init__(self, statement: Insert | Update) -> None:
        self._statement = statement
        self._written: dict[tuple[str, tuple[str, ...]], tuple[str, tuple[str, ...]]] = {}

    def run(self, connection: Connection, rows: Sequence[Row]) -> None:
        """Run the statement for each of the rows; all have the keys of the first, in the same order."""
        if not rows:
            return
        key = connection.dialect.name, tuple(rows[0])
        if key not in self._written:
            compiled = self._statement.compile(dialect=connection.dialect, column_keys=list(rows[0]))
            self._written[key] = str(compiled), tuple(compiled.positiontup or ())
        sql, places = self._written[key]
        if places:
            connection.exec_driver_sql(sql, [tuple([row[name] for name in places]) for row in rows])
        else:
            connection.exec_driver_sql(sql, [dict(row) for row in rows])


class KeyLookup:
    """A SELECT of texts and integers by a key, for many keys; SQLAlchemy takes six times as long to compile one."""

    def __init__(self, key: Column[Any], *columns: Column[Any]) -> None:
        self._sql = f"{select(*columns)} WHERE {key} IN"

    def run(self, connection: Connection, keys: Sequence[object]) -> list[Any]:
        """Return the rows of these keys, in no order."""
        mark = "?" if connection.dialect.name == "sqlite" else "%s"
        result: list[Any] = []
        for begin in range(0, len(keys), MAX_KEYS):
            some = tuple(keys[begin : begin + MAX_KEYS])
            marks = ", ".join([mark] * len(some))
            result += connection.exec_driver_sql(f"{self._sql} ({marks})", some).all()
        return result
