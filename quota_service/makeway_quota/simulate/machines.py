"""The machines of a simulation: the service's own steps on a provider in memory whose machines boot in a known time.

Nothing fails here: no machine is out of stock, none is taken back, all boots take equally long. What is launched, ended
and paid is decided by `autoscale`, as in the service.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from zoneinfo import ZoneInfo

from ..autoscale.budget import spent_by_month
from ..autoscale.deployment import Deployment, MachineType
from ..autoscale.machine import STARTING, Machine, MachineEvent
from ..autoscale.placement.shared_pools import OtherDeployment
from ..autoscale.providers.memory import MemoryProvider
from ..autoscale.step import StepInput, StepLeader, cycle
from ..backends.base import NodeStatus
from ..control.change_set import ChangeSet
from ..control.machines.booting_nodes import booting_node
from ..control.machines.cycle_demand import CycleDemand, JobFacts, cycle_demand
from ..control.machines.machine_notices import moving, notices
from ..control.machines.move_checks import CHECKS_PER_INTERVAL, MoveCheck, drain_candidates, restartable
from ..engine.plan import Demand
from ..engine.restarts import Restarts
from ..engine.snapshot import GPU, Node, Snapshot
from ..history.durations import Durations
from ..store.records import Workload
from .memory import MemoryMachineStore

SnapshotOf = Callable[[float, Iterable[Workload]], Snapshot]
MAX_STEP_INTERVAL = 300.0
"""Seconds between two steps at most while machines exist or work waits: schedules, age and budgets follow the clock"""
REPORT_INTERVAL = 10.0
"""Seconds from one report of an agent to the next"""
PERMANENT_REFUSALS = frozenset({"too_small", "price_unknown", "max_machines", "hour_budget", "paused"})
"""Reasons for launching no machine that do not pass with time, as long as no machine exists"""


@dataclass(frozen=True, slots=True)
class MachineUse:
    """The machines of one type over a simulation: how many there were, the most at once, their seconds and cost.

    `seconds`: of all machines in sum. `cost`: in millionths of the currency, None where the price is not known.
    """

    deployment: str
    type: str
    gpus: int
    machines: int
    peak_machines: int
    seconds: float
    cost: int | None
    currency: str


class SimulatedDeployment:
    """The machines of one deployment; `boot`: seconds from a launch until the machine is ready."""

    def __init__(self, deployment: Deployment, boot: float, ids: Iterator[int]) -> None:
        self.deployment = deployment
        self.types: Mapping[str, MachineType] = {machine_type.name: machine_type for machine_type in deployment.types}
        self.store = MemoryMachineStore()
        self.store.revision = deployment.revision
        self.now = 0.0
        self.unservable = False
        """whether nothing of what waits will ever get a machine, as far as the newest step knows"""
        self._boot_duration, self._ids = boot, ids
        self._boot_seconds = dict.fromkeys(self.types, boot)
        self._provider = MemoryProvider(lambda: self.now)
        self._leader = StepLeader(self.store.term, lambda: f"machine-{next(self._ids):06}", lambda: self.now)
        self._observing_since: float | None = None
        self._moved_at: float | None = None
        self._checked_moves_at = -math.inf
        self._with_work: frozenset[str] = frozenset()
        self._peaks = dict.fromkeys(self.types, 0)

    @property
    def machines(self) -> Iterable[Machine]:
        """Return the machines that have not ended."""
        return self.store.rows.values()

    def step(self, now: float, demand: CycleDemand, others: Iterable[SimulatedDeployment] = ()) -> bool:
        """Make a step and its calls; return whether machines are in other states, so that a plan may differ.

        `others`: the deployments that launch for the same pools.
        """
        self.now = now
        if self._observing_since is None:
            self._observing_since = self._moved_at = now
        moves = bool(demand.restartable) or any(row.drain == "move" for row in self.machines)
        work = demand.of(self.machines, moves=moves)
        reports = tuple(self._reports(demand))
        lists = (self._provider.list(self.deployment.name, now),)
        sharing = tuple(one.for_other_deployments() for one in others)
        seen = StepInput(
            now,
            self._observing_since,
            work,
            lists,
            reports,
            boot_seconds=self._boot_seconds,
            moved_at=self._moved_at,
            others=sharing,
        )
        result = cycle(self.store, self._provider, self.deployment, seen, self._leader)
        if result.drained_for_move is not None:
            self._moved_at = now
        self._with_work = frozenset(row.id for row in self.machines if work is None or work.has_work(row.id))
        codes = {one.code for one in result.refusals}
        self.unservable = bool(result.unserved) and codes <= PERMANENT_REFUSALS and not self.store.rows
        self._forget()
        for name in self.types:
            self._peaks[name] = max(self._peaks[name], sum(row.type == name for row in self.machines))
        return result.moved

    def for_other_deployments(self) -> OtherDeployment:
        """Return the machines as they are now, for the step of another deployment."""
        return OtherDeployment(self.deployment, tuple(self.machines), self._boot_seconds)

    def move_check(self, now: float) -> MoveCheck | None:
        """Return what the engine is to be asked about moves now, None for nothing."""
        return MoveCheck.of(self.deployment, self.machines, self._moved_at, now - self._checked_moves_at, now)

    def refused(self, now: float) -> None:
        """Note that the jobs of no machine start elsewhere."""
        self._checked_moves_at = now

    def _reports(self, demand: CycleDemand) -> Iterator[tuple[str, MachineEvent]]:
        """Yield what agents report: they join when their machine has booted, and then say what runs there."""
        for row in self.machines:
            boot = f"boot of {row.id}"
            if (
                row.state in STARTING
                and row.launched_at is not None
                and self.now >= row.launched_at + self._boot_duration
            ):
                yield row.id, MachineEvent("joined", at=self.now, boot=boot)
                yield row.id, MachineEvent("initialised", at=self.now, boot=boot, gpus=row.gpus)
            elif row.boot is not None:
                attempts = demand.busy.get(row.id, 0)
                yield row.id, MachineEvent("heard", at=self.now, boot=boot, attempts=attempts)

    def _forget(self) -> None:
        """Remove instances whose machine has ended from the provider, which lists all that it knows."""
        for instance in list(self._provider.instances.values()):
            if instance.machine in self.store.finished:
                del self._provider.instances[instance.id]

    def booting(self) -> Iterator[Node]:
        """Yield the machines that boot as nodes."""
        for row in self.machines:
            if row.state in STARTING:
                yield booting_node(
                    row, self.types[row.type], (row.launched_at or row.requested_at) + self._boot_duration
                )

    def next_at(self) -> Iterator[float]:
        """Yield the times at which a step changes something, if nothing else happens."""
        for row in self.machines:
            timeouts = self.deployment.timeouts(row.type)
            if row.state in STARTING:
                yield (row.launched_at or row.requested_at) + self._boot_duration
                yield max(self.now, row.needed_at + timeouts.unneeded) + 1
            elif row.state == "terminating":
                yield max(self.now, row.end_called_at or row.state_since) + self.deployment.poll_interval
            elif row.id not in self._with_work:
                if row.state == "draining":
                    yield max(self.now, row.state_since) + REPORT_INTERVAL
                elif row.needed_at + self.types[row.type].idle_timeout >= self.now:
                    yield row.needed_at + self.types[row.type].idle_timeout + 1
            if row.deadline is not None and row.deadline > self.now:
                yield row.deadline
        rules, last = self.deployment.moves, self._moved_at
        if rules is not None and last is not None and self.store.rows and last + rules.interval > self.now:
            yield last + rules.interval
        if rules is not None and (again := self._checked_moves_at + rules.interval / CHECKS_PER_INTERVAL) > self.now:
            yield again

    @property
    def idle_seconds(self) -> float:
        """Return the seconds after which a machine without work has ended, unless its document keeps it idle."""
        return (
            max(machine_type.idle_timeout for machine_type in self.types.values()) + 4 * self.deployment.poll_interval
        )

    def uses(self, now: float) -> Iterator[MachineUse]:
        """Yield what each type was used for until now."""
        zone = ZoneInfo(self.deployment.timezone)
        every = [row for row in self.store.all_machines().values() if row.state != "failed"]
        for machine_type in self.deployment.types:
            rows = [row for row in every if row.type == machine_type.name]
            ends = [(row, row.state_since if row.finished else now) for row in rows]
            unknown = any(row.price is None for row in rows) or (
                machine_type.price is None and machine_type.spot_price is None
            )
            cost = sum(sum(spent_by_month(row, end, zone).values()) for row, end in ends)
            seconds = sum(end - row.requested_at for row, end in ends)
            yield MachineUse(
                self.deployment.title or self.deployment.name,
                machine_type.name,
                0 if machine_type.cpu_only else machine_type.gpus,
                len(rows),
                self._peaks[machine_type.name],
                seconds,
                None if unknown else cost,
                self.deployment.currency,
            )


class SimulatedMachines:
    """The machines of all deployments, and the nodes that they are."""

    def __init__(self, deployments: Sequence[Deployment], boot: float, durations: Durations | None = None) -> None:
        ids = itertools.count(1)
        self.deployments = [SimulatedDeployment(one, boot, ids) for one in deployments]
        self._by_preference = sorted(self.deployments, key=lambda one: one.deployment.preference)
        self.nodes: dict[str, Node] = {}
        self._shown: dict[str, Node] = {}
        """`nodes` and the machines that boot, as the engine saw them last"""
        self.now = 0.0
        self._remaining = durations.remaining if durations is not None else _unknown
        self._cycle_demand: CycleDemand | None = None
        self.peak_milli_gpus = 0
        """the most milli-GPUs of machines at once"""

    @property
    def gpus(self) -> int:
        """Return the milli-GPUs of the machines that are nodes."""
        return sum(node.gpus for node in self.nodes.values()) * GPU

    def step(self, now: float, demand: Sequence[Demand], rows: Iterable[Workload], snapshot: SnapshotOf) -> bool:
        """Make a step of each deployment; return whether a plan may differ. `demand`: of the newest plan.

        `snapshot` returns that of a time with some workloads.
        """
        self.now = now
        known_rows = list(rows)
        placed = [_running(row) for row in known_rows if row.placement or row.nomination]
        submitted = {row.id: row.submitted_at for row in known_rows if row.state == "pending"} if demand else {}
        machines = {name: name for name in self.nodes}
        jobs = JobFacts(now, self._remaining, saves=True)
        known = cycle_demand(now, demand, self._statuses(), placed, machines, submitted, jobs)
        checks = {one: check for one in self.deployments if (check := one.move_check(now)) is not None}
        movable = drain_candidates(known, checks.values(), now)
        known = self._cycle_demand = restartable(
            known, movable, lambda: Restarts(snapshot(now, map(_running, known_rows)))
        )
        for one in checks:
            if (asked := movable.get(one.deployment.name)) and not any(row.id in known.restartable for row in asked):
                one.refused(now)
        moved = [one.step(now, known, self._sharing_pools(one)) for one in self._by_preference]
        return any(moved)

    def _sharing_pools(self, deployment: SimulatedDeployment) -> list[SimulatedDeployment]:
        """Return the other deployments that launch for the same pools."""
        pools = deployment.deployment.pools
        return [one for one in self.deployments if one is not deployment and one.deployment.pools & pools]

    def _statuses(self) -> dict[str, NodeStatus]:
        return {
            node.name: NodeStatus(node.name, node.pool, tuple(range(node.gpus)), cordoned=node.cordoned)
            for node in self.nodes.values()
        }

    def changed_nodes(self) -> tuple[list[Node], list[str]]:
        """Return the nodes that are new or different since the last call, and the names of those that are gone."""
        current = {
            row.id: _node(row, one.types[row.type])
            for one in self.deployments
            for row in one.machines
            if row.state in ("ready", "draining")
        }
        shown = {node.name: node for one in self.deployments for node in one.booting()} | current
        changed = [node for name, node in shown.items() if self._shown.get(name) != node]
        gone = [name for name in self._shown if name not in shown]
        self.nodes, self._shown = current, shown
        self.peak_milli_gpus = max(self.peak_milli_gpus, self.gpus)
        return changed, gone

    def notices(self) -> ChangeSet:
        """Return the notices of jobs that are moved, by what the newest step knew."""
        deployments = [one.deployment for one in self.deployments if one.deployment.moves is not None]
        rows = [row for one in self.deployments for row in one.machines]
        draining = [row for row in rows if row.drain == "move"]
        if not draining or self._cycle_demand is None:
            return ChangeSet()
        demand = {
            one.name: known for one in deployments if (known := self._cycle_demand.of((), moves=True)) is not None
        }
        return notices(
            draining, self._cycle_demand.rows, self._cycle_demand.machines, moving(deployments, rows, demand), self.now
        )

    def leaving(self) -> frozenset[str]:
        """Return the machines whose work has to go by a deadline."""
        machines = (row for one in self.deployments for row in one.machines)
        return frozenset(row.id for row in machines if row.state == "draining" and row.deadline is not None)

    def next_at(self, waits: bool) -> float | None:
        """Return when the next step is to be made; None if none changes anything any more."""
        live = any(one.store.rows for one in self.deployments)
        if not live and not (waits and not all(one.unservable for one in self.deployments)):
            return None
        return min([self.now + MAX_STEP_INTERVAL, *(at for one in self.deployments for at in one.next_at())])

    @property
    def idle_seconds(self) -> float:
        """Return the seconds after which a machine without work has ended, of the slowest deployment."""
        return max(one.idle_seconds for one in self.deployments)

    def uses(self, now: float) -> tuple[MachineUse, ...]:
        """Return what each type of each deployment was used for until now."""
        return tuple(use for one in self.deployments for use in one.uses(now))


def _unknown(row: Workload, now: float) -> float | None:
    return None


def _running(row: Workload) -> Workload:
    """Return a row as it is where jobs run: a simulation reports no start, as work begins with it."""
    return row._replace(state="running") if row.state == "starting" else row


def _node(machine: Machine, machine_type: MachineType) -> Node:
    gpus = 0 if machine_type.cpu_only else machine.gpus
    cordoned = machine.state == "draining"
    return Node(
        machine.id,
        machine.pool,
        gpus,
        machine_type.cpu,
        machine_type.memory,
        cordoned=cordoned,
        model=machine_type.model,
        sessions=False,
    )
