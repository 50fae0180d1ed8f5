"""Plans that start hundreds of jobs: written and actuated in parts, each start once, every job under its own id."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from makeway_quota.backends.base import BackendError, BackendUnavailable, NodeStatus, Phase, StartOrder
from makeway_quota.backends.memory import MemoryBackend
from makeway_quota.control.actuate import MAX_CONCURRENT_STARTS, Actuator, StartResults
from makeway_quota.control.change_set import ChangeSet, decide
from makeway_quota.control.replicas.leader import Leader
from makeway_quota.services.jobs import submission_check
from makeway_quota.store.errors import NotLeading
from makeway_quota.store.records import Change, NewWorkload, Workload
from makeway_quota.store.rows import initial_record
from makeway_quota.store.store import Store, open_store
from makeway_quota.values import Place
from running import running

NODE = NodeStatus("local", "", tuple(range(10)), virtual=True)


def row(name: str, state: str = "pending") -> Workload:
    new = initial_record(NewWorkload(name, "job", "rnd", "gpu1", "ana", command=("work",), gpus=1000), 1.0)
    return new._replace(state=state, attempt=1, placement=(Place("local", (0,), (1000,)),))


def test_a_change_set_is_divided_in_order_and_each_decision_stays_with_its_change() -> None:
    change_set = ChangeSet()
    rows = [row(f"j-{number:08d}") for number in range(120)]
    for number, item in enumerate(rows):
        change_set.add(Change(item.id, {"state": "starting"}), decide(item, "start", "x", "y") if number % 3 else None)
    parts = list(change_set.parts(50))
    assert [len(part.changes) for part in parts] == [50, 50, 20]
    assert [change for part in parts for change in part.changes] == change_set.changes
    assert [decision for part in parts for decision in part.decisions] == change_set.decisions
    for part in parts:
        assert {d.workload for d in part.decisions} <= {change.workload for change in part.changes}
    assert list(ChangeSet().parts(50)) == []


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(f"sqlite:///{tmp_path}/change_set.sqlite")


@pytest.fixture
async def leader(store: Store) -> AsyncIterator[Leader]:
    leader = Leader(store.leader_lock(6.0), 6.0)
    assert await leader.acquire()
    yield leader
    await leader.close()


async def test_a_started_attempt_is_not_started_again_in_the_same_cycle(store: Store, leader: Leader) -> None:
    backend = MemoryBackend([NODE])
    orders, seen, started_now = Actuator(store, backend, leader), await backend.observe(), StartResults()
    orders.begin_term(leader.check())
    starting, waits = row("j-00000001", "starting"), row("j-00000002")
    await orders.start([starting, waits], 2.0, started_now)
    assert list(backend.attempts) == [(starting.id, 1)], "a pending job is not started"
    cancelled = starting._replace(cancel_requested=True)
    failed = await orders.actuate({cancelled.id: cancelled}, seen, 2.0, started_now)
    assert not failed.changes, "it was just started: the next cycle, which observes it, ends it"
    await orders.actuate({cancelled.id: cancelled}, await backend.observe(), 3.0, StartResults())
    assert backend.attempts[(starting.id, 1)].status.phase is Phase.EXITED
    assert backend.starts == 1


async def test_a_cancelled_job_is_not_started_and_a_failed_start_is_recorded(store: Store, leader: Leader) -> None:
    backend = MemoryBackend([NODE])
    backend.refusals["j-00000002"] = "No such image."
    orders, seen, started_now = Actuator(store, backend, leader), await backend.observe(), StartResults()
    orders.begin_term(leader.check())
    cancelled = row("j-00000001", "starting")._replace(cancel_requested=True)
    refused = row("j-00000002", "starting")
    await orders.start([cancelled, refused], 2.0, started_now)
    failed = await orders.actuate({cancelled.id: cancelled, refused.id: refused}, seen, 2.0, started_now)
    assert {change.workload: change.fields["state"] for change in failed.changes} == {
        cancelled.id: "cancelled",
        refused.id: "failed",
    }
    assert not backend.attempts


class Slow(MemoryBackend):
    """A backend elsewhere: each start waits for another task; `most` is how many waited at the same time."""

    shared = True

    def __init__(self) -> None:
        super().__init__([NODE])
        self.waiting = self.most = 0
        self.errors: dict[str, Exception] = {}

    async def start(self, order: StartOrder) -> None:
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        await asyncio.sleep(0)
        self.waiting -= 1
        if order.workload in self.errors:
            raise self.errors[order.workload]
        await super().start(order)


async def test_a_backend_elsewhere_starts_some_attempts_at_the_same_time(store: Store, leader: Leader) -> None:
    backend, started = Slow(), StartResults()
    orders = Actuator(store, backend, leader)
    orders.begin_term(leader.check())
    rows = [row(f"j-{number:08d}", "starting") for number in range(2 * MAX_CONCURRENT_STARTS + 3)]
    refused, later = rows[1].id, rows[MAX_CONCURRENT_STARTS].id
    backend.errors = {refused: BackendError("No such image."), later: BackendUnavailable("It does not answer.")}
    await orders.start([*rows, row("j-waits")], 2.0, started)
    assert backend.most == MAX_CONCURRENT_STARTS
    assert {id for id, _ in backend.attempts} == {item.id for item in rows} - {refused, later}
    assert [(change.workload, change.fields["state"]) for change in started.failed.changes] == [(refused, "failed")]
    assert [change.workload for change in started.reasons.changes] == [later], "its owner is told why"
    assert started.postponed == {(later, 1)}
    assert started.attempts == {(item.id, 1) for item in rows}


async def test_a_replica_that_leads_no_more_starts_no_further_attempts(store: Store, leader: Leader) -> None:
    backend, started = Slow(), StartResults()
    orders = Actuator(store, backend, leader)
    orders.begin_term(leader.check())
    rows = [row(f"j-{number:08d}", "starting") for number in range(2 * MAX_CONCURRENT_STARTS)]
    backend.errors = {rows[2].id: NotLeading("for the test")}
    with pytest.raises(NotLeading, match="for the test"):
        await orders.start(rows, 2.0, started)
    assert {id for id, _ in backend.attempts} == {item.id for item in rows[:MAX_CONCURRENT_STARTS]} - {rows[2].id}


async def test_hundreds_start_once_each_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("makeway_quota.control.loop.CHANGES_PER_COMMIT", 3)
    told: list[str] = []

    class Told(MemoryBackend):
        async def start(self, order: StartOrder) -> None:
            told.append(order.workload)
            await super().start(order)

    backend = Told([NODE], lasts=lambda order: 0.05, real_time=True)
    async with running(tmp_path, backend=backend, MAKEWAY_TICK_SECONDS=0.1) as run:
        jobs = [await run.submit("ana", f"job {number}", profile="gpu1") for number in range(20)]
        for job in jobs:
            assert (await run.job(job.id, "succeeded")).attempt == 1
        assert sorted(told) == sorted(job.id for job in jobs), "each is told once"


async def test_an_id_that_is_taken_is_drawn_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = iter(["aaaaaaaa", "aaaaaaaa", "aaaaaaaa", "bbbbbbbb"])
    monkeypatch.setattr(submission_check.secrets, "token_hex", lambda size: next(drawn))
    async with running(tmp_path, backend=MemoryBackend([NODE], real_time=True)) as run:
        first = await run.submit("ana", "first", profile="gpu1")
        second = await run.submit("ana", "second", profile="gpu1")
    assert (first.id, second.id, second.name) == ("j-aaaaaaaa", "j-bbbbbbbb", "second")
