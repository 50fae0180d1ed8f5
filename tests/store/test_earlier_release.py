"""A service of an earlier release finds the database of a later one: it says what to do, and changes nothing."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from makeway_quota.application import Application
from makeway_quota.backends.base import Phase
from makeway_quota.backends.local.backend import LocalBackend
from makeway_quota.store import Store, StoreError, migrate, open_store
from makeway_quota.store.database.database import WRITERS, engine_for, parse
from makeway_quota.store.records import Change, NewDecision
from makeway_quota.store.storage.sealed_secrets import SecretKeys, StoredCredential
from postgres import empty_database
from quick_databases import migrations
from running import running
from sqlalchemy import inspect, text

from .conftest import NewJob

pytestmark = pytest.mark.covers("F80", "N22")


@pytest.fixture
def url(new_url: str) -> str:
    return new_url


@contextmanager
def earlier_release(folder: Path, missing: int) -> Iterator[str]:
    """Open databases with so few of the newest migrations in the block; return the version of the last one."""
    copy = Path(shutil.copytree(migrate.MIGRATIONS, folder / f"without-{missing}", dirs_exist_ok=True))
    files = sorted((copy / "versions").glob("[0-9]*.py"))
    for file in files[-missing:]:
        file.unlink()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(migrate, "MIGRATIONS", copy)
        yield files[-missing - 1].name[:4]


def contents(url: str) -> dict[str, list[str]]:
    """Return every row of every table, as text."""
    engine = engine_for(parse(url), migrating=True)
    try:
        with engine.begin() as connection:
            return {
                table: sorted(map(str, connection.execute(text(f'SELECT * FROM "{table}"'))))
                for table in inspect(connection).get_table_names()
            }
    finally:
        engine.dispose()


def fill(store: Store, job: NewJob) -> None:
    """Write a job that runs, one that waits, and a document."""
    store.policies.add("pools: []\n", "seed", "the first", 0, 1.0)
    for id in ("runs", "waits"):
        store.add_workload(job(id), (), NewDecision("submit", id, "rnd", "ana", "job", "submitted"), now=1.0)
    store.commit([Change("runs", {"state": "running", "attempt": 1})], now=2.0)


@pytest.mark.parametrize("missing", [1, 5])
def test_the_database_of_a_later_release_is_refused_in_words_and_left_as_it_is(
    url: str, missing: int, job: NewJob, tmp_path: Path
) -> None:
    store = open_store(url)
    fill(store, job)
    store.close()
    before, newest = contents(url), max(file.name[:4] for file in migrate.MIGRATIONS.glob("versions/[0-9]*.py"))
    with earlier_release(tmp_path, missing) as version:
        for _ in range(2):
            with pytest.raises(StoreError) as refused:
                open_store(url)
            message = str(refused.value)
            assert f"it is of version {newest}, and this one has versions up to {version}" in message
            assert "install the newer one again, or restore the backup from before its upgrade" in message
    assert contents(url) == before
    store = open_store(url)
    assert {row.id: row.state for row in store.active()} == {"runs": "running", "waits": "pending"}
    store.close()


@pytest.mark.parametrize("others", [1, 2])
def test_a_database_of_several_versions_at_once_is_refused_in_words_and_left_as_it_is(url: str, others: int) -> None:
    """As after a restore into a database that had the tables already."""
    open_store(url).close()
    versions = sorted(file.name[:4] for file in migrate.MIGRATIONS.glob("versions/[0-9]*.py"))
    engine = engine_for(parse(url), migrating=True)
    with engine.begin() as connection:
        for version in versions[-3 : -3 + others]:
            connection.execute(text("INSERT INTO alembic_version VALUES (:version)"), {"version": version})
    engine.dispose()
    before = contents(url)
    with pytest.raises(StoreError) as refused:
        open_store(url)
    message = str(refused.value)
    assert f"is of several versions at once ({', '.join([*versions[-3 : -3 + others], versions[-1]])})" in message
    assert "restore the backup into an empty database" in message
    assert contents(url) == before


def test_what_an_earlier_release_left_comes_up_to_date_after_it_was_refused(
    url: str, job: NewJob, tmp_path: Path
) -> None:
    with earlier_release(tmp_path, 1):
        migrate.upgrade(parse(url))
    open_store(url).close()
    with earlier_release(tmp_path, 1), pytest.raises(StoreError, match="newer Makeway"):
        open_store(url)
    store = open_store(url)
    fill(store, job)
    assert len(store.active()) == 2
    store.close()


def test_credentials_that_an_earlier_release_sealed_are_kept_and_their_names_are_free_for_other_teams(
    url: str, tmp_path: Path
) -> None:
    keys = SecretKeys(tmp_path / "keys", made=True)
    sealed = {name: keys.fernet(make=True).encrypt(f'{{"content": "{name}"}}'.encode()).decode() for name in ("a", "b")}
    with earlier_release(tmp_path, sum(file.name >= "0022" for file in migrate.MIGRATIONS.glob("versions/0*.py"))):
        migrate.upgrade(parse(url))
    engine = engine_for(parse(url), migrating=True)
    with engine.begin() as connection:
        for name, team in (("a", "rnd"), ("b", "")):
            row = {"name": name, "team": team, "sealed": sealed[name]}
            insert = "INSERT INTO sealed_secrets (name, kind, team, sealed, updated_at, updated_by)"
            connection.execute(text(f"{insert} VALUES (:name, 'file', :team, :sealed, 7.5, 'root')"), row)
    engine.dispose()
    store = open_store(url)
    secrets, said = store.secrets, NewDecision("credential", None, None, "root", "credential", "is set", {})
    before = [StoredCredential("a", "file", "rnd", 7.5, "root"), StoredCredential("b", "file", "", 7.5, "root")]
    assert secrets.list() == before
    for name, team in (("a", "ops"), ("b", "rnd")):
        secrets.write(StoredCredential(name, "file", team, 8.0, "root"), {"content": "new"}, keys, said)
    shown = {
        team: {one.name: values["content"] for one, values in secrets.opened(keys, ("file",), team)}
        for team in ("rnd", "ops", "")
    }
    assert shown == {"rnd": {"a": "a", "b": "new"}, "ops": {"a": "new", "b": "b"}, "": {"b": "b"}}
    store.close()


async def test_jobs_and_notebooks_go_on_while_the_earlier_release_is_refused(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with migrations():
        async with running(state) as run:
            job = await run.submit("ana", "train", profile="gpu1")
            await run.job(job.id, "running")
            notebook = await run.granted((await run.session("bo", "gpu1", "devops")).id)
            await run.service.stop(stop_jobs=False)
            settings = run.service.components.settings
            local = LocalBackend(settings.state_dir, virtual_gpus=10, virtual_nodes=1, tick=0.2)
            with earlier_release(tmp_path, 1), pytest.raises(StoreError, match="was written by a newer Makeway"):
                await Application.open(settings, local)
            run.service = await Application.open(settings, local)
            await run.service.start()
            rows = await run.service.components.world.rows()
            assert {id: (row.state, row.attempt) for id, row in rows.items()} == {
                job.id: ("running", 1),
                notebook.id: ("starting", rows[notebook.id].attempt),
            }
            (attempt,) = (await run.service.components.backend.observe()).attempts
            assert attempt.phase is Phase.RUNNING, "it was not ended, nor started again"


def test_a_refused_service_waits_for_no_writer_of_the_later_release(postgres: str, tmp_path: Path) -> None:
    """A pod that is refused is started again and again beside those that serve, which must not wait for it."""
    with migrations():
        url = empty_database(postgres)
        open_store(url).close()
        engine, told = engine_for(parse(url), migrating=True), list[BaseException]()
        with earlier_release(tmp_path, 1), engine.begin() as writer:
            writer.execute(text(f"SELECT pg_advisory_xact_lock_shared({WRITERS})"))

            def start() -> None:
                try:
                    open_store(url)
                except StoreError as error:
                    told.append(error)

            started = threading.Thread(target=start, daemon=True)
            started.start()
            started.join(30)
            assert [type(error) for error in told] == [StoreError]
        engine.dispose()
