"""Bring the tables up to date, in one transaction and under a lock: the first replica upgrades, the others wait."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import URL, Connection, text
from sqlalchemy.exc import DBAPIError

from .database.database import WRITERS, engine_for, explain
from .errors import StoreError

MIGRATIONS = Path(__file__).parent / "migrations"
UPGRADES = 0x4D414B46
"""The advisory lock that a PostgreSQL upgrade takes."""


def upgrade(url: URL) -> None:
    """Run every migration that the database has not seen; StoreError if it comes from a newer Makeway."""
    engine = engine_for(url, migrating=True)
    try:
        with engine.begin() as connection:  # on SQLite BEGIN IMMEDIATE is the lock
            if connection.dialect.name == "postgresql":
                connection.execute(text(f"SELECT pg_advisory_xact_lock({UPGRADES})"))
            _refuse_newer(connection, url)  # before the lock that the replicas of the newer Makeway write under
            if connection.dialect.name == "postgresql" and not is_current(connection):
                # a replica of the last release may write rows in another order
                connection.execute(text(f"SELECT pg_advisory_xact_lock({WRITERS})"))
            command.upgrade(alembic_config(connection), "head")
    except DBAPIError as error:
        raise StoreError(explain(url, error)) from error
    finally:
        engine.dispose()


def _refuse_newer(connection: Connection, url: URL) -> None:
    """Raise StoreError where the database has seen a migration that this Makeway does not have."""
    script = ScriptDirectory.from_config(alembic_config(connection))
    known = {one.revision for one in script.walk_revisions()}
    if newer := sorted(set(MigrationContext.configure(connection).get_current_heads()) - known):
        raise StoreError(
            f"the database {url.render_as_string()} was written by a newer Makeway (it is of version "
            f"{', '.join(newer)}, and this one has versions up to {', '.join(sorted(script.get_heads()))}) and is left "
            "as it is: install the newer one again, or restore the backup from before its upgrade"
        )


def is_current(connection: Connection) -> bool:
    """Whether the database has seen every migration."""
    known = ScriptDirectory.from_config(alembic_config(connection)).get_heads()
    return set(MigrationContext.configure(connection).get_current_heads()) == set(known)


def alembic_config(connection: Connection) -> Config:
    """Return alembic's configuration: the folder of the migrations, and the connection."""
    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config
