"""Remove old rows of any table; called within a transaction that removes a few.

Where rows cannot be removed, Unremovable has their primary keys, so that the next transaction passes over them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from sqlalchemy import ColumnElement, Connection, Table, delete, select, tuple_

from ..errors import Unremovable

Skip = Collection[tuple[object, ...]]
"""The primary keys of rows that are left alone"""


def remove_older(connection: Connection, table: Table, before: float, limit: int, *where: ColumnElement[bool]) -> int:
    """Remove at most `limit` rows of a table from before a time, the oldest first; return how many."""
    key = list(table.primary_key)
    first = select(*key).where(table.c.at < before, *where).order_by(table.c.at, *key).limit(limit)
    return remove_rows(connection, table, [tuple(row) for row in connection.execute(first)])


def remove_oldest(
    connection: Connection,
    table: Table,
    before: float,
    limit: int,
    beyond: int = 0,
    maximum: int | None = None,
    *,
    skip: Skip = (),
) -> int:
    """Remove the rows among the oldest `limit` that precede a row from before a time, or whose id is at most `beyond`.

    Rows are in the order of their ids. A clock that was ahead for a while may have left times that are not.
    """
    first = select(table.c.id, table.c.at).where(*besides(table, skip)).order_by(table.c.id).limit(limit)
    oldest = connection.execute(first).all()
    last = max((row.id for row in oldest if row.at < before or row.id <= beyond), default=0)
    last = last if maximum is None else min(last, maximum)
    return remove_rows(connection, table, [(row.id,) for row in oldest if row.id <= last])


def remove_rows(connection: Connection, table: Table, keys: Sequence[tuple[object, ...]]) -> int:
    """Remove rows by their primary keys; return how many there were."""
    removed, columns = 0, list(table.primary_key)
    with removing(table, keys):
        for begin in range(0, len(keys), 500):
            part = keys[begin : begin + 500]
            if len(columns) == 1:
                where = columns[0].in_([key[0] for key in part])
            else:
                where = tuple_(*columns).in_(part)
            removed += connection.execute(delete(table).where(where)).rowcount
    return removed


@contextmanager
def removing(table: Table, keys: Sequence[tuple[object, ...]]) -> Iterator[None]:
    """Raise Unremovable with the keys of the rows where removing them fails."""
    try:
        yield
    except Exception as error:
        if not keys:
            raise
        raise Unremovable(table.name, keys) from error


def besides(table: Table, skip: Skip) -> list[ColumnElement[bool]]:
    """Return the conditions that leave out the rows with some primary keys."""
    columns = list(table.primary_key)
    if not skip:
        return []
    if len(columns) == 1:
        return [columns[0].not_in([key[0] for key in skip])]
    return [tuple_(*columns).not_in(list(skip))]
