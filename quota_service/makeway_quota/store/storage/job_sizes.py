"""Measure what is kept of single jobs: by kind, by attempt, and the ended ones of a person with the most bytes.

An account sums what its owner keeps in a team. The bytes of one job are those by which it is smaller without that job:
a file that another job of the same owner and team has, too, is not among them.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from sqlalchemy import Connection, case, exists, func, select
from sqlalchemy.orm import aliased

from .. import rows
from ..accounts import ATTEMPT_BYTES, PATH_BYTES, ROW_BYTES, kind_of
from ..database.database import Database
from ..tables import ENDED_ROW, LIVE_ROW, attempts, blobs, files, folders, outputs, workloads

W = workloads.c
O = outputs.c  # noqa: E741
MIN_MEASURED = 50
"""Ended jobs, those with the most bytes, that are measured to find the ones without which an account is smallest"""


class JobSize(NamedTuple):
    """An ended job and the bytes that its deletion frees."""

    id: str
    name: str
    team: str
    ended_at: float
    bytes: int


class OutputSize(NamedTuple):
    """The bytes of what an attempt wrote: its log, and its result or exception."""

    log: int = 0
    result: int = 0


class JobSizes:
    """What is kept of single jobs. Each method is one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def of(self, id: str) -> dict[str, int]:
        """Return the bytes of one job by kind, as its account counts them; nothing where there is no such job."""
        with self._database.read() as connection:
            return size_of(connection, id)

    def outputs(self, id: str) -> dict[int, OutputSize]:
        """Return the bytes that workers sent, by attempt."""
        query = select(O.attempt, O.kind, func.sum(O.size)).where(O.workload == rows.clean(id))
        result: dict[int, Counter[str]] = {}
        with self._database.read() as connection:
            for attempt, output, size in connection.execute(query.group_by(O.attempt, O.kind)):
                result.setdefault(attempt, Counter())[kind_of(output)] += int(size or 0)
        return {number: OutputSize(sizes["logs"], sizes["results"]) for number, sizes in sorted(result.items())}

    def queued(self, owner: str) -> int:
        """Return the bytes of the rows of a person's jobs that have not ended."""
        query = select(func.coalesce(func.sum(W.weight + ROW_BYTES), 0))
        with self._database.read() as connection:
            mine = query.where(W.owner == rows.clean(owner), W.kind == "job", LIVE_ROW)
            return int(connection.execute(mine).scalar_one())

    def largest(self, owner: str, limit: int) -> list[JobSize]:
        """Return the ended jobs of a person whose deletion frees the most, the largest first."""
        other = aliased(files)
        shared = exists().where(other.c.blob == files.c.blob, other.c.workload != files.c.workload)
        unshared = case((shared, 0), else_=blobs.c.size)
        paths = select(func.sum(func.length(files.c.path) + PATH_BYTES + unshared))
        parts = (
            W.weight + ROW_BYTES,
            _sum(select(func.sum(O.size)).where(O.workload == W.id)),
            _sum(select(folders.c.bytes).where(folders.c.workload == W.id)),
            _sum(paths.select_from(files.join(blobs)).where(files.c.workload == W.id)),
        )
        whole = (parts[0] + parts[1] + parts[2] + parts[3]).label("bytes")
        query = (
            select(W.id, W.name, func.coalesce(W.team, ""), W.ended_at)
            .where(W.owner == rows.clean(owner), W.kind == "job", ENDED_ROW, W.ended_at.is_not(None))
            .order_by(whole.desc(), W.id)
            .limit(max(limit, MIN_MEASURED))
        )
        with self._database.read() as connection:
            result = [
                JobSize(*row, bytes=sum(size_of(connection, row.id).values()))
                for row in connection.execute(query).all()
            ]
        return sorted(result, key=lambda job: (-job.bytes, job.id))[:limit]


def size_of(connection: Connection, id: str) -> dict[str, int]:
    """Return the bytes of one job by kind, in a transaction that is open."""
    job = connection.execute(select(W.owner, W.team, W.weight).where(W.id == rows.clean(id))).first()
    if job is None:
        return {}
    mine = files.c.workload == rows.clean(id)
    counted = Counter(jobs=job.weight + ROW_BYTES)
    counted["files"] = _total(connection, select(func.sum(func.length(files.c.path) + PATH_BYTES)).where(mine))
    counted["files"] += _unshared_bytes(connection, id, job.owner, job.team or "")
    sent = select(O.kind, func.sum(O.size)).where(O.workload == rows.clean(id)).group_by(O.kind)
    for output, size in connection.execute(sent):
        counted[kind_of(output)] += int(size or 0)
    counted["folders"] = _total(connection, select(folders.c.bytes).where(folders.c.workload == rows.clean(id)))
    attempt_count = select(func.count()).select_from(attempts).where(attempts.c.workload == rows.clean(id))
    counted["attempts"] = _total(connection, attempt_count) * ATTEMPT_BYTES
    return dict(counted)


def _unshared_bytes(connection: Connection, id: str, owner: str, team: str) -> int:
    """Return the bytes of the contents of a job that no other job of the same owner and team has."""
    other, whose = aliased(files), aliased(workloads)
    shared = exists().where(
        other.c.blob == blobs.c.digest,
        other.c.workload != rows.clean(id),
        whose.c.id == other.c.workload,
        whose.c.owner == owner,
        func.coalesce(whose.c.team, "") == team,
    )
    mine = select(blobs.c.digest, blobs.c.size).join_from(files, blobs).where(files.c.workload == rows.clean(id))
    unshared = mine.where(~shared).distinct().subquery()
    return _total(connection, select(func.sum(unshared.c.size)))


def _total(connection: Connection, query: Any) -> int:
    return int(connection.execute(query).scalar() or 0)


def _sum(query: Any) -> Any:
    return func.coalesce(query.scalar_subquery(), 0)
