"""Make SQLite quick for tests, which open a thousand files: tables are copied, and nothing is flushed to the disk."""

from __future__ import annotations

import os
import shutil
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from makeway_quota.store import store
from makeway_quota.store.database import database
from makeway_quota.store.database.database import parse
from sqlalchemy import URL, Connection, Engine, event

LEVEL = "makeway_writes"
"""The option of a connection with the level of `synchronous`"""
UPGRADE, ENGINE_FOR, PRAGMAS = store.upgrade, database.engine_for, database.PRAGMAS
"""As they are in the service"""


@contextmanager
def copied_tables(folder: Path) -> Iterator[None]:
    """Have `open_store` of this process copy a migrated file, made in this folder, wherever there is no file yet.

    Where there is one, of whatever version, and on PostgreSQL, the migrations run.
    """
    migrated = folder / "migrated.sqlite"
    UPGRADE(parse(f"sqlite:///{migrated}"))
    with closing(sqlite3.connect(migrated)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def copy_or_upgrade(url: URL) -> None:
        path = Path(url.database or "")
        if url.get_backend_name() != "sqlite" or path.exists():
            return UPGRADE(url)
        own = path.with_name(f"{path.name}.{threading.get_ident()}")
        try:
            shutil.copyfile(migrated, own)
            own.chmod(0o600)
            os.link(own, path)  # at once, and only where no other thread was faster
        except OSError:  # also no folder or a full disk, of which the migrations tell
            UPGRADE(url)
        finally:
            with suppress(OSError):
                own.unlink()
        return None

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(store, "upgrade", copy_or_upgrade)
        yield


@contextmanager
def migrations() -> Iterator[None]:
    """Have `open_store` make the tables as it does in the service, within `copied_tables`."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(store, "upgrade", UPGRADE)
        yield


@contextmanager
def no_flushes() -> Iterator[None]:
    """Have SQLite leave it to the system when commits of this process get to the disk; only a power cut loses them.

    Tests of what is flushed (store/test_durable.py) undo it with `flushes`.
    """

    def without_flushes(url: URL, *, migrating: bool = False) -> Engine:
        engine = ENGINE_FOR(url, migrating=migrating)

        def lower(connection: Connection, options: dict[str, Any]) -> None:
            if LEVEL in options:
                options[LEVEL] = "OFF"

        if url.get_backend_name() == "sqlite":
            event.listen(engine, "set_connection_execution_options", lower)
        return engine

    quick = tuple("synchronous=OFF" if pragma == "synchronous=FULL" else pragma for pragma in PRAGMAS)
    assert quick != PRAGMAS
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(database, "engine_for", without_flushes)
        patched.setattr(database, "PRAGMAS", quick)
        yield


@contextmanager
def flushes() -> Iterator[None]:
    """Have SQLite flush as it does in the service, within `no_flushes`."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(database, "engine_for", ENGINE_FOR)
        patched.setattr(database, "PRAGMAS", PRAGMAS)
        yield
