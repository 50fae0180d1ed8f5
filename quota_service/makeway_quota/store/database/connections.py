"""Connections to PostgreSQL that cannot hang: neither this process nor the server waits for a silent peer for ever.

A network that swallows packets, a server that is frozen and a service that is stopped all look the same from outside:
silence. The client gives up after `SILENCE` seconds and closes the connection; the server ends a transaction that is
left open for `IDLE_IN_TRANSACTION` seconds, so that a stopped replica never keeps the writers' lock, and a statement
before the client gives up on it (`ENDED_BEFORE`), so that none goes on with that lock though nothing waits for its end.
A client that is gone is noticed in the middle of its statement, too, where the server can.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any, TypeVar, cast

from sqlalchemy import URL, Engine, create_engine, event
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.pool import NullPool, QueuePool

T = TypeVar("T")

SILENCE = 10.0
"""Seconds without a byte from the server, while a statement runs, after which the connection is closed."""

IDLE_IN_TRANSACTION = 5.0
ENDED_BEFORE = 0.9
"""Part of the silence after which the server ends a statement"""
CHECK_CLIENT = "SELECT set_config('client_connection_check_interval', '2s', false)"
"""Refused by servers on systems that cannot look for a client meanwhile"""

KEEPALIVE = {
    "connect_timeout": 5,
    "keepalives": 1,
    "keepalives_idle": 2,
    "keepalives_interval": 1,
    "keepalives_count": 3,
    "tcp_user_timeout": 6000,
    "target_session_attrs": "read-write",
}
"""Also how a client of several servers, or of a standby that became one after a fail-over, finds the primary"""
READ_ONLY = "25006"
"""The state of an error: a statement that writes on a connection to a server that has become a standby"""


def postgres_engine(url: URL, *, silence: float | None = None, pooled: bool = True, settings: str = "") -> Engine:
    """Return an engine whose statements end after `silence` (default SILENCE) seconds without an answer.

    `settings` is run on each new connection, after the limit of open transactions is set.
    """
    arguments = {name: value for name, value in KEEPALIVE.items() if name not in url.query}
    if pooled:
        engine = create_engine(url, connect_args=arguments, poolclass=QueuePool, pool_pre_ping=True)
    else:
        engine = create_engine(url, connect_args=arguments, poolclass=NullPool)
    silence = SILENCE if silence is None else silence
    limited = _limited(silence)
    begin = (
        f"SET idle_in_transaction_session_timeout = '{IDLE_IN_TRANSACTION:g}s'; "
        f"SET statement_timeout = {round(silence * ENDED_BEFORE * 1000)}; {settings}"
    )

    def connect(dialect: object, record: object, args: Any, more: Any) -> Any:
        return limited.connect(*args, **more)

    def connected(connection: Any, record: object) -> None:
        try:
            connection.execute(begin)
            connection.commit()
            _check_client(connection)
        except BaseException:
            connection.close()
            raise

    event.listen(engine, "do_connect", connect)
    event.listen(engine, "handle_error", _leave_standby)
    event.listen(engine, "connect", connected)
    return engine


def migrating_engine(url: URL) -> Engine:
    """Return an engine without limits of time, for migrations, which finds the primary as `postgres_engine` does."""
    names = ("connect_timeout", "target_session_attrs")
    arguments = {name: KEEPALIVE[name] for name in names if name not in url.query}
    return create_engine(url, connect_args=arguments, poolclass=NullPool)


def _leave_standby(context: ExceptionContext) -> None:
    """Close all connections to a server that has become a standby: the next ones find the primary."""
    if getattr(context.original_exception, "sqlstate", "") == READ_ONLY:
        context.is_disconnect = True


def _check_client(connection: Any) -> None:
    from psycopg import Error

    try:
        connection.execute(CHECK_CLIENT)
        connection.commit()
    except Error:
        connection.rollback()


def _limited(silence: float) -> Any:
    from psycopg import Connection, OperationalError  # SQLite works without it

    class Limited(Connection[Any]):
        """A connection that is closed when the server stays silent in the middle of a statement."""

        def wait(self, gen: Generator[Any, Any, T], *args: Any, **more: Any) -> T:
            return super().wait(self._limited(gen), *args, **more)

        def _limited(self, gen: Generator[Any, Any, T]) -> Generator[Any, Any, T]:
            ends = time.monotonic() + silence
            try:
                state = next(gen)
                while True:
                    ready = yield state
                    if ready:
                        ends = time.monotonic() + silence
                    elif time.monotonic() > ends:
                        self.pgconn.finish()
                        raise OperationalError(f"no answer for {silence:g} s")
                    state = gen.send(ready)
            except StopIteration as end:
                return cast(T, end.value)

    return Limited
