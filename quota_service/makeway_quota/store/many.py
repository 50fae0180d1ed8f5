"""Statements that run for many rows at a time: read by SQLAlchemy once, then given to the driver as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sqlalchemy import Connection, Insert, Update

Row = Mapping[str, object]


class Many:
    """An INSERT or UPDATE for rows that set the same columns.

    SQLAlchemy would go through the values of every row once more (a third of the time of a commit of the loop). Ours
    need that in no database: they are texts, numbers and truth values.
    """

    def __init__(self, statement: Insert | Update) -> None:
        self._statement = statement
        self._written: dict[tuple[str, tuple[str, ...]], tuple[str, tuple[str, ...]]] = {}

    def run(self, connection: Connection, rows: Sequence[Row]) -> None:
        """Run it for each of the rows; all have the keys of the first, in the same order."""
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
