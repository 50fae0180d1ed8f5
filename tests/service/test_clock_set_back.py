"""A clock that is set back protects no job for longer than its `min_runtime`, and both engines see the same."""

from __future__ import annotations

import asyncio

import pytest
from engine.engines import differences
from makeway_quota import policy
from makeway_quota.backends.base import NodeStatus, Observation
from makeway_quota.control.world.world import World
from makeway_quota.engine import IncrementalEngine, Plan, reference, schedule
from makeway_quota.store.records import NewWorkload
from makeway_quota.store.rows import changed, initial_record
from makeway_quota.values import Place
from memory_rows import Rows

DOCUMENT = policy.read_policy(
    """
version: 1
settings: {yields_after: 8h}
pools: [{name: p, nodes: {local: {gpus: all}}}]
profiles: [{name: one, gpus: 1, min_runtime: 10m, pools: [p], policies: [[lender, borrower]]}]
policies:
  - {name: lender, groups: [lender], quotas: [{reserved: 2}]}
  - {name: borrower, groups: [borrower], quotas: [{reserved: 0}]}
"""
)
HOUR = 3600.0
START = 1_000_000.0


class Cluster:
    """Two GPUs with a job of the borrower on each, and the engine that follows them from change to change."""

    def __init__(self) -> None:
        self.rows, self.now = Rows(), START
        self.submit("b-1", "borrower", START, "running", 0)
        self.submit("b-2", "borrower", START + 1, "running", 1)
        self.world = self.new_world()
        self.engine: IncrementalEngine | None = None

    def new_world(self) -> World:
        world = World(self.rows, DOCUMENT, 1, lambda: self.now)  # type: ignore[arg-type]
        world.observe(Observation((NodeStatus("n1", "", (0, 1)),)))
        return world

    def submit(self, id: str, team: str, at: float, state: str = "pending", device: int = 0) -> None:
        row = initial_record(NewWorkload(id, "job", team, "one", "ana", gpus=1000), at)
        if state != "pending":
            here = (Place("n1", (device,), (1000,)),)
            row = changed(row, {"state": state, "attempt": 1, "placement": here, "started_at": at})
        self.rows.put(row)

    async def plan(self, now: float) -> Plan:
        """Plan as the loop does, with the reference engine and from a whole snapshot: all must decide the same."""
        self.now = now
        rows = await self.world.rows()
        new = self.world.changes(rows, now)
        if self.engine is None or new.whole:
            self.engine = IncrementalEngine(new.snapshot)
        else:
            self.engine.use(new.snapshot)
            self.engine.change(new.changed, new.gone)
        plan = self.engine.plan(now)
        snapshot = self.world.snapshot(rows, now)
        assert not differences(plan, schedule(snapshot))
        assert not differences(plan, reference.schedule(snapshot))
        return plan

    async def victims(self, now: float) -> list[str]:
        """Return the ids of the jobs that a plan evicts, for the lender's job or one of the same team."""
        return sorted(evict.id for evict in (await self.plan(now)).evict)


@pytest.mark.covers("F14")
@pytest.mark.parametrize("back", [60.0, HOUR, 400 * HOUR])
def test_protection_ends_min_runtime_after_the_clock_was_set_back(back: float) -> None:
    async def live() -> None:
        cluster = Cluster()
        cluster.submit("l-1", "lender", START + 2)
        assert await cluster.victims(START + 30) == []
        step = START + 30 - back
        assert await cluster.victims(step) == [], "both are young still"
        assert await cluster.victims(step + 599) == []
        assert await cluster.victims(step + 601), "no job is protected for longer than ten minutes"

    asyncio.run(live())


def test_protection_does_not_begin_again_where_the_clock_comes_to_the_start_once_more() -> None:
    async def live() -> None:
        cluster = Cluster()
        await cluster.plan(START + 30)
        await cluster.plan(START - HOUR)
        await cluster.plan(START + 5)
        cluster.submit("l-1", "lender", START + 6)
        assert await cluster.victims(START + 10)

    asyncio.run(live())


def test_a_second_step_back_and_a_restart_protect_for_min_runtime_at_most() -> None:
    async def live() -> None:
        cluster = Cluster()
        cluster.submit("l-1", "lender", START + 2)
        await cluster.plan(START + 30)
        await cluster.plan(START - HOUR)
        assert await cluster.victims(START - 2 * HOUR) == []
        assert await cluster.victims(START - 2 * HOUR + 601)
        cluster.world, cluster.engine = cluster.new_world(), None
        assert await cluster.victims(START - 2 * HOUR + 602) == [], "a new process sees them for the first time"
        assert await cluster.victims(START - 2 * HOUR + 1203)

    asyncio.run(live())


def test_the_next_attempt_is_protected_by_its_own_start() -> None:
    async def live() -> None:
        cluster = Cluster()
        await cluster.plan(START + 30)
        step = START - HOUR
        await cluster.plan(step)
        for id in ("b-1", "b-2"):
            again = {"state": "running", "attempt": 2, "started_at": step + 700}
            cluster.rows.put(changed(cluster.rows.found[id], again))
        cluster.submit("l-1", "lender", step + 700)
        assert await cluster.victims(step + 701) == []
        assert await cluster.victims(step + 1299) == []
        assert await cluster.victims(step + 1301)

    asyncio.run(live())


def test_what_started_last_still_leaves_first() -> None:
    async def live() -> None:
        cluster = Cluster()
        cluster.submit("l-1", "lender", START + 2)
        await cluster.plan(START + 30)
        await cluster.plan(START - HOUR)
        assert await cluster.victims(START - HOUR + 601) == ["b-2"]

    asyncio.run(live())


def test_a_job_that_yielded_for_its_age_counts_by_the_new_time_in_every_engine() -> None:
    async def live() -> None:
        cluster = Cluster()
        await cluster.plan(START + 30)
        cluster.submit("b-3", "borrower", START + 9 * HOUR)
        assert await cluster.victims(START + 9 * HOUR) == ["b-2"]
        assert await cluster.victims(START + 4 * HOUR) == []
        assert await cluster.victims(START - 2 * HOUR) == []
        assert await cluster.victims(START + 5 * HOUR) == []
        assert await cluster.victims(START + 9 * HOUR) == ["b-2"]

    asyncio.run(live())
