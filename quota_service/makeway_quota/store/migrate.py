"""Bring the tables up to date, in one transaction and under a lock: the first replica upgrades, the others wait."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import URL, Connection, text
from sqlalchemy.exc import DBAPIError

from .database.database import WRITERS, engine_for, explain
from .errors import StoreError

MIGRATIONS = Path(__file__).parent / "migrations"
UPGRADES = 0x4D414B46
"""The advisory lock that a PostgreSQL upgrade takes."""


def upgrade(url: URL) -> None:
    """Run every migration that the database has not seen; StoreError if it is of a newer Makeway or of two."""
    engine = engine_for(url, migrating=True)
    try:
        with engine.begin() as connection:  # on SQLite BEGIN IMMEDIATE is the lock
            if connection.dialect.name == "postgresql":
                connection.execute(text(f"SELECT pg_advisory_xact_lock({UPGRADES})"))
            _refuse_others(connection, url)  # before the lock that the replicas of the newer Makeway write under
            if connection.dialect.name == "postgresql" and not is_current(connection):
                # a replica of the last release may write rows in another order
                connection.execute(text(f"SELECT pg_advisory_xact_lock({WRITERS})"))
            command.upgrade(alembic_config(connection), "head")
    except CommandError as error:
        raise StoreError(f"the database {url.render_as_string()} cannot be brought up to date: {error}") from error
    except DBAPIError as error:
        raise StoreError(explain(url, error)) from error
    finally:
        engine.dispose()


def _refuse_others(connection: Connection, url: URL) -> None:
    """Raise StoreError where the database has seen a migration that this Makeway lacks, or is of several versions."""
    script = ScriptDirectory.from_config(alembic_config(connection))
    known = {one.revision for one in script.walk_revisions()}
    heads = sorted(set(MigrationContext.configure(connection).get_current_heads()))
    if newer := [one for one in heads if one not in known]:
        raise StoreError(
            f"the database {url.render_as_string()} was written by a newer Makeway (it is of version "
            f"{', '.join(newer)}, and this one has versions up to {', '.join(sorted(script.get_heads()))}) and is left "
            "as it is: install the newer one again, or restore the backup from before its upgrade"
        )
    if len(heads) > 1:
        raise StoreError(
            f"the database {url.render_as_string()} is of several versions at once ({', '.join(heads)}), as after a "
            "restore into a database that had tables already, and is left as it is: restore the backup into an empty "
            "database"
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
