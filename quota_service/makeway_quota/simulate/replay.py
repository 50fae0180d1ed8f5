"""Play a trace against a policy: observe, reconcile, plan, apply, on a clock that jumps to the next event."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..backends.base import AttemptStatus, Observation
from ..control import transitions
from ..control.change_set import ChangeSet
from ..control.decisions import change_set_of
from ..control.garbage import collecting_less
from ..control.reconcile import reconcile
from ..engine.plan import Demand, Plan
from ..engine.snapshot import GPU, Profile
from ..history.accounting import Accounting
from ..history.durations import Durations
from ..store.records import NewWorkload, Workload
from ..store.rows import initial_record
from .backend import SimulatedBackend, held
from .cluster import SimulatedCluster, profile_name
from .machines import MachineUse, SimulatedMachines
from .memory import MemoryStore
from .meter import HOLDING, Finished, Meter
from .planner import ReplayPlanner
from .trace import Arrival, TraceInvalid

MAX_PASSES = 20
"""Passes at one time until nothing changes any more."""
MAX_IDLE_SECONDS = 32 * 86_400.0
"""Seconds without any change of a job after which the replay ends though work waits for machines: more than a month,
after which a monthly budget begins anew"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result: the meter's numbers and all the work that was submitted.

    `gpus`: milli-GPUs of the nodes, and of the most machines of deployments at once; `machines`: what those were used
    for, by type.
    """

    name: str
    gpus: int
    meter: Meter
    began: float
    ended: float
    work: float
    """GPU-seconds of useful work"""
    passes: int = 0
    machines: tuple[MachineUse, ...] = ()
    still_waiting: int = 0
    """jobs that waited at the end, also those that ran and were evicted"""
    peak_machine_milli_gpus: int = 0
    """milli-GPUs of machines of deployments at once, at most"""

    @property
    def capacity(self) -> float:
        """Return the GPU-seconds of the nodes, and of the machines that were paid."""
        nodes = self.gpus - self.peak_machine_milli_gpus
        paid = sum(use.gpus * use.seconds for use in self.machines)
        return nodes / GPU * (self.ended - self.began) + paid


class Replay:
    """One trace on one cluster. `round_to`: events within so many seconds are decided together.

    `restart`: seconds that a job loads its checkpoint after an eviction. `boot`: seconds that machines of
    the cluster's deployments take from their launch until they are ready.
    """

    def __init__(
        self,
        cluster: SimulatedCluster,
        planner: ReplayPlanner,
        *,
        restart: float = 60.0,
        round_to: float = 1.0,
        durations: Durations | None = None,
        boot: float = 180.0,
    ) -> None:
        self.cluster = cluster
        self.planner = planner
        self.round_to = round_to
        self.profiles = {p.name: p for p in cluster.profiles}
        self.machines = SimulatedMachines(cluster.deployments, boot, durations) if cluster.deployments else None
        grace = max((p.grace for p in cluster.profiles if p.grace is not None), default=cluster.settings.grace)
        self.backend = SimulatedBackend(grace, restart)
        self.meter = Meter(cluster.reserved())
        self.store = MemoryStore(self._changed, durations)
        self.changed_ids: set[str] = set()
        """The workloads that changed since the last plan."""
        self.replan = False
        """Whether a new plan may differ from the last one."""
        self.passes = 0
        self.now = 0.0
        self._templates: dict[tuple[str, int, float | None], Workload] = {}
        self._withdraw_at: list[tuple[float, str]] = []
        """Heap of the times at which observed demand ends, and the id of its job."""
        self._reclaim_from: list[tuple[float, str]] = []
        """Heap of the times from which others may be evicted for a pending job (`reclaim_after`), and its id."""
        self.accounting = Accounting(lambda: self.now)
        self._demand: tuple[Demand, ...] = ()
        self._progress_at = 0.0
        self._pools = {node.name: node.pool for node in cluster.nodes}
        names, half_life = [pool.name for pool in cluster.pools], cluster.settings.history_half_life
        self.accounting.use(cluster.policies, names, half_life, self._held, ())

    def run(self, arrivals: Sequence[Arrival], progress: Callable[[float], None] | None = None) -> Outcome:
        """Play to the end: until everything that can run has run."""
        waiting, at = sorted(arrivals, key=lambda a: (a.submit, a.id)), 0
        began = self.now = self._progress_at = waiting[0].submit if waiting else 0.0
        while True:
            time = self._next(waiting[at].submit if at < len(waiting) else None)
            if time is None:
                break
            self.now = time
            self.meter.advance(time, self.gpus)
            self._step_machines()  # with what runs until now, so that machines were needed until now
            self._report(self.backend.over(time))
            self._withdraw()
            self._expire_reclaim_delays()
            while at < len(waiting) and waiting[at].submit <= time:
                self._submit(waiting[at])
                at += 1
            self._decide_and_step()
            if progress is not None:
                progress(at / len(waiting))
        return self._outcome(waiting, began)

    @property
    def gpus(self) -> int:
        """Return the milli-GPUs that are there now."""
        return self.cluster.gpus + (self.machines.gpus if self.machines else 0)

    def _outcome(self, arrivals: Sequence[Arrival], began: float) -> Outcome:
        waits = sum(row.state == "pending" for row in self.store.rows.values())
        ended = sum(a.gpus * a.duration for a in arrivals if a.until is None) - sum(
            work.remaining * work.arrival.gpus for work in self.backend.work.values() if work.arrival.until is None
        )
        machines = self.machines.uses(self.now) if self.machines else ()
        peak = self.machines.peak_milli_gpus if self.machines else 0
        total = self.cluster.gpus + peak
        return Outcome(
            self.cluster.name, total, self.meter, began, self.now, ended / GPU, self.passes, machines, waits, peak
        )

    def _next(self, arrival: float | None) -> float | None:
        heaps = (self._withdraw_at, self._reclaim_from)
        times = [t for t in (arrival, self.backend.next_at(), *(heap[0][0] for heap in heaps if heap)) if t is not None]
        if self.machines is not None and (step := self._next_step(self.machines, bool(times))) is not None:
            times.append(step)
        if not times:
            return None
        first = min(times)
        return max(self.now, -(-first // self.round_to) * self.round_to)

    def _next_step(self, machines: SimulatedMachines, others: bool) -> float | None:
        """Return when the machines' next step is due, None if it is the end. `others`: other events are to come."""
        waits = self.meter.any_waits
        at = machines.next_at(waits)
        last = self._progress_at + (MAX_IDLE_SECONDS if waits else machines.idle_seconds)
        return at if at is not None and (others or at <= last) else None

    def _decide_and_step(self) -> None:
        """Decide, and make the steps of the machines, until neither changes anything any more."""
        for _ in range(MAX_PASSES):
            self._decide()
            if not self._step_machines():
                break

    def _step_machines(self) -> bool:
        """Make the machines' step; return whether another plan may differ, which then is made of the nodes."""
        machines = self.machines
        if machines is None:
            return False
        demand = self._demand if self.meter.any_waits else ()
        moved = machines.step(self.now, demand, self.store.rows.values(), self.planner.snapshot)
        self._move_jobs(machines)
        changed, gone = machines.changed_nodes()
        if changed or gone:
            self.planner.show_nodes(changed, gone)
            self._pools.update({node.name: node.pool for node in changed})
        leaving = machines.leaving()
        for row in list(self.store.rows.values()) if leaving else ():
            if any(place.node in leaving for place in row.placement):
                self.backend.notice(row, self.now, machine_leaves=True)
        self.replan = self.replan or moved or bool(changed or gone)
        return moved

    def _move_jobs(self, machines: SimulatedMachines) -> None:
        """Notify jobs that are moved so that their machine can be given back."""
        change_set = machines.notices()
        for change in change_set.changes:
            self.backend.notice(self.store.rows[change.workload], self.now)
        self.meter.moves += len(change_set.changes)
        self._commit(change_set)

    def _submit(self, arrival: Arrival) -> None:
        template = self._template(arrival)
        if arrival.team not in self.meter.teams:
            raise TraceInvalid(f"Job {arrival.id} is of team {arrival.team}, which the policy does not have.")
        row = self.store.add_like(template, arrival.id, arrival.team, arrival.owner, now=arrival.submit)
        self.backend.submit(arrival)
        self.meter.submitted(row)
        self.changed_ids.add(row.id)
        self.replan = True
        if arrival.until is not None:
            heapq.heappush(self._withdraw_at, (arrival.until, arrival.id))
        if patience := self.profiles[row.profile].reclaim_delay("job") if row.profile in self.profiles else 0.0:
            heapq.heappush(self._reclaim_from, (arrival.submit + patience, arrival.id))

    def _expire_reclaim_delays(self) -> None:
        """Decide anew where others may be evicted from now on for jobs that still wait; forget those that do not."""
        while self._reclaim_from and (
            self._reclaim_from[0][0] <= self.now or not self._waits(self._reclaim_from[0][1])
        ):
            _, id = heapq.heappop(self._reclaim_from)
            self.replan = self.replan or self._waits(id)

    def _waits(self, id: str) -> bool:
        row = self.store.rows.get(id)
        return row is not None and row.state == "pending"

    def _template(self, arrival: Arrival) -> Workload:
        """Return the record that all jobs with the same request are copied from; made once."""
        request = arrival.profile, arrival.gpus, arrival.time_limit
        template = self._templates.get(request)
        if template is None:
            name = arrival.profile or profile_name(arrival.gpus)
            profile = self.profiles.get(name) or self._profile_of_size(arrival.gpus)
            if profile is None:
                raise TraceInvalid(f"Job {arrival.id} wants profile {name}, which the policy does not have.")
            template = self._templates[request] = initial_record(self._new(arrival, profile), 0.0)
        return template

    def _new(self, arrival: Arrival, profile: Profile) -> NewWorkload:
        grace = profile.grace if profile.grace is not None else self.cluster.settings.grace
        return NewWorkload(
            arrival.id,
            "job",
            arrival.team,
            profile.name,
            arrival.owner,
            gpus=profile.gpus,
            workers=profile.workers,
            min_workers=profile.min_workers,
            cpu=profile.cpu,
            memory=profile.memory,
            grace=grace,
            time_limit=arrival.time_limit,
        )

    def _profile_of_size(self, milli: int) -> Profile | None:
        return next((p for p in self.cluster.profiles if p.gpus * p.workers == milli), None)

    def _held(self, row: Workload) -> Iterator[tuple[str, int]]:
        return ((self._pools[place.node], row.gpus) for place in row.placement)

    def _withdraw(self) -> None:
        """Cancel the demand that was observed until now only."""
        change_set = ChangeSet()
        while self._withdraw_at and self._withdraw_at[0][0] <= self.now:
            _, id = heapq.heappop(self._withdraw_at)
            if (row := self.store.rows.get(id)) is not None:
                change_set.add(*transitions.withdraw(row, self.now))
        self._commit(change_set)

    def _report(self, over: list[AttemptStatus]) -> None:
        """Write to the store which attempts are over; starting and running count the same, so no start is reported."""
        if over:
            self._commit(reconcile(self.store.rows, Observation((), tuple(over)), now=self.now, max_infra_failures=0))

    def _decide(self) -> None:
        """Plan and apply until nothing changes any more; not at all while no job waits."""
        for _ in range(MAX_PASSES):
            if not self.replan or not self.meter.any_waits:
                break
            self.replan = False
            changed, self.changed_ids = self.changed_ids, set()
            if self.accounting.on:
                self.planner.show(self.accounting.policies())
            plan = self.planner.plan(self.now, self.store.rows, changed)
            self._demand = plan.demand
            self.passes += 1
            self._commit(change_set_of(plan, self.store.rows, now=self.now, lease_seconds=0.0))
            self._carry_out(plan)
            self.replan = bool(plan.evict or plan.move)
        self.replan = False

    def _carry_out(self, plan: Plan) -> None:
        for start in plan.start:
            self.backend.start(self.store.rows[start.id], self.now)
        for id in (*(evict.id for evict in plan.evict), *(move.id for move in plan.move)):
            row = self.store.rows[id]
            self.backend.notice(row, self.now)
            self.meter.made_way(row)

    def _commit(self, change_set: ChangeSet) -> None:
        if change_set.changes:
            self.store.commit(change_set.changes, change_set.decisions, now=self.now)

    def _changed(self, before: Workload, after: Workload) -> None:
        self.meter.changed(before, after)
        self.accounting.follow((after,))
        self.changed_ids.add(after.id)
        self.replan = self.replan or after.state not in HOLDING
        if before.state != after.state:
            self._progress_at = self.now
        if after.ended_at is not None:
            work = self.backend.forget(after.id)
            self.meter.lost += work.lost
            arrival = work.arrival
            if arrival.until is None:
                ended = after.ended_at
                delay = ended - arrival.submit - arrival.duration
                first = self.meter.started.pop(after.id, ended)
                done = Finished(after.id, arrival.team, held(before), arrival.submit, first, delay)
                self.meter.finished.append(done)
            else:
                self.meter.started.pop(after.id, None)


def replay(
    cluster: SimulatedCluster,
    arrivals: Iterable[Arrival],
    planner: ReplayPlanner,
    *,
    restart: float = 60.0,
    round_to: float = 1.0,
    durations: Durations | None = None,
    boot: float = 180.0,
    progress: Callable[[float], None] | None = None,
) -> Outcome:
    """Play a trace on a cluster, with decisions by `planner`; `durations` learns how long the jobs ran.

    `boot`: seconds that machines of deployments take from their launch until they are ready.
    """
    simulation = Replay(cluster, planner, restart=restart, round_to=round_to, durations=durations, boot=boot)
    with collecting_less():
        return simulation.run(list(arrivals), progress)
