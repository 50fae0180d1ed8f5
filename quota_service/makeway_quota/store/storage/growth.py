"""Record the bytes stored each day, by all and by the largest teams and people, and the free bytes of the disk.

Written by each pass of the retention, read for the page Storage. Bounded: twice DAYS days of at most
2 + 2 × MAX_PER_SCOPE rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from sqlalchemy import Connection, Select, delete, func, insert, select, update

from .. import rows
from ..database.database import Database
from ..tables import accounts, storage_days

D = storage_days.c
A = accounts.c
DAY = 86_400.0
DAYS = 92
"""Days that are kept, this one counted"""
MAX_DAYS_REMOVED = 10_000
"""Days that one pass removes at most"""
MAX_PER_SCOPE = 200
"""Rows of a day for teams, and for people: those that store the most"""
ALL, TEAM, PERSON, FREE = "all", "team", "person", "disk"
"""The scopes of a row: `FREE` has the bytes that can still be written to the disk, the others those that are stored"""


class StoredDay(NamedTuple):
    """The bytes of one scope at the end of one day."""

    day: int
    scope: str
    name: str
    bytes: int


class Growth:
    """The bytes that were stored each day. Each method is one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._last_day: int | None = None

    def note(self, now: float, free: int | None) -> None:
        """Record the bytes that are stored now as those of this day.

        The newest DAYS days before it stay, and DAYS days after it: a day in the future was written while the clock was
        wrong, or the clock is wrong now. `free`: bytes that may still be written to the disk; None if not known.
        """
        day = int(now // DAY)
        with self._database.write(quiet=True) as connection:
            connection.execute(delete(storage_days).where(D.day == day))
            for side, order in ((D.day < day, D.day.desc()), (D.day > day, D.day)):
                beyond = select(D.day).where(side).distinct().order_by(order).offset(DAYS - 1).limit(MAX_DAYS_REMOVED)
                connection.execute(delete(storage_days).where(D.day.in_(beyond.scalar_subquery())))
            sums = [*_sums(connection), *([] if free is None else [(FREE, "", max(0, free))])]
            values = [{"day": day, "scope": scope, "name": name, "bytes": size} for scope, name, size in sums]
            connection.execute(insert(storage_days), values)
        self._last_day = day

    def days(self, now: float | None = None) -> list[StoredDay]:
        """Return the days up to `now`, the first one first; None: up to the day that was recorded last."""
        day = self._last_day if now is None else int(now // DAY)
        conditions = [] if day is None else [D.day <= day]
        query = select(storage_days).where(*conditions).order_by(D.day, D.scope, D.name)
        with self._database.read() as connection:
            return [StoredDay(row.day, row.scope, row.name, int(row.bytes)) for row in connection.execute(query)]


def rename(connection: Connection, names: Mapping[str, str]) -> None:
    """Rename people in the history; where both names have a row for a day, add the bytes."""
    renamed = (D.scope == PERSON, D.name.in_(list(names)))
    for old in list(connection.execute(select(D.name).where(*renamed).distinct()).scalars()) if names else ():
        new = names[old]
        bytes_by_day = {row.day: row.bytes for row in connection.execute(_of(new))}
        for row in connection.execute(_of(old)).all():
            this_day = (D.scope == PERSON, D.day == row.day)
            if row.day in bytes_by_day:
                connection.execute(
                    update(storage_days).where(*this_day, D.name == new).values(bytes=bytes_by_day[row.day] + row.bytes)
                )
                connection.execute(delete(storage_days).where(*this_day, D.name == old))
        connection.execute(update(storage_days).where(D.scope == PERSON, D.name == old).values(name=new))


def _of(name: str) -> Select[tuple[int, int]]:
    return select(D.day, D.bytes).where(D.scope == PERSON, D.name == name)


def _sums(connection: Connection) -> Iterable[tuple[str, str, int]]:
    size = func.sum(A.bytes)
    whole = connection.execute(select(func.coalesce(size, 0))).scalar_one()
    yield ALL, "", int(whole)
    for scope, column in ((TEAM, A.team), (PERSON, A.owner)):
        largest = select(column, size).where(column != "").group_by(column).having(size > 0)
        for name, held in connection.execute(largest.order_by(size.desc(), column).limit(MAX_PER_SCOPE)):
            yield scope, str(rows.clean(name)), int(held)
