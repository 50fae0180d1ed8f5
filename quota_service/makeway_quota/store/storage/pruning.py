"""Remove what is too old, in small transactions; called by `history/retention.py`.

Every method is one short transaction that removes at most `limit` rows and returns how many it removed, so that the
loop's commits wait for moments only, and a service that is killed in between continues with the next call. Where rows
cannot be removed it raises Unremovable with their keys; `skip` are the keys of rows that are left alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from typing import Any, NamedTuple

from sqlalchemy import (
    ColumnElement,
    Connection,
    Table,
    and_,
    bindparam,
    delete,
    exists,
    func,
    insert,
    literal,
    select,
)
from sqlalchemy.dialects.postgresql import insert as postgres_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert

from .. import rows, writes
from ..database.database import Database
from ..database.old_rows import Skip, besides, remove_older, remove_oldest, removing
from ..database.space import give_back
from ..pages import first_that_fit
from ..tables import (
    ENDED_ROW,
    attempts,
    blobs,
    decisions,
    dropped,
    events,
    files,
    outputs,
    purges,
    removals,
    retention,
    submission_keys,
    workloads,
)

PARTS_BYTES = 8 * 2**20
"""Bytes of outputs, or of commands and sources, that one transaction removes, or a single one that has more"""
ROW_BYTES = 200
"""What a row of a file or an attempt counts for"""
W = workloads.c
R = removals.c
ROWS = sum(
    (select(func.count()).where(table.c.workload == W.id).scalar_subquery() for table in (files, attempts)),
    start=literal(0),
)
FORGET_OUTPUT = delete(outputs).where(*(column == bindparam(f"one_{column.name}") for column in outputs.primary_key))
USED = exists().where(files.c.blob == blobs.c.digest) | exists().where(outputs.c.blob == blobs.c.digest)


class Sweep(NamedTuple):
    """The last pass of the retention: when it ended, the time that ages were counted to, and its report."""

    at: float
    clock: float
    report: dict[str, Any]


class Removal(NamedTuple):
    """What is still known of a workload that was removed."""

    kind: str
    owner: str
    team: str | None


class Forgotten(NamedTuple):
    """A job that was removed, and the bytes outside the database that no row has any more."""

    owner: str
    team: str | None
    name: str
    outside: int


class ToPurge(NamedTuple):
    """A workload without rows whose folder may still be there."""

    workload: str
    team: str


class Pruning:
    """The removals of a store. `term`: only while this term leads (LeadershipLost otherwise)."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def forget_outputs(
        self,
        ended_before: float,
        among: int,
        limit: int,
        term: int | None = None,
        *,
        skip: Skip = (),
        but: Skip = (),
    ) -> int:
        """Remove outputs of the first `among` workloads that ended before: at most `limit` pieces, of PARTS_BYTES.

        `but` are the keys of workloads that are left out.
        """
        old = select(W.id).where(W.ended_at < ended_before, *besides(workloads, but)).order_by(W.ended_at, W.id)
        with self._writing(term) as connection:
            ids = list(connection.execute(old.limit(among)).scalars())
            return len(_forget_outputs(connection, ids, limit, *besides(outputs, skip)))

    def forget_outputs_of(self, id: str, limit: int, now: float, attempt: int | None = None) -> int:
        """Remove outputs of a workload that has ended, or of one attempt: at most `limit` pieces, of PARTS_BYTES."""
        mine: list[ColumnElement[bool]] = [W.id == rows.clean(id)]
        one: list[ColumnElement[bool]] = [] if attempt is None else [outputs.c.attempt == attempt]
        if attempt is None:
            mine.append(and_(ENDED_ROW))
        with self._writing(None) as connection:
            ids = list(connection.execute(select(W.id).where(*mine)).scalars())
            gone = _forget_outputs(connection, ids, limit, *one)
            _drop(connection, [row["blob"] for row in gone if row["blob"] is not None], now)
            return len(gone)

    def ended_jobs(self, owner: str, ended_before: float, limit: int, skip: Skip = ()) -> list[str]:
        """Return the first jobs of a person that ended before a time."""
        query = select(W.id).where(W.owner == rows.clean(owner), ENDED_ROW, W.kind == "job", W.ended_at < ended_before)
        query = query.where(*besides(workloads, skip))
        with self._database.read() as connection:
            return list(connection.execute(query.order_by(W.ended_at).limit(limit)).scalars())

    def forget_ended(self, id: str, now: float) -> Forgotten | None:
        """Remove one job that has ended; None if it is gone, or lives."""
        query = select(W.id, W.kind, W.owner, W.team, W.name).where(W.id == rows.clean(id), W.kind == "job", ENDED_ROW)
        with self._writing(None) as connection:
            result = connection.execute(query).first()
            if result is None:
                return None
            contents = select(files.c.blob).where(files.c.workload == result.id).distinct()
            digests = list(connection.execute(contents).scalars())
            _forget(connection, [result], now)
            _, outside = _drop(connection, digests, now)
        return Forgotten(result.owner, result.team, result.name, outside)

    def forget_workloads(self, ended_before: float, limit: int, term: int | None = None, *, skip: Skip = ()) -> int:
        """Remove workloads that ended before, with everything of theirs; note whose folders are to be purged.

        Beyond one, as many as have PARTS_BYTES together, their outputs not counted: `forget_outputs` removes those.
        """
        with self._writing(term) as connection:
            query = (
                select(W.id, W.kind, W.owner, W.team, (W.weight + ROW_BYTES * ROWS).label("size"))
                .where(W.ended_at < ended_before, *besides(workloads, skip))
                .order_by(W.ended_at, W.id)
                .limit(limit)
            )
            result = first_that_fit(connection.execute(query).all(), lambda row: int(row.size), PARTS_BYTES)
            with removing(workloads, [(row.id,) for row in result]):
                _forget(connection, result, ended_before)
        return len(result)

    def removed(self, id: str) -> Removal | None:
        """Return the removal of a workload, None if it is there, or never was, or was removed too long ago."""
        query = select(R.kind, R.owner, R.team).where(R.workload == rows.clean(id))
        with self._database.read() as connection:
            row = connection.execute(query).first()
        return None if row is None else Removal(*row)

    def forget_removals(
        self, before: float, limit: int, term: int | None = None, *, maximum: int | None = None, skip: Skip = ()
    ) -> int:
        """Remove the oldest notes of removals from before a time, or beyond the newest `maximum`.

        None goes whose folder is still to be purged.
        """
        purged = (~exists().where(purges.c.workload == R.workload), *besides(removals, skip))
        with self._writing(term) as connection:
            if count := remove_older(connection, removals, before, limit, *purged):
                return count
            there = (
                0 if maximum is None else connection.execute(select(func.count()).select_from(removals)).scalar_one()
            )
            beyond = there - (maximum or 0) - len(skip)
            return remove_older(connection, removals, inf, min(limit, beyond), *purged) if beyond > 0 else 0

    def to_purge(self, limit: int, after: str = "") -> list[ToPurge]:
        """Return workloads without rows whose folders may still be there, by id, beginning after an id."""
        query = (
            select(purges.c.workload, func.coalesce(R.team, ""))
            .select_from(purges.outerjoin(removals, R.workload == purges.c.workload))
            .where(purges.c.workload > after)
            .order_by(purges.c.workload)
            .limit(limit)
        )
        with self._database.read() as connection:
            return [ToPurge(*row) for row in connection.execute(query)]

    def purged(self, ids: Sequence[str], term: int | None = None) -> None:
        """Forget that these folders were to be purged."""
        with self._writing(term) as connection, removing(purges, [(id,) for id in ids]):
            connection.execute(delete(purges).where(purges.c.workload.in_(ids)))

    def forget_decisions(
        self, before: float, limit: int, term: int | None = None, *, maximum: int | None = None, skip: Skip = ()
    ) -> int:
        """Remove the oldest decisions made before a time, or beyond the newest `maximum`."""
        with self._writing(term) as connection:
            newest = 0 if maximum is None else connection.execute(select(func.max(decisions.c.id))).scalar_one() or 0
            beyond = newest - (newest if maximum is None else maximum)
            return remove_oldest(connection, decisions, before, limit, beyond, skip=skip)

    def forget_keys(self, before: float, limit: int, term: int | None = None, *, skip: Skip = ()) -> int:
        """Remove the oldest keys of submissions that were made before a time."""
        with self._writing(term) as connection:
            return remove_older(connection, submission_keys, before, limit, *besides(submission_keys, skip))

    def forget_events(
        self, before: float, maximum: int, limit: int, term: int | None = None, *, skip: Skip = ()
    ) -> int:
        """Remove the oldest events from before a time or beyond the newest `maximum`, never the newest one.

        Readers of the live stream continue from its id.
        """
        with self._writing(term) as connection:
            newest = connection.execute(select(func.max(events.c.id))).scalar_one()
            if newest is None:
                return 0
            return remove_oldest(connection, events, before, limit, newest - max(1, maximum), newest - 1, skip=skip)

    def orphans(self, after: str, limit: int) -> tuple[list[tuple[str, int]], str | None]:
        """Return the unreferenced file contents among the next `limit`, with their bytes, and where to go on.

        The second value is None at the end. No lock is held.
        """
        query = (
            select(blobs.c.digest, USED, func.length(blobs.c.data))
            .where(blobs.c.digest > after)
            .order_by(blobs.c.digest)
            .limit(limit)
        )
        with self._database.read() as connection:
            contents = connection.execute(query).all()
        rest = contents[-1][0] if len(contents) == limit else None
        return [(digest, size) for digest, used, size in contents if not used], rest

    def forget_blobs(self, digests: Sequence[str], now: float, term: int | None = None) -> int:
        """Remove these file contents, unless a workload refers to one; `Contents.clear` removes those outside."""
        with self._writing(term) as connection, removing(blobs, [(digest,) for digest in digests]):
            return _drop(connection, digests, now)[0]

    def give_back(self, pages: int) -> int:
        """Return free pages of an SQLite file to the file system, if many are free; the number that was returned."""
        return give_back(self._database, pages)

    def last(self) -> Sweep | None:
        """Return the report of the last pass; None before the first."""
        with self._database.read() as connection:
            row = connection.execute(select(retention.c.at, retention.c.clock, retention.c.report)).first()
        return None if row is None else Sweep(row[0], row[1], json.loads(row[2]))

    def note(self, sweep: Sweep, term: int | None = None) -> None:
        """Write the report of a pass in place of the last one."""
        with self._writing(term) as connection:
            connection.execute(delete(retention))
            values = {"id": 1, "at": sweep.at, "clock": sweep.clock, "report": rows.to_json(sweep.report)}
            connection.execute(insert(retention), values)

    def holdings(self) -> dict[str, dict[str, float | int | None]]:
        """Return how many workloads, decisions, events and folders to purge there are, and the oldest of each."""
        with self._database.read() as connection:
            ended = connection.execute(select(func.min(W.ended_at))).scalar_one()
            count = connection.execute(select(func.count()).select_from(workloads)).scalar_one()
            waiting = connection.execute(select(func.count()).select_from(purges)).scalar_one()
            return {
                "workloads": {"count": count, "oldest": ended},
                "decisions": _extent(connection, decisions),
                "events": _extent(connection, events),
                "purges": {"count": waiting, "oldest": None},
            }

    @contextmanager
    def _writing(self, term: int | None) -> Iterator[Connection]:
        """Write under the term, without calling listeners: what they follow does not change."""
        with self._database.write(quiet=True) as connection:
            if term is not None:
                writes.require_term(connection, term)
            yield connection


def _drop(connection: Connection, digests: Sequence[str], now: float) -> tuple[int, int]:
    """Remove contents to which no row refers, and note those outside; return how many went, and bytes of the latter."""
    write = postgres_insert if connection.dialect.name == "postgresql" else sqlite_insert
    count = size = 0
    for begin in range(0, len(digests), 500):
        unused = delete(blobs).where(blobs.c.digest.in_(digests[begin : begin + 500]), ~USED)
        gone = connection.execute(unused.returning(blobs.c.digest, blobs.c.outside, blobs.c.size)).all()
        count += len(gone)
        size += sum(int(row.size or 0) for row in gone if row.outside)
        if outside := [{"digest": row.digest, "at": now} for row in gone if row.outside]:
            new = write(dropped)
            again = new.on_conflict_do_update(index_elements=[dropped.c.digest], set_={"at": new.excluded.at})
            connection.execute(again, outside)
    return count, size


def _forget_outputs(
    connection: Connection, ids: Sequence[str], limit: int, *where: ColumnElement[bool]
) -> list[Mapping[str, Any]]:
    """Remove outputs of workloads: at most `limit` pieces, of PARTS_BYTES; return them."""
    keys, gone = outputs.primary_key.columns.keys(), list[Any]()
    for begin in range(0, len(ids), 500):
        mine = outputs.c.workload.in_(ids[begin : begin + 500])
        some = select(outputs.c.size, outputs.c.blob, *outputs.primary_key).where(mine, *where)
        gone += connection.execute(some.limit(limit - len(gone))).mappings().all()
        if len(gone) >= limit:
            break
    gone = first_that_fit(gone, lambda row: int(row["size"]), PARTS_BYTES)
    with removing(outputs, [tuple(row[name] for name in keys) for row in gone]):
        for row in gone:
            connection.execute(FORGET_OUTPUT, {f"one_{name}": row[name] for name in keys})
    return gone


def _forget(connection: Connection, result: Sequence[Any], at: float) -> None:
    """Remove workloads, note that they are removed, and that the folders of jobs are to be purged."""
    if not result:
        return
    gone = [{"workload": w.id, "kind": w.kind, "owner": w.owner, "team": w.team, "at": at} for w in result]
    connection.execute(delete(removals).where(R.workload.in_([w.id for w in result])))  # an id used again
    connection.execute(insert(removals), gone)
    jobs = [{"workload": row.id, "at": at} for row in result if row.kind == "job"]
    if jobs:
        connection.execute(insert(purges), jobs)
    connection.execute(delete(workloads).where(W.id.in_([row.id for row in result])))


def _extent(connection: Connection, table: Table) -> dict[str, float | int | None]:
    """Return how many rows a log has, by its ids, and the time of the oldest."""
    first = connection.execute(select(table.c.id, table.c.at).order_by(table.c.id).limit(1)).first()
    if first is None:
        return {"count": 0, "oldest": None}
    newest = connection.execute(select(func.max(table.c.id))).scalar_one()
    return {"count": newest - first.id + 1, "oldest": first.at}
