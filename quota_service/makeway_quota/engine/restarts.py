"""Answer whether jobs that leave their nodes would start elsewhere at once, by a plan in which they wait.

The plan has every rule that a start has to keep: static quotas, limits, capacities, closed queues, nodes that take no
work. Asked before jobs are moved so that their machine is given back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import cached_property

from .incremental import IncrementalEngine
from .plan import Plan
from .snapshot import Node, Snapshot, Workload


class Restarts:
    """Plans in which some jobs wait and their nodes are cordoned. Not thread-safe.

    What `leave` was called for waits in all later plans, too, and has to start as well.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self._now, self._snapshot = snapshot.now, snapshot
        self._profiles = {profile.name: profile for profile in snapshot.profiles}
        self._workloads = {workload.id: workload for workload in snapshot.workloads}
        self._nodes = {node.name: node for node in snapshot.nodes}
        self._engine = IncrementalEngine(snapshot)
        self._engine.demand = False
        self._leaving: dict[str, Workload] = {}

    def elsewhere(self, nodes: Collection[str], ids: Collection[str]) -> frozenset[str] | None:
        """Return the other nodes on which all of some running jobs would start at once, each job on one node.

        Those of the jobs that left before are among them. None where a job would wait, would start with fewer workers,
        is within its `min_runtime`, or is not preemptible, and where the plan evicts or moves work that would stay
        otherwise.
        """
        jobs = [self._workloads[id] for id in sorted(set(ids)) if id in self._workloads]
        left = [self._nodes[name] for name in nodes if name in self._nodes]
        if not jobs or len(jobs) < len(set(ids)) or len(left) < len(nodes) or not all(map(self._may_leave, jobs)):
            return None
        self._change(left, jobs)
        try:
            plan = self._engine.plan(self._now, why=False)
            if not _making_way(plan) or _making_way(plan) <= self._making_way_anyway:
                return _started(plan, [*jobs, *self._leaving.values()])
            return None
        finally:
            self._engine.change(jobs)
            self._engine.change_nodes(left)

    def leave(self, nodes: Collection[str], ids: Collection[str]) -> None:
        """Have some jobs wait in all later plans, and cordon their nodes; what the snapshot does not have is passed."""
        jobs = [self._workloads[id] for id in sorted(set(ids)) if id in self._workloads]
        self._change([self._nodes[name] for name in nodes if name in self._nodes], jobs)
        self._leaving |= {job.id: job for job in jobs}

    @cached_property
    def _making_way_anyway(self) -> frozenset[str]:
        """The work that the plan of the snapshot as it is evicts or moves."""
        engine = IncrementalEngine(self._snapshot)
        engine.demand = False
        return _making_way(engine.plan(self._now, why=False))

    def _change(self, nodes: Iterable[Node], jobs: Iterable[Workload]) -> None:
        self._engine.change_nodes([replace(node, cordoned=True) for node in nodes])
        self._engine.change([_waiting(job, self._now) for job in jobs])

    def _may_leave(self, job: Workload) -> bool:
        """Whether a job runs, can be stopped, and has run for as long as its profile protects it."""
        profile = self._profiles.get(job.profile)
        if profile is None or job.non_preemptible or job.state != "running" or job.started_at is None:
            return False
        return self._now - job.started_at >= profile.min_runtime


def _waiting(job: Workload, now: float) -> Workload:
    """Return a job as it waits after it was moved, at its place in the order."""
    ran = job.earlier_runtime + max(0.0, now - (now if job.started_at is None else job.started_at))
    return replace(
        job,
        state="pending",
        started_at=None,
        placement=(),
        nomination=(),
        evicted_for=None,
        deadline=None,
        attempt=job.attempt + 1,
        earlier_runtime=ran,
    )


def _making_way(plan: Plan) -> frozenset[str]:
    """Return the work that a plan evicts or moves."""
    return frozenset([one.id for one in plan.evict] + [one.id for one in plan.move])


def _started(plan: Plan, jobs: Sequence[Workload]) -> frozenset[str] | None:
    """Return the nodes on which a plan starts all of some jobs, as large as they are; None where one waits."""
    started = {start.id: start.placement for start in plan.start}
    result = set[str]()
    for job in jobs:
        placement = started.get(job.id, ())
        nodes = {placed.node for placed in placement}
        if len(nodes) != 1 or len(placement) < len(job.placement):
            return None
        result |= nodes
    return frozenset(result)
