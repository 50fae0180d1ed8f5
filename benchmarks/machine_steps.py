"""Measure a step of the autoscaler and what it reads, with a thousand machines and ten thousand waiting jobs."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from random import Random
from tempfile import TemporaryDirectory

from makeway_quota.autoscale.backoff import LaunchBackoff
from makeway_quota.autoscale.budget import Money
from makeway_quota.autoscale.demand import MachineDemand, PendingWork
from makeway_quota.autoscale.deployment import Deployment, MachineType
from makeway_quota.autoscale.instances import Instance, InstanceList
from makeway_quota.autoscale.machine import Machine, MachineEvent
from makeway_quota.autoscale.sizing import size
from makeway_quota.autoscale.step import MachineChanges, MachineRows, StepInput, StepLeader, step
from makeway_quota.control.machines.channel import MachineChannel
from makeway_quota.control.machines.placements import MachinePlacements
from makeway_quota.control.machines.tokens import MachineTokens
from makeway_quota.store import open_store
from makeway_quota.store.machines.machines import StoredMachines

from .measure import Measured

MACHINES = 1_000
JOBS = 10_000
STEPS = 20
NOW = 1_790_000_000.0


class FixedRows:
    """Rows that stay as they are, so that each step has the same to do; what a database costs is not measured."""

    def __init__(self, rows: MachineRows) -> None:
        self.rows = rows

    def read(self, deployment: str) -> MachineRows:
        """Return the rows."""
        return self.rows

    def commit(self, deployment: str, term: int, changes: MachineChanges) -> bool:
        """Accept the changes, and forget them."""
        return True


def measure() -> Iterator[Measured]:
    """Measure a step with everything to observe, and its sizing alone; the baseline is one pass over the jobs."""
    deployment, rows, seen = crowd()
    leader = StepLeader(1, lambda: "m-new", lambda: NOW)

    def one_step() -> float:
        gc.collect()
        return _timed(lambda: step(FixedRows(rows), deployment, seen, leader))

    demand = seen.demand
    assert demand is not None
    baseline = 1000 * min(_timed(lambda: [work.shape for work in demand.pending]) for _ in range(5))
    yield Measured(
        f"a step with {MACHINES} machines and {JOBS} waiting jobs",
        "ms",
        [1000 * one_step() for _ in range(STEPS)],
        "one pass over the waiting jobs",
        baseline,
        goal=100.0,
        note="A list of all instances, a report of every agent, and jobs of thousands of shapes; without the database.",
    )
    backoffs = (LaunchBackoff("g2", "a", "on_demand", "stock_out", 1, NOW, NOW + 300),)
    yield Measured(
        "the sizing after a launch was refused",
        "ms",
        [
            1000 * _timed(lambda: size(deployment, rows.machines, demand, backoffs, Money(0, 0, 0, 0), NOW))
            for _ in range(STEPS)
        ],
        "one pass over the waiting jobs",
        baseline,
        goal=100.0,
        note="A back-off goes over all waiting jobs again.",
    )
    yield from asyncio.run(_reads(rows.machines))


async def _reads(machines: tuple[Machine, ...]) -> list[Measured]:
    """Measure what each step and each observation of the nodes read, after one machine has changed."""
    with TemporaryDirectory() as folder, closing(open_store(f"sqlite:///{folder}/makeway.sqlite")) as store:
        term = store.take_term("benchmark", NOW)
        rows = tuple(replace(one, request='{"init_script": "' + 500 * "x" + '"}') for one in machines)
        store.machines.commit("cloud", term, MachineChanges(launched=rows))

        def change(at: int) -> None:
            [one] = [row for row in store.machines.live() if row.id == rows[at].id]
            store.machines.commit("cloud", term, MachineChanges(changed=(replace(one, needed_at=NOW + at),)))

        baseline = 1000 * min(_timed(StoredMachines(store._database).live) for _ in range(3))
        read, shown = [], []
        channel = MachineChannel(store, MachineTokens(b"0" * 32), MachinePlacements())
        await channel.refresh()
        for at in range(STEPS):
            change(at)
            began = time.perf_counter()
            store.machines.read("cloud")
            read.append(1000 * (time.perf_counter() - began))
            began = time.perf_counter()
            await channel.refresh()
            shown.append(1000 * (time.perf_counter() - began))
    what = f"of {MACHINES} machines, one of which has changed"
    return [
        Measured(f"reading the rows {what}", "ms", read, "reading all of them", baseline, goal=10.0),
        Measured(f"showing the nodes {what}", "ms", shown, "reading all of them", baseline, goal=10.0),
    ]


def crowd() -> tuple[Deployment, MachineRows, StepInput]:
    """Return a deployment at its maximum, of whose machines a quarter boots, and jobs of many shapes."""
    random = Random(1)
    machine_type = MachineType(
        "g2", "gpu", "big-2", gpus=2, cpu=16_000, memory=65_536, price=3_000_000, max_machines=MACHINES
    )
    deployment = Deployment(
        "cloud", "memory", (machine_type, replace(machine_type, name="g2-dear")), max_machines=MACHINES
    )
    machines = tuple(_machine(number) for number in range(MACHINES))
    pending = tuple(
        PendingWork(
            f"job-{number}",
            ("gpu",),
            workers=random.choice((1, 1, 1, 2, 4)),
            gpus=random.choice((250, 500, 1000, 2000)),
            cpu=500 * random.randint(1, 16),
            memory=1024 * random.randint(1, 64),
        )
        for number in range(JOBS)
    )
    ready = [one.id for one in machines if one.state == "ready"]
    demand = MachineDemand(pending, frozenset(ready), dict.fromkeys(ready, 1))
    listed = InstanceList(NOW, tuple(Instance(one.instance or "", one.id, "cloud") for one in machines))
    reports = tuple((one, MachineEvent("heard", at=NOW, boot="boot", attempts=1)) for one in ready)
    return deployment, MachineRows(machines), StepInput(NOW, NOW - 3600, demand, (listed,), reports)


def _machine(number: int) -> Machine:
    at = NOW - 60
    return Machine(
        id=f"m-{number:04}",
        deployment="cloud",
        pool="gpu",
        type="g2",
        zone="",
        market="on_demand",
        price=3_000_000,
        gpus=2,
        request="{}",
        requested_at=at,
        state_since=at,
        state="ready" if number % 4 else "booting",
        launch_calls=1,
        launch_called_at=at,
        instance=f"i-{number:04}",
        launched_at=at,
        boot="boot",
        ready_at=at,
        heard_at=at,
        attempts=1,
        needed_at=at,
    )


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
