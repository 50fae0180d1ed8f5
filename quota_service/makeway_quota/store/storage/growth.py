"""Remember what was kept each day: by all, by each team, by the people who keep the most, and the room on the disk.

Written by each pass of the retention, read for the page Storage. Bounded: twice DAYS days of at most
2 + 2 × MAX_NAMED rows.
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
BEYOND = 10_000
"""Days that one pass removes at most"""
MAX_NAMED = 200
"""Teams, and people, of each day, those that keep the most"""
ALL, TEAM, PERSON, DISK = "all", "team", "person", "disk"


class StoredDay(NamedTuple):
    """The bytes that were kept at the end of one day; of the scope `disk` those that could still be written."""

    day: int
    scope: str
    name: str
    bytes: int


class Growth:
    """What was kept each day. Each method is one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._written: int | None = None

    def note(self, now: float, room: int | None) -> None:
        """Write what is kept now as that of this day.

        The last DAYS days that are known stay, however far the clock has jumped, and as many of those yet to come: the
        clock may be wrong now, or may have been when they were written. `room`: bytes that may still be written to the
        disk; None where that is not known.
        """
        day = int(now // DAY)
        with self._database.write(quiet=True) as connection:
            connection.execute(delete(storage_days).where(D.day == day))
            for there, order in ((D.day < day, D.day.desc()), (D.day > day, D.day)):
                beyond = select(D.day).where(there).distinct().order_by(order).offset(DAYS - 1).limit(BEYOND)
                connection.execute(delete(storage_days).where(D.day.in_(beyond.scalar_subquery())))
            found = [*_sums(connection), *([] if room is None else [(DISK, "", max(0, room))])]
            values = [{"day": day, "scope": scope, "name": name, "bytes": size} for scope, name, size in found]
            connection.execute(insert(storage_days), values)
        self._written = day

    def days(self, now: float | None = None) -> list[StoredDay]:
        """Return what is known up to this day, the first day first; None: up to the day that was written last."""
        day = self._written if now is None else int(now // DAY)
        there = [] if day is None else [D.day <= day]
        query = select(storage_days).where(*there).order_by(D.day, D.scope, D.name)
        with self._database.read() as connection:
            return [StoredDay(row.day, row.scope, row.name, int(row.bytes)) for row in connection.execute(query)]


def rename(connection: Connection, names: Mapping[str, str]) -> None:
    """File the days of people under other names; days that both names have are added up."""
    mine = (D.scope == PERSON, D.name.in_(list(names)))
    for old in list(connection.execute(select(D.name).where(*mine).distinct()).scalars()) if names else ():
        new = names[old]
        there = {row.day: row.bytes for row in connection.execute(_of(new))}
        for row in connection.execute(_of(old)).all():
            one = (D.scope == PERSON, D.day == row.day)
            if row.day in there:
                connection.execute(
                    update(storage_days).where(*one, D.name == new).values(bytes=there[row.day] + row.bytes)
                )
                connection.execute(delete(storage_days).where(*one, D.name == old))
        connection.execute(update(storage_days).where(D.scope == PERSON, D.name == old).values(name=new))


def _of(name: str) -> Select[tuple[int, int]]:
    return select(D.day, D.bytes).where(D.scope == PERSON, D.name == name)


def _sums(connection: Connection) -> Iterable[tuple[str, str, int]]:
    size = func.sum(A.bytes)
    whole = connection.execute(select(func.coalesce(size, 0))).scalar_one()
    yield ALL, "", int(whole)
    for scope, column in ((TEAM, A.team), (PERSON, A.owner)):
        most = select(column, size).where(column != "").group_by(column).having(size > 0)
        for name, held in connection.execute(most.order_by(size.desc(), column).limit(MAX_NAMED)):
            yield scope, str(rows.clean(name)), int(held)
