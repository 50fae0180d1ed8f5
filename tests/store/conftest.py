"""A store in an empty database: SQLite always, PostgreSQL where its server can be started."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from makeway_quota.store import Store, open_store
from makeway_quota.store.records import NewWorkload
from postgres import empty_database, migrated_database, postgres_server
from quick_databases import migrations

NewJob = Callable[..., NewWorkload]


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """Start a PostgreSQL server of our own."""
    with postgres_server() as folder:
        yield folder


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Return the address of a database without rows."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'makeway.sqlite'}"
        return
    yield migrated_database(request.getfixturevalue("postgres"))


@pytest.fixture(params=["sqlite", "postgresql"])
def new_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Yield the address of a database without tables; `open_store` makes them by the migrations, as in the service."""
    with migrations():
        if request.param == "sqlite":
            yield f"sqlite:///{tmp_path / 'makeway.sqlite'}"
        else:
            yield empty_database(request.getfixturevalue("postgres"))


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    """Open an empty store."""
    opened = open_store(url)
    yield opened
    opened.close()


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """Return the address of an SQLite file that does not exist yet."""
    return f"sqlite:///{tmp_path / 'makeway.sqlite'}"


@pytest.fixture
def job() -> NewJob:
    """Make submissions that differ only in what the test says."""

    def make(id: str = "j1", **given: object) -> NewWorkload:
        fields: dict[str, object] = {"kind": "job", "team": "rnd", "profile": "gpu1", "owner": "ana", "gpus": 1000}
        return NewWorkload(id, **{**fields, **given})  # type: ignore[arg-type]

    return make
