"""Run transactions on SQLite (one file, the default) or PostgreSQL (production).

SQLite: WAL, so that readers never wait; every writing transaction begins IMMEDIATE, so that two never deadlock.
A commit survives any death of the service. What a person is told has to survive a power cut, too: such a commit is
`durable` (`synchronous=FULL`), which costs a flush of the disk and takes all earlier commits along. All others are so
where jobs are elsewhere (`durable` of the database): a power cut takes processes of this machine along, but no pods.
PostgreSQL: writers take one advisory lock, so that event ids are committed in their order and none is ever missed; each
commit notifies the other replicas, which then read what changed (`follow`). A COMMIT that the server does not answer
is neither a failure nor repeated: its outcome is looked up by the number of its transaction.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import re
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, cast

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url, text
from sqlalchemy.exc import ArgumentError, DataError, DBAPIError, IntegrityError
from sqlalchemy.pool import NullPool, QueuePool

from ..errors import OutcomeUnknown, RowRefused, StoreError
from ..pages import by_id
from .connections import migrating_engine, postgres_engine
from .reserve import Reserve

log = logging.getLogger(__name__)
BUSY_SECONDS = 10.0
"""Seconds that a write waits in all, for writes of this process and for a lock that another one holds"""
FAILING_BUSY_SECONDS = 1.0
"""The same for a lock while writes fail: one after the other tries it, and each is answered soon"""
FAILING_QUEUE_SECONDS = 0.1
"""Seconds that a write waits for the one that tries it then"""
PRAGMAS = ("auto_vacuum=INCREMENTAL", "journal_mode=WAL", "synchronous=FULL", "journal_size_limit=67108864")
"""`auto_vacuum` comes first: it counts only before an empty file is written to."""

WRITERS = 0x4D414B45
"""The advisory lock that PostgreSQL writers take ("MAKE")."""

CHANNEL = "makeway"
SNAPSHOT: Any = {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}  # SQLite reads so in any case
BEGIN_WRITE = text(f"SELECT txid_current(), pg_advisory_xact_lock({WRITERS}), pg_notify('{CHANNEL}', :origin)")
WAIT_FOR_WRITERS = text(f"SELECT txid_current(), pg_advisory_xact_lock({WRITERS})")
"""`txid_current` is refused by a standby, which may not know yet what the primary has committed."""

STATUS = text("SELECT txid_status(:number)")
OUTCOME_SECONDS = 12.0
"""Seconds that the outcome of a COMMIT without an answer is looked for before the caller gets OutcomeUnknown."""


class Unanswered(NamedTuple):
    """A COMMIT that the server did not answer: the number of its transaction, and the rows for the listeners."""

    number: int
    changed: Sequence[Any]
    quiet: bool


class Database:
    """Transactions, one writer at a time, and the listeners that are called after each commit.

    `origin` tells the commits of this process from those of other replicas. `durable`: every commit survives a power
    cut, not only those that are said to.
    """

    def __init__(self, url: URL, *, durable: bool = False) -> None:
        self.url = url
        self._durable = durable
        self.reserve = Reserve(Path(url.database or "").parent) if url.get_backend_name() == "sqlite" else None
        self.sqlite = url.get_backend_name() == "sqlite"
        self.engine = engine_for(url)
        self.origin = uuid.uuid4().hex
        self._writing = threading.Lock()
        self._wrote = WriteHealth()
        self._listeners: tuple[Callable[[Sequence[Any]], None], ...] = ()
        self._wakers: tuple[Callable[[Sequence[Any]], None], ...] = ()
        self._unanswered: Unanswered | None = None
        self._closed = False

    def close(self) -> None:
        """Close every connection, those in use as soon as their transaction ends."""
        self._closed = True
        self.engine.dispose()

    @contextmanager
    def _connected(self) -> Iterator[Connection]:
        with self.engine.connect() as connection:
            try:
                yield connection
            finally:
                if self._closed and not connection.invalidated:
                    connection.detach()  # else it would go back into the pool that was closed

    def on_commit(self, callback: Callable[[Sequence[Any]], None], *, last: bool = False) -> Callable[[], None]:
        """Call `callback` after each commit with the rows that it changed, in commit order; return how to end that.

        It is called before the next write may begin, so a listener must be quick and must not write. One that wakes
        a reader comes `last`: the reader then finds the commit wherever another listener keeps it.
        """
        if last:
            self._wakers = (*self._wakers, callback)
        else:
            self._listeners = (*self._listeners, callback)

        def stop() -> None:
            self._listeners = tuple(listener for listener in self._listeners if listener is not callback)
            self._wakers = tuple(listener for listener in self._wakers if listener is not callback)

        return stop

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Read one consistent state: what several statements return is of the same moment."""
        with self._explained(), self._connected() as connection:
            with (connection if self.sqlite else connection.execution_options(**SNAPSHOT)).begin():
                yield connection

    @contextmanager
    def write(self, changed: Sequence[Any] = (), *, quiet: bool = False, durable: bool = False) -> Iterator[Connection]:
        """Write all or nothing, one writer at a time; then call the listeners with `changed`, unless `quiet`.

        `durable`: once this returns, the commit survives a power cut.

        OutcomeUnknown when the connection broke during COMMIT and the server cannot be asked what became of it; the
        listeners are called later then, before the next write, if it was committed. Any other StoreError: nothing was
        written. A write that cannot begin within `BUSY_SECONDS` is one.
        """
        with self._explained(), self._turn() as busy_seconds, self._wrote.watched():
            self._resolve_first()
            if self.reserve is not None:
                self.reserve.before_write()
            number, committing = 0, False
            try:
                with self._connected() as plain:
                    connection = plain.execution_options(
                        makeway_writes="FULL" if durable or self._durable else "NORMAL", makeway_busy=busy_seconds
                    )
                    with connection.begin():
                        if not self.sqlite:
                            number = int(connection.execute(BEGIN_WRITE, {"origin": self.origin}).one()[0])
                        self._wrote.note_begin()
                        yield connection
                        committing = True
            except DBAPIError as error:
                if not (committing and number and error.connection_invalidated):
                    raise
                self._unanswered = Unanswered(number, changed, quiet)
                if not self._outcome(error):
                    raise
            else:
                if not quiet:
                    self._call_listeners(changed)

    @contextmanager
    def _turn(self) -> Iterator[float]:
        """Wait for this process's other writes; yield the seconds that may be spent on a lock of another process.

        A thread lock is not fair: without a bound some wait for as long as the writes before them cannot begin.
        """
        queue = FAILING_QUEUE_SECONDS if self._wrote.is_blocked() else BUSY_SECONDS
        began = time.monotonic()
        if not self._writing.acquire(timeout=queue):
            place = self.url.render_as_string(hide_password=True)
            raise StoreError(f"the database {place} is busy: another write has taken {queue:g} s and more")
        try:
            rest = BUSY_SECONDS - (time.monotonic() - began)
            yield FAILING_BUSY_SECONDS if self._wrote.is_blocked() else max(FAILING_BUSY_SECONDS, rest)
        finally:
            self._writing.release()

    def _outcome(self, error: DBAPIError) -> bool:
        """Whether the COMMIT that ended with this error counts; OutcomeUnknown if the server cannot be asked."""
        ends = time.monotonic() + OUTCOME_SECONDS
        log.warning("The database did not answer a COMMIT; its outcome is looked up: %s", explain(self.url, error))
        while True:
            try:
                return self._resolve()
            except DBAPIError as again:
                if time.monotonic() > ends:
                    raise OutcomeUnknown() from again
                time.sleep(0.2)

    def _resolve(self) -> bool:
        """Return whether the COMMIT without an answer counts (then the listeners are called); False if there is none.

        The lost transaction held the writers' lock, so that it has ended once another transaction gets this lock.
        A server that was restored, or that took over without the last commits, does not know the number or has given
        it to another transaction: then OutcomeUnknown, once, and the listeners are called with the rows as they are.
        """
        lost = self._unanswered
        if lost is None:
            return False
        with self._connected() as connection:
            status = _status_of(connection, lost.number)
            with connection.begin():
                connection.execute(WAIT_FOR_WRITERS)
                rows = by_id(connection, [row.id for row in lost.changed])
        self._unanswered = None
        written = all(row.id in rows and rows[row.id].version >= row.version for row in lost.changed)
        committed = status == "committed" and written
        if not lost.quiet and (committed or status != "aborted"):
            self._call_listeners(lost.changed if committed else list(rows.values()))
        if not committed and status != "aborted":
            raise OutcomeUnknown()
        return committed

    def _resolve_first(self) -> None:
        """Resolve a COMMIT without an answer before anything else; its caller got OutcomeUnknown."""
        with suppress(OutcomeUnknown):
            self._resolve()

    def follow(self, read: Callable[[Connection], Sequence[Any] | None]) -> None:
        """Read what other replicas committed, then call the listeners with the rows, unless `read` returned None.

        No commit of this process comes between the read and the calls, so the listeners get each row in the order
        of its versions.
        """
        with self._explained(), self._writing:
            self._resolve_first()
            with self._connected() as connection, connection.begin():
                changed = read(connection)
            if changed is not None:
                self._call_listeners(changed)

    def _call_listeners(self, changed: Sequence[Any]) -> None:
        for listener in (*self._listeners, *self._wakers):
            try:
                listener(changed)
            except Exception:
                log.exception("A listener of the store failed")

    def run_script(self, statements: str) -> None:
        """Run statements of SQLite outside a transaction, while nothing else writes."""
        with self._writing:
            connection = self.engine.raw_connection()
            try:
                connection.driver_connection.executescript(statements)  # type: ignore[union-attr]
            except sqlite3.Error as error:
                raise StoreError(f"the database cannot do this: {error}") from error
            finally:
                connection.close()

    def failure(self) -> str | None:
        """Return what is wrong with the last write, or None; it never waits, so that it may be called at any time."""
        return self._wrote.failure()

    def probe(self, older_than: float) -> None:
        """Begin and end a transaction that writes nothing, unless the last write is newer than so many seconds."""
        if self._wrote.age() > older_than:
            with self.write(quiet=True):
                pass

    def identity(self) -> str:
        """Return what tells this database from all others, and from a dump of it that was restored elsewhere.

        It stays the same where a PostgreSQL server gets another address, as when a standby takes over; where the
        server does not show what tells it from others, its address and the name of the database are part of it.
        """
        if self.sqlite:
            return f"sqlite/{identity_beside(Path(self.url.database or ''))}"
        with self.read() as connection:
            one = text("SELECT oid::bigint FROM pg_database WHERE datname = current_database()")
            oid = connection.execute(one).scalar_one()
        try:
            with self.read() as connection:
                system = connection.execute(text("SELECT system_identifier FROM pg_control_system()")).scalar_one()
        except StoreError:  # a managed server need not show it
            system = f"{self.url.host} {self.url.port} {self.url.query.get('host', '')} {self.url.database}"
        return f"postgresql/{hashlib.sha256(f'{system} {oid}'.encode()).hexdigest()[:32]}"

    def size(self) -> int:
        """Return the bytes on disk."""
        if self.sqlite:
            path = Path(self.url.database or "")
            return sum(p.stat().st_size for p in (path, path.with_name(path.name + "-wal")) if p.exists())
        with self.read() as connection:
            return int(connection.execute(text("SELECT pg_database_size(current_database())")).scalar_one())

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (DataError, IntegrityError) as error:
            raise RowRefused(explain(self.url, error)) from error
        except DBAPIError as error:
            raise StoreError(explain(self.url, error)) from error


class WriteHealth:
    """How the last write ended, and since when the present one is under way."""

    STUCK_SECONDS = 30.0

    def __init__(self) -> None:
        self._failed: str | None = None
        self._blocked = self._in_transaction = False
        self._began: float | None = None
        self._ended = -math.inf

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch one write."""
        self._began, self._in_transaction = time.monotonic(), False
        try:
            yield
            self._failed = None
            self._ended = time.monotonic()
        except (DataError, IntegrityError):  # of one row: others can be written
            raise
        except DBAPIError as error:
            self._failed, self._blocked = str(error.orig).strip().partition("\n")[0], not self._in_transaction
            raise
        finally:
            self._began = None

    def note_begin(self) -> None:
        """Note that the present write is in its transaction: what fails from now on holds up no other write."""
        self._in_transaction, self._blocked = True, False

    def is_blocked(self) -> bool:
        """Whether the last write could not begin, for a lock or without a connection, or the present one takes long."""
        return self._blocked or self._took() > self.STUCK_SECONDS

    def _took(self) -> float:
        began = self._began
        return 0.0 if began is None else time.monotonic() - began

    def age(self) -> float:
        """Return the seconds since the last write that succeeded; infinity before the first."""
        return time.monotonic() - self._ended

    def failure(self) -> str | None:
        """Return what the database said to the last write, or that the present one takes too long; else None."""
        took = self._took()
        return f"a write takes {took:.0f} s so far" if took > self.STUCK_SECONDS else self._failed


_BUNDLE = "sslrootcert in its address is the file of that authority's certificate"
TLS_REMEDIES = {
    r"certificate has expired|certificate is not yet valid": "renew its certificate, or compare the clocks",
    # What OpenSSL calls the signature of an authority with the same name and another key depends on its version.
    r"certificate verify failed|SSL error: .*(signature|verify)|self.signed certificate": (
        f"its certificate is of an authority that is not trusted here; {_BUNDLE}"
    ),
    r"root certificate file .* does not exist|could not read root certificate file": (
        f"{_BUNDLE}; it must exist in the service's pod or machine, and be readable"
    ),
    r"does not match host name": (
        "name it as its certificate does, or have one made for this name; sslmode=verify-ca does not compare names"
    ),
    r"server does not support SSL": "its ssl is off; turn it on, or leave sslmode out",
    # sslmode=prefer, which is the default, tries both: what was refused with TLS does not lack it.
    r"pg_hba\.conf .*((SSL|GSS) encryption|SSL on)": (
        "an entry of its pg_hba.conf has to take this host, user and database"
    ),
    r"pg_hba\.conf .*(no encryption|SSL off)": (
        "its pg_hba.conf has no entry for this host, user and database, or takes them over TLS only: add an entry, or "
        "sslmode=verify-full and sslrootcert to its address"
    ),
    r"invalid sslmode value": "it is disable, prefer, require, verify-ca or verify-full",
}
"""What to do, by what libpq says of TLS; the first that fits."""


def _status_of(connection: Connection, number: int) -> str | None:
    """Return what PostgreSQL says of a transaction (`committed`, `aborted`); None where it does not know its number."""
    with connection.begin() as transaction:
        connection.execute(WAIT_FOR_WRITERS)
        try:
            return cast("str | None", connection.execute(STATUS, {"number": number}).scalar_one())
        except DBAPIError as error:
            if error.connection_invalidated:
                raise
            transaction.rollback()
            log.error(
                "The database does not know transaction %s, whose COMMIT it did not answer. If a backup was restored, "
                "or a standby took over that lacks the last commits, restart every replica of Makeway: %s",
                number,
                str(error.orig).strip(),
            )
            return None


def parse(url: str) -> URL:
    """Parse a database URL; StoreError shows what a good one looks like."""
    hint = "give sqlite:////full/path/makeway.sqlite or postgresql+psycopg://user:password@host/database"
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise StoreError(f"the database URL cannot be read; {hint}") from error
    name = parsed.get_backend_name()
    if name == "postgresql" and "+" not in parsed.drivername:
        parsed = parsed.set(drivername="postgresql+psycopg")
    if name not in ("sqlite", "postgresql"):
        raise StoreError(f"Makeway cannot use {name!r} as its database; {hint}")
    if name == "sqlite" and parsed.database in (None, "", ":memory:"):
        raise StoreError(f"a database in memory would not outlive the service; {hint}")
    return parsed


def engine_for(url: URL, *, migrating: bool = False) -> Engine:
    """Return the SQLAlchemy engine with the settings above; without foreign keys while tables are rebuilt."""
    if url.get_backend_name() != "sqlite":
        return migrating_engine(url) if migrating else postgres_engine(url)
    create_private(Path(url.database or ""))
    arguments = {"timeout": BUSY_SECONDS, "check_same_thread": False}
    # The connection that was used last comes first: only the last writer's cache of pages is up to date.
    pool: dict[str, Any] = {"poolclass": QueuePool, "pool_size": 8, "max_overflow": 32, "pool_use_lifo": True}
    engine = create_engine(url, connect_args=arguments, **({"poolclass": NullPool} if migrating else pool))
    foreign_keys = "OFF" if migrating else "ON"

    def connected(connection: sqlite3.Connection, _: object) -> None:
        connection.isolation_level = None  # SQLAlchemy's "begin" event issues BEGIN, see below
        empty = connection.execute("PRAGMA page_count").fetchone() == (0,)
        for pragma in (*PRAGMAS, f"foreign_keys={foreign_keys}"):
            if empty or not pragma.startswith("auto_vacuum"):  # that one waits for writers, though it changes nothing
                connection.execute(f"PRAGMA {pragma}")

    def started_now(connection: Connection) -> None:
        synchronous = connection.get_execution_options().get("makeway_writes", "FULL" if migrating else "")
        if synchronous:
            busy_seconds = connection.get_execution_options().get("makeway_busy", BUSY_SECONDS)
            connection.exec_driver_sql(f"PRAGMA busy_timeout={round(busy_seconds * 1000)}")
            connection.exec_driver_sql(f"PRAGMA synchronous={synchronous}")
        connection.exec_driver_sql("BEGIN IMMEDIATE" if synchronous else "BEGIN")

    event.listen(engine, "connect", connected)
    event.listen(engine, "begin", started_now)
    return engine


def identity_beside(path: Path) -> str:
    """Return a name that is kept in a file beside a database; a copy of that file, with another inode, gets its own.

    A snapshot of the whole volume cannot be told from it.
    """
    kept = path.with_name(f"{path.name}.id")
    with suppress(OSError):
        name, _, inode = kept.read_text(encoding="ascii", errors="replace").partition(" ")
        if name and inode.strip() == str(kept.stat().st_ino):
            return name
    name = uuid.uuid4().hex
    with suppress(OSError):  # a full disk: it is made again at the next start
        kept.touch(0o600)
        kept.write_text(f"{name} {kept.stat().st_ino}\n", encoding="ascii")
    return name


def create_private(path: Path) -> None:
    """Create an empty database that only its owner can read: it holds the code of all users."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    except OSError as error:
        raise StoreError(f"the database {path} cannot be opened: {error.strerror}; check the folder") from error


def explain(url: URL, error: DBAPIError) -> str:
    """Return the database's error in one sentence, without the statement and its values."""
    place = url.render_as_string(hide_password=True)
    message = str(error.orig).strip()
    first = message.splitlines()[0] if message else type(error.orig).__name__
    return f"the database {place} cannot do this: {first}{_remedy(message)}"


def _remedy(message: str) -> str:
    """Return what to do about an error of TLS, which names no setting; empty for others."""
    return next((f": {remedy}" for words, remedy in TLS_REMEDIES.items() if re.search(words, message)), "")
