"""Several processes on one database: one holds the leader's lock, all hear of each other's commits."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from makeway_quota.store import LeadershipLost, Store, StoreError, open_store
from makeway_quota.store.records import Change, NewWorkload, Workload
from makeway_quota.store.replicas import known_rows
from makeway_quota.store.replicas import replicas as replicas_module
from makeway_quota.store.replicas.leader_lock import LeaderLock
from makeway_quota.store.rows import initial_record
from postgres import address, empty_database, network, postgres_server
from sqlalchemy import create_engine, text


@pytest.fixture
def second(store: Store, url: str) -> Iterator[Store]:
    """Open the same database a second time, as another replica would."""
    opened = open_store(url)
    yield opened
    opened.close()


def test_one_process_holds_the_lock_and_the_next_takes_a_newer_term(store: Store, second: Store, job) -> None:
    store.add_workload(job(), now=0.0)
    first, other = store.leader_lock(2.0), second.leader_lock(2.0)
    held = first.acquire()
    assert held is not None
    assert (held.term, held.wait) == (1, 0.0)
    assert other.acquire() is None
    first.renew(1)
    assert store.commit([Change("j1")], now=1.0, term=1)
    first.release(1)
    taken = other.acquire()
    assert taken is not None
    assert (taken.term, taken.wait) == (2, 0.0), "a clean release need not be waited for"
    with pytest.raises(LeadershipLost):
        store.commit([Change("j1")], now=2.0, term=1)
    other.release(2)


@pytest.fixture
def two_locks(postgres: str) -> Iterator[tuple[LeaderLock, LeaderLock, Store]]:
    """Two processes that want to lead on PostgreSQL, with a deadline of 2 s."""
    url = empty_database(postgres)
    stores = open_store(url), open_store(url)
    locks = stores[0].leader_lock(2.0), stores[1].leader_lock(2.0)
    yield *locks, stores[0]
    for lock, store in zip(locks, stores, strict=True):
        lock.release(None)
        store.close()


def test_a_silent_leader_loses_the_lock_after_the_deadline_and_is_waited_for_no_longer(
    two_locks: tuple[LeaderLock, LeaderLock, Store],
) -> None:
    first, other, _ = two_locks
    silent_since = time.monotonic()
    assert first.acquire() is not None
    taken = None
    while taken is None:
        assert time.monotonic() - silent_since < 60
        taken = other.acquire()
        time.sleep(0.05)
    assert time.monotonic() - silent_since > 2.0, "never before the deadline"
    assert (taken.term, taken.wait) == (2, 0.0), "the deadline has passed already"
    with pytest.raises(StoreError):
        first.renew(1)
    assert first.acquire() is None, "it is a candidate like any other"


def test_after_a_lock_that_vanished_the_next_leader_waits_for_the_deadline(
    two_locks: tuple[LeaderLock, LeaderLock, Store], postgres: str
) -> None:
    first, other, _ = two_locks
    assert first.acquire() is not None
    first.renew(1)
    admin = create_engine(address(postgres, "one_test"), isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:  # as a restart of PostgreSQL would
        query = "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory'"
        assert connection.execute(text(query)).all()
    admin.dispose()
    ends = time.monotonic() + 30.0
    while (taken := other.acquire()) is None and time.monotonic() < ends:
        time.sleep(0.01)  # the server frees the lock a moment after it was told to end the connection
    assert taken is not None
    assert taken.term == 2
    assert 0 < taken.wait <= 2.0, "the first may act until its next renewal fails"


def test_a_term_taken_by_force_is_noticed_at_the_next_renewal(
    two_locks: tuple[LeaderLock, LeaderLock, Store],
) -> None:
    first, _, store = two_locks
    assert first.acquire() is not None
    store.take_term("an operator", 0.0)
    with pytest.raises(LeadershipLost, match="an operator holds term 2"):
        first.renew(1)


def test_commits_of_another_process_are_followed_once_each_in_order(store: Store, second: Store, job) -> None:
    heard: list[tuple[str, int, str]] = []
    second.on_change(lambda rows: heard.extend((row.id, row.version, row.state) for row in rows))
    last = second.last_event_id()
    store.add_workload(job("j1"), now=0.0)
    store.commit([Change("j1", {"state": "starting"})], now=1.0)
    followed = second.follow(last)
    assert heard == [("j1", 2, "starting")], "only what is true now"
    assert second.follow(followed.last).last == followed.last
    assert len(heard) == 1
    second.commit([Change("j1", {"state": "running"})], now=2.0)
    store.commit([Change("j1", {"state": "failed"})], now=3.0)
    third = second.follow(followed.last)
    assert heard[1:] == [("j1", 3, "running"), ("j1", 4, "failed")], "its own commit is not read again"
    store.commit([Change("j1", {"state": "pending"})], now=4.0)
    assert not third.policy
    store.policies.add("{}", "ana", "", None, 5.0)
    assert second.follow(third.last).policy
    assert heard[3:] == [("j1", 5, "pending")]


def test_a_replica_that_missed_pruned_events_reads_everything(store: Store, second: Store, job) -> None:
    for id in ("j1", "j2"):
        store.add_workload(job(id), now=0.0)
    after = second.follow(0).last
    store.commit([Change("j1", {"state": "failed"})], now=1.0)
    store.add_workload(job("j3"), now=2.0)
    assert store.pruning.forget_events(1e9, 500_000, 1000, None) > 0
    store.commit([Change("j2", {"state": "starting"})], now=1e9)
    heard: list[Workload] = []
    second.on_change(heard.extend)
    assert second.follow(after).policy, "it may have missed a policy, too"
    assert {(row.id, row.state) for row in heard} == {("j1", "failed"), ("j2", "starting"), ("j3", "pending")}


@pytest.mark.parametrize("removed", [False, True])
def test_a_row_that_was_read_at_the_start_ends_with_a_full_read(
    store: Store, second: Store, job, removed: bool
) -> None:
    store.add_workload(job("j1"), now=0.0)
    after = second.last_event_id()
    assert [row.id for row in second.active()] == ["j1"]
    store.commit([Change("j1", {"state": "failed"})], now=1.0)
    store.add_workload(job("j2"), now=2.0)
    assert store.pruning.forget_events(1e9, 500_000, 1000, None) > 0
    if removed:
        with store._database.write() as connection:
            connection.execute(text("DELETE FROM events WHERE workload = 'j1'"))
            connection.execute(text("DELETE FROM workloads WHERE id = 'j1'"))
    store.commit([Change("j2", {"state": "starting"})], now=1e9)
    heard: list[Workload] = []
    second.on_change(heard.extend)
    second.follow(after)
    live = {row.id: row.live for row in heard}
    assert live == {"j1": False, "j2": True}, "the row that ended meanwhile is reported"


def test_a_row_that_the_database_no_longer_has_has_ended(store: Store, second: Store, job) -> None:
    store.add_workload(job("j1"), now=0.0)
    after = second.last_event_id()
    second.active()
    store.commit([Change("j1", {"state": "failed"})], now=1.0)
    with store._database.write() as connection:
        connection.execute(text("DELETE FROM workloads WHERE id = 'j1'"))
    heard: list[Workload] = []
    second.on_change(heard.extend)
    second.follow(after)
    assert [(row.id, row.live) for row in heard] == [("j1", False)]


def test_threads_that_end_workloads_at_once_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_rows, "ENDED_KEPT", 50)
    rows = known_rows.KnownRows()
    ended = initial_record(NewWorkload("s1", "session", None, "gpu1", "ana"), 0.0)._replace(state="stopped")
    failed: list[Exception] = []

    def end(thread: int) -> None:
        try:
            for number in range(3000):
                rows.add([ended._replace(id=f"{thread}-{number}")])
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=end, args=(thread,)) for thread in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert len(rows.ended) == 50


def test_an_older_row_that_comes_late_changes_nothing() -> None:
    rows = known_rows.KnownRows()
    row = initial_record(NewWorkload("s1", "session", None, "gpu1", "ana"), 0.0)
    rows.add([row._replace(state="stopped", version=3)])
    rows.add([row._replace(version=2)])
    rows.add_read([row])
    assert (rows.live, rows.read, rows.ended) == ({}, {}, {"s1": 3})


def test_many_events_are_read_in_batches(store: Store, second: Store, job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas_module, "BATCH", 3)
    heard: list[str] = []
    second.on_change(lambda rows: heard.extend(row.id for row in rows))
    for number in range(7):
        store.add_workload(job(f"j{number}"), now=0.0)
    last, more = 0, True
    while more:
        followed = second.follow(last)
        last, more = followed.last, followed.more
    assert heard == [f"j{number}" for number in range(7)]


def test_renewals_are_written_without_a_new_version(store: Store, second: Store, job) -> None:
    store.add_workload(job("s1", kind="session", expires_at=10.0), now=0.0)
    assert second.lease_times() == {"s1": 10.0}
    second.renew_leases({"s1", "unknown"}, 25.0)
    assert store.lease_times() == {"s1": 25.0}
    row = store.workload("s1")
    assert row is not None
    assert row.version == 1


def test_a_commit_wakes_other_processes_and_not_its_own(postgres: str, job) -> None:
    url = empty_database(postgres)
    stores = open_store(url), open_store(url)
    answers: list[tuple[bool, float]] = []

    def listen() -> None:
        began = time.monotonic()
        answers.append((stores[1].wait_for_commit(20.0), time.monotonic() - began))

    assert not stores[0].wait_for_commit(0.2)
    assert not stores[1].wait_for_commit(0.2)
    thread = threading.Thread(target=listen)
    thread.start()
    stores[0].add_workload(job(), now=0.0)
    thread.join()
    assert answers[0][0]
    assert answers[0][1] < 18, "the commit, not the deadline, woke it"
    assert not stores[0].wait_for_commit(0.2), "its own"
    for store in stores:
        store.close()


async def test_a_statement_without_an_answer_ends(postgres: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    empty_database(postgres)
    monkeypatch.setattr("makeway_quota.store.database.connections.SILENCE", 1.0)
    async with network(postgres) as proxy:
        store = await asyncio.to_thread(open_store, proxy.url())
        assert await asyncio.to_thread(store.last_event_id) == 0
        proxy.cut()
        began = time.monotonic()
        with pytest.raises(StoreError, match=r"no answer for 1 s|timeout expired|terminat|closed"):
            await asyncio.to_thread(store.add_event, "x", None, None, {}, 0.0)
        assert time.monotonic() - began < 30
        proxy.mend()
        event = await asyncio.to_thread(store.add_event, "x", None, None, {}, 0.0)
        assert event.id >= 1
        await asyncio.to_thread(store.close)


def test_sqlite_is_locked_by_a_file_beside_it(sqlite_url: str, tmp_path: Path) -> None:
    stores = open_store(sqlite_url), open_store(sqlite_url)
    locks = [store.leader_lock(2.0) for store in stores]
    assert not locks[0].expires
    assert locks[0].acquire() is not None
    assert (tmp_path / "makeway.sqlite.lock").exists()
    assert locks[1].acquire() is None
    locks[0].release(1)
    assert locks[1].acquire() is not None
    locks[1].release(2)
    for store in stores:
        store.close()


def test_a_database_keeps_its_identity_when_its_server_gets_another_address_and_a_dump_has_its_own() -> None:
    """A standby that takes over has another address, and replicas that began before and after that share the work."""

    def identity(url: str) -> str:
        with closing(open_store(url)) as store:
            return store.identity()

    with postgres_server("127.0.0.1,127.0.0.2", "127.0.0.0/8") as folder:
        empty_database(folder)
        password, _, _ = Path(folder, "network").read_text(encoding="utf-8").partition("@")
        known = {
            identity(f"postgresql+psycopg://makeway:{password}@{host}/one_test") for host in ("127.0.0.1", "127.0.0.2")
        } | {identity(address(folder, "one_test"))}
        assert len(known) == 1
        dumped = identity(empty_database(folder, "two_test"))
        assert known.isdisjoint({dumped})
