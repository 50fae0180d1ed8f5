"""Collect the decisions of one plan, and carry each out on the cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..placement.together import Search
from ..snapshot import Workload
from .state.cluster import Allocation, Cluster, WorkerPlacement
from .state.groups import WorkloadGroup
from .state.holds import Hold
from .state.placement import find
from .state.quota import allowed, in_quota
from .victims.moves import Rearrangement
from .victims.selection import Choice
from .victims.victims import Preemptor, Right, right_over


@dataclass(frozen=True, slots=True)
class Eviction:
    """An eviction, a move or a shrink of this plan: for which workload, by which right, and where it goes on."""

    preemptor: str
    right: Right | None
    to: tuple[WorkerPlacement, ...] = ()
    """Empty: it is stopped."""


class Decisions:
    """The plan so far. `count` grows with every decision."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.count = 0
        self.withdrawn_starts = 0
        """Starts of this plan that were withdrawn because another workload got their devices."""
        self.replaced: dict[str, set[str]] = {}
        """A workload whose start was withdrawn, to the workloads that evicted it."""
        self.started: dict[str, bool] = {}
        """Workload to whether it was in quota."""
        self.evicted: dict[str, Eviction] = {}
        self.nominated: dict[str, WorkloadGroup] = {}
        """Workloads that start as soon as their devices are free, in the order of the decisions."""
        self.awaiting: dict[str, WorkloadGroup] = {}
        """Workloads that are nominated to nodes which boot, until they are served again."""
        self.came_from: dict[str, WorkloadGroup] = {}
        self.ahead: dict[str, list[str]] = {}
        """Pool to the workloads that got its GPUs in this plan."""
        self.holds: dict[str, Hold] = {}
        self.search = Search()
        """The search for places without a victim of the plan; it is bounded over all of them."""

    def start(self, group: WorkloadGroup, workload: Workload, parts: Sequence[WorkerPlacement], in_quota: bool) -> None:
        """Start a workload now."""
        self.cluster.start(workload, parts)
        self.started[workload.id] = in_quota
        self.came_from[workload.id] = group
        self.ahead.setdefault(self.cluster.nodes[parts[0].node].pool, []).append(workload.id)
        self.count += 1

    def withdraw(self, workload: Workload) -> None:
        """Take a start of this plan back: a workload with a better right needs the devices."""
        pool = self.cluster.running.pop(workload.id).pool
        del self.started[workload.id]
        self.ahead[pool].remove(workload.id)
        self.count += 1

    def put_back(self, start: Allocation) -> None:
        """Withdraw a start of this plan; its workload waits again."""
        self.withdrawn_starts += 1
        self.withdraw(start.workload)
        self.came_from.pop(start.id).members.append(start.workload)

    def relocate(self, workload: Workload, parts: Sequence[WorkerPlacement]) -> None:
        """Move a victim to what this plan leaves free, instead of stopping it."""
        self.cluster.nominate(workload, parts)
        self.evicted[workload.id] = replace(self.evicted[workload.id], right=None, to=tuple(parts))
        self.count += 1

    def nominate(self, group: WorkloadGroup, workload: Workload, parts: Sequence[WorkerPlacement]) -> None:
        """Nominate devices of the future for a workload: it starts there once they are free."""
        self.cluster.nominate(workload, parts)
        self.nominated[workload.id] = group
        self.ahead.setdefault(self.cluster.nodes[parts[0].node].pool, []).append(workload.id)
        self.count += 1

    def await_nodes(self, group: WorkloadGroup, workload: Workload, parts: Sequence[WorkerPlacement]) -> None:
        """Nominate a workload to nodes that boot; no decision, as it is served again."""
        self.cluster.nominate(workload, parts)
        self.awaiting[workload.id] = group

    def serve_again(self) -> None:
        """Withdraw the nominations to nodes that boot: their workloads wait again."""
        for name, group in self.awaiting.items():
            group.members.append(self.cluster.nominations.pop(name).workload)
        self.awaiting = {}

    def drop_nomination(self, workload: Workload) -> tuple[WorkerPlacement, ...]:
        """Take a nomination off the cluster and return its parts."""
        held = self.cluster.nominations.pop(workload.id, None)
        return held.parts if held is not None else ()

    def evict(self, p: Preemptor, choice: Choice) -> tuple[WorkerPlacement, ...]:
        """Evict the victims of a preemptor; return where it then starts. Starts of this plan are withdrawn instead."""
        for member in choice.victims:
            victim = member.allocation
            if victim.fresh:
                self.put_back(victim)
                self.replaced.setdefault(victim.id, set()).add(p.workload.id)
                continue
            self.cluster.terminating.add(victim.id)
            parts = member.kept
            self.cluster.shrink(victim.workload, parts)
            self.evicted[victim.id] = Eviction(p.workload.id, right_over(p, victim), parts)
        self.count += 1
        return choice.parts

    def replaced_by(self, name: str) -> frozenset[str]:
        """Return the workloads that replaced a start of a workload in this plan, and those that replaced theirs."""
        workloads = set(self.replaced.get(name, ()))
        while more := {other for known in workloads for other in self.replaced.get(known, ())} - workloads:
            workloads |= more
        return frozenset(workloads)

    def move(self, workload: Workload, change: Rearrangement) -> bool:
        """Move jobs for a preemptor; return whether any runs. Starts of this plan are put elsewhere at once."""
        moves = []
        for allocation, to in change.moves:
            if allocation.fresh:
                in_quota = self.started[allocation.id]
                self.withdraw(allocation.workload)
                self.start(self.came_from[allocation.id], allocation.workload, to, in_quota)
            else:
                self.cluster.terminating.add(allocation.id)
                self.cluster.nominate(allocation.workload, to)
                moves.append((allocation, to))
        for allocation, to in moves:
            self.evicted[allocation.id] = Eviction(workload.id, None, to)
        self.count += bool(moves)
        return bool(moves)

    def widen(self, allocation: Allocation) -> Allocation:
        """Add workers to a gang that this plan started, as long as there is room and its quota admits them."""
        cluster, need, workload = self.cluster, replace(allocation.need, min_workers=1, workers=1), allocation.workload
        chain, pool = allocation.chain, allocation.pool
        borrows = not workload.non_preemptible and cluster.team(workload.team).weight != "None"
        while len(allocation.parts) < allocation.need.workers and allowed(cluster, chain, pool, need.gpus):
            if not borrows and not in_quota(cluster, chain, pool, need.gpus, workload.non_preemptible):
                break
            parts = find(cluster, pool, need)
            if not parts:
                break
            allocation = cluster.widen(allocation, parts[0]._replace(worker=len(allocation.parts)))
        return allocation
