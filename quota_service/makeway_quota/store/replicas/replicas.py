"""Follow what other replicas commit: a wake-up by LISTEN/NOTIFY, then the rows that changed, read by id and version.

Events are the feed: writers are ordered by one lock, so whatever has a larger event id was committed later. A
notification only says that there is something to read; one that is lost costs a poll's time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, select, text, update
from sqlalchemy.exc import DBAPIError

from .. import reads
from ..database.connections import postgres_engine
from ..database.database import CHANNEL, Database
from ..pages import by_id
from ..records import Workload
from ..tables import LIVE_ROW, events, workloads
from .known_rows import KnownRows

log = logging.getLogger(__name__)

BATCH = 5000
"""Events that are read at once."""

CHECK_EVERY = 15.0
"""Seconds after which a silent LISTEN connection is checked."""


@dataclass(slots=True)
class Followed:
    """What was read: up to which event, the rows that this process did not know, and whether the policy changed."""

    last: int
    rows: list[Workload] = field(default_factory=list)
    policy: bool = False
    more: bool = False


def changed_after(connection: Connection, after: int, known: KnownRows) -> Followed:
    """Read the workloads that events after `after` speak of, but for those whose version is known."""
    query = select(events.c.id, events.c.kind, events.c.workload).where(events.c.id > after)
    result = connection.execute(query.order_by(events.c.id).limit(BATCH)).all()
    if not result:
        return Followed(after)
    last = int(result[-1][0])
    if result[0][0] != after + 1 and reads.event_range(connection)[0] > after + 1:
        return _everything(connection, reads.event_range(connection)[1], known)
    ids = list(dict.fromkeys(workload for _, kind, workload in result if workload and kind in ("job", "session")))
    rows = _unknown(connection, ids, known)
    return Followed(last, rows, any(kind == "policy" for _, kind, _ in result), len(result) == BATCH)


def _unknown(connection: Connection, ids: list[str], known: KnownRows) -> list[Workload]:
    versions: dict[str, int] = {id: row.version for id in ids if (row := known.live.get(id)) is not None}
    versions.update({id: version for id in ids if (version := known.ended.get(id)) is not None})
    result: dict[str, int] = {}
    for begin in range(0, len(ids), 500):
        query = select(workloads.c.id, workloads.c.version).where(workloads.c.id.in_(ids[begin : begin + 500]))
        result.update((id, version) for id, version in connection.execute(query).all())
    stale = [id for id, version in result.items() if versions.get(id) != version]
    held = [known.live.get(id) or known.read.get(id) for id in ids if id not in result]
    return [*by_id(connection, stale).values(), *(_removed(row) for row in held if row is not None)]


def _everything(connection: Connection, last: int, known: KnownRows) -> Followed:
    """Read all live workloads, and what became of those that were live: the events between were pruned."""
    rows = {row.id: row for row in reads.active(connection)}
    missed = {id: row for id, row in known.all_live().items() if id not in rows}
    rows.update(by_id(connection, list(missed)))
    rows.update({id: _removed(row) for id, row in missed.items() if id not in rows})
    return Followed(last, list(rows.values()), policy=True)


def _removed(row: Workload) -> Workload:
    """Return the end of a row that the database no longer has; only ended rows are ever removed."""
    ended_at = row.ended_at if row.ended_at is not None else row.submitted_at
    return row._replace(state="cancelled", version=row.version + 1, ended_at=ended_at, placement=(), nomination=())


def renew_leases(connection: Connection, ids: Collection[str], until: float) -> None:
    """Set the end of these leases; the version stays, so that a renewal is no change to a workload."""
    live = (workloads.c.id.in_(sorted(ids)), LIVE_ROW)
    connection.execute(update(workloads).where(*live).values(expires_at=until))


def lease_times(connection: Connection) -> dict[str, float | None]:
    """Read the end of each live session's lease."""
    live = (workloads.c.kind == "session", LIVE_ROW)
    leases = connection.execute(select(workloads.c.id, workloads.c.expires_at).where(*live)).all()
    return {row.id: row.expires_at for row in leases}


class Notifications:
    """The LISTEN connection of one process, opened at the first wait and opened again when it broke."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._connection: Any = None
        self._checked = 0.0
        self._closed = threading.Event()
        self._lock = threading.Lock()

    def wait(self, timeout: float) -> bool:
        """Wait until another process has committed; False when time is up. Blocking; for one thread at a time."""
        if self._database.sqlite or self._closed.is_set():
            self._closed.wait(timeout)
            return False
        ends = time.monotonic() + timeout
        with self._lock:
            try:
                while (remaining := ends - time.monotonic()) > 0:
                    for heard in self._driver().notifies(timeout=remaining, stop_after=1):
                        if heard.payload != self._database.origin:
                            return True
                return False
            except Exception as error:  # psycopg's errors, and SQLAlchemy's when it connects
                log.warning("Notifications of other replicas are interrupted; their commits are polled for: %s", error)
                self._drop()
        self._closed.wait(timeout)
        return False

    def close(self) -> None:
        """Close the connection, after the wait under way."""
        self._closed.set()
        with self._lock:
            self._drop()

    def _driver(self) -> Any:
        if self._connection is None:
            engine = postgres_engine(self._database.url, pooled=False)
            self._connection = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
            self._connection.execute(text(f"LISTEN {CHANNEL}"))
            self._checked = time.monotonic()
        elif time.monotonic() - self._checked > CHECK_EVERY:
            self._connection.execute(text("SELECT 1"))
            self._checked = time.monotonic()
        return self._connection.connection.driver_connection

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(DBAPIError):
                connection.invalidate()
                connection.close()
