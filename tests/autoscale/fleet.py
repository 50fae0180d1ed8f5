"""A deployment on the provider in memory, with a store in memory and a clock that a test sets."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from makeway_quota.autoscale.demand import MachineDemand, PendingWork, PlacedWork
from makeway_quota.autoscale.deployment import Deployment, MachineType
from makeway_quota.autoscale.instances import InstanceList
from makeway_quota.autoscale.machine import Machine, MachineEvent
from makeway_quota.autoscale.provider import ProviderError
from makeway_quota.autoscale.providers.memory import MemoryProvider
from makeway_quota.autoscale.step import StepInput, StepLeader, StepResult, cycle, step
from makeway_quota.simulate.memory import MemoryMachineStore

EURO = 1_000_000
START = 1_790_000_000.0
GPU_TYPE = MachineType(
    "g2", "gpu", "big-2", gpus=2, cpu=16_000, memory=65_536, zones=("a", "b"), price=3 * EURO, max_machines=5
)
CPU_TYPE = MachineType("c8", "cpu", "small-8", cpu=8_000, memory=32_768, zones=("a",), price=EURO // 2, max_machines=5)
CLOUD = Deployment("cloud", "memory", (GPU_TYPE, CPU_TYPE), hourly_budget=30 * EURO)


def gpu_work(name: str = "job-1", **fields: Any) -> PendingWork:
    return PendingWork(name, ("gpu",), **{"gpus": 2000, "cpu": 1000, "memory": 1024} | fields)


def cpu_work(name: str = "job-1", **fields: Any) -> PendingWork:
    return PendingWork(name, ("cpu",), **{"cpu": 8000, "memory": 1024} | fields)


def machine(**fields: Any) -> Machine:
    """Return a machine of the first type, requested at START."""
    return Machine(
        **{
            "id": "m-1", "deployment": "cloud", "pool": "gpu", "type": "g2", "zone": "a", "market": "on_demand",
            "price": 3 * EURO, "gpus": 2, "request": "{}", "requested_at": START, "state_since": START,
        } | fields
    )  # fmt: skip


@dataclass
class Fleet:
    """A deployment with its store and provider. `pending` and `busy` are what the next cycles are told of the work."""

    deployment: Deployment = CLOUD
    now: float = START
    pending: Sequence[PendingWork] = ()
    busy: dict[str, int] = field(default_factory=dict)
    nominated: frozenset[str] = frozenset()
    nodes: frozenset[str] | None = None
    """machines that the pending work was compared with; None: all that are ready"""
    store: MemoryMachineStore = field(default_factory=MemoryMachineStore)
    listening: float = START
    placed: Sequence[PlacedWork] = ()
    submitted: dict[str, float] = field(default_factory=dict)
    boots: dict[str, float] = field(default_factory=dict)
    sizes: dict[str, tuple[int, int]] = field(default_factory=dict)
    devices: dict[str, dict[int, int]] | None = None
    restartable: frozenset[str] | None = None
    """machines whose jobs would start elsewhere by the engine's rules; None: all"""
    moved_at: float | None = None
    reports: list[tuple[str, MachineEvent]] = field(default_factory=list)
    ids: Any = field(default_factory=lambda: itertools.count(1))

    def __post_init__(self) -> None:
        self.provider = MemoryProvider(lambda: self.now)

    def new_id(self) -> str:
        return f"m-{next(self.ids):04}"

    def seen(self, *, listed: bool = True, demand: bool = True) -> StepInput:
        lists: tuple[InstanceList, ...] = ()
        if listed:
            try:
                lists = (self.provider.list(self.deployment.name, self.now),)
            except ProviderError:
                lists = ()
        ready = frozenset(row.id for row in self.rows if row.state == "ready")
        nodes = ready if self.nodes is None else self.nodes
        work = MachineDemand(
            tuple(self.pending),
            nodes,
            dict(self.busy),
            self.nominated,
            tuple(self.placed),
            dict(self.submitted),
            dict(self.sizes),
            self.devices,
            frozenset(row.id for row in self.rows) if self.restartable is None else self.restartable,
        )
        reports, self.reports = tuple(self.reports), []
        return StepInput(
            self.now,
            self.listening,
            work if demand else None,
            lists,
            reports,
            boot_seconds=dict(self.boots),
            moved_at=self.moved_at,
        )

    def cycle(self, *, deleting: bool = False, **options: bool) -> StepResult:
        seen = self.seen(**options)
        return cycle(self.store, self.provider, self.deployment, seen, self.leader(), deleting=deleting)

    def change_leader(self) -> None:
        """Replace the leading process by one that knows nothing but the rows."""
        self.store.term += 1
        self.listening = self.now

    def leader(self, term: int | None = None) -> StepLeader:
        """Return the process that leads, or led in a term."""
        return StepLeader(self.store.term if term is None else term, self.new_id, lambda: self.now)

    def step(self, *, deleting: bool = False, **options: bool) -> StepResult:
        """Commit, and leave the calls to the caller."""
        return step(self.store, self.deployment, self.seen(**options), self.leader(), deleting=deleting)

    def run(self, seconds: float, every: float = 15.0, *, heartbeats: bool = True) -> None:
        """Pass time, a cycle at a time; with the reports of every agent."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + every)
            if heartbeats:
                self.hear()
            self.cycle()

    def hear(self) -> None:
        for row in self.rows:
            if row.boot is not None:
                self.report(row.id, "heard", at=self.now, boot=row.boot, attempts=self.busy.get(row.id, 0))

    def report(self, machine: str, kind: Any, **fields: Any) -> None:
        self.reports.append((machine, MachineEvent(kind, **fields)))

    def boot(self, *machines: str, gpus: int | None = None) -> None:
        """Make agents join and initialise, and their machines be ready."""
        for machine in machines or [row.id for row in self.rows if row.state in ("requested", "booting")]:
            row = self.store.rows[machine]
            self.report(machine, "joined", boot=f"boot-{machine}", at=self.now)
            self.report(
                machine, "initialised", boot=f"boot-{machine}", gpus=row.gpus if gpus is None else gpus, at=self.now
            )
        self.cycle()

    @property
    def rows(self) -> list[Machine]:
        return sorted(self.store.rows.values(), key=lambda row: row.id)

    @property
    def states(self) -> list[str]:
        return [row.state for row in self.rows]

    @property
    def running(self) -> int:
        return len(self.provider.running())


def one_ready(deployment: Deployment = CLOUD) -> Fleet:
    """Return a fleet with one idle machine that is ready, and nothing that waits."""
    fleet = Fleet(deployment, pending=[gpu_work()])
    fleet.cycle()
    fleet.boot()
    fleet.pending = []
    assert fleet.states == ["ready"]
    return fleet


def draining() -> Fleet:
    """Return a fleet with one machine that drains for idleness, and whose agent has not reported since."""
    fleet = one_ready()
    fleet.run(600)
    fleet.now += 15
    fleet.cycle()
    assert fleet.states == ["draining"]
    return fleet
