"""Refuse a PostgreSQL that cannot be used: behind a pooler, a standby, or with the tables of another program.

`open_store` calls it before anything is written, `doctor` as one of its checks. The lock of the leader, the listeners
of commits and the limits of statements belong to a session of the server: a pooler that lends a server connection for
one transaction, or one statement, gives them to other clients.
"""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import URL, Connection, Engine, inspect, text
from sqlalchemy.exc import DBAPIError

from ..errors import StoreError
from .connections import postgres_engine
from .database import explain, parse

SECONDS = 10.0
"""Seconds that a statement of the check may take: a pooler may have no second connection to give"""
BACKEND_PID_SQL = text("SELECT pg_backend_pid()")
NOW_SQL = text("SELECT extract(epoch FROM clock_timestamp())")
FACTS_SQL = text(
    "SELECT current_setting('server_version_num') AS version, inet_server_addr() IS NULL AS local, "
    "current_setting('max_connections')::int - (SELECT count(*) FROM pg_stat_activity) AS free"
)
POOLED = (
    "a connection pooler is in between that changes the server's connection between two transactions (pool_mode = "
    "transaction), so that locks and settings of one session reach others: connect to PostgreSQL itself, or set "
    "pool_mode = session for this database"
)
READ_ONLY = (
    "it cannot be written to: this server is a standby, or default_transaction_read_only is on for this database or "
    "user. Name the primary, or all servers (?host=one:5432&host=two:5432), of which the one that can be written to is "
    "taken"
)
STATEMENT_POOLING_ERROR = "transaction blocks not allowed in statement pooling mode"
OWN_TABLES = frozenset({"workloads", "decisions", "terms"})
HUB_TABLES = frozenset({"spawners", "oauth_clients"})


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a PostgreSQL says of itself; durations in seconds."""

    version: int
    """as 150004 for 15.4"""
    encrypted: bool
    """whether the connection is; a socket of this machine counts"""
    latency: float
    """of the fastest of some statements"""
    clock_skew: float
    """by which its clock is ahead of this machine's"""
    free_connections: int


def read_facts(url: str) -> ServerFacts | None:
    """Return what the PostgreSQL at an address says; None for SQLite, StoreError where it cannot be used."""
    parsed = parse(url)
    if parsed.get_backend_name() == "sqlite":
        return None
    check_server(parsed)
    engine = postgres_engine(parsed, silence=SECONDS, pooled=False)
    try:
        with engine.connect() as connection, connection.begin():
            latency, clock_skew = _timed(connection)
            row = connection.execute(FACTS_SQL).one()
            encrypted = bool(connection.connection.driver_connection.pgconn.ssl_in_use) or row.local  # type: ignore[union-attr]
            return ServerFacts(int(row.version), bool(encrypted), latency, clock_skew, int(row.free))
    except DBAPIError as error:
        raise StoreError(_explained(parsed, error)) from error
    finally:
        engine.dispose()


def stored_policy(url: str) -> str | None:
    """Return the policy document in force, without a change of the database; None where there is none yet."""
    newest = "SELECT document FROM policies ORDER BY version DESC LIMIT 1"
    return next(iter(_documents(url, "policies", newest)), None)


def stored_deployments(url: str) -> list[str]:
    """Return the documents of deployments, without a change of the database."""
    return _documents(url, "deployments", "SELECT document FROM deployments WHERE deleted_at IS NULL ORDER BY name")


def _documents(url: str, table: str, query: str) -> list[str]:
    """Return the documents that a query of a table finds; none where the database has no such table."""
    parsed = parse(url)
    if parsed.get_backend_name() == "sqlite":
        if not (path := Path(parsed.database or "")).exists():
            return []
        with suppress(sqlite3.Error), closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as file:
            return [str(row[0]) for row in file.execute(query) if row[0] is not None]
        return []
    engine = postgres_engine(parsed, silence=SECONDS, pooled=False)
    try:
        with engine.connect() as connection, connection.begin():
            if not inspect(connection).has_table(table):
                return []
            return [str(row[0]) for row in connection.execute(text(query)) if row[0] is not None]
    except DBAPIError:  # what is wrong with the database is a finding of its own
        return []
    finally:
        engine.dispose()


def _timed(connection: Connection) -> tuple[float, float]:
    """Return the seconds of the fastest statement, and how far the server's clock was ahead in it."""
    result = []
    for _ in range(5):
        before, began = time.time(), time.monotonic()
        theirs = float(connection.execute(NOW_SQL).scalar_one())
        took = time.monotonic() - began
        result.append((took, theirs - before - took / 2))
    return min(result)


def check_server(url: URL) -> None:
    """Raise StoreError where this PostgreSQL, or the way to it, cannot be used."""
    engine = postgres_engine(url, silence=SECONDS, pooled=False)
    try:
        _check_sessions(url, engine)
        with engine.connect() as connection:
            _check_tables(url, connection)
    except DBAPIError as error:
        raise StoreError(_explained(url, error)) from error
    finally:
        engine.dispose()


def _check_sessions(url: URL, engine: Engine) -> None:
    """Raise StoreError where a pooler is in between.

    A connection then changes its server process between transactions, or shares it with another connection.
    """
    with engine.connect() as one, engine.connect() as other:
        with one.begin():
            before = one.execute(BACKEND_PID_SQL).scalar_one()
        with other.begin():
            meanwhile = other.execute(BACKEND_PID_SQL).scalar_one()
            with one.begin():
                after = one.execute(BACKEND_PID_SQL).scalar_one()
    if before != after or meanwhile == before:
        raise StoreError(f"the database {_shown_url(url)} cannot be used: {POOLED}")


def _check_tables(url: URL, connection: Connection) -> None:
    """Refuse the database of another program, whose tables Makeway's would mix with."""
    with connection.begin():
        tables = set(inspect(connection).get_table_names())
    if tables & OWN_TABLES or not tables:
        return
    if tables >= HUB_TABLES:
        what = "it is the database of a JupyterHub"
    elif "alembic_version" in tables:
        what = f"it is the database of another program, with the tables {', '.join(sorted(tables)[:3])} …"
    else:
        return
    raise StoreError(
        f"the database {_shown_url(url)} cannot be used: {what}; make one for Makeway alone, and name that"
    )


def _explained(url: URL, error: DBAPIError) -> str:
    if STATEMENT_POOLING_ERROR in str(error.orig):
        return f"the database {_shown_url(url)} cannot be used: {POOLED.replace('= transaction', '= statement')}"
    if "session is read-only" in str(error.orig):  # libpq, by target_session_attrs
        return f"the database {_shown_url(url)} cannot be used: {READ_ONLY}"
    return explain(url, error)


def _shown_url(url: URL) -> str:
    return url.render_as_string(hide_password=True)
