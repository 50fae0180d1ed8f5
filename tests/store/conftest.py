"""A store in an empty database: SQLite always, PostgreSQL where its server can be started."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from makeway_quota.store import Store, open_store
from makeway_quota.store.records import NewWorkload
from sqlalchemy import create_engine, text

NewJob = Callable[..., NewWorkload]


def _postgres_tool(name: str) -> str | None:
    found = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return shutil.which(name) or (str(found[-1]) if found else None)


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """Start a PostgreSQL server of our own behind a socket in a temporary folder; it refuses to run as root."""
    pytest.importorskip("psycopg")
    initdb, postgres, ready = (_postgres_tool(name) for name in ("initdb", "postgres", "pg_isready"))
    if not (initdb and postgres and ready):
        pytest.skip("PostgreSQL's server is not installed")
    user = "nobody" if os.geteuid() == 0 else None
    with tempfile.TemporaryDirectory(prefix="makeway-pg-", ignore_cleanup_errors=True) as folder:
        if user:
            shutil.chown(folder, user)
        data = f"{folder}/data"
        made = subprocess.run(
            [initdb, "-D", data, "-U", "makeway", "-A", "trust", "-E", "UTF8", "--no-sync"],
            user=user,
            capture_output=True,
            check=False,
        )
        if made.returncode:
            pytest.skip(f"PostgreSQL cannot be set up here: {made.stderr.decode().strip()[-200:]}")
        settings = ["-c", "listen_addresses=", "-c", f"unix_socket_directories={folder}", "-c", "fsync=off"]
        with open(f"{folder}/log", "wb") as log:
            server = subprocess.Popen([postgres, "-D", data, *settings], user=user, stdout=log, stderr=log)
        try:
            wait = f"until {ready} -q -h {folder}; do sleep 0.1; done"
            subprocess.run(["sh", "-c", wait], timeout=180, check=True)
            yield f"postgresql+psycopg://makeway@/postgres?host={folder}"
        finally:
            server.terminate()
            server.wait(30)


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Give the address of an empty database."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'makeway.sqlite'}"
        return
    server = request.getfixturevalue("postgres_url")
    admin = create_engine(server, isolation_level="AUTOCOMMIT")
    try:
        with admin.connect() as connection:
            connection.execute(text("DROP DATABASE IF EXISTS one_test WITH (FORCE)"))
            connection.execute(text("CREATE DATABASE one_test"))
        yield server.replace("/postgres?", "/one_test?")
    finally:
        admin.dispose()


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    """Open an empty store."""
    opened = open_store(url)
    yield opened
    opened.close()


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """Give the address of an SQLite file that does not exist yet."""
    return f"sqlite:///{tmp_path / 'makeway.sqlite'}"


@pytest.fixture
def job() -> NewJob:
    """Make submissions that differ only in what the test says."""

    def make(id: str = "j1", **given: object) -> NewWorkload:
        fields: dict[str, object] = {"kind": "job", "team": "rnd", "profile": "gpu1", "owner": "ana", "gpus": 1000}
        return NewWorkload(id, **{**fields, **given})  # type: ignore[arg-type]

    return make
