"""A PostgreSQL that cannot be used is refused before anything is written, in words; what can be used is."""

from __future__ import annotations

from contextlib import closing

import pytest
from makeway_quota.store import open_store
from makeway_quota.store.database import postgres_check
from makeway_quota.store.database.database import Database, parse
from makeway_quota.store.database.postgres_check import check_server
from makeway_quota.store.errors import StoreError
from pooler import pooler
from postgres import address, empty_database, postgres_server
from sqlalchemy import create_engine, text
from sqlalchemy.exc import DBAPIError


def run(url: str, *statements: str) -> None:
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        for statement in statements:
            connection.execute(text(statement))
    engine.dispose()


@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_pooler_in_transaction_mode_is_refused(postgres: str, size: int) -> None:
    empty_database(postgres)
    with pooler(postgres, size=size) as made, pytest.raises(StoreError, match="pool_mode = transaction"):
        open_store(made.url)
    url = address(postgres, "one_test")
    engine = create_engine(url)
    with engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'")).scalar_one() == 0
    engine.dispose()


def test_a_pooler_with_one_connection_is_refused_in_time(postgres: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_check, "SECONDS", 0.5)
    empty_database(postgres)
    with pooler(postgres, size=1) as made, pytest.raises(StoreError, match=r"no answer for 0\.5 s"):
        check_server(parse(made.url))


def test_a_pooler_in_session_mode_can_be_used(postgres: str) -> None:
    empty_database(postgres)
    with pooler(postgres, mode="session", size=4) as made:
        check_server(parse(made.url))


def test_statement_mode_is_refused_in_the_same_words(postgres: str) -> None:
    error = DBAPIError("BEGIN", {}, Exception(f"ERROR: {postgres_check.STATEMENT_POOLING_ERROR}"))
    assert "pool_mode = statement" in postgres_check._explained(parse(address(postgres)), error)


def test_a_database_that_only_reads_is_refused(postgres: str) -> None:
    url = empty_database(postgres, "reads")
    run(address(postgres), "ALTER DATABASE reads SET default_transaction_read_only = on")
    with pytest.raises(StoreError, match="it cannot be written to: this server is a standby"):
        open_store(url)


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        (["spawners", "oauth_clients", "alembic_version"], "the database of a JupyterHub"),
        (
            ["alembic_version", "dag", "dag_run"],
            "the database of another program, with the tables alembic",
        ),
    ],
)
def test_the_database_of_another_program_is_refused(postgres: str, tables: list[str], words: str) -> None:
    url = empty_database(postgres)
    run(url, *(f"CREATE TABLE {name} (version_num text)" for name in tables))
    with pytest.raises(StoreError, match=words) as refused:
        open_store(url)
    assert "make one for Makeway alone" in str(refused.value)


def test_an_empty_database_and_one_of_makeway_are_used(postgres: str) -> None:
    url = empty_database(postgres)
    for _ in range(2):
        open_store(url).close()


def test_a_password_is_not_in_the_refusal(postgres: str) -> None:
    empty_database(postgres)
    with pooler(postgres) as made, pytest.raises(StoreError) as refused:
        check_server(parse(made.url.replace("makeway@", "makeway:secret-word@")))
    assert "secret-word" not in str(refused.value)


def test_connections_to_a_server_that_became_a_standby_are_left(postgres: str) -> None:
    """After a fail-over the old primary comes back read-only, and its connections are still open."""
    store = open_store(empty_database(postgres, "failover"))
    try:
        database = store._database
        with database.write(quiet=True) as connection:
            before = connection.execute(postgres_check.BACKEND_PID_SQL).scalar_one()
        refused = text("DO $$ BEGIN SET TRANSACTION READ ONLY; CREATE TABLE written (x int); END $$")
        with pytest.raises(StoreError, match="read-only"), database.write(quiet=True) as connection:
            connection.execute(refused)
        with database.write(quiet=True) as connection:
            assert connection.execute(postgres_check.BACKEND_PID_SQL).scalar_one() != before
    finally:
        store.close()


def test_tables_are_made_on_the_primary_of_several_servers(postgres: str) -> None:
    with postgres_server() as standby:
        for folder in (standby, postgres):
            empty_database(folder)
        run(address(standby), "ALTER DATABASE one_test SET default_transaction_read_only = on")
        url = f"postgresql+psycopg://makeway@/one_test?host={standby}&host={postgres}"
        with closing(open_store(url)) as store:
            assert store.last_event_id() == 0
        made = "SELECT count(*) FROM pg_tables WHERE schemaname = 'public'"
        for folder, has in ((standby, False), (postgres, True)):
            engine = create_engine(address(folder, "one_test"))
            with engine.connect() as connection:
                assert bool(connection.execute(text(made)).scalar_one()) == has
            engine.dispose()


def test_servers_that_do_not_show_their_identity_are_told_apart_by_their_addresses(postgres: str) -> None:
    identities = set()
    with postgres_server() as other:
        for folder in (postgres, other):
            url = empty_database(folder)
            run(address(folder), "DO $$ BEGIN CREATE ROLE plain LOGIN; EXCEPTION WHEN duplicate_object THEN END $$")
            run(url, "REVOKE EXECUTE ON FUNCTION pg_control_system() FROM PUBLIC")
            plain = url.replace("makeway@", "plain@")
            with closing(Database(parse(plain))) as database:
                identities.add(database.identity())
    assert len(identities) == 2
