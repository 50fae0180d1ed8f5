"""A year of jobs, notebooks, machines, people who come and go, and new leaders: no table grows for ever."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from autoscale.fleet import machine
from makeway_quota.artifacts.folder import ArtifactFolder
from makeway_quota.autoscale.backoff import LaunchBackoff
from makeway_quota.autoscale.step import MachineChanges
from makeway_quota.history.retention import DAY, Keep, Retention
from makeway_quota.store import Store, open_store
from makeway_quota.store.records import Attempt, Change, NewDecision, Person, SubmissionKey
from makeway_quota.store.storage import growth
from makeway_quota.store.storage.sealed_secrets import GIT, SecretKeys, StoredCredential
from makeway_quota.store.tables import metadata
from sqlalchemy import func, select

KEPT = 20
"""Days that work and decisions are kept"""
FOR_EVER = {"policies"}
"""Tables that only an administrator's own acts add to: versions of the policy document are kept for ever"""
SINCE = 1000
"""The first day; the time is that of this day since 1970"""


def sizes(store: Store) -> dict[str, int]:
    """Count the rows of every table, whatever tables there are."""
    with store._database.read() as connection:
        return {
            table.name: connection.execute(select(func.count()).select_from(table)).scalar_one()
            for table in metadata.sorted_tables
        }


def day_of_work(store: Store, job, day: int, ids: Iterator[int]) -> None:  # type: ignore[no-untyped-def]
    """Live through one day: a user is deleted, the name is given to another, who works in a team of the week."""
    now, name = day * DAY, f"user{day % 3}"
    identity = f"2026-01-01T00:00:00.{day:06}Z"
    others = {f"user{n}": Person(f"user{n}", f"stays-{n}") for n in range(3, 5)}
    store.people.meet({name: Person(name, identity), **others}, (), now)
    for number in itertools.islice(ids, 1):
        id = f"j{number}"
        key = SubmissionKey(f"k{number}", name, "d")
        decision = NewDecision("submit", id, f"team{day // 7}", name, "job", "is submitted")
        files = [("f", bytes([number % 251]) * 2000 + str(number).encode(), False)]
        store.add_workload(job(id, owner=name, team=f"team{day // 7}", source="x"), files, decision, None, key, now=now)
        opened = Attempt(id, 1, now)
        store.commit([Change(id, {"state": "running", "attempt": 1}, open_attempt=opened)], now=now)
        store.worker_reports.claim((id, 1, 0), f"launcher{number}", now)
        store.outputs.append((id, 1, 0), "log", 0, b"l" * 3000, 10**6)
        store.accounts.measured({id: 5}, now)
        store.progress.write({id: (1, {"step": number, "total": 10**6})}, now)
        store.commit([Change(id, {"state": "succeeded", "ended_at": now})], now=now)
    session = f"s{day}"
    store.add_workload(job(session, kind="session", owner=name, server="x"), now=now)
    store.commit([Change(session, {"state": "stopped", "ended_at": now})], now=now)
    store.keep_histories({f"team{day // 7}": 5.0}, now=now)
    if day % 6:
        return
    deleted = f"j{next(ids)}"
    store.add_workload(job(deleted, owner=name), [("f", b"d" * 2000 + deleted.encode(), False)], now=now)
    store.commit([Change(deleted, {"state": "failed", "ended_at": now})], now=now)
    store.pruning.forget_ended(deleted, now)


def day_of_credentials(store: Store, keys: SecretKeys, day: int) -> None:
    """Live through one day: a credential of a team of the week is replaced each day, and removed after the week."""
    name, now = f"git{day // 7}", day * DAY
    written = NewDecision("policy", None, None, "root", "credential", "is set")
    store.secrets.write(StoredCredential(name, GIT, f"team{day // 7}", now, "root"), {"token": "x"}, keys, written)
    if day % 7 == 6:
        assert store.secrets.delete(f"team{day // 7 - 1}", f"git{day // 7 - 1}", now, written) == (
            day - 7 >= SINCE - SINCE % 7
        )


def day_of_machines(store: Store, term: int, day: int) -> None:
    """Live through one day: a machine of the deployment of the week takes over from that of the day before."""
    now, weekday = day * DAY, (day - SINCE) % 7
    name, before = f"week{(day - SINCE) // 7}", f"week{(day - SINCE - 1) // 7}"
    if weekday == 0:
        if saved := store.deployments.read(before):
            store.deployments.delete(before, saved.version, "ana", now)
        store.deployments.save(name, "pools: {}", 0, "ana", now)
    live = [replace(row, state="gone", state_since=now, reason="idle") for row in store.machines.live()]
    if live:
        spent = {f"{1970 + day // 365}-{1 + day % 365 // 31:02}": 1000}
        assert store.machines.commit(before, term, MachineChanges(changed=tuple(live), first_seen={}, spent=spent))
    if weekday == 0:
        assert store.deployments.close(before, term, now) == bool(live)
    new = machine(id=f"m{day}", deployment=name, requested_at=now, state_since=now)
    held = LaunchBackoff("g2", "a", "on_demand", "stock_out", 1 + weekday, now, now + 600)
    changes = MachineChanges((new,), backoffs=(held,), first_seen={f"i-{day}": now})
    assert store.machines.commit(name, term, changes)
    store.machine_reports.join(new.id, "boot", {"gpus": 2}, now)
    store.machine_log.write_output(new.id, "console", "x" * 3000, None, now)
    store.machine_log.add(name, new.id, "spot", "the provider takes the machine back", now)


@pytest.mark.slow
@pytest.mark.covers("N25")
async def test_every_table_levels_off_within_a_year(
    sqlite_url: str, tmp_path: Path, job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growth, "DAYS", 92 // 6)  # it counts days with a pass, which are every sixth here
    now, eras, ids = 0.0, itertools.count(0.0, 1e12), itertools.count()

    async def purge(id: str, team: str) -> bool:
        return True

    keep = Keep(KEPT * DAY, KEPT * DAY, 7 * DAY)
    known: dict[int, dict[str, int]] = {}
    with closing(open_store(sqlite_url, ArtifactFolder(tmp_path / "artifacts"), 1000)) as store:
        keeper = Retention(
            store,
            keep,
            purge,
            lambda: store.take_term("test", now),
            clock=lambda: now,
            monotonic=lambda: next(eras),
            rest=0.0,
            room=lambda: 5,
        )
        store.machines._clock = lambda: now
        for day in range(SINCE, SINCE + 365):
            now = day * DAY
            day_of_work(store, job, day, ids)
            day_of_machines(store, store.take_term("test", now) or 0, day)
            day_of_credentials(store, SecretKeys(tmp_path / "keys", made=True), day)
            if day % 6 == 0:
                now += 3600
                for _ in range(5):
                    store.take_term("another", now)
                await keeper.sweep()
            if day + 1 - SINCE in (180, 365):
                known[day + 1 - SINCE] = sizes(store)
        half, year = known[180], known[365]
        assert half["workloads"] > 30, "there is work"
        grown = {name: (half[name], year[name]) for name in year if year[name] > 1.1 * half[name] + 10}
        assert {name: sizes for name, sizes in grown.items() if name not in FOR_EVER} == {}
        assert {name for name, rows in year.items() if not rows} <= FOR_EVER | {"purges", "dropped"}, "all were used"
        assert len(store.people.all()) < 3 * (2 * KEPT + 120)
