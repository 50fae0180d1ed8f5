"""Answer whether jobs that leave their nodes would start elsewhere at once, by a plan in which they wait.

The plan has every rule that a start has to keep: static quotas, limits, capacities, closed queues, nodes that take no
work. Asked before jobs are moved so that their machine is given back.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from .incremental import IncrementalEngine
from .plan import Plan
from .snapshot import Snapshot, Workload


class Restarts:
    """Plans in which some jobs wait and their nodes are cordoned, each as if it were the only one. Not thread-safe."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._now = snapshot.now
        self._profiles = {profile.name: profile for profile in snapshot.profiles}
        self._workloads = {workload.id: workload for workload in snapshot.workloads}
        self._nodes = {node.name: node for node in snapshot.nodes}
        self._engine = IncrementalEngine(snapshot)
        self._engine.demand = False

    def elsewhere(self, nodes: Collection[str], ids: Collection[str]) -> frozenset[str] | None:
        """Return the other nodes on which all of some running jobs would start at once, each job on one node.

        None where one would wait, would start with fewer workers, is within its `min_runtime`, or is not preemptible,
        and where the plan evicts or moves any other work.
        """
        jobs = [self._workloads[id] for id in sorted(set(ids)) if id in self._workloads]
        left = [self._nodes[name] for name in nodes if name in self._nodes]
        if not jobs or len(jobs) < len(set(ids)) or len(left) < len(nodes) or not all(map(self._may_leave, jobs)):
            return None
        self._engine.change_nodes([replace(node, cordoned=True) for node in left])
        self._engine.change([_waiting(job, self._now) for job in jobs])
        try:
            return _started(self._engine.plan(self._now, why=False), jobs)
        finally:
            self._engine.change(jobs)
            self._engine.change_nodes(left)

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
        job, state="pending", started_at=None, placement=(), nomination=(), attempt=job.attempt + 1, earlier_runtime=ran
    )


def _started(plan: Plan, jobs: Sequence[Workload]) -> frozenset[str] | None:
    """Return the nodes on which a plan starts all of some jobs, as large as they are, without evicting any other."""
    if plan.evict or plan.move:
        return None
    started = {start.id: start.placement for start in plan.start}
    result = set[str]()
    for job in jobs:
        placement = started.get(job.id, ())
        nodes = {placed.node for placed in placement}
        if len(nodes) != 1 or len(placement) < len(job.placement):
            return None
        result |= nodes
    return frozenset(result)
