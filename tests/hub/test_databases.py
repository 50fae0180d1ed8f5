"""The databases of one machine are upgraded first, from a copy; those of a newer version are refused in words."""

from __future__ import annotations

import os
import sqlite3
import stat
from contextlib import closing
from pathlib import Path

import pytest
from alembic import command
from hub.portal import Portal
from hub.test_site_settings import READ, refusal
from hub.test_site_settings import read as read
from makeway_hub import databases
from makeway_hub.address import CannotStart
from makeway_hub.state_directory import StateDirectory
from makeway_quota.store import migrate
from makeway_quota.store.database.database import engine_for
from sqlalchemy import make_url


def set_revision(database: Path, revision: str) -> None:
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("CREATE TABLE IF NOT EXISTS alembic_version (version_num VARCHAR(32) NOT NULL)")
        connection.execute("DELETE FROM alembic_version")
        connection.execute("INSERT INTO alembic_version VALUES (?)", (revision,))


def earlier(database: Path) -> None:
    """Make the tables of an earlier release."""
    engine = engine_for(make_url(f"sqlite:///{database}"), migrating=True)
    with engine.begin() as connection:
        command.upgrade(migrate.alembic_config(connection), "0012")
    engine.dispose()


def hub_database(tmp_path: Path) -> Path:
    state = StateDirectory(tmp_path / "var")
    state.create()
    return state.root / "jupyterhub.sqlite"


def test_the_hub_upgrades_its_database_as_in_the_chart(read: READ, tmp_path: Path) -> None:
    set_revision(hub_database(tmp_path), "4621fec11365")  # of JupyterHub 4
    app = read()
    assert app.upgrade_db is True
    assert not read("", "c.JupyterHub.upgrade_db = False").upgrade_db


def test_a_database_of_a_newer_hub_is_refused_in_words(read: READ, tmp_path: Path) -> None:
    set_revision(hub_database(tmp_path), "0123456789ab")
    message = refusal(read, tmp_path)
    assert "is of a newer JupyterHub (its version is 0123456789ab)" in message
    assert "install the newer one again, or put the copy back" in message


@pytest.fixture
def state(tmp_path: Path) -> StateDirectory:
    made = StateDirectory(tmp_path / "var")
    made.create()
    return made


def test_a_new_database_is_left_to_the_service(state: StateDirectory) -> None:
    databases.upgrade_service(state, pytest.fail)


def test_the_newest_version_is_the_last_migration(state: StateDirectory) -> None:
    folder = Path(migrate.__file__).parent / "migrations" / "versions"
    assert databases._latest_revision() == sorted(folder.glob("[0-9]*.py"))[-1].name.split("_")[0]


def test_an_old_database_is_upgraded_after_a_copy(state: StateDirectory) -> None:
    database, messages = state.root / "makeway.sqlite", list[str]()
    env = {"PATH": os.environ["PATH"]}
    set_revision(database, "0001")
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("CREATE TABLE kept (text TEXT)")
    with pytest.raises(CannotStart, match=r"^The service's database could not be upgraded: \S"):
        databases.upgrade_service(state, messages.append, env)  # it has none of the tables of that version
    (copy,) = state.root.glob("makeway.sqlite.2*")
    assert copy.name in messages[0]
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    assert databases.revision_of(copy) == "0001"
    with closing(sqlite3.connect(copy)) as connection:
        assert connection.execute("SELECT count(*) FROM kept").fetchone() == (0,)


def test_the_database_of_an_earlier_release_comes_up_to_date_and_then_stays(state: StateDirectory) -> None:
    database, messages = state.root / "makeway.sqlite", list[str]()
    env = {"PATH": os.environ["PATH"]}
    earlier(database)
    assert databases.revision_of(database) == "0012"
    databases.upgrade_service(state, messages.append, env)
    assert databases.revision_of(database) == databases._latest_revision()
    assert len(messages) == 1
    databases.upgrade_service(state, pytest.fail, env)


def test_a_database_of_a_newer_makeway_is_refused_in_words(state: StateDirectory) -> None:
    set_revision(state.root / "makeway.sqlite", "9999")
    with pytest.raises(CannotStart, match="was written by a newer Makeway"):
        databases.upgrade_service(state, lambda _: None, {"PATH": os.environ["PATH"]})


@pytest.mark.e2e
@pytest.mark.covers("N22")
def test_a_portal_upgrades_what_an_earlier_release_left_and_starts(fresh: Portal) -> None:
    fresh.state.create()
    earlier(fresh.state.root / "makeway.sqlite")
    fresh.start()
    assert "Upgrading the database" in fresh.printed
    assert fresh.printed.index("Upgrading the database") < fresh.printed.index("Starting Makeway")
    fresh.stop()
    fresh.start()
    assert "Upgrading" not in fresh.printed


@pytest.mark.e2e
def test_the_reason_of_a_hub_that_ended_is_shown_last(tmp_path: Path) -> None:
    portal = Portal(tmp_path, "c.JupyterHub.db_url = 'postgresql://127.0.0.1:1/nowhere'")
    assert portal.launch().wait(60) == 1
    assert portal.printed.splitlines()[-1].startswith("The last error in the log: [")
