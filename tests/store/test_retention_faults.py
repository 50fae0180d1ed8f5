"""A row, file, folder, person or step that fails stops no other of a pass, is told, and is not tried all the time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
from makeway_quota.history import retention as history
from makeway_quota.history.retention import Keep, Retention
from makeway_quota.store import Store, StoreError, open_store
from makeway_quota.store.errors import NotLeading
from makeway_quota.store.records import Change, NewDecision, SubmissionKey
from makeway_quota.store.storage.contents import DELETED_AGE
from makeway_quota.store.tables import (
    decisions,
    deployments,
    events,
    machine_events,
    machines,
    outputs,
    purges,
    removals,
    submission_keys,
    workloads,
)
from sqlalchemy import func, select, text

from .machine_rows import end, launch

NOW = 1e6
KEEP = Keep(10.0, 10.0, 10.0, keys=10.0)
IDS = [f"j{number}" for number in range(7)]
BAD = "j3"


@pytest.fixture
def sqlite_store(sqlite_url: str) -> Iterator[Store]:
    """Open an empty store in a file."""
    with closing(open_store(sqlite_url)) as store:
        yield store


def refuse(store: Store, table: str, condition: str) -> Callable[[], None]:
    """Have the database refuse to delete some rows of a table; return how to end that."""
    if store._database.sqlite:
        make = f"CREATE TRIGGER refuse BEFORE DELETE ON {table} WHEN {condition} BEGIN SELECT RAISE(ABORT, 'odd'); END"
        statements, drop = [make], ["DROP TRIGGER refuse"]
    else:
        body = f"BEGIN IF {condition} THEN RAISE EXCEPTION 'odd' USING ERRCODE = 'check_violation'; END IF; RETURN OLD;"
        statements = [
            f"CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ {body} END $$",
            f"CREATE TRIGGER refuse BEFORE DELETE ON {table} FOR EACH ROW EXECUTE FUNCTION refuse()",
        ]
        drop = [f"DROP TRIGGER refuse ON {table}"]

    def run(all: list[str]) -> None:
        with store._database.write(quiet=True) as connection:
            for statement in all:
                connection.execute(text(statement))

    run(statements)
    return lambda: run(drop)


def fill(store: Store, job: Any) -> None:
    """Add ended jobs with outputs, files, decisions and keys of submissions, and machines, all of them old."""
    store.machines._clock = lambda: 1.0
    term = launch(store, *IDS, requested_at=1.0, state_since=1.0)
    end(store, term, *IDS, at=1.0)
    for id in IDS:
        store.deployments.save(id, "", 0, "ana", 1.0)
        store.deployments.delete(id, 1, "ana", 1.0)
        assert store.deployments.close(id, term, 1.0)
    for at, id in enumerate(IDS):
        key = SubmissionKey(f"k-{id}", "ana", "0" * 64)
        store.add_workload(job(id, owner=f"o-{id}"), [("f", id.encode(), False)], key=key, now=1.0 + at)
        store.outputs.append((id, 1, 0), "result", 0, b"result", 10**9)
        store.commit([Change(id, {"state": "failed"})], [NewDecision("x", id, "", "", "", "")], now=2.0 + at)
    store.add_workload(job("live"), now=NOW)


def keeper_of(store: Store, purge: Any = None) -> Retention:
    async def purged(id: str, team: str) -> bool:
        return True

    term = store.take_term("test", 0.0)
    return Retention(
        store, KEEP, purge or purged, lambda: term, clock=lambda: NOW, monotonic=iter_of(0.0, 1e12), rest=0.0
    )


def iter_of(first: float, step: float) -> Callable[[], float]:
    at = [first - step]

    def monotonic() -> float:
        at[0] += step
        return at[0]

    return monotonic


def count(store: Store, table: Any) -> int:
    with store._database.read() as connection:
        return int(connection.execute(select(func.count()).select_from(table)).scalar_one())


ROWS = [
    ("workloads", f"OLD.id = '{BAD}'", workloads, 2, f"workloads {BAD}"),
    ("outputs", f"OLD.workload = '{BAD}'", outputs, 1, f"outputs {BAD}"),
    ("blobs", "OLD.size = 2 AND OLD.digest = (SELECT min(digest) FROM blobs)", None, 0, "blobs "),
    ("decisions", f"OLD.workload = '{BAD}'", decisions, 1, "decisions "),
    ("events", "OLD.id = 3", events, 2, "events 3"),
    ("submission_keys", f"OLD.workload = '{BAD}'", submission_keys, 1, f"k-{BAD}"),
    ("purges", f"OLD.workload = '{BAD}'", purges, 1, f"purges {BAD}"),
    ("machines", f"OLD.id = '{BAD}'", machines, 1, f"machines {BAD}"),
    ("machine_events", "OLD.id = 3", machine_events, 1, "machine_events 3"),
    ("deployments", f"OLD.name = '{BAD}'", deployments, 1, f"deployments {BAD}"),
]


@pytest.mark.parametrize(("table", "condition", "rows", "left", "name"), ROWS, ids=[row[0] for row in ROWS])
async def test_a_row_that_cannot_be_removed_keeps_no_other_and_is_told_until_it_goes(
    store: Store, job: Any, table: str, condition: str, rows: Any, left: int, name: str
) -> None:
    fill(store, job)
    heal = refuse(store, table, condition)
    keeper = keeper_of(store)
    first = await keeper.sweep()
    if rows is not None:
        assert count(store, rows) == left, "all others are gone"
    assert first.report["removed"]["keys"] == len(IDS) - (table == "submission_keys")
    assert store.pruning.last() == first, "the pass went to its end"
    assert name in (keeper.quarantine.sentence(named=True) or "")
    heal()
    await keeper.sweep()
    assert (count(store, workloads), count(store, outputs), count(store, purges)) == (1, 0, 0)
    assert keeper.quarantine.size == 0


async def test_many_rows_that_cannot_be_removed_are_all_passed_over(store: Store, job: Any) -> None:
    ids = [f"k{number:03}" for number in range(200)]
    store.add_workloads([(job(id), (), None) for id in ids], now=0.0)
    store.commit([Change(id, {"state": "failed", "ended_at": 1.0}) for id in ids], now=1.0)
    refuse(store, "workloads", "OLD.id < 'k020' OR OLD.id = 'k150'")
    await keeper_of(store).sweep()
    assert count(store, workloads) == 21


async def test_a_note_of_a_removal_that_stays_keeps_no_other(store: Store, job: Any) -> None:
    fill(store, job)
    keeper = keeper_of(store)
    await keeper.sweep()
    refuse(store, "removals", f"OLD.workload = '{BAD}'")
    keeper.keep = Keep(10.0, 10.0, 10.0, max_removals=0)
    await keeper.sweep()
    assert count(store, removals) == 1
    assert f"removals {BAD}" in (keeper.quarantine.sentence(named=True) or "")


ERRORS = [RecursionError("deep"), OSError(5, "Input/output error"), KeyError("odd"), MemoryError()]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
async def test_a_folder_that_fails_in_any_way_keeps_no_other(sqlite_store: Store, job: Any, error: Exception) -> None:
    store = sqlite_store
    fill(store, job)
    bad, purged = {BAD}, list[str]()

    async def purge(id: str, team: str) -> bool:
        if id in bad:
            raise error
        purged.append(id)
        return True

    keeper = keeper_of(store, purge)
    assert (await keeper.sweep()).report["folders_failed"] == 1
    assert purged == [id for id in IDS if id != BAD]
    assert f"folder {BAD}" in (keeper.quarantine.sentence(named=True) or "")
    tries = len(purged)
    assert await keeper.clear() == 0
    assert len(purged) == tries, "not between two passes"
    bad.clear()
    await keeper.sweep()
    assert (purged[-1], keeper.quarantine.size) == (BAD, 0)


STEPS: list[tuple[Callable[[Store], Any], str]] = [
    (lambda store: store.pruning, "forget_workloads"),
    (lambda store: store.pruning, "forget_outputs"),
    (lambda store: store.pruning, "forget_decisions"),
    (lambda store: store.pruning, "forget_events"),
    (lambda store: store.pruning, "forget_removals"),
    (lambda store: store.pruning, "forget_keys"),
    (lambda store: store.machine_pruning, "forget_machines"),
    (lambda store: store.machine_pruning, "forget_machine_outputs"),
    (lambda store: store.machine_pruning, "forget_machine_events"),
    (lambda store: store.machine_pruning, "forget_deployments"),
    (lambda store: store.pruning, "orphans"),
    (lambda store: store.pruning, "forget_blobs"),
    (lambda store: store.pruning, "to_purge"),
    (lambda store: store.pruning, "give_back"),
    (lambda store: store.pruning, "holdings"),
    (lambda store: store.people, "forget"),
    (lambda store: store.contents, "clear"),
    (lambda store: store.contents, "collect"),
    (lambda store: store.accounts, "unmeasured"),
    (lambda store: store.accounts, "people"),
    (lambda store: store.growth, "note"),
    (lambda store: store, "fill_reserve"),
    (lambda store: store, "size"),
    (lambda store: store, "free_bytes"),
]


@pytest.mark.parametrize(("of", "name"), STEPS, ids=[name for _, name in STEPS])
async def test_a_step_that_fails_stops_no_other_and_is_told(
    sqlite_store: Store, job: Any, monkeypatch: pytest.MonkeyPatch, of: Any, name: str
) -> None:
    store, error = sqlite_store, [RecursionError("deep"), StoreError("it is damaged"), OSError(5, "I/O")][len(name) % 3]
    fill(store, job)
    raised = 0

    def fails(*_: Any, **__: Any) -> Any:
        nonlocal raised
        raised += 1
        raise error

    monkeypatch.setattr(of(store), name, fails)
    keeper = keeper_of(store)
    keeper._measure = lambda id: 1
    sweep = await keeper.sweep()
    assert 0 < raised < 20
    assert store.pruning.last() == sweep
    gone = name in ("forget_workloads", "forget_outputs")
    assert count(store, workloads) == (len(IDS) + 1 if gone else 1)
    assert keeper.quarantine.size == (len(IDS) if name == "forget_blobs" else 1)
    assert type(error).__name__ in (keeper.quarantine.sentence(named=True) or "")
    monkeypatch.undo()
    await keeper.sweep()
    assert (count(store, workloads), keeper.quarantine.size) == (1, 0)


async def test_an_account_or_a_folder_that_cannot_be_counted_keeps_no_other(
    sqlite_store: Store, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = sqlite_store
    for id in IDS:
        store.add_workload(job(id, owner=f"o-{id}"), now=NOW)
        store.commit([Change(id, {"state": "running", "attempt": 1})], now=NOW)
    recount, counted, measured = store.accounts.recount, list[str](), list[str]()

    def count_again(owner: str) -> None:
        if owner == f"o-{BAD}":
            raise RecursionError
        counted.append(owner)
        recount(owner)

    def measure(id: str) -> int:
        if id == BAD:
            raise PermissionError(13, "Permission denied")
        measured.append(id)
        return 10

    monkeypatch.setattr(store.accounts, "recount", count_again)
    keeper = keeper_of(store)
    keeper._measure = measure
    await keeper.sweep()
    assert len(counted) == len(measured) == len(IDS) - 1
    told = keeper.quarantine.sentence(named=True) or ""
    assert f"person o-{BAD}" in told
    assert f"folder {BAD}" in told


async def test_jobs_without_a_folder_keep_no_other_from_being_measured(
    sqlite_store: Store, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of a cluster, beside which jobs run on the service's own machine, too."""
    monkeypatch.setattr(history, "MEASURED_AT_ONCE", 2)
    store = sqlite_store
    for id, ended in (("a1", NOW), ("a2", NOW), ("a3", NOW), ("b1", None), ("b2", None), ("b3", None)):
        store.add_workload(job(id), now=NOW)
        state = "running" if ended is None else "failed"
        store.commit([Change(id, {"state": state, "attempt": 1, "ended_at": ended})], now=NOW)
    keeper = keeper_of(store)
    keeper._measure = lambda id: {"a3": 777, "b3": 1000}.get(id)
    for _ in range(2):
        await keeper.sweep()
    assert store.accounts.unmeasured(10) == ["b1", "b2", "b3"]
    kept = {account.kind: account.bytes for account in store.accounts.list_lines("ana")}
    assert kept["folders"] == 1777


async def test_a_large_file_that_cannot_be_removed_keeps_no_other(
    sqlite_url: str, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(open_store(sqlite_url, min_artifact_bytes=10)) as store:
        for id in IDS:
            store.add_workload(job(id), [("f", id.encode() * 10, False)], now=0.0)
            store.commit([Change(id, {"state": "failed", "ended_at": 1.0})], now=1.0)
        artifacts = store.contents._artifacts
        assert artifacts is not None
        remove, bad, tried = artifacts.remove, store.contents.list_files(BAD)[0][2], list[str]()
        newer = 0.0

        def removed(stored: Any, before: float) -> bool:
            tried.append(stored.digest)
            if stored.digest == bad:
                raise PermissionError(13, "Permission denied")
            return remove(stored, before + newer)

        keeper = keeper_of(store)
        await keeper.sweep()
        monkeypatch.setattr(artifacts, "remove", removed)
        newer, keeper._clock = 1e6, lambda: NOW + 3 * DELETED_AGE
        assert await keeper.clear() == len(IDS) - 1
        assert f"file {bad}" in (keeper.quarantine.sentence(named=True) or "")
        tries = tried.count(bad)
        await keeper.clear()
        await keeper.clear()
        assert tried.count(bad) == tries, "not again and again between two passes"
        assert [stored.digest for part in artifacts.list_pages() for stored in part] == [bad]
        monkeypatch.setattr(artifacts, "remove", lambda stored, before: remove(stored, before + newer))
        await keeper.sweep()
        assert (list(filter(None, artifacts.list_pages())), keeper.quarantine.size) == ([], 0)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
async def test_a_pass_that_fails_is_not_repeated_at_once(
    sqlite_store: Store, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    store = sqlite_store
    monkeypatch.setattr(history, "PROBE_SECONDS", 0.0)
    passes, probed = 0, asyncio.Event()
    probes = 0

    async def sweep() -> Any:
        nonlocal passes
        passes += 1
        raise error

    def probe(older_than: float) -> None:
        nonlocal probes
        probes += 1
        if probes == 20:
            probed.set()

    monkeypatch.setattr(store, "probe", probe)
    keeper = Retention(store, KEEP, None, lambda: 1, monotonic=lambda: 0.0, rest=0.0)  # type: ignore[arg-type]
    monkeypatch.setattr(keeper, "sweep", sweep)
    running = asyncio.create_task(keeper.run())
    async with asyncio.timeout(30):
        await probed.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert passes == 1
    assert "removing what is too old" in (keeper.quarantine.sentence(named=True) or "")


async def test_a_database_that_cannot_be_written_ends_the_pass(
    sqlite_store: Store, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = sqlite_store
    fill(store, job)
    tried = 0

    def fails(*_: Any, **__: Any) -> Any:
        nonlocal tried
        tried += 1
        raise StoreError("it does not answer")

    for name in ("forget_workloads", "forget_decisions", "forget_events"):
        monkeypatch.setattr(store.pruning, name, fails)
    monkeypatch.setattr(store, "probe", fails)
    keeper = keeper_of(store)
    with pytest.raises(StoreError):
        await keeper.sweep()
    assert tried == 2, "one step, and whether the database can be written at all"
    assert keeper.quarantine.size == 0


async def test_a_pass_of_a_replica_that_leads_no_more_ends(
    sqlite_store: Store, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = sqlite_store
    fill(store, job)

    def deposed(*_: Any, **__: Any) -> Any:
        raise NotLeading("another replica leads")

    monkeypatch.setattr(store.pruning, "forget_decisions", deposed)
    keeper = keeper_of(store)
    with pytest.raises(NotLeading):
        await keeper.sweep()
    assert keeper.quarantine.size == 0
