"""Measure whole cycles with a thousand machines and ten thousand waiting jobs, and what single events add to them.

Engine, demand, reasons, rows, nodes, reports and the step of the deployment are those of the service, on a database in
a file; only jobs have their rows in memory, and no instance exists. All is counted in time of one processor, as other
work may run beside it.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, cast

from makeway_quota import policy
from makeway_quota.autoscale.backoff import LaunchBackoff
from makeway_quota.autoscale.machine import Machine
from makeway_quota.autoscale.providers.memory import MemoryInstance, MemoryProvider
from makeway_quota.autoscale.step import MachineChanges
from makeway_quota.backends.base import AttemptStatus, NodeStatus, Phase
from makeway_quota.backends.machines.machine_source import BACKEND, NODES, MachineStatus
from makeway_quota.backends.memory import MemoryBackend
from makeway_quota.control.change_set import ChangeSet
from makeway_quota.control.decisions import change_set_of
from makeway_quota.control.garbage import collecting_less
from makeway_quota.control.machines.channel import MachineChannel
from makeway_quota.control.machines.cycle_demand import cycle_demand
from makeway_quota.control.machines.machine_loop import MachineLoop
from makeway_quota.control.machines.placements import MachinePlacements
from makeway_quota.control.machines.tokens import MachineTokens
from makeway_quota.control.planner import Planner
from makeway_quota.control.reason_throttle import ReasonThrottle
from makeway_quota.control.replicas.leader import Leader
from makeway_quota.control.world.world import World
from makeway_quota.store import Store, open_store
from makeway_quota.store.records import NewWorkload, Workload
from makeway_quota.store.rows import changed, initial_record
from makeway_quota.values import Place

from .measure import Measured
from .world_cycle import MemoryRows, ReportedAttempt

MACHINES = 1_000
BOOTING = 100
JOBS = 10_000
GPUS = 8
TEAMS = 50
TIMES = 20
DOCUMENT = """
version: 1
name: cloud
provider: memory
max_machines: {machines}
poll_interval: 1
machine_types:
  - {{name: g8, pool: gpu, instance: big-8, gpus: 8, max_machines: {machines}, price: 20}}
  - {{name: g8-dear, pool: gpu, instance: dear-8, gpus: 8, max_machines: {machines}, price: 30}}
"""


class Leading:
    """A leader whose term does not end."""

    def __init__(self, term: int) -> None:
        self.term = term

    def check(self, term: int | None = None) -> int:
        """Return the term."""
        return self.term


class Site:
    """A service at its maximum of machines, some of which boot; each cycle is a second later."""

    def __init__(self, store: Store, machines: int = MACHINES, booting: int = BOOTING, jobs: int = JOBS) -> None:
        self.now = time.time()
        self.store = store
        self.leader = cast(Leader, Leading(store.take_term("benchmark", self.now)))
        self.provider = MemoryProvider(self.time)
        self.rows = MemoryRows([*_running(range(booting, machines), self.now), *_waiting(jobs, self.now)])
        self.backend = MemoryBackend()
        rows: Any = self.rows
        self.world = World(rows, policy.read_policy(_policy(), "policy.yaml"), 1, self.time, monotonic=self.time)
        self.planner, self.reasons = Planner(self.world), ReasonThrottle()
        self.planner.demand = True
        self.channel = MachineChannel(store, MachineTokens(b"0" * 32), MachinePlacements())
        self.loop = MachineLoop(store, self.leader, lambda _: self.provider, lambda: None, self.time, self.time)
        self._shown: dict[str, MachineStatus] = {}
        store.deployments.save("cloud", DOCUMENT.format(machines=machines), 0, "benchmark", self.now)
        there = tuple(_machine(number, number >= booting, self.now) for number in range(machines))
        store.machines.commit("cloud", self.leader.check(), MachineChanges(launched=there))
        for one in there:
            instance = str(one.instance)
            kept = MemoryInstance(instance, one.id, one.id, "cloud", "{}", None, self.now, self.now)
            self.provider.instances[instance] = kept
            if one.state == "ready":
                self.report(one.id, init_exit_code=0)
        for row in self.rows.active():
            self._put(row)

    def time(self) -> float:
        """Return the time, which passes from cycle to cycle."""
        return self.now

    async def cycle(self) -> tuple[float, float]:
        """Make one cycle, and the step of the deployment that follows; return how long each took, in ms."""
        self.now += 1
        began = time.process_time()
        await self._observe()
        self.loop.prepare(self.world)
        rows = await self.world.rows()
        plan = await self.planner.plan(rows, self.now)
        explained = self.loop.explained(plan)
        self._apply(change_set_of(explained, rows, now=self.now, lease_seconds=15.0, reasons=self.reasons))
        nodes, placed = self.world.observed.nodes, await self.world.placed()
        machines = self.loop.machines_on(nodes)
        self.loop.planned(cycle_demand(self.now, plan.demand, nodes, placed.values(), machines), self.leader.term)
        self.world.pending_changes.end_cycle()
        decided = time.process_time()
        await self.loop.turn()
        ended = time.process_time()
        for driver in self.loop._drivers.values():
            while driver._tasks:
                await asyncio.gather(*driver._tasks)
        return 1000 * (decided - began), 1000 * (ended - decided)

    async def _observe(self) -> None:
        await self.channel.refresh()
        machines = self.channel.machines()
        for name, machine in machines.items():
            if machine.condition in NODES and self._shown.get(name) is not machine:
                self._shown[name] = machine
                self.backend.nodes[name] = _node(machine)
        self.world.observe(await self.backend.observe(self.world.since))

    def _apply(self, changes: ChangeSet) -> None:
        for change in changes.changes:
            self._put(changed(self.rows.rows[change.workload], change.fields))

    def _put(self, row: Workload) -> None:
        if row.state in ("running", "starting"):
            status = AttemptStatus(row.id, row.attempt, Phase.RUNNING)
            self.backend.attempts[row.id, row.attempt] = ReportedAttempt(status)  # type: ignore[assignment]
        elif not row.live:
            self.backend.attempts.pop((row.id, row.attempt), None)
        self.rows.put(row)

    # -- what happens between two cycles

    def end_a_job(self) -> None:
        """End the job that runs for the longest."""
        row = next(row for row in self.rows.active() if row.state == "running")
        self._put(changed(row, {"state": "succeeded", "placement": (), "ended_at": self.now}))

    def refuse(self) -> None:
        """Hold back launches in one more zone."""
        known = self.store.machines.backoffs("cloud")
        back = LaunchBackoff("g8", f"zone-{len(known)}", "on_demand", "stock_out", 1, self.now, self.now + 300)
        assert self.store.machines.commit("cloud", self.leader.check(), MachineChanges(backoffs=(*known, back)))

    def boot(self) -> None:
        """Have the agent of a machine that boots join."""
        self.report(self._first("booting"))

    def join(self) -> None:
        """Have a machine whose agent has joined end its init script, so that it is a node from now on."""
        self.report(self._first("joining"), init_exit_code=0)

    def _first(self, state: str) -> str:
        return next(one.id for one in self.store.machines.live() if one.state == state)

    def report(self, machine: str, **more: Any) -> None:
        """Report of a machine what its agent does."""
        self.store.machine_reports.join(machine, "boot", {}, self.now)
        facts = {"gpus": GPUS, "cpu": 64_000, "memory": 512_000, "attempts": [], "n": self.now}
        self.store.machine_reports.report(machine, "boot", facts | more, self.now)


def measure() -> Iterator[Measured]:
    """Measure the cycles; the baseline is one with a new engine, as after a new policy document."""
    with (
        collecting_less(),
        TemporaryDirectory() as folder,
        closing(open_store(f"sqlite:///{folder}/makeway.sqlite")) as store,
    ):
        yield from asyncio.run(_measure(Site(store)))


async def _measure(site: Site) -> list[Measured]:
    await _warm_up(site)
    gc.collect()
    gc.freeze()
    try:
        cycles, steps = [], []
        for _ in range(2 * TIMES):
            site.end_a_job()
            cycle, step = await site.cycle()
            cycles.append(cycle)
            steps.append(step)
        added = {
            "nothing": await _added(site, lambda: None),
            "a back-off": await _added(site, site.refuse),
            "a boot": await _added(site, site.boot),
            "a join": await _added(site, site.join),
        }
        site.planner.restart()
        whole, _ = await site.cycle()
    finally:
        gc.unfreeze()
    base = "a cycle with a new engine"
    what = f"{MACHINES} machines, {JOBS} waiting jobs"
    note = (
        "Of one processor; 100 machines boot, which about 240 jobs wait for by nominations; the others are full, and "
        "each cycle has reasons and a job that ended."
    )
    return [
        Measured(f"a cycle with {what}", "ms", cycles, base, whole, goal=100.0, note=note, at_95=True),
        Measured(
            f"the step of the deployment after it, {what}",
            "ms",
            steps,
            base,
            whole,
            goal=100.0,
            note="With its database, a list of all instances, and what each waiting job can expect.",
            at_95=True,
        ),
        *(
            Measured(
                f"what {event} adds to cycle and step, {what}",
                "ms",
                samples,
                base,
                whole,
                goal=5.0,
                note="Beside those before and after it, the median of three times. This row is noise." * (at == 0),
            )
            for at, (event, samples) in enumerate(added.items())
        ),
    ]


async def _warm_up(site: Site) -> None:
    """Make the cycles in which all reasons are written for the first time."""
    for _ in range(6):
        await site.cycle()


async def _added(site: Site, event: Callable[[], None]) -> list[float]:
    """Return how much longer a cycle and its step take with an event than the ones before and after it on average."""
    result = []
    for _ in range(TIMES):
        added = []
        for _ in range(3):
            before = sum(await site.cycle())
            event()
            during = sum(await site.cycle())
            added.append(during - (before + sum(await site.cycle())) / 2)
        result.append(median(added))
    return result


def _node(machine: MachineStatus) -> NodeStatus:
    return NodeStatus(
        machine.name,
        machine.pool,
        tuple(range(machine.gpus)),
        cpu=machine.cpu,
        memory=machine.memory,
        ready=machine.condition != "lost",
        cordoned=machine.condition == "draining",
        backend=BACKEND,
    )


def _machine(number: int, ready: bool, now: float) -> Machine:
    at = now - (600 if ready else 10)  # boots take two minutes, and these are not late
    known = {"boot": "boot", "ready_at": at + 120, "heard_at": now, "attempts": 2} if ready else {}
    return Machine(
        id=f"m-{number:04}",
        deployment="cloud",
        pool="gpu",
        type="g8",
        zone="",
        market="on_demand",
        price=20_000_000,
        gpus=GPUS,
        request='{"init_script": "' + 500 * "x" + '"}',
        requested_at=at,
        state_since=at,
        state="ready" if ready else "booting",
        launch_calls=1,
        launch_called_at=at,
        instance=f"i-{number:04}",
        launched_at=at,
        needed_at=at,
    ).with_fields(**known)


def _policy() -> str:
    names = [f"team{at:02}" for at in range(TEAMS)]
    lines = ["version: 1", "pools: [{name: gpu, kind: autoscaled}]", "profiles:"]
    for gpus in (1, 2, 4, 8):
        lines.append(f"  - {{name: gpu{gpus}, title: {gpus} GPUs, gpus: {gpus}, policies: [[{', '.join(names)}]]}}")
    lines.append("policies:")
    lines += [f"  - {{name: {name}, groups: [{name}], quotas: [{{reserved: 160}}]}}" for name in names]
    return "\n".join(lines) + "\n"


def _running(machines: range, now: float) -> Iterator[Workload]:
    """Yield two jobs for each machine, which fill it."""
    for at in range(2 * len(machines)):
        first = at % 2 * GPUS // 2
        devices = tuple(range(first, first + GPUS // 2))
        place = Place(f"m-{machines[at // 2]:04}", devices, (1000,) * len(devices))
        state = {"state": "running", "attempt": 1, "started_at": now - 600, "placement": (place,)}
        yield changed(_job(f"r-{at:08x}", at, GPUS // 2, now - 700), state)


def _waiting(jobs: int, now: float) -> Iterator[Workload]:
    for at in range(jobs):
        yield _job(f"w-{at:08x}", at, (1, 2, 4, 8)[at // TEAMS % 4], now - 600 + at / 100)


def _job(id: str, at: int, gpus: int, submitted: float) -> Workload:
    new = NewWorkload(id, "job", f"team{at % TEAMS:02}", f"gpu{gpus}", f"user{at % 300}", gpus=1000 * gpus)
    return initial_record(new, submitted)
