"""Orders are refused unless the leader's lock was renewed within the deadline, by either clock."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from makeway_quota.backends.base import NodeStatus, StartOrder
from makeway_quota.backends.memory import MemoryBackend
from makeway_quota.control.actuate import TAKEOVER_GRACE, Actuator, StartResults
from makeway_quota.control.replicas.leader import Instant, Leader
from makeway_quota.store import LeadershipLost, StoreError, open_store
from makeway_quota.store.errors import NotLeading
from makeway_quota.store.records import NewWorkload, Workload
from makeway_quota.store.replicas.leader_lock import Acquired
from makeway_quota.store.rows import initial_record
from makeway_quota.values import Notice

NODE = NodeStatus("local", "", tuple(range(4)), virtual=True)


class Lock:
    """A lock whose answers the test chooses."""

    expires = True

    def __init__(self, wait: float = 0.0) -> None:
        self.wait = wait
        self.term = 0
        self.free = True
        self.error: StoreError | None = None
        self.answers = threading.Event()
        self.answers.set()
        self.released: list[int | None] = []

    def acquire(self) -> Acquired | None:
        if self.error:
            raise self.error
        if not self.free:
            return None
        self.term += 1
        return Acquired(self.term, self.wait)

    def renew(self, term: int) -> None:
        self.answers.wait(20)
        if self.error:
            raise self.error

    def release(self, term: int | None) -> None:
        self.released.append(term)


@asynccontextmanager
async def campaigning(
    lock: Lock, deadline: float, able: Callable[[], bool] = lambda: True
) -> AsyncIterator[tuple[Leader, Callable[[Callable[[], object]], object]]]:
    """A leader that runs, and a function that waits until something about it is true."""
    leader = Leader(lock, deadline, able)
    running = asyncio.create_task(leader.run())

    async def until(found: Callable[[], object]) -> None:
        async with asyncio.timeout(60):
            while not found():  # noqa: ASYNC110 - the leader's age is a matter of time
                await asyncio.sleep(0.01)

    try:
        yield leader, until
    finally:
        lock.answers.set()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await leader.close()


async def test_a_leader_that_cannot_renew_ceases_to_act_at_the_deadline() -> None:
    lock = Lock()
    async with campaigning(lock, 0.6) as (leader, until):
        await until(lambda: leader.term == 1)
        lock.answers.clear()  # the database is silent
        await until(lambda: leader.term is None)
        with pytest.raises(NotLeading):
            leader.check()
        lock.error = StoreError("the database is gone")
        lock.answers.set()
        await until(lambda: lock.released)
        lock.error = None
        await until(lambda: leader.term == 2)
        assert lock.released == [None], "the next leader has to wait: this one did not end cleanly"


async def test_a_deposed_leader_is_a_candidate_again() -> None:
    lock = Lock()
    async with campaigning(lock, 0.3) as (leader, until):
        heard: list[int | None] = []
        leader.on_change(lambda: heard.append(leader.term))
        await until(lambda: leader.term == 1)
        lock.free, lock.error = False, LeadershipLost(1, 2, "another")
        await until(lambda: leader.term is None)
        lock.error = None
        await asyncio.sleep(0.2)
        assert leader.term is None, "candidates wait"
        lock.free = True
        await until(lambda: leader.term == 2)
        assert heard[-2:] == [None, 2]


async def test_a_leader_that_is_not_able_to_act_hands_over() -> None:
    lock, able = Lock(), [True]
    async with campaigning(lock, 6.0, lambda: able[0]) as (leader, until):
        await until(lambda: leader.term == 1)
        assert not leader.hand_over()
        able[0] = False
        assert leader.hand_over()
        assert leader.term is None
        await until(lambda: lock.released)
        assert lock.released == [1], "the next leader need not wait: no order is under way"
        await asyncio.sleep(1.2)
        assert lock.term == 1, "it leaves the lock to others, although it is free"
        able[0] = True
        await until(lambda: leader.term == 2)


async def test_one_leads_where_none_is_able_to_act(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("makeway_quota.control.replicas.leader.STAND_BACK", 0.2)
    lock = Lock()
    async with campaigning(lock, 6.0, lambda: False) as (leader, until):
        await until(lambda: leader.term == 1)
        assert not leader.hand_over(), "it would be its turn again at once"
        monkeypatch.setattr("makeway_quota.control.replicas.leader.UNABLE", 0.0)
        assert leader.hand_over(), "by now another one may be able"
        await until(lambda: leader.term == 2)


async def test_a_new_leader_acts_only_after_the_deadline_of_the_one_before() -> None:
    lock = Lock(wait=0.5)
    async with campaigning(lock, 0.6) as (leader, until):
        began = time.monotonic()
        await until(lambda: lock.term == 1)
        with pytest.raises(NotLeading):
            leader.check()
        await until(lambda: leader.term == 1)
        assert time.monotonic() - began >= 0.5


@pytest.mark.parametrize("clock", ["monotonic", "boottime"])
async def test_either_clock_can_age_a_renewal(clock: str, monkeypatch: pytest.MonkeyPatch) -> None:
    leader = Leader(Lock(), 6.0)
    assert await leader.acquire()
    assert leader.check() == 1
    ages = {"monotonic": 0.0, "boottime": 0.0, clock: 6.1}
    now = Instant.now()
    later = Instant(now.monotonic + ages["monotonic"], now.boottime + ages["boottime"])
    monkeypatch.setattr(Instant, "now", classmethod(lambda cls: later))
    with pytest.raises(NotLeading):
        leader.check()
    await leader.close()


async def test_an_order_is_broken_off_when_the_lock_runs_out() -> None:
    leader = Leader(Lock(), 0.3)
    assert await leader.acquire()
    with pytest.raises(NotLeading):
        async with leader.acting():
            await asyncio.sleep(20)
    leader.step_down("for the test")
    assert await leader.acquire()
    with pytest.raises(TimeoutError):  # the backend's own stays what it is
        async with leader.acting():
            raise TimeoutError
    await leader.close()


def row(number: int, state: str, **more: object) -> Workload:
    made = initial_record(NewWorkload(f"j-0000000{number}", "job", "rnd", "gpu1", "ana", gpus=1000), 1.0)
    return made._replace(state=state, attempt=1, **more)  # type: ignore[arg-type]


class Recorder(MemoryBackend):
    """Counts the orders that reach it."""

    def __init__(self) -> None:
        super().__init__([NODE])
        self.orders: list[str] = []

    async def start(self, order: StartOrder) -> None:
        self.orders.append("start")
        await super().start(order)

    async def notice(self, workload: str, attempt: int, notice: Notice) -> None:
        self.orders.append("notice")
        await super().notice(workload, attempt, notice)

    async def kill(self, workload: str, attempt: int) -> None:
        self.orders.append("kill")
        await super().kill(workload, attempt)

    async def forget(self, workload: str, attempt: int) -> None:
        self.orders.append("forget")
        await super().forget(workload, attempt)

    async def purge(self, workload: str, team: str = "") -> bool:
        self.orders.append("purge")
        return await super().purge(workload, team)


@pytest.mark.covers("N24")
async def test_no_order_of_any_kind_leaves_a_replica_that_does_not_lead(tmp_path: Path) -> None:
    store = open_store(f"sqlite:///{tmp_path}/makeway.sqlite")
    backend, leader = Recorder(), Leader(store.leader_lock(6.0), 6.0)
    actuator = Actuator(store, backend, leader)
    starting, noticed, cancelled, over = (row(n, s) for n, s in enumerate(("starting", "running", "running", "failed")))
    assert await leader.acquire()
    actuator.begin_term(leader.check())
    for item in (starting, noticed, cancelled, over):
        await actuator.start([item._replace(state="starting")], 1.0, StartResults())
    backend.finish(over.id, 1)
    backend.orders.clear()
    notice = Notice("owners come back", 1.0, 31.0)
    rows = {
        item.id: item
        for item in (
            row(5, "starting"),
            noticed._replace(state="checkpointing", notice=notice),
            cancelled._replace(cancel_requested=True),
        )
    }
    leader.step_down("for the test")
    seen = await backend.observe()
    for given in ({id: item} for id, item in rows.items()):
        with pytest.raises(NotLeading):
            await actuator.actuate(given, seen, 2.0, StartResults())
    with pytest.raises(NotLeading):
        await actuator.actuate({}, seen, 2.0, StartResults())  # leftovers: kill what runs, forget what is over
    with pytest.raises(NotLeading):
        await actuator.start([row(6, "starting")], 2.0, StartResults())
    with pytest.raises(NotLeading):
        await actuator.purge(over.id, "rnd")
    assert backend.orders == []
    assert await leader.acquire()
    with pytest.raises(NotLeading):
        await actuator.start([row(6, "starting")], 2.0, StartResults())  # a cycle of the term before
    assert not actuator.may_act()
    assert backend.orders == []
    actuator.begin_term(leader.check())
    assert actuator.may_act()
    await actuator.actuate({starting.id: starting, **rows}, seen, 2.0, StartResults())
    assert await actuator.purge(over.id, "rnd")
    assert sorted(backend.orders) == ["forget", "kill", "notice", "purge", "start"]
    await leader.close()
    store.close()


@asynccontextmanager
async def acting(tmp_path: Path, monotonic: Callable[[], float]) -> AsyncIterator[tuple[Leader, Actuator]]:
    """Yield a leader and an actuator of its term."""
    store = open_store(f"sqlite:///{tmp_path}/makeway.sqlite")
    leader = Leader(store.leader_lock(6.0), 6.0)
    actuator = Actuator(store, Recorder(), leader, monotonic=monotonic)
    assert await leader.acquire()
    actuator.begin_term(leader.check())
    yield leader, actuator
    await leader.close()
    store.close()


def noticed_session(grace: float) -> dict[str, Workload]:
    """Return a session whose notice was written at 1 s and ends after `grace` seconds."""
    made = initial_record(NewWorkload("s-1", "session", "rnd", "gpu1", "ana", gpus=1000), 1.0)
    notice = Notice("owners come back", 1.0, 1.0 + grace)
    return {"s-1": made._replace(state="checkpointing", attempt=1, notice=notice)}


async def test_a_clock_that_jumps_does_not_shorten_the_grace_of_a_session(tmp_path: Path) -> None:
    at = 100.0
    rows = noticed_session(30.0)
    seen = await Recorder().observe()
    async with acting(tmp_path, lambda: at) as (_, actuator):
        assert not (await actuator.actuate(rows, seen, 1.0, StartResults())).changes
        assert not (await actuator.actuate(rows, seen, 90_000.0, StartResults())).changes, (
            "the wall clock jumped by a day"
        )
        at = 129.9
        assert not (await actuator.actuate(rows, seen, 90_000.0, StartResults())).changes
        at = 130.0
        ended = await actuator.actuate(rows, seen, -5.0, StartResults())
        assert [change.workload for change in ended.changes] == ["s-1"]


async def test_a_new_leader_grants_the_rest_of_a_grace_not_a_second_one(tmp_path: Path) -> None:
    at = 100.0
    rows = noticed_session(30.0)
    seen = await Recorder().observe()
    async with acting(tmp_path, lambda: at) as (leader, actuator):
        assert not (await actuator.actuate(rows, seen, 21.0, StartResults())).changes, "20 of 30 s have passed"
        at = 109.9
        assert not (await actuator.actuate(rows, seen, 21.0, StartResults())).changes
        at = 110.0
        assert (await actuator.actuate(rows, seen, 21.0, StartResults())).changes
        actuator.begin_term(leader.check())
        at = 500.0
        assert not (await actuator.actuate(rows, seen, -70.0, StartResults())).changes, (
            "its clock is behind: no negative age"
        )
        at = 530.0
        assert (await actuator.actuate(rows, seen, -70.0, StartResults())).changes


async def test_a_clock_that_is_ahead_leaves_a_session_some_grace_in_a_new_term(tmp_path: Path) -> None:
    at = 100.0
    seen = await Recorder().observe()
    async with acting(tmp_path, lambda: at) as (leader, actuator):
        for grace, granted in ((30.0, TAKEOVER_GRACE), (4.0, 4.0)):
            actuator.begin_term(leader.check())
            rows = noticed_session(grace)
            assert not (await actuator.actuate(rows, seen, 90_000.0, StartResults())).changes
            at += granted - 0.1
            assert not (await actuator.actuate(rows, seen, 90_000.0, StartResults())).changes
            at += 0.1001
            assert (await actuator.actuate(rows, seen, 90_000.0, StartResults())).changes
