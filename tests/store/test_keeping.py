"""Policy versions, forecasts and migrations."""

from __future__ import annotations

import threading
import time

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from makeway_quota.store import Conflict, Store, StoreError, open_store
from makeway_quota.store.database.database import WAIT_FOR_WRITERS, WRITERS, engine_for, parse
from makeway_quota.store.migrate import alembic_config, upgrade
from makeway_quota.store.records import Attempt, Change, NewDecision, NewWorkload, PastRun
from makeway_quota.store.tables import metadata
from makeway_quota.values import Notice, Place
from postgres import empty_database
from sqlalchemy import inspect, text

from .machine_rows import launch


@pytest.fixture
def url(new_url: str) -> str:
    return new_url


def test_the_migrations_make_exactly_the_tables(url: str) -> None:
    parsed = parse(url)
    upgrade(parsed)
    upgrade(parsed)
    engine = engine_for(parsed, migrating=True)
    try:
        with engine.begin() as connection:
            context = MigrationContext.configure(connection, opts={"compare_type": True})
            assert compare_metadata(context, metadata) == []
            indexes = {str(index["name"]) for index in inspect(connection).get_indexes("workloads")}
            assert "uq_workloads_live_session" in indexes
            command.downgrade(alembic_config(connection), "base")
            assert set(inspect(connection).get_table_names()) <= {"alembic_version", "sqlite_sequence"}
            command.upgrade(alembic_config(connection), "head")
            assert set(inspect(connection).get_table_names()) >= set(metadata.tables)
    finally:
        engine.dispose()


def test_two_services_that_start_at_once_make_the_tables_once(url: str) -> None:
    opened: list[Store] = []
    threads = [threading.Thread(target=lambda: opened.append(open_store(url))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(opened) == 4
    for store in opened:
        assert store.active() == []
        store.close()


def test_a_database_of_a_newer_makeway_is_left_alone(url: str) -> None:
    open_store(url).close()
    engine = engine_for(parse(url), migrating=True)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    engine.dispose()
    with pytest.raises(StoreError, match="newer Makeway"):
        open_store(url)


def test_policy_versions_are_kept_and_never_overwritten(store: Store) -> None:
    assert store.policies.current() is None
    first = store.policies.add("pools: []\n", "seed", "the first", 0, 1.0)
    assert (first.version, store.policies.current()) == (1, first)
    second = store.policies.add("pools: [ü]\n", "ana", "more 'GPUs'", 1, 2.0)
    with pytest.raises(Conflict, match="saved by ana") as caught:
        store.policies.add("pools: [b]\n", "bo", "", 1, 3.0)
    assert caught.value.existing == second
    with pytest.raises(Conflict):
        store.policies.add("pools: [b]\n", "bo", "", 0, 3.0)
    third = store.policies.add("pools: [c]\n", "bo", "", None, 3.0)
    assert store.policies.history() == [third, second, first]
    assert store.policies.history(limit=1) == [third]
    assert (store.policies.version(2), store.policies.version(9)) == (second, None)
    assert [(e.kind, e.data["version"]) for e in store.events(0)] == [("policy", 1), ("policy", 2), ("policy", 3)]


def test_forecasts_read_how_long_past_work_ran(store: Store, job) -> None:
    for number, owner in enumerate(["ana", "bo", "ana", "bo", "cy"], start=1):
        id = f"j{number}"
        store.add_workload(job(id, owner=owner), now=float(number))
        state = "pending" if number == 3 else "failed" if number == 2 else "succeeded"
        store.commit([Change(id, {"state": state, "ran": 0.0 if number == 5 else 100.0 * number})], now=10.0)
    assert store.past_runs() == [
        PastRun("rnd", "ana", "gpu1", 100.0),
        PastRun("rnd", "bo", "gpu1", 200.0),
        PastRun("rnd", "bo", "gpu1", 400.0),
    ], "the third is not over, the fifth never ran"
    assert [run.seconds for run in store.past_runs(limit=2)] == [200.0, 400.0]


def test_what_ran_before_the_upgrade_is_added_up(url: str) -> None:
    parsed = parse(url)
    engine = engine_for(parsed, migrating=True)
    try:
        upgrade(parsed)
        store = open_store(url)
        store.add_workload(NewWorkload("j1", "job", "rnd", "gpu1", "ana"), now=0.0)
        for number, ended in enumerate([60.0, 5.0], start=1):
            store.commit([Change("j1", open_attempt=Attempt("j1", number, 10.0))], now=10.0)
            store.commit([Change("j1", close_attempt={"ended_at": ended})], now=ended)
        store.commit([Change("j1", {"state": "succeeded", "ran": 7.0})], now=60.0)
        store.close()
        with engine.begin() as connection:
            command.downgrade(alembic_config(connection), "0001")
            command.upgrade(alembic_config(connection), "head")
            assert connection.execute(text("SELECT ran FROM workloads")).scalar_one() == 50.0, "no clock ran backwards"
    finally:
        engine.dispose()


OLD_JOB = {
    **dict.fromkeys(("kind",), "job"),
    **{"team": "rnd", "profile": "gpu1", "owner": "ana", "name": "t", "priority": "normal", "signal": "SIGTERM"},
    **dict.fromkeys(("preemptible", "over_quota", "cancel_requested", "server_started"), False),
    **dict.fromkeys(("attempt", "preemptions", "failures", "infra_failures", "max_failures", "min_workers"), 0),
    **{"gpus": 1000, "workers": 1, "cpu": 0, "memory": 0, "grace": 30.0, "version": 4, "ran": 5.0},
    **dict.fromkeys(("reason_code", "reason_message", "message", "server"), ""),
    **dict.fromkeys(("reason_numbers", "env"), "{}"),
    **dict.fromkeys(("borrowed_from", "placement", "command"), "[]"),
}


def test_a_database_of_version_3_is_upgraded_with_what_it_holds(url: str) -> None:
    parsed = parse(url)
    engine = engine_for(parsed, migrating=True)
    old = [
        OLD_JOB | {"id": "j1", "state": "pending", "submitted_at": 1.0, "claim": '[["n1",[0],[1000]]]'},
        OLD_JOB | {"id": "j2", "state": "failed", "submitted_at": 2.0, "ended_at": 3.0, "claim": "[]"},
    ]
    try:
        with engine.begin() as connection:
            command.upgrade(alembic_config(connection), "0003")
            for row in old:
                names = ", ".join(row)
                values = ", ".join(f":{name}" for name in row)
                connection.execute(text(f"INSERT INTO workloads ({names}) VALUES ({values})"), row)
            connection.execute(text("INSERT INTO histories (policy, milli, at) VALUES ('rnd', 500, 7)"))
    finally:
        engine.dispose()
    store = open_store(url)
    assert [(row.id, row.nomination, row.version) for row in store.active()] == [
        ("j1", (Place("n1", (0,), (1000,)),), 4)
    ]
    assert [row.id for row in store.workloads(teams=["rnd"], states=["failed"])[0]] == ["j2"]
    assert store.histories() == ({"rnd": 500.0}, 7.0)
    assert store.commit([Change("j1", {"state": "running"}, expect_version=4)], now=8.0) == {"j1"}
    store.close()


def test_the_decision_log_is_read_in_pages(store: Store) -> None:
    for number in range(7):
        team = "rnd" if number % 2 else "devops"
        store.commit([], [NewDecision("wait", f"j{number % 3}", team, "ana", "limit", str(number))], now=float(number))
    newest = store.decisions(limit=3)
    assert [d.message for d in newest] == ["6", "5", "4"]
    assert [d.message for d in store.decisions(limit=3, before=newest[-1].id)] == ["3", "2", "1"]
    assert [d.message for d in store.decisions(teams=["rnd"])] == ["5", "3", "1"]
    assert [d.message for d in store.decisions(workload="j0")] == ["6", "3", "0"]
    assert store.decisions(teams=[]) == []
    store.commit([], [NewDecision("wait", "s1", None, "bo", "limit", "7")], now=8.0)
    assert [d.message for d in store.decisions(teams=["rnd"], owner="bo")] == ["7", "5", "3", "1"]
    assert [d.message for d in store.decisions(owner="bo")] == ["7"]


def test_stored_tests_of_preemption_get_their_new_name(url: str) -> None:
    parsed = parse(url)
    engine = engine_for(parsed, migrating=True)
    notice = (
        '{"reason":"a \\"kind\\":\\"rehearsal\\" of ana","at":1.0,"deadline":31.0,"kind":"rehearsal","by_team":"rnd"}'
    )
    row = OLD_JOB | {"id": "j1", "state": "checkpointing", "submitted_at": 1.0, "claim": "[]"}
    row |= {"notice": notice, "reason_code": "rehearsal"}
    decision = "(at, verb, workload, code, message, numbers) VALUES (1.0, 'evict', 'j1', 'rehearsal', '', '{}')"
    try:
        with engine.begin() as connection:
            command.upgrade(alembic_config(connection), "0003")
            names, values = ", ".join(row), ", ".join(f":{name}" for name in row)
            connection.execute(text(f"INSERT INTO workloads ({names}) VALUES ({values})"), row)
            connection.exec_driver_sql(f"INSERT INTO decisions {decision}")
    finally:
        engine.dispose()
    store = open_store(url)
    (result,) = store.active()
    assert result.notice == Notice('a "kind":"rehearsal" of ana', 1.0, 31.0, "preempt_test", "rnd")
    assert result.reason_code == "preempt_test"
    assert [item.code for item in store.decisions(workload="j1")] == ["preempt_test"]
    store.close()


def test_stored_reasons_of_static_quotas_and_nominations_get_codes_of_their_own(url: str) -> None:
    parsed = parse(url)
    engine = engine_for(parsed, migrating=True)
    numbers = {
        "held": '{"needs":1,"held_for":"big","nodes":["kept","idle"]}',
        "static_quota": '{"needs": 1, "kept": 1, "team": "rnd"}',
        "nominated": '{"needs":1,"idle":2,"evicted_for":["j9"]}',
        "limit": '{"needs":1,"uses":9,"limit":9,"team":"idle"}',
    }
    try:
        upgrade(parsed)
        store = open_store(url)
        for code in numbers:
            store.add_workload(NewWorkload(code, "job", "rnd", "gpu1", "ana"), now=0.0)
        store.close()
        with engine.begin() as connection:
            command.downgrade(alembic_config(connection), "0010")
            for code, values in numbers.items():
                row = {"id": code, "code": code if code == "limit" else "held", "numbers": values}
                changed = "UPDATE workloads SET reason_code = :code, reason_numbers = :numbers WHERE id = :id"
                connection.execute(text(changed), row)
            command.upgrade(alembic_config(connection), "head")
            rows = connection.execute(text("SELECT id, reason_code FROM workloads")).all()
            assert all(id == code for id, code in rows)
            assert {code for _, code in rows} == set(numbers)
            command.downgrade(alembic_config(connection), "0010")
            codes = connection.execute(text("SELECT reason_code FROM workloads ORDER BY id")).scalars().all()
            assert codes == ["held", "limit", "held", "held"]
    finally:
        engine.dispose()


def test_a_migration_waits_for_the_writer_of_another_replica(postgres: str) -> None:
    url = empty_database(postgres)
    parsed = parse(url)
    upgrade(parsed)
    engine = engine_for(parsed, migrating=True)
    waits = text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = :lock AND NOT granted")
    upgrading = threading.Thread(target=upgrade, args=(parsed,))
    try:
        with engine.connect() as writer, engine.connect() as other:
            other = other.execution_options(isolation_level="AUTOCOMMIT")
            with writer.begin():
                writer.execute(WAIT_FOR_WRITERS)
                upgrade(parsed)  # nothing to do: a start does not wait for writers
                command.downgrade(alembic_config(writer), "0010")
            with writer.begin():
                writer.execute(WAIT_FOR_WRITERS)
                upgrading.start()
                until = time.monotonic() + 60
                while not other.execute(waits, {"lock": WRITERS}).scalar():
                    assert time.monotonic() < until, "the migration waits for the writer"
                    time.sleep(0.01)
                assert upgrading.is_alive()
            upgrading.join(60)
            assert not upgrading.is_alive()
            assert other.execute(text("SELECT version_num FROM alembic_version")).scalar() != "0010"
    finally:
        engine.dispose()


def test_a_command_of_an_earlier_version_is_weighed_and_kept(url: str) -> None:
    parsed = parse(url)
    engine = engine_for(parsed, migrating=True)
    command_then, source = ("x" * 1_000_000, "é"), "print()"
    try:
        store = open_store(url)
        new = NewWorkload("j1", "job", "rnd", "gpu1", "ana", command=command_then, env={"A": "b"}, source=source)
        store.add_workload(new, now=1.0)
        store.close()
        with engine.begin() as connection:
            command.downgrade(alembic_config(connection), "0013")
        store = open_store(url)
        [row] = store.active()
        assert row.command == ()
        assert 1_000_000 < row.weight < 1_000_100
        whole = store.workload("j1")
        assert whole is not None
        assert (whole.command, whole.env, whole.source) == (command_then, {"A": "b"}, source)
        assert store.whole_workloads(["j1"])["j1"].command == command_then
        store.close()
    finally:
        engine.dispose()


def test_a_database_without_machines_gets_their_tables_and_goes_back_with_what_it_held(url: str) -> None:
    parsed = parse(url)
    engine = engine_for(parsed, migrating=True)
    try:
        with engine.begin() as connection:
            command.upgrade(alembic_config(connection), "0019")
            connection.execute(text("INSERT INTO serials VALUES ('worker_reports', 7)"))
            connection.execute(text("INSERT INTO policies VALUES (1, 1.0, 'ana', '', 'pools: []')"))
        store = open_store(url)
        launch(store, "m-1")
        store.machine_reports.join("m-1", "boot", {}, 1.0)
        store.deployments.save("cloud", "name: cloud", 0, "ana", 1.0)
        assert [row.id for row in store.machines.live()] == ["m-1"]
        store.close()
        with engine.begin() as connection:
            command.downgrade(alembic_config(connection), "0019")
            tables = set(inspect(connection).get_table_names())
            assert not {name for name in tables if "machine" in name or "deployment" in name}
            assert connection.execute(text("SELECT name, value FROM serials")).all() == [("worker_reports", 7)]
        store = open_store(url)
        assert (store.machines.live(), store.deployments.list()) == ([], [])
        assert store.policies.current() is not None
        launch(store, "m-1")
        assert store.machine_reports.join("m-1", "another", {}, 1.0).outcome == "joined"
        store.close()
    finally:
        engine.dispose()
