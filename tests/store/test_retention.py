"""What is too old goes, in small steps that can be cut off anywhere; what is not, stays."""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from makeway_quota.backends.base import BackendError
from makeway_quota.history import retention as history
from makeway_quota.history.retention import DAY, FASTEST, AgeClock, Keep, Retention
from makeway_quota.store import Conflict, LeadershipLost, Store, open_store
from makeway_quota.store.database.connections import postgres_engine
from makeway_quota.store.database.space import SLACK_PAGES
from makeway_quota.store.errors import NotLeading
from makeway_quota.store.records import Attempt, Change, NewDecision, SubmissionKey
from makeway_quota.store.storage import pruning
from makeway_quota.store.tables import attempts, blobs, files, outputs, purges, sources, workloads
from postgres import empty_database
from sqlalchemy import func, make_url, select, text
from sqlalchemy.exc import DBAPIError


class Folders:
    """Job folders; those in `stuck` cannot be removed."""

    def __init__(self) -> None:
        self.purged: list[str] = []
        self.stuck: set[str] = set()

    async def purge(self, id: str, team: str) -> bool:
        if id in self.stuck:
            raise BackendError("the disk is read-only")
        self.purged.append(id)
        return True


def retention(
    store: Store, now: float, keep: Keep, purge: Callable[[str, str], Awaitable[bool]], term: int | None = None
) -> Retention:
    """Return a retention that believes a fake clock at once and never rests."""
    if term is None:
        term = store.take_term("test", 0.0)
    eras = itertools.count(0.0, 1e12)
    return Retention(store, keep, purge, lambda: term, clock=lambda: now, monotonic=lambda: next(eras), rest=0.0)


def rows(store: Store) -> dict[str, int]:
    """Count the rows of every table that grows with workloads."""
    with store._database.read() as connection:
        tables = (workloads, attempts, files, sources, blobs, purges)
        return {t.name: connection.execute(select(func.count()).select_from(t)).scalar_one() for t in tables}


@pytest.mark.covers("N25")
async def test_what_is_old_goes_with_everything_it_left(store: Store, job) -> None:
    script = [("train.py", b"print(1)", False)]
    for id in ("old", "new", "live"):
        store.add_workload(job(id, source="x"), [*script, ("id", id.encode(), False)], now=0.0)
    store.add_workload(job("s", kind="session"), now=0.0)
    store.commit([Change("old", {"state": "failed", "ended_at": 10.0}, open_attempt=Attempt("old", 1, 1.0))], now=10.0)
    store.commit([Change("s", {"state": "stopped", "ended_at": 10.0})], now=10.0)
    store.commit([], [NewDecision("wait", "old", None, None, "", "")], now=10.0)
    store.commit([Change("new", {"state": "failed", "ended_at": 900.0})], now=900.0)
    folders = Folders()
    sweep = await retention(store, 1000.0, Keep(500.0, 500.0, 500.0), folders.purge).sweep()
    assert sweep.report["removed"] == {
        "workloads": 2,
        "decisions": 1,
        "events": 7,
        "removals": 0,
        "keys": 0,
        "machines": 0,
        "machine_outputs": 0,
        "machine_events": 0,
        "deployments": 0,
        "files": 1,
        "folders": 1,
        "names": 0,
        "artifacts": 0,
    }
    assert folders.purged == ["old"], "a session has no folder"
    assert store.workload("old") is None
    assert rows(store) == {"workloads": 2, "attempts": 0, "files": 4, "sources": 2, "blobs": 3, "purges": 0}
    assert store.pruning.last() == sweep
    again = await retention(store, 1000.0, Keep(500.0, 500.0, 500.0), folders.purge).sweep()
    assert set(again.report["removed"].values()) == {0}


def test_no_transaction_removes_more_than_it_may_though_all_are_equally_old(store: Store, job) -> None:
    for number in range(5):
        key = SubmissionKey(f"k-{number}", "ana", "0" * 64)
        store.add_workload(job(f"j{number}"), key=key, now=1.0)
        store.commit([Change(f"j{number}", {"state": "failed", "ended_at": 1.0})], now=1.0)
    assert store.pruning.forget_workloads(2.0, 10) == 5
    assert store.pruning.forget_removals(3.0, 2) == 0, "their folders are not purged yet"
    store.pruning.purged([f"j{number}" for number in range(5)])
    for forget in (store.pruning.forget_removals, store.pruning.forget_keys):
        assert [forget(3.0, 2) for _ in range(4)] == [2, 2, 1, 0]


@pytest.mark.covers("N25")
@pytest.mark.parametrize("kept", [0.0, 90 * 86_400.0])
async def test_notes_of_removals_do_not_grow_with_the_jobs_that_were_deleted(store: Store, job, kept: float) -> None:
    keep = Keep(kept, 0.0, 0.0, max_removals=20)
    for day in range(6):
        now = 86_400.0 * (day + 1)
        for number in range(10):
            id = f"j{day}-{number}"
            store.add_workload(job(id), now=now)
            store.commit([Change(id, {"state": "failed", "ended_at": now})], now=now)
            assert store.pruning.forget_ended(id, now + number)
        folders = Folders()
        folders.stuck = {"j1-3"}
        sweep = await retention(store, now + 100, keep, folders.purge).sweep()
        assert sweep.report["removed"]["removals"] == (0 if day < 2 else 10)
        there = [id for id in (f"j{d}-{n}" for d in range(6) for n in range(10)) if store.pruning.removed(id)]
        newest = [f"j{d}-{n}" for d in range(max(0, day - 1), day + 1) for n in range(10)]
        if day < 3:
            assert there == newest, "the newest are kept"
        else:
            assert len(there) == 20
            assert "j1-3" in there, "one whose folder was to be purged when the pass began stays"


async def test_nothing_goes_that_is_kept_for_ever(store: Store, job) -> None:
    store.add_workload(job("old"), now=0.0)
    store.commit(
        [Change("old", {"state": "failed", "ended_at": 1.0})], [NewDecision("x", "old", "", "", "", "")], now=1
    )
    sweep = await retention(store, 1e9, Keep(0.0, 0.0, 0.0), Folders().purge).sweep()
    assert set(sweep.report["removed"].values()) == {0}
    assert store.oldest_event_id() == 1


async def test_events_are_bounded_by_number_and_the_newest_stays(store: Store) -> None:
    for number in range(50):
        store.add_event("usage", None, None, {"n": number}, 1.0)
    await retention(store, 2.0, Keep(max_events=20), Folders().purge).sweep()
    assert (store.oldest_event_id(), store.last_event_id()) == (31, 50)
    await retention(store, 1e9, Keep(), Folders().purge).sweep()
    assert (store.oldest_event_id(), store.last_event_id()) == (50, 50)
    assert store.add_event("usage", None, None, {}, 2.0).id == 51


async def test_events_of_a_clock_that_was_ahead_do_not_keep_older_ones(store: Store) -> None:
    for at in (1.0, 1e12, 2.0, 1e9):
        store.add_event("usage", None, None, {}, at)
    await retention(store, 1e9, Keep(events=100.0), Folders().purge).sweep()
    assert store.oldest_event_id() == 4


async def test_a_folder_that_cannot_be_removed_is_noted_tried_again_and_hinders_no_other(store: Store, job) -> None:
    for id in ("a", "b", "c"):
        store.add_workload(job(id), now=0.0)
        store.commit([Change(id, {"state": "failed", "ended_at": 1.0})], now=1.0)
    folders = Folders()
    folders.stuck.add("b")
    keeper = retention(store, 1000.0, Keep(workloads=10.0), folders.purge)
    sweep = await keeper.sweep()
    assert (folders.purged, sweep.report["folders_failed"]) == (["a", "c"], 1)
    assert store.pruning.to_purge(10) == [("b", "rnd")]
    with pytest.raises(Conflict):
        store.add_workload(job("b"), now=2.0)
    folders.stuck.clear()
    assert (await keeper.sweep()).report["folders_failed"] == 0
    assert folders.purged == ["a", "c", "b"]
    assert store.pruning.to_purge(10) == []


async def test_a_folder_that_is_not_gone_yet_is_asked_for_again_with_its_team_however_long_it_takes(
    store: Store, job
) -> None:
    for id, team in (("a", "rnd"), ("b", "devops")):
        store.add_workload(job(id, team=team), now=0.0)
        store.commit([Change(id, {"state": "failed", "ended_at": 1.0})], now=1.0)
    asked: list[tuple[str, str]] = []

    async def purge(id: str, team: str) -> bool:
        asked.append((id, team))
        return id == "a" or len(asked) > 6

    for now in (100.0, 1e3, 1e6, 1e9):
        sweep = await retention(store, now, Keep(workloads=10.0), purge).sweep()
        assert (sweep.report["removed"]["folders"], sweep.report["folders_failed"]) == (int(now == 100.0), 0)
    assert asked == [("a", "rnd"), *[("b", "devops")] * 4]
    assert (store.pruning.removed("a"), store.pruning.removed("b")) == (None, ("job", "ana", "devops"))
    asked += [("x", "")] * 2
    await retention(store, 2e9, Keep(workloads=10.0), purge).sweep()
    await retention(store, 2e9, Keep(workloads=10.0), purge).sweep()
    assert (store.pruning.to_purge(10), store.pruning.removed("b")) == ([], None)


async def test_a_deposed_service_removes_nothing(store: Store, job) -> None:
    store.add_workload(job(), now=0.0)
    store.commit([Change("j1", {"state": "failed", "ended_at": 1.0})], now=1.0)
    first = store.take_term("first", 0.0)
    store.take_term("second", 0.0)
    with pytest.raises(LeadershipLost):
        await retention(store, 1e9, Keep(), Folders().purge, first).sweep()
    assert store.workload("j1") is not None


async def test_a_replica_removes_only_while_it_leads(store: Store, job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "PROBE_SECONDS", 0.0)
    monkeypatch.setattr(history, "EVERY_SECONDS", 0.0)
    store.add_workload(job(), now=0.0)
    store.commit([Change("j1", {"state": "failed", "ended_at": 1.0})], now=1.0)
    term = store.take_term("test", 0.0)
    asked: list[int | None] = []
    purged = asyncio.Event()

    def leads() -> int | None:
        asked.append(None if len(asked) < 5 else term)
        return asked[-1]

    async def purge(id: str, team: str) -> bool:
        assert asked[:5] == [None] * 5
        purged.set()
        return True

    running = asyncio.create_task(Retention(store, Keep(), purge, leads, rest=0.0).run())
    async with asyncio.timeout(90):
        await purged.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert store.workload("j1") is None
    assert store.failure() is None


async def test_a_job_that_was_resumed_stays(store: Store, job) -> None:
    store.add_workload(job(), now=0.0)
    store.commit([Change("j1", {"state": "failed", "ended_at": 1.0})], now=1.0)
    store.commit([Change("j1", {"state": "pending", "ended_at": None})], now=2.0)
    await retention(store, 1e9, Keep(), Folders().purge).sweep()
    assert store.workload("j1") is not None


def test_a_clock_that_jumps_ahead_ages_nothing_at_once() -> None:
    wall, real = 1000.0, 0.0
    ages = AgeClock(lambda: wall, lambda: real, 1000.0)
    wall, real = 1000.0 + 365 * DAY, 60.0
    assert ages.now() == 1000.0 + 60.0 * FASTEST
    wall, real = 500.0, 120.0
    assert ages.now() == 1000.0 + 60.0 * FASTEST, "never back"
    wall, real = 2000.0, 1e6
    assert ages.now() == 2000.0
    assert AgeClock(lambda: 5000.0, lambda: 0.0, 1000.0).now() == 1000.0, "time while the service was down is made up"
    assert AgeClock(lambda: 500.0, lambda: 0.0, 1000.0).now() == 500.0


KILLED = """
import asyncio, sys
from pathlib import Path
from makeway_quota.history.retention import Keep, Retention
from makeway_quota.store import open_store

async def purge(id, team):
    (Path(sys.argv[2]) / id).unlink(missing_ok=True)
    print(id, flush=True)
    sys.stdin.readline()
    return True

store = open_store(sys.argv[1])
keep = Keep(10.0, 10.0, 10.0)
keeper = Retention(store, keep, purge, lambda: None, clock=lambda: 1e6, monotonic=lambda: 0.0, rest=0.0)
print("begin", flush=True)
asyncio.run(keeper.sweep())
print("end", flush=True)
"""


@pytest.mark.slow
def test_a_pass_that_is_killed_anywhere_is_finished_by_the_next(sqlite_url: str, tmp_path: Path, job) -> None:
    store = open_store(sqlite_url)
    jobs = tmp_path / "jobs"
    jobs.mkdir()
    ids = [f"j{number:03}" for number in range(300)]
    store.add_workloads([(job(id), [("f", id.encode(), False)], None) for id in ids], now=0.0)
    store.commit([Change(id, {"state": "failed", "ended_at": 1.0}) for id in ids], now=1.0)
    store.close()
    for id in ids:
        (jobs / id).touch()
    kills = 0
    for lines in (1, 60, 120, 1_000_000):
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, sqlite_url, str(jobs)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        assert process.stdout is not None
        assert process.stdin is not None
        with process:
            for number, line in enumerate(process.stdout, start=1):
                if line == "end\n":
                    break
                if number == lines:
                    process.kill()
                    kills += 1
                    break
                if line != "begin\n":
                    process.stdin.write("\n")
    assert kills == 3
    assert list(jobs.iterdir()) == []
    store = open_store(sqlite_url)
    assert rows(store) == dict.fromkeys(rows(store), 0)
    store.close()


async def test_a_file_gives_its_space_back_in_steps(sqlite_url: str, job) -> None:
    store = open_store(sqlite_url, min_artifact_bytes=10**9)
    data = bytes(1_000_000)
    for number in range(60):
        store.add_workload(job(f"j{number}"), [("d", data + str(number).encode(), False)], now=0.0)
    store.commit([Change(f"j{n}", {"state": "failed", "ended_at": 1.0}) for n in range(60)], now=1.0)
    full = store.size()
    assert full > 60_000_000
    await retention(store, 1e9, Keep(), Folders().purge).sweep()
    store.close()
    path = Path(sqlite_url.removeprefix("sqlite:///"))
    assert path.stat().st_size < 4096 * (SLACK_PAGES + 1000)


def test_a_file_of_an_older_version_can_give_space_back_after_the_upgrade(sqlite_url: str, job) -> None:
    path = sqlite_url.removeprefix("sqlite:///")
    open_store(sqlite_url).close()
    with sqlite3.connect(path, isolation_level=None) as bare:
        bare.execute("PRAGMA journal_mode=DELETE")
        bare.execute("PRAGMA auto_vacuum=NONE")
        bare.execute("VACUUM")
        assert bare.execute("PRAGMA auto_vacuum").fetchone() == (0,)
    store = open_store(sqlite_url)
    store.add_workload(job(), now=0.0)
    with sqlite3.connect(path) as bare:
        assert bare.execute("PRAGMA auto_vacuum").fetchone() == (2,)
        assert bare.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    store.close()


async def test_the_loop_writes_while_many_rows_are_removed(store: Store, job) -> None:
    ids = [f"j{number}" for number in range(1200)]
    store.add_workloads([(job(id, source="x" * 2000), (), NewDecision("x", id, "", "", "", "")) for id in ids], now=0.0)
    store.commit([Change(id, {"state": "failed", "ended_at": 1.0}) for id in ids], now=1.0)
    store.add_workload(job("live"), now=2.0)
    keeper = retention(store, 1e9, Keep(), Folders().purge)
    sweeping = asyncio.create_task(keeper.sweep())
    commits = 0
    while not sweeping.done():
        assert await asyncio.to_thread(store.commit, [Change("live")], now=3.0) == {"live"}
        commits += 1
    assert (await sweeping).report["removed"]["workloads"] == 1200
    assert commits > 20


async def test_an_id_that_was_used_again_is_removed_again(store: Store, job) -> None:
    for owner in ("ana", "bo"):
        store.add_workload(job("j1", owner=owner), now=0.0)
        store.commit([Change("j1", {"state": "failed", "ended_at": 1.0})], now=1.0)
        assert store.pruning.forget_workloads(2.0, 10) == 1
        store.pruning.purged(["j1"])
        removal = store.pruning.removed("j1")
        assert removal is not None
        assert (removal.kind, removal.owner, removal.team) == ("job", owner, "rnd")
    assert store.pruning.removed("j2") is None


async def test_outputs_go_in_small_transactions_and_a_pass_that_is_cut_off_has_removed_some(
    store: Store, job, monkeypatch: pytest.MonkeyPatch
) -> None:
    piece = 20 * 1024
    monkeypatch.setattr(pruning, "PARTS_BYTES", 3 * piece)
    for number in range(4):
        store.add_workload(job(f"j{number}"), now=0.0)
        for at in range(10):
            store.outputs.append((f"j{number}", 1, 0), "result", at * piece, bytes([at]) * piece, 10**9)
        store.commit([Change(f"j{number}", {"state": "failed"})], now=1.0)

    def held() -> int:
        with store._database.read() as connection:
            return int(connection.execute(select(func.coalesce(func.sum(outputs.c.size), 0))).scalar_one())

    assert held() == 40 * piece
    removed: list[int] = []
    forget = store.pruning.forget_outputs

    def watched(*given: Any, **more: Any) -> int:
        there = held()
        count = forget(*given, **more)
        removed.append(there - held())
        if len(removed) == 5:
            raise NotLeading("cut off")
        return count

    monkeypatch.setattr(store.pruning, "forget_outputs", watched)
    keeper = retention(store, 1e6, Keep(workloads=10.0), Folders().purge)
    with pytest.raises(NotLeading, match="cut off"):
        await keeper.sweep()
    assert held() == 40 * piece - sum(removed), "what a pass removed stays removed"
    assert 0 < max(removed) <= 3 * piece, "no transaction removes many bytes"
    assert rows(store)["workloads"] == 4, "no workload goes before its outputs"
    await keeper.sweep()
    assert (held(), rows(store)["workloads"]) == (0, 0)


def test_workloads_with_large_sources_go_a_few_at_a_time(store: Store, job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pruning, "PARTS_BYTES", 2500)
    for number in range(5):
        store.add_workload(job(f"j{number}", source="x" * 1000), now=0.0)
        store.commit([Change(f"j{number}", {"state": "failed"})], now=1.0)
    assert [store.pruning.forget_workloads(10.0, 50) for _ in range(4)] == [2, 2, 1, 0]


def test_postgresql_ends_a_statement_before_its_client_gives_up(postgres: str) -> None:
    engine = postgres_engine(make_url(empty_database(postgres)), silence=2.0)
    with engine.connect() as connection:
        assert connection.execute(text("SHOW client_connection_check_interval")).scalar_one() == "2s"
        with pytest.raises(DBAPIError, match="statement timeout") as ended:
            connection.execute(text("SELECT pg_sleep(5)"))
        assert not ended.value.connection_invalidated, "the connection goes on, and nothing runs at the server"
    engine.dispose()
