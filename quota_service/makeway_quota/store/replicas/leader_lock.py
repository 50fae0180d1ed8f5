"""The lock that exactly one replica holds: a session lock of PostgreSQL, or a locked file beside an SQLite database.

On PostgreSQL the lock lives in a connection of its own. The server ends that connection when it was silent for a while,
so that a leader that is stopped, or cut off by the network, loses the lock without its help; by then it has long ceased
to act (`deadline`). The term is taken in the same connection, so it cannot be taken without the lock.

The time in `terms.at` is the database's own clock at the last renewal, 0 after a clean release. A new leader waits
until `deadline` has passed since then: a lock may also vanish with a restart of PostgreSQL, which the old leader
notices only at its next renewal.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from sqlalchemy import Connection, Engine, func, select, text, update
from sqlalchemy.exc import DBAPIError

from .. import writes
from ..database.connections import postgres_engine
from ..database.database import WRITERS, Database, explain
from ..errors import LeadershipLost, StoreError
from ..tables import terms

LEADER = 0x4D414B4C
"""The advisory lock of the leader ("MAKL")."""

MARGIN = 1.0
"""Seconds after the deadline until the server ends a silent leader's connection."""

CLOCK = func.extract("epoch", func.clock_timestamp())


@dataclass(frozen=True, slots=True)
class Acquired:
    """A term that was taken, and the seconds to wait until the leader before has surely ceased to act."""

    term: int
    wait: float


class LeaderLock(Protocol):
    """Blocking; for one thread at a time. Every method raises StoreError where the database cannot be reached."""

    expires: bool
    """whether a silent holder loses the lock"""

    def acquire(self) -> Acquired | None:
        """Take the lock and the next term, or return None at once where another replica holds the lock."""

    def renew(self, term: int) -> None:
        """Show that the holder lives; LeadershipLost or StoreError when the lock is lost."""

    def release(self, term: int | None) -> None:
        """Release the lock; with `term` the holder has ceased to act, so that the next need not wait."""


def leader_lock(database: Database, deadline: float) -> LeaderLock:
    """Return the lock that fits the database."""
    return FileLock(database) if database.sqlite else PostgresLock(database, deadline)


def holder() -> str:
    """Return a name for this process that no other has, before or after."""
    return f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"


class FileLock:
    """A locked file beside the SQLite database: the kernel releases it with the process."""

    expires = False

    def __init__(self, database: Database) -> None:
        self._database = database
        self._path = Path(f"{database.url.database}.lock")
        self._file: IO[str] | None = None
        self._holder = holder()

    def acquire(self) -> Acquired | None:
        """Lock the file and take the next term."""
        if self._file is None:
            try:
                file = os.fdopen(os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600), "r+")
            except OSError as error:
                raise StoreError(f"the lock {self._path} cannot be opened: {error.strerror}") from error
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                file.close()
                return None
            self._file = file
        with self._database.write() as connection:
            return Acquired(writes.take_term(connection, self._holder, time.time()), 0.0)

    def renew(self, term: int) -> None:
        """Do nothing: a file stays locked."""

    def release(self, term: int | None) -> None:
        """Unlock the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


class PostgresLock:
    """An advisory lock on a connection of its own, which the server ends when it is silent."""

    expires = True

    def __init__(self, database: Database, deadline: float) -> None:
        self._url = database.url
        self._deadline = deadline
        self._holder = holder()
        self._engine: Engine = postgres_engine(
            database.url,
            silence=max(1.0, deadline / 3),
            pooled=False,
            settings=f"SET idle_session_timeout = '{int((deadline + MARGIN) * 1000)}ms'",
        )
        self._connection: Connection | None = None

    def acquire(self) -> Acquired | None:
        """Try the lock; where it is free take it and, in the same connection, the next term."""
        try:
            if self._connection is None:
                self._connection = self._engine.connect()
            connection = self._connection
            with connection.begin():
                if not connection.execute(text(f"SELECT pg_try_advisory_lock({LEADER})")).scalar_one():
                    return None
            with connection.begin():
                connection.execute(text(f"SELECT pg_advisory_xact_lock({WRITERS})"))
                now = float(connection.execute(select(CLOCK)).scalar_one())
                last = connection.execute(select(terms).order_by(terms.c.term.desc()).limit(1)).first()
                term = writes.take_term(connection, self._holder, now)
        except DBAPIError as error:
            raise self._lost(error) from error
        if last is None or last.at == 0 or last.holder == self._holder:
            return Acquired(term, 0.0)
        return Acquired(term, min(self._deadline, max(0.0, last.at + self._deadline - now)))

    def renew(self, term: int) -> None:
        """Write the time of the renewal; the connection must be the one that holds the lock."""
        connection = self._connection
        if connection is None:
            raise StoreError("the connection that held the leader's lock is closed")
        try:
            with connection.begin():
                connection.execute(update(terms).where(terms.c.term == term).values(at=CLOCK))
                newest = connection.execute(select(terms).order_by(terms.c.term.desc()).limit(1)).first()
        except DBAPIError as error:
            raise self._lost(error) from error
        if newest is None or newest.term != term:
            self._close()
            raise LeadershipLost(term, newest.term if newest else 0, newest.holder if newest else "")

    def release(self, term: int | None) -> None:
        """Release the lock and close the connection; the server would release it only some time after the close."""
        connection = self._connection
        if connection is not None and term is not None:
            with suppress(DBAPIError):
                with connection.begin():
                    connection.execute(update(terms).where(terms.c.term == term).values(at=0.0))
                with connection.begin():
                    connection.execute(text(f"SELECT pg_advisory_unlock({LEADER})"))
        self._close()

    def _lost(self, error: DBAPIError) -> StoreError:
        self._close()
        return StoreError(explain(self._url, error))

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(DBAPIError):
                connection.invalidate()  # never back into use: the server may have ended it
                connection.close()
